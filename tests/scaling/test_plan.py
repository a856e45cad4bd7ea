"""The choice of a number of GPUs, on a table whose law is known."""

from __future__ import annotations

import pytest

from sdbench.cli import main
from tests.refusals import refusal_of
from tests.scaling.conftest import recipe

# step = micro-batches x 1 s + 1 s, with a batch of 64 and micro-batches of 4: on 1, 2, 4, 8 and 16
# GPUs 17, 9, 5, 3 and 2 s for 64 images. A day trains 5082.4, 9600, 17280, 28800 and 43200 of them.
STEPS_S = {1: 17, 2: 9, 4: 5, 8: 3, 16: 2}


@pytest.fixture
def flags(tmp_path, write_table):
    rows = [f"X100,{gpus},64,4,64,{64 / step_s!r}" for gpus, step_s in STEPS_S.items()]
    header = "gpu,num_gpus,image_size,micro_batch,global_batch,images_per_second"
    table, recipes = write_table(*rows, header=header), tmp_path / "recipes.yaml"
    recipes.write_text(recipe("year", (64, 5_529_600)))
    arguments = ["scaling", "plan", table, "--recipe", "year", "--recipes", recipes]
    return [*map(str, arguments), "--num_gpus", "1,2,4,8,16", "--price", "1"]


def plan(capsys, *arguments) -> tuple[str, str]:
    """The number of GPUs in the line marked as the best, and the advice below the table."""
    assert main(list(arguments)) == 0
    lines = capsys.readouterr().out.splitlines()
    best = [line.split()[0] for line in lines if "<- best" in line]
    return " ".join(best), lines[-1]


# 5,529,600 images are 86,400 steps: 17, 9, 5, 3 and 2 days, 408, 432, 480, 576 and 768 GPU-hours.


@pytest.mark.parametrize(
    ("limits", "best", "advice"),
    [
        ("--max_days 6", "4", "4 GPUs with micro-batch 4: 5 days (5 to 5), 480 USD."),
        ("--max_days 20", "1", "1 GPU with micro-batch 4: 17 days (17 to 17), 408 USD."),
        ("--max_cost 600", "8", "8 GPUs with micro-batch 4: 3 days (3 to 3), 576 USD."),
        ("--max_cost 600 --max_days 10", "2", "2 GPUs with micro-batch 4: 9 days (9 to 9), 432"),
    ],
)
def test_the_best_is_the_cheapest_in_time_or_the_fastest_for_the_sum(
    capsys, flags, limits, best, advice
):
    found, sentence = plan(capsys, *flags, *limits.split())
    assert found == best
    assert sentence.startswith(f"Take {advice}")


def test_when_nothing_fits_it_says_so_and_how_near_it_comes(capsys, flags):
    found, sentence = plan(capsys, *flags, "--max_days", "4", "--max_cost", "500")
    assert found == ""
    assert sentence.startswith("Nothing here keeps 4 days and 500 USD.")
    assert "The fastest is 16 GPUs with micro-batch 4: 2 days" in sentence
    assert "the cheapest is 1 GPU with micro-batch 4: 17 days" in sentence


def test_a_doubtful_fit_and_an_extrapolation_are_told(capsys, quoted):
    # 512 GPUs of the chart train this in 5.714 days, 5.327 to 6.293.
    table = str(quoted / "aws_p5_scaling.csv")
    arguments = ["scaling", "plan", table, "--recipe", "mosaicml-all-512", "--max_days"]
    found, sentence = plan(capsys, *arguments, "6", "--num_gpus", "512")
    assert found == "512"
    assert "It may miss the limits" in sentence
    found, sentence = plan(capsys, *arguments, "6.5", "--num_gpus", "256,512")
    assert found == "512"
    assert "may miss" not in sentence
    found, sentence = plan(capsys, *arguments, "6.5", "--num_gpus", "1024")
    assert found == "1024"
    assert "measure there before relying on it" in sentence


def test_the_fastest_micro_batch_is_chosen(capsys, quoted):
    # AWS's figures of P5 are faster the larger the micro-batch, up to 32; at 64 GPUs of a batch of
    # 2048, that is one micro-batch.
    tables = [str(quoted / name) for name in ("aws_p5_scaling.csv", "aws_p4de_p5_single_node.csv")]
    arguments = ["--where", "gpu=H100", "ema=true", "--recipe", "mosaicml-all-512"]
    assert main(["scaling", "plan", *tables, *arguments, "--max_days", "30"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "best" in line)
    assert row.split()[-5:] == ["32", "2048", "yes", "<-", "best"]


def test_a_recipe_of_two_resolutions_needs_figures_at_both(capsys, quoted):
    limits = ["--recipe", "mosaicml", "--max_days", "12"]
    table = str(quoted / "mosaicml_diffusion_a100.csv")
    found, _ = plan(capsys, "scaling", "plan", table, *limits, "--micro_batch", "16")
    assert found == "64"
    assert refusal_of("scaling", "plan", table, *limits).flag.startswith("--micro_batch")
    table = str(quoted / "mosaicml_diffusion_benchmark_a100.csv")
    assert refusal_of("scaling", "plan", table, *limits).value == [512]


def test_a_plan_needs_a_limit_and_a_sum_needs_a_price(flags):
    assert refusal_of(*flags).flag == "--max_days or --max_cost"
    error = refusal_of(*flags[:-2], "--max_cost", "600")
    assert (error.value, error.flag) == ("X100", "--price, or a row for it in prices.yaml")
