"""Is MosaicML diffusion's own data set of latents read, small pictures and all?"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from data import main as data_main
from sdbench import data
from sdbench.base.conditions import Condition, ModelInputs
from sdbench.base.errors import RunError
from sdbench.cli import main as sdbench_main
from tests.data import datasets
from tests.data.datasets import NUM_SAMPLES, indices, read_epoch
from tests.refusals import refused
from tests.runs import only_record

make_config = functools.partial(datasets.make_source, "mds latents")

# Columns of its scripts/precompute_latents.py, in its order, for other resolutions.
COLUMNS = {
    **dict.fromkeys(("punsafe", "pwatermark"), "float64"),
    **dict.fromkeys(("caption", "url"), "str"),
    **dict.fromkeys(("width", "height"), "int32"),
    "jpg": "bytes",
    "hash": "int64",
    **dict.fromkeys(("caption_latents", "latents_16", "latents_32"), "bytes"),
}
# Every third picture is smaller than 32 pixels.
PRESENT = [index for index in range(NUM_SAMPLES) if index % 3]
# As long as texts are, so that arrays begin at any byte.
TEXTS = ["", "a", "ab"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """The data set as the script writes it."""

    def make_row(index: int) -> dict:
        arrays = datasets.make_arrays(index)
        empty = {"str": TEXTS[index % 3], "bytes": b"", "int32": 32, "float64": 0.5, "int64": 0}
        row = {name: empty[encoding] for name, encoding in COLUMNS.items()}
        row["caption_latents"] = arrays["text_embedding"].tobytes()
        row["latents_16"] = bytes(4 * 2 * 2 * 2)
        row["latents_32"] = arrays["latent"].tobytes() if index in PRESENT else b""
        return row

    rows = (make_row(index).values() for index in range(NUM_SAMPLES))
    return datasets.write_shards(tmp_path / "latents", COLUMNS, rows, size_limit=2**14)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_small_pictures_are_left_out(folder, shuffle, num_workers):
    config = make_config(
        folder, missing_latents="leave_out", shuffle=shuffle, num_workers=num_workers
    )
    assert data.check(config) == len(PRESENT) == 32
    loader = data.build(config)
    batches = list(loader)
    found = indices(batches)
    assert sorted(found) == PRESENT
    for batch, first in zip(batches, range(0, 32, 4), strict=True):
        for position, index in enumerate(found[first : first + 4]):
            for name in ("latent", "text_embedding"):
                expected = datasets.make_arrays(index)[name]
                assert np.array_equal(batch[name][position], expected)
    assert loader.stats.num_dropped_samples == 17
    assert loader.stats.num_images_delivered == 32
    assert loader.stats.num_bad_samples == 0
    # In another order where they are shuffled, and as they are stored where not.
    assert (found == PRESENT) is not shuffle
    assert (indices(loader) == found) is not shuffle


def test_missing_latents_are_refused_with_their_number(folder, tmp_path, capsys):
    flags = ["--remote", str(folder), "--latents", "precomputed", "--num_workers", "0"]
    flags += ["--image_size", "32", "--text_embedding_dim", "8", "--batch_size", "4"]
    flags += ["--results_dir", str(tmp_path / "results")]
    assert data_main(flags) == 2
    message = capsys.readouterr().err
    assert "17 of the 49 samples" in message
    assert "--missing_latents" in message
    assert data_main([*flags, "--missing_latents", "leave_out"]) == 0
    content = only_record(tmp_path / "results")
    assert content["summary"]["num_dropped_samples"] == 17
    assert content["config"]["missing_latents"] == "leave_out"
    # Replaced, if somebody says so, as other samples that cannot be used.
    skip = {"on_bad_sample": "skip", "max_bad_fraction": 0.4, "shuffle": False}
    loader = data.build(make_config(folder, **skip))
    assert sorted(set(indices(loader))) == PRESENT
    assert loader.stats.num_bad_samples == 16


def test_verify_data_counts_and_convert_names_them(folder, tmp_path, capsys):
    width = ("--text_embedding_dim", "8")
    for deep in ((), ("--deep",)):
        assert sdbench_main(["verify-data", str(folder), *width, *deep]) == 0
        printed = capsys.readouterr().out
        assert "note: 17 of the 49 samples have no latents_32" in printed
        assert "latents_16" not in printed
    out = str(tmp_path / "out")
    convert = ["convert", str(folder), "--folder", out, "--latents", "precomputed", *width]
    assert sdbench_main(convert) == 1
    assert "sample 0, latents_32: no value" in capsys.readouterr().err
    assert sdbench_main([*convert, "--on_bad_sample", "skip", "--max_bad_fraction", "0.4"]) == 0
    assert "Wrote 32 of the 49 samples" in capsys.readouterr().out
    assert read_epoch(make_config(tmp_path / "out", shuffle=False)) == PRESENT


def test_what_cannot_be_told_or_is_of_another_model(folder, tmp_path):
    leave_out = {"missing_latents": "leave_out"}
    wider = ModelInputs(conditions=(Condition(shape=(77, 16)),))
    with pytest.raises(RunError, match=r"sample 1: .*into shape \(77,16\)"):
        read_epoch(
            make_config(
                folder,
                inputs=wider,
                shuffle=False,
                **leave_out,
            )
        )
    for place in ({"local": str(tmp_path / "cache")}, {"remote": None, "streams": f"{folder}=1"}):
        with refused("--missing_latents, --remote, --local or --streams"):
            data.check(make_config(folder, **place, **leave_out))
    with refused("--missing_latents", value="leave_out"):
        data.check(make_config(folder, latents="online", **leave_out))
    # Copied ahead of being read, a sample is found when its turn comes.
    with pytest.raises(RunError, match="latents_32: no value.*--on_bad_sample"):
        read_epoch(make_config(folder, local=str(tmp_path / "cache")))
