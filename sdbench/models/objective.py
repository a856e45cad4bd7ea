"""The training objective, and the samplers that can follow its noise schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

# Keys of diffusers' schedulers.
ZERO_TERMINAL_SNR_KEY = "rescale_betas_zero_snr"
SPACING_KEY = "timestep_spacing"
PREDICTION_TYPES = EPSILON, VELOCITY, SAMPLE = ("epsilon", "v_prediction", "sample")
# The samplers by name, classes of diffusers.
SAMPLERS = {
    "ddim": "DDIMScheduler",
    "pndm": "PNDMScheduler",
    "euler": "EulerDiscreteScheduler",
    "dpm": "DPMSolverMultistepScheduler",
}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Changes of a training run to the objective of its model; by default none.

    Attributes:
        prediction_type: None: that of the model's schedule.
        min_snr_gamma: Limit of the signal-to-noise ratio in the weights of Hang et al. 2023 (arXiv
            2303.09556); None: every time step counts the same.
        offset_noise: Standard deviation of noise that is the same for all pixels of a channel,
            added to the noise of training.
        zero_terminal_snr: Shift and scale the schedule so that the last time step is pure noise,
            as Lin et al. 2023 (arXiv 2305.08891).
    """

    prediction_type: str | None = None
    min_snr_gamma: float | None = None
    offset_noise: float = 0.0
    zero_terminal_snr: bool = False

    def schedule(self, scheduler: Mapping[str, Any]) -> dict[str, Any]:
        """Apply the changes of this objective to the configuration of a scheduler of diffusers.

        A last time step of pure noise is a ConfigError, unless v is predicted.
        """
        config = dict(scheduler)
        if self.prediction_type is not None:
            config["prediction_type"] = self.prediction_type
        if self.zero_terminal_snr:
            config[ZERO_TERMINAL_SNR_KEY] = True
        if config.get(ZERO_TERMINAL_SNR_KEY):
            prediction_type = config.get("prediction_type", EPSILON)
            if prediction_type != VELOCITY:
                raise ConfigError(
                    "only v can be predicted when the last time step is pure noise",
                    value=prediction_type,
                    allowed=VELOCITY,
                    flag="--prediction_type or --zero_terminal_snr",
                )
            # With this spacing sampling begins at the last time step of training.
            config[SPACING_KEY] = "trailing"
        return config


PLAIN = Objective()


def min_snr_weights(signal_power: Tensor, *, gamma: float, prediction_type: str) -> Tensor:
    """Weights of the squared error at each time step.

    With SNR = p / (1 - p) the squared error of the latents has the weight min(SNR, gamma). The same
    error has min(SNR, gamma) / SNR in the noise and min(SNR, gamma) / (SNR + 1) in v, which is 0
    for pure noise. p is `signal_power`, the share of the signal in the power at each time step
    (diffusers' `alphas_cumprod`).
    """
    snr = signal_power / (1.0 - signal_power)
    divisors = {EPSILON: snr, VELOCITY: snr + 1.0, SAMPLE: 1.0}
    return snr.clamp(max=gamma) / divisors[prediction_type]


def check_sampler(name: str, schedule: Mapping[str, Any]) -> None:
    """Raise a ConfigError unless a sampler, a key of `SAMPLERS`, can follow a noise schedule."""
    predicts_sample = schedule.get("prediction_type") == SAMPLE
    if name == "pndm" and (predicts_sample or schedule.get(ZERO_TERMINAL_SNR_KEY)):
        kind = "that predicts the sample" if predicts_sample else "with zero terminal SNR"
        raise ConfigError(
            f"this sampler cannot draw by a model {kind}",
            value=name,
            allowed=" | ".join(other for other in SAMPLERS if other != name),
            flag="--scheduler",
        )
