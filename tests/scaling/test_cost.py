"""Days, GPU-hours, cost and energy, against the cost tables of others and worked out by hand."""

from __future__ import annotations

import pytest

from sdbench.base.errors import ConfigError
from sdbench.cli import main
from sdbench.report.figures import read_figures
from tests.refusals import refusal_of

PRICES = """\
prices:
  - {name: spot, gpus: [X100], value: 1.5, unit: USD, per: GPU-hour, source: a, date: 2026-11-21}
  - {name: reserved, gpus: [X100], value: 4, unit: USD, per: GPU-hour, source: b, date: 2026-11-21}
power:
  - {gpus: [X100], value: 500, unit: W, per: GPU board, source: c, date: 2026-11-21}
"""
RECIPES = """\
small:
  about: a test
  source: here
  global_batch: 64
  stages: [{image_size: 64, num_images: 864000}]
two:
  about: a test
  source: here
  global_batch: 64
  stages:
    - {image_size: 64, num_images: 864000}
    - {image_size: 128, num_images: 864000}
"""


@pytest.fixture
def quoted(repository):
    return repository / "results" / "quoted"


@pytest.fixture
def files(tmp_path):
    """Flags that name a file of prices and one of recipes."""
    (tmp_path / "prices.yaml").write_text(PRICES)
    (tmp_path / "recipes.yaml").write_text(RECIPES)
    return ["--prices", str(tmp_path / "prices.yaml"), "--recipes", str(tmp_path / "recipes.yaml")]


def cost(tmp_path, *arguments) -> list[dict]:
    out = tmp_path / "cost.csv"
    assert main(["scaling", "cost", *map(str, arguments), "--out", str(out)]) == 0
    return read_figures(out)


def refusal(*arguments) -> ConfigError:
    return refusal_of("scaling", "cost", *arguments)


@pytest.mark.parametrize("command", ["cost", "plan"])
def test_the_help_names_no_path_of_this_machine(capsys, repository, command):
    with pytest.raises(SystemExit):
        main(["scaling", command, "--help"])
    assert str(repository) not in "".join(capsys.readouterr().out.split())


def write_table(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text)
    return path


# Cost tables of others.


def test_mosaicmls_cost_table_comes_back(quoted, tmp_path):
    rows = cost(tmp_path, quoted / "mosaicml_diffusion_a100.csv", "--recipe", "mosaicml")
    printed = read_figures(quoted / "mosaicml_diffusion_a100_cost.csv")
    assert [row["num_gpus"] for row in rows] == [row["num_gpus"] for row in printed]
    for row, theirs in zip(rows, printed, strict=True):
        assert row["days_to_train"] == pytest.approx(theirs["days_to_train"], rel=0.001)
        assert row["cost_usd"] == pytest.approx(theirs["cost_usd"], rel=0.001)
    # 8 GPUs: 1,126,400,000 / 1100 + 1,740,800,000 / 290 = 1,024,000 + 6,002,758.6 s = 81.328 days,
    # x 24 x 8 = 15,615 GPU-hours, x 2 USD = 31,230 USD, x 0.4 kW = 6,246 kWh.
    assert rows[0]["days_to_train"] == pytest.approx(81.3282, abs=1e-4)
    assert rows[0]["gpu_hours"] == pytest.approx(15615.02, abs=0.01)
    assert rows[0]["cost_usd"] == pytest.approx(31230.04, abs=0.01)
    assert rows[0]["energy_kwh"] == pytest.approx(6246.01, abs=0.01)
    assert {row["kind"] for row in rows} == {"modelled"}


def test_mosaicmls_benchmark_cost_table_comes_back(quoted, tmp_path):
    # That table takes all 2,867,200,000 images at the speed of 512 px: 2,867,200,000 / 128.2 =
    # 22,365,055 s = 258.85 days on 8 GPUs, where it says 258.83.
    table = quoted / "mosaicml_diffusion_benchmark_a100.csv"
    rows = cost(tmp_path, table, "--recipe", "mosaicml-all-512")
    printed = read_figures(quoted / "mosaicml_diffusion_benchmark_a100_cost.csv")
    assert [row["num_gpus"] for row in rows] == [row["num_gpus"] for row in printed]
    for row, theirs in zip(rows, printed, strict=True):
        assert row["days_to_train"] == pytest.approx(theirs["days_to_train"], rel=0.002)
        assert row["gpu_hours"] == pytest.approx(theirs["a100_hours"], rel=0.002)
        # It rounds the dollars to thousands, and to ten thousands on 256 GPUs.
        assert row["cost_usd"] == pytest.approx(theirs["cost_usd"], rel=0.02)


