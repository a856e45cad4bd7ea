"""Tables of throughput: the grouping of runs and figures, and the cells of a row."""

from __future__ import annotations

import pytest

from sdbench.analysis.ladder import read_configurations
from sdbench.analysis.quoted import load_figures, make_seed_table
from sdbench.analysis.throughput_table import make_headline_table, make_tables
from sdbench.record.row import make_row
from sdbench.report.tables import to_captioned_markdown
from sdbench.report.terminal import list_figures
from tests.report.results_folder import (
    RESULTS,
    make_gpu_record,
    make_recipe,
    make_record,
    rows_of,
)


def with_rate(rate, **changes):
    return make_record(
        summary__images_per_second=rate, summary__images_per_second_interval=None, **changes
    )


def test_three_runs_of_one_configuration_have_an_interval_and_two_keep_that_of_each():
    # Logs of 0.5, 1, 2 have sd 0.693147: exp(+-4.302653 x 0.693147 / sqrt(3)) = 0.1787 and 5.595.
    (table,) = make_tables([with_rate(0.5), with_rate(1.0), with_rate(2.0)])
    (row,) = rows_of(table)
    assert row["runs"] == "3"
    assert row["images/s (95 % interval)"] == "median 1 (0.1787 to 5.595, between-runs)"
    assert row["source"] == "2026-11-21, code 977fb62"
    (table,) = make_tables([make_record(), with_rate(2.0)])
    assert rows_of(table)[0]["images/s (95 % interval)"] == (
        "0.4706 (0.4565 to 0.4857, 95 % within-run); 2 (no interval: 10 measured steps, 10 needed)"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"config__use_ema": True},
        {"config__device_train_microbatch_size": 1},
        {"ranks__world_size": 2},
        {"machine__device_name": "another"},
        {"config__attention": "eager"},
        {"config__remote": "s3://another/data-set"},
        {"data": {"sha256": "1" * 64, "num_files": 1, "num_bytes": 9, "made_by": [None]}},
        {"machine__num_cpu_cores": 64},
        {"ranks__num_nodes": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_setting_is_another_row(change):
    (table,) = make_tables([make_record(), make_record(**change)])
    assert len(table.rows) == 2


def test_what_is_no_other_setting_does_not_keep_runs_apart():
    how = {"config__measure_batches": 40, "config__seed": 18, "config__results_dir": "other"}
    for changes in ([{}, how], [{"config__lr": 1}, {"config__lr": 1.0}]):
        (table,) = make_tables([make_record(**change) for change in changes])
        assert len(table.rows) == 1


def test_strong_and_weak_scaling_are_told_apart():
    def run(num_devices, batch_size, **changes):
        changes |= {"ranks__world_size": num_devices, "ranks__num_nodes": num_devices}
        return make_record(config__batch_size=batch_size, **changes)

    runs = [run(1, 8), run(2, 8), run(2, 16), run(4, 32), run(4, 4), run(8, 64, config__lr=0.5)]
    (table,) = make_tables(runs)
    scalings = [rows_of(table)[row].get("scaling") for row in range(len(runs))]
    # 8 images on 1 and 2 devices; 8 a device on 1, 2 and 4. The last two stand alone.
    assert scalings == ["strong, weak", "strong", "weak", "weak", "", ""]
    (alone,) = make_tables(runs[-1:])
    assert "scaling" not in rows_of(alone)[0]


def test_flags_are_told_in_words():
    record = make_record(summary__flags=["drift", "shared"], git__dirty=True)
    (table,) = make_tables([make_record(), record])
    assert rows_of(table)[0]["notes"] == (
        "drift: the step time had not settled when the window ended; "
        "shared: other processes computed on the GPU; the code had uncommitted changes"
    )


def test_rows_with_the_same_settings_are_told_apart_by_their_code():
    older = make_record(config__weight_decay=0.5, git__commit="abcdef1234")
    (table,) = make_tables([make_record(), older, make_record(config__precision="fp32")])
    assert [rows_of(table)[row]["configuration"] for row in range(3)] == [
        "amp_bf16, code 977fb62",
        "amp_bf16, code abcdef1",
        "fp32",
    ]


def test_a_run_that_does_not_know_a_speed_up_is_no_replicate_of_one_without_it():
    """Its null is no "none", and it has no place on the ladder."""
    unknown, without = make_recipe(), make_recipe(compile="none")
    unknown["config"]["compile"] = None
    (table,) = make_tables([unknown, without, without])
    assert [row["runs"] for row in rows_of(table)] == ["1", "2"]
    (known,) = read_configurations([unknown, without])
    assert known.runs == [without]


def test_a_figure_that_is_the_same_in_all_rows_stays_in_them():
    (table,) = make_tables([with_rate(2.0), with_rate(2.0, config__precision="fp32")])
    assert "px 256" in table.common and "images/s per device" not in table.common


def within(low, rate, **changes):
    """A run with this lower end of its interval."""
    interval = {"kind": "within-run", "low": low, "high": None}
    return make_record(
        summary__images_per_second=rate, summary__images_per_second_interval=interval, **changes
    )


def test_the_headline_of_a_machine_is_the_configuration_whose_interval_begins_highest():
    gpu = {"machine__device_type": "cuda", "machine__device_name": "NVIDIA H100"}
    on_gpu = within(50.0, 60.0, **gpu, summary__mfu_percent=41.25, summary__gpu={"power_w": 612.5})
    runs = [
        within(7.0, 8.0, workload__architecture="small", workload__num_trainable_parameters=54),
        within(0.1, 9.0, config__batch_size=8),  # the fastest, of which little is known
        within(0.4, 0.5),
        within(0.6, 0.7, config__engine="torch", ranks__world_size=2),  # of the same CPU
        within(0.3, 0.8, config__image_size=512),
        within(0.3, 0.9, config__latents="precomputed"),
        on_gpu,
        within(90.0, 99.0, **gpu, ranks__world_size=2),
    ]
    table = make_headline_table(runs)
    names = ("machine", "work", "images/s (95 % interval)", "best of")
    cpu = "1 x Intel Xeon Processor, 2 cores"
    expected = [
        ("1 x NVIDIA H100", "sd2-base, 256 px, online", "60 (50", "1"),
        ("2 x NVIDIA H100", "sd2-base, 256 px, online", "99 (90", "1"),
        (cpu, "sd2-base, 256 px, online", "0.7 (0.6", "3"),
        (cpu, "sd2-base, 512 px, online", "0.8 (0.3", "1"),
        (cpu, "sd2-base, 256 px, precomputed", "0.9 (0.3", "1"),
        (cpu, "small, 256 px, online", "8 (7", "1"),
    ]
    assert [tuple(row[name] for name in names) for row in rows_of(table)] == [
        (machine, work, f"{rate} to unbounded, 95 % within-run)", number)
        for machine, work, rate, number in expected
    ]
    first = rows_of(table)[0]
    assert (first["MFU, %"], first["power, W"]) == ("41.2", "612.5")
    assert first["configuration"] == (
        "fast, engine composer, amp_bf16, no EMA, global batch 2, micro-batch 2"
    )
    assert first["run ids"] == on_gpu["run_id"]
    assert first["command"].startswith("benchmark.py ")
    assert "command" not in to_captioned_markdown([table])


def test_the_headline_prefers_an_interval_between_runs_to_a_narrow_one_within_a_run():
    repeated = [with_rate(rate, config__batch_size=8) for rate in (5.0, 5.1, 4.9)]
    table = make_headline_table([within(9.9, 10.0), *repeated])
    (row,) = rows_of(table)
    assert row["images/s (95 % interval)"].startswith("median 5 (")


def test_the_headline_is_no_flagged_run_and_no_interval_that_says_nothing_if_another_does():
    flagged = [with_rate(rate, summary__flags=["noisy"]) for rate in (9.0, 9.1, 8.9)]
    # Logs of 0.5, 1, 2: the interval begins at 0.18 of the median.
    wide = [with_rate(rate, config__batch_size=8) for rate in (4.0, 8.0, 16.0)]
    one = within(0.8, 1.0, config__batch_size=16)
    for others, best in (([], "median 9 ("), ([wide], "median 8 ("), ([wide, [one]], "1 (0.8")):
        table = make_headline_table([*flagged, *(run for runs in others for run in runs)])
        (row,) = rows_of(table)
        assert row["images/s (95 % interval)"].startswith(best)


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
    quoted = load_figures(RESULTS / "quoted")[0]
    table = make_seed_table(quoted, map(make_row, runs))
    assert [row[-1].text for row in table.rows] == ["300", *["n/a"] * 6]
    assert table.columns[-1].name == "measured: 8 x NVIDIA H200, preset fast, amp_bf16, images/s"


@pytest.mark.parametrize(("percent", "is_shown"), [(99.5, True), (576.0, False)])
def test_a_share_of_a_disturbed_matrix_product_is_not_shown(percent, is_shown):
    record = make_record(summary__mfu_of_matmul_percent=percent, summary__matmul_tflops=0.034)
    (table,) = make_tables([record])
    headings = [column.name for column in table.columns]
    assert ("MFU of measured matmul, %" in headings) == is_shown
    printed = dict(list_figures(record))["MFU of a matrix product"]
    assert (f"{percent:.1f} %" in printed) == is_shown
    assert "0.034 TFLOP/s" in printed


def test_a_submitted_rate_is_beside_the_seeds_table_under_its_submitter():
    settings = {"config__device_train_microbatch_size": 32, "config__num_workers": 8}
    by = {"kind": "submitted", "source": "a-file", "submitter": "Ada"}
    own, theirs = (make_gpu_record(summary__images_per_second=rate, **settings) for rate in (3, 4))
    quoted = load_figures(RESULTS / "quoted")[0]
    table = make_seed_table(quoted, map(make_row, [own, theirs | {"submission": by}]))
    name = "8 x NVIDIA H200, preset fast, amp_bf16, images/s"
    assert [column.name for column in table.columns[-2:]] == [
        f"measured: {name}",
        f"submitted by Ada: {name}",
    ]
    assert [cell.value for cell in table.rows[-1][-2:]] == [3, 4]
