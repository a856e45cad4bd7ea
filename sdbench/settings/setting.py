"""`setting(...)` declares a setting: a dataclass field that holds everything the suite knows of it.

Flags, YAML keys, help, checks, presets, the ladder of speed-ups and the tests of their losses all
come from these declarations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, Protocol

from sdbench.base.errors import ConfigError
from sdbench.base.packages import INSTALL_ALL, is_installed
from sdbench.settings.kinds import SWITCH, Kind, OutOfBoundsError

REQUIRED = dataclasses.MISSING
SPEED = "speed-ups (each preset sets these; a flag overrides one of them)"

MLPERF = "NVIDIA's submissions to MLPerf Training"
CPU, GPU = "cpu", "cuda"
ANY_NUMBER = "N"

# What a run needs for a speed-up to have an effect.
RANKS = "several ranks"
EMA = "a moving average"
ENCODERS = "encoders in the step"
COMPILED = "something compiled"

# Relative differences of the losses of three steps from those of the plain recipe: sums in another
# order differ by fp32's rounding (6e-8 an operation), bf16 keeps 8 bits (4e-3 an operation,
# averaged over many), and bf16 weights lose most of an update unless a copy keeps it.
EXACT, SAME_FP32, BF16, BF16_WEIGHTS = 0.0, 2e-6, 2e-3, 2e-2


def in_words(value: Any) -> str:
    """A value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe_flags(settings: Mapping[str, Any]) -> str:
    """Settings as flags of a command line, e.g. ``--compile unet --cuda_graph``."""
    return " ".join(_as_flag(name, value) for name, value in settings.items())


def _as_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name} {value}"


class PerDevice(NamedTuple):
    """A preset's value that differs by device."""

    gpu: Any
    cpu: Any

    def __str__(self) -> str:
        return f"{in_words(self.gpu)} on a GPU, {in_words(self.cpu)} on a CPU"


def of_device(value: Any, *, on_gpu: bool) -> Any:
    """The value of a preset on a GPU or on a CPU."""
    if isinstance(value, PerDevice):
        return value.gpu if on_gpu else value.cpu
    return value


# Frozen, as the classes of settings are: a type checker lets no frozen field stand for one that may
# be written. Without match_args, which would be asked of those classes, too.
@dataclasses.dataclass(frozen=True, match_args=False)
class RuledSettings(Protocol):
    """What rules read of a program's settings beside their own; only what that program has."""

    buckets: str | None
    class_remote: str | None
    compile: str | None
    compile_mode: str | None
    cuda_graph: bool
    encoder_batch_size: int | str | None
    frozen_bits: str
    has_subject: bool
    height: int | None
    instance_prompt: str | None
    learned_token: str | None
    local: str | None
    lora_rank: int | None
    master_weights: str | None
    min_ray_workers: int | None
    num_ray_workers: int | None
    optimizer: str | None
    precision: str | None
    remote: str | None
    sharding: str | None
    step_has_encoders: bool
    train_text_encoder: bool
    trained_parts: tuple[str, ...]
    use_ema: bool
    width: int | None


@dataclasses.dataclass(frozen=True, match_args=False)
class RuledMachine(Protocol):
    """What rules read of a `Machine`."""

    device_type: str
    compute_capability: str | None
    cudnn_version: int | None

    @property
    def has_fast_bf16(self) -> bool:
        """`Machine.has_fast_bf16`."""

    def supported_precisions(self) -> tuple[str, ...]:
        """`Machine.supported_precisions`."""


