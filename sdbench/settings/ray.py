"""`RaySettings`: the ranks of --engine ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from sdbench.base.errors import ConfigError
from sdbench.settings.kinds import POSITIVE, RESOURCES, TEXT, whole_number
from sdbench.settings.request import Request
from sdbench.settings.setting import declarations, setting

RAY = "ray"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaySettings:
    """Where Ray Train starts the ranks, and what it does as one of them is lost."""

    GROUP = "ranks of --engine ray"

    ray_address: str | None = setting(
        TEXT,
        None,
        "Ray cluster, e.g. auto or host:6379 (default: RAY_ADDRESS, else one of this machine alone "
        "that ends with the run)",
        only_measures=True,
    )
    num_ray_workers: int | None = setting(
        POSITIVE,
        None,
        "ranks (default: the GPUs of the cluster, or 1)",
        only_measures=True,
    )
    min_ray_workers: int | None = setting(
        POSITIVE,
        None,
        "ranks to go on with where the cluster has no room for all; the global batch stays",
        only_measures=True,
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
    )


def refuse_without_effect(request: Request, names: Iterable[str], *, needed: str) -> None:
    """Refuse settings that the user gave another value than the default, to no effect.

    Args:
        request: The user's.
        names: Of the settings.
        needed: The flag, with its value, beside which they have one.

    Raises:
        ConfigError: There is such a setting.
    """
    settings = declarations(type(request.config))
    for declared in map(settings.__getitem__, names):
        value = getattr(request.config, declared.name)
        if request.is_users(declared.name) and value != declared.default:
            raise ConfigError(
                f"{declared.flag} has no effect",
                value=value,
                allowed=f"only with {needed}",
                flag=f"{declared.flag} or {needed.split()[0]}",
            )


def check_ray_settings(request: Request) -> None:
    """Refuse settings of Ray's ranks for another engine, and fewer ranks than the least.

    Raises:
        ConfigError: One of them has no effect, or they contradict each other.
    """
    config = request.config
    if config.engine != RAY:
        refuse_without_effect(request, declarations(RaySettings), needed="--engine ray")
    least, most = config.min_ray_workers, config.num_ray_workers
    if least is not None and (most is None or least > most):
        raise ConfigError(
            "the least number of ranks needs a number of ranks that is not below it",
            value=f"at least {least} of {most}",
            allowed="--num_ray_workers of at least --min_ray_workers",
            flag="--min_ray_workers or --num_ray_workers",
        )
