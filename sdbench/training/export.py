"""`python -m sdbench export`: the trained model of a run, as a folder that diffusers loads."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sdbench.base.errors import ConfigError, blamed_on
from sdbench.base.files import check_folder
from sdbench.data.formats.identity import MODEL, describe_change, identify
from sdbench.settings.kinds import SWITCH, TEXT, one_of, row_of
from sdbench.settings.recipe import LengthSettings, TrainConfig
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting, shared

if TYPE_CHECKING:
    from sdbench.models.architecture import Architecture

MODEL_NAME, LORA_NAME = "model", "lora"
PROMPTS = "a red circle|a blue square"  # an example
# Sections of the model card, and the settings in each.
CARD_SETTINGS = {
    "Data": ("data_format", "remote", "local", "streams", "filters", "latents"),
    "Settings": (
        "train",
        "model_name",
        "init_from",
        "train_text_encoder",
        "image_size",
        "batch_size",
        "lr",
        "text_encoder_lr",
        "lr_schedule",
        "lr_warmup_batches",
        "weight_decay",
        "clip_norm",
        "optimizer",
        "precision",
        "caption_drop_probability",
        "prediction_type",
        "seed",
    ),
    "Subject": (
        "task",
        "instance_prompt",
        "class_remote",
        "class_prompt",
        "prior_loss_weight",
        "learned_token",
        "initial_token",
    ),
    "LoRA": ("lora_rank", "lora_alpha", "lora_layers", "lora_text_encoder_layers", "frozen_bits"),
}
EPILOG = """\
examples:
  python -m sdbench export runs/first
      the newest checkpoint, with averaged weights if there are some, to runs/first/model
  python -m sdbench export runs/first/checkpoints/step_00005000 --folder model-5000 --dtype fp16
  python -m sdbench export runs/dog --lora_format diffusers
      the LoRA of a run with --lora_rank as a file in runs/dog/lora; without --lora_format it is
      added to the weights of a whole model

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
        TEXT,
        None,
        f"a new or an empty folder (default: {MODEL_NAME} in that of the run, or {LORA_NAME})",
    )
    lora_format: str | None = setting(
        one_of("diffusers"),
        None,
        "write the LoRA of the run alone, for diffusers and programs that read its files (default: "
        "a whole model, to whose weights it is added)",
    )
    ema: bool = setting(SWITCH, True, "take the averaged weights where the run kept some")
    dtype: str = setting(one_of("fp32", "fp16", "bf16"), "fp32", "type of the weights")
    encoders: str | None = setting(
        TEXT,
        None,
        "of a run on precomputed latents: diffusers folder or hub id of the VAE and text encoder "
        "that made them (default: as --model_name and --model_parts of the run said)",
    )
    changed_inputs: str = shared(
        LengthSettings,
        "changed_inputs",
        help="if files of the model have changed since the run: refuse to export it, or do so",
        acts_beside=(),
    )
    scheduler: str | None = setting(
        row_of("sdbench.models.samplers:sampler_names"),
        None,
        "what diffusers draws with by default (default: ddim, or flow_euler with rectified flow)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Export a model; return the exit code."""
    request = parse(
        ExportFlags, argv, description=__doc__, epilog=EPILOG, prog="python -m sdbench export"
    )
    flags = request.config
    for name in ("encoders", "scheduler"):
        if flags.lora_format is not None and request.is_users(name):
            raise ConfigError(
                "LoRA alone has no such part",
                value=getattr(flags, name),
                allowed="only with a whole model: no --lora_format",
                flag=f"--{name} or --lora_format",
            )
    from sdbench.training.checkpoint_weights import has_averages, open_checkpoint, read_weights

    checkpoint = open_checkpoint(Path(flags.run), flag="RUN", reads_all=True)
    use_ema = flags.ema and has_averages(checkpoint)
    trained = _Trained(
        folder=checkpoint.folder.parent.parent,
        step=checkpoint.step,
        config=TrainConfig(**checkpoint.facts["config"]),
        use_ema=use_ema,
        weights=read_weights(checkpoint, use_ema=use_ema),
        model=checkpoint.facts["inputs"][MODEL],
    )
    if flags.lora_format is None:
        exported = _export_model(trained, flags)
        print(f"The model of step {trained.step} is in {exported}.")
        drawn = {"model_name": exported}
    else:
        exported = _export_lora(trained, flags)
        print(f"The LoRA of step {trained.step} is {exported}.")
        drawn = {"model_name": trained.config.model_name, "lora": exported}
    words = [word for name, place in drawn.items() for word in (f"--{name}", str(place))]
    words += ["--prompts", trained.config.instance_prompt or PROMPTS, "--folder", "pictures"]
    print(f"Draw with it: python -m sdbench generate {shlex.join(words)}")
    return 0


class _Trained(NamedTuple):
    """What is exported; `use_ema` says whether `weights` are the averaged ones.

    `model` is what `identify` said of the model when the run was saved.
    """

    folder: Path
    step: int
    config: TrainConfig
    use_ema: bool
    weights: dict[str, Any]
    model: dict[str, Any]


def _export_model(trained: _Trained, flags: ExportFlags) -> Path:
    """Write the model for diffusers; return the folder.

    LoRA is added to the weights. A learned token goes into tokenizer and text encoder, and into a
    file of its own as well.
    """
    from sdbench.data.batches.tokenizer import CaptionTokenizers
    from sdbench.models.diffusion import build_model
    from sdbench.models.export import export
    from sdbench.models.learned_token import append_row, is_learned_row
    from sdbench.models.lora import Lora, is_lora, merge_lora
    from sdbench.models.samplers import check_sampler, default_sampler
    from sdbench.training.checkpoint_weights import put_weights
    from sdbench.training.train_job import make_objective

    config, weights = trained.config, trained.weights
    architecture = _find_architecture(config, flags.encoders)
    if flags.encoders is None:
        _check_model(trained, architecture, accepts=flags.changed_inputs == "accept")
    objective = make_objective(config)
    schedule = objective.schedule(architecture.parts["scheduler"])
    sampler = flags.scheduler or default_sampler(schedule)
    check_sampler(sampler, schedule)
    lora = Lora.of(config, architecture)
    model = build_model(
        architecture,
        seed=config.seed_of_weights,
        trained=config.trained_parts,
        lora=lora,
        objective=objective,
    )
    learned = {}
    if config.learned_token is not None:
        (name,) = filter(is_learned_row, weights)
        learned[config.learned_token] = weights.pop(name)
        append_row(model.text_encoder, learned[config.learned_token])
    trained_or_kept = {name.partition(".")[0] for name in weights if not is_lora(name)}
    random_parts = [part for part in architecture.random_parts if part not in trained_or_kept]
    if random_parts:
        parts = " and ".join(random_parts)
        print(f"With random weights: {parts}. What was not trained on them draws noise.")
    if lora is not None:
        put_weights(model, weights)
        weights = {}
        for part, _ in lora.layers:
            merge_lora(model.get_submodule(part))
    tokenizers = CaptionTokenizers.of(architecture, new_token=config.learned_token).tokenizers
    folder = Path(flags.folder or trained.folder / MODEL_NAME)
    export(
        model,
        folder,
        trained=weights,
        tokenizers={
            name: tokenizer.for_diffusers()
            for name, tokenizer in zip(architecture.tokenizers, tokenizers, strict=True)
        },
        dtype=flags.dtype,
        sampler=sampler,
        card=_make_card(
            trained, architecture=architecture, sampler=sampler, random_parts=random_parts
        ),
        learned=learned,
    )
    return folder


def _check_model(trained: _Trained, architecture: Architecture, *, accepts: bool) -> None:
    """Refuse a model whose files have changed since the run, unless that is accepted."""
    before = trained.model["files"]
    loaded = {name.partition("/")[0] for name in before if "config" not in name}
    loaded &= set(architecture.modules)
    files = architecture.identify(sorted(loaded), seed=trained.config.seed_of_weights)
    known = {name: fact for name, fact in files.items() if name in before}
    change = describe_change(trained.model, identify({}, model=known)[MODEL])
    if change is not None and not accepts:
        raise ConfigError(
            f"the model has changed since the run: {change}",
            value="refuse",
            allowed="the model as it was, or accept",
            flag="--changed_inputs",
        )


def _export_lora(trained: _Trained, flags: ExportFlags) -> Path:
    """Write the LoRA alone; return the file."""
    from sdbench.models.export import convert, in_one_piece
    from sdbench.models.lora import Lora
    from sdbench.models.lora_files import DIFFUSERS_NAME, named_for_file, write_lora
    from sdbench.plan.resolve import find_model

    config = trained.config
    # Its weights are not needed, nor the network for a model of the hub that is built in.
    architecture = find_model(dataclasses.replace(config, random_weights=True), config.model_parts)
    lora, token = Lora.of(config, architecture), config.learned_token
    if lora is None or token is not None:
        raise ConfigError(
            "the run has trained its weights and no LoRA"
            if lora is None
            else f"the LoRA was trained with the token {token}, which its file cannot hold",
            value=flags.lora_format,
            allowed="the whole model: no --lora_format",
            flag="--lora_format",
        )
    folder = Path(flags.folder or trained.folder / LORA_NAME)
    check_folder(folder)
    tensors = {
        name: convert(name, tensor, dtype=flags.dtype)
        for name, tensor in named_for_file(trained.weights, lora).items()
    }
    if len(tensors) < len(trained.weights):
        source = trained.config.init_from
        print(f"It goes with the model that `python -m sdbench export {source}` writes.")
    card = _make_card(trained, architecture=architecture, lora_file=DIFFUSERS_NAME)
    with in_one_piece(folder, card=card) as partial:
        write_lora(tensors, partial / DIFFUSERS_NAME, architecture=architecture)
    return folder / DIFFUSERS_NAME


def _make_card(
    trained: _Trained,
    *,
    architecture: Architecture,
    sampler: str | None = None,
    lora_file: str | None = None,
    random_parts: Sequence[str] = (),
) -> str:
    from sdbench.base.conditions import T5
    from sdbench.models.export import make_card
    from sdbench.models.family import FLOW
    from sdbench.record.provenance import git_state
    from sdbench.training.train_job import make_objective

    config, family = trained.config, architecture.family
    names = dict(CARD_SETTINGS)
    if not config.has_subject:
        del names["Subject"]
    if config.lora_rank is None:
        del names["LoRA"]
    sections = {
        title: {name: getattr(config, name) for name in some} for title, some in names.items()
    }
    if family.objective == FLOW:
        flow = make_objective(config).flow_settings(family.flow)
        sections["Rectified flow"] = dataclasses.asdict(flow)
    sections["Figures"] = {
        "steps": trained.step,
        "images": trained.step * config.batch_size,
        "averaged weights": trained.use_ema,
        "parts with random weights": ", ".join(random_parts) or "none",
    }
    return make_card(
        trained.folder.name,
        sections=sections,
        commit=git_state()["commit"],
        sampler=sampler,
        family=family,
        lora_file=lora_file,
        absent=[part for part in family.optional if part not in architecture.parts],
        num_t5_tokens=next(
            (one.num_tokens for one in architecture.captions if one.kind == T5), None
        ),
    )


def _find_architecture(config: TrainConfig, encoders: str | None) -> Architecture:
    """The architecture of a run, with the encoders of --encoders."""
    from sdbench.models.components import check_folders
    from sdbench.models.parts import replace_parts
    from sdbench.plan.resolve import find_model

    if encoders is not None and not config.wants_latents:
        raise ConfigError(
            "only a run on precomputed latents takes encoders from elsewhere",
            value=encoders,
            allowed="nothing: this run was trained with encoders of its own",
            flag="--encoders",
        )
    architecture = find_model(config, config.model_parts)
    if encoders is not None:
        replaced = (*architecture.encoders, *architecture.tokenizers)
        parts = {part: {"pretrained": encoders} for part in replaced}
        with blamed_on("--encoders"):
            architecture = replace_parts(architecture, parts)
            check_folders(architecture)
    if config.wants_latents and not set(architecture.encoders).isdisjoint(
        architecture.random_parts
    ):
        raise ConfigError(
            "the VAE and the text encoders that made the latents are not known, and random ones "
            "would draw noise",
            value=encoders,
            allowed="the diffusers folder or hub id that `sdbench precompute` had",
            flag="--encoders",
        )
    return architecture
