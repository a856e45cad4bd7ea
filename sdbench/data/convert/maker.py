"""What an encoded data set says of the model that made it, in its note of how it was made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sdbench.base.conditions import BFLOAT16, NUM_CLIP_TOKENS, Condition, ModelInputs
from sdbench.base.errors import ConfigError
from sdbench.data.checks import bad_place
from sdbench.data.formats.identity import PROVENANCE_NAME, read_provenance
from sdbench.data.formats.mds_index import places_of
from sdbench.data.source import SourceConfig
from sdbench.settings.data import DataSettings

# What is said of the model that encoded the samples: the name of its family, size and checksum of
# its files of weights, or that a part was random, and the checksum of the tensors of its VAE.
FAMILY, WEIGHTS, VAE_TENSORS = "family", "weights", "vae_tensors"
# And the arrays of a sample, where they are not those of Stable Diffusion 1 or 2.
ENCODED = "encoded"
# Types that conditions may have.
DTYPES = ("float16", "float32", BFLOAT16)


def check_maker(
    settings: DataSettings, *, family: str, identify_vae: Callable[[], str | None]
) -> None:
    """Refuse latents that are said to be of another family of models, or of another VAE.

    The format of the data is known. `identify_vae` returns the checksum of the tensors of the VAE
    of the model that is trained, as `precompute` writes it; None: random weights. What a data set
    does not say is not checked.
    """
    if settings.data_format == "synthetic" or not settings.wants_latents:
        return
    for place in places_of(settings):
        facts = read_provenance(Path(place)) or {}
        made_by = facts.get(FAMILY)
        if made_by is not None and made_by != family:
            raise ConfigError(
                f"The latents of {place} were made by a model of another family",
                value=family,
                allowed=f"a model of the family {made_by}, or latents made by this one",
                flag="--model_name",
            )
        stored = facts.get(VAE_TENSORS)
        vae = None if stored is None else identify_vae()
        if vae is not None and vae != stored:
            raise ConfigError(
                f"The latents of {place} were made by a VAE of other weights",
                value=vae,
                allowed=f"a model whose VAE has the checksum {stored}, or latents made by this one",
                flag="--model_name",
            )


def tell_maker(place: str) -> dict[str, Any]:
    """Return what a data set says of the model that encoded it, for a copy of it."""
    facts = read_provenance(Path(place)) or {}
    return {name: facts[name] for name in (FAMILY, WEIGHTS, VAE_TENSORS, ENCODED) if name in facts}


def tell_encoded(source: SourceConfig) -> dict[str, Any]:
    """Return what a data set has to say of its arrays, for `read_encoded`."""
    inputs = source.inputs
    plain = _of_width(inputs.conditions[0].shape[-1])
    if _arrays(inputs) == _arrays(plain):
        return {}
    conditions = [dataclasses.asdict(condition) for condition in inputs.conditions]
    return {ENCODED: {**_arrays(inputs), "conditions": conditions}}


def _arrays(inputs: ModelInputs) -> dict[str, Any]:
    """What decides the arrays of an encoded sample."""
    names = ("latent_channels", "tells_sizes", "conditions")
    return {name: getattr(inputs, name) for name in names}


def _of_width(width: int) -> ModelInputs:
    """What Stable Diffusion 1 and 2 read."""
    return ModelInputs(conditions=(Condition(shape=(NUM_CLIP_TOKENS, width)),))


def read_encoded(place: str | None, *, width: int) -> ModelInputs:
    """Return what the encoded samples at a place are for.

    Where it does not say what they are, they are for Stable Diffusion, with this width.
    """
    facts = {} if place is None else read_provenance(Path(place)) or {}
    if ENCODED not in facts:
        return _of_width(width)
    try:
        said = facts[ENCODED]
        return ModelInputs(
            latent_channels=int(said["latent_channels"]),
            tells_sizes=bool(said["tells_sizes"]),
            conditions=tuple(map(_read_condition, said["conditions"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise bad_place(
            f"The note of how the data set was made does not describe its arrays ({error!r})",
            value=str(Path(place or "") / PROVENANCE_NAME),
            allowed="the file as the suite wrote it, or no file",
        ) from None


def _read_condition(said: Mapping[str, Any]) -> Condition:
    if said["dtype"] not in DTYPES:
        raise ValueError(f"a type {said['dtype']!r}")
    shape = tuple(map(int, said["shape"]))
    return Condition(name=str(said["name"]), shape=shape, dtype=said["dtype"])
