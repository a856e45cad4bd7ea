"""The command `python -m sdbench dreambooth`: teaches a model a subject by a few pictures.

Each step is a program of the suite in a process of its own, printed as a command that a person can
type. A step goes on with what it has made before, and refuses what others have made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench import data
from sdbench.base.cause import read_cause
from sdbench.base.errors import EXIT_BAD_INPUT, ConfigError, blamed_on
from sdbench.base.escape import for_terminal
from sdbench.base.files import replace_file
from sdbench.data.formats.pictures import GRID_NAME, PICTURES_NAME
from sdbench.data.prompts import read_prompts
from sdbench.data.source import VAE_FACTOR, SourceConfig
from sdbench.launch.child import (
    CAUSE_NAME,
    OUTPUT_NAME,
    find_program,
    only_one_in,
    refuse_flag,
    run_guarded,
    run_in_terminal,
    split_words,
    tail,
)
from sdbench.launch.sweep_file import to_flags
from sdbench.models.architecture import built_in_names, resolve_architecture
from sdbench.settings.kinds import PATH, POSITIVE, SWITCH, TEXT
from sdbench.settings.measuring import RunSettings
from sdbench.settings.ray import RAY
from sdbench.settings.recipe import PROMPT_SEPARATOR, TrainConfig, parse_request
from sdbench.settings.request import Request, parse
from sdbench.settings.rules import check
from sdbench.settings.setting import REQUIRED, Beside, declarations, setting, shared
from sdbench.settings.subject import DREAMBOOTH
from sdbench.settings.training import ModelSettings

# Names in the folder of a subject.
CLASS, BEFORE, RUN, MODEL, LORA, AFTER = "class", "before", "train", "model", "lora", "after"
FULL_CONFIG, LORA_CONFIG = "configs/dreambooth.yaml", "configs/dreambooth_lora.yaml"
LORA_NAME = "pytorch_lora_weights.safetensors"
# From the first figure of "Faster stable diffusion fine-tuning with Ray AIR", and from Ray's text
# (ray-project/ray, doc/source/train/examples/pytorch/dreambooth_finetuning.rst).
SCENES = ("on the moon", "at the beach", "in a bucket")
# No class picture that the model is trained on has the seed of one that it is judged by.
SAMPLE_SEED = 1_000_000
# What this command has in the place of flags of train.py.
OWN_FLAGS = {
    "--remote, --local or --streams": "SUBJECT",
    "--remote or --local": "SUBJECT",
    "--instance_prompt": "--prompt",
    "--run_name": "--folder",
}
# Flags of generate.py for other pictures than the later steps expect.
UNFIT_FLAGS = ("--prompt_file", "--num_images_per_prompt", "--seed", "--lora")
UNFIT_FLAGS += ("--width", "--height")
# A training that is asked to end saves a checkpoint: 16 GB to a disk of 150 MB/s. torchrun gives
# its ranks 30 s for that.
SAVING_GRACE_S = 120.0
EPILOG = """\
examples:
  python -m sdbench dreambooth my-dog --prompt "photo of a unqtkn dog" \\
      --class_prompt "photo of a dog" --model_name stable-diffusion-2-base --num_ranks 2
  python -m sdbench dreambooth my-dog --prompt "photo of a unqtkn dog" \\
      --class_prompt "photo of a dog" --model_name stable-diffusion-2-base --lora_rank 4 \\
      -- --max_duration 400ba --precision bf16

