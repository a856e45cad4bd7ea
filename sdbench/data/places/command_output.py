"""`CommandOutput`: the output of a user's shell command, which fails if any part of it fails."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import tempfile

from sdbench.base.errors import RunError

PIPE = "pipe:"
# A command may work for minutes before it prints.
PIPE_SILENCE_TIMEOUT_S = 300.0


class CommandOutput(io.RawIOBase):
    """The output of a shell command as a stream; closing it kills a command that still runs."""

    def __init__(self, command: str) -> None:
        """Start `command`, a line for bash without the ``pipe:`` prefix."""
        self._name = repr(PIPE + command)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        # WebDataset's "pipe:" is a command line for the shell, given by the user. Without pipefail
        # a download that fails before a | would be taken for an empty file.
        shell = ["bash", "-o", "pipefail", "-c", command]
        # Its own session, so that `close` can kill everything that the shell starts.
        self._process = subprocess.Popen(
            shell, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
        )
        self._num_bytes = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Read available output, or wait for it; 0 bytes after the command has ended well.

        A command that fails, prints nothing, or is silent for `PIPE_SILENCE_TIMEOUT_S` is a
        `RunError`.
        """
        output = self._process.stdout.fileno()
        waiting = select.poll()
        waiting.register(output, select.POLLIN)
        if not waiting.poll(PIPE_SILENCE_TIMEOUT_S * 1000):
            self.close()
            raise RunError(f"{self._name} printed nothing for {PIPE_SILENCE_TIMEOUT_S:g} s.")
        num_bytes = os.readv(output, [buffer])
        self._num_bytes += num_bytes
        if not num_bytes:
            self._check_end()
        return num_bytes

    def _check_end(self) -> None:
        exit_code = self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")
        said = " ".join(errors.split())[-500:] or "no error message"
        if exit_code:
            raise RunError(f"{self._name} ended with exit code {exit_code}: {said}")
        if not self._num_bytes:
            raise RunError(f"{self._name} printed nothing: {said}")

    def close(self) -> None:
        """End the command and all that it has started, if it has not ended."""
        if not self.closed:
            if self._process.returncode is None:  # else its PID may be reused
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.stdout.close()
            self._process.wait()
            self._errors.close()
        super().close()
