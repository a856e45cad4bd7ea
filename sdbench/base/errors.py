"""Errors for people, with the exit code of each.

Every message about bad input carries four facts: what was wrong, the value received, what is
allowed, and the flag that changes it. `ConfigError` is for people; our own invariants are asserts.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterator

from sdbench.base.escape import without_controls

# A longer value is shown by its beginning and its end.
MAX_SHOWN = 400

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


class ConfigError(ValueError):
    """The user asked for something that cannot be run."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, what: str, *, value: object, allowed: str, flag: str) -> None:
        """Compose the message from its four facts, which are attributes too.

        `what` starts a sentence and has no full stop; `allowed` has the nearest valid values where
        they are known; `flag` may name several.
        """
        shown = repr(value)
        if len(shown) > MAX_SHOWN:
            shown = f"{shown[: MAX_SHOWN // 2]} ... {shown[-MAX_SHOWN // 2 :]}"
        message = f"{what}: got {shown}; allowed: {allowed}; change it with {flag}."
        super().__init__(without_controls(message))
        self.what = what
        self.value = value
        self.allowed = allowed
        self.flag = flag

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Let pickle, which sends errors between ranks, pass the keyword-only arguments."""
        facts = {"value": self.value, "allowed": self.allowed, "flag": self.flag}
        return functools.partial(type(self), **facts), (self.what,)


@contextlib.contextmanager
def blamed_on(flag: str, *, own: Collection[str] = ()) -> Iterator[None]:
    """Let errors of the block name this flag of a command in place of flags of training.

    An error that names only flags in `own`, which the command has too, stays as it is.
    """
    try:
        yield
    except ConfigError as error:
        named = set(re.findall(r"--\w+", error.flag))
        if not named or named <= set(own):
            raise
        raise ConfigError(error.what, value=error.value, allowed=error.allowed, flag=flag) from None


def add_remark(error: BaseException, remark: str) -> None:
    """Append a text to the reason that an error gives in the record."""
    error.remark = remark  # type: ignore[attr-defined]


def remark_of(error: BaseException) -> str:
    """The text that `add_remark` has added, or an empty one."""
    return getattr(error, "remark", "")


class RunError(RuntimeError):
    """A failure of a run that has begun: ``failed``, ``invalid`` or ``timeout`` in its record."""

    exit_code = EXIT_FAILED

    def __init__(self, reason: str, *, status: str = "failed") -> None:
        super().__init__(without_controls(reason))
        self.status = status


def first_line(error: BaseException) -> str:
    """The first line of an error that has text, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()