Nothing is downloaded. The folder gets: class/ (drawn pictures of the class), before/, train/ (the
run), model/ or lora/, and after/. Stopped at any moment, the same command goes on. A longer
--max_duration behind -- trains on; model/ (or lora/) and after/ are then replaced. With other
pictures, prompts or flags each step refuses to go on with what it has made.
Exit codes: 0 ok, 2 bad input, 130 stopped, else that of the step that failed.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DreamboothFlags:
    """Flags of the command."""

    subject: str = setting(
        TEXT,
        REQUIRED,
        "the subject's own pictures: a folder, or another data set as training takes it",
        is_positional=True,
    )
    prompt: str = setting(
        TEXT,
        REQUIRED,
        'caption of the subject\'s pictures, with a rare word for it: "photo of a unqtkn dog"',
    )
    class_prompt: str | None = setting(
        TEXT, None, 'the prompt without the rare word: "photo of a dog"; its pictures show drift'
    )
    model_name: str = shared(
        ModelSettings,
        "model_name",
        default=REQUIRED,
        help="diffusers folder of the model that learns the subject",
    )
    folder: Path | None = setting(
        PATH, None, "folder for all results (default: runs/<name of SUBJECT>)"
    )
    prior: bool = setting(
        SWITCH, True, "train on pictures of the class as well, so that the model keeps it"
    )
    num_class_images: int = setting(
        POSITIVE, 200, "class pictures to draw for --prior", acts_beside=(Beside(("prior",), True),)
    )
    lora_rank: int | None = shared(
        TrainConfig, "lora_rank", help="train LoRA weights of this rank in place of all weights"
    )
    image_size: int | None = shared(
        ModelSettings, "image_size", help="side of all pictures in pixels (default: the model's)"
    )
    sample_prompts: str | None = shared(
        TrainConfig,
        "sample_prompts",
        help="what is drawn before and after besides the two prompts: "
        f"{declarations(TrainConfig)['sample_prompts'].help} (default: the prompt followed by each "
        f"of: {', '.join(SCENES)})",
        acts_beside=(),
    )
    num_samples: int = setting(POSITIVE, 5, "pictures of each prompt, before and after")
    num_ranks: int = setting(
        POSITIVE,
        1,
        "processes that draw and train, each on a GPU of its own; with --engine ray those that "
        "draw are on this machine and those that train on the cluster",
    )
    engine: str = shared(RunSettings, "engine")
    generate_flags: str | None = setting(
        TEXT,
        None,
        'flags for generate.py in one text: --generate_flags="--guidance_scale 5 --num_steps 50"',
    )
    dry_run: bool = setting(
        SWITCH, False, "have train.py check the training, print the commands and stop"
    )


class Step(NamedTuple):
    """A program that makes a part of the folder."""

    what: str
    command: tuple[str, ...]  # as a person types it
    target: Path | None = None  # a folder that it writes as a whole; else it goes on by itself


def main(argv: Sequence[str] | None = None) -> int:
    """Teach a model a subject, or go on with it; returns the exit code of the step that failed."""
    request = parse(
        DreamboothFlags,
        argv,
        prog="python -m sdbench dreambooth",
        description="Teach a diffusion model a subject by a few pictures, and draw it.",
        epilog=EPILOG,
        rest="FLAGS OF train.py ...",
    )
    flags = request.config
    folder = flags.folder or Path("runs", Path(flags.subject).resolve().name)
    flags = dataclasses.replace(flags, image_size=_check(request, folder=folder))
    steps = plan_steps(flags, request.rest, folder=folder)
    with contextlib.nullcontext() if flags.dry_run else only_one_in(folder):
        exit_code = _plan_training(flags, request.rest, folder=folder)
        if exit_code != 0:
            return exit_code
        if flags.dry_run:
            print("\n".join(shlex.join(step.command) for step in steps))
            return 0
        return _run(steps, folder=folder)


def plan_steps(flags: DreamboothFlags, rest: Sequence[str], *, folder: Path) -> list[Step]:
    """The steps in their order; `rest` goes to train.py, which may refuse it."""
    untrained = {"model_name": flags.model_name}
    samples = {
        "prompts": PROMPT_SEPARATOR.join(_sample_prompts(flags)),
        "num_images_per_prompt": flags.num_samples,
        "seed": SAMPLE_SEED,
    }
    has_token = any(word.startswith("--learned_token") for word in rest)
    if flags.lora_rank is None or has_token:  # the file of LoRA cannot hold a token
        exported = folder / MODEL
        trained, export = {"model_name": exported}, {"folder": exported}
    else:
        exported = folder / LORA
        trained = {**untrained, "lora": exported / LORA_NAME}
        export = {"folder": exported, "lora_format": "diffusers"}
    steps = [
        Step("pictures before", _draw({**untrained, **samples}, flags, folder / BEFORE)),
        Step("training", _train(flags, rest, folder=folder)),
        Step(
            "export",
            (*_launcher(1), "export", str(folder / RUN), *to_flags(export)),
            target=exported,
        ),
        Step("pictures after", _draw({**trained, **samples}, flags, folder / AFTER)),
    ]
    if flags.prior:
        drawn = {"prompts": flags.class_prompt, "num_images_per_prompt": flags.num_class_images}
        step = Step("pictures of the class", _draw({**untrained, **drawn}, flags, folder / CLASS))
        steps.insert(0, step)
    return steps


