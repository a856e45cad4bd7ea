"""The samplers that draw pictures, by name, and which noise schedules each can follow."""

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
    """Check that a sampler can follow a noise schedule.

    Args:
        name: A key of `SAMPLERS`.
        schedule: Configuration of a scheduler of diffusers.

    Raises:
        ConfigError: It knows neither predictions of the sample nor zero terminal SNR.
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
