"""Does a conversion keep every image and caption, or say which not?"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from streaming import StreamingDataset

from sdbench.errors import ConfigError, RunError
from sdbench.sources.convert import main

OPENMOJI = Path(__file__).parents[3] / "shared" / "data" / "openmoji.tar"


def read_back(folder: Path) -> list[dict]:
    dataset = StreamingDataset(local=str(folder), batch_size=1)
    return [dataset[i] for i in range(len(dataset))]


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))


def test_tars_in_braces_and_in_a_folder(tmp_path, png, capsys):
    images = [png(value) for value in (10, 20, 30)]
    write_tar(
        tmp_path / "00.tar",
        {"a.png": images[0], "a.txt": b"one\n", "b.png": images[1], "b.txt": "\u00e9".encode()},
    )
    write_tar(
        tmp_path / "01.tar",
        {"c.png": images[2], "c.json": json.dumps({"caption": "three"}).encode()},
    )
    for source, name in ((f"{tmp_path}/{{00..01}}.tar", "x"), (str(tmp_path), "y")):
        assert main([source, str(tmp_path / name)]) == 0
        rows = read_back(tmp_path / name)
        assert [row["caption"] for row in rows] == ["one", "\u00e9", "three"]
        assert [row["jpg"] for row in rows] == images
        assert {(row["width"], row["height"]) for row in rows} == {(60, 40)}
    assert "Wrote 3 pairs" in capsys.readouterr().out


def test_folder_with_text_files_and_with_a_table(tmp_path, png):
    folder = tmp_path / "photos"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.PNG").write_bytes(png(10))
    (folder / "a.txt").write_text("one")
    (folder / "sub" / "b.png").write_bytes(png(20))
    (folder / "sub" / "b.txt").write_text("two")
    main([str(folder), str(tmp_path / "x")])
    assert [row["caption"] for row in read_back(tmp_path / "x")] == ["one", "two"]
    (folder / "captions.csv").write_text('file,caption\nsub/b.png,"two, again"\n')
    main([str(folder), str(tmp_path / "y")])
    rows = read_back(tmp_path / "y")
    assert [(row["caption"], row["jpg"]) for row in rows] == [("two, again", png(20))]


def make_bad_tar(path: Path, png) -> None:
    good = png(10)
    write_tar(
        path,
        {
            "a.png": good,
            "a.txt": b"fine",
            "b.png": b"",
            "b.txt": b"empty",
            "c.png": good[:40],
            "c.txt": b"cut",
            "d.png": good,
            "e.txt": b"alone",
        },
    )


def test_bad_pairs_stop_the_conversion_and_leave_no_data_set(tmp_path, png):
    make_bad_tar(tmp_path / "bad.tar", png)
    with pytest.raises(RunError, match=r"bad.tar:b: the image has 0 bytes.*--skip_bad"):
        main([str(tmp_path / "bad.tar"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=r"left its shards: .*out.partial"):
        main([str(tmp_path / "bad.tar"), str(tmp_path / "out")])


def test_bad_pairs_are_left_out_by_name_on_request(tmp_path, png, capsys):
    make_bad_tar(tmp_path / "bad.tar", png)
    assert main([str(tmp_path / "bad.tar"), str(tmp_path / "out"), "--skip_bad"]) == 0
    assert [row["caption"] for row in read_back(tmp_path / "out")] == ["fine"]
    printed = capsys.readouterr().out
    assert "Wrote 1 pairs" in printed
    assert "4 bad ones left out" in printed
    for sentence in ("b: the image has 0", "c: the image cannot be", "d: no capt", "e: no image"):
        assert f"bad.tar:{sentence}" in printed


def test_max_images(tmp_path, png):
    write_tar(
        tmp_path / "0.tar",
        {f"{i}.{kind}": data for i in range(5) for kind, data in (("png", png(i)), ("txt", b"x"))},
    )
    main([str(tmp_path / "0.tar"), str(tmp_path / "out"), "--max_images", "2"])
    assert [row["jpg"] for row in read_back(tmp_path / "out")] == [png(0), png(1)]


def test_mistakes(tmp_path, png):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="The source holds no images"):
        main([str(tmp_path / "empty"), str(tmp_path / "out")])
    with pytest.raises(ConfigError, match=r"No such tar file: .*x\.tar"):
        main([str(tmp_path / "x.tar"), str(tmp_path / "out")])
    with pytest.raises(ConfigError, match="No such source"):
        main([str(tmp_path / "x"), str(tmp_path / "out")])
    with pytest.raises(ConfigError, match=r"got 0; allowed: 1 or more; .*--max_images"):
        main([str(tmp_path), str(tmp_path / "out"), "--max_images", "0"])
    write_tar(tmp_path / "0.tar", {"a.png": png(1), "a.txt": b"x"})
    with pytest.raises(ConfigError, match=r"The output exists: .*change it with OUT"):
        main([str(tmp_path / "0.tar"), str(tmp_path)])
    (tmp_path / "empty" / "captions.csv").write_text("path,text\n")
    with pytest.raises(ConfigError, match="lacks a column: got 'path, text'"):
        main([str(tmp_path / "empty"), str(tmp_path / "out")])


@pytest.mark.skipif(not OPENMOJI.is_file(), reason="needs the openmoji pairs")
def test_openmoji(tmp_path):
    main([str(OPENMOJI), str(tmp_path / "out")])
    rows = read_back(tmp_path / "out")
    assert len(rows) == 492
    assert rows[0]["caption"] == "yen banknote: bank"
