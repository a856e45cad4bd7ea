"""The loader of MDS data, and StreamingLAIONDataset for users' own training loops."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from sdbench.base.shape import Shape
from sdbench.data.batches.batches import make_batches
from sdbench.data.batches.loader import CheckedLoader
from sdbench.data.batches.tokenizer import CaptionTokenizer
from sdbench.data.batches.transforms import decode_image, decode_whole
from sdbench.data.formats.compat import CheckedStream, CheckedStreamingDataset
from sdbench.data.formats.latent_columns import find_columns
from sdbench.data.formats.mds_index import LEAVE_OUT, check_files, keep_index, locate
from sdbench.data.formats.mds_shards import open_samples
from sdbench.data.order.epochs import make_order
from sdbench.data.order.streaming_order import KeyStream
from sdbench.data.samples import clean_caption, decoding
from sdbench.data.source import SourceConfig

# Its tokenizer is built in here; the model itself has been removed from the hub.
SD2_BASE = "stabilityai/stable-diffusion-2-base"


class StreamingLAIONDataset(CheckedStreamingDataset):
    """Images and token ids one by one, with the arguments of mosaicml/diffusion-benchmark.

    Image files have to be stored as ``bytes``, as its writer stores them.

    `data.build` makes whole batches, several times faster. A sample is
    ``{image, input_ids: (77,) int64}``; without a `transform` the image is (3, S, S) uint8.
    """

    def __init__(
        self,
        remote: str | None,
        local: str,
        split: str | None,
        shuffle: bool,
        tokenizer_name_or_path: str = SD2_BASE,
        transform: Callable[[Image.Image], Any] | None = None,
        predownload: int | None = 100_000,
        download_retry: int = 2,
        download_timeout: float = 120,
        batch_size: int | None = None,
        *,
        image_size: int = 512,
    ) -> None:
        """Read the index of a folder or URL; with `remote` None, `local` is read in place.

        Unlike in the original, `tokenizer_name_or_path` is a local model folder with a sub-folder
        ``tokenizer``; the default needs none. `transform` makes the sample's image from an RGB
        picture; the default crops the largest centred square and resizes it to `image_size`.
        """
        remote = remote and os.path.join(remote, split or "")
        place = locate(remote, str(Path(local, split or "")))
        check_files(place)
        keep_index(place)
        stream = CheckedStream(
            remote=place.remote,
            local=place.local,
            download_retry=download_retry,
            download_timeout=download_timeout,
        )
        super().__init__(
            streams=[stream], shuffle=shuffle, predownload=predownload, batch_size=batch_size
        )
        self._columns = find_columns(
            self.shards[0].column_names, wants_latents=False, resolution=str(image_size)
        )
        self._transform = transform
        self._image_size = image_size
        is_carried = tokenizer_name_or_path == SD2_BASE
        folder = None if is_carried else Path(tokenizer_name_or_path, "tokenizer")
        self._tokenizer = CaptionTokenizer(folder=folder, pad_token_id=0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        file, caption = (sample[column] for column in self._columns.values())
        with decoding(f"sample {index}"):
            if self._transform is None:
                pixels = decode_image(file, shape=Shape.square(self._image_size))
                image = torch.from_numpy(np.ascontiguousarray(pixels))
            else:
                image = decode_whole(file)
        if self._transform is not None:
            image = self._transform(image)
        input_ids = torch.from_numpy(self._tokenizer([clean_caption(caption)])[0])
        return {"image": image, "input_ids": input_ids}


def build(config: SourceConfig) -> CheckedLoader:
    """Build the loader of `data.build` for MDS data.

    A single data set that is not shuffled is read by number, each shard copied when it is reached:
    of an incomplete last batch Streaming would leave out arbitrary samples, not the last ones.
    ``--missing_latents leave_out`` is read by number too, as Streaming's epochs have all samples,
    and so are buckets, as its batches are made without a look at the samples.
    """
    is_read_by_number = not config.shuffle or config.missing_latents == LEAVE_OUT
    if (is_read_by_number or config.buckets is not None) and config.streams is None:
        batches = make_batches(open_samples(config), config=config)
        order = make_order(batches.samples, batches.mixture, config=config)
        return CheckedLoader(batches, order, config=config)
    stream = KeyStream(config=config)
    batches = make_batches(stream.samples, config=config)
    return CheckedLoader(batches, stream, config=config)
