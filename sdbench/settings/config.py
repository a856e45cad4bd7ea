"""What can a user ask for, and how do defaults, preset, file and flags become one frozen config?

Precedence: defaults < preset < `--config` file < flags. A field that is still None after that is
one that the program chooses for the machine it is on (sdbench/plan/resolve.py), prints and records.
The table of fields is the single source of flags, help, YAML keys and checks.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.settings.presets import PRESETS

MEASURES = "what is measured"
MODEL = "model"
BATCH = "batch"
DATA = "data"
TRAINING = "training"
SPEED = "speed-ups (each preset sets these; a flag overrides one of them)"
LOGGING = "Weights & Biases (off unless a flag is given)"


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the text of a flag or the value of a YAML key becomes a Python value.

    Attributes:
        allowed: What is accepted, in words, for errors and help.
        parse: Turns the received value into the field's value, or raises ValueError or TypeError.
    """

    allowed: str
    parse: Callable[[Any], Any]


def _whole_number(minimum: int) -> Kind:
    def parse(value: Any) -> int:
        if isinstance(value, bool | float):
            raise ValueError
        number = int(value)
        if number < minimum:
            raise ValueError
        return number

    return Kind(f"a whole number of at least {minimum}", parse)


def _number(*, zero_allowed: bool) -> Kind:
    def parse(value: Any) -> float:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if not (0 < number < float("inf") or (zero_allowed and number == 0)):
            raise ValueError
        return number

    return Kind("a number of at least 0" if zero_allowed else "a number above 0", parse)


def _one_of(*choices: str) -> Kind:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError
        return value

    return Kind(" | ".join(choices), parse)


