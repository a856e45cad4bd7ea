"""Files of others and impossible numbers: one sentence for each, at once, and the rest goes on."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
import time
from unittest.mock import ANY

import pytest

from benchmark import main as benchmark
from sdbench.cli import main
from sdbench.launch.child import LOCK_NAME
from sdbench.launch.sweep_file import read_sweep_file
from sdbench.report.figures import read_figures
from sdbench.settings.config import SETTINGS, parse_request
from tests.refusals import refusal_of, refused
from tests.report.results_folder import make_record, make_results, write_run

# Colours, the title of the window, a bell, C1, backspaces, and the direction of writing.
EVIL = "\x1b[31;1mred\x1b]0;title\x07\x9b2J\x08\x7f\u202eleft"
ACTING = {"\x1b", "\x07", "\x08", "\x7f", "\x9b", "\u202e"}
DEEP = "[" * 20_000 + "]" * 20_000
# Settings that take whole numbers.
NUMBERS = [
    name for name, one in SETTINGS.items() if one.kind.metavar == "N" and one.kind.parse(1) == 1
]
# Texts of a record and what they are replaced by.
BAD = {
    "deep": ('"notes": [', f'"notes": [{DEEP}, '),
    "deep-enough-to-parse": ('"notes": [', '"notes": [' + "[" * 200 + "]" * 200 + ", "),
    "key-twice": ('"status": "ok"', '"status": "ok", "status": "ok"'),
    "nan": ('"lr": 0.0001', '"lr": NaN'),
    "large": ('"lr": 0.0001', '"lr": 1e308'),
    "larger": ('"lr": 0.0001', f'"lr": {"9" * 5000}'),
    "half-a-character": ('"notes": [', r'"notes": ["\ud800", '),
    "wrong-type": ('"use_ema": ', '"use_ema": 1, "was": '),
    "elsewhere": ('"run_id": "', '"run_id": "../'),
    "acting-key": ("{", '{"\\u001b[2J\\u202e": 1, '),
}


def write_bad(folder, text):
    """Write a folder of a run with each bad record, and return their names."""
    contents = {name: text.replace(old, new, 1).encode() for name, (old, new) in BAD.items()}
    contents |= {
        "cut-off": text[: len(text) // 2].encode(),
        "empty": b"",
        "a-list": b"[1]",
        "long": text.encode() + b" " * 5_000_000,
        "no-utf-8": text.encode().replace(b'"ok"', b'"\xff"'),
    }
    for name, content in contents.items():
        (folder / name).mkdir(parents=True)
        assert content != text.encode(), name
        (folder / name / "record.json").write_bytes(content)
    (folder / "a-folder" / "record.json").mkdir(parents=True)
    (folder / "a-pipe").mkdir()
    os.mkfifo(folder / "a-pipe" / "record.json")
    return [*contents, "a-folder", "a-pipe"]


def left_out(text):
    """The lines that name files that are left out."""
    return [line for line in text.splitlines() if line.startswith("left out: ")]


def check_harmless(capsys):
    """The output so far, which must hold no characters that act on a terminal."""
    printed = capsys.readouterr()
    assert not ACTING & {*printed.out, *printed.err}
    return printed


@contextlib.contextmanager
def at_once():
    """Check that the block takes this process less than a second."""
    began_s = time.process_time()
    yield
    assert time.process_time() - began_s < 1


def write_rate(folder, rate, **changes):
    """Write a run of this rate in a folder of its own below another, and return that one."""
    number = f"{round(10 * rate):06d}"
    run_id = f"20261121T{number}Z_x_any-name"
    record = make_record(run_id=run_id, summary__images_per_second=rate, **changes)
    write_run(folder / number, record)
    return folder


def write_pair(folder, **changes):
    """Records of 100 and 110 images/s in the folders a and b that differ in a setting."""
    name = changes["machine__device_name"]
    changes["origin__attention"] = "flag"
    sides = {"a": 100.0, "b": 110.0}
    for side, rate in sides.items():
        write_rate(folder / side, rate, config__attention=name + side, **changes)
    return [str(folder / side) for side in sides]


def test_report_names_bad_files_and_makes_the_rest(tmp_path, capsys):
    of_another_version = make_record(origin__of_another_version="flag")
    runs = [make_record(), of_another_version, *(make_record(config__lr=lr) for lr in (1, 2))]
    results = make_results(tmp_path / "results", *runs, quoted=False)
    names = write_bad(results / "runs", json.dumps(make_record()))
    (results / "quoted").mkdir()
    (results / "quoted" / "bad.csv").write_text("source,images_per_second\na,1e308\n")
    os.mkfifo(results / "quoted" / "pipe.csv")
    (results / "quoted" / "long.csv").touch()
    os.truncate(results / "quoted" / "long.csv", 2**31)  # of holes
    (results / "quoted" / "good.csv").write_text("source,days\na,3\n")
    steps = {"0001": "index,phase\n1,\x1b[2J\n", "0002": "", "0003": "index,phase,step_time_s\n"}
    for run, content in steps.items():
        (next((results / "runs").glob(f"{run}*")) / "steps.csv").write_text(content)
    assert main(["report", "--folder", str(results)]) == 1
    printed = check_harmless(capsys)
    told = left_out(printed.err)
    places = [*(f"/{name}/record.json" for name in names), *(f"runs/{run}" for run in steps)]
    places += ["bad.csv", "pipe.csv", "long.csv"]
    assert len(told) == len(places)
    for place in places:
        assert [line for line in told if place in line], place
    assert "from 4 runs and 0 figures of others" in printed.out
    assert f"left out, as they cannot be read: {len(places)} files" in printed.out
    with (results / "throughput.csv").open(newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["ok"] * 4


def test_compare_names_bad_records_and_compares_the_rest(tmp_path, capsys):
    for rate in (100.0, 101.0):
        write_rate(tmp_path / "a", rate)
        write_rate(tmp_path / "b", rate + 10)
    names = write_bad(tmp_path / "b" / "bad", json.dumps(make_record()))
    sides = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", *sides]) == 0
    printed = check_harmless(capsys)
    assert len(left_out(printed.err)) == len(names)
    assert f"{len(names)} x record that cannot be read" in " ".join(printed.out.split())
    assert "1.10" in printed.out
    # What is not known might be slower.
    assert main(["compare", *sides, "--fail_if_slower", "50%"]) == 1
    assert f"not judged: {len(names)} x record that cannot be read" in capsys.readouterr().err
    assert main(["compare", sides[0], str(tmp_path / "b" / "bad")]) == 2
    assert f"({len(names)} x record that cannot be read)" in check_harmless(capsys).err


def test_publish_names_bad_runs_and_publishes_the_rest(tmp_path, capsys):
    results = make_results(tmp_path / "results", make_record(), quoted=False)
    runs = write_rate(tmp_path / "runs", 100.0)
    for rate in (101.0, 102.0):
        write_rate(runs, rate)
    record = runs / "001010" / "record.json"
    record.write_text(record.read_text().replace(": 101.0", ": 1e300"))
    (runs / "001020" / "stdout.log").unlink()
    assert main(["publish", *map(str, sorted(runs.iterdir())), "--folder", str(results)]) == 1
    printed = check_harmless(capsys)
    told = left_out(printed.err)
    bad = ["001010", "001020"]
    assert [name for name in bad for line in told if f"/{name}" in line] == bad
    lines = [line for line in printed.out.splitlines() if "published" in line]
    assert [line.rpartition("/")[2] for line in lines] == ["20261121T001000Z_x_any-name"]
    assert (results / "runs" / "20261121T001000Z_x_any-name" / "record.json").is_file()


def test_a_record_cannot_be_published_to_another_place(tmp_path):
    results = make_results(tmp_path / "results", quoted=False)
    for kind in ({}, {"kind": "train"}):
        write = tmp_path / "run" / "record.json"
        write.parent.mkdir(exist_ok=True)
        write.write_text(json.dumps({**make_record(), **kind, "run_id": "../../elsewhere"}))
        assert refusal_of("publish", write.parent, "--folder", results).flag == "RUN"
    assert not list(tmp_path.glob("**/elsewhere"))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_record_or_a_table_holds_never_acts_on_a_terminal(
    tmp_path, monkeypatch, capsys, is_terminal
):
    names = {"machine__device_name": EVIL, "workload__architecture": EVIL, "notes": [EVIL]}
    sides = write_pair(tmp_path, **names)
    table = tmp_path / "table.csv"
    columns = "source,gpu,num_gpus,image_size,latents,micro_batch,global_batch,images_per_second"
    rows = [f"s,{EVIL}{rate},8,512,online,4,{256 * rate},{rate}.5" for rate in (1, 2)]
    table.write_text("\n".join([columns, *rows]))
    cost = ["scaling", "cost", "--recipe", "mosaicml-all-512"]
    commands = [
        *(["compare", *sides, "--format", f"{form}"]
          for form in ("terminal", "markdown", "json", *["csv"] * is_terminal)),
        ["compare", *sides, "--where", "attention=none"],
        ["compare", str(table), "--between", "gpu"],
        ["compare", str(table), "--between", EVIL],
        [*cost, str(table)],
        [*cost, str(table), "--where", f"gpu={EVIL}1"],
        ["publish", str(tmp_path / EVIL)],
    ]  # fmt: skip
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    for command in commands:
        assert main(command) in (0, 1, 2)
        printed = check_harmless(capsys)
        assert printed.out or printed.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("repeats: 1000000000\nlist: [{seed: 1}]", "a whole number from 1 to 1000"),
        ("repeats: 1.5\nlist: [{seed: 1}]", "a whole number from 1 to 1000"),
        ("grid: {" + ", ".join(f"key_{n}: [1, 2]" for n in range(30)) + "}", "unknown setting"),
        (
            "grid: {" + ", ".join(f"{name}: [1, 2]" for name in NUMBERS) + "}",
            f"got '{2 ** len(NUMBERS)} cells x 1'; allowed: at most 100,000 runs",
        ),
        ("list: [{seed: 1}]\nlist: [{seed: 2}]", "line 2: the key 'list' is there twice"),
        ("base: " + DEEP[19_960:20_040] + "\nlist: [{seed: 1}]", "nested more than 32 levels deep"),
        ("base: " + DEEP + "\nlist: [{seed: 1}]", "nest"),  # PyYAML's own limit
        ("list: [{lr: 1.0e+308}]", "$.list[0].lr: 1e+308 is no finite number"),
        ("list: [{lr: 1e308}]", "at most 3e+38"),
        ("list: [{encoder_batch_size: 99999999999999999999999}]", "at most 2,147,483,647"),
        ("list: [{seed: 1}]\ntimeout_s: 1e+30", "a number of seconds above 0"),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_be_is_refused_at_once(tmp_path, capsys, content, said):
    file = tmp_path / "my.yaml"
    (tmp_path / "benchmark.py").touch()
    file.write_text("list: [{seed: 1}]")
    assert main(["sweep", str(file), "--dry_run"]) == 0  # imports what is needed
    file.write_text(content)
    with at_once():
        assert main(["sweep", str(file), "--dry_run", "--folder", str(tmp_path / "s")]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1 and len(error) < 1000


def test_a_number_of_repeats_may_stand_in_quotes(tmp_path, capsys):
    file = tmp_path / "my.yaml"
    file.write_text('repeats: "3"\nlauncher: python\nscript: my.yaml\nlist: [{seed: 1}]\n')
    assert main(["sweep", str(file), "--dry_run"]) == 0
    assert "1 command x 3 in" in capsys.readouterr().out


def plan_time_s(tmp_path, *, num_cells):
    """Seconds of this process for the plan of a sweep."""
    file, folder = tmp_path / "my.yaml", tmp_path / "sweep"
    grid = {"seed": list(range(num_cells // 4)), "lr": [1e-4, 1e-3], "use_ema": [True, False]}
    content = {"launcher": "python", "script": str(file), "grid": grid}
    file.write_text(json.dumps(content))
    began_s = time.process_time()
    assert main(["sweep", str(file), "--dry_run", "--folder", str(folder)]) == 0
    return time.process_time() - began_s


@pytest.mark.slow
def test_planning_is_linear_in_the_number_of_cells(tmp_path, capsys):
    plan_time_s(tmp_path, num_cells=4)
    few_s = min(plan_time_s(tmp_path, num_cells=250) for _ in range(2))
    many_s = plan_time_s(tmp_path, num_cells=2_000)
    assert "2000 commands x 1" in capsys.readouterr().out
    print(f"250 cells: {few_s:.2f} s; 2,000 cells: {many_s:.2f} s")
    assert many_s < 14 * few_s  # 8 times as many; each with each other would be 64 times the work


@pytest.mark.parametrize("content", ["{", "[]", '{"status": "ok"}', f'{{"status": {DEEP}}}'])
def test_a_broken_file_of_a_sweep_is_named(tmp_path, content):
    file, folder = tmp_path / "my.yaml", tmp_path / "sweep"
    file.write_text("list: [{seed: 1}]\nlauncher: python\nscript: my.yaml\n")
    (folder / "x-1").mkdir(parents=True)
    (folder / LOCK_NAME).touch()  # a sweep has been at work here
    assert main(["sweep", str(file), "--folder", str(folder), "--dry_run"]) == 0
    (cell,) = read_sweep_file(file).cells
    state = folder / f"{cell.key}-1" / "outcome.json"
    state.parent.mkdir()
    state.write_text(content)
    error = refusal_of("sweep", file, "--folder", folder)
    assert (error.value, error.flag) == (str(state), "--folder")


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--encoder_batch_size", "99999999999999999999999"], "--encoder_batch_size"),
        (["--num_workers", "2147483648"], "--num_workers"),
        (["--seed", "9" * 5000], "--seed"),
        (["--lr", "1e308"], "--lr"),
        (["--lr", "1e-308"], "--lr"),
        (["--dist_timeout", "1e300"], "--dist_timeout"),
        (["--max_duration", "99999999999999999999999ba"], "--max_duration"),
        (["--filters", f"{{a: {DEEP}}}"], "--filters"),
        (["--filters", "{a: 1, a: 2}"], "--filters"),
        (["encoder_batch_size=99999999999999999999999"], "--encoder_batch_size"),
        ([f"filters={DEEP}"], "--config"),
        (["filters.a={b: 1, b: 2}"], "--config"),
        ([f"{'a.' * 20_000}b=1"], "--config"),
        (["a=" + "${" * 5_000 + "b" + "}" * 5_000], "--config"),
        (["remote=${local}", "local=${remote}"], "--config"),
    ],
)
def test_an_impossible_value_of_a_flag_is_refused_at_once(capsys, argv, flag):
    parse_request(["lr=1"], description="", epilog="")  # imports what is needed
    with at_once():
        assert benchmark(argv) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and len(error) < 1500
    assert f"change it with {flag}" in error


@pytest.mark.parametrize(
    "content",
    [
        "a: " + DEEP,
        "lr: 1\nlr: 2",
        "a: &a [*a]",
        "x: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]\n"
        + "\n".join(f"x{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)),
        "lr: .inf",
        "lr: !!float x",
        "5",
        "lr: 0x_",
        "a: " + "${" * 5_000,
        "a: ${b}\nb: ${a}",
        "? {a: 1}\n: 2",
        "\x00",
        "a: '\x1b[2J'\n",
        "x" * 5_000_000,
    ],
)
def test_an_impossible_config_file_is_refused_at_once(tmp_path, content):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1")
    parse_request(["--config", str(file)], description="", epilog="")
    file.write_text(content)
    with at_once(), refused(ANY) as caught:
        parse_request(["--config", str(file)], description="", epilog="")
    assert not ACTING & {*str(caught.value)} and len(str(caught.value)) < 2000


@pytest.mark.parametrize("cell", ["1e308", "1e-300", "1e999"])
@pytest.mark.parametrize("column", ["images_per_second", "num_gpus", "days", "run_time_s"])
def test_an_impossible_number_in_a_table_is_refused(tmp_path, cell, column):
    (tmp_path / "table.csv").write_text(f"source,{column}\na,{cell}\n")
    with refused("the path given", value=str(tmp_path / "table.csv")) as caught:
        read_figures(tmp_path / "table.csv")
    assert f"'{cell}' as {column}" in caught.value.what and "in row 1" in caught.value.what


def test_output_that_the_terminal_cannot_encode_ends_nothing(tmp_path, monkeypatch, capsys):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    sides = write_pair(tmp_path, machine__device_name="caf\u00e9", notes=[])
    assert main(["compare", *sides, "--all"]) == 0
    sys.stdout.flush()
    assert rb"caf\xe9" in raw.getvalue()
