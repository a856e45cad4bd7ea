"""The task of `precompute`: encode a data set of images into one of latents.

The ranks share the missing shards; rank 0 joins them at the end. encoder.py has the work of one
rank, which needs torch.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench import data
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.host_memory import can_keep_freed_memory, keep_freed_memory
from sdbench.data.identity import identify_data
from sdbench.data.prepare.convert import choose_samples_per_shard
from sdbench.data.prepare.flags import ConvertFlags
from sdbench.data.prepare.writers import Output, Totals, open_output
from sdbench.data.remote import identify
from sdbench.data.samples import SampleType
from sdbench.data.source import SourceConfig
from sdbench.measure import hardware
from sdbench.measure.hardware import Machine
from sdbench.measure.summary import interval_for_record
from sdbench.models.architecture import resolve_architecture
from sdbench.ranks import distributed, ray_cluster
from sdbench.ranks.distributed import Ranks
from sdbench.record.store import INVALID, PRECOMPUTE, RunFolder
from sdbench.run.runner import run
from sdbench.run.task import Run, Task
from sdbench.settings.arithmetic import ArithmeticSpeedups
from sdbench.settings.data import ONLINE, DataSettings
from sdbench.settings.kinds import POSITIVE, TEXT, list_of, one_of
from sdbench.settings.measuring import RunSettings
from sdbench.settings.online import ActorSettings
from sdbench.settings.ray import RAY, RaySettings
from sdbench.settings.request import Request, parse
from sdbench.settings.rules import settle
from sdbench.settings.setting import REQUIRED, setting, shared
from sdbench.settings.training import ModelSettings
from sdbench.statistics.intervals import within_run_interval
from sdbench.tasks import TASKS

if TYPE_CHECKING:
    from sdbench.tasks.encode.encoder import EncodeJob, Step
    from sdbench.tasks.encode.images import ImageReader
    from sdbench.tasks.encode.shards import Encoding

EPILOG = """\
examples:
  python -m sdbench precompute --remote photos --folder latents
      a folder of pictures with captions, at the model's own resolution, to an MDS data set
  torchrun --nproc_per_node 8 -m sdbench precompute --remote 's3://bucket/{00000..00127}.tar' \\
      --image_size 256,512 --device_batch_size 64 --num_workers 8 --folder latents
      many tars at two resolutions, on 8 GPUs
  python -m sdbench precompute --model_name tiny --use_synth_data --max_samples 100 --folder latents
      a miniature in seconds
  python -m sdbench precompute --engine ray --ray_address auto --num_decoders 48 \\
      --num_encoders 16 --remote 's3://bucket/{00000..00127}.parquet' --folder latents
      on all machines of a Ray cluster
then train on it:
  composer benchmark.py --remote latents --latents precomputed

Stopped at any moment, the same command goes on where it was, with any number of ranks: finished
shards are kept in FOLDER.partial until all are there.

