"""Errors of users and of runs.

Every message about bad input carries four facts: what was wrong, the value received, what is
allowed, and the flag that changes it. `ConfigError` is for people; our own invariants are asserts.
"""

from __future__ import annotations

import functools


class ConfigError(ValueError):
    """The user asked for something that cannot be run. The program exits with code 2."""

    def __init__(self, what: str, *, value: object, allowed: str, flag: str) -> None:
        """Compose the message from its four facts, which stay readable as attributes.

        Args:
            what: What was wrong, as the start of a sentence without a full stop.
            value: The value received.
            allowed: What would have been accepted, with the nearest valid values where known.
            flag: The flag or flags that change it, e.g. ``--batch_size``.
        """
        super().__init__(f"{what}: got {value!r}; allowed: {allowed}; change it with {flag}.")
        self.what = what
        self.value = value
        self.allowed = allowed
        self.flag = flag

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Let the error travel between ranks: pickle cannot call keyword-only arguments itself."""
        facts = {"value": self.value, "allowed": self.allowed, "flag": self.flag}
        return functools.partial(ConfigError, **facts), (self.what,)


class RunError(RuntimeError):
    """A run that began well and cannot end well. The program exits with code 1.

    Attributes:
        status: The status that goes into the run's record, ``failed``, ``invalid`` or ``timeout``.
    """

    def __init__(self, reason: str, *, status: str = "failed") -> None:
        super().__init__(reason)
        self.status = status