def _launcher(num_ranks: int) -> list[str]:
    torchrun = ["torchrun", "--standalone", "--nproc_per_node", str(num_ranks)]
    return [*(torchrun if num_ranks > 1 else ["python"]), "-m", "sdbench"]


def _sample_prompts(flags: DreamboothFlags) -> list[str]:
    others = [f"{flags.prompt} {scene}" for scene in SCENES]
    if flags.sample_prompts is not None:
        others = [text for _, text in read_prompts(flags.sample_prompts, flag="--sample_prompts")]
    for text in others:
        _check_is_one(text, flag="--sample_prompts")
    return list(dict.fromkeys(filter(None, (flags.prompt, flags.class_prompt, *others))))


def _check_is_one(prompt: str, *, flag: str) -> None:
    if PROMPT_SEPARATOR in prompt:
        raise ConfigError(
            f"{PROMPT_SEPARATOR} separates prompts, and this is one",
            value=prompt,
            allowed=f"a prompt without {PROMPT_SEPARATOR}",
            flag=flag,
        )


def _draw(settings: Mapping[str, Any], flags: DreamboothFlags, folder: Path) -> tuple[str, ...]:
    own = to_flags({**settings, "image_size": flags.image_size, "folder": folder})
    users = split_words(flags.generate_flags or "", flag="--generate_flags")
    for taken in (*(word.partition("=")[0] for word in own), *UNFIT_FLAGS):
        why = "the command itself says what is drawn and where"
        refuse_flag(taken, users, why=why, flag="--generate_flags")
    return (*_launcher(flags.num_ranks), "generate", *own, *users)


def _train(flags: DreamboothFlags, rest: Sequence[str], *, folder: Path) -> tuple[str, ...]:
    on_ray = flags.engine == RAY
    own: dict[str, Any] = {
        "task": DREAMBOOTH,
        "model_name": flags.model_name,
        "remote": flags.subject,
        "instance_prompt": flags.prompt,
        "results_dir": str(folder),
        "run_name": RUN,
        "resume": "auto",
        "engine": flags.engine,
        "image_size": flags.image_size,
        "lora_rank": flags.lora_rank,
    }
    if on_ray:
        own["num_ray_workers"] = flags.num_ranks
    unsaid = ["class_remote=null", "class_prompt=null"]
    if flags.prior:
        unsaid = []
        own["class_remote"] = str(folder / CLASS / PICTURES_NAME)
        own["class_prompt"] = flags.class_prompt
    if "train_text_encoder" in resolve_architecture(flags.model_name).family.unsuitable:
        unsaid.append("train_text_encoder=false")
    config = FULL_CONFIG if flags.lora_rank is None else LORA_CONFIG
    for declared in declarations(DreamboothFlags).values():
        if declared.name not in declarations(TrainConfig):
            why = "a flag of dreambooth itself stands before --"
            refuse_flag(declared.flag, rest, why=why, flag="what stands behind --")
    arguments = ["--config", config, *to_flags(own), *unsaid, *rest]
    trained = parse_request(arguments, description="", epilog="").config
    for name, value in own.items():
        if getattr(trained, name) != value:
            raise ConfigError(
                f"the command itself sets --{name}",
                value=getattr(trained, name),
                allowed="other flags of train.py",
                flag="what stands behind --",
            )
    # train.py is asked as one rank before anything is drawn, which every batch divides over.
    if trained.batch_size % flags.num_ranks and not trained.allow_uneven_batch:
        raise ConfigError(
            f"the global batch of {trained.batch_size} does not divide over the ranks",
            value=flags.num_ranks,
            allowed="a divisor, or another --batch_size behind --",
            flag="--num_ranks",
        )
    return (*_launcher(1 if on_ray else flags.num_ranks), "train", *arguments)


