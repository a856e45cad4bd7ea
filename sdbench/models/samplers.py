"""The samplers by name, and the noise schedules that each can follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.models.objective import SAMPLE, ZERO_TERMINAL_SNR_KEY

# Classes of diffusers.
SAMPLERS = {
    "ddim": "DDIMScheduler",
    "pndm": "PNDMScheduler",
    "euler": "EulerDiscreteScheduler",
    "dpm": "DPMSolverMultistepScheduler",
}


def check_sampler(name: str, schedule: Mapping[str, Any]) -> None:
    """Check that a sampler, a key of `SAMPLERS`, can follow the schedule of a diffusers scheduler.

    Raises:
        ConfigError: It supports neither prediction of the sample nor zero terminal SNR.
    """
    predicts_sample = schedule.get("prediction_type") == SAMPLE
    if name == "pndm" and (predicts_sample or schedule.get(ZERO_TERMINAL_SNR_KEY)):
        kind = "that predicts the sample" if predicts_sample else "with zero terminal SNR"
        raise ConfigError(
            f"this sampler cannot draw by a model {kind}",
            value=name,
            allowed=" | ".join(other for other in SAMPLERS if other != name),
            flag="--scheduler",
        )
