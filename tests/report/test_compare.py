"""Two sets of figures set against each other, through `python -m sdbench compare`."""

from __future__ import annotations

import copy
import csv
import io
import itertools
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
from scipy import stats

from sdbench.base.errors import ConfigError
from sdbench.cli import main
from sdbench.report.compare import EPILOG
from tests.refusals import refusal_of

HOSTILE = "=cmd|' /C calc'!A0\n<script>alert(1)</script> \u4e2d\u6587 \x1b[2J"


@pytest.fixture(scope="module")
def a_record(repository):
    """A committed record of a run on two cores."""
    folder = next((repository / "results" / "runs").glob("*_sd2-base-256px-fast"))
    return json.loads((folder / "record.json").read_text())


RUN_NUMBERS = itertools.count()


def at_minute(minute: int) -> str:
    return f"2026-11-{21 + minute // 1440}T{minute // 60 % 24:02}:{minute % 60:02}:00+00:00"


def write_runs(
    folder,
    a_record,
    *rates,
    status="ok",
    flags=(),
    versions=None,
    minutes=None,
    facts=None,
    **config,
):
    """One record per rate, at different depths below the folder.

    The first runs of two sides began at the same time, and so on: they take turns.
    """
    minutes = minutes or [5 * index for index in range(len(rates))]
    for index, (rate, minute) in enumerate(zip(rates, minutes, strict=True)):
        record = copy.deepcopy(a_record)
        record["started_utc"] = at_minute(minute)
        for part, values in (facts or {}).items():
            record[part] |= values
        record["config"].update(config)
        record["versions"].update(versions or {})
        record["run_id"] = f"20261121T{next(RUN_NUMBERS):06d}Z_x_any-name"
        if status == "ok":
            record["summary"] |= {"images_per_second": rate, "flags": list(flags)}
        else:
            record |= {"status": status, "reason": "it did not end well", "summary": None}
        name = "-".join(f"{value}" for value in config.values() if isinstance(value, str | int))
        run = folder / ("deep/" * index) / f"run-{status}-{name}-{index}"
        run.mkdir(parents=True)
        (run / "record.json").write_text(json.dumps(record))
    return folder


def write_table(path, *rows):
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def compare(capsys, *arguments) -> str:
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def words(text: str) -> str:
    """A text without its line breaks, which depend on the width."""
    return " ".join(text.split())


def compare_as_json(capsys, *arguments) -> dict:
    return json.loads(compare(capsys, *arguments, "--format", "json"))


def refusal(*arguments) -> ConfigError:
    return refusal_of("compare", *arguments)


# The seed's table of P4de against P5.


def test_the_ratios_of_the_seeds_table(capsys, repository):
    # 189.28/142.69 = 1.32651, 289.19/173.89 = 1.66306, 329.55/185.18 = 1.77962,
    # 353.81/192.85 = 1.83464, 358.68/197.47 = 1.81638, 361.15/197.90 = 1.82491,
    # 385.31/204.22 = 1.88674. The seed prints 1.32, 1.66, 1.78, 1.83, 1.82, 1.83, 1.89: the first
    # and the sixth do not follow from its own figures by any rounding, and are 0.01 beside them.
    table = repository / "results" / "quoted" / "aws_p4de_p5_single_node.csv"
    found = compare_as_json(capsys, table, "--between", "gpu")
    rows = [row for row in found["rows"] if row["row"] == "matched"]
    assert [(row["micro_batch"], row["ema"], round(row["ratio"], 5)) for row in rows] == [
        (4, True, 1.32651),
        (8, True, 1.66306),
        (12, True, 1.77962),
        (16, True, 1.83464),
        (20, True, 1.81638),
        (20, False, 1.82491),
        (32, True, 1.88674),
    ]
    printed = (1.32, 1.66, 1.78, 1.83, 1.82, 1.83, 1.89)
    for row, ratio in zip(rows, printed, strict=True):
        assert row["ratio"] == pytest.approx(ratio, abs=0.0066)
    assert [row["verdict"] for row in rows] == ["not tested"] * 7

    text = compare(capsys, table, "--between", "gpu", "--candidate", "H100", "--baseline", "a100")
    assert [line.split()[5] for line in text.splitlines() if line.endswith("x  not tested")] == [
        "1.33x",
        "1.66x",
        "1.78x",
        "1.83x",
        "1.82x",
        "1.82x",
        "1.89x",
    ]
    # exp of the mean of the logs of the seven ratios above.
    mean = math.exp(math.fsum(math.log(row["ratio"]) for row in rows) / 7)
    assert found["rows"][-1]["ratio"] == pytest.approx(mean)
    assert f"geometric mean of 7: {mean:.2f}x, not tested" in text


# Runs.


def test_runs_of_one_configuration_are_replicates(capsys, tmp_path, a_record):
    before = write_runs(tmp_path / "a", a_record, 100.0, 101.0, 99.0)
    after = write_runs(tmp_path / "b", a_record, 110.0, 111.0, 109.0, precision="amp_bf16", lr=2e-4)
    found = compare_as_json(capsys, before, after)
    row, mean = found["rows"]
    assert (row["num_baseline_runs"], row["num_candidate_runs"]) == (3, 3)
    # Geometric means 99.996667 and 109.996970: 1.1000064. The logs differ by 0.0953160; their
    # standard deviations are 0.0100004 and 0.0090912, so the difference has the standard error
    # 0.0078029 on 3.9642 degrees of freedom (Welch), and t(0.975) = 2.786361: half-width 0.0217418.
    assert row["ratio"] == pytest.approx(1.1000064, rel=1e-6)
    assert row["ratio_low"] == pytest.approx(math.exp(0.0953160 - 0.0217418), rel=1e-6)
    assert row["ratio_high"] == pytest.approx(math.exp(0.0953160 + 0.0217418), rel=1e-6)
    assert row["verdict"] == mean["verdict"] == "faster"
    assert found["compared"] == {"lr": ["0.0001", "0.0002"]}


