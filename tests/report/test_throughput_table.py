"""Tables of throughput: the grouping of runs and figures, and the cells of a row."""

from __future__ import annotations

import pytest

from sdbench.record.row import make_row
from sdbench.report.quoted import load_figures, make_other_tables, make_seed_table
from sdbench.report.tables import MAX_ROWS, Column, Table, make_cell, to_markdown
from sdbench.report.throughput_table import make_tables
from tests.report.results_folder import RESULTS, make_gpu_record, make_record, rows_of


def cells(table, *, row=0):
    return rows_of(table)[row]


def with_rate(rate, **changes):
    return make_record(
        summary__images_per_second=rate, summary__images_per_second_interval=None, **changes
    )


def test_three_runs_of_one_configuration_become_one_row_with_an_interval():
    # Logs of 0.5, 1, 2 have sd 0.693147: exp(+-4.302653 x 0.693147 / sqrt(3)) = 0.1787 and 5.595.
    (table,) = make_tables([with_rate(0.5), with_rate(1.0), with_rate(2.0)])
    assert len(table.rows) == 1
    row = cells(table)
    assert row["runs"] == "3"
    assert row["images/s (95 % interval)"] == "median 1 (0.1787 to 5.595, between-runs)"
    assert row["source"] == "2026-11-21, code 977fb62"


def test_two_runs_keep_the_interval_of_each():
    (table,) = make_tables([make_record(), with_rate(2.0)])
    assert cells(table)["images/s (95 % interval)"] == (
        "0.4706 (0.4565 to 0.4857, 95 % within-run); 2 (no interval: 10 measured steps, 10 needed)"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"config__use_ema": True},
        {"config__device_train_microbatch_size": 1},
        {"config__precision": "fp32"},
        {"ranks__world_size": 2},
        {"machine__device_name": "another"},
        {"config__attention": "math", "origin__attention": "flag"},
        {"config__data_format": "mds"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_setting_is_another_row(change):
    (table,) = make_tables([make_record(), make_record(**change)])
    assert len(table.rows) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"config__attention": "eager"},
        {"config__optimizer": "adamw"},
        {"config__remote": "s3://another/data-set"},
        {"machine__num_cpu_cores": 64},
        {"ranks__num_nodes": 2},
    ],
)
def test_what_may_change_a_step_keeps_runs_apart(change):
    (table,) = make_tables([make_record(), make_record(**change)])
    assert len(table.rows) == 2


def test_how_a_run_was_measured_does_not_keep_runs_apart():
    longer = make_record(config__measure_batches=40, config__seed=18, config__results_dir="other")
    (table,) = make_tables([make_record(), longer])
    assert len(table.rows) == 1


def test_a_whole_number_is_the_same_setting_with_and_without_a_point():
    (table,) = make_tables([make_record(config__lr=1), make_record(config__lr=1.0)])
    assert len(table.rows) == 1


def test_what_the_user_chose_beyond_the_columns_is_told():
    record = make_record(
        config__attention="math", origin__attention="file", config__data_format="mds"
    )
    (table,) = make_tables([record])
    assert cells(table)["other settings"] == "attention math, num_workers 0, data_format mds"


def test_engines_are_told_apart():
    (table,) = make_tables([make_record(config__engine=name) for name in ("torch", "ray")])
    assert [cells(table, row=row)["engine"] for row in range(2)] == ["torch", "ray"]


def test_encoders_beside_the_training_have_a_table_of_their_own():
    beside = make_record(config__engine="ray", config__online_preprocessing=True)
    in_step, beside_table = make_tables([make_record(), beside])
    assert (in_step.name, beside_table.name) == ("256px-online", "256px-beside")


def test_strong_and_weak_scaling_are_told_apart():
    def run(num_devices, batch_size, **changes):
        changes |= {"ranks__world_size": num_devices, "ranks__num_nodes": num_devices}
        return make_record(config__batch_size=batch_size, **changes)

    runs = [run(1, 8), run(2, 8), run(2, 16), run(4, 32), run(4, 4), run(8, 64, config__lr=0.5)]
    (table,) = make_tables(runs)
    scalings = [cells(table, row=row).get("scaling") for row in range(len(runs))]
    # 8 images on 1 and 2 devices; 8 a device on 1, 2 and 4. The last two stand alone.
    assert scalings == ["strong, weak", "strong", "weak", "weak", "", ""]
    (alone,) = make_tables(runs[-1:])
    assert "scaling" not in cells(alone)


