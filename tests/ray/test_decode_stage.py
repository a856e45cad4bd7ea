"""Do decoders of Ray Data read the batches of each rank, and of streams their own files alone?"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pickle
from pathlib import Path

import pytest

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.data.formats import webdataset_stream
from sdbench.data.order.epochs import EpochOrder, Key
from sdbench.data.source import SourceConfig
from sdbench.encoding.ray_stages import DecodeStage, num_lanes_of_rank, open_same
from tests.data import datasets

GLOBAL_BATCH = 4


def source_of(place: Path, num_ranks: int, **changes) -> SourceConfig:
    datasets.write_tars(place)
    share = {"device_batch_size": GLOBAL_BATCH // num_ranks, "world_size": num_ranks}
    source = datasets.make_source("webdataset", place, **share)
    return dataclasses.replace(source, **changes)


def read(decoders: list[DecodeStage], num_rows: int, num_ranks: int) -> list[list[Key]]:
    """The samples of each rank, of rows for which the decoders take turns."""
    rows = [decoders[row % len(decoders)].work(row) for row in range(num_rows)]
    return [[key for row in rows[rank::num_ranks] for key in row.keys] for rank in range(num_ranks)]


def keys_of_ranks(batches, config: SourceConfig, position: dict | None = None) -> list[list[Key]]:
    """The samples of each rank in two epochs, as its loader reads them."""
    found = []
    for rank in range(config.world_size):
        order = EpochOrder(batches.samples, config=dataclasses.replace(config, rank=rank))
        if position is not None:
            order.resume(position)
        found.append(list(order))
        order.epoch_ended()
        found[-1] += list(order)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "num_decoders", "lanes"),
    [(1, 3, None), (2, 1, None), (2, 2, None), (2, 3, None), (1, 3, [4, 3]), (2, 2, [4, 3])],
)
def test_streams_are_read_as_loader_workers_read_them(
    num_ranks, num_decoders, lanes, tmp_path, monkeypatch
):
    monkeypatch.setattr(webdataset_stream, "SAMPLES_PER_BLOCK", 4)
    sizes, log = tmp_path / "sizes.json", tmp_path / "log"
    sizes.write_text(json.dumps(datasets.TAR_SIZES))
    num_lanes = num_lanes_of_rank(num_actors=num_decoders, num_ranks=num_ranks)
    config = source_of(
        tmp_path / "data",
        num_ranks,
        remote=f"pipe:echo x >> {log}; exec cat {tmp_path}/data/{{00000..00002}}.tar",
        remote_files="stream",
        tar_sizes=str(sizes),
        num_workers=num_lanes,
    )
    batches = data.open_batches(config)
    first_batch, position = 0, None
    if lanes is not None:
        # Of a run with other numbers of ranks and lanes, which stopped within the first epoch.
        first_batch = 12 // GLOBAL_BATCH
        position = EpochOrder(batches.samples, config=config).state(
            num_images=12, is_next_epoch=False
        )
        position["lanes"] = lanes
    decoders = [
        DecodeStage(lambda _: pickle.loads(pickle.dumps(batches)), config, first_batch, position)
        for _ in range(num_decoders)
    ]
    num_batches = 2 * (datasets.NUM_SAMPLES // GLOBAL_BATCH) - first_batch
    found = read(decoders, num_batches * num_ranks, num_ranks)
    assert found == keys_of_ranks(batches, config, position)
    # Each lane opens the tar in which it begins, and those behind it, in each epoch.
    num_firsts = num_decoders if lanes is None else math.prod(lanes) * num_decoders
    assert len(log.read_text().split()) <= num_firsts + num_lanes * num_ranks + 2 * 3


def test_two_ranks_have_their_parts_of_a_batch_by_number(tmp_path):
    config = source_of(tmp_path / "data", 2)
    num_samples = datasets.NUM_SAMPLES
    open_batches = functools.partial(open_same, config=config, num_samples=num_samples)
    decoder = DecodeStage(open_batches, config, 0, None)
    found = read([decoder], 2 * 2 * (num_samples // GLOBAL_BATCH), 2)
    assert found == keys_of_ranks(open_batches(0), config)


def test_a_node_with_other_data_is_told(tmp_path):
    config = source_of(tmp_path / "data", 1)
    with pytest.raises(RunError, match="finds 49 samples where the run has found 50"):
        open_same(0, config=config, num_samples=50)
