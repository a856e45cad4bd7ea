"""Does a conversion keep every image and caption, or say which not, however it is interrupted?"""

from __future__ import annotations

import pytest

from sdbench.base.errors import RunError
from sdbench.data.convert.convert import choose_samples_per_shard
from sdbench.data.convert.convert import main as convert
from tests.data import datasets
from tests.data.datasets import read_files, read_mds
from tests.refusals import refused


def main(source: object, folder: object, *flags: object) -> int:
    """Convert in this process, unless told otherwise."""
    return convert(["--num_workers", "0", *map(str, (source, "--folder", folder, *flags))])


def test_there_and_back_through_all_formats(tmp_path, mds_folder):
    before = mds_folder
    for data_format in ("webdataset", "parquet", "folder", "mds"):
        after = tmp_path / data_format
        assert main(before, after, "--out_format", data_format, "--samples_per_shard", 20) == 0
        before = after
    rows = read_mds(tmp_path / "mds")
    original = read_mds(mds_folder)
    assert len(rows) == datasets.NUM_SAMPLES
    assert [row["jpg"] for row in rows] == [row["jpg"] for row in original]
    assert [row["caption"] for row in rows] == [row["caption"] for row in original]
    assert {(row["width"], row["height"]) for row in rows} == {(60, 40)}
    assert len(list((tmp_path / "mds").glob("*.mds"))) == 3


def test_latents_there_and_back(tmp_path, capsys):
    datasets.write_mds_latents(tmp_path / "latents")
    flags = ("--latents", "precomputed", "--text_embedding_dim", 8)
    assert main(tmp_path / "latents", tmp_path / "parquet", "--out_format", "parquet", *flags) == 0
    assert "latents caption are not taken over" in capsys.readouterr().out
    assert main(tmp_path / "parquet", tmp_path / "mds", *flags) == 0
    rows = read_mds(tmp_path / "mds")
    assert len(rows) == datasets.NUM_SAMPLES
    for index, row in enumerate(rows):
        arrays = datasets.make_arrays(index)
        assert (row["latent_moments_32"] == arrays["moments"]).all()
        assert (row["text_embedding"] == arrays["text_embedding"]).all()
    datasets.write_parquet_latents(tmp_path / "of others")
    assert main(tmp_path / "of others", tmp_path / "ours", *flags) == 0
    rows = read_mds(tmp_path / "ours")
    assert set(rows[0]) == {"latents_32", "text_embedding"}
    assert rows[7]["latents_32"].dtype == "float16"
    assert (rows[7]["latents_32"] == datasets.make_arrays(7)["latent"]).all()


def test_tars_in_braces_with_a_filter_and_a_limit(tmp_path, capsys):
    datasets.write_tars(tmp_path / "tars")
    source = f"{tmp_path}/tars/{{00000..00001}}.tar"
    flags = ("--filters", '{original_width: ">=100"}', "--max_samples", 3)
    assert main(source, tmp_path / "out", *flags) == 0
    captions = [row["caption"] for row in read_mds(tmp_path / "out")]
    assert captions == ["picture 10", "picture 11", "picture 12"]
    assert "Left out by --filters: 10 samples." in capsys.readouterr().out


@pytest.fixture
def bad_folder(tmp_path):
    """Number 0 is good, then 0 bytes, a cut image, no caption, no image; 5 to 9 are good."""
    folder = tmp_path / "photos"
    folder.mkdir()
    lines = ["file,caption"]
    for number in range(10):
        (folder / f"{number}.png").write_bytes(datasets.make_png(number))
        lines.append(f"{number}.png" + (f",picture {number}" if number != 3 else ""))
    (folder / "1.png").write_bytes(b"")
    (folder / "2.png").write_bytes(datasets.make_png(2)[:60])
    (folder / "4.png").unlink()
    (folder / "captions.csv").write_text("\n".join(lines))
    return folder


BAD = ("1.png: the image has 0 bytes", "2.png: the image cannot", "3.png: no c", "4.png: no i")


def test_a_bad_sample_stops_and_the_same_command_goes_on_without_it(tmp_path, bad_folder, capsys):
    job = (bad_folder, tmp_path / "out", "--samples_per_shard", 1)
    with pytest.raises(RunError, match=r"photos/1.png: the image has 0 bytes.*--on_bad_sample"):
        main(*job)
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match=r"1 of 10 samples are bad, more than the 5.00% of .*1.png"):
        main(*job, "--on_bad_sample", "skip", "--max_bad_fraction", 0.05)
    assert "resuming: 1 of 10 shards are there" in capsys.readouterr().out
    assert main(*job, "--on_bad_sample", "skip", "--max_bad_fraction", 0.4) == 0
    captions = [row["caption"] for row in read_mds(tmp_path / "out")]
    assert captions == [f"picture {number}" for number in (0, 5, 6, 7, 8, 9)]
    printed = capsys.readouterr().out
    assert "resuming: 2 of 10 shards are there" in printed
    assert "Wrote 6 of the 10 samples of" in printed and "; 4 bad ones are left out." in printed
    assert all(sentence in printed for sentence in BAD)
    with refused("--folder", value=str(tmp_path / "out")):
        main(*job)


def test_ctrl_c_and_on(tmp_path, mds_folder, monkeypatch, capsys):
    main(mds_folder, tmp_path / "undisturbed", "--samples_per_shard", 10)

    from sdbench.data.batches import transforms

    measure, calls = transforms.measure_image, []

    def interrupt(data, **options):
        calls.append(data)
        if len(calls) == 25:
            raise KeyboardInterrupt
        return measure(data, **options)

    monkeypatch.setattr(transforms, "measure_image", interrupt)
    job = (mds_folder, tmp_path / "out", "--samples_per_shard", 10)
    assert main(*job) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert main(*job) == 0
    assert "resuming: 2 of 5 shards are there" in capsys.readouterr().out
    assert len(calls) == 25 + 29
    assert read_files(tmp_path / "out") == read_files(tmp_path / "undisturbed")


def test_shards_are_neither_tiny_nor_huge():
    assert [choose_samples_per_shard(num) for num in (1, 492, 3_200, 10**7)] == [32, 32, 200, 512]


def test_mistakes(tmp_path, mds_folder):
    out = tmp_path / "out"
    with refused("--out_format", value="folder", allowed="mds, parquet or webdataset"):
        main(mds_folder, out, "--out_format", "folder", "--latents", "precomputed")
    with refused("PLACE", value="columns caption, jpg"):
        main(mds_folder, out, "--latents", "precomputed")
    assert not out.exists()
