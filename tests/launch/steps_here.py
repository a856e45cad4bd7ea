"""The steps of `sdbench dreambooth` in this process: others would only import once more."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sdbench.base.cause import VARIABLE
from sdbench.cli import main as sdbench
from sdbench.launch import child, dreambooth


def run_steps_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on steps are calls; the list gets what they were called with."""
    commands: list[str] = []

    def run(command: Sequence[str], *, folder: Path, **others: object) -> child.End:
        if "--print_config" in command:  # a plan, which is no step; of one rank here
            words = list(command)[list(command).index("sdbench") + 1 :]
            with contextlib.ExitStack() as stack:
                patch = stack.enter_context(monkeypatch.context())
                patch.setenv(VARIABLE, str(folder / child.CAUSE_NAME))
                if "RANK=0" in command:
                    patch.setenv("RANK", "0")
                stack.enter_context(contextlib.redirect_stdout(None))
                stack.enter_context(contextlib.redirect_stderr(None))
                return child.End(sdbench(words), 0.0, has_timed_out=False)
        python, arguments = command[:3], command[3:]
        assert python == [sys.executable, "-m", "sdbench"]
        commands.append(shlex.join(arguments))
        monkeypatch.setenv(VARIABLE, str(folder / child.CAUSE_NAME))
        return child.End(sdbench(arguments), 0.0, has_timed_out=False)

    for module in (child, dreambooth):
        monkeypatch.setattr(module, "run_guarded", run)
    return commands
