"""`Draft`: a plan whose open settings are being chosen; and `Plan`, that of a training run."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from sdbench import data
from sdbench.base.errors import ConfigError
from sdbench.base.shape import Shape
from sdbench.data.buckets import Buckets, Mixture, make_buckets, size_of_budget
from sdbench.data.source import VAE_FACTOR, SourceConfig
from sdbench.measure.hardware import Machine
from sdbench.models.architecture import Architecture
from sdbench.models.objective import Objective, check_objective
from sdbench.ranks.distributed import Ranks
from sdbench.settings.recipe import EngineConfig
from sdbench.settings.request import Request
from sdbench.settings.rules import settle
from sdbench.settings.setting import GPU

if TYPE_CHECKING:
    from typing import Self

    from sdbench.models.memory import MemoryEstimate


@dataclasses.dataclass(frozen=True, match_args=False)
class DraftSettings(data.PlaceSettings, Protocol):
    """What a draft of any task reads of its settings."""

    buckets: str | None
    bucket_step: int | None
    max_aspect_ratio: float
    small_pictures: str
    image_size: int | None


DraftT = TypeVar("DraftT", bound=DraftSettings, covariant=True)
EngineT = TypeVar("EngineT", bound=EngineConfig, covariant=True)


@dataclasses.dataclass
class Draft(Generic[DraftT]):
    """An unfinished plan of any task, for the machine and the rank of this process.

    Attributes:
        config: The request's config, with the values chosen so far.
        chosen: The reason for each setting that the program chose.
        notes: Sentences that the user has to read.
        architecture: The model, where the task has one.
        shapes: The buckets, where --buckets asks for them.
        mixture: The buckets that the data fill, once the data are known.
    """

    request: Request[DraftT]
    config: DraftT
    machine: Machine
    ranks: Ranks
    chosen: dict[str, str]
    notes: list[str]
    architecture: Architecture = dataclasses.field(init=False)
    shapes: Buckets | None = dataclasses.field(init=False, default=None)
    mixture: Mixture | None = dataclasses.field(init=False, default=None)

    @classmethod
    def begin(cls, request: Request[DraftT], *, machine: Machine, ranks: Ranks) -> Self:
        """Check a request by the rules of its settings, and begin a plan with it."""
        config, reasons = settle(request, machine=machine, ranks=ranks)
        return cls(request, config, machine, ranks, reasons, [*request.translation.notes])

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.machine.device_type == GPU

    def choose(self, name: str, value: Any, reason: str) -> None:
        """Set a setting that the user left open or set to ``auto``."""
        self.config = dataclasses.replace(self.config, **{name: value})
        self.chosen[name] = reason

    def choose_if_open(self, name: str, value: Any, reason: str) -> None:
        """Set a setting that is None."""
        if getattr(self.config, name) is None:
            self.choose(name, value, reason)

    def choose_shapes(
        self, architecture: Architecture | None, *, default_size: tuple[int | None, str]
    ) -> None:
        """Choose the size of the pictures and make the buckets, all such as the model can take.

        Without a model latents alone set bounds. `default_size` is the size with its reason.
        """
        size, multiple = size_of_budget(self.config.buckets), VAE_FACTOR
        if architecture is not None:
            multiple = architecture.family.size_multiple(architecture)
        if size is not None:
            size = max(size // multiple, 1) * multiple
            if self.request.is_users("image_size") and self.config.image_size != size:
                raise ConfigError(
                    "--buckets tells the sizes of the pictures",
                    value=self.config.image_size,
                    allowed="no --image_size, or --buckets auto",
                    flag="--image_size or --buckets",
                )
            self.choose("image_size", size, "the largest shape of --buckets")
        self.choose_if_open("image_size", *default_size)
        if architecture is not None:
            architecture.check_image_size(self.config.image_size)
        if self.config.buckets is not None:
            self.shapes = make_buckets(
                self.config, image_size=self.config.image_size, multiple=multiple
            )
            for shape in self.shapes.shapes if architecture is not None else ():
                architecture.check_shape(shape, flag="--buckets")

    def choose_format(self) -> None:
        """Choose the format of the data; refuse settings that contradict each other."""
        config = self.config
        data_format = data.resolve_format(config)
        if data_format != config.data_format:
            given = config.use_synth_data or config.remote or config.local
            given = given or getattr(config, "streams", None)
            reason = "from the data flags" if given else "neither --remote nor --local was given"
            self.choose("data_format", data_format, reason)


@dataclasses.dataclass
class Plan(Draft[EngineT]):
    """A planned run; no setting is open once `resolve` has returned it.

    Attributes:
        source: The data source of this rank.
        class_source: The source of pictures of a subject's class, or None.
        memory: Estimated peak memory of one rank.
        num_steps: Optimizer steps of the run, unless the measurement needs more.
        max_num_steps: Most optimizer steps that the measurement may need.
    """

    source: SourceConfig = dataclasses.field(init=False)
    class_source: SourceConfig | None = dataclasses.field(init=False)
    memory: MemoryEstimate = dataclasses.field(init=False)
    num_steps: int = dataclasses.field(init=False)
    max_num_steps: int = dataclasses.field(init=False)

    @property
    def name(self) -> str:
        """Name of the run as part of a file name, e.g. ``sd2-base-256px-fast``."""
        name = f"{self.architecture.name}-{self.config.image_size}px-{self.config.preset}"
        if self.config.has_subject:
            name += f"-{self.config.task}"
        return re.sub(r"[^A-Za-z0-9.-]+", "-", name)

    def suit_family(self) -> None:
        """Refuse settings that the model's family cannot have; choose others for its presets."""
        family = self.architecture.family
        takes_guidance = family.takes_guidance(self.architecture)
        check_objective(
            family.objective, self.config, takes_guidance=takes_guidance, flow=family.flow
        )
        changes = ("prediction_type", "zero_terminal_snr")
        schedule = {
            name: getattr(self.config, name) for name in changes if hasattr(self.config, name)
        }
        Objective(**schedule).schedule(self.architecture.parts["scheduler"])
        if self.config.step_has_encoders and self.request.is_users("encoder_dtype"):
            family.check_encoder_dtype(self.config.encoder_dtype)
        for name, (allowed, reason) in family.unsuitable.items():
            value = getattr(self.config, name, allowed[0])
            if value is None or value in allowed:
                continue
            if self.request.is_users(name):
                raise ConfigError(
                    reason,
                    value=value,
                    allowed=f"{' | '.join(map(str, allowed))} with {self.architecture.name}",
                    flag=f"--{name}",
                )
            self.choose(name, allowed[0], reason)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return the plan of the same run with other values; those that do not suit may go.

        Raises:
            ConfigError: They do not go with what the user gave, or with the machine.
        """
        request = self.request.changed(values)
        config, reasons = settle(request, machine=self.machine, ranks=self.ranks)
        is_open = {name for name, value in vars(config).items() if value in (None, "auto")}
        chosen = {name: getattr(self.config, name) for name in is_open & self.chosen.keys()}
        draft = copy.copy(self)
        draft.request, draft.config = request, dataclasses.replace(config, **chosen)
        draft.chosen, draft.notes = {**self.chosen, **reasons}, []
        draft.suit_family()
        draft.check_one_microbatch()
        return draft

    def check_one_microbatch(self) -> None:
        """Refuse --update_in_backward in steps of several micro-batches."""
        size, batch_size = self.config.device_train_microbatch_size, self.config.batch_size
        if self.config.update_in_backward and size < batch_size:
            raise ConfigError(
                "gradients of several micro-batches are added up before the update",
                value=f"micro-batches of {size} images, of {batch_size} in a step",
                allowed="one micro-batch in a step, or --no_update_in_backward",
                flag="--update_in_backward",
            )

    @property
    def largest_shape(self) -> Shape:
        """The shape of most pixels that a step may have, as far as is known."""
        if self.mixture is not None:
            return self.mixture.largest
        shapes = () if self.shapes is None else self.shapes.shapes
        shapes = shapes or (Shape.square(self.config.image_size),)
        return max(shapes, key=lambda shape: shape.num_pixels)
