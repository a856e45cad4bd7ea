"""`Objective`: what a training changes of the noise schedule and the loss of its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import ConfigError
from sdbench.models.family import DDPM, EPSILON, FLOW, SAMPLE, VELOCITY, FlowSettings

if TYPE_CHECKING:
    from torch import Tensor

# Keys of diffusers' schedulers.
ZERO_TERMINAL_SNR_KEY = "rescale_betas_zero_snr"
SPACING_KEY = "timestep_spacing"
# Values of settings of rectified flow.
LOGIT_NORMAL, BY_RESOLUTION = "logit_normal", "resolution"
NO_WEIGHTING, COSMAP = "none", "cosmap"
# Settings of train.py that change one kind of objective, with their values that change nothing.
CHANGES: dict[str, dict[str, Any]] = {
    DDPM: {
        "prediction_type": None,
        "min_snr_gamma": None,
        "noise_offset": 0.0,
        "zero_terminal_snr": False,
    },
    FLOW: {field.name: None for field in dataclasses.fields(FlowSettings)},
}
TITLES = {DDPM: "a schedule of noise (DDPM)", FLOW: "rectified flow"}


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
        time_sampling: This and the next ones are as in `FlowSettings`; None: the family's own.
        time_mean: See there.
        time_std: See there.
        time_shift: See there.
        flow_weighting: See there.
        guidance_embedding: See there.
    """

    prediction_type: str | None = None
    min_snr_gamma: float | None = None
    offset_noise: float = 0.0
    zero_terminal_snr: bool = False
    time_sampling: str | None = None
    time_mean: float | None = None
    time_std: float | None = None
    time_shift: float | str | None = None
    flow_weighting: str | None = None
    guidance_embedding: float | None = None

    def flow_settings(self, own: FlowSettings) -> FlowSettings:
        """Apply the changes of this objective to a family's own choice."""
        values = {name: getattr(self, name) for name in CHANGES[FLOW]}
        given = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(own, **given)

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


def check_objective(
    kind: str, config: object, *, takes_guidance: bool = False, flow: FlowSettings | None = None
) -> None:
    """Raise a ConfigError if settings change what a model's objective does not have.

    `kind` is ``family.DDPM`` or ``family.FLOW``. `takes_guidance` says whether the network is told
    a scale of guidance, and `flow` is the family's own choice. Settings that `config` lacks are
    not checked.
    """
    (other,) = CHANGES.keys() - {kind}
    for name, unchanged in CHANGES[other].items():
        value = getattr(config, name, unchanged)
        if value != unchanged:
            raise ConfigError(
                f"this setting is for {TITLES[other]}, and the model is trained by {TITLES[kind]}",
                value=value,
                allowed=f"no --{name}, or only with a model of {TITLES[other]}",
                flag=f"--{name} or --model_name",
            )
    sampling = getattr(config, "time_sampling", None) or (flow or FlowSettings()).time_sampling
    for name in ("time_mean", "time_std") if kind == FLOW and sampling != LOGIT_NORMAL else ():
        value = getattr(config, name, None)
        if value is not None:
            raise ConfigError(
                f"times that are {sampling} have no such number",
                value=value,
                allowed=f"no --{name}, or --time_sampling {LOGIT_NORMAL}",
                flag=f"--{name} or --time_sampling",
            )
    guidance = getattr(config, "guidance_embedding", None)
    if guidance is not None and not takes_guidance:
        raise ConfigError(
            "the model is not told a scale of guidance",
            value=guidance,
            allowed="no --guidance_embedding, or only with a model like Flux.1 dev",
            flag="--guidance_embedding or --model_name",
        )