def test_what_differs_between_two_folders_is_found_and_said(capsys, tmp_path, a_record):
    before = write_runs(tmp_path / "a", a_record, 100.0, optimizer="adamw", num_workers=0)
    after = write_runs(
        tmp_path / "b", a_record, 50.0, num_workers=8, versions={"torch": "2.8.0"}, seed=3
    )
    text = compare(capsys, before, after)
    assert "compared: optimizer: adamw -> adamw_fused" in text
    assert "compared: num_workers: 0 -> 8" in text
    assert "version of torch 2.7.0 -> 2.8.0" in words(text)
    assert "seed" not in text
    assert "0.50x  not tested" in text


def test_a_sweep_is_matched_row_by_row_and_the_rest_is_listed(capsys, tmp_path, a_record):
    for side, factor, batches in (("a", 1.0, (4, 8, 16)), ("b", 1.5, (8, 16, 32))):
        for batch in batches:
            write_runs(
                tmp_path / side,
                a_record,
                *(factor * batch * noise for noise in (1, 1.01, 0.99)),
                device_train_microbatch_size=batch,
                compile=side == "b",
            )
    found = compare_as_json(capsys, tmp_path / "a", tmp_path / "b")
    rows = {(row["row"], row.get("micro_batch")): row for row in found["rows"]}
    assert list(rows) == [
        ("matched", 16),
        ("matched", 8),
        ("only in the baseline", 4),
        ("only in the candidate", 32),
        ("geometric mean", None),
    ]
    assert rows["matched", 8]["ratio"] == pytest.approx(1.5)
    assert rows["geometric mean", None]["ratio"] == pytest.approx(1.5)
    mean, row = rows["geometric mean", None], rows["matched", 8]
    # Twice the data: the interval of the mean is narrower.
    assert mean["ratio_high"] - mean["ratio_low"] < row["ratio_high"] - row["ratio_low"]
    text = compare(capsys, tmp_path / "a", tmp_path / "b")
    assert "Not compared: 1 only in the baseline, 1 only in the candidate; --all lists" in text
    assert "corrected for 2 tests (Holm)" in text
    text = compare(capsys, tmp_path / "a", tmp_path / "b", "--all")
    assert "Not compared" not in text
    for title, batch in (("1 only in the baseline", "4"), ("1 only in the candidate", "32")):
        heading, row = text.partition(title)[2].split("\n")[2:4]
        assert heading.split()[0] == "micro_batch"
        assert row.split()[:2] == [batch, "3"]


def test_failed_runs_are_left_out_and_counted_and_flags_are_shown(capsys, tmp_path, a_record):
    before = write_runs(tmp_path / "a", a_record, 100.0, flags=["drift", "throttled"])
    write_runs(before, a_record, 1.0, 2.0, status="oom")
    after = write_runs(tmp_path / "b", a_record, 100.0)
    text = compare(capsys, before, after)
    assert f"Left out of {before}: 2 x oom." in words(text)
    assert "drift, throttled" in text
    assert "no setting differs, only the runs" in text


def test_published_runs_of_two_presets(capsys, repository, tmp_path):
    # Three runs of each, as published on 2026-11-21.
    runs = sorted((repository / "results" / "runs").glob("20261121T0[56]*_sd2-base-256px-*"))
    for run in runs:
        shutil.copytree(run, tmp_path / run.name)
    sides = (tmp_path, "--between", "preset", "--baseline", "seed", "--candidate", "fast")
    assert "--allow precision" in refusal(*sides).flag
    text = compare(capsys, *sides, "--allow", "precision")
    assert "compared: precision: fp32 -> amp_bf16" in text
    assert [line.split()[:4] for line in text.splitlines() if "faster" in line] == [
        ["3", "0.12314", "0.47046", "3.82x"]
    ]


def test_a_record_of_something_else_is_counted_and_not_compared(
    capsys, repository, tmp_path, a_record
):
    before = write_runs(tmp_path / "a", a_record, 1.0)
    after = write_runs(tmp_path / "b", a_record, 1.0)
    feed = next((repository / "results" / "runs").glob("*_feed-mds-512px"))
    shutil.copytree(feed, before / feed.name)
    text = compare(capsys, before, after)
    assert f"Left out of {before}: 1 x feed, which is no training." in words(text)


# What is refused.


def rows_of(**columns):
    return [{"num_gpus": gpus, "images_per_second": 10 * gpus, **columns} for gpus in (8, 16)]


@pytest.mark.parametrize(
    ("setting", "ours", "theirs"),
    [
        ("latents", "online", "precomputed"),
        ("latents", "online", "moments"),
        ("image_size", 256, 512),
        ("precision", "amp_fp16", "amp_bf16"),
        ("model", "sd1-base", "sd2-base"),
    ],
)
def test_different_work_is_not_compared_unless_allowed(capsys, tmp_path, setting, ours, theirs):
    a = write_table(tmp_path / "a.csv", *rows_of(**{setting: ours}))
    b = write_table(tmp_path / "b.csv", *rows_of(**{setting: theirs}))
    error = refusal(a, b)
    assert error.value == f"{ours} and {theirs}"
    assert f"--allow {setting}" in error.flag
    assert f"compared: {setting}: {ours} -> {theirs}" in compare(capsys, a, b, "--allow", setting)


@pytest.mark.parametrize("column", ["latents", "image_size"])
def test_work_that_one_side_does_not_tell_is_not_compared_unless_allowed(capsys, tmp_path, column):
    told = {"gpu": "A", "latents": "online", "image_size": 512, "images_per_second": 10}
    write_table(tmp_path / "a.csv", told)
    silent = {name: value for name, value in told.items() if name != column}
    write_table(tmp_path / "b.csv", silent)
    paths = (str(tmp_path / "a.csv"), str(tmp_path / "b.csv"))
    error = refusal(*paths)
    assert (error.value, error.flag) == (paths[1], f"--allow {column}")
    assert "1.00x" in compare(capsys, *paths, "--allow", column)


def test_several_kinds_of_different_work_are_not_compared_either(capsys, tmp_path):
    a = write_table(tmp_path / "a.csv", *rows_of(latents="online"))
    b = write_table(
        tmp_path / "b.csv", *rows_of(latents="moments"), *rows_of(latents="precomputed")
    )
    error = refusal(a, b)
    assert error.value == "online and moments, precomputed"
    assert "--allow latents" in error.flag


