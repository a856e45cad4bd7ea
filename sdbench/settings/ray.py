"""`RaySettings`: the ranks of --engine ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sdbench.settings.kinds import POSITIVE, RESOURCES, TEXT, whole_number
from sdbench.settings.setting import GIVEN, Beside, Rule, Situation, setting

RAY = "ray"
UNDER_RAY = Beside(("engine",), RAY)


def _has_enough_workers(situation: Situation) -> bool:
    least, most = situation.config.min_ray_workers, situation.config.num_ray_workers
    return most is not None and least <= most


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaySettings:
    """Where Ray Train starts the ranks, and what it does as one of them is lost."""

    GROUP = "ranks of --engine ray"
    ACTS_BESIDE = (UNDER_RAY,)

    ray_address: str | None = setting(
        TEXT,
        None,
        "Ray cluster, e.g. auto or host:6379 (default: RAY_ADDRESS, else one of this machine alone "
        "that ends with the run)",
        only_measures=True,
    )
    num_ray_workers: int | None = setting(
        POSITIVE, None, "ranks (default: the GPUs of the cluster, or 1)", only_measures=True
    )
    min_ray_workers: int | None = setting(
        POSITIVE,
        None,
        "ranks to go on with where the cluster has no room for all; the global batch stays",
        only_measures=True,
        rules=(
            Rule(
                GIVEN,
                _has_enough_workers,
                "the least number of ranks is above the number of ranks",
                allowed="--num_ray_workers of at least --min_ray_workers",
                others=("num_ray_workers",),
            ),
        ),
    )
    ray_worker_resources: Mapping[str, float] | None = setting(
        RESOURCES,
        None,
        "what a rank takes of a node (default: one CPU, and one GPU where the cluster has some)",
        only_measures=True,
    )
    ray_storage_path: str | None = setting(
        TEXT,
        None,
        "folder or URL (s3://, gs://, abfss://) where train.py keeps copies of its checkpoints; it "
        "fetches the newest of --run_name where there is no later one",
        only_measures=True,
    )
    max_failures: int = setting(
        whole_number(-1),
        0,
        "how often the ranks are started again after one was lost or failed; -1: always",
        only_measures=True,
        demands={"resume": (("auto",), "ranks that are started again go on from a checkpoint")},
    )
