"""`stream_here`: the rows of Ray Data, made in this process by the stages that actors would run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from sdbench.tasks.encode.ray_stream import NUMBER, Pool


class RowsHere:
    """In place of a `ray.data.Dataset` and of its one end."""

    def __init__(self, pools: Sequence[Pool], *, num_rows: int, **_: int) -> None:
        self._num_rows = num_rows
        self._stages = [[pool.make_stage() for _ in range(pool.num_actors)] for pool in pools]

    def streaming_split(self, num_ends: int, *, equal: bool) -> list[RowsHere]:
        """As Ray Data does for one rank."""
        assert (num_ends, equal) == (1, True)
        return [self]

    def iterator(self) -> RowsHere:
        """As Ray Data does for a single reader."""
        return self

    def iter_batches(self, **_: object) -> Iterator[dict[str, np.ndarray]]:
        """Make the blocks of one row, in order."""
        for number in range(self._num_rows):
            block = {NUMBER: np.array([number])}
            for actors in self._stages:
                block = actors[number % len(actors)](block)
            yield block


@pytest.fixture
def stream_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No actors: encoders need the settings' `encoder_resources`, which would be the cluster's."""
    monkeypatch.setattr("ray.put", lambda value: value)
    monkeypatch.setattr("ray.get", lambda value: value)
    for module in ("online", "ray_shards"):
        monkeypatch.setattr(f"sdbench.tasks.encode.{module}.make_stream", RowsHere)
        monkeypatch.setattr(
            f"sdbench.tasks.encode.{module}.set_up_encoder_process", lambda _: "cpu"
        )
