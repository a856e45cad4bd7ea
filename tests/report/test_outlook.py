"""What a run's figures mean beside published ones, and the commands that follow."""

from __future__ import annotations

import pytest

from sdbench.record.row import format_csv, make_row
from sdbench.report import outlook
from tests.report.results_folder import make_gpu_record, make_record

COMMAND = ["composer", "-n", "2", "benchmark.py", "--lr", "1e-4", "--results_dir", "my runs"]
RUN = "runs/20261121T054824Z"


@pytest.fixture
def describe(tmp_path, monkeypatch):
    """Describes a run beside rows of results/throughput.csv; None: there is no such folder.

    An installed package has no results/runs beside it.
    """
    monkeypatch.setattr(outlook, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(outlook, "THROUGHPUT", tmp_path / "results/throughput.csv")
    monkeypatch.chdir(tmp_path)

    def describe(record, rows, command=COMMAND, is_installed=False):
        if rows is not None:
            (tmp_path / "results" / ("" if is_installed else "runs")).mkdir(parents=True)
            columns = dict.fromkeys(name for row in rows for name in row)
            table = format_csv(rows, columns=list(columns))
            (tmp_path / "results/throughput.csv").write_text(table)
        text = outlook.describe_outlook(record, tmp_path / RUN, command=command)
        meaning, _, following = text.partition("\n\nNext:\n")
        lines = [line.split("  ") for line in meaning.splitlines()]
        return {words[1]: words[-1].strip() for words in lines}, following.splitlines()

    return describe


def _published(name, rate, **changes):
    known = make_record(run_id=name, summary__images_per_second=rate, **changes)
    return make_row(known) | {"mfu_of_matmul_percent": rate, "images_per_second": rate}


def test_a_run_is_told_beside_the_best_of_the_same_machine_and_work(describe):
    record = make_record(run_id="mine")
    interval = {"low": 0.45, "high": 0.52, "kind": "within-run"}
    record["summary"] |= {"images_per_second": 0.5, "mfu_of_matmul_percent": 40.0}
    record["summary"]["images_per_second_interval"] = interval
    rows = [
        _published("slow", 0.4),
        _published("best", 0.8, config__precision="bf16"),
        # Faster, of other work, on another machine, and this very run.
        _published("latents", 2.0, config__latents="precomputed"),
        _published("small", 3.0, config__image_size=64),
        _published("cores", 4.0, machine__num_cpu_cores=96),
        _published("other", 5.0, machine__device_name="AMD EPYC"),
        _published("mine", 6.0),
        _published("loaded", 0.1) | {"mfu_of_matmul_percent": 140.0},
    ]
    meaning, following = describe(record, rows)
    assert meaning == {
        "beside published": "62 % of the best of 3 figures of this device and work: 0.8 images/s "
        "per device, best",
        "best MFU": "3.0 % of a matrix product on this device: sd2-base, 64 px, small",
        "how sure": "within 10 % by the steps of this run; a second run may differ by more: "
        "repeat it",
    }
    assert following == [
        "  python -m sdbench repeat 5 -- composer -n 2 benchmark.py --lr 1e-4",
        f"  python -m sdbench compare results/runs/best {RUN} --allow precision",
        f"  python -m sdbench publish {RUN}",
    ]


def test_a_gpu_is_found_among_quoted_figures_by_its_chip_and_memory(describe):
    record = make_gpu_record(machine__device_name="NVIDIA A100-SXM4-80GB")
    record["summary"] |= {"images_per_second": 160.0, "images_per_second_interval": None}
    figure = {"kind": "quoted", "source": "AWS", "image_size": 512, "latents": "online"}
    rows = [
        figure | {"gpu": gpu, "num_gpus": number, "images_per_second": rate}
        for gpu, number, rate in (
            ("A100-SXM4-80GB (p4de.24xlarge)", 8, 128.0),
            ("A100", 1, 25.0),
            ("A100-40GB", 8, 900.0),
            ("H100-SXM5-80GB (p5.48xlarge)", 8, 900.0),
        )
    ]
    meaning, following = describe(record, [make_row(make_record()), *rows], command=None)
    assert meaning == {
        "beside quoted": "80 % of the best of 2 figures of this device and work: 25 images/s per "
        "device, AWS",
        "beside published": "no run of this work on NVIDIA A100-SXM4-80GB is published",
        "how sure": "not at all: one run of too few steps for an interval",
    }
    assert following == [
        "  python -m sdbench report runs --out my.html",
        f"  python -m sdbench publish {RUN}",
    ]


def test_an_installed_package_offers_no_command_on_runs_that_it_lacks(describe):
    rows = [_published("best", 0.8)]
    meaning, following = describe(make_record(run_id="mine"), rows, is_installed=True)
    assert meaning["beside published"].endswith("0.8 images/s per device, best")
    assert [line.split()[3] for line in following] == ["repeat", "report"]


def test_without_results_nothing_is_said_of_other_runs(describe):
    meaning, following = describe(make_record(), None)
    assert list(meaning) == ["how sure"]
    assert [line.split()[3] for line in following] == ["repeat", "report"]
