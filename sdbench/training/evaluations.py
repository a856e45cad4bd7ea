"""Evaluations of a model in training every so many steps: validation losses, pictures, scores."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from sdbench import data
from sdbench.base.errors import ConfigError, blamed_on
from sdbench.base.files import new_file
from sdbench.base.shape import Shape
from sdbench.data.batches.tokenizer import CaptionTokenizers
from sdbench.data.formats.identity import find_overlap
from sdbench.data.places.remote import storable_name
from sdbench.data.prompts import read_prompts
from sdbench.data.source import SourceConfig
from sdbench.engines.job import TrainJob
from sdbench.engines.train_state import TrainState
from sdbench.measure.watch import StepWatch
from sdbench.models.drawing import MAX_PICTURES_OF_GRID, DrawingSettings, draw_samples, make_grid
from sdbench.models.samplers import check_num_steps, default_sampler
from sdbench.plan.draft import Plan
from sdbench.plan.resolve import check_latents
from sdbench.settings.data import COPY, PRECOMPUTED
from sdbench.settings.kinds import read_shapes
from sdbench.settings.recipe import TrainConfig
from sdbench.training.validation import (
    averaged_weights,
    held_out_batches,
    open_held_out,
    read_once,
    reconstruction_loss,
    validation_loss,
)

SAMPLES_NAME = "samples"

# Returns the facts of an event; called on every rank. A stop signal ends it early, by an exception
# on all ranks.
Evaluation = Callable[[TrainState], dict[str, Any]]


def _held_out_source(plan: Plan[TrainConfig]) -> SourceConfig:
    """The held-out samples of --validation_remote: images, or latents for a step on latents."""
    config = plan.config
    place = config.validation_remote
    trained_on = (config.remote, config.local, config.class_remote)
    if storable_name(place) in {storable_name(other) for other in trained_on if other}:
        raise ConfigError(
            "the model is trained on the held-out samples",
            value=place,
            allowed="another place than the training data",
            flag="--validation_remote",
        )
    source = dataclasses.replace(
        plan.source,
        device_batch_size=1,
        remote=place,
        local=None,
        streams=None,
        # It is read many times.
        remote_files=COPY,
        tar_sizes=None,
        data_format=data.detect_format(place),
        latents=PRECOMPUTED if config.online_preprocessing else config.latents,
        mixture=None,
        caption=None,  # a subject's does not apply to them
        caption_drop_probability=0.0,
    )
    with blamed_on("--validation_remote"):
        check_latents(source, plan.architecture)
        data.check(source)
        if source.buckets is not None:
            source = dataclasses.replace(source, mixture=data.open_mixture(source))
    return source


def _as_squares(source: SourceConfig) -> SourceConfig:
    """The same pictures for networks, which take squares of pixels."""
    return dataclasses.replace(source, image_dtype="uint8", buckets=None, mixture=None)


class Evaluations:
    """The evaluations that the config of a run asks for."""

    def __init__(self, plan: Plan[TrainConfig]) -> None:
        """Check data, networks and prompts before any weights are built."""
        config = self._config = plan.config
        self._plan = plan
        self.notes: list[str] = []  # for the plan
        self.held_out: SourceConfig | None = None
        if config.validate_every_batches or config.score_every_batches:
            self.held_out = _held_out_source(plan)
        self._networks = {"fid": config.fid_network, "clip": config.clip_network}
        if config.score_every_batches:
            from sdbench.evaluate.networks import open_networks

            open_networks(self._networks, image_size=config.image_size, device="cpu")
            num_samples = data.check(self.held_out)
            if num_samples is not None and num_samples < 2:
                raise ConfigError(
                    "scores need two held-out pictures",
                    value=num_samples,
                    allowed="2 or more",
                    flag="--validation_remote",
                )
        if config.validate_every_batches:
            sources = [source for source in (plan.source, plan.class_source) if source is not None]
            found = [file for one in sources for file in find_overlap(one, self.held_out)]
            if found:
                self.notes.append(
                    f"Validation sees training data: {len(found)} files of --validation_remote are "
                    "training data too, or have the name and size of a training file, such as "
                    f"{found[0]!r}."
                )
        if config.sample_every_batches or config.score_every_batches:
            schedule = plan.architecture.parts["scheduler"]
            check_num_steps(
                config.sample_steps,
                sampler=default_sampler(schedule),
                schedule=schedule,
                flag="--sample_steps",
            )
        if config.sample_every_batches:
            rows = read_prompts(config.sample_prompts, flag="--sample_prompts")
            self._prompts = rows[: config.num_sample_images]
            self._shapes = read_shapes(config.sample_shapes) if config.sample_shapes else ()
            for shape in self._shapes:
                plan.architecture.check_shape(shape, flag="--sample_shapes")

    def begin(
        self, job: TrainJob, folder: Path, watch: StepWatch
    ) -> dict[str, tuple[int, Evaluation]]:
        """Read the held-out samples once; return each event's interval in steps and its evaluation.

        Grids are written into the folder of the run.
        """
        config, ranks = self._config, self._plan.ranks
        self._job, self._folder, self._watch = job, folder, watch
        if config.validate_every_batches:
            self._reader = open_held_out(self.held_out)
            self._reader.may_skip = not config.has_subject
            read_once(self._reader, num_samples=config.num_validation_images, ranks=ranks)
        if config.score_every_batches:
            # Networks take pixels.
            self._pictures = open_held_out(_as_squares(self.held_out))
            self._pictures.may_skip = not config.has_subject
            read_once(self._pictures, num_samples=config.num_score_images, ranks=ranks)
        evaluations = {
            "validation": (config.validate_every_batches, self._validate),
            "samples": (config.sample_every_batches, self._sample),
            "scores": (config.score_every_batches, self._score),
        }
        return {event: one for event, one in evaluations.items() if one[0] is not None}

    def _validate(self, state: TrainState) -> dict[str, Any]:
        """The loss of the weights and of their average, if one is kept."""
        check = self._watch.check_stop

        def measure() -> dict[str, Any]:
            batches = held_out_batches(
                self._reader,
                num_samples=self._config.num_validation_images,
                batch_size=self._config.device_train_microbatch_size,
                ranks=self._plan.ranks,
                alone=self._watch.alone,
            )
            model, ranks = self._job.model, self._plan.ranks
            if self._config.train == "vae":
                return reconstruction_loss(model, batches, ranks=ranks)
            times = self._config.validation_times
            return validation_loss(model, batches, ranks=ranks, times=times, check=check)

        facts = measure()
        if state.averages is not None:
            with averaged_weights(self._job, state, ranks=self._plan.ranks):
                facts["ema_loss"] = measure()["loss"]
        return facts

    def _sample(self, state: TrainState) -> dict[str, Any]:
        """A picture for each prompt, by the averaged weights if they are kept."""
        prompts = [prompt for _, prompt in self._prompts]
        drawing = self._drawing()
        with averaged_weights(self._job, state, ranks=self._plan.ranks):
            pictures = draw_samples(self._job.model, prompts, shapes=self._shapes, **drawing)
        file: str | None = f"{SAMPLES_NAME}/step_{state.num_steps:08d}.png"
        with self._watch.alone():
            if self._plan.ranks.rank == 0:
                try:
                    _keep_pictures(pictures, self._prompts, grid=self._folder / file)
                except OSError as error:  # a full disk is no reason to stop training
                    what = f"pictures of step {state.num_steps} are lost"
                    print(f"warning: {what}: {error}", file=sys.stderr)
                    file = None
        return {"file": file, "num_pictures": len(pictures)}

    def _score(self, state: TrainState) -> dict[str, Any]:
        """FID and CLIP score of the averaged weights, or of the weights if no average is kept."""
        from sdbench.evaluate.networks import open_networks
        from sdbench.evaluate.scores import score_model

        # Loaded each time: training needs the memory in between.
        device = next(self._job.model.parameters()).device
        size = self._config.image_size
        with self._watch.alone():
            networks = open_networks(self._networks, image_size=size, device=device)
        with averaged_weights(self._job, state, ranks=self._plan.ranks):
            return score_model(
                self._job.model,
                self._pictures,
                networks=networks,
                num_images=self._config.num_score_images,
                alone=self._watch.alone,
                **self._drawing(),
            )

    def _drawing(self) -> dict[str, Any]:
        config, scale = self._config, self._config.sample_guidance
        family = self._plan.architecture.family
        return {
            "seed": config.seed,
            "check": self._watch.check_stop,
            "tokenize": CaptionTokenizers.of(
                self._plan.architecture, new_token=config.learned_token
            ),
            "settings": DrawingSettings(
                shape=Shape.square(config.image_size),
                num_steps=config.sample_steps,
                guidance_scale=family.guidance_scale if scale is None else scale,
                batch_size=config.device_train_microbatch_size,
            ),
            "ranks": self._plan.ranks,
        }


def _keep_pictures(pictures: list[Image.Image], rows: list[tuple[str, str]], *, grid: Path) -> None:
    """Write a grid of the first pictures and, if there are more, a file of each."""
    grid.parent.mkdir(exist_ok=True)
    shown = slice(MAX_PICTURES_OF_GRID)
    captions = [prompt for _, prompt in rows[shown]]
    files = {grid: make_grid(pictures[shown], captions=captions)}
    if len(pictures) > MAX_PICTURES_OF_GRID:
        folder = grid.with_suffix("")
        folder.mkdir(exist_ok=True)
        files |= {folder / f"{uid}.png": one for (uid, _), one in zip(rows, pictures, strict=True)}
    for path, picture in files.items():
        with new_file(path) as new:
            picture.save(new, "png")
