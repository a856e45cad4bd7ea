"""`translate`: config files of mlfoundations/open-diffusion, as the settings of train.py.

Its keys are nested (``optimizer.params.learning_rate``). Five tables translate them: `RENAMED`,
`MEANINGS`, `SAME`, `WITHOUT_EFFECT` and `DERIVED`. Any other key is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.names import nearest
from sdbench.settings.kinds import POSITIVE
from sdbench.settings.request import Translation

# Sub-models and their keys in a file, by the name of the part here.
PARTS = {
    "unet": ("unet",),
    "vae": ("vae",),
    "text_encoder": ("text_encoder",),
    "tokenizer": ("tokenizer",),
    "scheduler": ("scheduler", "noise_scheduler_training"),
}
TARGETS = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": ("CLIPTokenizer",),
    # The second does not exist in diffusers, but open-diffusion's files name it.
    "scheduler": ("DDPMScheduler", "DDPMNoiseScheduler"),
}
# Its moving average keeps 0.995 of itself in a step: 0.5 ** (1 / 138).
EMA_HALF_LIFE_BATCHES = 138
WHOLE_MODEL = "model.pretrained"
NO_ACCUMULATION = {"system.gradient_accumulation": 1}
# Defaults of open-diffusion that differ from the defaults here.
DEFAULTS = {
    "experiment.save_every": 1000,
    "experiment.save_only_most_recent": False,
    "experiment.num_eval_images": 1000,
}

# The values of a file, by nested key.
Values = Mapping[str, Any]


def _global_batch(value: Any, values: Values) -> dict[str, Any]:
    """Settings from the batch of open-diffusion: the images of one GPU in one backward pass."""
    device_batch = _positive("system.batch_size", values)
    num_gpus = int(os.environ.get("WORLD_SIZE", "1"))
    return {
        "device_train_microbatch_size": device_batch,
        "batch_size": device_batch * _passes_per_step(values) * num_gpus,
    }


def _passes_per_step(values: Values) -> int:
    return _positive("system.gradient_accumulation", {**NO_ACCUMULATION, **values})


def _positive(key: str, values: Values) -> int:
    try:
        return POSITIVE.parse(values.get(key))
    except (TypeError, ValueError):
        raise ConfigError(
            f"{key} is not a number of images, passes or steps",
            value=values.get(key),
            allowed=POSITIVE.allowed,
            flag=f"{key}=VALUE",
        ) from None


def _results_dir(value: Any, values: Values) -> dict[str, Any]:
    """Its runs are in log_dir/project/name; a project that is not a text is refused as such."""
    project = values.get("experiment.project")
    return {"results_dir": value if project is None else f"{value}/{project}"}


def _what_is_kept(value: bool, values: Values) -> dict[str, Any]:
    """The newest checkpoint alone, or every one."""
    return {"keep": 1} | ({} if value else {"keep_every_batches": 1})


def _steps_per_save(values: Values) -> int:
    """Its interval is in backward passes; rounded down to optimizer steps."""
    return max(1, _positive("experiment.save_every", values) // _passes_per_step(values))


def _prompts(value: str, values: Values) -> dict[str, Any]:
    """It draws whenever it saves."""
    return {"sample_prompts": value, "sample_every_batches": _steps_per_save(values)}


def _moving_average(value: bool, values: Values) -> dict[str, Any]:
    if not value:
        return {"use_ema": False}
    return {"use_ema": True, "ema_half_life_batches": EMA_HALF_LIFE_BATCHES, "ema_warmup": True}


def _model(value: Any, values: Values) -> dict[str, Any]:
    """One model, and the parts from elsewhere."""
    if WHOLE_MODEL in values:
        return {"model_name": values[WHOLE_MODEL]}
    parts: dict[str, dict[str, Any]] = {}
    for part, keys in PARTS.items():
        for key in keys:
            for form in ("pretrained", "params"):
                if f"model.{key}.{form}" in values:
                    parts[part] = {form: values[f"model.{key}.{form}"]}
    folders = [given["pretrained"] for given in parts.values() if "pretrained" in given]
    if not folders:
        return {"model_parts": parts}
    name = max(folders, key=folders.count)
    others = {part: given for part, given in parts.items() if given != {"pretrained": name}}
    return {"model_name": name, **({"model_parts": others} if others else {})}


def _set_variable(name: str, value: Any) -> dict[str, Any]:
    os.environ[name] = str(value)
    return {}


def _average_to_begin_with(value: Any, values: Values) -> dict[str, Any]:
    raise ConfigError(
        "a moving average of open-diffusion cannot be read: it is a pickle, which can carry code",
        value=value,
        allowed="a diffusers folder of averaged weights as model.pretrained, or a run: --init_from",
        flag="model.ema.path=VALUE",
    )


# Keys that are settings by another name.
RENAMED = {
    "system.workers": "num_workers",
    "experiment.project": "wandb_project",
    "experiment.num_eval_images": "num_sample_images",
    "optimizer.params.beta1": "beta1",
    "optimizer.params.beta2": "beta2",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.epsilon": "adam_eps",
    "model.max_grad_norm": "clip_norm",
    "dataset.params.path": "remote",
    "dataset.params.resolution": "image_size",
    "dataset.params.filters": "filters",
    "dataset.params.idx_to_prompt": "class_prompts",
    "dataset.params.class_mapping": "class_prompts",
    "lr_scheduler.params.learning_rate": "lr",
    "lr_scheduler.params.warmup_length": "lr_warmup_batches",
}
# The setting, and its value for each value of the key; None: the suite always does this.
MEANINGS: dict[str, tuple[str | None, Mapping[Any, Any]]] = {
    "distributed.dist_url": (None, {"env://": None}),
    "experiment.requeue": ("resume", {True: "auto", False: "never"}),
    "optimizer.name": (None, {"adamw": None}),
    "model.mixed_precision": ("precision", {"bf16": "amp_bf16", "fp16": "amp_fp16"}),
    "model.gradient_checkpointing": ("activation_checkpointing", {True: "full", False: "none"}),
    "dataset.type": (
        "data_format",
        {
            "WebDataset": "webdataset",
            "ClassificationWebDataset": "webdataset",
            "ParquetDataset": "parquet",
        },
    ),
    "lr_scheduler.scheduler": (
        "lr_schedule",
        {"ConstantWithWarmup": "constant", "CosineWithWarmup": "cosine"},
    ),
    **{
        f"model.{key}.target": (
            None,
            dict.fromkeys((*names, *(f"diffusers.{name}" for name in names))),
        )
        for part, names in TARGETS.items()
        for key in PARTS[part]
    },
}
# Keys that must equal another key, or replace it if it is missing.
SAME = {
    "system.dist_backend": "distributed.dist_backend",
    "system.dist_url": "distributed.dist_url",
    "optimizer.params.learning_rate": "lr_scheduler.params.learning_rate",
    "dataset.params.batch_size": "system.batch_size",
    "dataset.params.workers": "system.workers",
    "dataset.params.num_examples_to_see": "experiment.num_examples_to_see",
}
# Keys that change nothing here, and why.
WITHOUT_EFFECT = {
    "distributed.dist_backend": "GPUs communicate by NCCL, and CPUs by gloo",
    "model.pt_path": "it is only for references of other keys",
    "model.noise_scheduler_inference.pretrained": "pictures are drawn by DDIM",
    "model.noise_scheduler_inference.target": "pictures are drawn by DDIM",
    "model.xformers": "torch has such a kernel itself; --attention chooses among several",
}
MODEL_KEYS = (
    WHOLE_MODEL,
    *(
        f"model.{key}.{form}"
        for keys in PARTS.values()
        for key in keys
        for form in ("pretrained", "params")
    ),
)
# Keys that become several settings, or that depend on other keys.
DERIVED: dict[str, Callable[[Any, Values], dict[str, Any]]] = {
    "wandb.api_key": lambda value, values: _set_variable("WANDB_API_KEY", value),
    "wandb.entity": lambda value, values: _set_variable("WANDB_ENTITY", value),
    "wandb.mode": lambda value, values: _set_variable("WANDB_MODE", value),
    "system.gradient_accumulation": _global_batch,
    "system.batch_size": _global_batch,
    "experiment.log_dir": _results_dir,
    "experiment.name": lambda value, values: {"run_name": value, "wandb_name": value},
    "experiment.num_examples_to_see": lambda value, values: {"max_duration": f"{value}sp"},
    "experiment.save_only_most_recent": _what_is_kept,
    "experiment.save_every": lambda value, values: {"save_every_batches": _steps_per_save(values)},
    "experiment.eval_caption_file": _prompts,
    "model.use_ema": _moving_average,
    "model.ema.path": _average_to_begin_with,
    **dict.fromkeys(MODEL_KEYS, _model),
}
KEYS = (*RENAMED, *MEANINGS, *SAME, *WITHOUT_EFFECT, *DERIVED)
GROUPS = {key.partition(".")[0] for key in KEYS}


def translate(content: dict[str, Any]) -> Translation:
    """Take the groups of these keys out of the content of a file, and translate them.

    Keys of wandb are set as environment variables of W&B, which are not recorded.
    """
    groups = [name for name in content if name in GROUPS and isinstance(content[name], dict)]
    values = {
        key: value
        for name in groups
        for key, value in _flatten(name, content.pop(name))
        if value is not None
    }
    if "experiment" in groups:
        values = {**DEFAULTS, **values}
    settings: dict[str, Any] = {}
    keys: dict[str, str] = {}
    notes = []
    for key in values:
        reason = _why_without_effect(key, values)
        if reason is not None:
            notes.append(f"{key} has no effect: {reason}.")
            continue
        found = _translate_key(key, values)
        keys |= {name: key for name in found if name not in settings}
        settings |= found
    return Translation(settings, keys, (*notes, *_describe_differences(values)))


def _describe_differences(values: Values) -> Iterator[str]:
    """Sentences on what this suite does differently, and why."""
    if "experiment.save_every" in values:
        num_passes = _passes_per_step(values)
        interval = _positive("experiment.save_every", values)
        if interval % num_passes:
            yield (
                f"experiment.save_every, {interval} backward passes, is not a multiple of the "
                f"{num_passes} of an optimizer step: the run saves every "
                f"{_steps_per_save(values)} steps."
            )
        if "experiment.eval_caption_file" not in values:
            yield (
                "experiment.eval_caption_file is not given, so no pictures are drawn; "
                "open-diffusion draws them for its own data/prompts/uid_caption.csv."
            )
    schedulers = [
        values[f"model.{key}.params"]
        for key in PARTS["scheduler"]
        if f"model.{key}.params" in values
    ]
    names_model = any(key.startswith("model.") for key in values)
    if names_model and [one.get("prediction_type", "epsilon") for one in schedulers] != ["epsilon"]:
        yield (
            "model.scheduler decides what is predicted; open-diffusion always predicts the noise "
            "(--prediction_type epsilon)."
        )


def _flatten(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if key in KEYS or not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from _flatten(f"{key}.{name}", inner)


def _why_without_effect(key: str, values: Values) -> str | None:
    if WHOLE_MODEL in values and key in MODEL_KEYS[1:]:
        return f"{WHOLE_MODEL} is the whole model"
    is_other = key in SAME and SAME[key] not in values
    return WITHOUT_EFFECT.get(SAME[key] if is_other else key)


def _translate_key(key: str, values: Values) -> dict[str, Any]:
    """The settings that a key means."""
    value, rule = values[key], key
    if key in SAME:
        rule = SAME[key]
        if rule in values and value != values[rule]:
            raise ConfigError(
                f"{key} and {rule} contradict each other",
                value=value,
                allowed=str(values[rule]),
                flag=f"{key}=VALUE or {rule}=VALUE",
            )
        if rule in values:
            return {}
    if rule in RENAMED:
        return {RENAMED[rule]: value}
    if rule in DERIVED:
        return DERIVED[rule](value, values)
    if rule not in MEANINGS:
        # A shared group makes no two keys alike.
        prefix = key[: key.rfind(".") + 1]
        of_group = [known for known in KEYS if known.startswith(prefix)]
        names = {known.removeprefix(prefix): known for known in of_group} or {k: k for k in KEYS}
        meant = names.get(nearest(key.removeprefix(prefix) if of_group else key, names))
        raise ConfigError(
            "unknown key",
            value=key,
            allowed="the keys of open-diffusion" + (f", the nearest is {meant}" if meant else ""),
            flag=f"{meant or key}=VALUE",
        )
    setting, meanings = MEANINGS[rule]
    if value not in list(meanings):  # a list cannot be a key
        raise ConfigError(
            f"{key} has a value that is not supported",
            value=value,
            allowed=" | ".join(map(str, meanings)),
            flag=f"{key}=VALUE",
        )
    return {} if setting is None else {setting: meanings[value]}
