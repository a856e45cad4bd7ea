"""python -m sdbench: commands, help and exit codes."""

from __future__ import annotations

import pytest

from sdbench.cli import main


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    for command in ("convert", "verify-data", "precompute", "publish", "examples:"):
        assert command in output


def test_an_unknown_command_exits_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["convrt"])
    assert caught.value.code == 2
    assert "convrt" in capsys.readouterr().err


def test_bad_input_of_a_command_exits_with_2(capsys, tmp_path):
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_publishing_what_is_no_run_exits_with_2(capsys, tmp_path):
    assert main(["publish", str(tmp_path)]) == 2
    assert "change it with RUN" in capsys.readouterr().err
