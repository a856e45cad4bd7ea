"""Looks at the first captions of a data set before a run: which are cut, and which are bad."""

from __future__ import annotations

import os

from sdbench.base.conditions import CLIP
from sdbench.base.errors import RunError
from sdbench.base.units import counted
from sdbench.data.formats.data_formats import open_stored
from sdbench.data.formats.mds_index import is_packed, locate_mds
from sdbench.data.samples import BadSampleError, check_caption
from sdbench.data.source import SourceConfig

# Of one or two files in most data sets. All of a smaller data set.
NUM_CAPTIONS = 256


def describe_captions(config: SourceConfig, *, num_samples: int | None) -> list[str]:
    """Sentences about captions that lose their end and those that are bad, among the first ones.

    Only of stored pictures in a folder of this machine whose number is known: nothing is downloaded
    or unpacked for it.
    """
    if config.caption is not None:
        return _describe_cut([config.caption], config, which="the caption that all pictures share")
    place = config.remote or config.local
    is_here = place is not None and os.path.exists(place) and not config.is_streamed
    if not is_here or num_samples is None or config.wants_latents or _is_packed(config):
        return []
    samples = open_stored(config)
    samples.needs_images = False
    number = min(len(samples), NUM_CAPTIONS)
    captions, bad = [], []
    for index in range(number):
        try:
            sample = samples.read(index)
            check_caption(sample, empty_captions=config.empty_captions)
            captions.append(sample.caption)
        except BadSampleError as error:
            bad.append(str(error))
        except RunError:
            return []  # training names the damaged file
    which = f"all {number} captions" if number == len(samples) else f"the first {number} captions"
    notes = _describe_cut(captions, config, which=which)
    if bad:
        notes.append(f"Of {which}, {len(bad)} cannot be used: {bad[0]}")
    return notes


def _is_packed(config: SourceConfig) -> bool:
    if config.data_format != "mds":
        return False  # the number of samples of packed tars is not known
    places = locate_mds(config)
    return any(is_packed(shard, place.local) for place in places for shard in place.shards)


def _describe_cut(captions: list[str], config: SourceConfig, *, which: str) -> list[str]:
    # What one text encoder reads whole is not lost.
    longest = max(config.inputs.captions, key=lambda one: one.num_tokens)
    # A token is a byte or more, and the ends take two.
    long = [one for one in captions if len(one.encode()) + 2 > longest.num_tokens]
    if not long:
        return []
    from sdbench.data.batches.tokenizer import CaptionTokenizer

    token = config.new_token if longest.kind == CLIP else None
    tokenizer = CaptionTokenizer.of_captions(longest, new_token=token)
    num_cut = sum(number > longest.num_tokens for number in tokenizer.count_tokens(long))
    if not num_cut:
        return []
    return [
        f"Of {which}, {counted(num_cut, 'is', 'are')} longer than the {longest.num_tokens} tokens "
        "that the model reads, and the rest of it is not seen."
    ]
