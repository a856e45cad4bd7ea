"""The command `memory`: what fits which GPU, told beforehand."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from sdbench.cli import main
from sdbench.forecast.known_steps import load_known_steps, versions_of
from sdbench.forecast.memory_tables import plan_on_gpus
from sdbench.models import replay
from sdbench.plan.memory_limit import MICROBATCH, estimate_memory, find_need, step_of
from sdbench.plan.resolve import plan_step
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import parse_request
from sdbench.settings.fitting import MemorySettings
from sdbench.settings.request import parse
from tests.machines import make_machine

pytestmark = pytest.mark.slow

MODEL = ("--model_name", "tiny")
SIZES = ("1.15", "1.2", "1.6")
RECIPES = {
    "all weights": (),
    "all weights, EMA": ("--use_ema",),
    "all weights in bf16, recomputed": (
        *("--precision", "bf16", "--activation_checkpointing", "full"),
    ),
    "all weights, sharded over 8": ("--sharding", "full"),
    "LoRA": ("--lora_rank", "16", "--precision", "bf16"),
}


@pytest.fixture(scope="module")
def tables() -> list[list[list[str]]]:
    """The three tables that the command prints: rows of cells, the headings first."""
    argv = ["memory", *MODEL, "--gpu_memory_gib", ",".join(SIZES)]
    command = [sys.executable, "-m", "sdbench", *argv]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[list[list[str]]] = [[]]
    for line in told.splitlines():
        if line.startswith("  "):
            found[-1].append(re.split(r" {2,}", line.strip()))
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def plan(*argv: str, memory_gib: float = 1000.0, num_gpus: int = 1):
    request = parse_request([*MODEL, *argv], description="", epilog="")
    machine = make_machine(
        num_devices=num_gpus, device_memory_gib=memory_gib, free_memory_gib=memory_gib
    )
    return plan_step(request, machine=machine, ranks=Ranks(0, num_gpus, 0, num_gpus))


def test_a_micro_batch_is_the_one_that_a_run_chooses_on_that_gpu(tables):
    headings, *rows = tables[0]
    assert headings == ["recipe", *(f"{size} GiB" for size in SIZES)]
    found = {name: cells for name, *cells in rows}
    assert found.keys() > RECIPES.keys()
    for name, flags in RECIPES.items():
        num_gpus = 8 if "sharded" in name else 1
        for cell, size in zip(found[name], SIZES, strict=True):
            chosen = plan(*flags, memory_gib=float(size), num_gpus=num_gpus)
            assert cell == str(getattr(chosen.config, MICROBATCH)), (name, size)
    assert len({*found["all weights"]}) == 3


def test_a_recipe_that_no_micro_batch_makes_fit_is_a_dash(capsys):
    # CUDA's context alone is 1 GiB, more than 90 % of it.
    assert main(["memory", *MODEL, "--use_ema", "--gpu_memory_gib", "1.1"]) == 0
    _, table, *_ = capsys.readouterr().out.partition("Largest micro-batch")[2].split("\n\n")
    # --use_ema makes it a recipe of its own: no other has its name.
    assert [line.split() for line in table.splitlines()] == [
        ["recipe", "1.1", "GiB"],
        ["these", "flags", "-"],
    ]


def test_the_parts_add_up_to_the_peak_that_a_run_is_told(tables):
    headings, *rows = tables[1]
    assert headings[:2] == ["recipe", "peak"] and headings[-1] == "at"
    for name, peak, *parts, _ in rows:
        assert float(peak) == pytest.approx(sum(map(float, parts)), abs=0.005 * len(parts))
        if name in RECIPES:
            run = plan(*RECIPES[name], f"--{MICROBATCH}", "1", num_gpus=8 if "8" in name else 1)
            assert float(peak) == pytest.approx(find_need(run).total_gib, abs=0.005)


def test_a_flag_lowers_the_memory_as_told(tables):
    _, *rows = tables[2]
    flags = {row[0]: float(row[1]) for row in rows}
    assert {"--activation_checkpointing full", "--lora_rank 16"} <= flags.keys()
    for typed, gib in flags.items():
        run = plan(*typed.split(), f"--{MICROBATCH}", "1")
        assert gib == pytest.approx(find_need(run).total_gib, abs=0.005), typed


def test_the_answer_for_a_program_has_the_figures_of_the_tables(tables, capfd):
    assert main(["memory", *MODEL, "--gpu_memory_gib", ",".join(SIZES), "--json"]) == 0
    needs = json.loads(capfd.readouterr().out)
    recipes, levers = needs["recipes"], needs["levers"]
    assert needs["gpu_memory_gib"] == {f"{size} GiB": float(size) for size in SIZES}
    fitting = [[one["recipe"], *map(str, one["largest_micro_batch"].values())] for one in recipes]
    assert fitting == tables[0][1:]
    for one, (name, peak, *_, phase) in zip(recipes, tables[1][1:], strict=True):
        assert (one["recipe"], one["phase"]) == (name, phase)
        assert one["memory_gib"] == pytest.approx(float(peak), abs=0.005)
        assert one["memory_gib"] == pytest.approx(sum(one["memory_parts_gib"].values()))
    assert [one["flags"] for one in levers] == [row[0] for row in tables[2][1:]]
    (left_out,) = needs["left_out"]  # its linear layers are too small
    assert left_out["recipe"] == "LoRA on 4-bit weights, recomputed"


@pytest.mark.parametrize(
    ("model", "latents"),
    [
        ("tiny", "online"),
        pytest.param("sdxl", "precomputed", marks=pytest.mark.full),
        ("sd2-base", "precomputed"),
    ],
)
def test_a_step_that_was_replayed_beforehand_is_that_of_today(model, latents, monkeypatch):
    flags = ["--model_name", model, "--latents", latents, f"--{MICROBATCH}", "2"]
    request = parse(MemorySettings, flags, description="", epilog="")
    for changes in ({}, {"precision": "bf16", "activation_checkpointing": "full"}):
        plan = plan_on_gpus(request.changed(changes))
        totals = []
        for known in (load_known_steps()["steps"], {}):
            monkeypatch.setattr(replay, "KNOWN", known)
            replay.profile_step.cache_clear()
            totals.append([estimate_memory(plan, size).total_gib for size in (1, 2, 64)])
        assert versions_of(step_of(plan)) is not None
        # With other versions of torch a few operations are others.
        assert totals[0] == pytest.approx(totals[1], rel=0.01)


# A recipe of tiny is refused by a replay.
@pytest.mark.parametrize("model", sorted({*load_known_steps()["models"]} - {"tiny"}))
@pytest.mark.parametrize("latents", ["online", "precomputed"])
def test_a_model_that_was_replayed_beforehand_is_told_without_a_replay(
    model, latents, monkeypatch, tmp_path, capfd
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(replay, "_replay_step", None)
    replay.profile_step.cache_clear()
    assert main(["memory", "--model_name", model, "--latents", latents, "--json"]) == 0
    needs = json.loads(capfd.readouterr().out)
    assert needs["replayed_with"] == load_known_steps()["versions"]
    assert len(needs["recipes"]) + len(needs["left_out"]) == 9


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (("--num_gpus", "3", "--batch_size", "16"), "--batch_size"),
        (("--gpu_memory_gib", "24GB"), "--gpu_memory_gib"),
        (("--image_size", "60"), "--image_size"),
        (("--sharding", "full"), "--sharding"),
        (("--print_config",), "--print_config"),
    ],
)
def test_what_no_gpu_can_run_is_refused(argv, flag, capsys):
    assert main(["memory", "--model_name", "tiny", *argv]) == 2
    assert flag in capsys.readouterr().err
