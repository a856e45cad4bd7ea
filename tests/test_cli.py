"""python -m sdbench and the programs beside it: commands, flags, help, completion, exit codes."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import sdbench
from sdbench.cli import COMMANDS, main
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.feed import FeedSettings
from sdbench.settings.recipe import TrainConfig
from sdbench.settings.setting import declarations
from tests.refusals import PLACE_FLAGS, printed_refusal

PROGRAMS = ("benchmark.py", "train.py", "generate.py", "data.py")
PROGRAMS += ("calculate_number_of_parameters.py",)
# Those that take flags of their own: commands with their words, and programs.
STARTS = [
    *([name] for name in COMMANDS if name not in ("render", "scaling")),
    ["scaling", "cost"],
    ["render", "eks"],
    *([name] for name in PROGRAMS),
]


def start(words: Sequence[str], *argv: str) -> int:
    """Start a command or a program in this process."""
    if words and words[0] in PROGRAMS:
        return importlib.import_module(words[0].removesuffix(".py")).main(list(argv))
    return main([*words, *argv])


@pytest.fixture
def flags_of(capsys, monkeypatch) -> Callable[..., Mapping[str, tuple[str, frozenset[str]]]]:
    """What the help of a command says of each flag: what stands for its value, and its choices."""
    monkeypatch.setenv("COLUMNS", "10000")

    def read(words: Sequence[str]) -> dict[str, tuple[str, frozenset[str]]]:
        with pytest.raises(SystemExit) as ended:
            start(words, "--help_all")
        assert ended.value.code == 0
        found = {}
        # A long flag has its text on the next line.
        for line in re.sub(r"\n {20,}", "  ", capsys.readouterr().out).splitlines():
            if flag := re.match(r" {2}(--\w+)(?: ([^\s]+))?", line):
                choices = re.search(r"; ([\w.-]+(?: \| [\w.-]+)+)", line)
                listed = choices[1].split(" | ") if choices else ()
                found[flag[1]] = flag[2] or "", frozenset(listed)
        return found

    return read


@pytest.mark.parametrize("argv", [["--help"], [], ["render"], ["scaling"]])
def test_help_names_every_command_and_answers_a_line_without_one(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    output = capsys.readouterr()
    expected = {"render": ("eks", "rayjob"), "scaling": ("cost",)}
    for command in expected.get(argv[0] if argv else "", COMMANDS):
        assert re.search(rf"^ +{command}\b", output.out, re.MULTILINE)
    assert "examples:" in output.out
    assert output.err == ""


EVERY_DAY = {
    "benchmark": (14, {"--preset", "--model_name", "--batch_size", "--precision"}, BenchmarkConfig),
    "train": (18, {"--max_duration", "--resume", "--lr"}, TrainConfig),
    "data": (10, {"--remote", "--num_workers", "--emulate_step_seconds"}, FeedSettings),
    "generate": (18, {"--prompts", "--folder", "--seed"}, None),  # few enough to be listed
}


@pytest.mark.parametrize("program", EVERY_DAY)
def test_help_lists_the_flags_of_every_day_alone_and_help_all_every_flag(
    capsys, monkeypatch, flags_of, program
):
    monkeypatch.setenv("COLUMNS", "10000")
    number, among, of_many = EVERY_DAY[program]
    with pytest.raises(SystemExit) as ended:
        start([program], "--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    listed = set(re.findall(r"^  (--\w+)", text, re.MULTILINE))
    listed -= {"--version", "--help_all", "--config", "--print_config", "--json"}
    assert (len(listed), among <= listed) == (number, True), listed
    others = flags_of([program]).keys() - listed
    if of_many is None:
        assert "of every day" not in text and len(others) < 10
    else:
        total = len(declarations(of_many))
        assert f"These are the flags of every day; --help_all lists all {total}." in text
        assert len(others) > 40


@pytest.mark.parametrize("program", ["benchmark", "train"])
def test_a_dry_run_prints_the_settings_and_leaves_nothing(capsys, tmp_path, program):
    argv = ("--model_name", "tiny", "--use_synth_data", "--max_duration", "100ba")
    argv += ("--results_dir", str(tmp_path / "runs"), "--dry_run")
    assert start([program], *argv) == 0
    printed = capsys.readouterr().out
    assert "\nmodel_name: tiny  # flag\n" in printed
    assert start([program], *argv[:-1], "--print_config") == 0
    assert capsys.readouterr().out == printed
    assert list(tmp_path.iterdir()) == []


def test_every_program_tells_its_version(capsys):
    for words in ([], *STARTS):
        with pytest.raises(SystemExit) as caught:
            start(words, "--version")
        assert caught.value.code == 0
        assert capsys.readouterr().out == f"sdbench {sdbench.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "allowed"),
    [
        (["convrt"], "the nearest is convert"),
        (["--versoin"], "the nearest is --version"),
        (["render", "ekss"], "the nearest is eks"),
        (["scaling", "costs"], "the nearest is cost"),
        (["repeat", "2", "--agianst", "python", "--", "python"], "the nearest is --against"),
        (["compare", "a", "b", "--format", "jsn"], "the nearest is json"),
        (["convert", "a", "--folder", "b", "--out_format", "parket"], "the nearest is parquet"),
        (["export", "run", "folder", "model"], "the nearest is --folder"),
        (["verify-data", "a", "webdatset"], "the nearest is --data_format webdataset"),
        # Nothing is like these. Letters of the last are in longer names, between others.
        (["verify-data", "a", "b"], "what --help_all lists"),
        (["render", "nope"], "the names that --help lists"),
        (["shapes", "--out", "a"], "the names that --help_all lists"),
    ],
)
def test_an_unknown_name_exits_with_2_and_the_nearest(capsys, argv, allowed):
    assert main(argv) == 2
    told = printed_refusal(capsys.readouterr().err).allowed
    assert told == allowed or told.endswith(f", {allowed}")


@pytest.mark.parametrize("words", STARTS, ids=" ".join)
def test_every_command_suggests_the_flag_that_was_mistyped(capsys, flags_of, words):
    flags = [flag for flag in flags_of(words) if len(flag) > 6 and flag[4] != flag[5]]
    for flag in (min(flags, key=len), max(flags, key=len)):
        mistyped = f"{flag[:4]}{flag[5]}{flag[4]}{flag[6:]}"
        assert start(words, mistyped) == 2
        refusal = printed_refusal(capsys.readouterr().err)
        assert (refusal.flag, refusal.value) == (flag, mistyped)


@pytest.mark.slow
def test_help_fits_the_terminal_and_its_examples_have_flags_that_there_are(capsys, flags_of):
    num_flags = 0
    for words in ([], ["render"], ["scaling"], *STARTS):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setenv("COLUMNS", "80")
            start(words, "--help")
        text, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
        assert max(map(len, text.splitlines())) < 80
        examples = re.sub(r"'.*?'|\\\n", "", examples)
        # Behind -- is a command of its own, or flags of one that is not named.
        for part in re.split(r" -- |\n", examples):
            named = re.search(r"(?:-m sdbench ((?:render |scaling )?\S+)|(\w+\.py))\b(.*)", part)
            given = (
                set(re.findall(r" (--\w+)", named[3])) - {"--help", "--dry_run"} if named else set()
            )
            assert not given or given <= set(flags_of((named[1] or named[2]).split())), part
            num_flags += len(given)
    assert num_flags > 150


WRITERS = {
    *("convert", "shapes", "precompute", "export", "profile", "generate", "dreambooth"),
    *("repeat", "sweep", "publish", "report"),
}


def test_a_flag_means_one_thing_and_names_every_folder_that_is_written(flags_of):
    meanings: dict[str, dict[str, tuple[str, frozenset[str]]]] = {}
    for words in STARTS:
        flags = flags_of(words)
        if words[0] in WRITERS:
            assert "--folder" in flags
        for flag, meaning in flags.items():
            meanings.setdefault(flag, {})[" ".join(words)] = meaning
    writers = {words.split()[0].removesuffix(".py") for words in meanings["--folder"]}
    assert writers == WRITERS
    assert {metavar for metavar, _ in meanings["--out"].values()} == {"PATH"}  # files
    for flag, by_command in meanings.items():
        choices = {listed for _, listed in by_command.values()}
        # A command may have fewer of them. That of data.py alone has one engine, and lists none.
        widest = max(choices, key=len)
        assert all(listed <= widest for listed in choices), (flag, by_command)
        if flag != "--engine":
            assert not (frozenset() in choices and len(choices) > 1), (flag, by_command)


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["convert", "none", "--folder", "out"], "PLACE"),
        (["verify-data", "none"], "PLACE"),
        (["verify-data", "none", "--data_format", "parquet"], "PLACE"),
        (["precompute", "--remote", "none", "--folder", "out"], PLACE_FLAGS),
        (["publish", "none"], "RUN"),
    ],
)
def test_bad_input_of_a_command_exits_with_2_and_names_what_it_has(capsys, argv, flag):
    assert main(argv) == 2
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == (flag, "none")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("python -m sdbench verif", ["verify-data"]),
        ("python -m sdbench train --resu", ["--results_dir", "--resume"]),
        ("python -m sdbench convert --out_format we", ["webdataset"]),
        # Not one of every day.
        ("python benchmark.py --flush_de", ["--flush_denormals"]),
        ("python benchmark.py --use_synth_data --model_name sd2-", ["sd2-768-v", "sd2-base"]),
    ],
)
def test_a_shell_completes_commands_flags_and_values(repository, line, completed):
    import argcomplete

    function = Path(argcomplete.__file__).parent / "bash_completion.d" / "_python-argcomplete"
    words = line.split()
    script = (
        f"source {function}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        f"COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9; "
        '_python_argcomplete_global "${COMP_WORDS[0]}"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=repository,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == completed, done.stderr
