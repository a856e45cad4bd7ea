"""The committed tables are what the committed records give."""

from __future__ import annotations

from sdbench.measure.record import load_record
from sdbench.report.publish import (
    BEGIN_MARKER,
    END_MARKER,
    format_csv,
    format_markdown,
    rebuild_tables,
)


def published_records(results):
    return [load_record(path) for path in sorted((results / "runs").glob("*/record.json"))]


def test_the_committed_tables_are_those_of_the_committed_records(repository):
    results = repository / "results"
    records = published_records(results)
    assert (results / "throughput.csv").read_text() == format_csv(records)
    table = f"{BEGIN_MARKER}\n{format_markdown(records)}\n{END_MARKER}"
    assert table in (results / "README.md").read_text()


def test_rebuilding_keeps_the_text_around_the_table(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN_MARKER}\nold table\n{END_MARKER}\nafter\n")
    rebuild_tables(tmp_path)
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN_MARKER}\n| device |")
    assert text.endswith(f"{END_MARKER}\nafter\n")
    assert "old table" not in text


def make_record(rate, **config):
    values = {
        "image_size": 256,
        "preset": "fast",
        "precision": "amp_bf16",
        "use_ema": False,
        "batch_size": 2,
        "device_train_microbatch_size": 2,
    }
    return {
        "machine": {"device_name": "CPU"},
        "ranks": {"world_size": 1},
        "workload": {"architecture": "sd2-base"},
        "config": {**values, **config},
        "summary": {
            "images_per_second": rate,
            "images_per_second_interval": None,
            "step_time_p50_s": 2 / rate,
            "peak_memory_gib": 16.0,
            "num_measured_steps": 5,
        },
    }


def test_three_runs_of_one_configuration_become_one_line_with_an_interval():
    # Logs of 0.5, 1, 2 have sd 0.693147: exp(+-4.302653 x 0.693147 / sqrt(3)) = 0.1787 and 5.595.
    table = format_markdown([make_record(0.5), make_record(1.0), make_record(2.0)])
    (line,) = table.splitlines()[2:]
    assert "| 3 | median 1 (0.1787 to 5.595, between-runs) | 2 | 16.0 |" in line


def test_another_setting_is_another_line():
    table = format_markdown([make_record(1.0), make_record(1.0, use_ema=True)])
    assert len(table.splitlines()) == 4
    assert "5 measured steps, 10 needed" in table
