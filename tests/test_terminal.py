"""What a terminal shows otherwise than a pipe: colours, and no line wider than it is."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from tests.report.results_folder import make_record, write_run

COLUMNS = 80
QUICK = (
    *("--model_name", "tiny", "--use_synth_data", "--engine", "torch", "--batch_size", "1"),
    *("--warmup_batches", "0", "--measure_batches", "2", "--profile_batches", "0"),
)
RECIPE = ("--recipe", "mosaicml-all-512")


@pytest.fixture
def in_terminal(repository, tmp_path):
    """Runs a module of this repository in a terminal of its own; returns all that it prints."""

    def start(*argv, **variables):
        program = argv if argv[0] == "-c" else ("-m", *map(str, argv))
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        hidden = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
        environment = {name: os.environ[name] for name in os.environ if name not in hidden}
        process = subprocess.Popen(
            [sys.executable, *program],
            env={**environment, "TERM": "xterm", "PYTHONPATH": str(repository), **variables},
            cwd=tmp_path,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        printed = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the last process has closed the terminal
                break
            if not part:
                break
            printed += part
        os.close(ours)
        process.wait()
        return printed.decode().replace("\r\n", "\n")

    return start


def test_an_error_is_red_in_a_terminal_unless_colours_are_unwanted(in_terminal):
    assert in_terminal("benchmark", "--zebra").startswith("\x1b[31merror\x1b[0m: unknown flag")
    for unwanted in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        printed = in_terminal("benchmark", "--zebra", **unwanted)
        assert printed.startswith("error: unknown flag")


def test_verdicts_and_cautions_have_colours_in_a_terminal(in_terminal, tmp_path):
    for side, rates in (("old", (100.0, 101.0, 99.0)), ("new", (90.0, 91.0, 89.0))):
        for number, rate in enumerate(rates):
            record = make_record(
                run_id=f"20261121T00{number}000Z_x_{side}",
                started_utc=f"2026-11-21T00:{number}0:00+00:00",
                summary__images_per_second=rate,
            )
            write_run(tmp_path / side / record["run_id"], record)
    compare = ("sdbench", "compare")
    assert re.search(r"\x1b\[31mslower\x1b\[0m$", in_terminal(*compare, "old", "new"), re.MULTILINE)
    assert re.search(r"\x1b\[32mfaster\x1b\[0m$", in_terminal(*compare, "new", "old"), re.MULTILINE)
    told = (
        "from sdbench.base.output import protected_output as p\nwith p(): print('caution: drift')"
    )
    assert in_terminal("-c", told) == "\x1b[33mcaution\x1b[0m: drift\n"


def test_a_pipe_gets_no_colour(repository):
    command = [sys.executable, "benchmark.py", "--zebra"]
    piped = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert piped.stderr.startswith("error: unknown flag") and "\x1b" not in piped.stderr


@pytest.mark.slow
def test_prose_is_no_wider_than_the_terminal(in_terminal, repository):
    table = repository / "results" / "quoted" / "aws_p5_scaling.csv"
    for argv, end in (
        (("sdbench", "scaling", "cost", table, *RECIPE), "\n\n"),
        (("data", "--use_synth_data", "--image_size", 64, "--num_batches", 5), "\r"),
    ):
        prose, found, _ = in_terminal(*argv).partition(end)
        assert found and max(map(len, prose.splitlines())) <= COLUMNS
        # A line was too long, and goes on indented or below.
        assert len(prose.splitlines()) > 2


@pytest.mark.slow
def test_a_run_has_a_live_line_and_none_wider_than_the_terminal(in_terminal, tmp_path):
    printed = in_terminal("benchmark", *QUICK)
    # Drawn in the place of the one before; how many there are depends on the machine's speed.
    live = re.findall(r"\r([^\r\n]*\d/\d+ \[[^\r\n]*)", printed)
    assert live and "2/2 [" in live[-1]
    result, _, following = printed.partition("\n\nNext:\n")
    # Each command stays in one line, to be copied.
    assert following.startswith("  python -m sdbench repeat 5 -- python ")
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;]*m", "", result))
    # The name of a run is one word, whatever the machine's name.
    assert [line for line in lines if len(line) > COLUMNS and " " in line.strip()] == []
    (log,) = tmp_path.glob("runs/*/stdout.log")
    assert "\x1b" not in log.read_text() and "how sure" in log.read_text()
