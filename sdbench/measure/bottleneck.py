"""Names the bottleneck of a step: a slow rank, or its largest phase with a flag that helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.measure import phases
from sdbench.settings.subject import PRETRAIN

NAMES = {
    phases.DATA_WAIT: "waiting for data",
    phases.HOST_TO_DEVICE: "copying to the device",
    phases.VAE_ENCODE: "VAE encode",
    phases.TEXT_ENCODE: "text encode",
    phases.UNET_FORWARD: "the U-Net's forward pass",
    phases.BACKWARD: "the backward pass",
    phases.GRADIENT_COMMUNICATION: "gradient communication that nothing hides",
    phases.RANK_WAIT: "waiting for other ranks",
    phases.OPTIMIZER: "the optimizer",
    phases.EMA: "the moving average",
    phases.OTHER: "in none of the phases",
}
PRECOMPUTED = "--latents precomputed trains on what `python -m sdbench precompute` has encoded once"
LARGER_BATCH = "a larger --batch_size has fewer of them per image"
COMPUTE = [
    ("preset", "fast", "--preset fast"),
    ("device_train_microbatch_size", None, "a larger --device_train_microbatch_size"),
    ("batch_size", None, "a larger --batch_size; one micro-batch is the whole batch already"),
]
# What may shorten each phase: setting, value (None: any other) and advice. The first setting that
# the run does not use yet is named.
ADVICE: dict[str, list[tuple[str, Any, str]]] = {
    phases.DATA_WAIT: [
        ("num_workers", None, "more --num_workers; `python data.py` tells what limits the source")
    ],
    phases.HOST_TO_DEVICE: [
        ("image_dtype", "uint8", "--image_dtype uint8 sends a quarter of the bytes"),
        ("latents", "precomputed", PRECOMPUTED),
    ],
    phases.VAE_ENCODE: [("latents", "precomputed", PRECOMPUTED)],
    phases.TEXT_ENCODE: [("latents", "precomputed", PRECOMPUTED)],
    phases.UNET_FORWARD: COMPUTE,
    phases.BACKWARD: COMPUTE,
    phases.GRADIENT_COMMUNICATION: [("batch_size", None, LARGER_BATCH)],
    phases.RANK_WAIT: [],  # no rank is slow in every step, else it is named
    phases.OPTIMIZER: [
        ("optimizer", "adamw_fused", "--optimizer adamw_fused"),
        ("batch_size", None, LARGER_BATCH),
    ],
    phases.EMA: [("ema_impl", "foreach", "--ema_impl foreach"), ("batch_size", None, LARGER_BATCH)],
    phases.OTHER: [("profile_trace", True, "--profile_trace shows what it is")],
}


def name_bottleneck(
    breakdown: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    device_batch_size: int,
    stragglers: Sequence[Mapping[str, Any]],
) -> str:
    """Say in a sentence what makes a step long, and what may shorten it.

    A rank that is slower than the others comes before the largest phase, since all wait for it.
    The other arguments are the record's fields of these names, and the images of a rank in a step.
    """
    if stragglers:
        return _name_slowest(stragglers[0], step_time_s=breakdown["step_time_s"])
    seconds = breakdown["seconds"]
    phase = max(seconds, key=seconds.__getitem__)
    share_percent = 100 * seconds[phase] / breakdown["step_time_s"]
    advice = _advise(phase, config, device_batch_size=device_batch_size)
    return f"{share_percent:.0f} % of the step is {NAMES[phase]}: {advice}"


def _name_slowest(rank: Mapping[str, Any], *, step_time_s: float) -> str:
    own_s = rank["own_step_time_s"]
    lost_percent = 100 * (own_s - own_s / rank["times_median"]) / step_time_s
    return (
        f"{lost_percent:.0f} % of the step is lost to rank {rank['rank']} on node {rank['node']}, "
        f"which is slower than the others, most in {rank['slow_phase'].replace('_', ' ')}: "
        "`python -m sdbench doctor` looks at its machine"
    )


def _advise(phase: str, config: Mapping[str, Any], *, device_batch_size: int) -> str:
    for field, value, advice in ADVICE[phase]:
        # A trained text encoder's captions, and a subject's pictures, cannot be precomputed.
        is_subjects = config.get("task", PRETRAIN) != PRETRAIN
        if field == "latents" and (config.get("train_text_encoder") or is_subjects):
            continue
        if field == "optimizer" and config[field] != "adamw":  # the one pass is no slower
            continue
        if field == "device_train_microbatch_size" and config[field] >= device_batch_size:
            continue
        if value is None or config[field] != value:
            return advice
    return "no flag of the suite makes it smaller"
