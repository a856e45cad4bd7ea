"""Runs become rungs of the ladder by their settings, and the page says what they gain."""

from __future__ import annotations

import functools
import itertools
import math
import statistics

import pytest
import yaml

from sdbench.analysis.ladder import (
    RUNGS,
    find_ladders,
    find_rung,
    is_one_rung,
    read_configurations,
)
from sdbench.analysis.ladder_tables import make_ladder_tables, make_pair_tables
from sdbench.record.store import BENCHMARK, OK, kind_of, load_record
from sdbench.settings.config import PRESETS
from sdbench.settings.parallel import WITHIN_NODE
from sdbench.settings.setting import describe_flags, of_device
from tests.report.results_folder import RESULTS, make_recipe, rows_of

REPOSITORY = RESULTS.parent


def settle_preset(preset, *, on_gpu):
    return {name: of_device(value, on_gpu=on_gpu) for name, value in preset.items()}


FAST_ON_CPU = settle_preset(PRESETS["fast"], on_gpu=False)


def ladder_of(*records):
    """Texts by the rung, and by the heading."""
    (table,) = make_ladder_tables(read_configurations(records))
    return {row["rung"]: row for row in rows_of(table)}


def pairs_of(name, *records):
    return rows_of(make_pair_tables(read_configurations(records))[name])


def test_a_rung_has_its_gain_alone_and_on_top_of_the_ones_before():
    rows = ladder_of(
        make_recipe(1.0),
        make_recipe(2.0, precision="amp_bf16"),
        make_recipe(1.5, optimizer="adamw_fused"),
        make_recipe(5.0, precision="amp_bf16", optimizer="adamw_fused"),
        make_recipe(1.1, attention="eager"),
    )
    assert list(rows) == [
        "--preset seed",
        "--precision amp_bf16",
        "--optimizer adamw_fused",
        "--attention eager",
    ]
    first, second, other = list(rows.values())[1:]
    assert (first["alone, over seed"], first["over the one above"]) == ("2.00x", "2.00x")
    assert (second["alone, over seed"], second["over the one above"]) == ("1.50x", "2.50x")
    assert second["over seed"] == "5.00x"
    assert second["step p50, s"] == "1.333; 0.4"
    assert second["from"] == "torch; NVIDIA apex, FusedAdam"
    assert second["what it does"].startswith("torch's default AdamW or its fused kernel")
    assert (other["alone, over seed"], other["over the one above"]) == ("1.10x", "")


def test_all_switches_of_fast_given_by_hand_are_runs_of_the_preset_fast():
    by_hand = make_recipe(4.0, **FAST_ON_CPU)
    configurations = read_configurations(
        [make_recipe(1.0), make_recipe(4.4, preset="fast"), by_hand]
    )
    assert [len(one.runs) for one in configurations] == [1, 2]
    assert configurations[1].preset == "fast"
    rows = ladder_of(make_recipe(1.0), make_recipe(4.0, preset="fast"))
    assert rows["--preset fast"]["over seed"] == "4.00x"


def at(time, record):
    return {**record, "started_utc": f"2026-11-21T{time}:00+00:00"}


def test_three_runs_of_a_rung_have_an_interval():
    # Logs of the rates: means 0 and ln 2, standard deviation ln 1.01 on either side, three runs
    # each: standard error ln(1.01) sqrt(2/3) on 4 degrees of freedom, where t is 2.776445.
    noise = (1 / 1.01, 1.0, 1.01)
    seed = [make_recipe(one) for one in noise]
    rung = [make_recipe(2 * one, precision="amp_bf16") for one in noise]
    rows = ladder_of(
        *(at(f"1{number}:00", record) for number, record in enumerate(seed)),
        *(at(f"1{number}:30", record) for number, record in enumerate(rung)),
    )
    half = 2.776445 * math.log(1.01) * math.sqrt(2 / 3)
    low, high = (2 * math.exp(sign * half) for sign in (-1, 1))
    assert rows["--precision amp_bf16"]["alone, over seed"] == f"2.00x ({low:.2f} to {high:.2f})"
    assert (f"{low:.2f}", f"{high:.2f}") == ("1.96", "2.05")
    # One after the other, as python -m sdbench compare has it.
    rows = ladder_of(*(at("10:00", record) for record in seed), *(at("10:30", one) for one in rung))
    assert rows["--precision amp_bf16"]["alone, over seed"] == "2.00x (measured apart)"


