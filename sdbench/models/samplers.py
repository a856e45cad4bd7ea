"""The samplers of diffusers, and which of them can follow a noise schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.models.family import DDPM, FLOW, SAMPLE, kind_of
from sdbench.models.objective import TITLES, ZERO_TERMINAL_SNR_KEY

# The samplers by name, classes of diffusers, for each kind of objective; the first is the default.
# FlowMatchHeunDiscreteScheduler takes no times from outside, and Flux.1's pipeline gives them.
SAMPLERS = {
    DDPM: {
        "ddim": "DDIMScheduler",
        "pndm": "PNDMScheduler",
        "euler": "EulerDiscreteScheduler",
        "dpm": "DPMSolverMultistepScheduler",
    },
    FLOW: {"flow_euler": "FlowMatchEulerDiscreteScheduler"},
}
# Those that step from one time of the schedule to another; the others step between them too.
AT_TIMES = ("ddim", "pndm")


def sampler_names() -> list[str]:
    """The samplers of all kinds of objective."""
    return [name for samplers in SAMPLERS.values() for name in samplers]


def default_sampler(schedule: Mapping[str, Any]) -> str:
    """The sampler that draws by a noise schedule if nobody chooses another."""
    return next(iter(SAMPLERS[kind_of(schedule)]))


def check_sampler(name: str, schedule: Mapping[str, Any]) -> None:
    """Raise a ConfigError unless a sampler, one of `sampler_names`, can follow a noise schedule."""
    fitting = SAMPLERS[kind_of(schedule)]
    if name not in fitting:
        raise ConfigError(
            f"this sampler cannot draw by a model of {TITLES[kind_of(schedule)]}",
            value=name,
            allowed=" | ".join(fitting),
            flag="--scheduler",
        )
    predicts_sample = schedule.get("prediction_type") == SAMPLE
    if name == "pndm" and (predicts_sample or schedule.get(ZERO_TERMINAL_SNR_KEY)):
        kind = "that predicts the sample" if predicts_sample else "with zero terminal SNR"
        raise ConfigError(
            f"this sampler cannot draw by a model {kind}",
            value=name,
            allowed=" | ".join(other for other in fitting if other != name),
            flag="--scheduler",
        )


def check_num_steps(
    num_steps: int, *, sampler: str, schedule: Mapping[str, Any], flag: str
) -> None:
    """Raise a ConfigError for more steps of a sampler than the schedule has times for them."""
    largest = schedule.get("num_train_timesteps", 1000) - 1
    if sampler in AT_TIMES and num_steps > largest:
        raise ConfigError(
            f"each step of {sampler} is at a time of the schedule, which has {largest + 1}",
            value=num_steps,
            allowed=f"1 to {largest}",
            flag=flag,
        )