exit codes: 0 ok, 1 the run failed (its record says why), 2 bad input, 130 stopped
"""


# What is stored of the VAE, by the value of --stored_latents.
SAMPLE_TYPES = {"moments": SampleType.MOMENTS, "sampled": SampleType.LATENTS}
# At 512 px the VAE holds tensors of 128 x 512 x 512 values for each image, 128 MiB in fp32.
GPU_BATCH_SIZE, CPU_BATCH_SIZE = 32, 4
GPU_NUM_WORKERS = 8
# A rank that has finished its share waits for the others, which may have one more shard.
RANK_TIMEOUT_S = 24 * 3600.0
# Who encodes.
TORCH = "torch"
# The first batches include allocations and the choice of kernels.
NUM_WARMUP_STEPS = 2
NUM_BAD_NAMED = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecomputeSettings:
    """Settings of precompute. None means: chosen for the machine, then printed."""

    out: str = setting(TEXT, REQUIRED, "folder of the new data set", spelling="folder")
    out_format: str = setting(one_of("mds", "parquet"), "mds", "how latents are stored")
    latents: str = setting(
        one_of("moments", "sampled"),
        "moments",
        "what is stored of the VAE: mean and log-variance, so that training draws another sample "
        "each epoch, or one sample times the scaling factor",
        spelling="stored_latents",
    )
    image_size: tuple[int, ...] | None = setting(
        list_of(POSITIVE),
        None,
        "side of the square images in pixels, or several (default: the model's own, at most 256 "
        "without a GPU, as benchmark.py)",
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
        help="samples of the source that make a file of the new data set; what a kill costs "
        "(default: for about 16 files, 32 to 512, whole batches)",
    )
    max_samples: int | None = shared(ConvertFlags, "max_samples")
    engine: str = setting(
        one_of(TORCH, RAY),
        TORCH,
        "who encodes: this process and those that a launcher starts beside it, or actors of Ray "
        "Data anywhere in a cluster",
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
    encoder_dtype: str | None = shared(ArithmeticSpeedups, "encoder_dtype", presets={}, rules=())
    data_format: str = shared(DataSettings, "data_format")
    remote: str | None = shared(DataSettings, "remote")
    local: str | None = shared(DataSettings, "local")
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


# --- The plan ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run with nothing left open.

    Attributes:
        job: What is to be encoded.
        reader: Reads the images.
        out: Folder of the result.
        out_format: ``mds`` or ``parquet``.
        config: The value of every flag.
        keep_memory: Whether freed main memory is kept for the next batch.
    """

    job: EncodeJob
    reader: ImageReader
    out: Path
    out_format: str
    config: dict[str, Any]
    keep_memory: bool

    @property
    def num_ahead(self) -> int:
        """Batches that are ready, about, when the first one is taken."""
        config = self.config
        num_loading = config["num_workers"]
        if config["engine"] == RAY:
            num_loading = config["num_decoders"] + config["num_encoders"]
        return num_loading * config["prefetch_factor"]