@dataclasses.dataclass(frozen=True, match_args=False)
class RuledRanks(Protocol):
    """What rules read of `Ranks`."""

    world_size: int
    local_world_size: int

    @property
    def num_nodes(self) -> int:
        """`Ranks.num_nodes`."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """Input of a rule: the settings so far, the machine and the ranks."""

    config: RuledSettings
    machine: RuledMachine
    ranks: RuledRanks


class AllBut(tuple):
    """Contains every value except its elements."""

    def __contains__(self, value: object) -> bool:
        return not super().__contains__(value)


GIVEN = AllBut([None])
ON = (True,)


def on_gpu(situation: Situation) -> bool:
    """Whether the device is a GPU."""
    return situation.machine.device_type == GPU


def on_cpu(situation: Situation) -> bool:
    """Whether the device is a CPU."""
    return not on_gpu(situation)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What some values of a setting need; `sdbench.settings.rules` applies it.

    A forbidden value is an error if the user gave it; a preset's value is replaced, and the reason
    recorded.

    Attributes:
        is_met: Whether the values can be used here.
        problem: Why they cannot be used, as the first half of a sentence.
        instead: What replaces a preset's value; None: the value in the preset seed.
        allowed: What can be used instead; None: values that no rule forbids here, and `lifted_by`.
        others: Names of other settings that the error suggests to change.
        lifted_by: Values of other settings that meet the rule, by name.
        is_advice: The values work but gain nothing: a preset's is replaced, a user's stays.
        is_about_effect: The value changes nothing; that is an error only if the user asks for it.
    """

    values: Container[Any]
    is_met: Callable[[Situation], Any]
    problem: str
    instead: Any = None
    _: dataclasses.KW_ONLY
    allowed: str | None = None
    others: tuple[str, ...] = ()
    lifted_by: Mapping[str, Container[Any]] = dataclasses.field(default_factory=dict)
    is_advice: bool = False
    is_about_effect: bool = False


def only_with(values: Container[Any], problem: str, instead: Any = None, **others: Any) -> Rule:
    """A `Rule` that is met if other settings have one of the given values."""

    def is_met(situation: Situation) -> bool:
        return all(getattr(situation.config, name) in allowed for name, allowed in others.items())

    return Rule(values, is_met, problem, instead, lifted_by=others)


def needs_package(values: Container[Any], name: str, command: str = INSTALL_ALL) -> Rule:
    """A `Rule` that is met if a package is installed, which the command does."""
    return Rule(values, lambda _: is_installed(name), f"{name} is not installed ({command})")


class Beside(NamedTuple):
    """A condition for a setting to have an effect: one of other settings has a value.

    None stands for any value but the default. A program that lacks one of these settings has no
    such condition.
    """

    names: tuple[str, ...]
    value: Any = None


# Values that another setting, by its name, may have (`GIVEN`: any but None), and why.
Demands = Mapping[str, tuple[Container[Any], str]]