def _parse_fraction(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not 0 <= number <= 1:
        raise ValueError
    return number


def _parse_conditions(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        import yaml

        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError from None
    if not isinstance(value, dict):
        raise ValueError
    return {str(name): str(condition) for name, condition in value.items()}


def _parse_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _parse_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _parse_microbatch(value: Any) -> int | str:
    return value if value == "auto" else POSITIVE.parse(value)


def _parse_encoder_batch(value: Any) -> int | str:
    return value if value == "microbatch" else POSITIVE.parse(value)


def _parse_precision_target(value: Any) -> float:
    is_percent = isinstance(value, str) and value.endswith("%")
    number = float(value.removesuffix("%")) / 100 if is_percent else float(value)
    if isinstance(value, bool) or not 0 < number < 1:
        raise ValueError
    return number


def _parse_duration(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[1-9][0-9]*(ba|ep)", value):
        raise ValueError
    return value


POSITIVE = _whole_number(1)
NOT_NEGATIVE = _whole_number(0)
TEXT = Kind("a text", _parse_text)
SWITCH = Kind("true | false", _parse_switch)
SECONDS = Kind("a number of seconds above 0", _number(zero_allowed=False).parse)
FRACTION = Kind("a number from 0 to 1", _parse_fraction)
CONDITIONS = Kind(
    'fields and conditions, e.g. {pwatermark: "<=0.5", original_width: ">=512"}',
    _parse_conditions,
)
MICROBATCH = Kind("auto, or a whole number of at least 1", _parse_microbatch)
ENCODER_BATCH = Kind("microbatch, or a whole number of at least 1", _parse_encoder_batch)
PRECISION_TARGET = Kind("a share above 0, e.g. 1% or 0.01", _parse_precision_target)
DURATION = Kind("a number of batches or epochs, e.g. 48ba or 5ep", _parse_duration)


def _field(group: str, kind: Kind, default: Any, help_text: str) -> Any:
    return dataclasses.field(
        default=default, metadata={"group": group, "kind": kind, "help": help_text}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Everything that decides a run. None means: chosen for the machine, then printed."""

    preset: str = _field(
        MEASURES,
        _one_of(*PRESETS),
        "fast",
        "recipe that sets the speed-ups: fast, or seed (repeats mosaicml/diffusion-benchmark)",
    )
    engine: str = _field(
        MEASURES,
        _one_of("composer", "torch"),
        "composer",
        "who runs the training loop: MosaicML Composer, or a lean loop without a trainer",
    )
    warmup_batches: int | None = _field(
        MEASURES, NOT_NEGATIVE, None, "batches trained before the measured window"
    )
    measure_batches: int | None = _field(
        MEASURES, POSITIVE, None, "batches in the measured window; below 10 there is no interval"
    )
    max_warmup_batches: int | None = _field(
        MEASURES,
        NOT_NEGATIVE,
        None,
        "while the step time still drifts, measured batches become warm-up and others are "
        "measured, until so many are warm-up (default: two more windows)",
    )
    target_precision: float | None = _field(
        MEASURES,
        PRECISION_TARGET,
        None,
        "double the measured window until the 95 % interval is within so much of the rate",
    )
    max_measure_batches: int | None = _field(
        MEASURES,
        POSITIVE,
        None,
        "longest window for --target_precision (default: 16 times --measure_batches)",
    )
    profile_batches: int | None = _field(
        MEASURES,
        NOT_NEGATIVE,
        None,
        "batches behind the window whose time is split into phases; 0: no breakdown",
    )
    profile_trace: bool = _field(
        MEASURES, SWITCH, False, "train one more batch and write torch's trace of it, trace.json.gz"
    )
    measure_peak: bool = _field(
        MEASURES, SWITCH, True, "time a large matrix product before the run, for MFU against it"
    )
    max_duration: str | None = _field(
        MEASURES,
        DURATION,
        None,
        "end of the run, e.g. 48ba or 5ep; warm-up, window and profile lie inside it "
        "(default: it ends with them)",
    )
    seed: int = _field(MEASURES, NOT_NEGATIVE, 17, "seed of weights, data and noise")
    dist_timeout: float = _field(
        MEASURES,
        SECONDS,
        600.0,
        "seconds after which a rank that does not come or falls silent ends the run on all ranks",
    )
    results_dir: str = _field(MEASURES, TEXT, "runs", "folder that gets one folder per run")
    check_memory: bool = _field(
        MEASURES, SWITCH, True, "refuse a run whose estimated peak memory the machine lacks"
    )

    model_name: str = _field(
        MODEL,
        TEXT,
        "sd2-base",
        "built-in architecture with random weights (sd2-base, sd2-768-v, sd1-base, small, tiny), "
        "a local diffusers folder, or a hub id",
    )
    model_revision: str | None = _field(
        MODEL, TEXT, None, "branch, tag or commit of a hub id; the commit is recorded"
    )
    random_weights: bool = _field(
        MODEL, SWITCH, False, "draw the weights of a folder or hub id instead of loading them"
    )
    image_size: int | None = _field(MODEL, POSITIVE, None, "side of the square images in pixels")
    weights_seed: int | None = _field(
        MODEL, NOT_NEGATIVE, None, "seed of random weights alone (default: --seed)"
    )

    batch_size: int | None = _field(
        BATCH, POSITIVE, None, "global batch: images per optimizer step over all ranks"
    )
    device_train_microbatch_size: int | str = _field(
        BATCH,
        MICROBATCH,
        "auto",
        "images per forward and backward pass on one rank; auto: the largest that the memory "
        "estimate allows",
    )
    allow_uneven_batch: bool = _field(
        BATCH,
        SWITCH,
        False,
        "cut a global batch down to what the ranks can share evenly, and let the last micro-batch "
        "of a step be smaller; without it both are refused",
    )

    use_synth_data: bool = _field(DATA, SWITCH, False, "train on synthetic samples")
    data_format: str = _field(
        DATA,
        _one_of("auto", "synthetic", "mds", "webdataset", "parquet", "folder"),
        "auto",
        "kind of the data source; auto tells it from the names at the place",
    )
    remote: str | None = _field(
        DATA,
        TEXT,
        None,
        "where the data is: a folder, a URL, tars or parquet files in braces, or pipe:COMMAND",
    )
    local: str | None = _field(
        DATA, TEXT, None, "folder of the data, or of the copies of what --remote names"
    )
    streams: str | None = _field(
        DATA,
        TEXT,
        None,
        "several MDS data sets and their shares of an epoch: PLACE=PROPORTION,...",
    )
    latents: str = _field(
        DATA,
        _one_of("online", "precomputed"),
        "online",
        "encode images and captions in the step, or read encoded ones "
        "(python -m sdbench precompute makes them)",
    )
    shuffle: bool = _field(DATA, SWITCH, True, "visit the samples in a new order each epoch")
    crop: str = _field(
        DATA, _one_of("center", "random"), "center", "where the largest square is cut out"
    )
    horizontal_flip_probability: float = _field(
        DATA, FRACTION, 0.0, "share of the images that are mirrored"
    )
    caption_drop_probability: float = _field(
        DATA, FRACTION, 0.0, "share of the captions that become the empty text"
    )
    filters: Mapping[str, str] | None = _field(
        DATA,
        CONDITIONS,
        None,
        "use only those WebDataset samples whose json meets the conditions",
    )
    class_prompts: str | None = _field(
        DATA, TEXT, None, "JSON file of a caption for each class number (WebDataset member cls)"
    )
    on_bad_sample: str = _field(
        DATA,
        _one_of("error", "skip"),
        "error",
        "what a sample that cannot be used does: stop the run, or be replaced and counted",
    )
    max_bad_fraction: float = _field(
        DATA, FRACTION, 0.01, "share of bad samples in an epoch above which skipping gives up"
    )
    missing_latents: str = _field(
        DATA,
        _one_of("error", "leave_out"),
        "error",
        "what MDS samples without a latent of this size do, as small pictures have none: stop the "
        "run before it begins, or be left out and counted",
    )
    data_timeout_s: float = _field(
        DATA,
        _number(zero_allowed=False),
        300.0,
        "seconds without a batch after which the loader is taken for stuck",
    )
    validate_hash: str = _field(
        DATA,
        TEXT,
        "auto",
        "which hash of index.json an MDS shard is checked by when it is opened; none; auto: the "
        "cheapest that it has",
    )
    num_workers: int | None = _field(DATA, NOT_NEGATIVE, None, "data loader workers per rank")
    prefetch_factor: int = _field(DATA, POSITIVE, 2, "batches each worker keeps ready")

    use_ema: bool = _field(TRAINING, SWITCH, False, "keep a moving average of the U-Net weights")
    lr: float = _field(TRAINING, _number(zero_allowed=False), 1e-4, "constant learning rate")
    weight_decay: float = _field(TRAINING, _number(zero_allowed=True), 1e-3, "AdamW weight decay")

    precision: str | None = _field(
        SPEED,
        _one_of("fp32", "tf32", "amp_fp16", "amp_bf16", "bf16"),
        None,
        "number format of the training step; bf16 also keeps weights and gradients in bf16",
    )
    master_weights: str | None = _field(
        SPEED,
        _one_of("none", "fp32"),
        None,
        "copy of bf16 weights that the optimizer updates, with its state in the same type",
    )
    encoder_dtype: str | None = _field(
        SPEED, _one_of("fp32", "fp16", "bf16"), None, "weights of the frozen VAE and text encoder"
    )
    encoder_batch_size: int | str | None = _field(
        SPEED,
        ENCODER_BATCH,
        None,
        "images that the encoders take at once, the rank's whole batch ahead of its micro-batches; "
        "microbatch: encode within each micro-batch",
    )
    memory_format: str | None = _field(
        SPEED, _one_of("contiguous", "channels_last"), None, "layout of image-like tensors"
    )
    group_norm: str | None = _field(
        SPEED,
        _one_of("torch", "fused"),
        None,
        "torch's GroupNorm, or one compiled kernel with the SiLU behind it that keeps the layout",
    )
    convolution: str | None = _field(
        SPEED,
        _one_of("torch", "matmul"),
        None,
        "torch's convolutions, or products of matrices for those of the U-Net with at least twice "
        "as many output channels as pixels in a micro-batch",
    )
    attention: str | None = _field(
        SPEED,
        _one_of("eager", "sdpa", "flash", "cudnn", "efficient", "xformers"),
        None,
        "eager matrices, torch's choice of kernel (sdpa), one of its kernels, or xformers",
    )
    unit_divisions: str | None = _field(
        SPEED,
        _one_of("keep", "drop"),
        None,
        "the divisions by 1.0 behind each attention and residual block",
    )
    compile: str | None = _field(
        SPEED,
        _one_of("none", "unet", "encoders", "all"),
        None,
        "sub-models that go through torch.compile, with fixed shapes",
    )
    compile_mode: str | None = _field(
        SPEED,
        _one_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        None,
        "mode of torch.compile; reduce-overhead and max-autotune replay CUDA graphs",
    )
    cuda_graph: bool = _field(
        SPEED, SWITCH, False, "replay a whole training step as one CUDA graph (--engine torch)"
    )
    cudnn_benchmark: bool = _field(
        SPEED, SWITCH, False, "let cuDNN time its convolution kernels and keep the fastest"
    )
    activation_checkpointing: str | None = _field(
        SPEED,
        _one_of("none", "transformer", "full"),
        None,
        "compute activations again in the backward pass: in transformer blocks, or in all blocks",
    )
    optimizer: str | None = _field(
        SPEED, _one_of("adamw", "adamw_fused"), None, "torch's default AdamW or its fused kernel"
    )
    optimizer_params: str | None = _field(
        SPEED, _one_of("all", "trainable"), None, "parameters handed to the optimizer"
    )
    ema_impl: str | None = _field(
        SPEED, _one_of("composer", "foreach"), None, "Composer's EMA or torch's foreach average"
    )
    ema_interval_batches: int | None = _field(
        SPEED, POSITIVE, None, "steps from one update of the average to the next, same half-life"
    )
    image_dtype: str | None = _field(
        SPEED, _one_of("uint8", "float32"), None, "how pixels travel from worker to device"
    )
    copy_stream: str | None = _field(
        SPEED,
        _one_of("compute", "side"),
        None,
        "CUDA stream of the copies to the device; side: the next batch travels during a step",
    )
    sharding: str | None = _field(
        SPEED,
        _one_of("none", "zero1", "grad_op", "full", "hybrid"),
        None,
        "what the ranks share instead of each holding all: optimizer state (zero1), also gradients "
        "and, between steps, weights (grad_op), also weights within a step (full), or full within "
        "each machine (hybrid)",
    )
    grad_sync: str | None = _field(
        SPEED,
        _one_of("every", "last"),
        None,
        "average the gradients over the ranks in every micro-batch or in the last of a step",
    )
    gradient_as_bucket_view: bool = _field(
        SPEED, SWITCH, False, "let gradients live in DDP's buckets instead of a second copy"
    )
    static_graph: bool = _field(
        SPEED, SWITCH, False, "tell DDP that every step uses the same parameters"
    )
    ddp_bucket_mib: int | None = _field(
        SPEED, POSITIVE, None, "size of the pieces in which DDP averages gradients, in MiB"
    )
    grad_compression: str | None = _field(
        SPEED, _one_of("none", "bf16"), None, "number format in which gradients travel under DDP"
    )
    cpu_allocator: str | None = _field(
        SPEED,
        _one_of("default", "keep"),
        None,
        "what glibc does with freed main memory on a CPU: hand it back, or keep it for the next "
        "step",
    )
    flush_denormals: bool = _field(
        SPEED, SWITCH, False, "let a CPU round numbers below 1e-38 to zero, which is faster"
    )
    num_threads: int | None = _field(
        SPEED, POSITIVE, None, "CPU threads of a rank (default: its share of the cores)"
    )

    wandb_name: str | None = _field(LOGGING, TEXT, None, "run name")
    wandb_project: str | None = _field(LOGGING, TEXT, None, "project name")


FIELDS: dict[str, dataclasses.Field[Any]] = {
    field.name: field for field in dataclasses.fields(BenchmarkConfig)
}


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked for, before the program fills in what was left open.

    Attributes:
        config: Merged from defaults, preset, file and flags; None where nobody said.
        origin: Field name to where its value came from: default, preset, file or flag.
        print_config: The user wants to see the resolved config instead of a run.
    """

    config: BenchmarkConfig
    origin: Mapping[str, str]
    print_config: bool

    def is_users(self, name: str) -> bool:
        """Whether the user gave this field a value, in a flag or in a file."""
        return self.origin[name] in ("file", "flag")


def parse_request(argv: Sequence[str] | None, *, description: str, epilog: str) -> Request:
    """Merge defaults, preset, file and flags.

    Args:
        argv: Command-line arguments without the program's name; None reads sys.argv.
        description: Text above the flags in `--help`.
        epilog: Text below them: the examples.

    Returns:
        The merged request.

    Raises:
        ConfigError: For an unknown flag or key, a value of the wrong kind, or an unreadable file.
    """
    parser = _make_parser(description=description, epilog=epilog)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        raise_unknown(unknown[0], known=[f"--{name}" for name in FIELDS], where="flag")
    values = vars(namespace)
    flags = {name: _parse_field(name, values[name]) for name in FIELDS if values[name] is not None}
    file = _read_file(values["config"]) if values["config"] is not None else {}
    preset = PRESETS[{**file, **flags}.get("preset", FIELDS["preset"].default)]

    layers = (("preset", preset), ("file", file), ("flag", flags))
    origin = dict.fromkeys(FIELDS, "default")
    merged: dict[str, Any] = {}
    for layer_name, layer in layers:
        merged.update(layer)
        origin.update(dict.fromkeys(layer, layer_name))
    return Request(BenchmarkConfig(**merged), origin, values["print_config"])


def _make_parser(*, description: str, epilog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file whose keys are the flag names below"
    )
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="print every value of the run, and who chose it, then stop",
    )
    groups: dict[str, Any] = {}
    for name, field in FIELDS.items():
        group_name, kind = field.metadata["group"], field.metadata["kind"]
        if group_name not in groups:
            groups[group_name] = parser.add_argument_group(group_name)
        group = groups[group_name]
        if kind is SWITCH:
            add_switch(group, name, default=field.default, help_text=field.metadata["help"])
        else:
            group.add_argument(f"--{name}", metavar=_metavar(kind), help=_help_text(field))
    return parser


def _metavar(kind: Kind) -> str:
    return {
        POSITIVE: "N",
        NOT_NEGATIVE: "N",
        TEXT: "TEXT",
        MICROBATCH: "N|auto",
        CONDITIONS: "YAML",
    }.get(kind, "X")


def _help_text(field: dataclasses.Field[Any]) -> str:
    kind = field.metadata["kind"]
    text = field.metadata["help"]
    if " | " in kind.allowed:
        text += f"; {kind.allowed}"
    if field.default is not None:
        text += f" (default: {field.default})"
    elif field.name in PRESETS["seed"]:
        by_preset = ", ".join(f"{preset}: {PRESETS[preset][field.name]}" for preset in PRESETS)
        text += f" ({by_preset})"
    return text.replace("%", "%%")


def add_switch(parser: Any, name: str, *, default: bool, help_text: str) -> None:
    """Add the flags ``--<name>`` and ``--no_<name>``; without either the value is None.

    Args:
        parser: An argparse parser, or a group of one.
        name: Of the value.
        default: What None will mean, for the help.
        help_text: What it does.
    """
    shown = "on" if default else "off"
    parser.add_argument(
        f"--{name}",
        action="store_const",
        const=True,
        help=f"{help_text} (default: {shown}; --no_{name})",
    )
    parser.add_argument(
        f"--no_{name}", dest=name, action="store_const", const=False, help=argparse.SUPPRESS
    )


def parse_value(name: str, value: Any, *, kind: Kind) -> Any:
    """Bring the value of a flag or a key to its kind.

    Raises:
        ConfigError: It is of another kind.
    """
    try:
        return kind.parse(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"--{name} has a value of the wrong kind",
            value=value,
            allowed=kind.allowed,
            flag=f"--{name}",
        ) from None


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Give another command flags of benchmark.py, with the same meaning and default.

    Args:
        parser: Of the command.
        names: Of fields that are no switches.
    """
    for name in names:
        field = FIELDS[name]
        kind: Kind = field.metadata["kind"]
        choices = f"; {kind.allowed}" if " | " in kind.allowed else ""
        default = "" if field.default is None else f" (default: {field.default})"
        parser.add_argument(
            f"--{name}",
            type=reader(kind),
            default=field.default,
            metavar="X",
            help=f"{field.metadata['help']}{choices}{default}".replace("%", "%%"),
        )


def reader(kind: Kind) -> Callable[[str], Any]:
    """A kind as the type of a flag of argparse."""

    def read(text: str) -> Any:
        try:
            return kind.parse(text)
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed: {kind.allowed}") from None

    return read


def _parse_field(name: str, value: Any) -> Any:
    return parse_value(name, value, kind=FIELDS[name].metadata["kind"])


def _read_file(path: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the config file cannot be read ({error})",
            value=path,
            allowed="a readable YAML file of flag names and values",
            flag="--config",
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            "the config file does not hold keys and values",
            value=type(content).__name__,
            allowed="lines such as `batch_size: 2048`",
            flag="--config",
        )
    for key in content:
        if key not in FIELDS:
            raise_unknown(str(key), known=list(FIELDS), where="key in the config file")
    # `key:` with nothing behind it means "not said", so that --print_config output is a valid file.
    return {key: _parse_field(key, value) for key, value in content.items() if value is not None}


def raise_unknown(given: str, *, known: list[str], where: str) -> None:
    """Refuse a name, with the nearest of the known ones.

    Raises:
        ConfigError: Always.
    """
    name = given.split("=")[0]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"unknown {where}",
        value=given,
        allowed=f"the names that --help lists, the nearest is {nearest}",
        flag=nearest if nearest.startswith("--") else f"--{nearest}",
    )
