"""The task of generate.py: draw pictures from prompts, on all ranks, and resume after a stop."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import shlex
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.escape import for_terminal
from sdbench.base.files import new_file, refused_unless_written, replace_file
from sdbench.base.progress import Progress
from sdbench.base.shape import Shape
from sdbench.base.units import counted
from sdbench.data import prompts
from sdbench.data.formats.pictures import GRID_NAME, PICTURES_NAME
from sdbench.measure import hardware
from sdbench.measure.hardware import Machine
from sdbench.models.architecture import Architecture, resolve_architecture
from sdbench.models.objective import PLAIN, Objective, check_objective
from sdbench.models.samplers import check_num_steps, check_sampler, default_sampler
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks
from sdbench.run.task import Run, Task
from sdbench.settings.kinds import (
    NOT_NEGATIVE,
    NOT_NEGATIVE_NUMBER,
    POSITIVE,
    TEXT,
    list_of,
    one_of,
    row_of,
)
from sdbench.settings.lora import LORA_FILE, LoraFile
from sdbench.settings.recipe import ObjectiveSettings, WatchSettings
from sdbench.settings.request import Request
from sdbench.settings.rules import settle
from sdbench.settings.setting import GIVEN, REQUIRED, Rule, on_gpu, setting, shared
from sdbench.settings.training import ModelSettings

if TYPE_CHECKING:
    from PIL import Image

TABLE_NAME = "prompts.csv"
PROMPT_FLAG = "--prompts or --prompt_file"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """Flags of generate.py."""

    model_name: str = shared(
        ModelSettings, "model_name", default=REQUIRED, help="a diffusers folder, or a hub id"
    )
    model_revision: str | None = shared(ModelSettings, "model_revision")
    lora: tuple[LoraFile, ...] = setting(
        list_of(LORA_FILE),
        (),
        "LoRA that is added to the model's weights: safetensors of diffusers, PEFT, kohya, LyCORIS "
        "(LoCon) or ComfyUI, each with a weight (default: 1); several add up",
    )
    prompts: str | None = shared(WatchSettings, "sample_prompts", acts_beside=())
    prompt_file: str | None = setting(
        TEXT,
        None,
        "the file of --prompts, whatever its name ends in",
    )
    folder: str = setting(TEXT, REQUIRED, "folder of the pictures; may hold some of them already")
    num_images_per_prompt: int = setting(POSITIVE, 1, "pictures per prompt")
    image_size: int | None = setting(
        POSITIVE,
        None,
        "side of square pictures in pixels (default: the model's own)",
        rules=(
            Rule(
                GIVEN,
                lambda s: None in (s.config.width, s.config.height),
                "--image_size has no effect",
                allowed="only without --width or without --height",
                others=("width", "height"),
                is_about_effect=True,
            ),
        ),
    )
    width: int | None = setting(
        POSITIVE, None, "width of the pictures in pixels (default: --image_size)"
    )
    height: int | None = setting(POSITIVE, None, "their height (default: --image_size)")
    scheduler: str | None = setting(
        row_of("sdbench.models.samplers:sampler_names"),
        None,
        "sampler that removes the noise (default: ddim, or flow_euler with rectified flow)",
    )
    num_steps: int = setting(POSITIVE, 25, "denoising steps", diffusers=("--num_inference_steps",))
    guidance_scale: float | None = setting(
        NOT_NEGATIVE_NUMBER,
        None,
        "scale of classifier-free guidance; at most 1: no guidance (default: 7.5, SDXL 5, SD3 7, "
        "Flux.1 1)",
    )
    guidance_embedding: float | None = shared(
        ObjectiveSettings,
        "guidance_embedding",
        help="scale of guidance that Flux.1 dev is told (default: 1; 3.5 suits the published one)",
    )
    negative_prompt: str | None = setting(
        TEXT,
        None,
        "text that guidance steers away from, for all prompts (default: the empty caption)",
    )
    seed: int = setting(NOT_NEGATIVE, 0, "seed of the first picture; the next one has the next")
    batch_size: int = setting(
        POSITIVE, 4, "pictures that a rank draws together", spelling="device_batch_size"
    )
    dtype: str | None = setting(
        one_of("fp32", "fp16", "bf16"),
        None,
        "type of weights and arithmetic (default: fp32 on a CPU; on a GPU fp16, or bf16 where "
        "encoders need it)",
        rules=(Rule(("fp16",), on_gpu, "a CPU cannot draw in this type"),),
    )


class Picture(NamedTuple):
    """A picture to draw: a row of prompts.csv."""

    uid: str
    caption: str
    seed: int
    file: str


def read_prompts(flags: GenerateFlags) -> list[tuple[str, str]]:
    """Pairs of unique name and prompt, from the flags or the file that they name."""
    if (flags.prompts is None) == (flags.prompt_file is None):
        raise ConfigError(
            "prompts come from one place",
            value=None if flags.prompts is None else flags.prompt_file,
            allowed="a text or a file",
            flag=PROMPT_FLAG,
        )
    if flags.prompts is not None:
        return prompts.read_prompts(flags.prompts, flag=PROMPT_FLAG)
    return prompts.read_prompt_file(flags.prompt_file, flag=PROMPT_FLAG)


class Generate(Task):
    """Draws pictures; its request is one of `GenerateFlags`."""

    kind = "generate"
    program = "generate.py"
    record_name = "generate.json"
    folder_flag = "--folder"
    request: Request[GenerateFlags]
    _flags: GenerateFlags
    _machine: Machine
    _ranks: Ranks
    _architecture: Architecture
    _shape: Shape
    _pictures: list[Picture]

    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Read the prompts, and check the model."""
        from sdbench.models.components import check_folders

        self._machine, self._ranks = machine, ranks
        flags, _ = settle(self.request, machine=machine, ranks=ranks)
        named = read_prompts(flags)
        self._architecture = resolve_architecture(flags.model_name, revision=flags.model_revision)
        check_folders(self._architecture)
        schedule = PLAIN.schedule(self._architecture.parts["scheduler"])
        sampler = flags.scheduler or default_sampler(schedule)
        check_sampler(sampler, schedule)
        check_num_steps(flags.num_steps, sampler=sampler, schedule=schedule, flag="--num_steps")
        family = self._architecture.family
        check_objective(
            family.objective,
            flags,
            takes_guidance=family.takes_guidance(self._architecture),
        )
        family.check_encoder_dtype(flags.dtype, flag="--dtype")
        fast = "fp16" if machine.device_type == "cuda" else "fp32"
        default_dtype = family.encoder_dtype(fast, has_bf16=machine.has_fast_bf16)
        side = flags.image_size or self._architecture.default_image_size
        self._shape = Shape(flags.width or side, flags.height or side)
        is_square = flags.width is None and flags.height is None
        flag = "--image_size" if is_square else "--width or --height"
        self._architecture.check_shape(self._shape, flag=flag)
        self._flags = dataclasses.replace(
            flags,
            **self._shape._asdict(),
            scheduler=sampler,
            guidance_scale=family.guidance_scale
            if flags.guidance_scale is None
            else flags.guidance_scale,
            dtype=flags.dtype or default_dtype,
        )
        if flags.negative_prompt is not None and self._flags.guidance_scale <= 1:
            raise ConfigError(
                "a negative prompt has no effect without guidance",
                value=self._flags.guidance_scale,
                allowed="a scale above 1, or no --negative_prompt",
                flag="--guidance_scale",
            )
        if flags.lora:
            from sdbench.models.lora_files import check_lora_files

            check_lora_files(flags.lora, self._architecture)
        num_each = flags.num_images_per_prompt
        endings = [f"_{copy}.png" for copy in range(num_each)] if num_each > 1 else [".png"]
        drawn = [(*prompt, ending) for prompt in named for ending in endings]
        self._pictures = [
            Picture(uid, caption, flags.seed + number, f"{uid}{ending}")
            for number, (uid, caption, ending) in enumerate(drawn)
        ]

    def make_folder(self) -> Path:
        """Make the folder of --folder, new or with pictures of the same job."""
        folder = Path(self._flags.folder)
        self._check_earlier_job(folder)
        with refused_unless_written(folder, what="the output folder", flag="--folder"):
            (folder / PICTURES_NAME).mkdir(parents=True, exist_ok=True)
            (folder / ".failed").unlink(missing_ok=True)
            table = io.StringIO()
            csv.writer(table, lineterminator="\n").writerows([Picture._fields, *self._pictures])
            replace_file(folder / TABLE_NAME, table.getvalue())
        return folder

    def _check_earlier_job(self, folder: Path) -> None:
        """Refuse a folder with pictures of another job."""
        if not any((folder / PICTURES_NAME).glob("*.png")):
            return
        record = folder / self.record_name
        try:
            earlier = json.loads(record.read_text(encoding="utf-8"))["job"]
        except (OSError, ValueError, KeyError, TypeError):
            earlier = {}
        unlike = {
            name: f"not the same {name.removesuffix('_crc32')}"
            for name, now in self._job.items()
            if earlier.get(name) != now
        }
        if "inputs" in unlike and "inputs" in earlier:
            from sdbench.data.formats.identity import describe_changes

            changes = describe_changes(earlier["inputs"], self._job["inputs"])
            unlike["inputs"] = "; ".join(changes.values())
        if unlike:
            raise ConfigError(
                f"the folder has pictures of another job: {', '.join(unlike.values())}",
                value=str(folder),
                allowed="a new folder, or the same job",
                flag="--folder",
            )

    @functools.cached_property
    def _job(self) -> dict[str, Any]:
        """The facts that decide the pictures, as JSON values."""
        from sdbench.data.formats.identity import identify

        flags, architecture = self._flags, self._architecture
        # The files are read as a whole, and only the first rank compares them.
        parts = architecture.modules if self._ranks.rank == 0 else ()
        model = architecture.identify(parts, seed=flags.seed)
        names = ("num_images_per_prompt", "width", "height", "scheduler", "num_steps")
        names += ("guidance_scale", "negative_prompt", "guidance_embedding")
        names += ("seed", "batch_size", "dtype")
        return {
            "model_name": str(architecture.weights_folder or architecture.name),
            "model_revision": architecture.revision,
            "inputs": identify({}, model=model),
            "lora": [
                [zlib.crc32(b"".join(part.read_bytes() for part in one.files)), one.weight]
                for one in flags.lora
            ],
            "prompts_crc32": zlib.crc32(json.dumps(self._pictures).encode()),
            **{name: getattr(flags, name) for name in names},
        }

    def for_person(self) -> str:
        """What is about to be drawn."""
        flags = self._flags
        lines = [
            f"Drawing {counted(len(self._pictures), 'picture')} of {self._shape} px by "
            f"{self._architecture.name} into {flags.folder}: {flags.scheduler}, "
            f"{counted(flags.num_steps, 'step')}, guidance {flags.guidance_scale:g}, "
            f"{flags.dtype}, ranks {self._ranks.world_size}"
        ]
        if flags.negative_prompt:
            lines.append(f"Negative prompt: {for_terminal(flags.negative_prompt)}")
        if flags.lora:
            files = ", ".join(f"{path} ({share:g})" for path, share in flags.lora)
            lines.append(f"With LoRA: {files}.")
        if self._architecture.weights_folder is None:
            lines.append(f"{self._architecture.name} has random weights: the pictures will be too.")
        return "\n".join(lines)

    def for_record(self, *, num_restarts: int) -> dict[str, Any]:
        """Flags, job and machine."""
        return {
            "config": dataclasses.asdict(self._flags),
            "job": self._job,
            "machine": hardware.as_dict(self._machine),
        }

    def work(self, run: Run) -> dict[str, Any]:
        """Draw the missing pictures, and make the grid."""
        started_s = time.perf_counter()
        missing = self._missing_batches(run.folder) if self._ranks.rank == 0 else []
        batches = distributed.broadcast(missing, self._ranks)
        self._draw(batches, run.folder)
        distributed.gather(None, self._ranks)  # all have drawn their share
        if self._ranks.rank != 0:
            return {}
        self._make_grid(run.folder)
        num_drawn = sum(map(len, batches))
        return {
            "summary": {
                "num_pictures": len(self._pictures),
                "num_drawn": num_drawn,
                "pictures_per_second": num_drawn / (time.perf_counter() - started_s),
            }
        }

    def _missing_batches(self, folder: Path) -> list[list[Picture]]:
        """The batches with a missing picture.

        Batches, and so pictures, do not depend on the number of ranks and of runs.
        """
        there = {path.name for path in (folder / PICTURES_NAME).iterdir()}
        size = self._flags.batch_size
        batches = [
            self._pictures[first : first + size] for first in range(0, len(self._pictures), size)
        ]
        return [batch for batch in batches if any(picture.file not in there for picture in batch)]

    def _draw(self, batches: list[list[Picture]], folder: Path) -> None:
        mine = batches[self._ranks.rank :: self._ranks.world_size]
        if not mine:
            return
        from sdbench.data.batches.tokenizer import CaptionTokenizers
        from sdbench.models.drawing import DrawingSettings, draw

        flags, architecture = self._flags, self._architecture
        model = _build(architecture, flags, machine=self._machine, ranks=self._ranks)
        tokenize = CaptionTokenizers.of(architecture)
        settings = DrawingSettings(
            shape=self._shape,
            sampler=flags.scheduler,
            num_steps=flags.num_steps,
            guidance_scale=flags.guidance_scale,
            negative_prompt=flags.negative_prompt,
        )
        # All ranks advance at about the same pace.
        num_ranks, is_first = self._ranks.world_size, self._ranks.rank == 0
        total = num_ranks * sum(map(len, mine))
        with Progress(total, unit="picture", enabled=is_first) as progress:
            for batch in mine:
                _, captions, seeds, files = zip(*batch, strict=True)
                pictures = draw(model, captions, seeds, tokenize=tokenize, settings=settings)
                for file, picture in zip(files, pictures, strict=True):
                    _save(picture, folder / PICTURES_NAME / file)
                progress.advance(num_ranks * len(batch))

    def _make_grid(self, folder: Path) -> None:
        from sdbench.data.batches.transforms import open_picture
        from sdbench.models.drawing import MAX_PICTURES_OF_GRID, make_grid

        paths = [folder / PICTURES_NAME / picture.file for picture in self._pictures]
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise RunError(
                f"{counted(len(missing), 'picture is', 'pictures are')} missing, the first of them "
                f"{missing[0]}: do all nodes share the folder?"
            )
        shown = slice(MAX_PICTURES_OF_GRID)
        num_each = self._flags.num_images_per_prompt
        grid = make_grid(
            [open_picture(path) for path in paths[shown]],
            num_columns=num_each if num_each > 1 else None,
            captions=[picture.caption for picture in self._pictures[shown]],
        )
        _save(grid, folder / GRID_NAME)

    def conclude(self, content: dict[str, Any], folder: Path) -> str:
        """Where the pictures are."""
        summary = content["summary"]
        return (
            f"{counted(summary['num_pictures'], 'picture')} in {folder / PICTURES_NAME}, "
            f"{summary['num_drawn']} of them drawn now, in {content['duration_s']:.1f} s; all at a "
            f"glance: {folder / GRID_NAME}\n"
            "How well they suit their prompts, by a network of yours: python -m sdbench score "
            f"{shlex.quote(str(folder))} --clip_network FOLDER"
        )


def _build(
    architecture: Architecture, flags: GenerateFlags, *, machine: Machine, ranks: Ranks
) -> Any:
    """The model on the device of this rank, in the type of --dtype."""
    import torch

    from sdbench.models.diffusion import build_model
    from sdbench.models.weights import ENCODER_DTYPES

    if flags.dtype == "fp32":
        torch.backends.cudnn.allow_tf32 = False
    model = build_model(
        architecture,
        seed=flags.seed,
        # A small change would be lost in the rounding of half-precision weights.
        encoder_dtype="fp32" if flags.lora else flags.dtype,
        trained=(),
        objective=Objective(guidance_embedding=flags.guidance_embedding),
        device=f"cuda:{ranks.local_rank}" if machine.device_type == "cuda" else "cpu",
    )
    if flags.lora:
        from sdbench.models.lora_files import fuse_lora_files

        fuse_lora_files(model, flags.lora)
    model.weights_dtype = ENCODER_DTYPES[flags.dtype]
    for part in architecture.modules:
        torch.nn.Module.to(model.get_submodule(part), model.weights_dtype)
    return model


def _save(picture: Image.Image, path: Path) -> None:
    with new_file(path, is_private=False) as new:
        picture.save(new, format="png")