def test_rows_that_do_not_meet_are_refused_with_the_setting_that_keeps_them_apart(capsys, tmp_path):
    a = write_table(tmp_path / "a.csv", *rows_of(micro_batch=4), *rows_of(micro_batch=8))
    b = write_table(tmp_path / "b.csv", *rows_of(micro_batch=16))
    error = refusal(a, b)
    assert (error.value, error.flag) == ("micro_batch: 4, 8 and 16", "--between micro_batch")
    # And dropping it would take rows of two micro-batches for runs of one configuration.
    error = refusal(a, b, "--between", "micro_batch")
    assert (error.value, error.flag) == ("4 and 8", "--where micro_batch=...")


def test_replicates_need_one_source_unless_measured(capsys, tmp_path):
    rows = [{**row, "source": source} for source in "xy" for row in rows_of()]
    a, b = write_table(tmp_path / "a.csv", *rows), write_table(tmp_path / "b.csv", *rows_of())
    assert refusal(a, b).value == "x and y"
    measured = write_table(tmp_path / "c.csv", *({**row, "kind": "measured"} for row in rows))
    assert "2 and 1" in compare(capsys, measured, b)


SCALING = "results/quoted/aws_p5_scaling.csv"
MLPERF = "results/quoted/mlperf_training_sd2.csv"
MILABENCH = "results/quoted/milabench_diffusion.csv"


@pytest.mark.parametrize(
    ("arguments", "flag", "value"),
    [
        ([SCALING], "--between", "no --between"),
        (["a.csv", "b.csv", "c.csv"], "A B", "a.csv b.csv c.csv"),
        (["a.csv", "b.csv"], "the path given", "a.csv"),
        (["tests/assets", "tests/assets"], "the path given", "tests/assets"),
        ([SCALING, SCALING, "--baseline", "A"], "--baseline", "A"),
        ([SCALING, SCALING, "--allow", "ema"], "--allow", "ema"),
        ([SCALING, SCALING, "--fail_if_slower", "5 apples"], "--fail_if_slower", "5 apples"),
        ([SCALING, SCALING, "--where", "x"], "--where", "x"),
        ([SCALING, SCALING], "A B or --where", f"{SCALING} and {SCALING}"),
        ([SCALING, "--between", "num_gpu"], "--between", "num_gpu"),
        ([MILABENCH, "--between", "gpu", "--baseline", "h300"], "--baseline", "h300"),
        ([MILABENCH, "--between", "gpu", "--baseline", "H"], "--baseline", "H"),
        ([MLPERF, "--between", "gpu"], "--baseline and --candidate", []),
        ([MLPERF, "--where", "gpu=A100"], "--where", "A100"),
        ([MLPERF, "--where", "gp=H100"], "--where", "gp"),
        (
            [
                "results/quoted/aws_p4de_p5_single_node.csv",
                *("--between", "gpu", "--out", "no/such/folder"),
            ],
            "--out",
            "no/such/folder",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(monkeypatch, repository, arguments, flag, value):
    monkeypatch.chdir(repository)
    error = refusal(*arguments)
    assert (error.flag, error.value) == (flag, value)


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["--between", "num_gpu"], "num_gpus"),
        (["--between", "gpu", "--baseline", "h300"], "H200"),
        (["--between", "gpu", "--baseline", "H"], "H100"),
    ],
)
def test_a_refusal_offers_the_nearest_name(repository, arguments, nearest):
    assert nearest in refusal(repository / MILABENCH, *arguments).allowed.split(" | ")


def test_a_refusal_is_bad_input_and_prints_no_result(capsys):
    assert main(["compare", "a.csv", "b.csv"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: ")


# The gate.


def gate(capsys, *arguments, share="5%") -> tuple[int, str]:
    """The exit code, and the reasons."""
    code = main(["compare", *map(str, arguments), "--fail_if_slower", share])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("rates", "baseline_rates", "code"),
    [
        ([90, 90.1, 89.9], [100, 100.1, 99.9], 1),  # 10 % slower, and sure
        ([96, 96.1, 95.9], [100, 100.1, 99.9], 0),  # 4 %
        ([90, 99, 81], [100, 110, 90], 0),  # 10 % and anything: not shown
        ([110, 110.1, 109.9], [100, 100.1, 99.9], 0),
    ],
)
def test_fail_if_slower(capsys, tmp_path, a_record, rates, baseline_rates, code):
    a = write_runs(tmp_path / "a", a_record, *map(float, baseline_rates))
    b = write_runs(tmp_path / "b", a_record, *map(float, rates), lr=1.0)
    for share in ("5%", "0.05"):
        exit_code, message = gate(capsys, a, b, share=share)
        assert exit_code == code
        assert ("slower than allowed" in message) == bool(code)


@pytest.mark.parametrize(
    ("baseline_rates", "rates", "numbers"),
    [
        ([100.0], [100.0], "n=1 and n=1"),
        ([100.0], [200.0], "n=1 and n=1"),
        ([100.0, 101.0, 99.0], [200.0], "n=3 and n=1"),
        ([100.0], [200.0, 201.0], "n=1 and n=2"),
    ],
)
def test_a_gate_without_a_verdict_is_shut(
    capsys, tmp_path, a_record, baseline_rates, rates, numbers
):
    a = write_runs(tmp_path / "a", a_record, *baseline_rates)
    b = write_runs(tmp_path / "b", a_record, *rates)
    code, message = gate(capsys, a, b)
    assert code == 1
    assert f"not tested: too few runs ({numbers}; 2 or more on each side are needed)" in message


def test_a_gate_with_nothing_to_compare_is_shut(capsys, tmp_path, a_record):
    a = write_runs(tmp_path / "a", a_record, 100.0, 101.0, batch_size=2)
    write_runs(a, a_record, 100.0, 101.0, batch_size=4)
    other = write_runs(tmp_path / "other", a_record, 100.0, 101.0, batch_size=8)
    failed = write_runs(tmp_path / "failed", a_record, 1.0, 2.0, batch_size=2, status="oom")
    for b, reason in ((other, "no configuration is on both sides"), (failed, "2 x oom")):
        assert reason in str(refusal(a, b))
        code, message = gate(capsys, a, b)
        assert code == 1
        assert reason in message


# What a record may say, and how often it counts.


@pytest.mark.parametrize(
    "rate", ["NaN", "Infinity", "-Infinity", "1e999", "0", "-1", '"fast"', "true"]
)
def test_a_rate_that_is_none_is_refused(capsys, tmp_path, a_record, rate):
    a = write_runs(tmp_path / "a", a_record, 100.0, 100.1, 99.9)
    b = write_runs(tmp_path / "b", a_record, 100.0, 100.1, 1234.5)
    file = b / "deep/deep" / "run-ok--2" / "record.json"
    file.write_text(file.read_text().replace("1234.5", rate))
    assert main(["compare", str(a), str(b), "--fail_if_slower", "3%"]) == 1
    error = capsys.readouterr().err
    assert f"{file}: $.summary.images_per_second: " in error
    assert f"not judged: 1 x record that cannot be read in {b}" in error


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ('"lr": 0.0001', '"lr": NaN', "$.config.lr"),
        ('"num_cpu_cores": 2', '"num_cpu_cores": -2', "$.machine.num_cpu_cores"),
        ('"reason": null', '"reason": "none"', "$.reason"),
        ('"run_id": "', '"run_id": "?', "$.run_id"),
        ('"image_size": 256', '"image_size": true', "$.config.image_size"),
        ('"kind": "within-run"', '"kind": 1', "$.summary.images_per_second_interval.kind"),
        ('"summary": {', '"summary": null, "more": {', "$"),
    ],
)
def test_a_record_that_breaks_its_schema_is_refused(capsys, tmp_path, a_record, old, new, path):
    a = write_runs(tmp_path / "a", a_record, 100.0)
    b = write_runs(tmp_path / "b", a_record, 100.0)
    file = b / "run-ok--0" / "record.json"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    error = refusal(a, b)
    assert (error.value, "1 x record that cannot be read" in error.what) == (str(b), True)
    assert f"{file}: {path}: " in capsys.readouterr().err


