"""Is --online_preprocessing refused where it cannot be, before anything is started?"""

from __future__ import annotations

import pytest

from sdbench.plan.resolve import resolve
from sdbench.ranks.distributed import ALONE
from sdbench.settings.config import parse_request
from tests.machines import make_cpu_machine, make_machine
from tests.refusals import refused

ONLINE = ("--online_preprocessing", "--engine", "ray")


def plan(*argv: str, machine=None):
    words = ["--model_name", "tiny", "--use_synth_data", *argv]
    request = parse_request(words, description="", epilog="")
    return resolve(request, machine=machine or make_cpu_machine(), ranks=ALONE)


@pytest.mark.parametrize(
    ("flag", "argv"),
    [
        ("--latents or --online_preprocessing", (*ONLINE, "--latents", "precomputed")),
        ("--num_workers or --online_preprocessing", (*ONLINE, "--num_workers", "2")),
        ("--compile", (*ONLINE, "--compile", "encoders")),
    ],
)
def test_refusals(flag, argv):
    with refused(flag):
        plan(*argv)


def test_a_step_has_no_encoders():
    argv = ("--device_train_microbatch_size", "1", "--batch_size", "2")
    beside, within = (
        plan(*argv, *more, machine=make_machine()) for more in (ONLINE, ("--engine", "ray"))
    )
    assert beside.memory.total_gib < within.memory.total_gib
    assert (beside.config.num_workers, within.config.num_workers) == (0, 8)
