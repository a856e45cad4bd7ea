"""What tells a data set from others, where it cannot be told."""

from __future__ import annotations

from sdbench import data
from sdbench.data.identity import describe_data_or_warn
from sdbench.settings.config import parse_request


def describe(place, data_format):
    argv = ["--remote", str(place), "--data_format", data_format, "--image_size", "64"]
    return describe_data_or_warn(parse_request(argv, description="", epilog="").config)


def test_a_pattern_may_be_longer_than_a_file_name(tmp_path):
    numbers = [f"{number:05d}" for number in range(60)]
    for number in numbers:
        (tmp_path / f"{number}.tar").write_bytes(b"")
    described = describe(f"{tmp_path}/{{{','.join(numbers)}}}.tar", "webdataset")
    assert (described["num_files"], described["made_by"]) == (60, [None])


def test_a_file_that_has_gone_behind_a_run_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "list_files", lambda source: [str(tmp_path / "gone.png")])
    assert describe(tmp_path, "folder") is None
    assert "warning: the record has no hash of the data set: " in capsys.readouterr().err
