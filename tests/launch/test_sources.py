"""Do two ranks of Composer train from every kind of data?"""

from __future__ import annotations

import pytest

import benchmark
from sdbench.engines import load_engine
from sdbench.record.store import load_record
from tests.data import datasets
from tests.forked import exit_codes, forked_ranks, log_of

KINDS = ("synthetic", "synthetic latents", *datasets.WRITERS)


@pytest.fixture
def sized_for_tiny(monkeypatch):
    """The data sets as the model `tiny` takes them: 64 pixels, embeddings of width 32."""
    monkeypatch.setattr(datasets, "IMAGE_SIZE", 64)
    monkeypatch.setattr(datasets, "LATENT_SHAPE", (4, 8, 8))
    monkeypatch.setattr(datasets, "EMBEDDING_SHAPE", (77, 32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "mds latents",  # the quickest
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "mds latents"),
    ],
)
def test_two_ranks_train(kind, sized_for_tiny, tmp_path):
    place = ["--use_synth_data"]
    if kind in datasets.WRITERS:
        datasets.WRITERS[kind](tmp_path / "data")
        place = ["--remote", str(tmp_path / "data")]
    if kind.endswith("latents"):
        place += ["--latents", "precomputed"]
    steps = ["--warmup_batches", "1", "--measure_batches", "13", "--batch_size", "4"]
    steps += ["--max_duration", "14ba", "--num_threads", "1", "--no_measure_peak"]
    argv = ["--model_name", "tiny", *place, *steps]
    load_engine("composer")  # here, and not once in each rank
    with forked_ranks(
        lambda: benchmark.main([*argv, "--results_dir", str(tmp_path / "runs")]), tmp_path
    ) as ranks:
        assert exit_codes(ranks) == [0, 0], log_of(tmp_path, 0).read_text()
    (path,) = (tmp_path / "runs").glob("*/record.json")
    record = load_record(path)
    assert record["status"] == "ok"
    assert record["config"]["data_format"] == kind.split()[0]
    assert record["ranks"]["world_size"] == 2
    # 14 steps of 4 are more than one epoch of 12 such batches.
    assert record["workload"]["num_images"] == 56
    assert record["workload"]["num_bad_samples"] == 0