@pytest.mark.parametrize(
    "change",
    [
        {"config__latents": "precomputed"},
        {"config__image_size": 512},
        {"config__task": "dreambooth"},
        {"config__online_preprocessing": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_work_per_image_is_another_table(change):
    tables = make_tables([make_record(), make_record(**change)])
    assert [len(table.rows) for table in tables] == [1, 1]
    assert tables[0].caption == "256 px, the encoders run in the step (online)"


def test_flags_are_told_in_words():
    record = make_record(summary__flags=["drift", "shared"], git__dirty=True)
    (table,) = make_tables([make_record(), record])
    assert cells(table)["notes"] == (
        "drift: the step time had not settled when the window ended; "
        "shared: other processes computed on the GPU; the code had uncommitted changes"
    )


def test_quoted_and_modelled_figures_stand_beside_measured_ones_of_the_same_work():
    figure = {"image_size": 256, "latents": "online", "gpu": "B200", "num_gpus": 4}
    quoted = {**figure, "kind": "quoted", "images_per_second": 1001.25, "source": "a paper"}
    modelled = {
        **figure,
        "kind": "modelled",
        "images_per_second": 2000.0,
        "images_per_second_low": 1900.0,
        "images_per_second_high": 2100.0,
    }
    other = {**quoted, "latents": "precomputed"}
    first, second = make_tables([make_record()], [other, quoted, modelled])
    assert [row[first.kind_column].text for row in first.rows] == ["measured", "quoted", "modelled"]
    assert [row[second.kind_column].text for row in second.rows] == ["quoted"]
    row = cells(first, row=1)
    assert (row["images/s (95 % interval)"], row["images/s per device"]) == ("1001.25", "250.3")
    assert (row["source"], row["EMA"]) == ("a paper", "n/a")
    assert cells(first, row=2)["images/s (95 % interval)"] == "2000 (1900 to 2100)"


def test_figures_with_the_encoders_in_the_step_never_share_a_table_with_others():
    quoted = load_figures(RESULTS / "quoted", kind="quoted")[0]
    figures = [row for rows in quoted.values() for row in rows if row.get("images_per_second")]
    tables = {table.name: table for table in make_tables([], figures)}
    assert {name: len(table.rows) for name, table in tables.items()} == {
        "512px-online": 38,  # 14 + 12 of seed 003, 6 of milabench, 6 of diffusion-benchmark
        "512px-moments": 4,  # MLPerf 3.1
        "512px-precomputed": 24,  # MLPerf 4.0 to 5.0: 19, mosaicml/diffusion: 5
        "256px-precomputed": 5,  # mosaicml/diffusion
    }


def test_the_seeds_table_is_reproduced():
    table = make_seed_table(load_figures(RESULTS / "quoted", kind="quoted")[0])
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["4", "8", "yes", "142.69", "189.28", "1.33x", "1.32x", "n=1, not tested"],
        ["8", "8", "yes", "173.89", "289.19", "1.66x", "1.66x", "n=1, not tested"],
        ["12", "8", "yes", "185.18", "329.55", "1.78x", "1.78x", "n=1, not tested"],
        ["16", "8", "yes", "192.85", "353.81", "1.83x", "1.83x", "n=1, not tested"],
        ["20", "8", "yes", "197.47", "358.68", "1.82x", "1.82x", "n=1, not tested"],
        ["20", "8", "no", "197.9", "361.15", "1.82x", "1.83x", "n=1, not tested"],
        ["32", "8", "yes", "204.22", "385.31", "1.89x", "1.89x", "n=1, not tested"],
    ]


def test_what_was_measured_under_the_seeds_conditions_stands_beside_it():
    runs = [
        make_gpu_record(
            config__device_train_microbatch_size=4,
            config__num_workers=8,
            summary__images_per_second=300.0,
        ),
        make_gpu_record(ranks__world_size=16),
        make_record(),
    ]
    quoted = load_figures(RESULTS / "quoted", kind="quoted")[0]
    table = make_seed_table(quoted, map(make_row, runs))
    assert [row[-1].text for row in table.rows] == ["300", *["n/a"] * 6]
    assert table.columns[-1].name == "measured: 8 x NVIDIA H200, preset fast, amp_bf16, images/s"


def test_days_and_costs_of_others_are_shown_as_they_are():
    tables = make_other_tables(load_figures(RESULTS / "quoted", kind="quoted")[0])
    assert [table.caption for table in tables] == [
        "mosaicml_diffusion_a100_cost.csv, quoted",
        "mosaicml_diffusion_benchmark_a100_cost.csv, quoted",
        "other_seed_figures.csv, quoted",
    ]
    assert cells(tables[1])["days_to_train"] == "258.83"


def test_a_very_long_table_ends_with_how_much_is_left():
    rows = [[make_cell(number)] for number in range(MAX_ROWS + 5)]
    lines = to_markdown(Table("long", "", [Column("n", is_number=True)], rows)).splitlines()
    assert (len(lines), lines[-1]) == (MAX_ROWS + 4, "5 more rows are left out.")