def test_a_record_whose_time_cannot_be_read_is_named_and_left_out(capsys, tmp_path, a_record):
    a = write_runs(tmp_path / "a", a_record, 100.0, 100.1)
    b = write_runs(tmp_path / "b", a_record, 100.0, 100.1)
    file = b / "run-ok--0" / "record.json"
    record = json.loads(file.read_text()) | {"started_utc": "yesterday"}
    file.write_text(json.dumps(record))
    assert main(["compare", str(a), str(b)]) == 0
    output = capsys.readouterr()
    assert "yesterday" in output.err and f"started_utc of {record['run_id']}" in output.err
    assert "1 x record that cannot be read" in words(output.out)


def test_copies_of_a_run_are_one_run(capsys, tmp_path, a_record):
    a = write_runs(tmp_path / "a", a_record, 100.0, 100.1, 99.9)
    b = write_runs(tmp_path / "b", a_record, 100.0)
    for number in range(4):
        shutil.copytree(b / "run-ok--0", b / f"copy-{number}")
    (row, _) = compare_as_json(capsys, a, b)["rows"]
    assert (row["num_baseline_runs"], row["num_candidate_runs"]) == (3, 1)
    assert f"Left out of {b}: 4 x copy of a run that is counted." in words(compare(capsys, a, b))
    assert gate(capsys, a, b)[0] == 1
    assert "n=3 and n=1" in gate(capsys, a, b)[1]


def test_two_contents_under_one_run_id_are_refused(capsys, tmp_path, a_record):
    a = write_runs(tmp_path / "a", a_record, 100.0, 100.1)
    b = write_runs(tmp_path / "b", a_record, 100.0)
    shutil.copytree(b / "run-ok--0", b / "copy")
    file = b / "copy" / "record.json"
    record = json.loads(file.read_text())
    record["summary"]["images_per_second"] = 200.0
    file.write_text(json.dumps(record))
    # In the order of the files' names: the copy is read first.
    assert refusal(a, b).value == f"{record['run_id']}: 200.0 and 100.0"


def test_a_run_on_both_sides_is_refused(capsys, repository, tmp_path, a_record):
    a = write_runs(tmp_path / "a", a_record, 100.0, 100.1, 99.9)
    assert refusal(a, a, "--fail_if_slower", "3%").flag == "A B or --where"
    link = tmp_path / "link"
    link.symlink_to(a)
    assert refusal(a, link).flag == "A B or --where"
    b = write_runs(tmp_path / "b", a_record, 100.0, 100.1)
    shutil.copytree(a / "run-ok--0", b / "from-a")
    shared = json.loads((a / "run-ok--0" / "record.json").read_text())["run_id"]
    assert refusal(a, b).value == shared

    # A published table has the runs of the records that it was made from.
    table, runs = (repository / "results" / name for name in ("throughput.csv", "runs"))
    assert (runs / refusal(table, runs, "--where", "kind=measured").value).is_dir()


def test_a_run_twice_in_a_table_counts_once(capsys, tmp_path):
    def run(name, rate):
        return {
            "source": name,
            "kind": "measured",
            "started_utc": "2026-11-21T05:48:24+00:00",
            "images_per_second": rate,
        }

    a = write_table(tmp_path / "a.csv", run("a1", 10), run("a2", 11))
    b = write_table(tmp_path / "b.csv", *[run("b1", 10)] * 5)
    assert "n=2 and n=1" in gate(capsys, a, b)[1]
    write_table(b, run("b1", 10), run("b1", 11))
    assert refusal(a, b).value == "b1: 10 and 11"


@pytest.mark.parametrize("rate", ["NaN", "inf", "1e999", "0", "-1", "fast", "true"])
def test_a_rate_that_is_none_is_refused_in_a_table(capsys, tmp_path, rate):
    a = write_table(tmp_path / "a.csv", *rows_of(micro_batch=1))
    b = write_table(tmp_path / "b.csv", *rows_of(micro_batch=1, images_per_second=rate))
    error = refusal(a, b, "--fail_if_slower", "3%")
    assert error.value == str(b)
    assert f"{rate!r} as images_per_second in row 1" in error.what


