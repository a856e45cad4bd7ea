"""The command and task `precompute`: encode a data set of images into one of latents.

The ranks share the missing shards; rank 0 joins them at the end. shards.py has the work of one
rank, which needs torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench import data
from sdbench.base.conditions import BFLOAT16, ModelInputs
from sdbench.base.errors import ConfigError
from sdbench.base.host_memory import can_keep_freed_memory, keep_freed_memory
from sdbench.base.units import counted
from sdbench.data.batches.captions import describe_captions
from sdbench.data.convert.convert import choose_samples_per_shard
from sdbench.data.convert.flags import ConvertFlags
from sdbench.data.convert.maker import FAMILY, VAE_TENSORS, WEIGHTS, tell_encoded
from sdbench.data.convert.writers import Output, open_output
from sdbench.data.formats.identity import DATA, MODEL, identify
from sdbench.data.order.mixture import keep_sizes
from sdbench.data.places.remote import storable_name
from sdbench.data.samples import SampleType
from sdbench.data.source import SourceConfig
from sdbench.measure import hardware
from sdbench.measure.hardware import Machine
from sdbench.measure.summary import summarize_window
from sdbench.plan import describe
from sdbench.plan.draft import Draft
from sdbench.ranks import distributed, ray_cluster
from sdbench.ranks.distributed import Ranks
from sdbench.record.store import PRECOMPUTE, RunFolder
from sdbench.run import TASKS
from sdbench.run.runner import run
from sdbench.run.task import Run, Task
from sdbench.settings.buckets import BucketSettings
from sdbench.settings.computing import ComputingSpeedups
from sdbench.settings.data import ONLINE, DataSettings
from sdbench.settings.kinds import POSITIVE, TEXT, one_of
from sdbench.settings.measuring import RunSettings
from sdbench.settings.online import ActorSettings
from sdbench.settings.ray import RAY, RaySettings
from sdbench.settings.request import Request, parse
from sdbench.settings.setting import REQUIRED, setting, shared
from sdbench.settings.training import ModelSettings

if TYPE_CHECKING:
    from sdbench.encoding.encoder import EncodedBatch, Step
    from sdbench.models.architecture import Architecture

EPILOG = """\
examples:
  python -m sdbench precompute --remote photos --folder latents
      a folder of pictures with captions, at the model's own resolution, to an MDS data set
  torchrun --nproc_per_node 8 -m sdbench precompute --remote 's3://bucket/{00000..00127}.tar' \\
      --device_batch_size 64 --num_workers 8 --folder latents
      many tars, on 8 GPUs
  python -m sdbench precompute --model_name tiny --use_synth_data --max_samples 100 --folder latents
      a miniature in seconds
  python -m sdbench precompute --engine ray --ray_address auto --num_decoders 48 \\
      --num_encoders 16 --remote 's3://bucket/{00000..00127}.parquet' --folder latents
      on all machines of a Ray cluster
then train on it:
  composer benchmark.py --remote latents --latents precomputed

After a stop at any moment, the same command resumes, with any number of ranks: finished shards are
kept in FOLDER.partial until all are there.

