"""Two sets of figures set against each other, through `python -m sdbench compare`."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import shutil

import pytest
from scipy import stats

from sdbench.cli import main
from tests.refusals import refusal_of
from tests.report.results_folder import make_record
from tests.runs import follow_rate

HOSTILE = "=cmd|' /C calc'!A0\n<script>alert(1)</script> \u4e2d\u6587 \x1b[2J"
RATES = (100.0, 101.0, 99.0)
SLOWER = (90.0, 91.0, 89.0)
APART = "not comparable: measured apart"


@pytest.fixture
def write_runs(tmp_path):
    """Write one record per rate, at different depths below a folder, and return the folder.

    The first runs of two sides begin at the same time, and so on: they take turns. `facts` are
    values of parts of the record, other names are settings.
    """
    numbers = itertools.count()

    def write(name, *rates, status="ok", minutes=None, facts=None, **config):
        minutes = minutes or [5 * index for index in range(len(rates))]
        for index, (rate, minute) in enumerate(zip(rates, minutes, strict=True)):
            number = next(numbers)
            record = make_record(
                run_id=f"20261121T{number:06d}Z_x_any-name",
                started_utc=at_minute(minute),
                summary__images_per_second=rate,
            )
            for part, values in {"config": config, **(facts or {})}.items():
                if isinstance(values, dict):
                    record[part] |= values
                else:
                    record[part] = values
            if status != "ok":
                record |= {"status": status, "reason": "it did not end well", "summary": None}
            run = tmp_path / name / ("deep/" * index) / f"run-{number}"
            run.mkdir(parents=True)
            (run / "record.json").write_text(json.dumps(follow_rate(record)))
        return tmp_path / name

    return write


def at_minute(minute: int) -> str:
    return f"2026-11-{21 + minute // 1440}T{minute // 60 % 24:02}:{minute % 60:02}:00+00:00"


@pytest.fixture
def write_table(tmp_path):
    """Write rows as a table in CSV, and return its path."""

    def write(name, *rows):
        columns = list(dict.fromkeys(column for row in rows for column in row))
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return tmp_path / name

    return write


@pytest.fixture
def compare(capsys, monkeypatch):
    """Compare, and return the output as one line of words."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        assert main(["compare", *map(str, arguments)]) == 0
        return " ".join(capsys.readouterr().out.split())

    return run