def test_a_candidate_without_a_figure_does_not_pass(capsys, tmp_path, a_record):
    a = write_runs(tmp_path / "a", a_record, 100.0, 100.1, batch_size=2)
    write_runs(a, a_record, 100.0, batch_size=4)
    b = write_runs(tmp_path / "b", a_record, 100.0, 100.1, batch_size=2)
    write_runs(b, a_record, 100.0, batch_size=4, status="oom")
    assert main(["compare", str(a), str(b)]) == 0
    code, message = gate(capsys, a, b)
    assert code == 1
    assert "no figure of the candidate" in message
    assert "not tested" not in message


# Outputs.


@pytest.fixture
def hostile_tables(tmp_path):
    return [
        write_table(
            tmp_path / f"{name}.csv",
            {"gpu": gpu, "note": HOSTILE, "micro_batch": 4, "images_per_second": 10},
            {"gpu": gpu, "note": "plain", "micro_batch": 4, "images_per_second": 20},
            {"gpu": gpu, "note": f"+{name}", "micro_batch": 4, "images_per_second": 30},
        )
        for name, gpu in (("a", HOSTILE), ("b", "|H100|"))
    ]


def test_hostile_names_survive_csv_and_json(capsys, hostile_tables, tmp_path):
    found = compare_as_json(capsys, *hostile_tables)
    assert found["rows"][0]["note"] == HOSTILE
    text = compare(capsys, *hostile_tables, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["note"] for row in rows] == [f"'{HOSTILE}", "plain", "'+a", "'+b", ""]
    assert not any(cell.startswith(("=", "+")) for row in rows for cell in row.values())


def test_a_setting_of_a_table_may_be_called_machine(capsys, tmp_path):
    a, b = (
        write_table(
            tmp_path / f"{gpu}.csv", {"machine": "node 7", "gpu": gpu, "images_per_second": rate}
        )
        for gpu, rate in (("A100", 10), ("H100", 20))
    )
    assert compare_as_json(capsys, a, b)["rows"][0]["machine"] == "node 7"


def test_hostile_names_are_one_line_in_terminal_and_markdown(capsys, hostile_tables):
    text = compare(capsys, *hostile_tables)
    assert "\x1b" not in text
    assert "=cmd|' /C calc'!A0 <script>alert(1)</script> \u4e2d\u6587 ?[2J" in text
    markdown = compare(capsys, *hostile_tables, "--format", "markdown")
    assert "<script>" not in markdown
    assert "=cmd\\|' /C calc'!A0 &lt;script&gt;" in markdown
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    widths = {line.replace("\\|", "").count("|") for line in table[:5]}
    assert len(widths) == 1


@pytest.mark.parametrize("width", [80, 132])
def test_published_runs_fit_the_terminal_and_show_what_differs(
    capsys, repository, monkeypatch, width
):
    monkeypatch.chdir(repository)
    monkeypatch.setenv("COLUMNS", str(width))
    sides = ("results/runs", "--between", "engine", "--baseline", "composer")
    sides += ("--candidate", "torch")
    found = compare_as_json(capsys, *sides)
    matched = [row for row in found["rows"] if row["row"] == "matched"]
    titles = [row["row"] for row in found["rows"] if row["row"].startswith("only in")]
    num_only = {title: titles.count(title) for title in dict.fromkeys(titles)}
    assert sum(num_only.values()) > 40
    text = compare(capsys, *sides)
    assert max(map(len, text.splitlines())) <= width
    counts = ", ".join(f"{number} {title}" for title, number in num_only.items())
    assert f"Not compared: {counts}; --all lists them." in words(text)
    (same,) = [line for line in text.splitlines() if line.startswith("  the same: ")]
    # A setting is told where it differs between the matched rows, and nowhere else.
    columns = found["matched_on"]
    varying = {name for name in columns if len({str(row[name]) for row in matched}) > 1}
    below = text.partition(same)[2].partition("Also different")[0]
    assert {name for name in columns if re.search(rf"\b{name}\b", below)} == varying
    assert not any(f" {name} " in same for name in varying)
    num_same = len([name for name in columns if matched[0][name] is not None]) - len(varying)
    num_told, num_more = same.count(", ") + 1, re.search(r"and (\d+) more \(--all\)$", same)
    assert num_told + int(num_more[1]) == num_same

    text = compare(capsys, *sides, "--all")
    assert max(map(len, text.splitlines())) <= width
    for title, number in num_only.items():
        listed = text.partition(f"{number} {title}")[2].split("only in the")[0]
        rates = {
            f"{row[f'{title[12:]}_images_per_second']:.5g}"
            for row in found["rows"]
            if row["row"] == title
        }
        assert rates <= set(listed.split())


def test_many_settings_that_differ_are_told_below_the_table(capsys, tmp_path, monkeypatch):
    names = [f"a_setting_{number}" for number in range(12)]
    for side, factor in (("a", 1), ("b", 2)):
        rows = [
            {**{name: f"v{name[-1]}{value}" for name in names}, "images_per_second": factor * value}
            for value in (10, 20)
        ]
        write_table(tmp_path / f"{side}.csv", *({"gpu": side, **row} for row in rows))
    tables = (tmp_path / "a.csv", tmp_path / "b.csv")
    monkeypatch.setenv("COLUMNS", "90")
    text = compare(capsys, *tables)
    assert max(map(len, text.splitlines())) <= 90
    assert "row  n  baseline  candidate  ratio  verdict" in text
    assert [line.split()[:5] for line in text.splitlines() if line.endswith("not tested")][:2] == [
        ["1", "1", "10", "20", "2.00x"],
        ["2", "1", "20", "40", "2.00x"],
    ]
    told = ", ".join(f"{name} v{name[-1]}20" for name in names)
    assert f"row 2: {told}" in words(text)
    monkeypatch.setenv("COLUMNS", "250")
    assert "a_setting_0  a_setting_1" in compare(capsys, *tables)


