"""`python -m sdbench export`: the model of a training run as a folder that diffusers loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import ConfigError
from sdbench.settings.kinds import SWITCH, TEXT, RowOf, one_of
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting

if TYPE_CHECKING:
    from sdbench.models.architecture import Architecture
    from sdbench.settings.recipe import TrainConfig

MODEL_NAME = "model"
ENCODERS = ("vae", "text_encoder")
EPILOG = """\
examples:
  python -m sdbench export runs/first
      the newest checkpoint, with averaged weights if there are some, to runs/first/model
  python -m sdbench export runs/first/checkpoints/step_00005000 --folder model-5000 --dtype fp16

then:
  python generate.py --model_name runs/first/model --prompts "a red circle" --folder pictures
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """Flags of the command."""

    run: str = setting(
        TEXT, REQUIRED, "folder of a run of train.py, or one of its checkpoints", is_positional=True
    )
    folder: str | None = setting(
        TEXT, None, f"a new or an empty folder (default: {MODEL_NAME} in that of the run)"
    )
    ema: bool = setting(SWITCH, True, "take the averaged weights where the run kept some")
    dtype: str = setting(one_of("fp32", "fp16", "bf16"), "fp32", "type of the weights")
    encoders: str | None = setting(
        TEXT,
        None,
        "of a run on precomputed latents: diffusers folder or hub id of the VAE and text encoder "
        "that made them (default: as --model_name and --model_parts of the run said)",
    )
    scheduler: str = setting(
        RowOf("sdbench.models.samplers:SAMPLERS"), "ddim", "what diffusers draws with by default"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Export a model.

    Args:
        argv: Command-line arguments; None takes those of the process.

    Returns:
        The exit code.

    Raises:
        ConfigError: There is no whole checkpoint, the folder cannot be written, or the encoders of
            the run's latents are not known.
    """
    request = parse(
        ExportFlags, argv, description=__doc__, epilog=EPILOG, prog="python -m sdbench export"
    )
    flags = request.config
    folder = export_run(
        Path(flags.run),
        None if flags.folder is None else Path(flags.folder),
        wants_ema=flags.ema,
        insists_on_ema=request.is_users("ema") and flags.ema,
        dtype=flags.dtype,
        encoders=flags.encoders,
        sampler=flags.scheduler,
    )
    print(f"The model is in {folder}.")
    return 0


def export_run(
    run: Path,
    folder: Path | None = None,
    *,
    wants_ema: bool = True,
    insists_on_ema: bool = False,
    dtype: str = "fp32",
    encoders: str | None = None,
    sampler: str = "ddim",
) -> Path:
    """Write the model of a checkpoint for diffusers.

    Args:
        run: Folder of a run, whose newest checkpoint is taken, or of a checkpoint.
        folder: New or empty; None: `MODEL_NAME` in the folder of the run.
        wants_ema: Take the averaged weights where there are some.
        insists_on_ema: Refuse a run without them.
        dtype: Type of the weights: fp32, fp16 or bf16.
        encoders: Model whose VAE, text encoder and tokenizer made the latents of the run; None:
            the run's own.
        sampler: A key of `samplers.SAMPLERS`.

    Returns:
        The folder.

    Raises:
        ConfigError: As `main`.
    """
    from sdbench.models.export import export, make_card
    from sdbench.models.stable_diffusion import build_stable_diffusion
    from sdbench.record.provenance import git_state
    from sdbench.settings.recipe import TrainConfig
    from sdbench.tasks.prompts import make_tokenizer
    from sdbench.tasks.train.job import make_objective
    from sdbench.tasks.train.weights import has_averages, open_checkpoint, read_weights

    checkpoint = open_checkpoint(run, flag="RUN")
    use_ema = insists_on_ema or (wants_ema and has_averages(checkpoint))
    weights = read_weights(checkpoint, use_ema=use_ema)
    config = TrainConfig(**checkpoint.facts["config"])
    architecture = _find_architecture(config, encoders)
    model = build_stable_diffusion(
        architecture,
        seed=config.seed if config.weights_seed is None else config.weights_seed,
        precision="fp32",
        encoder_dtype="fp32",
        memory_format="contiguous",
        attention="sdpa",
        objective=make_objective(config),
    )
    trained_or_kept = {name.partition(".")[0] for name in weights}
    random_parts = ", ".join(
        part for part in architecture.random_parts if part not in trained_or_kept
    )
    if random_parts:
        print(f"With random weights: {random_parts}.")
    run_folder = checkpoint.folder.parent.parent
    folder = folder or run_folder / MODEL_NAME
    export(
        model,
        folder,
        trained=weights,
        tokenizer=make_tokenizer(architecture).for_diffusers(),
        dtype=dtype,
        sampler=sampler,
        card=make_card(
            run_folder.name,
            sections={
                "Data": _facts(config, DATA_SETTINGS),
                "Settings": _facts(config, RECIPE_SETTINGS)
                | {"averaged weights": use_ema, "random weights": random_parts or "none"},
                "Figures": {
                    "steps": checkpoint.step,
                    "images": checkpoint.step * config.batch_size,
                },
            },
            commit=git_state()["commit"],
            sampler=sampler,
        ),
    )
    return folder


def _find_architecture(config: TrainConfig, encoders: str | None) -> Architecture:
    """The architecture of a run, with other encoders if a model with some is named.

    Raises:
        ConfigError: There is no such model; the run has encoders of its own; or those that made its
            latents are not known.
    """
    from sdbench.models.architecture import resolve_architecture
    from sdbench.models.parts import replace_parts

    if encoders is not None and not config.wants_latents:
        raise ConfigError(
            "only a run on precomputed latents takes encoders from elsewhere",
            value=encoders,
            allowed="nothing: this run was trained with encoders of its own",
            flag="--encoders",
        )
    architecture, _ = resolve_architecture(
        config.model_name, revision=config.model_revision, random_weights=config.random_weights
    )
    architecture, _ = replace_parts(architecture, config.model_parts or {})
    if encoders is not None:
        parts = {part: {"pretrained": encoders} for part in (*ENCODERS, "tokenizer")}
        try:
            architecture, _ = replace_parts(architecture, parts)
        except ConfigError as error:  # it names a flag of train.py
            raise ConfigError(
                error.what, value=error.value, allowed=error.allowed, flag="--encoders"
            ) from None
    if config.wants_latents and not set(ENCODERS).isdisjoint(architecture.random_parts):
        raise ConfigError(
            "the VAE and the text encoder that made the latents are not known, and random ones "
            "would draw noise",
            value=encoders,
            allowed="the diffusers folder or hub id that `sdbench precompute` had",
            flag="--encoders",
        )
    return architecture


DATA_SETTINGS = ("data_format", "remote", "local", "streams", "filters", "latents")
RECIPE_SETTINGS = (
    "train",
    "model_name",
    "init_from",
    "train_text_encoder",
    "image_size",
    "batch_size",
    "lr",
    "lr_schedule",
    "lr_warmup_batches",
    "weight_decay",
    "clip_norm",
    "precision",
    "caption_drop_probability",
    "prediction_type",
    "seed",
)


def _facts(config: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}
