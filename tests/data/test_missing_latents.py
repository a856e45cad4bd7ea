"""Is MosaicML diffusion's own data set of latents read, small pictures and all?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from streaming import MDSWriter

from data import main as data_main
from sdbench import data
from sdbench.base.errors import RunError
from sdbench.cli import main as sdbench_main
from sdbench.data.source import SourceConfig
from tests.refusals import refused

# Columns of its scripts/precompute_latents.py, in its order.
COLUMNS = {
    **dict.fromkeys(("punsafe", "pwatermark"), "float64"),
    **dict.fromkeys(("caption", "url"), "str"),
    **dict.fromkeys(("width", "height"), "int32"),
    "jpg": "bytes",
    "hash": "int64",
    **dict.fromkeys(("caption_latents", "latents_256", "latents_512"), "bytes"),
}
NUM_SAMPLES = 49
# Every third picture is smaller than 512 pixels.
PRESENT = [index for index in range(NUM_SAMPLES) if index % 3]
# As long as texts are, so that arrays begin at any byte.
TEXTS = ["", "a", "ab"]


def make_latent(index: int, *, side: int) -> np.ndarray:
    """What the script stores: sampled, times 0.18215, in float16."""
    generator = np.random.default_rng([index, side])
    return (generator.normal(scale=1 / 0.18215, size=(4, side, side)) * 0.18215).astype(np.float16)


def make_text(index: int) -> np.ndarray:
    return np.random.default_rng(index).normal(size=(77, 1024)).astype(np.float16)


@pytest.fixture
def folder(tmp_path) -> Path:
    """The data set as the script writes it."""
    folder = tmp_path / "latents"
    with MDSWriter(out=str(folder), columns=COLUMNS, size_limit=2**21) as writer:
        for index in range(NUM_SAMPLES):
            empty = {"str": TEXTS[index % 3], "bytes": b"", "int32": 512, "float64": 0.5}
            sample = {name: empty.get(encoding, 0) for name, encoding in COLUMNS.items()}
            sample["caption_latents"] = make_text(index).tobytes()
            sample["latents_256"] = make_latent(index, side=32).tobytes()
            if index in PRESENT:
                sample["latents_512"] = make_latent(index, side=64).tobytes()
            writer.write(sample)
    return folder


def make_config(folder: Path, **changes) -> SourceConfig:
    options = {"latents": "precomputed", "image_size": 512, "remote": str(folder)}
    return SourceConfig(data_format="mds", device_batch_size=4, seed=3, **{**options, **changes})


def samples(loader) -> dict[bytes, bytes]:
    """Latent to embedding of an epoch."""
    return {
        latent.numpy().tobytes(): text.numpy().tobytes()
        for batch in loader
        for latent, text in zip(batch["latent"], batch["text_embedding"], strict=True)
    }


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_small_pictures_are_left_out(folder, shuffle, num_workers):
    config = make_config(
        folder, missing_latents="leave_out", shuffle=shuffle, num_workers=num_workers
    )
    assert data.check(config) == len(PRESENT) == 32
    loader = data.build(config)
    expected = {
        make_latent(index, side=64).tobytes(): make_text(index).tobytes() for index in PRESENT
    }
    first = samples(loader)
    assert first == expected
    assert loader.stats.num_dropped_samples == 17
    assert loader.stats.num_images_delivered == 32
    assert loader.stats.num_bad_samples == 0
    # In another order where they are shuffled, and as they are stored where not.
    assert (list(first) == list(expected)) is not shuffle
    assert (list(samples(loader)) == list(first)) is not shuffle


def test_missing_latents_are_refused_with_their_number(folder, tmp_path, capsys):
    flags = ["--remote", str(folder), "--latents", "precomputed", "--num_workers", "0"]
    flags += ["--batch_size", "4", "--results_dir", str(tmp_path / "results")]
    assert data_main(flags) == 2
    message = capsys.readouterr().err
    assert "17 of the 49 samples" in message
    assert "--missing_latents" in message
    assert data_main([*flags, "--missing_latents", "leave_out"]) == 0
    (record,) = (tmp_path / "results").glob("*/record.json")
    content = json.loads(record.read_text())
    assert content["summary"]["num_dropped_samples"] == 17
    assert content["config"]["missing_latents"] == "leave_out"
    # Replaced, if somebody says so, as other samples that cannot be used.
    skip = {"on_bad_sample": "skip", "max_bad_fraction": 0.4, "shuffle": False}
    loader = data.build(make_config(folder, **skip))
    assert len(samples(loader)) == len([index for index in PRESENT if index < 48])
    assert loader.stats.num_bad_samples == 16


def test_verify_data_counts_and_convert_names_them(folder, tmp_path, capsys):
    for deep in ((), ("--deep",)):
        assert sdbench_main(["verify-data", str(folder), *deep]) == 0
        printed = capsys.readouterr().out
        assert "note: 17 of the 49 samples have no latents_512" in printed
        assert "latents_256" not in printed
    out = str(tmp_path / "out")
    convert = ["convert", str(folder), "--folder", out, "--latents", "precomputed"]
    assert sdbench_main(convert) == 1
    assert "sample 0, latents_512: no value" in capsys.readouterr().err
    assert sdbench_main([*convert, "--on_bad_sample", "skip", "--max_bad_fraction", "0.4"]) == 0
    assert "Wrote 32 samples" in capsys.readouterr().out
    loader = data.build(make_config(tmp_path / "out", shuffle=False))
    assert list(samples(loader)) == [make_latent(index, side=64).tobytes() for index in PRESENT]


def test_what_cannot_be_told_or_is_of_another_model(folder, tmp_path):
    leave_out = {"missing_latents": "leave_out"}
    with pytest.raises(RunError, match=r"sample 1: .*into shape \(77,768\)"):
        list(data.build(make_config(folder, text_embedding_dim=768, shuffle=False, **leave_out)))
    for place in ({"local": str(tmp_path / "cache")}, {"remote": None, "streams": f"{folder}=1"}):
        with refused("--missing_latents, --remote, --local or --streams"):
            data.check(make_config(folder, **place, **leave_out))
    with refused("--missing_latents", value="leave_out"):
        data.check(make_config(folder, latents="online", **leave_out))
    # Copied ahead of being read, a sample is found when its turn comes.
    with pytest.raises(RunError, match="latents_512: no value.*--on_bad_sample"):
        list(data.build(make_config(folder, local=str(tmp_path / "cache"))))
