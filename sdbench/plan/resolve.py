"""`resolve`: turns a request into a plan for this machine and these ranks.

It fills in open settings, checks everything before weights are built, and keeps a reason for each
value that the program chose. It never changes a value that the user gave.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from sdbench import data
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.files import refused_unless_written
from sdbench.base.units import counted
from sdbench.data import subject
from sdbench.data.batches.captions import describe_captions
from sdbench.data.buckets import size_of_budget
from sdbench.data.convert.maker import check_maker
from sdbench.data.source import SourceConfig
from sdbench.measure.hardware import Machine
from sdbench.models.architecture import Architecture, is_beside_program, resolve_architecture
from sdbench.models.parts import replace_parts
from sdbench.plan.batch import resolve_batch
from sdbench.plan.draft import EngineT, Plan
from sdbench.plan.window import resolve_steps
from sdbench.ranks.distributed import Ranks
from sdbench.ranks.ray_cluster import OMP_VARIABLE
from sdbench.settings.data import DataSettings
from sdbench.settings.recipe import EngineConfig
from sdbench.settings.request import Request
from sdbench.settings.rules import UNKNOWN, UnknownError, settings_ahead

# The seeds' command line on GPUs (mosaicml/diffusion-benchmark) has 8 workers.
GPU_NUM_WORKERS = 8
CPU_IMAGE_SIZE = 256
MIN_FREE_RESULTS_BYTES = 16 * 1024**2

StepsResolver = Callable[..., tuple[int, int]]


def resolve(
    request: Request[EngineT],
    *,
    machine: Machine,
    ranks: Ranks,
    model_parts: Mapping[str, Mapping[str, Any]] | None = None,
    resolve_steps: StepsResolver = resolve_steps,
) -> Plan[EngineT]:
    """Turn a request into a plan, or refuse what cannot be run here.

    `model_parts` are as `replace_parts` takes them. `resolve_steps` gives the steps of the run and
    the most that it may take, from the plan so far and the samples of an epoch.
    """
    from sdbench.plan.memory_limit import check_memory

    plan = plan_step(request, machine=machine, ranks=ranks, model_parts=model_parts)
    plan.source = _make_source(plan)
    plan.class_source = _make_class_source(plan)
    num_samples = _count_samples(plan)
    if plan.shapes is not None:
        _mix(plan)
    if plan.config.learned_token is not None:
        _check_tokens(plan)
    plan.num_steps, plan.max_num_steps = resolve_steps(plan, num_samples=num_samples)
    is_plain = plan.mixture is None and not plan.config.has_subject
    if plan.config.data_format != "synthetic" and is_plain:
        _tell_of_rest(plan, num_samples)
    if plan.ranks.rank == 0:  # which prints the notes
        plan.notes += describe_captions(plan.source, num_samples=num_samples)
    plan.memory = check_memory(plan)
    _check_results_dir(plan.config.results_dir)
    if plan.source.wants_latents:
        plan.notes.append("Latents are precomputed: compare with other precomputed runs only.")
    elif not plan.config.step_has_encoders:
        plan.notes.append(
            "Other processes make the latents while the ranks train: compare with other runs of "
            "--online_preprocessing only."
        )
    return plan


def plan_step(
    request: Request[EngineT],
    *,
    machine: Machine,
    ranks: Ranks,
    model_parts: Mapping[str, Mapping[str, Any]] | None = None,
) -> Plan[EngineT]:
    """Choose all settings that decide what a step computes, without a look at the data."""
    plan = Plan.begin(request, machine=machine, ranks=ranks)
    plan.architecture = find_model(plan.config, model_parts)
    plan.suit_family()
    plan.choose_if_open("num_threads", *_threads_per_rank(plan))
    _choose_shapes(plan)
    plan.choose_format()
    check_latents(plan.config, plan.architecture)
    plan.choose_if_open("num_workers", *_count_workers(plan))
    resolve_batch(plan)
    plan.check_one_microbatch()
    return plan


@dataclasses.dataclass(frozen=True, match_args=False)
class ModelChoice(Protocol):
    """What names a model and says how its pictures are drawn."""

    model_name: str
    model_revision: str | None
    random_weights: bool
    caption_drop_probability: float


def find_model(
    config: ModelChoice, parts: Mapping[str, Mapping[str, Any]] | None = None
) -> Architecture:
    """The model that settings name, with `parts` as `replace_parts` takes them.

    A ConfigError refuses folders that do not have exactly its weights.
    Training that drops captions teaches the encoded empty caption, so pictures are drawn with it.
    """
    architecture = resolve_architecture(
        config.model_name, revision=config.model_revision, random_weights=config.random_weights
    )
    if config.caption_drop_probability:
        architecture = dataclasses.replace(architecture, zeroes_empty_prompt=False)
    if parts is not None:
        architecture = replace_parts(architecture, parts)
    if len(architecture.random_parts) < len(architecture.modules):
        from sdbench.models.components import check_folders

        check_folders(architecture)
    return architecture


def check_ahead(
    request: Request[EngineConfig],
    *,
    ranks: Any,
    model_parts: Mapping[str, Mapping[str, Any]] | None = None,
    resolve_steps: StepsResolver = resolve_steps,
) -> None:
    """Refuse what no machine can run; arguments as of `resolve`, but the ranks may be unknown.

    Places of data and of models are not looked at, as they may be where the ranks are.
    """
    plan = Plan(request, settings_ahead(request), UNKNOWN, ranks, {}, [])
    data.check_ahead(plan.config)
    others = [part["pretrained"] for part in (model_parts or {}).values() if "pretrained" in part]
    if all(map(is_beside_program, (plan.config.model_name, *others))):
        plan.architecture = find_model(plan.config, model_parts)
        with contextlib.suppress(UnknownError):
            plan.suit_family()
        with contextlib.suppress(UnknownError):
            _choose_shapes(plan)
        if plan.config.learned_token is not None:
            _check_tokens(plan)
    with contextlib.suppress(UnknownError):
        resolve_batch(plan)
        resolve_steps(plan, num_samples=UNKNOWN)


def _tell_of_rest(plan: Plan[EngineConfig], num_samples: int | None) -> None:
    """Note the samples that do not fill the last batch of an epoch, if the run has a whole one."""
    num_steps, rest = divmod(num_samples or 0, plan.config.batch_size)
    if rest and plan.max_num_steps >= num_steps:
        which = "others" if plan.config.shuffle else "with --no_shuffle the last ones"
        plan.notes.append(
            f"An epoch is {counted(num_steps, 'step')} of {plan.config.batch_size}: {rest} of "
            f"{num_samples} samples do not fill a batch and are left out of it, {which} in each "
            "epoch."
        )


def _choose_shapes(draft: Plan[EngineConfig]) -> None:
    architecture, config = draft.architecture, draft.config
    default_size = config.image_size, ""
    if config.image_size is None and size_of_budget(config.buckets) is None:
        size = default_image_size(architecture, on_gpu=draft.on_gpu)
        is_models = size == architecture.default_image_size
        default_size = size, f"default of {architecture.name}" if is_models else "no GPU"
    draft.choose_shapes(architecture, default_size=default_size)


def _mix(plan: Plan[EngineConfig]) -> None:
    """Put the samples into buckets, and note how many each has."""
    with _as_bad_input(plan.source):
        mixture = plan.mixture = data.open_mixture(plan.source)
    plan.source = dataclasses.replace(plan.source, mixture=mixture)
    plan.notes.append(mixture.describe(plan.config.batch_size))
    if plan.source.wants_latents:
        for shape in mixture.shapes:
            plan.architecture.check_shape(shape, flag="--remote or --local")
    if plan.config.compile != "none" and len(mixture.shapes) > 1:
        plan.notes.append(
            f"Code is compiled for each of the {len(mixture.shapes)} shapes, in the first steps."
        )


def _count_workers(draft: Plan[EngineConfig]) -> tuple[int, str]:
    """Loader workers of a rank, and the reason."""
    if draft.config.online_preprocessing:
        return 0, "actors of Ray Data read the samples"
    if draft.config.has_subject:
        return 0, "latents of a subject are on the device"
    if draft.on_gpu:
        return GPU_NUM_WORKERS, "the seeds' default"
    return 0, "no GPU: cores and memory are for training"


def _make_source(draft: Plan[EngineConfig]) -> SourceConfig:
    config, ranks, architecture = draft.config, draft.ranks, draft.architecture
    return SourceConfig.from_settings(
        config,
        shapes=draft.shapes,
        device_batch_size=config.batch_size // ranks.world_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        pin_memory=draft.on_gpu,
        inputs=architecture.inputs,
        num_images=subject.NUM_SYNTHETIC_INSTANCES if config.has_subject else None,
        caption=config.instance_prompt,
        new_token=config.learned_token,
    )


def check_latents(settings: DataSettings, architecture: Architecture) -> None:
    """Refuse precomputed latents that are said to be those of another model."""
    check_maker(
        settings,
        family=architecture.family.name,
        identify_vae=lambda: architecture.identify_tensors("vae"),
    )


def _make_class_source(plan: Plan[EngineConfig]) -> SourceConfig | None:
    config, source = plan.config, plan.source
    if config.has_subject and source.data_format == "synthetic":
        # A seed of its own, or the pictures would be those of the subject.
        return dataclasses.replace(
            source, seed=source.seed + 1, num_images=subject.NUM_SYNTHETIC_CLASS
        )
    if config.class_remote is None:
        return None
    return dataclasses.replace(
        source,
        remote=config.class_remote,
        local=None,
        data_format=data.detect_format(config.class_remote),
        caption=config.class_prompt,
    )


def _check_tokens(draft: Plan[EngineConfig]) -> None:
    """Check the words of a token that is learned against the model's vocabulary."""
    from sdbench.data.batches.tokenizer import CaptionTokenizer

    config, architecture = draft.config, draft.architecture
    tokenizer = CaptionTokenizer.of(architecture)
    token = config.learned_token
    if token in tokenizer or len(tokenizer.read_word(token)) == 1:
        raise ConfigError(
            "the model already has this token",
            value=token,
            allowed="a word that is not a token yet, such as <dog>",
            flag="--learned_token",
        )
    num_initial = len(tokenizer.read_word(config.initial_token))
    if num_initial != 1:
        raise ConfigError(
            f"the word to begin with is {num_initial} tokens",
            value=config.initial_token,
            allowed="a word that is a single token, such as dog",
            flag="--initial_token",
        )
    vocabulary_size = architecture.parts["text_encoder"]["vocab_size"]
    if len(tokenizer) != vocabulary_size:
        raise ConfigError(
            f"the text encoder has {vocabulary_size} tokens, and its tokenizer {len(tokenizer)}",
            value=config.model_name,
            allowed="a model whose text encoder and tokenizer have equally many, to add one",
            flag="--model_name",
        )