def test_the_comparison_is_written_to_a_file(capsys, repository, tmp_path):
    table = repository / "results" / "quoted" / "aws_p4de_p5_single_node.csv"
    out = tmp_path / "comparison.md"
    arguments = (table, "--between", "gpu", "--format", "markdown")
    assert compare(capsys, *arguments, "--out", out) == f"wrote {out}\n"
    assert out.read_text() == compare(capsys, *arguments)
    assert "| ema | micro\\_batch | n |" in out.read_text()


def test_the_examples_of_the_help_run(capsys, repository, monkeypatch):
    monkeypatch.chdir(repository)
    examples = EPILOG.replace("\\\n", "").splitlines()[1:]
    shipped = [shlex.split(line)[3:] for line in examples if "results/" in line]
    assert len(shipped) == 2
    for arguments in shipped:
        assert main(arguments) == 0
        assert "not tested" in capsys.readouterr().out


# Speed.


def timed(*arguments, cwd) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "sdbench", "compare", *map(str, arguments)],
        cwd=cwd,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


@pytest.mark.slow
def test_a_thousand_records_are_soon_compared(tmp_path, repository, a_record):
    for side in "ab":
        for batch in range(1, 101):
            write_runs(
                tmp_path / side,
                a_record,
                *(10 + batch + index / 10 for index in range(5)),
                batch_size=batch,
                compile=side,
            )
    duration_s = timed(tmp_path / "a", tmp_path / "b", cwd=repository)
    print(f"1,000 records: {duration_s:.2f} s")
    assert duration_s < 20  # 2 s on an idle machine; tests share theirs


# When the runs were made.

RATES = (100.0, 101.0, 99.0)
SLOWER = (90.0, 91.0, 89.0)


def compare_at(capsys, tmp_path, a_record, minutes, other_minutes, **facts) -> tuple[dict, str]:
    """The row and the text of a comparison of runs that began at these minutes."""
    a = write_runs(tmp_path / "a", a_record, *RATES[: len(minutes)], minutes=minutes)
    rates = [rate for _, rate in zip(other_minutes, itertools.cycle(SLOWER), strict=False)]
    b = write_runs(tmp_path / "b", a_record, *rates, minutes=other_minutes, facts=facts)
    return compare_as_json(capsys, a, b)["rows"][0], words(compare(capsys, a, b))


@pytest.mark.parametrize(
    ("minutes", "other_minutes"),
    [
        ((0, 10, 20), (5, 15, 25)),  # in turn
        ((0, 15, 20), (5, 10, 25)),  # in rounds: A B, B A, A B
        ((0, 2000, 4000), (1000, 3000, 5000)),  # in turn, on days
        ((0, 100, 200), (1000, 1100, 1200)),  # three occasions of each
    ],
)
def test_sides_that_take_turns_have_a_verdict(capsys, tmp_path, a_record, minutes, other_minutes):
    row, text = compare_at(capsys, tmp_path, a_record, minutes, other_minutes)
    assert (row["verdict"], row["num_baseline_occasions"]) == ("slower", 3)
    assert "not comparable" not in text and "one sample" not in text


@pytest.mark.parametrize(
    ("minutes", "other_minutes"),
    [
        ((0, 5, 10), (15, 20, 25)),  # one after the other
        ((0, 5, 10), (360, 365, 370)),  # and hours later
        ((0, 5, 10), (360, 720, 1080)),  # one occasion against three
        ((0, 65, 130), (200, 201, 202)),  # three against one
    ],
)
def test_sides_measured_apart_have_no_verdict(capsys, tmp_path, a_record, minutes, other_minutes):
    row, text = compare_at(capsys, tmp_path, a_record, minutes, other_minutes)
    assert row["verdict"] == "not comparable: measured apart"
    assert (row["ratio_low"], row["detectable_percent"]) == (None, None)
    assert row["ratio"] == pytest.approx(0.9, abs=1e-4)
    assert "not comparable: measured apart: the sides did not take turns" in text
    assert "repeat N --against" in text
    code, message = gate(capsys, tmp_path / "a", tmp_path / "b")
    assert (code, "--fail_if_slower: not comparable: measured apart" in message) == (1, True)


def test_a_pause_is_counted_from_the_end_of_a_run(capsys, tmp_path, a_record):
    # Runs of 55 minutes with 60 minutes between them, and the others with 61.
    a_record = copy.deepcopy(a_record) | {"duration_s": 55 * 60.0}
    row, _ = compare_at(capsys, tmp_path, a_record, (0, 115), (1000, 1116))
    assert (row["num_baseline_occasions"], row["num_candidate_occasions"]) == (1, 2)


def test_a_pause_ends_a_round(capsys, tmp_path, a_record):
    # A, hours later B and B, hours later A and A, hours later B: two occasions of each.
    row, text = compare_at(capsys, tmp_path, a_record, (0, 1000, 1005), (500, 505, 1500))
    assert (row["num_baseline_occasions"], row["num_candidate_occasions"]) == (2, 2)
    assert "3 and 3 runs on 2 and 2 occasions" in text


def test_the_ratio_of_sides_without_a_verdict_is_that_of_their_occasions(
    capsys, tmp_path, a_record
):
    # 100 and 101 on one occasion, and 90, 90 and 81 on two: sqrt(90 x 81) over sqrt(100 x 101).
    a = write_runs(tmp_path / "a", a_record, 100.0, 101.0, minutes=(0, 5))
    b = write_runs(tmp_path / "b", a_record, 90.0, 90.0, 81.0, minutes=(300, 305, 600))
    row = compare_as_json(capsys, a, b)["rows"][0]
    assert row["ratio"] == pytest.approx(math.sqrt(90 * 81 / (100 * 101)))
    assert row["verdict"] == "not comparable: measured apart"
    text = words(compare(capsys, a, b))
    assert "2 and 3 runs on 1 and 2 occasions; the ratio is that of the occasions" in text


