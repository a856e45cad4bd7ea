"""`mix`: measures the pictures of a data set, once, and puts each into a bucket.

`convert` and `precompute` write the sizes beside the samples. Of other data sets they are read from
headers, and kept in the user's cache under the identity of the data set, so that only its first run
reads every file. Encoded samples have the shape of their latents.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from sdbench.base.cache import private_folder
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.files import new_file
from sdbench.base.progress import show_progress
from sdbench.base.shape import Shape
from sdbench.base.units import counted
from sdbench.data.buckets import REASONS, UNREADABLE, UNSERVED, Mixture, fill_buckets
from sdbench.data.checks import tell_once
from sdbench.data.formats.data_formats import list_files
from sdbench.data.formats.empty_caption import load_beside
from sdbench.data.formats.identity import identify_data
from sdbench.data.formats.latent_columns import check_array
from sdbench.data.formats.mds_index import places_of
from sdbench.data.places.remote import is_url
from sdbench.data.samples import SKIP_ADVICE, BadSampleError, ImageSample, Samples, decoding
from sdbench.data.source import VAE_FACTOR, SourceConfig

SIZES_FOLDER = "picture-sizes"
# Beside the samples; hidden, because no format reads hidden files as samples.
SIZES_NAME = ".picture_sizes.npz"
MAX_SIZES_BYTES = 2**30
# Changes whenever the content of a file of sizes does.
SIZES_VERSION = 2
IDENTITIES = ("names_and_sizes", "names")
# Samples that are left out and printed.
NUM_BAD_NAMED = 5


def mix(samples: Samples, config: SourceConfig) -> Mixture:
    """Return the bucket of each sample.

    Raises:
        ConfigError: A picture cannot be read, or no bucket serves it, and bad samples are not
            skipped, or more than may be.
    """
    sizes = _read_sizes(samples, config)
    is_readable = sizes.all(1)
    if config.wants_latents:
        found, inverse = np.unique(sizes, axis=0, return_inverse=True)
        shapes = [Shape(*map(int, size)) for size in found]
        bucket_of = inverse.ravel().astype(np.int16)
    else:
        shapes = list(config.shapes.shapes)
        bucket_of = config.shapes.assign(np.maximum(sizes, 1), seed=config.seed)
    bucket_of[~is_readable] = UNREADABLE
    _check_bad(samples, sizes, bucket_of, config=config)
    return fill_buckets(shapes, bucket_of, sizes=sizes)


def _check_bad(
    samples: Samples, sizes: np.ndarray, bucket_of: np.ndarray, *, config: SourceConfig
) -> None:
    """Refuse bad samples if they are not skipped, or are too many; else name the first ones."""
    bad = np.flatnonzero((bucket_of == UNREADABLE) | (bucket_of == UNSERVED)).tolist()
    limit = config.max_bad_fraction if config.on_bad_sample == "skip" else 0.0
    if len(bad) <= limit * len(sizes) and (bucket_of >= 0).any():
        for index in bad[:NUM_BAD_NAMED] if config.rank == 0 else ():
            reason = REASONS[int(bucket_of[index])]
            tell_once(f"Left out: {samples.name(index)}, {reason}.")
        return
    if not bad:
        widest, highest = sizes.max(0)
        raise ConfigError(
            "all pictures are smaller than the shapes of the buckets",
            value=f"{widest} x {highest} px at most",
            allowed="smaller shapes, or --small_pictures enlarge",
            flag="--buckets, --image_size or --small_pictures",
        )
    first, flag = bad[0], "--on_bad_sample or --max_bad_fraction"
    what, value = str(_why_unreadable(samples, first, config)).rstrip("."), samples.name(first)
    allowed = "samples that can be read"
    if bucket_of[first] == UNSERVED:
        what = f"no bucket serves {samples.name(first)}: more than half of it would be cut off"
        value = f"{sizes[first][0]} x {sizes[first][1]} px"
        allowed, flag = "shapes of other proportions", f"--max_aspect_ratio, --buckets, {flag}"
    raise ConfigError(
        f"{what} ({counted(len(bad), 'such sample')} of {len(sizes)})",
        value=value,
        allowed=f"{allowed}; {SKIP_ADVICE}",
        flag=flag,
    )


def _why_unreadable(samples: Samples, index: int, config: SourceConfig) -> Exception:
    try:
        measure(samples, index, config)
    except BadSampleError as error:
        return error
    return BadSampleError(f"{samples.name(index)}: it could not be read when it was measured.")


def measure(samples: Samples, index: int, config: SourceConfig) -> tuple[int, int]:
    """Return the width and height in pixels of a sample's picture, without decoding it.

    Raises:
        BadSampleError: It has no picture, or one that cannot be read, or no latents of the model.
    """
    from sdbench.data.formats.image_files import open_image

    sample = samples.read(index)
    if not isinstance(sample, ImageSample):
        name, shape = next(iter(samples.sample_type.array_shapes(config).items()))
        check_array(f"{sample.name}, {name}", sample.arrays[name], shape=shape)
        height, width = sample.arrays[name].shape[-2:]
        return width * VAE_FACTOR, height * VAE_FACTOR
    if not sample.image:
        raise BadSampleError(f"{sample.name}: no image.")
    with decoding(sample.name):
        return open_image(sample.image, read_avif=config.read_avif).size


def _read_sizes(samples: Samples, config: SourceConfig) -> np.ndarray:
    """Return widths and heights, (N, 2); 0 for what cannot be read."""
    from filelock import FileLock

    identity = identify_data(config)
    sizes = None if config.filters else _read_kept(config, identity)
    if sizes is not None and len(sizes) == len(samples):
        return sizes
    facts = {
        "version": SIZES_VERSION,
        # At a URL perhaps only names are known: the addresses are told apart as well.
        "data": [identity, list_files(config) if is_url(places_of(config)[0]) else None],
        "num_samples": len(samples),
        "read": [samples.sample_type.value, dict(samples.columns), config.read_avif],
        "filters": dict(config.filters or {}),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    path = private_folder(SIZES_FOLDER) / f"{digest}.npy"
    # One rank of a machine measures, the others wait.
    with FileLock(path.with_suffix(".lock"), mode=0o600):
        try:
            return np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError):  # not made yet, or cut
            sizes = _measure_all(samples, config)
        if sizes.all():  # a disk may have failed: others are read again by the next run
            content = io.BytesIO()
            np.save(content, sizes)
            with new_file(path) as new:
                new.write_bytes(content.getvalue())
    return sizes


def keep_sizes(folder: str, sizes: Sequence[Sequence[int]], *, data_format: str) -> None:
    """Write the sizes of all pictures of a new data set beside them; nothing if there are none."""
    if sizes:
        content = io.BytesIO()
        config = SourceConfig(
            data_format=data_format,
            remote=folder,
            image_size=VAE_FACTOR,
            device_batch_size=1,
            seed=0,
        )
        identity = {name: identify_data(config)[name] for name in IDENTITIES}
        np.savez(content, sizes=np.array(sizes, dtype=np.int32), **identity)
        with new_file(Path(folder, SIZES_NAME), is_private=False) as new:
            new.write_bytes(content.getvalue())


def _read_kept(config: SourceConfig, identity: Mapping[str, Any]) -> np.ndarray | None:
    """Return what `keep_sizes` has written, if it is about these very files."""
    (place, *_) = places_of(config)
    try:
        content = load_beside(place, SIZES_NAME, max_bytes=MAX_SIZES_BYTES)
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            # The sizes of files at URLs are not always known.
            name = IDENTITIES[identity["num_bytes"] is None]
            is_same = str(file[name]) == identity[name]
            return file["sizes"].astype(np.int32).reshape(-1, 2) if is_same else None
    except (OSError, RunError, ValueError, KeyError, EOFError, BadZipFile):
        return None  # there is none, or it is damaged: the pictures are measured


def _measure_all(samples: Samples, config: SourceConfig) -> np.ndarray:
    def sizes() -> Iterator[tuple[int, int]]:
        for index in range(len(samples)):
            try:
                yield measure(samples, index, config)
            except BadSampleError:
                yield 0, 0

    measured = show_progress(sizes(), total=len(samples), unit="picture")
    return np.array(list(measured), dtype=np.int32).reshape(-1, 2)


def check_noted(name: str, size: tuple[int, int], noted: np.ndarray) -> None:
    """Raise a RunError unless a decoded picture, named, has the size that was read before."""
    if size != tuple(noted.tolist()):
        places = f"{SIZES_NAME} beside the samples, and in {private_folder(SIZES_FOLDER)}"
        raise RunError(
            f"{name} has {size[0]} x {size[1]} pixels, and had {noted[0]} x {noted[1]} when the "
            "data set was measured: it was changed since, or its header is wrong. Sizes are kept "
            f"in {places}; without them the data set is measured again."
        )