def test_the_hours_of_anyscales_table_come_back(tmp_path):
    # Seed 002 gives 13,165 A100-hours, 39,511 and 67,405 USD; 4,439 images/s at 256 px on 32 GPUs,
    # and the 512 px figure implied by the hours is about 1,420.
    given = ("--images_per_second", "256=4439", "512=1420", "--num_gpus", "32")
    arguments = (*given, "--recipe", "seed002", "--gpu", "A100-80GB")
    row = cost(tmp_path, *arguments)[0]
    assert row["gpu_hours"] == pytest.approx(13165, rel=0.002)
    assert row["cost_usd"] == pytest.approx(39511, rel=0.003)
    row = cost(tmp_path, *arguments, "--price", "p4de-on")[0]
    assert row["cost_usd"] == pytest.approx(67405, rel=0.002)


# By hand, with a price of 1.5 USD and a power of 500 W.


def test_an_interval_is_carried_through(tmp_path, files):
    table = write_table(
        tmp_path,
        "gpu,num_gpus,image_size,images_per_second,images_per_second_low,images_per_second_high\n"
        "X100,4,64,10,8,12.5\n",
    )
    row = cost(tmp_path, table, "--recipe", "small", *files)[0]
    # 864,000 / 10 = 86,400 s: 1 day, 96 GPU-hours, 144 USD, 48 kWh; at 12.5 images/s 0.8 of it,
    # at 8 images/s 1.25 times.
    for name, value in (
        ("days_to_train", 1),
        ("gpu_hours", 96),
        ("cost_usd", 144),
        ("energy_kwh", 48),
    ):
        ends = [row[f"{name}{end}"] for end in ("", "_low", "_high")]
        assert ends == pytest.approx([value, 0.8 * value, 1.25 * value])


def test_the_machine_may_be_named_beside_the_gpu(tmp_path, files):
    table = write_table(
        tmp_path, "gpu,num_gpus,image_size,images_per_second\nX100 (big.node),4,64,10\n"
    )
    assert cost(tmp_path, table, "--recipe", "small", *files)[0]["cost_usd"] == 144


@pytest.mark.parametrize(("price", "usd"), [("reserved", 384), ("re", 384), ("2.25", 216)])
def test_another_price_is_chosen(capsys, tmp_path, files, price, usd):
    arguments = ("--images_per_second", "64=10", "--num_gpus", "4", "--gpu", "X100")
    rows = cost(tmp_path, *arguments, "--recipe", "small", *files, "--price", price)
    assert rows[0]["cost_usd"] == pytest.approx(usd)


def test_an_unknown_gpu_has_no_price_and_no_power(capsys, tmp_path, files):
    arguments = ("--images_per_second", "64=10", "--num_gpus", "4", "--gpu", "Y200")
    row = cost(tmp_path, *arguments, "--recipe", "small", *files)[0]
    assert (row["cost_usd"], row["energy_kwh"]) == (None, None)
    assert row["gpu_hours"] == pytest.approx(96)
    output = capsys.readouterr().out
    assert "price: n/a for Y200; add a row with gpus: [Y200] under prices" in output
    assert "power: n/a for Y200; add a row with gpus: [Y200] under power" in output


def test_three_runs_have_an_interval_between_them(tmp_path, files):
    table = write_table(
        tmp_path,
        "kind,source,gpu,num_gpus,image_size,images_per_second\n"
        + "".join(f"measured,{rate},X100,4,64,{rate}\n" for rate in (5, 10, 20)),
    )
    row = cost(tmp_path, table, "--recipe", "small", *files)[0]
    # Logs ln 10 and +- ln 2: standard error 0.400188, t(0.975, 2) = 4.302653, e^1.721870 = 5.59497.
    assert row["days_to_train"] == pytest.approx(1)
    assert row["days_to_train_high"] == pytest.approx(5.59497, rel=1e-4)
    assert row["days_to_train_low"] == pytest.approx(1 / 5.59497, rel=1e-4)


def test_gpu_counts_without_a_figure_for_each_stage_are_named(capsys, tmp_path, files):
    table = write_table(
        tmp_path,
        "gpu,num_gpus,image_size,images_per_second\n"
        "X100,4,64,20\nX100,4,128,20\nX100,8,64,40\nX100,8,256,40\n",
    )
    rows = cost(tmp_path, table, "--recipe", "two", *files)
    assert [(row["num_gpus"], row["days_to_train"]) for row in rows] == [(4, 1)]
    assert "left out: 8 GPUs, without a figure at 128 px" in capsys.readouterr().out