def test_the_occasion_is_the_sample_where_there_are_several(capsys, tmp_path, a_record):
    # Means of the logs of two runs each: log 100 and log 104, log 110 and log 112.
    a = write_runs(
        tmp_path / "a", a_record, 99.0, 100**2 / 99, 103.0, 104**2 / 103, minutes=(0, 5, 300, 305)
    )
    b = write_runs(
        tmp_path / "b", a_record, 110.0, 110.0, 111.0, 112**2 / 111, minutes=(10, 15, 310, 315)
    )
    row = compare_as_json(capsys, a, b)["rows"][0]
    reference = stats.ttest_ind(
        [math.log(110), math.log(112)], [math.log(100), math.log(104)], equal_var=False
    ).confidence_interval(0.95)
    assert row["ratio"] == pytest.approx(math.sqrt(110 * 112 / (100 * 104)))
    assert row["ratio_low"] == pytest.approx(math.exp(reference.low))
    assert row["ratio_high"] == pytest.approx(math.exp(reference.high))
    assert "4 and 4 runs on 2 and 2 occasions" in words(compare(capsys, a, b))


def test_two_machines_share_no_occasion(capsys, tmp_path, a_record):
    other = copy.deepcopy(a_record)
    other["machine"]["device_name"] = "AMD EPYC"
    a = write_runs(tmp_path / "a", a_record, *RATES)
    b = write_runs(tmp_path / "b", other, *SLOWER)
    assert compare_as_json(capsys, a, b)["rows"][0]["verdict"] == "not comparable: measured apart"
    assert "one of the two machines has a single occasion" in words(compare(capsys, a, b))
    for name, record, rates in (("a", a_record, RATES), ("b", other, SLOWER)):
        for day in (1, 2, 3):
            minutes = [1440 * day + 5 * index for index in range(3)]
            write_runs(tmp_path / name / f"day-{day}", record, *rates, minutes=minutes)
    row = compare_as_json(capsys, a, b)["rows"][0]
    assert (row["num_baseline_runs"], row["num_baseline_occasions"]) == (12, 4)
    assert row["verdict"] == "slower"


def test_a_table_without_times_has_no_verdict(capsys, tmp_path):
    def side(name, *rates, **times):
        rows = [{"source": f"{name}{rate}", "kind": "measured", **times} for rate in rates]
        rows = [{**row, "images_per_second": rate} for row, rate in zip(rows, rates, strict=True)]
        return write_table(tmp_path / f"{name}.csv", *rows)

    a, b = side("a", 100, 101, 99), side("b", 90, 91, 89)
    assert compare_as_json(capsys, a, b)["rows"][0]["verdict"] == "not comparable: measured apart"
    b = side("c", 90, 91, 89, started_utc="yesterday")
    error = refusal(a, b)
    assert (error.value, error.flag) == ("yesterday", f"started_utc of {b}")


def test_times_are_of_any_zone(capsys, tmp_path):
    # In turn, ten minutes apart.
    times = {
        "a": ("2026-11-23T12:00:00Z", "2026-11-23T12:20:00Z", "2026-11-23T12:40:00Z"),
        "b": ("2026-11-23T13:10:00+01:00", "2026-11-23T12:30:00", "2026-11-23T07:50:00-05:00"),
    }
    tables = [
        write_table(
            tmp_path / f"{name}.csv",
            *(
                {"source": at, "kind": "measured", "started_utc": at, "images_per_second": rate}
                for at, rate in zip(of_side, RATES, strict=True)
            ),
        )
        for name, of_side in times.items()
    ]
    row = compare_as_json(capsys, *tables)["rows"][0]
    assert (row["num_baseline_occasions"], row["num_candidate_occasions"]) == (3, 3)


def test_a_matrix_product_that_changed_takes_the_verdict_back(capsys, tmp_path, a_record):
    def measure(name, product, **config):
        write_runs(
            tmp_path / name,
            a_record,
            *(RATES if name == "a" else SLOWER),
            facts={"summary": {"matmul_tflops": product}},
            **config,
        )
        return tmp_path / name

    a = measure("a", 0.400)
    row = compare_as_json(capsys, a, measure("b", 0.381))["rows"][0]
    assert (row["verdict"], row["machine_figures"]) == ("slower", None)
    b = measure("c", 0.379)
    row = compare_as_json(capsys, a, b)["rows"][0]
    assert row["verdict"] == "not comparable: the machine changed"
    assert row["machine_figures"] == "matrix product 0.4 -> 0.379 TFLOP/s, 0.95x"
    assert "the machine changed: by more than 5 %" in words(compare(capsys, a, b))
    # With another precision it is another product.
    b = measure("d", 0.8, precision="fp32")
    row = compare_as_json(capsys, a, b, "--allow", "precision")["rows"][0]
    assert (row["verdict"], row["machine_figures"]) == (
        "slower",
        "matrix product 0.4 -> 0.8 TFLOP/s, 2.00x",
    )


def test_a_clock_that_nothing_explains_takes_the_verdict_back(capsys, tmp_path, a_record):
    def measure(name, clock_mhz, **config):
        readings = {"sm_clock_mhz": clock_mhz, "temperature_c": 60.0, "power_limit_w": 700.0}
        readings |= {name: None for name in GPU_READINGS if name not in readings}
        return write_runs(
            tmp_path / name,
            a_record,
            *(RATES if name == "a" else SLOWER),
            facts={"summary": {"gpu": readings}},
            **config,
        )

    a = measure("a", 1900.0)
    row = compare_as_json(capsys, a, measure("b", 1700.0))["rows"][0]
    assert row["verdict"] == "not comparable: the machine changed"
    # Another setting is another load.
    found = compare_as_json(capsys, a, measure("c", 1700.0, compile=True))["rows"][0]
    assert (found["verdict"], found["machine_figures"]) == (
        "slower",
        "clock of the GPU 1900 -> 1700 MHz, 0.89x",
    )


GPU_READINGS = (
    *("utilization_percent", "power_w", "power_limit_w", "default_power_limit_w", "energy_j"),
    *("temperature_c", "sm_clock_mhz", "max_sm_clock_mhz", "throttle_reasons"),
    "num_other_processes",
)