@dataclasses.dataclass(frozen=True)
class Rung:
    """A value of a speed-up as a step of the ladder: what it gains on top of the preset seed.

    Attributes:
        value: `ANY_NUMBER` stands for all of them.
        origin: Where it comes from, in public sources.
        loss_tolerance: Largest relative difference from the losses of the plain recipe. None if one
            rank on a CPU cannot show it; other tests then have their own.
        together: Other settings that belong to the same idea.
        needs: Settings that it requires.
    """

    value: Any
    origin: str
    loss_tolerance: float | None = None
    _: dataclasses.KW_ONLY
    devices: tuple[str, ...] = (CPU, GPU)
    together: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of a setting.

    Attributes:
        help: What it does; empty: the help does not list it.
        name: Name of the field and YAML key.
        group: Heading in the help; empty: argparse's own.
        default: None: chosen for the machine. `REQUIRED`: there is none.
        presets: Its value in each preset, by name; empty where presets leave it alone.
        rungs: Its steps of the ladder of speed-ups.
        demands: Values that other settings must have if this one is not at its default.
        acts_beside: Conditions for it to have an effect: all of these.
        acts_with: The kind of run in which a speed-up has an effect; None: any.
        only_measures: It decides how and how long to measure, or where to write, not what a step
            does.
        spelling: Its flag without the dashes, or its word in the usage, if that is not the name.
        is_positional: It is an argument without a flag.
        identifies: A resumed run must have the value that it started with.
        takes_several: It takes several values separated by blanks; its value is a tuple.
        bare: Its value if its flag stands alone; None: the flag needs a value.
        is_everyday: The --help of a program with many flags lists it.
        diffusers: Flags of diffusers' training scripts for the same; an error names ours.
    """

    kind: Kind
    help: str
    name: str = ""
    group: str = ""
    default: Any = None
    presets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    rungs: tuple[Rung, ...] = ()
    demands: Demands = dataclasses.field(default_factory=dict)
    acts_beside: tuple[Beside, ...] = ()
    acts_with: str | None = None
    only_measures: bool = False
    spelling: str | None = None
    is_positional: bool = False
    identifies: bool = False
    diffusers: tuple[str, ...] = ()
    takes_several: bool = False
    bare: Any = None
    is_everyday: bool = False

    @property
    def flag(self) -> str:
        """Its flag, or for a positional argument its word in the usage line."""
        if self.is_positional:
            return self.spelling or self.name.upper()
        return f"--{self.spelling or self.name}"

    @property
    def default_in_words(self) -> str:
        """Its default, or its value in each preset; empty where the program chooses."""
        if self.presets:
            return ", ".join(f"{name}: {in_words(value)}" for name, value in self.presets.items())
        is_told = self.default not in (None, REQUIRED, ())
        return f"default: {in_words(self.default)}" if is_told else ""

    def parse(self, value: Any) -> Any:
        """Bring a value to its kind, or refuse it."""
        if self.takes_several:
            return tuple(map(self._parse_one, value))
        return self._parse_one(value)

    def _parse_one(self, value: Any) -> Any:
        try:
            return self.kind.parse(value)
        except ConfigError:
            raise
        except OutOfBoundsError as error:
            what, allowed = "a number out of bounds", f"{self.kind.allowed}; {error}"
        except (TypeError, ValueError):
            meant = self.kind.nearest_choice(value)
            what = "a value that it does not take"
            allowed = self.kind.allowed + (f", the nearest is {meant}" if meant else "")
        raise ConfigError(f"{self.flag} has {what}", value=value, allowed=allowed, flag=self.flag)


def setting(kind: Kind, default: Any, help_text: str, **more: Any) -> Any:
    """Declare a setting as a field of a dataclass; `more` are other attributes of `Setting`."""
    declared = Setting(kind=kind, help=help_text, **more)
    return dataclasses.field(default=default, metadata={"setting": declared})


def speed_up(kind: Kind, help_text: str, *, seed: Any, fast: Any = None, **more: Any) -> Any:
    """Declare a setting that presets set; `fast` only where it differs from `seed`."""
    presets = {"fast": seed if fast is None else fast, "seed": seed}
    default = False if kind is SWITCH else None
    return setting(kind, default, help_text, presets=presets, **more)


@functools.cache
def declarations(config_type: type) -> dict[str, Setting]:
    """The settings of a dataclass by name, in order.

    Attributes of a class hold for all its settings: ``GROUP``, their heading in the help;
    ``ACTS_BESIDE``, their conditions; ``ONLY_MEASURES``; ``IDENTIFIES``.
    """
    found = {}
    for field in dataclasses.fields(config_type):
        declaring = next(
            base
            for base in reversed(config_type.__mro__)
            if field.name in getattr(base, "__dataclass_fields__", ())
        )
        declared, of_all = field.metadata["setting"], vars(declaring)
        found[field.name] = dataclasses.replace(
            declared,
            name=field.name,
            group=of_all.get("GROUP", ""),
            default=field.default,
            acts_beside=declared.acts_beside or of_all.get("ACTS_BESIDE", ()),
            only_measures=declared.only_measures or "ONLY_MEASURES" in of_all,
            identifies=declared.identifies or "IDENTIFIES" in of_all,
        )
    return found


def presets_of(settings: Mapping[str, Setting]) -> dict[str, dict[str, Any]]:
    """Presets by name, each with the values that it sets."""
    presets: dict[str, dict[str, Any]] = {}
    for declared in settings.values():
        for preset, value in declared.presets.items():
            presets.setdefault(preset, {})[declared.name] = value
    return presets


def shared(declaring: type, name: str, **changes: Any) -> Any:
    """The setting of another dataclass, with some attributes of `Setting` changed."""
    declared = dataclasses.replace(declarations(declaring)[name], **changes)
    return dataclasses.field(default=declared.default, metadata={"setting": declared})
