"""python -m sdbench: commands, help and exit codes."""

from __future__ import annotations

import pytest

from sdbench.cli import main
from tests.refusals import PLACE_FLAGS, printed_refusal


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    for command in ("convert", "verify-data", "precompute", "publish", "examples:"):
        assert command in output


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        (["convrt"], "convert"),
        (["render", "esk"], "eks"),
        (["scaling", "costs"], "cost"),
        (["report", "--result", "r"], "--results"),
        (["repeat", "2", "--timeout", "3", "--", "python"], "--timeout_s"),
        (["scaling", "plan", "--max_day", "3", "--recipe", "mosaicml"], "--max_days"),
    ],
)
def test_an_unknown_name_exits_with_2_and_the_nearest(capsys, argv, nearest):
    assert main(argv) == 2
    assert f"the nearest is {nearest};" in capsys.readouterr().err


def test_no_command_exits_with_2():
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("argv", "flag"), [(["convert", "none", "out"], PLACE_FLAGS), (["publish", "none"], "RUN")]
)
def test_bad_input_of_a_command_exits_with_2(capsys, argv, flag):
    assert main(argv) == 2
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == (flag, "none")
