"""The phases of the start-up add up to the time from the start of the process to the window."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from sdbench.measure import startup
from sdbench.measure.startup import StartupClock


def follow(*, num_warmup_steps: int) -> dict:
    """A run of 4 steps that began 3 s before its main, 1 s of them in the launcher."""
    moments_s = (100.0, 102.0, 102.5, 102.75, 110.0, 111.0, 114.0, 115.0, 117.0, 120.0)
    clock = StartupClock(
        before_main_s={"launcher": 1.0, "interpreter": 2.0}, clock=iter(moments_s).__next__
    )
    clock.ends(startup.IMPORTS)
    clock.ends(startup.PLAN)
    clock.ends(startup.IMPORTS)  # those of the engine
    clock.ends(startup.BUILD)
    clock.loop_begins()
    for index in range(4):
        clock.step_ends(index=index, phase="warmup", loss=lambda: 1.0, num_steps=9)
    return clock.summary(num_warmup_steps=num_warmup_steps)


@pytest.mark.parametrize(
    ("num_warmup_steps", "first_step_s", "warmup_s"), [(0, 0, 0), (1, 3, 0), (3, 3, 3), (4, 3, 6)]
)
def test_each_moment_belongs_to_one_phase(num_warmup_steps, first_step_s, warmup_s) -> None:
    """What is warm-up is decided at the end."""
    result = follow(num_warmup_steps=num_warmup_steps)
    assert result["seconds"] == {
        "launcher": 1.0,
        "interpreter": 2.0,
        "imports": 2.25,
        "plan": 0.5,
        "peak": 0.0,
        "build": 7.25,
        "engine": 1.0,
        "first_step": first_step_s,
        "warmup": warmup_s,
    }
    assert result["total_s"] == 14.0 + first_step_s + warmup_s


CHILD = (
    "import time; time.sleep(0.3); from sdbench.measure.startup import seconds_before_now as f; "
    "print(f())"
)
LAUNCHER = f"""import subprocess, sys, time
time.sleep(0.5)
subprocess.run([sys.executable, "-c", "{CHILD}"], check=True)
"""


def test_process_and_launcher_count_from_their_own_start(repository, tmp_path) -> None:
    launcher = tmp_path / "torchrun"
    launcher.write_text(LAUNCHER)
    for arguments, (least_s, most_s) in ((["-c", CHILD], (0, 0)), ([launcher], (0.5, 10))):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
        before = eval(done.stdout)
        assert least_s <= before["launcher"] <= most_s and 0.3 <= before["interpreter"] < 10


def test_compilation_is_counted_forward_and_backward() -> None:
    import torch

    seconds = [startup.compile_seconds()]
    compiled = torch.compile(lambda x: (x * x).sin().sum(), backend="aot_eager")
    loss = compiled(torch.ones(3, requires_grad=True))
    seconds.append(startup.compile_seconds())
    loss.backward()
    seconds.append(startup.compile_seconds())
    compiled(torch.ones(3, requires_grad=True)).backward()
    seconds.append(startup.compile_seconds())
    differences = [later - earlier for earlier, later in itertools.pairwise(seconds)]
    assert differences[0] > 0 and differences[1] > 0 and differences[2] == 0
