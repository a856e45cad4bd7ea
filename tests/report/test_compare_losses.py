"""`compare --losses` says whether two sets of runs train alike, and ends with an exit code."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from sdbench.cli import main
from sdbench.record.configuration import group
from sdbench.report.figures import read_figures
from sdbench.statistics.loss_gate import judge_losses
from tests.refusals import refusal_of
from tests.report.results_folder import RESULTS, make_record, write_run

NUM_STEPS = 200
CURVE = 0.5 + np.exp(-np.arange(NUM_STEPS) / 40)


def draw(seed: int, *, noise: float = 0.05, scale: float = 1.0) -> np.ndarray:
    """A falling curve with noise of a seed at each step."""
    return scale * CURVE * (1 + noise * np.random.default_rng(seed).standard_normal(NUM_STEPS))


def write(folder: Path, curves: dict[str, np.ndarray]) -> Path:
    """Tables of another trainer, with a name for each seed."""
    folder.mkdir()
    for name, losses in curves.items():
        rows = [f"{step},{loss!r}" for step, loss in enumerate(losses.tolist())]
        (folder / f"{name}.csv").write_text("\n".join(["step,loss", *rows]) + "\n")
    return folder


def seeds(numbers, **changes) -> dict[str, np.ndarray]:
    return {f"seed-{number}": draw(number, **changes) for number in numbers}


def write_runs(folder: Path, numbers, **changes) -> Path:
    """Runs of benchmark.py with these seeds."""
    for number in numbers:
        run_id = f"20261121T{number:06d}Z_x_{folder.name}"
        record = make_record(**{"config__seed": number, "run_id": run_id, **changes})
        write_run(folder / str(number), record, losses=draw(number).tolist())
    return folder


def compare(*argv) -> int:
    return main(["compare", "--losses", *map(str, argv)])


def checks_of(capsys, *argv) -> tuple[int, dict[str, dict]]:
    exit_code = compare(*argv, "--format", "json")
    checks = json.loads(capsys.readouterr().out)["checks"]
    return exit_code, {check["what"]: check for check in checks}


def test_other_seeds_of_one_recipe_pass_and_a_loss_that_is_higher_does_not(tmp_path, capsys):
    before = write(tmp_path / "before", seeds(range(5)))
    assert compare(before, write(tmp_path / "same", seeds(range(10, 15)))) == 0
    assert compare(before, write(tmp_path / "one", seeds([20]))) == 0
    assert "no difference shown" in capsys.readouterr().out
    assert compare(before, write(tmp_path / "worse", seeds(range(10, 15), scale=1.1))) == 1
    assert "final loss: " in capsys.readouterr().err
    # A loss that is lower for no reason is a change too.
    assert compare(before, write(tmp_path / "better", seeds(range(10, 15), scale=0.9))) == 1


def test_the_bands_are_students_of_the_means_of_the_windows(tmp_path, capsys):
    ours, theirs = seeds(range(4)), seeds(range(10, 13), scale=1.01)
    sides = write(tmp_path / "a", ours), write(tmp_path / "b", theirs)
    _, found = checks_of(capsys, *sides)
    # The last fifth is the last 40 of 200 steps, and each of four questions has a quarter of 1 %.
    before, after = (
        np.array([losses[-40:].mean() for losses in side.values()]) for side in (ours, theirs)
    )
    centre, final = before.mean(), found["final loss"]
    assert (final["first"], final["last"]) == (161, 200)
    assert final["value"] == pytest.approx((after.mean() - centre) / centre)
    spread = np.std(before, ddof=1) / centre
    high = stats.t.ppf(1 - 0.0025 / 2, 3) * spread * (1 / 4 + 1 / 3) ** 0.5
    assert (final["low"], final["high"]) == pytest.approx((-high, high))
    alone = found["final loss of the run furthest out"]
    assert alone["value"] == pytest.approx(
        (after - centre)[np.abs(after - centre).argmax()] / centre
    )
    assert alone["high"] == pytest.approx(
        stats.t.ppf(1 - 0.0025 / 3 / 2, 3) * spread * (1 / 4 + 1) ** 0.5
    )
    window = found["tenth that differs most"]
    assert window["last"] - window["first"] == 19 and window["last"] % 20 == 0


def test_runs_with_the_same_seeds_are_compared_in_pairs_which_finds_a_change_of_a_hundredth(
    tmp_path, capsys
):
    rng = np.random.default_rng(3)
    ours = seeds(range(5))
    changed = {
        name: losses * 1.01 * (1 + 0.001 * rng.standard_normal(NUM_STEPS))
        for name, losses in ours.items()
    }
    before = write(tmp_path / "before", ours)
    exit_code, found = checks_of(capsys, before, write(tmp_path / "paired", changed))
    last = [[losses[-40:].mean() for losses in side.values()] for side in (ours, changed)]
    interval = stats.ttest_rel(last[1], last[0]).confidence_interval(1 - 0.0025)
    assert exit_code == 1
    final = found["final loss"]
    assert final["high"] == pytest.approx((interval.high - interval.low) / 2 / np.mean(last[0]))
    # The same curves under other names have no partners, and 1 % is within the spread of seeds.
    alone = {f"other-{name}": losses for name, losses in changed.items()}
    assert compare(before, write(tmp_path / "alone", alone)) == 0
    # So it is with a tolerance that is larger than the change.
    assert compare(before, tmp_path / "paired", "--tolerance", "2%") == 0


def test_a_single_bad_stretch_and_another_shape_are_found(tmp_path, capsys):
    before = write(tmp_path / "before", seeds(range(5), noise=0.01))
    spiked = seeds(range(10, 15), noise=0.01)
    for losses in spiked.values():
        losses[45] *= 4
    exit_code, found = checks_of(capsys, before, write(tmp_path / "spiked", spiked))
    assert exit_code == 1
    window = found["tenth that differs most"]
    assert (window["first"], window["last"], window["is_inside"]) == (41, 60, False)
    assert found["final loss"]["is_inside"]
    rising = {name: losses[::-1].copy() for name, losses in seeds(range(10, 15)).items()}
    exit_code, found = checks_of(capsys, before, write(tmp_path / "rising", rising))
    assert exit_code == 1 and found["correlation of the curves"]["value"] < 0


def test_a_loss_that_is_not_finite_is_never_inside(tmp_path, capsys):
    before = write(tmp_path / "before", seeds(range(5)))
    broken = seeds(range(10, 15))
    broken["seed-12"][30] = math.nan
    exit_code, found = checks_of(capsys, before, write(tmp_path / "broken", broken))
    assert exit_code == 1
    assert (found["tenth that differs most"]["first"], found["final loss"]["is_inside"]) == (
        21,
        True,
    )
    assert found["tenth that differs most"]["value"] is None
    compare(before, tmp_path / "broken")
    assert "seed-12.csv: the loss of step 30 is not finite" in capsys.readouterr().err
    refusal = refusal_of("compare", "--losses", tmp_path / "broken", before)
    assert refusal.flag == "A" and refusal.value.endswith("seed-12.csv, step 30: nan")
    broken["seed-12"] = draw(12)
    broken["seed-12"][0] = math.nan  # tables count from 0 or from 1
    refusal = refusal_of("compare", "--losses", write(tmp_path / "at-0", broken), before)
    assert refusal.value.endswith("seed-12.csv, step 0: nan")


def test_one_run_of_five_that_diverged_is_found_with_and_without_partners(tmp_path, capsys):
    before = write(tmp_path / "before", seeds(range(5)))
    for numbers in (range(5), range(10, 15)):
        rng = np.random.default_rng(5)
        changed = {
            name: losses * (1 + 0.001 * rng.standard_normal(NUM_STEPS))
            for name, losses in seeds(numbers).items()
        }
        changed[f"seed-{numbers[2]}"] = 1.4 * changed[f"seed-{numbers[2]}"]
        after = write(tmp_path / f"after-{numbers[0]}", changed)
        exit_code, found = checks_of(capsys, before, after)
        assert exit_code == 1
        assert not found["final loss of the run furthest out"]["is_inside"]


def test_runs_of_one_name_are_told_apart_and_what_only_keeps_a_run_is_no_recipe(tmp_path, capsys):
    before = write_runs(tmp_path / "before", range(5))
    same = {"run_id": "20261121T000000Z_x_one", "config__remote": "a"}
    after = write_runs(tmp_path / "after", range(10, 12), **same)
    write_runs(tmp_path / "after", range(12, 15), **{**same, "config__remote": "b"})
    assert compare(before, after) == 0
    assert "after, 5 runs" in " ".join(capsys.readouterr().out.split())


def test_further_steps_are_not_compared_and_said_to_be_so(tmp_path, capsys):
    before = write(
        tmp_path / "before", {key: losses[:100] for key, losses in seeds(range(5)).items()}
    )
    after = write(tmp_path / "after", seeds(range(10, 13)))
    assert compare(before, after) == 0
    assert "the longest has 200" in " ".join(capsys.readouterr().out.split())
    uneven = seeds(range(5))
    uneven["seed-3"] = uneven["seed-3"][:50]
    refusal = refusal_of("compare", "--losses", write(tmp_path / "uneven", uneven), after)
    assert refusal.value.endswith("seed-3.csv: 50 steps")


def test_a_candidate_that_stopped_early_fails(tmp_path, capsys):
    before = write(tmp_path / "before", seeds(range(5)))
    early = seeds(range(10, 15))
    early["seed-11"] = early["seed-11"][:60]
    assert compare(before, write(tmp_path / "early", early)) == 1
    assert "seed-11.csv has 60 of 200 steps" in capsys.readouterr().err


def test_a_run_that_failed_is_not_passed_over(tmp_path, capsys):
    before = write_runs(tmp_path / "before", range(5))
    assert compare(before, write_runs(tmp_path / "after", range(5, 8))) == 0
    write_runs(tmp_path / "after", [9], status="failed", summary=None, reason="out of disk")
    assert compare(before, tmp_path / "after") == 1
    assert "20261121T000009Z_x_after: failed" in capsys.readouterr().err


def test_what_was_changed_is_said_and_a_side_has_one_recipe_and_other_seeds(tmp_path, capsys):
    before = write_runs(tmp_path / "before", range(5))
    after = write_runs(tmp_path / "after", range(5), config__lr=0.5)
    compare(before, after)
    assert "lr: 0.0001 -> 0.5" in capsys.readouterr().out
    write_runs(tmp_path / "mixed", range(3))
    mixed = write_runs(tmp_path / "mixed", range(10, 13), config__lr=0.5)
    assert "lr 0.0001 and 0.5" in refusal_of("compare", "--losses", mixed, before).value
    again = write_runs(tmp_path / "again", range(3))
    write_runs(tmp_path / "again" / "more", range(10, 13), config__seed=1)
    assert refusal_of("compare", "--losses", again, before).flag == "--seed"


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["two", "same"], "2 runs in two"),
        (["before"], "before"),
        (["before", "repeated"], "0 runs in repeated"),
        (["before", "every-second"], "every-second/seed-1.csv"),
        (["before", "before"], "5 runs on both sides"),
        (["before", "nothing"], "nothing"),
        (["before", "same", "--fail_if_slower", "5%"], "--fail_if_slower"),
    ],
)
def test_what_cannot_be_judged_is_refused(tmp_path, monkeypatch, argv, value):
    monkeypatch.chdir(tmp_path)
    write(Path("before"), seeds(range(5)))
    write(Path("same"), seeds(range(10, 15)))
    write(Path("two"), seeds(range(20, 22)))
    file = write(Path("repeated"), seeds([1])) / "seed-1.csv"
    file.write_text(file.read_text() + "7,1.0\n")
    file = write(Path("every-second"), seeds([1])) / "seed-1.csv"
    header, *rows = file.read_text().splitlines()
    file.write_text("\n".join([header, *rows[::2]]))
    assert value in str(refusal_of("compare", "--losses", *argv))


def test_tolerance_without_losses_is_refused(tmp_path):
    assert refusal_of("compare", "a", "b", "--tolerance", "1%").value == "--tolerance"


@pytest.mark.slow
@pytest.mark.parametrize(("num_candidates", "is_paired"), [(1, False), (5, False), (5, True)])
def test_equal_recipes_are_said_to_differ_in_one_per_cent(num_candidates, is_paired):
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(600):
        # Each run has a level of its own, beside the noise of each step.
        runs = CURVE * (1 + 0.01 * rng.standard_normal((5 + num_candidates, 1)))
        runs = runs * (1 + 0.1 * rng.standard_normal(runs.shape))
        candidates = runs[5:]
        if is_paired:  # The same noise, and arithmetic that drifts apart as the steps go on.
            drift = np.cumsum(0.001 * rng.standard_normal(candidates.shape), axis=1)
            candidates = runs[:5] * (1 + drift)
        checks = judge_losses(runs[:5], candidates, partners=range(5) if is_paired else None)
        alarms += not all(check.is_inside for check in checks)
    # 6 are expected if the questions were independent; 12 and more once in fifty times.
    assert 1 <= alarms <= 12


def read_tenths(name: str) -> dict[str, np.ndarray]:
    """The mean loss of each tenth of each run of a published table, (runs, 10), by change."""
    rows = read_figures(RESULTS / "training" / name)
    return {
        change: np.array([[row[f"tenth_{tenth}"] for tenth in range(1, 11)] for row in of_change])
        for change, of_change in group(rows, key_of=lambda row: row["change"]).items()
    }


def test_the_published_trial_of_the_gate_gives_the_verdicts_that_its_page_tells():
    curves = read_tenths("loss_gate.csv")
    recipe = curves.pop("the recipe")
    assert recipe.shape == (25, 10) and len(curves) == 10

    def differs(baseline, candidate, partners=None) -> bool:
        checks = judge_losses(baseline, candidate, partners=partners)
        return not all(check.is_inside for check in checks)

    # The mean of tenths is the mean of steps, as all tenths have 30.
    found = {change for change, runs in curves.items() if differs(recipe[:5], runs, range(5))}
    assert found == {change for change in curves if not change.startswith("no fault")}
    assert len(found) == 6
    assert sum(differs(recipe[5:10], runs) for runs in curves.values()) == 3
    assert not any(differs(recipe[:5], run[None]) for run in recipe[5:])
    fives = np.split(recipe, 5)
    assert not any(differs(a, b) for a, b in itertools.combinations(fives, 2))
    final = judge_losses(recipe[:5], curves["learning rate 20 % higher"], partners=range(5))[0]
    assert (final.value, final.high) == pytest.approx((-0.0200, 0.00498), abs=5e-5)


def test_levers_for_memory_are_inside_the_band_of_seeds():
    """results/training/levers_band.csv: five seeds with each lever; in pairs rounding is found."""
    levers, recipe = read_tenths("levers_band.csv"), read_tenths("loss_gate.csv")["the recipe"]
    lora = levers.pop("LoRA of rank 4")
    assert len(levers) == 7
    found = set()
    for change, runs in levers.items():
        baseline = lora if "LoRA" in change else recipe[:5]
        assert runs.shape == baseline.shape == (5, 10)
        checks = judge_losses(baseline, runs, partners=range(5))
        found |= {change} if not all(check.is_inside for check in checks) else set()
        if "LoRA" not in change:
            assert all(check.is_inside for check in judge_losses(recipe[5:10], runs))
    assert found == {"8-bit AdamW", "4-bit AdamW", "fp8"}
    for change, told in (
        ("8-bit AdamW", (-0.00059, 0.00047)),
        ("4-bit AdamW", (-0.00850, 0.01000)),
        ("fp8", (0.00284, 0.00211)),
    ):
        final = judge_losses(recipe[:5], levers[change], partners=range(5))[0]
        assert (final.value, final.high) == pytest.approx(told, abs=1e-5), change


def test_no_speed_up_of_a_gpus_step_is_found_to_train_otherwise_and_exact_ones_are_exact():
    """results/training/levers_speed.csv: five seeds with each, and ten in fp32 without."""
    levers = read_tenths("levers_speed.csv")
    recipe = levers.pop("the recipe")
    assert recipe.shape == (10, 10) and len(levers) == 6
    finals = {}
    for change, runs in levers.items():
        assert runs.shape == (5, 10)
        paired = judge_losses(recipe[:5], runs, partners=range(5))
        for check in (*paired, *judge_losses(recipe[5:], runs)):
            assert check.is_inside, (change, check)
        finals[change] = (paired[0].value, paired[0].high)
    # As printed; the tenths are rounded to six digits.
    assert finals["bf16 with fp32 copies"] == pytest.approx((-0.000919, 0.00611), abs=5e-6)
    assert finals["all three, compiled"] == pytest.approx((-0.00109, 0.00504), abs=1e-5)
    for exact in ("layout kept", "fused GroupNorm"):
        assert np.abs(levers[exact] / recipe[:5] - 1).max() < 5e-5