def _threads_per_rank(draft: Plan[EngineConfig]) -> tuple[int, str]:
    """CPU threads of a rank, and the reason."""
    given = os.environ.get(OMP_VARIABLE, "")
    # torchrun sets 1 if the variable is not set, which would leave most cores idle.
    is_launchers = given == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if given.isdecimal() and int(given) and not is_launchers:
        return int(given), OMP_VARIABLE
    config, ranks, num_cores = draft.config, draft.ranks, draft.machine.num_cpu_cores
    reason = "the rank's share of the cores"
    if config.online_preprocessing:
        # Encoders with resources of their own may be on another machine.
        num_encoders = config.num_encoders if config.encoder_resources is None else 0
        num_cores -= -(-(config.num_decoders + num_encoders) // ranks.num_nodes)
        reason += ", beside decoders and encoders"
    return max(1, num_cores // ranks.local_world_size), reason


def default_image_size(architecture: Architecture, *, on_gpu: bool) -> int:
    """Default side of the images in pixels: the model's, but at most 256 without a GPU."""
    size = architecture.default_image_size
    return size if on_gpu else min(size, CPU_IMAGE_SIZE)


def _count_samples(plan: Plan[EngineConfig]) -> int | None:
    """Check the data, and count the samples of an epoch; a damaged file is bad input."""
    config, source = plan.config, plan.source
    with _as_bad_input(source):
        if not config.has_subject:
            return data.check(source)
        num_pictures = subject.check(source, plan.class_source)
        subject.check_readable(source, num_pictures=num_pictures.instances)
    num_batches = num_pictures.num_batches(config.batch_size)
    plan.notes.append(
        f"Pictures of the subject: {num_pictures.instances}, of its class: "
        f"{num_pictures.of_class}; an epoch, which uses each, has {counted(num_batches, 'step')}."
    )
    return num_batches * config.batch_size


@contextlib.contextmanager
def _as_bad_input(source: SourceConfig) -> Iterator[None]:
    """Make damaged data bad input: nothing has been built yet."""
    try:
        yield
    except RunError as error:
        raise ConfigError(
            str(error).rstrip("."),
            value=source.remote or source.local or source.streams,
            allowed="complete data that can be reached",
            flag="--remote, --local or --streams",
        ) from error


def _check_results_dir(results_dir: str) -> None:
    """Check before the work that the results folder can be made and written, and has space."""
    wanted = Path(results_dir).absolute()
    with refused_unless_written(results_dir):
        folder = next(place for place in (wanted, *wanted.parents) if place.exists())
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        free_bytes = shutil.disk_usage(folder).free
    if free_bytes < MIN_FREE_RESULTS_BYTES:
        raise ConfigError(
            "the results folder has too little space",
            value=f"{results_dir} with {free_bytes / 1024**2:.0f} MiB free",
            allowed=f"at least {MIN_FREE_RESULTS_BYTES / 1024**2:.0f} MiB",
            flag="--results_dir",
        )
