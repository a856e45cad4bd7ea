"""The committed tables are what the committed records give."""

from __future__ import annotations

import pytest

from sdbench.errors import ConfigError
from sdbench.measure.record import BENCHMARK, kind_of, load_record
from sdbench.report import feed_table
from sdbench.report.publish import (
    BEGIN_DATA_MARKER,
    BEGIN_MARKER,
    END_DATA_MARKER,
    END_MARKER,
    format_csv,
    format_markdown,
    rebuild_tables,
)


def test_the_committed_tables_are_those_of_the_committed_records(repository):
    results = repository / "results"
    records = [load_record(path) for path in sorted((results / "runs").glob("*/record.json"))]
    trained = [record for record in records if kind_of(record) == BENCHMARK]
    loaded = [record for record in records if kind_of(record) != BENCHMARK]
    assert (results / "throughput.csv").read_text() == format_csv(trained)
    assert (results / "data.csv").read_text() == feed_table.format_csv(loaded)
    text = (results / "README.md").read_text()
    assert f"{BEGIN_MARKER}\n{format_markdown(trained)}\n{END_MARKER}" in text
    table = feed_table.format_markdown(loaded)
    assert f"{BEGIN_DATA_MARKER}\n{table}\n{END_DATA_MARKER}" in text


def test_rebuilding_keeps_the_text_around_the_tables(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(
        f"before\n{BEGIN_MARKER}\nold table\n{END_MARKER}\n"
        f"between\n{BEGIN_DATA_MARKER}\n{END_DATA_MARKER}\nafter\n"
    )
    rebuild_tables(tmp_path)
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN_MARKER}\n| device | ranks |")
    assert f"{END_MARKER}\nbetween\n{BEGIN_DATA_MARKER}\n| device | cores |" in text
    assert text.endswith(f"{END_DATA_MARKER}\nafter\n")
    assert "old table" not in text


def test_a_readme_without_a_place_for_a_table_is_left_alone(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN_MARKER}\n{END_MARKER}\n{BEGIN_DATA_MARKER}\nafter\n")
    before = readme.read_text()
    with pytest.raises(ConfigError, match="got 'no <!-- end generated: data -->'"):
        rebuild_tables(tmp_path)
    assert readme.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


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
