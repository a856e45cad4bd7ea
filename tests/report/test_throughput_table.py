"""Tables of throughput: the grouping of runs and figures, and the cells of a row."""

from __future__ import annotations

import pytest

from sdbench.analysis.quoted import fold_by_source, load_figures, make_seed_table
from sdbench.analysis.throughput_table import make_headline_table, make_tables
from sdbench.record.row import make_row
from sdbench.report.tables import (
    Field,
    Table,
    make_cell,
    to_captioned_markdown,
    to_folded_markdown,
)
from tests.report.results_folder import RESULTS, make_gpu_record, make_record, rows_of


def cells(table, *, row=0):
    return rows_of(table)[row]


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
        {"config__engine": "torch"},
        {"config__attention": "eager"},
        {"config__optimizer": "adamw"},
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


def test_what_the_user_chose_beyond_the_columns_is_told():
    record = make_record(
        config__attention="math", origin__attention="file", config__data_format="mds"
    )
    (table,) = make_tables([record])
    assert cells(table)["other settings"] == "attention math, num_workers 0, data_format mds"


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


def test_other_work_per_image_is_another_table():
    changes = [
        {"config__latents": "precomputed"},
        {"config__image_size": 512},
        {"config__task": "dreambooth"},
        {"config__online_preprocessing": True},
    ]
    tables = make_tables([make_record(), *(make_record(**change) for change in changes)])
    assert {table.name: len(table.rows) for table in tables} == dict.fromkeys(
        ("256px-online", "256px-precomputed", "512px-online", "256px-subject", "256px-beside"), 1
    )
    assert tables[0].caption == "256 px, the encoders run in the step (online)"


def test_flags_are_told_in_words():
    record = make_record(summary__flags=["drift", "shared"], git__dirty=True)
    (table,) = make_tables([make_record(), record])
    assert cells(table)["notes"] == (
        "drift: the step time had not settled when the window ended; "
        "shared: other processes computed on the GPU; the code had uncommitted changes"
    )


def test_rows_with_the_same_settings_are_told_apart_by_their_code():
    older = make_record(config__lr_end_factor=0.5, git__commit="abcdef1234")
    (table,) = make_tables([make_record(), older, make_record(config__precision="fp32")])
    assert [cells(table, row=row)["configuration"] for row in range(3)] == [
        "amp_bf16, code 977fb62",
        "amp_bf16, code abcdef1",
        "fp32",
    ]


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
    first = cells(table)
    assert (first["MFU, %"], first["power, W"]) == ("41.2", "612.5")
    assert first["configuration"] == (
        "fast, engine composer, amp_bf16, no EMA, global batch 2, micro-batch 2"
    )
    assert first["run ids"] == on_gpu["run_id"]
    assert first["command"].startswith("benchmark.py ")
    assert "command" not in to_captioned_markdown([table])


def test_figures_of_others_are_folded_by_their_source_and_never_mix_kinds_of_work():
    figure = {"image_size": 256, "latents": "online", "gpu": "B200", "num_gpus": 4}
    paper = {**figure, "kind": "quoted", "images_per_second": 1001.25, "source": "a <paper>"}
    law = {
        **figure,
        "kind": "modelled",
        "source": "scaling predict",
        "images_per_second": 2000.0,
        "images_per_second_low": 1900.0,
        "images_per_second_high": 2100.0,
    }
    of_latents = {**paper, "latents": "precomputed", "gpu": "H100"}
    days = {"source": "a <paper>", "kind": "quoted", "gpu": "B200", "days_to_train": 12.5}
    folds = fold_by_source([("rates", [paper, of_latents]), ("days", [days]), ("law", [law])])
    assert [fold.summary for fold in folds] == [
        "a <paper>: 3 figures, B200, H100",
        "scaling predict: 1 figure, B200",
    ]
    captions = [[table.caption.partition(",")[2] for table in fold.tables] for fold in folds]
    assert captions == [
        [
            " the encoders run in the step (online)",
            " latents and text embeddings made beforehand (precomputed)",
            " quoted",
        ],
        [" the encoders run in the step (online)"],
    ]
    assert cells(folds[0].tables[0])["images/s (95 % interval)"] == "1001.25"
    assert cells(folds[1].tables[0])["images/s (95 % interval)"] == "2000 (1900 to 2100)"
    text = to_folded_markdown(folds)
    assert text.count("<details>\n<summary>") == text.count("\n\n</details>") == 2
    assert "<summary>a &lt;paper&gt;: 3 figures, B200, H100</summary>" in text


def test_a_figure_without_a_rate_is_shown_as_its_file_has_it():
    unknown = {"source": "a paper", "kind": "quoted", "gpu": "B200", "images_per_second": None}
    unknown |= {"image_size": 256, "latents": "online", "reason": "out of memory"}
    known = {**unknown, "images_per_second": 5.0, "reason": None}
    (fold,) = fold_by_source([("rates", [known, unknown])])
    assert fold.summary == "a paper: 2 figures, B200"
    assert [len(table.rows) for table in fold.tables] == [1, 1]
    assert cells(fold.tables[1])["reason"] == "out of memory"


def test_what_is_the_same_in_all_rows_stands_in_the_caption():
    columns = [
        Field(name, name, is_left=name in ("kind", "note"))
        for name in ("px", "kind", "images/s", "note")
    ]
    rows = [
        [make_cell(256), make_cell("measured"), make_cell(rate), make_cell(note)]
        for rate, note in ((0.5, "slow"), (0.5, "noisy"))
    ]
    text = to_captioned_markdown([Table("one", "Rates", columns, rows)])
    assert text.splitlines() == [
        "**Rates. In all rows: px 256**",
        "",
        "| kind | images/s | note |",
        "|---|---:|---|",
        "| measured | 0.5 | slow |",
        "| measured | 0.5 | noisy |",
    ]
    one = to_captioned_markdown([Table("one", "Rates", columns, rows[:1])])
    assert one.splitlines()[2] == "| px | kind | images/s | note |"


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