def test_the_change_that_would_have_been_found_is_told(capsys, tmp_path, a_record):
    # Logs of 100 e^d, 100, 100 e^-d on both sides, d = 0.01: variance d^2, of the difference
    # 2 d^2 / 3 on 4 degrees of freedom, 10/3 without the share of half a run.
    rates = [100 * math.exp(deviation) for deviation in (0.01, 0.0, -0.01)]
    a = write_runs(tmp_path / "a", a_record, *rates)
    b = write_runs(tmp_path / "b", a_record, *rates)
    row = compare_as_json(capsys, a, b)["rows"][0]
    shift = math.log1p(row["detectable_percent"] / 100) / (0.01 * math.sqrt(2 / 3))
    quantile = stats.t.ppf(0.975, 10 / 3)
    assert stats.nct.cdf(quantile, 10 / 3, shift) == pytest.approx(0.2, abs=1e-6)
    told = f"a change of {row['detectable_percent']:.1f} % would be found in 80 % of comparisons"
    assert told in words(compare(capsys, a, b))


def test_the_published_seed_runs_of_three_occasions_have_no_verdict(capsys, repository, tmp_path):
    # The same settings, in the morning, at noon and in the evening of one day.
    for hours in (("05", "06"), ("12",), ("18",)):
        for hour in hours:
            for run in (repository / "results" / "runs").glob(
                f"20261121T{hour}*_sd2-base-256px-seed"
            ):
                shutil.copytree(run, tmp_path / hours[0] / run.name)
    morning, noon, evening = (tmp_path / hour for hour in ("05", "12", "18"))
    rows = [
        compare_as_json(capsys, *sides)["rows"][0]
        for sides in ((morning, noon), (morning, evening), (noon, evening))
    ]
    assert [round(row["ratio"], 2) for row in rows] == [0.90, 0.75, 0.83]
    assert {row["verdict"] for row in rows} == {"not comparable: measured apart"}
    assert rows[2]["machine_figures"] == "matrix product 0.3752 -> 0.2641 TFLOP/s, 0.70x"


# What differs otherwise.


def test_what_differs_beside_the_settings_is_named(capsys, tmp_path, a_record):
    a = write_runs(tmp_path / "a", a_record, *RATES)
    b = write_runs(
        tmp_path / "b",
        a_record,
        *SLOWER,
        versions={"torch": "2.8.0", "diffusers": None},
        facts={
            "git": {"commit": "1" * 40, "dirty": True},
            "environment": {"LD_PRELOAD": "/lib/libjemalloc.so"},
            "workload": {"weights": "loaded"},
        },
    )
    found = compare_as_json(capsys, a, b)
    assert found["rows"][0]["verdict"] == "slower"
    assert found["other_differences"] == {
        "git_commit": [a_record["git"]["commit"], "1" * 40],
        "version of torch": ["2.7.0", "2.8.0"],
        "version of diffusers": ["0.39.0", "not installed"],
        "variable LD_PRELOAD": ["not set", "/lib/libjemalloc.so"],
        "uncommitted changes": ["false", "true"],
        "weights of the model": ["random", "loaded"],
    }
    assert "Also different: git_commit" in compare(capsys, a, b)


def test_versions_that_differ_within_a_side_are_named(capsys, tmp_path, a_record):
    a = write_runs(tmp_path / "a", a_record, 100.0, 101.0)
    write_runs(tmp_path / "a" / "more", a_record, 99.0, minutes=[10], versions={"torch": "2.8.0"})
    b = write_runs(tmp_path / "b", a_record, *SLOWER)
    found = compare_as_json(capsys, a, b)
    assert found["other_differences"] == {"version of torch": ["2.7.0, 2.8.0", "2.7.0"]}


def test_two_changed_checkouts_may_not_be_the_same(capsys, tmp_path, a_record):
    changed = {"git": {"dirty": True}}
    a = write_runs(tmp_path / "a", a_record, *RATES, facts=changed)
    b = write_runs(tmp_path / "b", a_record, *SLOWER, facts=changed, versions={"torch": "2.8.0"})
    text = words(compare(capsys, a, b))
    assert "Both sides had uncommitted changes" in text
    assert "Also different: version of torch 2.7.0 -> 2.8.0." in text


def test_two_runs_on_each_side_cannot_tell_what_would_be_found(capsys, tmp_path, a_record):
    a = write_runs(tmp_path / "a", a_record, 100.0, 101.0)
    b = write_runs(tmp_path / "b", a_record, 90.0, 91.0)
    assert compare_as_json(capsys, a, b)["rows"][0]["detectable_percent"] is None
    assert "What change would be found, 3 runs or more" in words(compare(capsys, a, b))


@pytest.mark.parametrize("product", ["unknown", 0, -1, None, True])
def test_a_matrix_product_that_is_no_figure_is_not_looked_at(capsys, tmp_path, product):
    def side(name, *rates):
        rows = [
            {
                "source": f"{name}{index}",
                "kind": "measured",
                "started_utc": at_minute(5 * index),
                "matmul_tflops": product if name == "b" else 1.0,
                "images_per_second": rate,
            }
            for index, rate in enumerate(rates)
        ]
        return write_table(tmp_path / f"{name}.csv", *rows)

    row = compare_as_json(capsys, side("a", *RATES), side("b", *SLOWER))["rows"][0]
    assert (row["verdict"], row["machine_figures"]) == ("slower", None)


def test_rows_that_share_occasions_have_no_interval_of_their_mean(capsys, tmp_path, a_record):
    def measure(minutes, other_minutes):
        folder = tmp_path / str(minutes[1])
        for batch in (2, 4):
            write_runs(folder / "a", a_record, *RATES, 98.0, minutes=minutes, batch_size=batch)
            write_runs(
                folder / "b", a_record, *SLOWER, 88.0, minutes=other_minutes, batch_size=batch
            )
        return compare_as_json(capsys, folder / "a", folder / "b")["rows"]

    *_, mean = measure((0, 10, 20, 30), (5, 15, 25, 35))
    assert mean["verdict"] == "slower"
    *rows, mean = measure((0, 5, 300, 305), (600, 605, 900, 905))
    assert [row["num_candidate_occasions"] for row in rows] == [2, 2]
    assert None not in [row["ratio_low"] for row in rows]
    assert (mean["verdict"], mean["ratio_low"]) == ("not tested", None)