def test_a_gain_without_an_interval_says_why():
    rows = ladder_of(
        at("10:00", make_recipe(1.0)),
        at("10:30", make_recipe(2.0, precision="amp_bf16")),
        at("15:00", make_recipe(1.5, optimizer="adamw_fused")),
    )
    gains = [row["alone, over seed"] for row in rows.values()]
    assert gains == ["", "2.00x", "1.50x (measured apart)"]
    records = []
    sides = 2 * [(1.0, 0.40, {}), (2.0, 0.30, {"attention": "eager"})]
    for minute, (rate, product, rung) in enumerate(sides):
        records.append(at(f"10:{minute}0", make_recipe(rate, **rung)))
        records[-1]["summary"]["matmul_tflops"] = product
    gain = ladder_of(*records)["--attention eager"]["alone, over seed"]
    assert gain == "2.00x (the machine changed)"


def test_settings_that_only_work_together_are_one_rung():
    master = {"precision": "bf16", "master_weights": "fp32"}
    rows = ladder_of(make_recipe(1.0, on_gpu=True), make_recipe(3.0, on_gpu=True, **master))
    assert rows["--precision bf16 --master_weights fp32"]["alone, over seed"] == "3.00x"
    assert is_one_rung({"encoder_batch_size": 64})
    assert not is_one_rung({"precision": "bf16", "optimizer": "adamw_fused"})


def test_engines_are_compared_at_the_same_settings_only():
    fast = {"preset": "fast", "on_gpu": True}
    rows = pairs_of(
        "engines",
        make_recipe(100.0, **fast),
        make_recipe(110.0, **fast, engine="torch"),
        make_recipe(150.0, **fast, engine="torch", cuda_graph=True),
        make_recipe(90.0, **fast, engine="torch", image_size=768),
    )
    assert [(row["recipe"], row["torch over Composer"]) for row in rows] == [
        ("--preset fast", ""),
        ("--preset fast", "1.10x"),
        ("--preset fast --cuda_graph", "1.50x"),
    ]


def test_a_preset_that_a_flag_changed_is_not_called_by_its_name():
    changed = make_recipe(100.0, preset="fast", on_gpu=True, attention="eager")
    (configuration,) = read_configurations([changed])
    assert configuration.preset is None
    (configuration,) = read_configurations([make_recipe(100.0, preset="fast", on_gpu=True)])
    assert configuration.preset == "fast"


@functools.cache
def read_sweep(device):
    return yaml.safe_load((REPOSITORY / "sweeps" / f"ladder_{device}.yaml").read_text())


def read_cells(device):
    """Settings of each run of a sweep of the ladder."""
    content = read_sweep(device)
    return [{**content["base"], **cell} for cell in content["list"]]


# xFormers is in no requirements, and sharing within a machine takes two machines.
IN_NO_SWEEP = (
    {"attention": "xformers"},
    *({"optimizer_params": "trainable", "sharding": sharding} for sharding in WITHIN_NODE),
)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: describe_flags(rung.settings))
def test_each_rung_has_a_cell_in_a_sweep(rung):
    devices = ("ranks",) if rung.needs_ranks else ("cpu", "gpu")
    added = [added_by(cell, on_gpu=one != "cpu") for one in devices for cell in read_cells(one)]
    assert any(map(rung.is_part_of, added)) != (rung.settings in IN_NO_SWEEP)


def added_by(cell, *, on_gpu):
    """Settings of a cell that differ from those of the preset seed."""
    preset, seed = (
        settle_preset(PRESETS[name], on_gpu=on_gpu) for name in (cell["preset"], "seed")
    )
    return dict({**preset, **cell}.items() - seed.items())


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_sweep_climbs_to_fast_one_rung_at_a_time(device):
    records = []
    for settings in read_cells(device):
        preset = settings.pop("preset")
        records.append(make_recipe(1.0, preset=preset, on_gpu=device == "gpu", **settings))
    ladder = find_ladders(read_configurations(records))[0]
    assert ladder.chain[-1].preset == "fast"
    # Each rung of the chain was also measured alone, or with the one that it needs.
    alone = [find_rung(one.added) for one in ladder.alone]
    for before, after in itertools.pairwise([ladder.base, *ladder.chain]):
        (name,) = set(after.added) - set(before.added)
        rung = find_rung({name: after.added[name]})
        assert rung is not None and rung in alone, name


def test_fast_is_nowhere_slower_than_seed():
    """The committed records, wherever both presets were measured at the same work."""
    records = [load_record(path.parent) for path in sorted(RESULTS.glob("runs/*/record.json"))]
    trained = [one for one in records if kind_of(one) == BENCHMARK and one["status"] == OK]
    compared = 0
    for ladder in find_ladders(read_configurations(trained)):
        if ladder.fast is not None:
            compared += 1
            base, fast = (
                statistics.median(run["summary"]["images_per_second"] for run in one.runs)
                for one in (ladder.base, ladder.fast)
            )
            assert fast >= base
    if not compared:
        pytest.skip("no committed records of both presets that tell all switches")
