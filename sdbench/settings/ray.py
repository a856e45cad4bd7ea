"""`RaySettings`: the ranks of --engine ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

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
        "folder or URL (s3://, gs://, abfss://) that checkpoints are copied to and fetched from, "
        "for nodes without a shared file system",
        only_measures=True,
    )
    max_failures: int = setting(
        whole_number(-1),
        0,
        "how often the ranks are started again after one was lost or failed; -1: always",
        only_measures=True,
    )


def check_ray_settings(request: Request) -> None:
    """Refuse settings of Ray's ranks for another engine, and fewer ranks than the least.

    Raises:
        ConfigError: One of them has no effect, or they contradict each other.
    """
    config = request.config
    for name, declared in declarations(RaySettings).items():
        value = getattr(config, name)
        if config.engine != RAY and request.is_users(name) and value != declared.default:
            raise ConfigError(
                f"{declared.flag} has no effect",
                value=value,
                allowed="only with --engine ray",
                flag=f"{declared.flag} or --engine",
            )
    least, most = config.min_ray_workers, config.num_ray_workers
    if least is not None and (most is None or least > most):
        raise ConfigError(
            "the least number of ranks needs a number of ranks that is not below it",
            value=f"at least {least} of {most}",
            allowed="--num_ray_workers of at least --min_ray_workers",
            flag="--min_ray_workers or --num_ray_workers",
        )
