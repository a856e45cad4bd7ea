"""Evaluations of a model in training every so many steps: validation losses, pictures, scores."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from sdbench import data
from sdbench.base.errors import ConfigError, blamed_on
from sdbench.base.files import replace_file
from sdbench.data.identity import find_overlap
from sdbench.data.pipeline.batches import BatchReader
from sdbench.data.remote import identify
from sdbench.data.samples import Samples
from sdbench.data.source import SourceConfig
from sdbench.engines.job import TrainJob
from sdbench.engines.train_state import TrainState
from sdbench.models.drawing import (
    MAX_PICTURES_OF_GRID,
    DrawingSettings,
    draw_samples,
    make_grid,
)
from sdbench.plan.resolve import Plan
from sdbench.settings.data import COPY, PRECOMPUTED
from sdbench.tasks.prompts import make_tokenizer, read_prompt_file
from sdbench.tasks.validation import (
    averaged_weights,
    held_out_batches,
    open_held_out,
    reconstruction_loss,
    validation_loss,
)

SAMPLES_NAME = "samples"

# Raises to end an evaluation early; called now and then, equally often on every rank.
Check = Callable[[], None]
# Returns the facts of an event; called on every rank.
Evaluation = Callable[[TrainState, Check], dict[str, Any]]


def held_out_source(plan: Plan) -> SourceConfig:
    """The held-out samples of --validation_remote: images, or latents for a step on latents.

    Raises:
        ConfigError: They cannot be used, or are the training data.
    """
    config: Any = plan.config
    place = config.validation_remote
    trained_on = (config.remote, config.local, config.class_remote)
    if identify(place) in {identify(other) for other in trained_on if other}:
        raise ConfigError(
            "the model is trained on the held-out samples",
            value=place,
            allowed="a place other than that of the training data",
            flag="--validation_remote",
        )
    source = dataclasses.replace(
        plan.source,
        remote=place,
        local=None,
        streams=None,
        # It is read many times.
        remote_files=COPY,
        tar_sizes=None,
        data_format=data.detect_format(place),
        latents=PRECOMPUTED if config.online_preprocessing else config.latents,
        caption=None,  # a subject's does not apply to them
    )
    with blamed_on("--validation_remote"):
        data.check(dataclasses.replace(source, device_batch_size=1))
    return source


def describe_overlap(plan: Plan, held_out: SourceConfig) -> str | None:
    """A sentence about held-out samples that are trained on as well, or None."""
    sources = [source for source in (plan.source, plan.class_source) if source is not None]
    found = [file for source in sources for file in find_overlap(source, held_out)]
    if not found:
        return None
    return (
        f"Validation sees training data: {len(found)} files of --validation_remote are trained on "
        f"too, or have the name and size of one that is, such as {found[0]!r}."
    )


def read_prompts(config: Any) -> list[tuple[str, str]]:
    """The first prompts of --sample_prompts with their names; errors as of `read_prompt_file`."""
    rows = read_prompt_file(config.sample_prompts, flag="--sample_prompts")
    return rows[: config.num_sample_images]


def make_evaluations(
    plan: Plan, job: TrainJob, *, held_out: SourceConfig | None, folder: Path
) -> dict[str, tuple[int, Evaluation]]:
    """The evaluations that the config asks for: event to the steps between two, and the evaluation.

    Args:
        plan: Of the run.
        job: Its model is evaluated.
        held_out: As `held_out_source` returns it; opened here, once. None where it is not needed.
        folder: Of the run; gets the grids.
    """
    config: Any = plan.config
    evaluations: dict[str, tuple[int, Evaluation]] = {}
    if config.validate_every_batches is not None:
        assert held_out is not None
        validate = functools.partial(_validate, plan, job, open_held_out(held_out))
        evaluations["validation"] = (config.validate_every_batches, validate)
    if config.sample_every_batches is not None:
        sample = functools.partial(_sample, plan, job, read_prompts(config), folder / SAMPLES_NAME)
        evaluations["samples"] = (config.sample_every_batches, sample)
    if config.score_every_batches is not None:
        assert held_out is not None
        samples = data.open_samples(dataclasses.replace(held_out, device_batch_size=1))
        score = functools.partial(_score, plan, job, samples)
        evaluations["scores"] = (config.score_every_batches, score)
    return evaluations


def _validate(
    plan: Plan, job: TrainJob, reader: BatchReader, state: TrainState, check: Check
) -> dict[str, Any]:
    """The loss of the weights and of their average, if one is kept."""
    config: Any = plan.config

    def measure() -> dict[str, Any]:
        batches = held_out_batches(
            reader,
            num_samples=config.num_validation_images,
            batch_size=config.device_train_microbatch_size,
            ranks=plan.ranks,
            check=check,
        )
        loss = reconstruction_loss if config.train == "vae" else validation_loss
        return loss(job.model, batches, ranks=plan.ranks)

    facts = measure()
    if state.averages is not None:
        with averaged_weights(job, state.averages, ranks=plan.ranks):
            facts["ema_loss"] = measure()["loss"]
    return facts


def _sample(
    plan: Plan,
    job: TrainJob,
    rows: list[tuple[str, str]],
    folder: Path,
    state: TrainState,
    check: Check,
) -> dict[str, Any]:
    """A picture for each prompt, by the averaged weights if they are kept."""
    prompts = [prompt for _, prompt in rows]
    with _best_weights(plan, job, state):
        pictures = draw_samples(job.model, prompts, check=check, **_drawing_options(plan))
    path: Path | None = folder / f"step_{state.num_steps:08d}.png"
    if plan.ranks.rank == 0:
        try:
            _keep_pictures(pictures, rows, grid=path)
        except OSError as error:  # a full disk is no reason to stop training
            print(f"warning: pictures of step {state.num_steps} are lost: {error}", file=sys.stderr)
            path = None
    file = None if path is None else f"{SAMPLES_NAME}/{path.name}"
    return {"file": file, "num_pictures": len(pictures)}


def _keep_pictures(pictures: list[Image.Image], rows: list[tuple[str, str]], *, grid: Path) -> None:
    """Write a grid of the first pictures and, if there are more, a file of each."""
    grid.parent.mkdir(exist_ok=True)
    if len(pictures) > MAX_PICTURES_OF_GRID:
        grid.with_suffix("").mkdir(exist_ok=True)
        for (uid, _), picture in zip(rows, pictures, strict=True):
            _write_png(picture, grid.with_suffix("") / f"{uid}.png")
    shown = slice(MAX_PICTURES_OF_GRID)
    captions = [prompt for _, prompt in rows[shown]]
    _write_png(make_grid(pictures[shown], captions=captions), grid)


def _write_png(picture: Image.Image, path: Path) -> None:
    buffer = io.BytesIO()
    picture.save(buffer, "png")
    replace_file(path, buffer.getvalue())


def _score(
    plan: Plan, job: TrainJob, samples: Samples, state: TrainState, check: Check
) -> dict[str, Any]:
    """FID and CLIP score of the averaged weights, or of the weights if no average is kept."""
    from sdbench.tasks.score.held_out import score_model
    from sdbench.tasks.score.networks import open_networks

    # Loaded each time: in between, training has the memory.
    config: Any = plan.config
    device = next(job.model.parameters()).device
    networks = open_networks(config, image_size=config.image_size, device=device)
    with _best_weights(plan, job, state):
        return score_model(
            job.model,
            samples,
            networks=networks,
            num_images=config.num_score_images,
            read_avif=plan.source.read_avif,
            skips_bad=plan.source.on_bad_sample == "skip",
            check=check,
            **_drawing_options(plan),
        )


def _drawing_options(plan: Plan) -> dict[str, Any]:
    """The arguments of `draw_samples` that a run sets."""
    config: Any = plan.config
    return {
        "seed": config.seed,
        "tokenize": make_tokenizer(plan.architecture, new_token=config.learned_token),
        "settings": DrawingSettings(
            image_size=config.image_size,
            num_steps=config.sample_steps,
            guidance_scale=config.sample_guidance,
            batch_size=config.device_train_microbatch_size,
        ),
        "ranks": plan.ranks,
    }


@contextlib.contextmanager
def _best_weights(plan: Plan, job: TrainJob, state: TrainState) -> Iterator[None]:
    if state.averages is None:
        yield
        return
    with averaged_weights(job, state.averages, ranks=plan.ranks):
        yield
