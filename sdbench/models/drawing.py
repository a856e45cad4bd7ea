"""Generates pictures by diffusers' own pipeline and samplers around our sub-models."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image, ImageDraw, ImageFont

from sdbench.base.shape import Shape
from sdbench.models.architecture import Architecture
from sdbench.models.diffusion import DiffusionModel
from sdbench.models.family import ZEROS_KEY, kind_of
from sdbench.models.samplers import SAMPLERS, check_sampler, default_sampler
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks

# As in the scheduler of Stable Diffusion 2: no step at time 0, no clipping of latents to [-1, 1].
SAMPLER_OPTIONS = {
    "steps_offset": 1,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "clip_sample": False,
}

# Captions to token ids, (B, N) int64, by the names of the tensors in a batch.
Tokenize = Callable[[Sequence[str]], Mapping[str, np.ndarray]]

# As in open-diffusion: more would be too small in one grid.
MAX_PICTURES_OF_GRID = 64
GRID_MARGIN_PX = 4
CAPTION_HEIGHT_PX, MIN_CAPTION_WIDTH_PX = 16, 112


@dataclass(frozen=True, kw_only=True)
class DrawingSettings:
    """How pictures are generated: their shape, sampler, pictures per call of the model.

    The sampler is one of `samplers.sampler_names`; None: that of `default_sampler`. Guidance leads
    from the negative prompt, or the empty one, to the prompt; up to a scale of 1 there is none, and
    None is that of the model's family.
    """

    shape: Shape
    sampler: str | None = None
    num_steps: int = 25
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    batch_size: int = 4


def make_sampler(name: str | None, schedule: Mapping[str, Any]) -> Any:
    """Make a sampler for the noise schedule of a training; a ConfigError as `check_sampler`.

    Without a name it is that of `default_sampler`.
    """
    name = name or default_sampler(schedule)
    check_sampler(name, schedule)
    kind = getattr(diffusers, SAMPLERS[kind_of(schedule)][name])
    known = inspect.signature(kind.__init__).parameters
    options = {key: value for key, value in SAMPLER_OPTIONS.items() if key in known}
    return kind.from_config(schedule, **options)


def draw(
    model: DiffusionModel,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    tokenize: Tokenize,
    settings: DrawingSettings,
    check: Callable[[], None] = lambda: None,
) -> list[Image.Image]:
    """Generate a batch of pictures, one for each prompt and seed, in the precision of training.

    The initial noise of a picture depends only on its seed, and is drawn in fp32 on the CPU:
    diffusers' pipeline gives the same picture for ``torch.Generator().manual_seed(seed)``. No other
    random numbers are drawn. `check` is called after each step of the sampler, and may raise.
    """
    assert model.text_encoders and len(prompts) == len(seeds)
    network, denoiser = model.network, model.denoiser
    sampler = make_sampler(settings.sampler, model.objective.config)
    # Prompts are encoded and latents decoded by the model, each in its encoder's type.
    parts = {model.family.denoiser: denoiser, "vae": model.vae}
    pipeline = make_pipeline(model, parts, sampler=sampler)
    pipeline.set_progress_bar_config(disable=True)
    device = next(denoiser.parameters()).device
    shape = settings.shape
    width, height = (side // pipeline.vae_scale_factor for side in shape)
    size = (model.latents.num_channels, height, width)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    noise = torch.stack([torch.randn(size, generator=generator) for generator in generators])
    was_training = model.training
    scale = settings.guidance_scale
    if scale is None:
        scale = model.family.guidance_scale

    def encode(texts: Sequence[str]) -> dict[str, torch.Tensor]:
        ids = {name: torch.from_numpy(some).to(device) for name, some in tokenize(texts).items()}
        states = model.encode_captions(ids, batch_size=len(texts))
        return {name: state.to(model.input_dtype) for name, state in states.items()}

    model.eval()
    try:
        with torch.no_grad(), model.autocast(device):
            negative = encode([settings.negative_prompt or ""] * len(prompts))
            if settings.negative_prompt is None and model.zeroes_empty_prompt:
                negative = {name: torch.zeros_like(state) for name, state in negative.items()}
            latents = pipeline(
                **network.pipeline_arguments(encode(prompts), negative),
                **network.guidance_arguments(scale, told=model.objective.guidance),
                latents=model.latents.pack(noise.to(device, model.input_dtype)),
                height=shape.height,
                width=shape.width,
                num_inference_steps=settings.num_steps,
                callback_on_step_end=lambda *_: check() or {},
                output_type="latent",
            ).images
            latents = model.latents.unpack(latents, height=height, width=width)
            images = model.decode(latents.float())
    finally:
        model.train(was_training)
    return VaeImageProcessor().postprocess(images, output_type="pil")


def make_pipeline(
    model: DiffusionModel | Architecture, parts: Mapping[str, Any], *, sampler: Any
) -> Any:
    """The pipeline of diffusers of a model, with these parts and tokenizers; others are None."""
    family = model.family
    options = dict.fromkeys((*family.parts, *family.tokenizers)) | family.pipeline_options
    if family.may_zero_empty_prompt:
        options[ZEROS_KEY] = model.zeroes_empty_prompt
    pipeline = getattr(diffusers, family.pipeline)
    return pipeline(**options | dict(parts), scheduler=sampler)


def draw_samples(
    model: DiffusionModel, prompts: Sequence[str], *, ranks: Ranks, **options: Any
) -> list[Image.Image]:
    """Generate a picture for each prompt, on all ranks together; all ranks return all pictures."""
    drawn: dict[int, np.ndarray] = {}
    for indices, pictures in draw_share(model, prompts, ranks=ranks, **options):
        drawn |= zip(indices, map(np.asarray, pictures), strict=True)
    return [Image.fromarray(picture) for picture in distributed.gather_numbered(drawn, ranks)]


def draw_share(
    model: DiffusionModel,
    prompts: Sequence[str],
    *,
    seed: int,
    ranks: Ranks,
    settings: DrawingSettings,
    shapes: Sequence[Shape] = (),
    **options: Any,
) -> Iterator[tuple[Sequence[int], list[Image.Image]]]:
    """Generate this rank's share of the pictures.

    The batches are the same for any number of ranks, and so the pictures are bitwise equal. Sharded
    weights need all ranks to call the model equally often, so some ranks generate a batch again and
    drop it. Every rank must call this and iterate to the end.

    Picture i has the i-th prompt, the seed `seed` + i, and the i-th shape of `shapes`, which begin
    again after the last one, or the shape of the settings if there are none. `options` are
    `tokenize` and `check` of `draw`. Yields numbers of prompts, and their pictures; each number on
    one rank.
    """
    size, batches = settings.batch_size, []
    shapes = shapes or [settings.shape]
    for turn, shape in enumerate(shapes):
        of_shape = dataclasses.replace(settings, shape=shape)
        numbers = range(turn, len(prompts), len(shapes))
        firsts = range(0, len(numbers), size)
        batches += [(numbers[first : first + size], of_shape) for first in firsts]
    num_rounds = math.ceil(len(batches) / ranks.world_size)
    for number in range(ranks.rank, num_rounds * ranks.world_size, ranks.world_size):
        is_kept = number < len(batches)
        indices, of_shape = batches[number if is_kept else 0]
        pictures = draw(
            model,
            [prompts[index] for index in indices],
            [seed + index for index in indices],
            settings=of_shape,
            **options,
        )
        if is_kept:
            yield indices, pictures


def make_grid(
    pictures: Sequence[Image.Image], *, num_columns: int | None = None, captions: Sequence[str] = ()
) -> Image.Image:
    """Put pictures side by side, in rows; without `num_columns` about in a square.

    The cells have the width of the widest and the height of the tallest picture, with a picture at
    the upper left. With captions, each picture has a line below it, cut to the width of the cell.
    """
    import matplotlib  # for its font, with most Latin, Greek and Cyrillic letters

    if num_columns is None:
        num_columns = math.ceil(math.sqrt(len(pictures)))
    num_columns = min(num_columns, len(pictures))
    width, height = map(max, zip(*(picture.size for picture in pictures), strict=True))
    caption_width = max(width, MIN_CAPTION_WIDTH_PX)
    cell_width = GRID_MARGIN_PX + (caption_width if captions else width)
    cell_height = height + GRID_MARGIN_PX + (CAPTION_HEIGHT_PX if captions else 0)
    num_rows = math.ceil(len(pictures) / num_columns)
    size = (num_columns * cell_width + GRID_MARGIN_PX, num_rows * cell_height + GRID_MARGIN_PX)
    grid = Image.new("RGB", size, "white")
    font_file = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    font = ImageFont.truetype(font_file, CAPTION_HEIGHT_PX - 4)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, num_columns)
        place = (column * cell_width + GRID_MARGIN_PX, row * cell_height + GRID_MARGIN_PX)
        grid.paste(picture, place)
        if captions:
            strip = Image.new("RGB", (caption_width, CAPTION_HEIGHT_PX), "white")
            ImageDraw.Draw(strip).text((0, 0), captions[index], fill="black", font=font)
            grid.paste(strip, (place[0], place[1] + picture.height))
    return grid
