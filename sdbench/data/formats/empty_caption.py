"""The encoded empty caption of a data set, which takes the place of captions that are dropped."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np

from sdbench.base.errors import ConfigError, RunError
from sdbench.data.checks import ENDINGS, ends_as
from sdbench.data.formats.latent_columns import check_array, check_finite, find_captions, widen_bits
from sdbench.data.formats.mds_index import places_of
from sdbench.data.places.command_output import PIPE
from sdbench.data.places.remote import file_beside, path_of
from sdbench.data.places.remote_files import open_stream
from sdbench.data.source import SourceConfig

# Beside the samples; hidden, because no format reads hidden files as samples.
EMPTY_CAPTION_NAME = ".empty_caption.npz"
# 512 states of T5-XXL are 8 MiB in float32.
MAX_BYTES = 64 * 2**20


def pack_empty_caption(columns: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of the file, given each array by the name of its column."""
    content = io.BytesIO()
    np.savez(content, **columns)
    return content.getvalue()


def load_empty_caption(place: str) -> bytes:
    """Return the content of the file of a data set; an OSError or RunError if it has none."""
    return load_beside(place, EMPTY_CAPTION_NAME, max_bytes=MAX_BYTES)


def load_beside(place: str, name: str, *, max_bytes: int) -> bytes:
    """Return the content of a file beside the samples; an OSError or RunError if there is none."""
    if place.startswith(PIPE):
        raise RunError("the output of a command has no files beside it")
    is_file = any(ends_as(path_of(place), data_format) for data_format in ENDINGS)
    with open_stream(file_beside(place if is_file else f"{place}/", name)) as file:
        return file.read(max_bytes)


def read_empty_caption(config: SourceConfig) -> dict[str, np.ndarray]:
    """Return the arrays of the encoded empty caption, by the names of the model's conditions.

    Raises:
        ConfigError: The data set has none, or it is of another model.
    """
    (place, *others), captions = places_of(config), config.inputs.conditions
    try:
        if others:
            raise ValueError("there are several data sets")
        content = io.BytesIO(load_empty_caption(place))
        with np.load(content, allow_pickle=False) as file:
            stored = dict(file)
        columns = find_captions(stored, captions)
        arrays = {part: stored[column] for part, column in columns.items()}
        arrays = widen_bits(arrays, columns, name=EMPTY_CAPTION_NAME)
        for condition in captions:
            check_array(condition.name, arrays[condition.name], shape=condition.shape)
            check_finite(condition.name, arrays[condition.name])
    except Exception as error:  # numpy and zipfile raise all kinds for a damaged file
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"The encoded empty caption of {place} cannot be read ({reason})",
            value=config.caption_drop_probability,
            allowed="0, or one data set that python -m sdbench precompute of this version has made",
            flag="--caption_drop_probability",
        ) from error
    return arrays