@pytest.fixture
def compare_as_json(capsys):
    def run(*arguments):
        assert main(["compare", *map(str, arguments), "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def gate(capsys):
    """Compare with --fail_if_slower, and return the exit code and the reasons."""

    def run(*arguments, share="5%"):
        code = main(["compare", *map(str, arguments), "--fail_if_slower", share])
        return code, capsys.readouterr().err

    return run


def file_of(folder):
    """The record of the first run in a folder."""
    return next(folder.glob("run-*/record.json"))


# What is compared.


def test_the_ratios_of_the_seeds_table(capsys, compare, compare_as_json, repository):
    # 189.28/142.69 = 1.32651, 289.19/173.89 = 1.66306, 329.55/185.18 = 1.77962,
    # 353.81/192.85 = 1.83464, 358.68/197.47 = 1.81638, 361.15/197.90 = 1.82491,
    # 385.31/204.22 = 1.88674. The seed prints 1.32, 1.66, 1.78, 1.83, 1.82, 1.83, 1.89: the first
    # and the sixth do not follow from its own figures by any rounding, and are 0.01 beside them.
    table = repository / "results" / "quoted" / "aws_p4de_p5_single_node.csv"
    *rows, mean = compare_as_json(table, "--between", "gpu")["rows"]
    assert [(row["micro_batch"], row["ema"], round(row["ratio"], 5)) for row in rows] == [
        (4, True, 1.32651),
        (8, True, 1.66306),
        (12, True, 1.77962),
        (16, True, 1.83464),
        (20, True, 1.81638),
        (20, False, 1.82491),
        (32, True, 1.88674),
    ]
    assert {row["verdict"] for row in rows} == {"not tested"}
    # exp of the mean of the logs of the seven ratios above.
    ratio = math.exp(math.fsum(math.log(row["ratio"]) for row in rows) / 7)
    assert mean["ratio"] == pytest.approx(ratio)

    sides = (table, "--between", "gpu", "--candidate", "H100", "--baseline", "a100")
    text = compare(*sides)
    assert f"geometric mean of 7: {ratio:.2f}x, not tested" in text
    assert "1 142.69 189.28 1.33x not tested ema true, micro_batch 4 1 173.89" in text
    assert "the same: model sd2-base, image_size 512, latents online, global_batch 2048" in text
    assert "Not tested: a side has a single figure; a verdict takes two on each side." in text
    main(["compare", *map(str, sides), "--format", "markdown"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 1 |")]
    assert rows[0] == "| 1 | 142.69 | 189.28 | 1.33x | not tested | ema true, micro\\_batch 4 |"


def test_runs_of_one_configuration_are_replicates(compare_as_json, write_runs):
    before = write_runs("a", 100.0, 101.0, 99.0)
    after = write_runs("b", 110.0, 111.0, 109.0, lr=2e-4)
    found = compare_as_json(before, after)
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


def test_a_sweep_is_matched_row_by_row_and_the_rest_is_listed(compare, compare_as_json, write_runs):
    for side, factor, batches in (("a", 1.0, (4, 8, 16)), ("b", 1.5, (8, 16, 32))):
        for batch in batches:
            rates = [factor * batch * noise for noise in (1, 1.01, 0.99)]
            sides = write_runs(
                side, *rates, device_train_microbatch_size=batch, compile=side == "b"
            ).parent
    sides = (sides / "a", sides / "b")
    found = compare_as_json(*sides)
    rows = {(row["row"], row.get("micro_batch")): row for row in found["rows"]}
    assert list(rows) == [
        ("matched", 8),
        ("matched", 16),
        ("only in the baseline", 4),
        ("only in the candidate", 32),
        ("geometric mean", None),
    ]
    row, mean = rows["matched", 8], rows["geometric mean", None]
    assert row["ratio"] == pytest.approx(1.5) and mean["ratio"] == pytest.approx(1.5)
    # Twice the data: the interval of the mean is narrower.
    assert mean["ratio_high"] - mean["ratio_low"] < row["ratio_high"] - row["ratio_low"]
    text = compare(*sides)
    assert "corrected for 2 tests (Holm)" in text
    # Settings that are the same are told in part, and whole with --all.
    same = {name for name in found["matched_on"] if row[name] is not None} - {"micro_batch"}
    assert "the same: model sd2-base, image_size 256, latents" in text
    assert f"and {len(same) - 6} more (--all)" in text
    assert "Not compared: 1 only in the baseline, 1 only in the candidate; --all lists" in text
    text = compare(*sides, "--all")
    assert "Not compared" not in text
    told = text.partition("the same: ")[2].partition(" n baseline")[0]
    assert {fact.split()[0] for fact in told.split(", ")} == same
    assert "1 only in the baseline: n baseline settings 3 3.9999 micro_batch 4" in text
    assert "1 only in the candidate: n candidate settings 3 47.998 micro_batch 32" in text


def test_verdicts_are_corrected_for_the_number_of_rows(compare_as_json, write_runs):
    # Each row alone has p = 0.04: deviations of the logs as in the test of the detectable change.
    deviations = (0.04, 0.0, -0.04)
    faster = math.exp(stats.t.ppf(0.98, 4) * 0.04 * math.sqrt(2 / 3))
    for batch, verdict in ((2, "faster"), (4, "no difference shown")):
        rates = [100 * math.exp(deviation) for deviation in deviations]
        a = write_runs("a", *rates, batch_size=batch)
        b = write_runs("b", *(faster * rate for rate in rates), batch_size=batch)
        assert compare_as_json(a, b)["rows"][0]["verdict"] == verdict


def test_rows_without_a_figure_are_counted_and_flags_are_shown(compare, repository, write_runs):
    a = write_runs(
        "a", 100.0, facts={"summary": {"flags": ["drift", "busy"], "stability": "drift"}}
    )
    write_runs("a", 1.0, 2.0, status="oom")
    feed = next((repository / "results" / "runs").glob("*_feed-mds-512px"))
    shutil.copytree(feed, a / "zz")
    text = compare(a, write_runs("b", 100.0))
    assert f"Left out of {a}: 2 x oom, 1 x feed, which is not a training run." in text
    assert "drift, busy" in text
    assert "no setting differs, only the runs" in text


def test_what_differs_beside_the_settings_is_named(compare, compare_as_json, write_runs):
    a = write_runs("a", *RATES)
    write_runs("a", 98.0, minutes=[15], facts={"versions": {"ray": "3"}})
    b = write_runs(
        "b",
        *SLOWER,
        88.0,
        facts={
            "versions": {"torch": "2.8.0", "diffusers": None},
            "git": {"commit": "1" * 40, "dirty": True},
            "environment": {"LD_PRELOAD": "/lib/libjemalloc.so"},
            "workload": {"weights": "loaded"},
            "origin": {"lr": "flag"},  # to the value that it has by default
        },
    )
    found = compare_as_json(a, b)
    assert (found["rows"][0]["verdict"], found["compared"]) == ("slower", {})
    assert found["other_differences"] == {
        "git_commit": [make_record()["git"]["commit"], "1" * 40],
        "version of torch": ["2.7.0", "2.8.0"],
        "version of diffusers": ["0.39.0", "not installed"],
        "version of ray": ["not told, 3", "not told"],  # within a side
        "variable LD_PRELOAD": ["not set", "/lib/libjemalloc.so"],
        "uncommitted changes": ["false", "true"],
        "weights of the model": ["random", "loaded"],
    }
    assert "Also different: git_commit" in compare(a, b)
    # Two checkouts with changes may not be the same.
    dirty = [write_runs(name, *RATES, facts={"git": {"dirty": True}}) for name in ("c", "d")]
    assert "Both sides had uncommitted changes" in compare(*dirty)


# What is refused.


def rows_of(**columns):
    return [{"num_gpus": gpus, "images_per_second": 10 * gpus, **columns} for gpus in (8, 16)]


def of_sizes(*micro_batches):
    return [row for size in micro_batches for row in rows_of(micro_batch=size)]


@pytest.mark.parametrize(
    ("ours", "theirs", "value", "flag"),
    [
        (rows_of(latents="online"), rows_of(latents="subject"), "online and subject", "--allow l"),
        (
            rows_of(latents="online"),
            [*rows_of(latents="moments"), *rows_of(latents="precomputed")],
            *("online and moments, precomputed", "--allow latents"),
        ),
        (rows_of(image_size=256), rows_of(image_size=512), "256 and 512", "--allow image_size"),
        (rows_of(precision="a"), rows_of(precision="b"), "a and b", "--allow precision"),
        (rows_of(model="sd1"), rows_of(model="sd2"), "sd1 and sd2", "--allow model"),
        (rows_of(latents="online"), rows_of(), "b.csv", "--allow latents"),
        (rows_of(), rows_of(image_size=512), "a.csv", "--allow image_size"),
        (of_sizes(4, 8), of_sizes(16), "micro_batch: 4, 8 and 16", "--between micro_batch"),
        ([*rows_of(source="x"), *rows_of(source="y")], rows_of(), "x and y", "--where source"),
    ],
)
def test_different_work_is_not_compared_unless_allowed(write_table, ours, theirs, value, flag):
    error = refusal_of("compare", write_table("a.csv", *ours), write_table("b.csv", *theirs))
    assert error.value.endswith(value) and flag in error.flag


def test_what_may_be_compared_nevertheless(compare, write_table):
    a, b = write_table("a.csv", *rows_of(latents="a")), write_table("b.csv", *rows_of(latents="b"))
    assert "compared: latents: a -> b" in compare(a, b, "--allow", "latents")
    silent = write_table("silent.csv", *rows_of())
    text = compare(a, silent, "--allow", "latents")
    assert "1.00x" in text and f"as {silent} lacks them: latents" in text
    # Measured rows may have several sources.
    rows = [*rows_of(kind="measured", source="x"), *rows_of(kind="measured", source="y")]
    assert "2 and 1" in compare(write_table("runs.csv", *rows), silent)
    # Rows of two micro-batches are no runs of one configuration.
    a, b = write_table("a.csv", *of_sizes(4, 8)), write_table("b.csv", *of_sizes(16))
    error = refusal_of("compare", a, b, "--between", "micro_batch")
    assert (error.value, error.flag) == ("4 and 8", "--where micro_batch=...")


SCALING = "results/quoted/aws_p5_scaling.csv"
SINGLE = "results/quoted/aws_p4de_p5_single_node.csv"
MLPERF = "results/quoted/mlperf_training_sd2.csv"
MILABENCH = "results/quoted/milabench_diffusion.csv"


@pytest.mark.parametrize(
    ("arguments", "flag", "value", "allowed"),
    [
        ([SCALING], "A B or --between", SCALING, "--between gpu"),
        (["a.csv", "b.csv"], "the path given", "a.csv", ""),
        (["tests/assets", "tests/assets"], "the path given", "tests/assets", "record.json"),
        ([SCALING] * 3, "A B or --between", f"{SCALING} {SCALING} {SCALING}", ""),
        ([SCALING, SCALING, "--baseline", "A"], "A B or --between", f"{SCALING} {SCALING}", ""),
        ([SCALING, SCALING, "--where", "x"], "--where", "x", "COLUMN=VALUE"),
        ([SCALING, SCALING], "A B or --where", f"{SCALING} and {SCALING}", ""),
        ([MILABENCH, "--between", "num_gpu"], "--between", "num_gpu", "num_gpus"),
        ([MILABENCH, "--between", "gpu", "--baseline", "h300"], "--baseline", "h300", "H200"),
        ([MILABENCH, "--between", "gpu", "--baseline", "H"], "--baseline", "H", "H100"),
        ([MLPERF, "--between", "gpu"], "--baseline and --candidate", [], "H100"),
        ([MLPERF, "--where", "gpu=A100"], "--where", "A100", "H100"),
        ([MLPERF, "--where", "gp=H100"], "--where", "gp", "gpu"),
        ([SINGLE, "--between", "gpu", "--out", "no/folder"], "--out", "no/folder", ""),
    ],
)
def test_what_cannot_be_compared_is_refused(
    monkeypatch, repository, arguments, flag, value, allowed
):
    monkeypatch.chdir(repository)
    error = refusal_of("compare", *arguments)
    assert (error.flag, error.value) == (flag, value)
    assert allowed in error.allowed


# The gate.


@pytest.mark.parametrize(
    ("baseline_rates", "rates", "reason"),
    [
        ([100, 100.1, 99.9], [90, 90.1, 89.9], "slower than allowed"),  # 10 % slower, and sure
        ([100, 100.1, 99.9], [96, 96.1, 95.9], ""),  # 4 %
        ([100, 110, 90], [90, 99, 81], ""),  # 10 % and anything: not shown
        ([100, 100.1, 99.9], [110, 110.1, 109.9], ""),
        ([100], [200], "not tested: the only row (n=1 and n=1)"),
        ([100, 101, 99], [200], "not tested: the only row (n=3 and n=1)"),
    ],
)
def test_fail_if_slower(gate, write_runs, baseline_rates, rates, reason):
    a = write_runs("a", *map(float, baseline_rates))
    b = write_runs("b", *map(float, rates), lr=1.0)
    for share in ("5%", "0.05"):
        code, message = gate(a, b, share=share)
        assert code == bool(reason)
        assert reason in message and bool(message) == bool(reason)


def test_a_candidate_without_a_figure_does_not_pass(gate, write_runs):
    a = write_runs("a", 100.0, 100.1, batch_size=2)
    write_runs("a", 100.0, batch_size=4)
    b = write_runs("b", 100.0, 100.1, batch_size=2)
    write_runs("b", 100.0, batch_size=4, status="oom")
    code, message = gate(a, b)
    assert (code, message.count("--fail_if_slower: ")) == (1, 1)
    assert "no figure of the candidate: global_batch 4" in message
    # Without any row on both sides it is bad input.
    other = write_runs("other", 100.0, 100.1, batch_size=8)
    failed = write_runs("failed", 1.0, batch_size=2, status="oom")
    for b, what in ((other, "no configuration is on both sides"), (failed, "1 x oom")):
        code, message = gate(a, b)
        assert code == 2 and what in message


# What a record may say, and how often it counts.


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ('"images_per_second": 1234.5', '"images_per_second": NaN', "$.summary.images_per_second"),
        ('"images_per_second": 1234.5', '"images_per_second": 0', "$.summary.images_per_second"),
        ('"num_cpu_cores": 2', '"num_cpu_cores": -2', "$.machine.num_cpu_cores"),
        ('"summary": {', '"summary": null, "more": {', "$"),
        ('"started_utc": "2026', '"started_utc": "yesterday', "started_utc of 2026"),
    ],
)
def test_a_record_that_breaks_its_schema_is_refused(capsys, gate, write_runs, old, new, path):
    a, b = write_runs("a", *RATES), write_runs("b", 1234.5, *RATES[1:])
    text = file_of(b).read_text()
    assert text.count(old) == 1
    file_of(b).write_text(text.replace(old, new))
    code, message = gate(a, b)
    assert code == 1
    assert message.startswith("left out: ") and path in message
    assert f"not judged: 1 x record that cannot be read in {b}" in message


def test_copies_of_a_run_are_one_run(compare, gate, write_runs):
    a, b = write_runs("a", 100.0, 100.1, 99.9), write_runs("b", 100.0)
    for number in range(4):
        shutil.copytree(file_of(b).parent, b / f"copy-{number}")
    assert f"Left out of {b}: 4 x copy of a run that is counted." in compare(a, b)
    assert "n=3 and n=1" in gate(a, b)[1]
    # Two contents under one run id are no copies. Files are read in the order of their names.
    record = json.loads(file_of(b).read_text())
    record["summary"]["images_per_second"] = 200.0
    (b / "copy-0" / "record.json").write_text(json.dumps(follow_rate(record)))
    assert refusal_of("compare", a, b).value == f"{record['run_id']}: 200.0 and 100.0"


def test_a_run_on_both_sides_is_refused(repository, tmp_path, write_runs):
    a, b = write_runs("a", *RATES), write_runs("b", 100.0, 100.1)
    (tmp_path / "link").symlink_to(a)
    for other in (a, tmp_path / "link"):
        assert refusal_of("compare", a, other, "--fail_if_slower", "3%").flag == "A B or --where"
    shutil.copytree(file_of(a).parent, b / "from-a")
    shared = json.loads(file_of(a).read_text())["run_id"]
    assert refusal_of("compare", a, b).value == shared
    # A published table has the runs of the records that it was made from.
    table, runs = (repository / "results" / name for name in ("throughput.csv", "runs"))
    assert (runs / refusal_of("compare", table, runs, "--where", "kind=measured").value).is_dir()


def run_row(name, rate, started_utc="2026-11-21T05:48:24+00:00"):
    return {
        **{"source": name, "kind": "measured"},
        **{"started_utc": started_utc, "images_per_second": rate},
    }


def test_a_run_twice_in_a_table_counts_once(gate, write_table):
    a = write_table("a.csv", run_row("a1", 10), run_row("a2", 11))
    b = write_table("b.csv", *[run_row("b1", 10)] * 5)
    assert "n=2 and n=1" in gate(a, b)[1]
    write_table("b.csv", run_row("b1", 10), run_row("b1", 11))
    assert refusal_of("compare", a, b).value == "b1: 10 and 11"


# Outputs.


def test_hostile_names_survive_csv_and_json(capsys, compare_as_json, write_table):
    tables = [
        write_table(
            f"{name}.csv",
            {"gpu": gpu, "note": HOSTILE, "micro_batch": 4, "images_per_second": 10},
            {"gpu": gpu, "note": "plain", "micro_batch": 4, "images_per_second": 20},
            {"gpu": gpu, "note": f"+{name}", "micro_batch": 4, "images_per_second": 30},
        )
        for name, gpu in (("a", HOSTILE), ("b", "|H100|"))
    ]
    assert compare_as_json(*tables)["rows"][0]["note"] == HOSTILE

    def output(form):
        assert main(["compare", *map(str, tables), "--format", form]) == 0
        return capsys.readouterr().out

    rows = list(csv.DictReader(io.StringIO(output("csv"), newline="")))
    assert [row["note"] for row in rows] == [f"'{HOSTILE}", "plain", "'+a", "'+b", ""]
    assert not any(cell.startswith(("=", "+")) for row in rows for cell in row.values())
    text = output("terminal")
    assert "\x1b" not in text
    assert "=cmd|' /C calc'!A0 <script>alert(1)</script> \u4e2d\u6587 ?[2J" in text
    markdown = output("markdown")
    assert "<script>" not in markdown and "=cmd\\|' /C calc'!A0 &lt;script&gt;" in markdown
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_the_comparison_is_written_to_a_file(compare, repository, tmp_path):
    out = tmp_path / "comparison.txt"
    arguments = (repository / SINGLE, "--between", "gpu")
    assert compare(*arguments, "--out", out) == f"wrote {out}"
    assert " ".join(out.read_text().split()) == compare(*arguments)


# When the runs were made.


@pytest.mark.parametrize(
    ("minutes", "other_minutes", "num_occasions", "verdict"),
    [
        ((0, 10, 20), (5, 15, 25), (3, 3), "slower"),  # in turn
        ((0, 15, 20), (5, 10, 25), (3, 3), "slower"),  # in rounds: A B, B A, A B
        ((0, 2000, 4000), (1000, 3000, 5000), (3, 3), "slower"),  # in turn, on days
        ((0, 100, 200), (1000, 1100, 1200), (3, 3), "slower"),  # three occasions of each
        # A, hours later B and B, hours later A and A, hours later B.
        ((0, 1000, 1005), (500, 505, 1500), (2, 2), "slower"),
        ((0, 5, 10), (15, 20, 25), (1, 1), APART),  # one after the other
        ((0, 5, 10), (360, 365, 370), (1, 1), APART),  # and hours later
        ((0, 5, 10), (360, 720, 1080), (1, 3), APART),  # one occasion against three
        ((0, 65, 130), (200, 201, 202), (3, 1), APART),  # three against one
    ],
)
def test_sides_measured_apart_have_no_verdict(
    compare, compare_as_json, gate, write_runs, minutes, other_minutes, num_occasions, verdict
):
    a = write_runs("a", *RATES, minutes=minutes)
    b = write_runs("b", *SLOWER, minutes=other_minutes)
    row = compare_as_json(a, b)["rows"][0]
    assert row["verdict"] == verdict
    assert (row["num_baseline_occasions"], row["num_candidate_occasions"]) == num_occasions
    assert row["ratio"] == pytest.approx(0.9, abs=0.01)
    assert (row["ratio_low"] is None) == (verdict == APART)
    text = compare(a, b)
    assert ("Runs of one occasion are one sample" in text) == (num_occasions != (3, 3))
    if verdict == APART:
        assert row["detectable_percent"] is None
        assert "Measured apart" in text and "repeat N --against" in text
        assert gate(a, b)[0] == 1


def test_a_pause_is_counted_from_the_end_of_a_run(compare_as_json, write_runs):
    # Runs of 55 minutes with 60 minutes between them, and the others with 61.
    facts = {"duration_s": 55 * 60.0}
    a = write_runs("a", 100.0, 101.0, minutes=(0, 115), facts=facts)
    b = write_runs("b", 90.0, 91.0, minutes=(1000, 1116), facts=facts)
    row = compare_as_json(a, b)["rows"][0]
    assert (row["num_baseline_occasions"], row["num_candidate_occasions"]) == (1, 2)


def test_the_occasion_is_the_sample_where_there_are_several(compare, compare_as_json, write_runs):
    # Means of the logs of two runs each: log 100 and log 104, log 110 and log 112.
    rates = (99.0, 100**2 / 99, 103.0, 104**2 / 103)
    a = write_runs("a", *rates, minutes=(0, 5, 300, 305))
    rates = (110.0, 110.0, 111.0, 112**2 / 111)
    b = write_runs("b", *rates, minutes=(10, 15, 310, 315))
    row = compare_as_json(a, b)["rows"][0]
    reference = stats.ttest_ind(
        [math.log(110), math.log(112)], [math.log(100), math.log(104)], equal_var=False
    ).confidence_interval(0.95)
    assert row["ratio"] == pytest.approx(math.sqrt(110 * 112 / (100 * 104)))
    assert row["ratio_low"] == pytest.approx(math.exp(reference.low))
    assert row["ratio_high"] == pytest.approx(math.exp(reference.high))
    # The ratio is that of the occasions without a verdict, too.
    c = write_runs("c", 90.0, 90.0, 81.0, minutes=(300, 305, 600))
    d = write_runs("d", 100.0, 101.0, minutes=(0, 5))
    row = compare_as_json(d, c)["rows"][0]
    assert row["ratio"] == pytest.approx(math.sqrt(90 * 81 / (100 * 101)))
    assert row["verdict"] == APART
    assert "n occasions baseline" in compare(d, c) and "2 and 3 1 and 2" in compare(d, c)


def test_two_machines_share_no_occasion(compare, compare_as_json, write_runs):
    other = {"machine": {"device_name": "AMD EPYC"}}
    a, b = write_runs("a", *RATES), write_runs("b", *SLOWER, facts=other)
    assert compare_as_json(a, b)["rows"][0]["verdict"] == APART
    assert "let the sides take turns" not in compare(a, b)
    for day in (1, 2, 3):
        minutes = [1440 * day + 5 * index for index in range(3)]
        write_runs("a", *RATES, minutes=minutes)
        write_runs("b", *SLOWER, minutes=minutes, facts=other)
    row = compare_as_json(a, b)["rows"][0]
    assert (row["num_baseline_runs"], row["num_baseline_occasions"]) == (12, 4)
    assert row["verdict"] == "slower"


@pytest.mark.parametrize(
    ("times", "other_times", "verdict"),
    [
        ((None,) * 3, (None,) * 3, APART),
        (  # of any zone, in turn, ten minutes apart
            ("2026-11-23T12:00:00Z", "2026-11-23T12:20:00Z", "2026-11-23T12:40:00Z"),
            ("2026-11-23T13:10:00+01:00", "2026-11-23T12:30:00", "2026-11-23T07:50:00-05:00"),
            "slower",
        ),
    ],
)
def test_tables_may_tell_times(compare_as_json, write_table, times, other_times, verdict):
    a, b = (
        write_table(f"{name}.csv", *(run_row(f"{name}{rate}", rate, at) for rate, at in rows))
        for name, rows in (
            ("a", zip(RATES, times, strict=True)),
            ("b", zip(SLOWER, other_times, strict=True)),
        )
    )
    assert compare_as_json(a, b)["rows"][0]["verdict"] == verdict
    b = write_table("c.csv", run_row("c", 1, "yesterday"))
    error = refusal_of("compare", a, b)
    assert (error.value, error.flag) == ("yesterday", f"started_utc of {b}")


@pytest.mark.parametrize(
    ("product", "setting", "verdict", "ratio"),
    [
        (0.381, {}, "slower", None),
        (0.379, {}, "not comparable: the machine changed", 0.9475),
        (0.379, {"lr": 1.0}, "not comparable: the machine changed", 0.9475),
        (0.8, {"precision": "fp32"}, "slower", 2.0),  # another product
    ],
)
def test_a_matrix_product_that_changed_takes_the_verdict_back(
    compare, compare_as_json, write_runs, product, setting, verdict, ratio
):
    a = write_runs("a", *RATES, facts={"summary": {"matmul_tflops": 0.400}})
    b = write_runs("b", *SLOWER, facts={"summary": {"matmul_tflops": product}}, **setting)
    row = compare_as_json(a, b, "--allow", "precision")["rows"][0]
    assert (row["verdict"], row["matrix_product_ratio"]) == (
        verdict,
        ratio and pytest.approx(ratio),
    )
    text = compare(a, b, "--allow", "precision")
    assert ("The machine changed: " in text) == ("machine" in verdict)


def test_the_change_that_would_have_been_found_is_told(compare, compare_as_json, write_runs):
    # Logs of 100 e^d, 100, 100 e^-d on both sides, d = 0.01: variance d^2, of the difference
    # 2 d^2 / 3 on 4 degrees of freedom, 10/3 without the share of half a run.
    rates = [100 * math.exp(deviation) for deviation in (0.01, 0.0, -0.01)]
    a, b = write_runs("a", *rates), write_runs("b", *rates)
    row = compare_as_json(a, b)["rows"][0]
    shift = math.log1p(row["detectable_percent"] / 100) / (0.01 * math.sqrt(2 / 3))
    quantile = stats.t.ppf(0.975, 10 / 3)
    assert stats.nct.cdf(quantile, 10 / 3, shift) == pytest.approx(0.2, abs=1e-6)
    told = f"a change of {row['detectable_percent']:.1f} % would be found in 80 % of comparisons"
    assert told in compare(a, b)
    # Two runs on each side cannot tell.
    a, b = write_runs("c", 100.0, 101.0), write_runs("d", 90.0, 91.0)
    assert compare_as_json(a, b)["rows"][0]["detectable_percent"] is None
    assert "3 runs or more on each side can tell" in compare(a, b)
    # Nor is an interval shown that is too wide to use.
    a, b = write_runs("e", 100.0, 110.0), write_runs("f", 100.0, 104.0)
    low = compare_as_json(a, b)["rows"][0]["ratio_low"]
    assert low < 0.75
    text = compare(a, b)
    assert "too few runs" in text and f"{low:.3f}" not in text


def test_rows_that_share_occasions_have_no_interval_of_their_mean(compare_as_json, write_runs):
    def measure(name, minutes, other_minutes):
        for batch in (2, 4):
            a = write_runs(f"{name}/a", *RATES, 98.0, minutes=minutes, batch_size=batch)
            b = write_runs(f"{name}/b", *SLOWER, 88.0, minutes=other_minutes, batch_size=batch)
        return compare_as_json(a, b)["rows"]

    *_, mean = measure("in-turn", (0, 10, 20, 30), (5, 15, 25, 35))
    assert mean["verdict"] == "slower"
    *rows, mean = measure("shared", (0, 5, 300, 305), (600, 605, 900, 905))
    assert [row["num_candidate_occasions"] for row in rows] == [2, 2]
    assert None not in [row["ratio_low"] for row in rows]
    assert (mean["verdict"], mean["ratio_low"]) == ("not tested", None)
