"""`Family`: what a kind of diffusion model is made of, without torch.

Each family has a folder of `sdbench/models/` with its description (a `Family`), its sizes as JSON
files, and its work in torch (a `Network`). No other module knows a family by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from sdbench.base.conditions import Captions, Condition
from sdbench.base.errors import ConfigError
from sdbench.models.latent_space import LatentSpace

if TYPE_CHECKING:
    from sdbench.models.network import Network

DIFFUSERS_STEM, TRANSFORMERS_STEM = "diffusion_pytorch_model", "model"
# Option of a pipeline of diffusers, and key of model_index.json.
ZEROS_KEY = "force_zeros_for_empty_prompt"
# Kinds of objectives, and the class of diffusers that reads the configuration of their schedule.
DDPM, FLOW = "ddpm", "flow"
PREDICTION_TYPES = EPSILON, VELOCITY, SAMPLE = ("epsilon", "v_prediction", "sample")
SCHEDULERS = {DDPM: "DDPMScheduler", FLOW: "FlowMatchEulerDiscreteScheduler"}
# What a configuration says of its class: a key and a value, by class of diffusers or transformers.
SAID_OF_CLASS = {
    "CLIPTextModel": ("model_type", "clip_text_model"),
    "CLIPTextModelWithProjection": ("model_type", "clip_text_model"),
    "T5EncoderModel": ("model_type", "t5"),
}
# A fact about the parts of a model folder: what it is, the value found, the values allowed.
Fact = tuple[str, Any, Iterable[Any]]


@dataclass(frozen=True, kw_only=True)
class FlowSettings:
    """How rectified flow is trained; the names are those of settings.

    Attributes:
        time_sampling: ``uniform`` or ``logit_normal``, the distribution of times before the shift.
        time_mean: Mean of the logit of a time that is logit-normal.
        time_std: Its standard deviation.
        time_shift: A number, 1 for none; or ``resolution``: that of Flux.1 for the image's size.
        flow_weighting: Of the squared error: ``none``, ``sigma_sqrt`` or ``cosmap``.
        guidance_embedding: The scale of guidance that a network with an input for it is told.
    """

    time_sampling: str = "uniform"
    time_mean: float = 0.0
    time_std: float = 1.0
    time_shift: float | str = 1.0
    flow_weighting: str = "none"
    guidance_embedding: float = 1.0


def kind_of(schedule: Mapping[str, Any]) -> str:
    """The kind of objective that the configuration of a scheduler of diffusers belongs to."""
    name = schedule.get("_class_name")
    if name is None:
        return FLOW if "shift" in schedule else DDPM
    if name.startswith("EDM"):
        return "EDM"  # of no family
    return FLOW if name.startswith("FlowMatch") else DDPM


class Configured(Protocol):
    """What a family reads of an `Architecture`."""

    @property
    def parts(self) -> Mapping[str, dict[str, Any]]:
        """The configuration of each part."""

    @property
    def latents(self) -> LatentSpace:
        """Between the VAE's latents and the denoiser's."""

    def clip_captions(self, tokenizer: str, *, name: str = ...) -> Captions:
        """The tokens of one of CLIP's tokenizers."""

    def t5_captions(self, tokenizer: str, *, name: str, num_tokens: int) -> Captions:
        """The tokens of one of T5's tokenizers."""


