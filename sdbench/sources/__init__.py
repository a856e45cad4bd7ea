"""Where do samples come from?

One row of `SOURCES` per data format. Nothing here imports torch: the functions are named in the
table and imported when they are called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from sdbench.errors import ConfigError
from sdbench.sources.config import SourceConfig

if TYPE_CHECKING:
    from sdbench.sources.loader import CheckedLoader


class Source(NamedTuple):
    """Where the functions of one data format are, as ``module:function``.

    Attributes:
        check: Takes a `SourceConfig`; returns the number of samples, or None where it is not
            known yet; raises `ConfigError`; imports no torch, builds nothing.
        build: Takes a `SourceConfig`; returns a `CheckedLoader`.
    """

    check: str
    build: str


SOURCES = {
    "synthetic": Source(
        check="sdbench.sources.checks:check_synthetic", build="sdbench.sources.synthetic:build"
    ),
    "mds": Source(check="sdbench.sources.checks:check_mds", build="sdbench.sources.mds:build"),
}


def resolve_format(
    *, data_format: str, use_synth_data: bool, remote: str | None, local: str | None
) -> str:
    """Decide which source is meant by the flags that name one.

    Args:
        data_format: Value of ``--data_format``: ``auto`` or a name of `SOURCES`.
        use_synth_data: Whether ``--use_synth_data`` was given, another way to say synthetic.
        remote: Value of ``--remote``.
        local: Value of ``--local``.

    Returns:
        A name of `SOURCES`. With ``auto`` and no folder it is ``synthetic``, which the caller
        has to tell the user.

    Raises:
        ConfigError: The flags contradict each other, or the format is unknown.
    """
    allowed = ", ".join(["auto", *SOURCES])
    if data_format != "auto" and data_format not in SOURCES:
        raise ConfigError(
            "Unknown data format", value=data_format, allowed=allowed, flag="--data_format"
        )
    if use_synth_data and data_format not in ("auto", "synthetic"):
        raise ConfigError(
            "--use_synth_data and --data_format name different sources",
            value=data_format,
            allowed="auto or synthetic, or leave --use_synth_data away",
            flag="--data_format",
        )
    folder = remote or local
    wants_synthetic = use_synth_data or data_format == "synthetic"
    if wants_synthetic and folder:
        raise ConfigError(
            "Synthetic data is made here, and a data folder was given too",
            value=folder,
            allowed="one of both: a folder, or --use_synth_data",
            flag="--use_synth_data, --data_format, --remote or --local",
        )
    if data_format == "mds" and not folder:
        raise ConfigError(
            "MDS data needs a folder",
            value=None,
            allowed="a folder or URL that holds an index.json",
            flag="--remote or --local",
        )
    return "mds" if folder else "synthetic"


def check(config: SourceConfig) -> int | None:
    """Find the user's mistakes about data, cheaply, before any weights are built.

    Reads at most an ``index.json`` and the sizes of the files that it names. The answer is the
    same on every rank of a machine.

    Returns:
        Samples of an epoch over all ranks, or None where only a download would tell.

    Raises:
        ConfigError: A folder is missing, empty or damaged, or has fewer samples than one batch.
    """
    return _load(SOURCES[config.data_format].check)(config)


def build(config: SourceConfig) -> CheckedLoader:
    """Build this rank's loader.

    Returns:
        A `torch.utils.data.DataLoader` of dictionaries: ``{image: (B, 3, S, S) uint8 or float32,
        input_ids: (B, 77) int64}``, or with precomputed latents ``{latent_mean, latent_logvar:
        (B, 4, S / 8, S / 8) float16, text_embedding: (B, 77, text_embedding_dim) float16}``.
        Deterministic under the seed, disjoint across ranks, whole batches only. MDS shuffles each
        epoch anew; synthetic data does when the trainer calls its sampler's ``set_epoch``, as
        Composer does.

    Raises:
        ConfigError: As `check`.
    """
    check(config)
    return _load(SOURCES[config.data_format].build)(config)


def _load(name: str):
    module, function = name.split(":")
    return getattr(import_module(module), function)