def _resolve(flags: PrecomputeSettings, *, machine: Machine, ranks: Ranks) -> Plan:
    """Choose the open settings, check them, and open the source."""
    from sdbench.plan.resolve import default_image_size
    from sdbench.tasks.encode.encoder import EncodeJob
    from sdbench.tasks.encode.images import ImageReader

    architecture = resolve_architecture(
        flags.model_name, revision=flags.model_revision, random_weights=flags.random_weights
    )
    flags = _choose(flags, machine=machine, ranks=ranks)
    on_gpu = _encodes_on_gpu(flags, machine)
    sizes = sorted(set(flags.image_size or [default_image_size(architecture, on_gpu=on_gpu)]))
    for size in sizes:
        architecture.check_image_size(size)
    # Every rank may read every sample, so the source is the same for all.
    source = SourceConfig.from_settings(
        flags,
        image_size=sizes[0],
        latents=ONLINE,
        device_batch_size=1,
        shuffle=False,
        tokenizer_folder=architecture.tokenizer_folder,
        pad_token_id=architecture.tokenizer["pad_token_id"],
        text_embedding_dim=architecture.text_encoder["hidden_size"],
        num_images=flags.max_samples if flags.data_format == "synthetic" else None,
    )
    configs = tuple(dataclasses.replace(source, image_size=size) for size in sizes)
    reader = ImageReader(configs)
    num_samples = min(reader.num_samples, flags.max_samples or reader.num_samples)
    if flags.samples_per_shard is None:
        # Whole batches, as a short one at the end of each shard would leave the device idle.
        num_batches = -(-choose_samples_per_shard(num_samples) // flags.batch_size)
        flags = dataclasses.replace(flags, samples_per_shard=num_batches * flags.batch_size)
    job = EncodeJob(
        configs=configs,
        architecture=architecture,
        sample_type=SAMPLE_TYPES[flags.latents],
        encoder_dtype=flags.encoder_dtype,
        batch_size=flags.batch_size,
        num_samples=num_samples,
        samples_per_shard=flags.samples_per_shard,
    )
    image_size = sizes[0] if len(sizes) == 1 else ",".join(map(str, sizes))
    return Plan(
        job=job,
        reader=reader,
        out=Path(flags.out),
        out_format=flags.out_format,
        config=dataclasses.asdict(flags) | {"image_size": image_size},
        keep_memory=not on_gpu and can_keep_freed_memory(),
    )


def _choose(flags: PrecomputeSettings, *, machine: Machine, ranks: Ranks) -> PrecomputeSettings:
    """Choose the settings that depend on the machine or on the place of the data."""
    on_gpu = _encodes_on_gpu(flags, machine)
    data_format = data.resolve_format(
        data_format=flags.data_format,
        use_synth_data=flags.use_synth_data,
        remote=flags.remote,
        local=flags.local,
    )
    if data_format == "synthetic" and not (flags.use_synth_data or flags.data_format != "auto"):
        raise ConfigError(
            "There is nothing to encode",
            value=None,
            allowed="a folder or URL of images, or --use_synth_data",
            flag="--remote or --local",
        )
    if flags.encoder_dtype == "fp16" and not on_gpu:
        raise ConfigError(
            "A CPU cannot run the encoders in this type",
            value="fp16",
            allowed="fp32 | bf16",
            flag="--encoder_dtype",
        )
    cores_per_rank = machine.num_cpu_cores // ranks.local_world_size
    chosen = {
        "encoder_dtype": machine.fast_dtype(
            "cuda" if on_gpu else "cpu", on_ray=flags.engine == RAY
        ),
        "batch_size": GPU_BATCH_SIZE if on_gpu else CPU_BATCH_SIZE,
        # Without a GPU the cores are for the encoders.
        "num_workers": min(GPU_NUM_WORKERS, cores_per_rank)
        if on_gpu and flags.engine == TORCH
        else 0,
    }
    chosen = {name: value for name, value in chosen.items() if getattr(flags, name) is None}
    return dataclasses.replace(flags, **chosen, data_format=data_format)


def _encodes_on_gpu(flags: PrecomputeSettings, machine: Machine) -> bool:
    if flags.engine == TORCH:
        return machine.device_type == "cuda"
    from sdbench.tasks.encode.ray_stream import encoder_resources

    return "GPU" in encoder_resources(flags)


def _check_engine(request: Request[PrecomputeSettings], *, ranks: Ranks) -> None:
    """Connect to Ray if that is the engine."""
    config = request.config
    if config.engine == TORCH:
        return
    if ranks.world_size > 1:
        raise ConfigError(
            "one process takes what the actors of Ray Data give",
            value=f"{ranks.world_size} ranks",
            allowed="the command without a launcher",
            flag="--engine",
        )
    ray_cluster.connect(config.ray_address)


def _job_facts(plan: Plan) -> dict[str, Any]:
    """The facts that decide the content of each shard, which a resume must share."""
    config, architecture = plan.config, plan.job.architecture
    names = (
        "data_format",
        "image_size",
        "latents",
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
    )
    place = config["remote"] or config["local"]
    return {
        "command": "precompute",
        "source": None if place is None else identify(place),
        "model_name": str(architecture.weights_folder or architecture.name),
        "model_revision": architecture.revision,
        "num_samples": plan.job.num_samples,
        "weights": architecture.identify_weights(("vae", "text_encoder")),
        **{name: config[name] for name in names},
    }


# --- The run -------------------------------------------------------------------------------------


class Precompute(Task):
    """Encodes a data set; its request is one of `PrecomputeSettings`."""

    kind = PRECOMPUTE
    program = "python -m sdbench precompute"
    timeout_s = RANK_TIMEOUT_S
    _machine: Machine
    _ranks: Ranks
    _plan: Plan
    _totals: Totals
    # The output and the numbers of its missing shards, on the first rank.
    _output: tuple[Output, list[int]] | None = None

    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Make the plan."""
        self._machine, self._ranks = machine, ranks
        settle(self.request, machine=machine, ranks=ranks)
        _check_engine(self.request, ranks=ranks)
        self._plan = _resolve(self.request.config, machine=machine, ranks=ranks)

    def make_folder(self) -> Path:
        """A new one in --results_dir; begins or resumes the output, too."""
        plan = self._plan
        output = open_output(
            plan.out,
            data_format=plan.out_format,
            columns=plan.job.columns(),
            num_chunks=plan.job.num_shards,
            job=_job_facts(plan),
            data=identify_data(plan.job.configs[:1]),
            accepts_changes=plan.config["changed_inputs"] == "accept",
        )
        self.resources.enter_context(output.lock())
        self._output = output, output.missing_chunks()
        config = plan.config
        size = str(config["image_size"]).replace(",", "-")
        name = f"precompute-{config['data_format']}-{size}px"
        return RunFolder.create(config["results_dir"], machine=self._machine.slug, name=name)

    def for_person(self) -> str:
        """The source, the output and its missing shards."""
        assert self._output is not None
        return _describe(self._plan, ranks=self._ranks, num_missing=len(self._output[1]))

    def for_record(self, *, num_restarts: int) -> dict[str, Any]:
        """The plan as a record has it."""
        return _describe_for_record(self._plan, machine=self._machine, ranks=self._ranks)

    def work(self, run: Run) -> dict[str, Any]:
        """Encode the missing shards, and join all of them."""
        plan = self._plan
        output, numbers = distributed.broadcast(self._output, self._ranks)
        try:
            steps = self._encode(output, numbers)
            everyone = distributed.gather((steps, _peak_memory_gib(self._machine)), self._ranks)
            if self._ranks.rank != 0:
                return {}
            totals = self._totals = _finish(plan, output)
        except BaseException:
            print("Finished shards are kept: the same command goes on from them.", file=sys.stderr)
            raise
        summary = summarize(
            [steps for steps, _ in everyone], num_warmup_steps=plan.num_ahead + NUM_WARMUP_STEPS
        )
        return {
            "summary": summary
            | {
                "peak_memory_gib": max(peak for _, peak in everyone),
                "num_images_written": totals.num_written,
                "num_bad_samples": totals.num_bad,
                "num_dropped_samples": plan.reader.num_dropped,
            }
        }

    def _encode(self, output: Output, numbers: list[int]) -> list[Step]:
        """Do this rank's part of the missing shards."""
        from sdbench.tasks.encode.shards import ShardWriter

        plan, ranks = self._plan, self._ranks
        writer = ShardWriter(plan.job, encoding=self._make_encoding(), output=output)
        num_missing = sum(len(plan.job.indices(number)) for number in numbers)
        writer.write(
            numbers[ranks.rank :: ranks.world_size],
            num_missing=num_missing if ranks.rank == 0 else None,
        )
        return writer.steps

    def _make_encoding(self) -> Encoding:
        plan = self._plan
        if self.request.config.engine == RAY:
            from sdbench.tasks.encode.ray_shards import EncodingOnRay

            return EncodingOnRay(
                plan.job,
                settings=self.request.config,
                num_samples=plan.reader.num_samples,
                num_ahead=plan.num_ahead,
            )
        from sdbench.tasks.encode.shards import EncodingHere

        if plan.keep_memory:
            keep_freed_memory()
        on_gpu = self._machine.device_type == "cuda"
        encoder = plan.job.make_encoder(f"cuda:{self._ranks.local_rank}" if on_gpu else "cpu")
        return EncodingHere(plan.job, reader=plan.reader, encoder=encoder)

    def conclude(self, content: dict[str, Any], folder: Path) -> str:
        """The result in words."""
        return _describe_result(self._plan, content, self._totals)


def _describe(plan: Plan, *, ranks: Ranks, num_missing: int) -> str:
    """The plan in words."""
    job, config = plan.job, plan.config
    place = config["remote"] or config["local"]
    values = ", ".join(
        f"{name} {config[name]}"
        for name in ("batch_size", "encoder_dtype", "num_workers", "samples_per_shard")
    )
    lines = [
        f"Encoding {job.num_samples} {config['data_format']} images"
        f"{f' of {place!r}' if place else ''} at {config['image_size']} px by "
        f"{job.architecture.name} to {plan.out} ({plan.out_format}, {config['latents']}): "
        f"{values}, ranks {ranks.world_size}"
    ]
    if job.architecture.weights_folder is None:
        lines.append(
            f"{job.architecture.name} has random weights: such latents are for measuring speed."
        )
    if plan.reader.num_dropped:
        lines.append(f"{plan.reader.num_dropped} samples are left out by --filters.")
    if num_missing < job.num_shards:
        num_there = job.num_shards - num_missing
        lines.append(f"resuming: {num_there} of {job.num_shards} shards are there")
    return "\n".join(lines)


def _describe_for_record(plan: Plan, *, machine: Machine, ranks: Ranks) -> dict[str, Any]:
    architecture = plan.job.architecture
    return {
        "config": plan.config | {"cpu_allocator": "keep" if plan.keep_memory else "default"},
        "workload": {
            "architecture": architecture.name,
            "weights": "random" if architecture.weights_folder is None else "loaded",
            "revision": architecture.revision,
            "num_samples": plan.job.num_samples,
            "num_shards": plan.job.num_shards,
        },
        "machine": hardware.as_dict(machine),
        "ranks": {
            "world_size": ranks.world_size,
            "num_nodes": ranks.num_nodes,
            "ranks_per_node": ranks.local_world_size,
        },
    }


def _peak_memory_gib(machine: Machine) -> float:
    if machine.device_type == "cpu":
        return hardware.peak_resident_memory_gib()
    import torch

    return torch.cuda.max_memory_allocated() / hardware.BYTES_PER_GIB


def _finish(plan: Plan, output: Output) -> Totals:
    """Join the shards, and check that no sample is missing."""
    totals = output.finish()
    num_expected = plan.job.num_samples
    if totals.num_written + totals.num_bad != num_expected:
        raise RunError(
            f"{num_expected} samples were to be encoded, {totals.num_written} were written and "
            f"{totals.num_bad} left out",
            status=INVALID,
        )
    return totals


def summarize(ranks: Sequence[Sequence[Step]], *, num_warmup_steps: int) -> dict[str, Any]:
    """The figures of a run, for the record's `summary`; None where it was too short for a window.

    The window has the same number of batches of each rank after the warm-up. Ranks do not wait for
    each other, so it lasts as long as the slowest one takes.

    Args:
        ranks: The batches of each rank, in order.
        num_warmup_steps: Batches at the beginning that are not counted.
    """
    from sdbench.tasks.encode.encoder import STEP_PHASES

    num_images = sum(step.num_images for steps in ranks for step in steps)
    at_work = [steps[num_warmup_steps:] for steps in ranks if steps]
    num_measured = min(map(len, at_work), default=0)
    windows = [steps[:num_measured] for steps in at_work]
    measured = [step for window in windows for step in window]
    num_measured_images = sum(step.num_images for step in measured)
    if not num_measured_images:
        unknown = (
            "images_per_second",
            "images_per_second_interval",
            "images_per_second_per_device",
            "window_s",
            "megabytes_per_second",
            "ms_per_image",
            "step_ms_per_image",
        )
        return {**dict.fromkeys(unknown), "num_measured_steps": 0, "num_images": num_images}
    times_s = max(([step.step_time_s for step in window] for window in windows), key=sum)
    window_s = sum(times_s)
    rate = num_measured_images / window_s
    interval = within_run_interval(times_s, images_per_step=num_measured_images / num_measured)
    ms_per_image = {
        name: 1000 * sum(step.seconds[name] for step in measured) / num_measured_images
        for name in measured[0].seconds
    }
    return {
        "images_per_second": rate,
        "images_per_second_interval": interval_for_record(interval),
        "images_per_second_per_device": rate / len(windows),
        "num_measured_steps": num_measured,
        "window_s": window_s,
        "megabytes_per_second": sum(step.bytes_read for step in measured) / 1e6 / window_s,
        "ms_per_image": {n: ms for n, ms in ms_per_image.items() if n not in STEP_PHASES},
        "step_ms_per_image": {name: ms_per_image[name] for name in STEP_PHASES},
        "num_images": num_images,
    }


def _describe_result(plan: Plan, content: dict[str, Any], totals: Totals) -> str:
    from sdbench.report.terminal import format_rate

    summary = content["summary"]
    lines = [
        f"Wrote {totals.num_written} samples to {plan.out}, {totals.num_bad} bad ones left out; "
        f"{summary['num_images']} of them now, in {content['duration_s']:.1f} s."
    ]
    if summary["images_per_second"] is None:
        lines.append("Too few batches to measure a rate after the first ones.")
    else:
        split = ", ".join(f"{name} {ms:.3g}" for name, ms in summary["step_ms_per_image"].items())
        lines.append(f"images/s: {format_rate(summary)}; ms per image: {split}")
    lines += [f"left out: {sentence}" for sentence in totals.bad[:NUM_BAD_NAMED]]
    if totals.num_bad > NUM_BAD_NAMED:
        lines.append(f"and {totals.num_bad - NUM_BAD_NAMED} more")
    return "\n".join(lines)