class Family:
    """A kind of diffusion model; a subclass for each, which sets these and overrides methods.

    Attributes:
        name: As in a record.
        title: For messages, with its article: ``a Stable Diffusion 1 or 2 model``.
        pipeline: The class of diffusers that draws with it.
        denoiser: The part that is trained, a key of `parts`.
        parts: Sub-models in the order of a model's modules: names as in a folder of diffusers, and
            classes of diffusers or transformers. The denoiser first, then ``vae``, then encoders.
        tokenizers: Their names in a folder, in the order of the encoders, and their kinds.
        objective: ``ddpm`` or ``flow``.
        flow: How its rectified flow is trained unless a run says otherwise.
        network: Place of its `Network`, as ``module:class``.
        latent_space: What its denoiser is trained on.
        optional: Parts and tokenizers that a model may lack.
        pipeline_options: Arguments of the pipeline's constructor beside parts and tokenizers.
        unsuitable: Values of settings that it cannot have, as `demands` of settings: allowed
            values and a reason, by setting.
        too_wide_for_fp16: Why an encoder cannot compute in fp16, as a sentence; None: it can.
        block_counts: Keys of the denoiser's configuration that say how many blocks of a kind it
            has; a built-in model may be taken with fewer.
        guidance_scale: Of classifier-free guidance, as its pipeline draws by default.
        tells_sizes: Whether it is told the sizes of each picture, `conditions.SIZES`.
        may_zero_empty_prompt: Whether its pipeline has the option `ZEROS_KEY`.
        is_default: Whether a folder of no known kind is checked as one of this family.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    pipeline: ClassVar[str]
    denoiser: ClassVar[str]
    parts: ClassVar[Mapping[str, str]]
    tokenizers: ClassVar[Mapping[str, str]]
    objective: ClassVar[str]
    flow: ClassVar[FlowSettings] = FlowSettings()
    network: ClassVar[str]
    latent_space: ClassVar[type[LatentSpace]] = LatentSpace
    optional: ClassVar[tuple[str, ...]] = ()
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    unsuitable: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}
    too_wide_for_fp16: ClassVar[str | None] = None
    block_counts: ClassVar[tuple[str, ...]] = ()
    guidance_scale: ClassVar[float] = 7.5
    tells_sizes: ClassVar[bool] = False
    may_zero_empty_prompt: ClassVar[bool] = False
    is_default: ClassVar[bool] = False

    @property
    def required_parts(self) -> tuple[str, ...]:
        """The parts that each model has."""
        return tuple(part for part in self.parts if part not in self.optional)

    @property
    def scheduler(self) -> str:
        """The class of diffusers that reads the configuration of its schedule."""
        return SCHEDULERS[self.objective]

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """The parts that encode captions, in order."""
        return tuple(part for part in self.parts if part not in (self.denoiser, "vae"))

    @property
    def config_files(self) -> dict[str, str]:
        """The JSON file of each part, the schedule and the tokenizers in a folder of diffusers."""
        files = {part: f"{part}/config.json" for part in self.parts}
        files["scheduler"] = "scheduler/scheduler_config.json"
        return files | {name: f"{name}/tokenizer_config.json" for name in self.tokenizers}

    def encoder_dtype(self, fast: str, *, has_bf16: bool) -> str:
        """The type of its encoders where `fast` is the smallest that is fast on a device."""
        if fast != "fp16" or self.too_wide_for_fp16 is None:
            return fast
        return "bf16" if has_bf16 else "fp32"

    def check_encoder_dtype(self, dtype: str | None, *, flag: str = "--encoder_dtype") -> None:
        """Raise a ConfigError unless its encoders can compute in a type; None is one that can."""
        if dtype == "fp16" and self.too_wide_for_fp16 is not None:
            raise ConfigError(
                self.too_wide_for_fp16,
                value=dtype,
                allowed=f"fp32 | bf16 with {self.title}",
                flag=flag,
            )

    def weights_stem(self, part: str) -> str:
        """The name of a part's file of weights, without its ending."""
        return TRANSFORMERS_STEM if part in self.text_encoders else DIFFUSERS_STEM

    def load_network(self) -> Network:
        """Import its work in torch."""
        return resolve_name(self.network)()

    def facts(self, configs: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Fact]:
        """What has to hold for the configurations in a folder."""
        facts: list[Fact] = []
        for part, class_name in self.parts.items():
            if part not in configs:  # an optional one
                continue
            key, wanted = SAID_OF_CLASS.get(class_name, ("_class_name", class_name))
            what = "type" if key == "model_type" else "class"
            facts.append((f"{part}'s {what}", configs[part].get(key), (wanted,)))
        # Other moments of latents, and other schedules, would be trained on wrongly.
        vae, schedule = configs["vae"], configs["scheduler"]
        facts += [
            (f"vae's {key}", vae.get(key), (None,)) for key in ("latents_mean", "latents_std")
        ]
        is_own = kind_of(schedule) == self.objective
        class_name = self.scheduler if is_own else schedule.get("_class_name")
        facts.append(("scheduler's class", class_name, (self.scheduler,)))
        if self.objective == DDPM:
            # Schedulers that were saved before the key existed mean "epsilon".
            prediction_type = schedule.get("prediction_type", "epsilon")
            facts.append(("prediction type", prediction_type, PREDICTION_TYPES))
        others = {path.name for path in folder.glob("text_encoder*")} - self.parts.keys()
        facts += [("further text encoder", name, (None,)) for name in sorted(others)]
        denoiser = configs[self.denoiser]
        read = [
            (f"{self.denoiser}'s {key}", denoiser.get(key), (width,))
            for key, (_, width) in self.widths(configs).items()
        ]
        return [*facts, *self.own_facts(configs), *read]

    def own_facts(self, configs: Mapping[str, Mapping[str, Any]]) -> list[Fact]:
        """What has to hold for this family beside the parts' kinds and `widths`."""
        return []

    def widths(self, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, Any]]:
        """The widths that the denoiser reads and gives, in words and numbers, by its own keys."""
        raise NotImplementedError

    def captions(self, architecture: Configured) -> tuple[Captions, ...]:
        """How captions become token ids, for each text encoder."""
        raise NotImplementedError

    def conditions(self, architecture: Configured) -> tuple[Condition, ...]:
        """The tensors of an encoded caption."""
        raise NotImplementedError

    def takes_guidance(self, architecture: Configured) -> bool:
        """Whether the denoiser is told a scale of guidance, as Flux.1 dev is."""
        return False

    def original_names(self, layers: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """The denoiser's layers by their names in the code of its authors, see `original_names`."""
        raise NotImplementedError

    def size_multiple(self, architecture: Configured) -> int:
        """The number of pixels that a side of a picture is a multiple of."""
        raise NotImplementedError

    def max_image_size(self, architecture: Configured) -> int | None:
        """The longest side of a picture in pixels; None: any."""
        return None

    def default_image_size(self, architecture: Configured) -> int:
        """Side in pixels that the denoiser was configured for, such as 64 latents x 8 = 512."""
        return architecture.parts[self.denoiser]["sample_size"] * architecture.latents.factor