exit codes: 0 ok, 1 the run failed (its record says why), 2 bad input, 130 stopped
"""

# At 512 px the VAE holds tensors of 128 x 512 x 512 values for each image, 128 MiB in fp32.
GPU_BATCH_SIZE, CPU_BATCH_SIZE = 32, 4
GPU_NUM_WORKERS = 8
TORCH = "torch"
# The first batches include allocations and the choice of kernels.
NUM_WARMUP_STEPS = 2
NUM_BAD_NAMED = 5
# Figures of the measured window in a record's `summary`.
WINDOW_FIGURES = (
    "images_per_second",
    "images_per_second_interval",
    "images_per_second_per_device",
    "num_measured_steps",
    "window_s",
    "megabytes_per_second",
    "ms_per_image",
    "step_ms_per_image",
)
# Settings that decide the content of a shard.
FACTS_OF_JOB = (
    "data_format",
    "encoder_dtype",
    "seed",
    "crop",
    "horizontal_flip_probability",
    "caption_drop_probability",
    "read_avif",
    "empty_captions",
    "filters",
    "class_prompts",
    "samples_per_shard",
    "image_size",
)


FACTS_OF_BUCKETS = tuple(one.name for one in dataclasses.fields(BucketSettings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecomputeSettings(BucketSettings):
    """Settings of precompute. None means: chosen for the machine, then printed."""

    out: str = setting(TEXT, REQUIRED, "folder of the new data set", spelling="folder")
    out_format: str = setting(
        one_of("mds", "parquet", "webdataset"), "mds", "how latents are stored"
    )
    image_size: int | None = setting(
        POSITIVE,
        None,
        "side of the square images in pixels (default: the model's own, at most 256 without a GPU, "
        "as benchmark.py)",
    )
    batch_size: int | None = setting(
        POSITIVE,
        None,
        f"images that a rank encodes together (default: {GPU_BATCH_SIZE} on a GPU, "
        f"{CPU_BATCH_SIZE} on a CPU)",
        spelling="device_batch_size",
    )
    samples_per_shard: int | None = shared(
        ConvertFlags,
        "samples_per_shard",
        help="source samples per file of the new data set; a kill loses at most so many per rank "
        "(default: for about 16 files, 32 to 512, whole batches)",
    )
    max_samples: int | None = shared(ConvertFlags, "max_samples")
    engine: str = setting(
        one_of(TORCH, RAY),
        TORCH,
        "torch: this process and the ranks that a launcher starts encode; ray: actors of Ray Data "
        "anywhere in a cluster do",
        demands={"num_workers": ((None, 0), "the --num_decoders of Ray Data read the images")},
    )
    ray_address: str | None = shared(RaySettings, "ray_address")
    num_decoders: int = shared(ActorSettings, "num_decoders")
    num_encoders: int = shared(ActorSettings, "num_encoders")
    encoder_resources: Mapping[str, float] | None = shared(ActorSettings, "encoder_resources")
    encoder_accelerator_type: str = shared(ActorSettings, "encoder_accelerator_type")
    use_synth_data: bool = shared(
        DataSettings, "use_synth_data", help="encode synthetic images, to measure speed"
    )
    on_bad_sample: str = shared(ConvertFlags, "on_bad_sample")
    changed_inputs: str = shared(ConvertFlags, "changed_inputs")
    random_weights: bool = shared(ModelSettings, "random_weights")
    model_name: str = shared(ModelSettings, "model_name")
    model_revision: str | None = shared(ModelSettings, "model_revision")
    seed: int = shared(RunSettings, "seed")
    encoder_dtype: str | None = shared(ComputingSpeedups, "encoder_dtype", presets={}, rules=())
    data_format: str = shared(DataSettings, "data_format")
    remote: str | None = shared(DataSettings, "remote")
    local: str | None = shared(DataSettings, "local")
    refresh: bool = shared(DataSettings, "refresh")
    filters: Mapping[str, str] | None = shared(DataSettings, "filters")
    class_prompts: str | None = shared(DataSettings, "class_prompts")
    crop: str = shared(DataSettings, "crop")
    horizontal_flip_probability: float = shared(DataSettings, "horizontal_flip_probability")
    caption_drop_probability: float = shared(DataSettings, "caption_drop_probability")
    read_avif: bool = shared(DataSettings, "read_avif")
    empty_captions: str = shared(DataSettings, "empty_captions")
    max_bad_fraction: float = shared(DataSettings, "max_bad_fraction")
    data_timeout_s: float = shared(DataSettings, "data_timeout_s")
    validate_hash: str = shared(DataSettings, "validate_hash")
    num_workers: int | None = shared(DataSettings, "num_workers")
    prefetch_factor: int = shared(DataSettings, "prefetch_factor")
    results_dir: str = shared(RunSettings, "results_dir")


def main(argv: Sequence[str] | None = None) -> int:
    """Encode a data set as the command line says, and record the speed; return the exit code."""
    parse_precompute = functools.partial(
        parse,
        PrecomputeSettings,
        prog="python -m sdbench precompute",
        description="Encode images and captions once, so that training reads latents instead.",
        epilog=EPILOG,
    )
    return run(TASKS["precompute"], parse_precompute, argv)


class Precompute(Task):
    """Encodes a data set; its request is one of `PrecomputeSettings`."""

    kind = PRECOMPUTE
    program = "python -m sdbench precompute"
    request: Request[PrecomputeSettings]
    # The output and the numbers of its missing shards, on the first rank.
    _output: tuple[Output, list[int]] | None = None

    @property
    def is_distributed(self) -> bool:
        """With Ray, a single process takes the results of all actors."""
        return self.request.config.engine != RAY

    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Choose what was left open, and open the source."""
        from sdbench.encoding.encoder import EncodeJob
        from sdbench.plan.resolve import default_image_size, find_model

        self._machine, self._ranks = machine, ranks
        draft = Draft.begin(self.request, machine=machine, ranks=ranks)
        self._on_gpu = _connect(draft)
        self._keeps_memory = not self._on_gpu and can_keep_freed_memory()
        _choose(draft, on_gpu=self._on_gpu)
        architecture = find_model(draft.config)
        _choose_dtype(draft, architecture, on_gpu=self._on_gpu)
        default_size = default_image_size(architecture, on_gpu=self._on_gpu)
        reason = f"default of {architecture.name}"
        draft.choose_shapes(architecture, default_size=(default_size, reason))
        config = draft.config
        # Every rank may read every sample, so the source is the same for all.
        source = SourceConfig.from_settings(
            config,
            latents=ONLINE,
            shapes=draft.shapes,
            device_batch_size=1,
            shuffle=False,
            inputs=_describe_stored(architecture.inputs, encoder_dtype=config.encoder_dtype),
            num_images=config.max_samples if config.data_format == "synthetic" else None,
        )
        self._reader = data.open_batches(source)
        self._reader.fills_up = False
        num_samples = min(self._reader.num_samples, config.max_samples or self._reader.num_samples)
        # Whole batches, as a short one at the end of each shard would leave the device idle.
        num_batches = -(-choose_samples_per_shard(num_samples) // config.batch_size)
        num_each = num_batches * config.batch_size
        draft.choose_if_open("samples_per_shard", num_each, "about 16 files")
        self._config = draft.config
        self._job = EncodeJob(
            config=dataclasses.replace(source, mixture=self._reader.mixture),
            architecture=architecture,
            encoder_dtype=config.encoder_dtype,
            batch_size=config.batch_size,
            num_samples=num_samples,
            samples_per_shard=self._config.samples_per_shard,
        )

    @property
    def _num_ahead(self) -> int:
        """About how many batches are ready when the first one is taken."""
        config = self._config
        num_loading = config.num_workers
        if config.engine == RAY:
            num_loading = config.num_decoders + config.num_encoders
        return num_loading * config.prefetch_factor

    def make_folder(self) -> Path:
        """Make a new folder in --results_dir, and begin or resume the output."""
        config, job = self._config, self._job
        model = job.architecture.identify(job.architecture.encoders, seed=config.seed)
        inputs = identify({DATA: job.config}, model=model)
        output = open_output(
            Path(config.out),
            data_format=config.out_format,
            columns=job.columns(),
            num_chunks=job.num_shards,
            job=self._identify_job(inputs[MODEL]["files"]),
            inputs=inputs,
            accepts_changes=config.changed_inputs == "accept",
        )
        self.resources.enter_context(output.lock())
        self._output = output, output.missing_chunks()
        name = f"precompute-{config.data_format}-{config.image_size}px"
        return RunFolder.create(config.results_dir, machine=self._machine.slug, name=name)

    def _identify_job(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """The facts that decide the content of each shard, which a resume must share.

        `model` is what `Architecture.identify` says of its files.
        """
        config, architecture = self._config, self._job.architecture
        place = config.remote or config.local
        return {
            "command": "precompute",
            "source": None if place is None else storable_name(place),
            "model_name": str(architecture.weights_folder or architecture.name),
            "model_revision": architecture.revision,
            "num_samples": self._job.num_samples,
            FAMILY: architecture.family.name,
            VAE_TENSORS: architecture.identify_tensors("vae"),
            WEIGHTS: {
                name: fact
                for name, fact in model.items()
                if name.endswith(".safetensors") or name in architecture.encoders
            },
            **tell_encoded(self._job.config),
            **{name: getattr(config, name) for name in FACTS_OF_JOB},
            **(
                {}
                if config.buckets is None
                else {name: getattr(config, name) for name in FACTS_OF_BUCKETS}
            ),
        }

    def for_person(self) -> str:
        """The source, the output and its missing shards."""
        assert self._output is not None
        job, config, num_missing = self._job, self._config, len(self._output[1])
        place = config.remote or config.local
        values = ", ".join(
            f"{name} {getattr(config, name)}"
            for name in ("batch_size", "encoder_dtype", "num_workers", "samples_per_shard")
        )
        lines = [
            f"Encoding {counted(job.num_samples, f'{config.data_format} image')}"
            f"{f' of {place!r}' if place else ''} at {config.image_size} px by "
            f"{job.architecture.name} to {config.out} ({config.out_format}): "
            f"{values}, ranks {self._ranks.world_size}"
        ]
        if job.architecture.weights_folder is None:
            lines.append(
                f"{job.architecture.name} has random weights: such latents are for measuring speed."
            )
        if job.config.mixture is not None:
            lines.append(job.config.mixture.describe(1))
        lines += describe_captions(job.config, num_samples=job.num_samples)
        if num_dropped := self._reader.samples.num_dropped:
            lines.append(f"Left out by --filters: {counted(num_dropped, 'sample')}.")
        if num_missing < job.num_shards:
            num_there = job.num_shards - num_missing
            lines.append(f"resuming: {num_there} of {job.num_shards} shards are there")
        return "\n".join(lines)

    def for_record(self, *, num_restarts: int) -> dict[str, Any]:
        """Settings, job and machine."""
        architecture = self._job.architecture
        return {
            "config": {
                **dataclasses.asdict(self._config),
                "cpu_allocator": "keep" if self._keeps_memory else "default",
                "latents": SampleType.MOMENTS.value,
            },
            "workload": {
                "architecture": architecture.name,
                "weights": "random" if architecture.weights_folder is None else "loaded",
                "revision": architecture.revision,
                "num_samples": self._job.num_samples,
                "num_shards": self._job.num_shards,
            },
            "machine": hardware.as_dict(self._machine),
            "ranks": describe.describe_ranks(
                self._ranks, num_restarts=num_restarts, engine=self._config.engine
            ),
        }

    def work(self, run: Run) -> dict[str, Any]:
        """Encode the missing shards, and join all of them."""
        from sdbench.encoding.shards import write_shards

        output, numbers = distributed.broadcast(self._output, self._ranks)
        mine = numbers[self._ranks.rank :: self._ranks.world_size]
        try:
            with contextlib.closing(self._encode(mine)) as encoded:
                steps = write_shards(
                    self._job, mine, encoded, reader=self._reader, output=output, ranks=self._ranks
                )
            everyone = distributed.gather((steps, hardware.peak_memory_gib()), self._ranks)
            if self._ranks.rank != 0:
                return {}
            totals = self._totals = output.finish()
            keep_sizes(self._config.out, totals.sizes, data_format=self._config.out_format)
        except BaseException:
            print("Finished shards are kept: the same command goes on from them.", file=sys.stderr)
            raise
        num_used, num_dropped = self._job.num_samples, self._reader.samples.num_dropped
        if (mixture := self._job.config.mixture) is not None:
            num_dropped += num_used - totals.num_written - len(totals.bad)
        assert mixture or totals.num_written + len(totals.bad) == num_used
        summary = summarize(
            [steps for steps, _ in everyone], num_warmup_steps=self._num_ahead + NUM_WARMUP_STEPS
        )
        return {
            "summary": summary
            | {
                "peak_memory_gib": max(peak for _, peak in everyone),
                "num_images_written": totals.num_written,
                "num_bad_samples": len(totals.bad),
                "num_dropped_samples": num_dropped,
            }
        }

    def _encode(self, numbers: Sequence[int]) -> Generator[EncodedBatch]:
        if self._config.engine == RAY:
            from sdbench.encoding.ray_shards import encode_on_ray

            return encode_on_ray(
                self._job,
                numbers,
                settings=self._config,
                num_samples=self._reader.num_samples,
                num_ahead=self._num_ahead,
            )
        from sdbench.encoding.shards import encode_here

        if self._keeps_memory:
            keep_freed_memory()
        device = f"cuda:{self._ranks.local_rank}" if self._on_gpu else "cpu"
        return encode_here(self._job, numbers, reader=self._reader, device=device)

    def conclude(self, content: dict[str, Any], folder: Path) -> str:
        """The result in words."""
        from sdbench.report.terminal import format_rate

        summary, totals = content["summary"], self._totals
        rate = "Too few batches to measure a rate after the first ones."
        if summary["images_per_second"] is not None:
            split_ms = summary["step_ms_per_image"].items()
            split = ", ".join(f"{name} {ms:.3g}" for name, ms in split_ms)
            rate = f"images/s: {format_rate(summary)}; ms per image: {split}"
        return "\n".join(
            [
                f"Wrote {counted(totals.num_written, 'sample')} to {self._config.out}, "
                f"{len(totals.bad)} bad ones left out; {summary['num_images']} of them now, in "
                f"{content['duration_s']:.1f} s.",
                rate,
                *(f"left out: {sentence}" for sentence in totals.bad[:NUM_BAD_NAMED]),
            ]
        )


def _connect(draft: Draft[PrecomputeSettings]) -> bool:
    """Connect to Ray if that is the engine; return whether a GPU encodes."""
    if draft.config.engine == TORCH:
        return draft.on_gpu
    from sdbench.encoding.ray_stream import encoder_resources

    ray_cluster.connect(draft.config.ray_address)
    return "GPU" in encoder_resources(draft.config)


def _choose(draft: Draft[PrecomputeSettings], *, on_gpu: bool) -> None:
    config = draft.config
    data_format = data.resolve_format(config)
    if data_format == "synthetic" and not (config.use_synth_data or config.data_format != "auto"):
        raise ConfigError(
            "There is nothing to encode",
            value=None,
            allowed="a folder or URL of images, or --use_synth_data",
            flag="--remote or --local",
        )
    if config.encoder_dtype == "fp16" and not on_gpu:
        raise ConfigError(
            "A CPU cannot run the encoders in this type",
            value="fp16",
            allowed="fp32 | bf16",
            flag="--encoder_dtype",
        )
    draft.choose("data_format", data_format, "the place of the data")
    on_ray = config.engine == RAY
    draft.choose_if_open("batch_size", GPU_BATCH_SIZE if on_gpu else CPU_BATCH_SIZE, "the device")
    # Without a GPU the cores are for the encoders.
    cores_per_rank = draft.machine.num_cpu_cores // draft.ranks.local_world_size
    num_workers = min(GPU_NUM_WORKERS, cores_per_rank) if on_gpu and not on_ray else 0
    draft.choose_if_open("num_workers", num_workers, "the cores")


def _choose_dtype(
    draft: Draft[PrecomputeSettings], architecture: Architecture, *, on_gpu: bool
) -> None:
    """Choose the type of the encoders, or refuse one that the model cannot have."""
    family, machine = architecture.family, draft.machine
    family.check_encoder_dtype(draft.config.encoder_dtype)
    fast = machine.fast_dtype("cuda" if on_gpu else "cpu", on_ray=draft.config.engine == RAY)
    dtype = family.encoder_dtype(fast, has_bf16=machine.has_fast_bf16)
    reason = "the device" if dtype == fast else family.too_wide_for_fp16
    draft.choose_if_open("encoder_dtype", dtype, reason)


def _describe_stored(inputs: ModelInputs, *, encoder_dtype: str) -> ModelInputs:
    """What is too wide for float16 is stored as bfloat16 where the encoders compute in it."""
    if encoder_dtype != "bf16":
        return inputs
    conditions = (
        dataclasses.replace(one, dtype=BFLOAT16) if one.dtype == "float32" else one
        for one in inputs.conditions
    )
    return dataclasses.replace(inputs, conditions=tuple(conditions))


def summarize(ranks: Sequence[Sequence[Step]], *, num_warmup_steps: int) -> dict[str, Any]:
    """Sum up the batches of each rank for a record; figures of a window are None in a short run.

    The window has the same number of batches of each rank after the warm-up. Ranks do not wait for
    each other, so it lasts as long as the slowest one takes.
    """
    from sdbench.encoding.encoder import STEP_PHASES

    num_images = sum(step.num_images for steps in ranks for step in steps)
    at_work = [steps[num_warmup_steps:] for steps in ranks if steps]
    num_measured = min(map(len, at_work), default=0)
    windows = [steps[:num_measured] for steps in at_work]
    measured = [step for window in windows for step in window]
    num_measured_images = sum(step.num_images for step in measured)
    if not num_measured_images:
        no_figures = dict.fromkeys(WINDOW_FIGURES)
        return no_figures | {"num_measured_steps": 0, "num_images": num_images}
    times_s = max(([step.step_time_s for step in window] for window in windows), key=sum)
    window_s = sum(times_s)
    window = summarize_window(
        times_s, (), images_per_step=num_measured_images / num_measured, window_s=window_s
    )
    ms_per_image = {
        name: 1000 * sum(step.seconds[name] for step in measured) / num_measured_images
        for name in measured[0].seconds
    }
    figures = window | {
        "images_per_second_per_device": window["images_per_second"] / len(windows),
        "megabytes_per_second": sum(step.bytes_read for step in measured) / 1e6 / window_s,
        "ms_per_image": {n: ms for n, ms in ms_per_image.items() if n not in STEP_PHASES},
        "step_ms_per_image": {name: ms_per_image[name] for name in STEP_PHASES},
    }
    return {name: figures[name] for name in WINDOW_FIGURES} | {"num_images": num_images}