def _plan_training(flags: DreamboothFlags, rest: Sequence[str], *, folder: Path) -> int:
    """Have train.py check the training before anything is drawn for it; returns the exit code."""
    command = [*_train(flags, rest, folder=folder), "--print_config"]
    with tempfile.TemporaryDirectory() as scratch:
        if not folder.exists():
            command.append(f"--results_dir={scratch}")
        if flags.prior and not any((folder / CLASS / PICTURES_NAME).glob("*.png")):
            # Nothing of the class is drawn yet.
            command += [f"--class_remote={flags.subject}", "--changed_inputs=accept"]
        # As rank 0, lest Ray starts a cluster.
        words = ["env", *(["RANK=0"] if flags.engine == RAY else []), *find_program(command)]
        with Path(scratch, OUTPUT_NAME).open("wb") as output:
            end = run_guarded(words, folder=Path(scratch), output=output)
        if end.exit_code == 0:
            return 0
        cause = read_cause(Path(scratch, CAUSE_NAME))
        reason = tail(Path(scratch)) if cause is None else cause["message"]
    for theirs, own in OWN_FLAGS.items():
        reason = reason.replace(theirs, own)
    print(f"error: train.py would refuse this training: {reason}", file=sys.stderr)
    is_refusal = cause is not None and cause["error"] == ConfigError.__name__
    return EXIT_BAD_INPUT if is_refusal else end.exit_code  # torchrun makes another one of it


def _check(request: Request[DreamboothFlags], *, folder: Path) -> int:
    """Find mistakes before anything is started; returns the side of all pictures in pixels."""
    flags = request.config
    if flags.prior and flags.class_prompt is None:
        raise ConfigError(
            "pictures of the class are drawn for a prompt",
            value=None,
            allowed='a prompt such as "photo of a dog", or --no_prior: no such pictures',
            flag="--class_prompt or --no_prior",
        )
    check(request, ("num_class_images",))
    for name in ("prompt", "class_prompt"):
        _check_is_one(getattr(flags, name) or "", flag=f"--{name}")
    class_words = (flags.class_prompt or "").lower().split()
    if class_words and set(flags.prompt.lower().split()) <= set(class_words):
        raise ConfigError(
            "the prompt has no word of its own, by which the model could tell the subject from its "
            f"class {flags.class_prompt!r}",
            value=flags.prompt,
            allowed='a rare word for the subject beside its class: "photo of a unqtkn dog"',
            flag="--prompt",
        )
    with blamed_on("SUBJECT"):
        source = SourceConfig(
            data_format=data.detect_format(flags.subject),
            remote=flags.subject,
            caption=flags.prompt,
            image_size=VAE_FACTOR,
            device_batch_size=1,
            seed=0,
        )
        data.check(source)
    own_pictures = Path(flags.subject).resolve()
    if {own_pictures} & {folder.resolve(), *folder.resolve().parents}:
        raise ConfigError(
            "what is drawn would be among the pictures of the subject",
            value=str(folder),
            allowed="a folder outside SUBJECT",
            flag="--folder",
        )
    if flags.model_name not in built_in_names() and not Path(flags.model_name).is_dir():
        raise ConfigError(
            "there is no such model here, and nothing is downloaded",
            value=flags.model_name,
            allowed=f"a diffusers folder, or for a trial {', '.join(built_in_names())}",
            flag="--model_name",
        )
    architecture = resolve_architecture(flags.model_name)
    image_size = flags.image_size or architecture.default_image_size
    architecture.check_image_size(image_size)
    return image_size


def _run(steps: Sequence[Step], *, folder: Path) -> int:
    for number, step in enumerate(steps, start=1):
        print(f"\n[{number}/{len(steps)}] {step.what}")
        print(for_terminal(shlex.join(step.command)), flush=True)
        if step.target is not None and _is_made(step.target, folder):
            print(f"{step.target} is there already, from the newest checkpoint.")
            continue
        exit_code = run_in_terminal(step.command, folder=folder, grace_s=SAVING_GRACE_S)
        if exit_code != 0:
            return exit_code
    grids = " and ".join(str(folder / name / GRID_NAME) for name in (BEFORE, AFTER))
    print(f"\nAll is in {folder}; before and after: {grids}")
    return 0


def _is_made(target: Path, folder: Path) -> bool:
    """Return True if the newest checkpoint has been exported; an older export is removed.

    The note on an export is written before it: an export is there as a whole or not at all. What
    has no note is refused by the export.
    """
    newest = max((folder / RUN / "checkpoints").glob("step_*/checkpoint.json"))
    made_of = hashlib.sha256(newest.read_bytes()).hexdigest()
    note = folder / f".{target.name}-made-of"
    before = note.read_text(encoding="utf-8") if note.is_file() else None
    if target.exists() and before == made_of:
        return True
    if before is not None:
        print(f"{target} is made again, of the newest checkpoint, and so is {AFTER}/.")
        for outdated in (target, folder / AFTER):
            shutil.rmtree(outdated, ignore_errors=True)
    if not target.exists():
        replace_file(note, made_of)
    return False