def test_a_prediction_can_be_paid_for(quoted, tmp_path):
    predicted = tmp_path / "predicted.csv"
    table = str(quoted / "aws_p5_scaling.csv")
    assert main(["scaling", "predict", table, "--num_gpus", "512", "--out", str(predicted)]) == 0
    figure = read_figures(predicted)[0]
    row = cost(tmp_path, predicted, "--recipe", "mosaicml-all-512")[0]
    seconds = 2_867_200_000 / figure["images_per_second_high"]
    assert row["days_to_train_low"] == pytest.approx(seconds / 86_400)


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "flag", "value"),
    [
        (
            ["{table}", "--recipe", "mosaicml"],
            "TABLE, --images_per_second or --recipe",
            [512],
        ),
        (["{table}", "--recipe", "mosaic"], "--recipe", "mosaic"),
        (["{table}", "--recipe", "stability"], "--recipe", "stability"),
        (
            ["{table}", "--recipe", "seed", "--num_gpus", "9"],
            "--num_gpus; python -m sdbench scaling predict makes figures of others",
            [9],
        ),
        (["{table}", "--recipe", "seed", "--price", "gold"], "--price", "gold"),
        (["{table}", "--recipe", "seed", "--price", "-1"], "--prices or --price", -1.0),
        (["{table}", "--recipe", "seed", "--prices", "{table}"], "--prices", "{table}"),
        (["{table}", "--recipe", "seed", "--prices", "none.yaml"], "--prices", "none.yaml"),
        (
            ["{table}", "--recipe", "seed", "--images_per_second", "256=1"],
            "TABLE or --images_per_second",
            "{table}",
        ),
        (
            ["--recipe", "seed", "--images_per_second", "256=fast"],
            "--images_per_second",
            "256=fast",
        ),
        (["--recipe", "seed", "--images_per_second", "256=1"], "--num_gpus", []),
        (["{mixed}", "--recipe", "seed"], "--where latents=...", "online and precomputed"),
        (["{several}", "--recipe", "seed"], "--where micro_batch=...", "4 and 8"),
    ],
)
def test_what_cannot_be_worked_out_is_refused(tmp_path, quoted, arguments, flag, value):
    columns = "gpu,num_gpus,image_size,latents,micro_batch,images_per_second\n"
    mixed, several = tmp_path / "mixed.csv", tmp_path / "several.csv"
    mixed.write_text(f"{columns}X,8,256,online,4,10\nX,8,512,precomputed,4,10\n")
    several.write_text(f"{columns}X,8,256,online,4,10\nX,8,256,online,8,20\n")
    table = quoted / "mosaicml_diffusion_benchmark_a100.csv"
    names = {"table": table, "mixed": mixed, "several": several}
    error = refusal(*(argument.format(**names) for argument in arguments))
    value = value.format(**names) if isinstance(value, str) else value
    assert (error.flag, error.value) == (flag, value)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("prices: [{name: a, gpus: [X]}]", {"name": "a", "gpus": ["X"]}),
        ("prices: none", "none"),
        ("prices: [{name: a, gpus: [X], value: free, unit: USD, per: GPU-hour, %s}]", "free"),
        ("prices: [{name: a, gpus: [X], value: 1, unit: EUR, per: GPU-hour, %s}]", "EUR"),
        ("- a list", None),
        ("{", None),
    ],
)
def test_a_file_of_prices_is_checked(tmp_path, quoted, content, value):
    prices = tmp_path / "prices.yaml"
    prices.write_text(content.replace("%s", "source: here, date: 2026-11-21"))
    table = quoted / "mosaicml_diffusion_benchmark_a100.csv"
    error = refusal(table, "--recipe", "mosaicml-all-512", "--prices", prices)
    found = error.value["unit"] if value == "EUR" else error.value
    assert error.flag.startswith("--prices")
    assert found == (str(prices) if value is None else value)


@pytest.mark.parametrize(
    "content",
    [
        "small: {about: a, source: b, global_batch: 64}",
        "small: {about: a, source: b, global_batch: 64, stages: []}",
        "small: {about: a, source: b, global_batch: 64, stages: [{image_size: 64}]}",
        "small: [1]",
    ],
)
def test_a_file_of_recipes_is_checked(tmp_path, quoted, content):
    recipes = tmp_path / "recipes.yaml"
    recipes.write_text(content)
    table = quoted / "mosaicml_diffusion_benchmark_a100.csv"
    arguments = (table, "--recipe", "small", "--recipes", recipes)
    error = refusal(*arguments)
    assert (error.flag, error.value) == ("--recipes", str(recipes))
