"""Days, GPU-hours, cost and energy, against the cost tables of others and worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdbench.cli import main
from sdbench.report.figures import read_figures
from tests.refusals import refusal_of
from tests.report.results_folder import make_gpu_record, write_run

HEADER = "gpu,num_gpus,image_size,images_per_second"

PRICES = """\
prices:
  - {name: spot, gpus: [X100], value: 1.5, unit: USD, per: GPU-hour, source: a, date: 2026-11-21}
  - {name: reserved, gpus: [X100], value: 4, unit: USD, per: GPU-hour, source: b, date: 2026-11-21}
power:
  - {gpus: [X100], value: 500, unit: W, per: GPU board, source: c, date: 2026-11-21}
"""


def recipe(name: str, *stages: tuple[int, int]) -> str:
    """The YAML of a recipe of stages, each a resolution and a number of images."""
    listed = ", ".join(f"{{image_size: {size}, num_images: {number}}}" for size, number in stages)
    return f"{name}: {{about: a test, source: here, stages: [{listed}]}}\n"


RECIPES = recipe("small", (64, 864_000)) + recipe("two", (64, 864_000), (128, 864_000))


@pytest.fixture
def files(tmp_path):
    """Flags that name a file of prices and one of recipes."""
    (tmp_path / "prices.yaml").write_text(PRICES)
    (tmp_path / "recipes.yaml").write_text(RECIPES)
    return ["--prices", str(tmp_path / "prices.yaml"), "--recipes", str(tmp_path / "recipes.yaml")]


@pytest.fixture
def quoted(repository) -> Path:
    return repository / "results" / "quoted"


@pytest.fixture
def cost(tmp_path):
    """A function that runs the command and returns the rows that it writes."""

    def run(*arguments: object) -> list[dict]:
        out = tmp_path / "out.csv"
        assert main(["scaling", "cost", *map(str, arguments), "--out", str(out)]) == 0
        return read_figures(out)

    return run


@pytest.fixture
def write_table(tmp_path):
    """A function that writes rows of figures as CSV and returns the path."""

    def write(*rows: str, header: str = HEADER, name: str = "table") -> Path:
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join((header, *rows)))
        return path

    return write


def test_mosaicmls_cost_table_comes_back(quoted, cost):
    rows = cost(quoted / "mosaicml_diffusion_a100.csv", "--recipe", "mosaicml")
    printed = read_figures(quoted / "mosaicml_diffusion_a100_cost.csv")
    assert {row["kind"] for row in rows} == {"modelled"}
    for name in ("num_gpus", "days_to_train", "cost_usd"):
        theirs = [row[name] for row in printed]
        assert [row[name] for row in rows] == pytest.approx(theirs, rel=0.001)


def test_an_interval_is_carried_through(write_table, cost, files):
    header = (
        "gpu,num_gpus,image_size,images_per_second,images_per_second_low,images_per_second_high"
    )
    table = write_table("X100,4,64,10,8,12.5", header=header)
    row = cost(table, "--recipe", "small", *files)[0]
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


@pytest.mark.parametrize(
    ("gpu", "price", "usd"),
    [("X100 (big.node)", None, 144), ("X100", "re", 384), ("X100", "2.25", 216)],
)
def test_a_price_is_found_by_the_gpu_or_chosen(write_table, cost, files, gpu, price, usd):
    table = write_table(f"{gpu},4,64,10")
    chosen = [] if price is None else ["--price", price]
    rows = cost(table, "--recipe", "small", *files, *chosen)
    assert rows[0]["cost_usd"] == pytest.approx(usd)


def test_a_gpu_is_found_by_what_people_call_it(capsys, write_table, cost, files):
    row = cost(write_table("A100,4,64,10"), "--recipe", "small", *files[2:])[0]
    assert row["cost_usd"] == pytest.approx(2 * row["gpu_hours"])  # the first row of an A100
    assert "--price chooses spheron-a100 or p4de-reserved" in capsys.readouterr().out
    table = write_table("NVIDIA X100 NVL,4,64,10", "NVIDIA Y200,4,64,20", name="several")
    (row,) = cost(table, "--recipe", "small", "--where", "gpu=x100", *files)
    assert row["gpu"] == "NVIDIA X100 NVL"


def test_an_unknown_gpu_has_no_price_and_no_power(capsys, write_table, cost, files):
    row = cost(write_table("Y200,4,64,10"), "--recipe", "small", *files)[0]
    assert (row["cost_usd"], row["energy_kwh"]) == (None, None)
    assert row["gpu_hours"] == pytest.approx(96)
    output = capsys.readouterr().out
    assert "price: n/a for Y200; add a row with gpus: [Y200] under prices" in output
    assert "power: n/a for Y200; add a row with gpus: [Y200] under power" in output


def test_gpu_counts_without_a_figure_for_each_stage_are_named(capsys, write_table, cost, files):
    table = write_table("X100,4,64,20", "X100,4,128,20", "X100,8,64,40", "X100,8,256,40")
    rows = cost(table, "--recipe", "two", *files)
    assert [(row["num_gpus"], row["days_to_train"]) for row in rows] == [(4, 1)]
    assert "left out: 8 GPUs, without a figure at 128 px" in capsys.readouterr().out


def test_a_run_in_two_tables_counts_once(write_table, cost, files):
    header = f"source,kind,started_utc,{HEADER}"
    row = "run-{},measured,2026-11-21T05:48:24+00:00,X100,4,64,{}"
    runs = [row.format(number, rate) for number, rate in enumerate((5, 10, 20), start=1)]
    one = write_table(*runs, header=header, name="one")
    two = write_table(*runs[1:], header=header, name="two")
    # The mean of 5, 10 and 20 images/s is 10: their logs have equal distances.
    (found,) = cost(one, two, "--recipe", "small", *files)
    assert found["days_to_train"] == pytest.approx(1)
    assert found["days_to_train_low"] < 0.5 and found["days_to_train_high"] > 2
    other = write_table(row.format(2, 21), header=header, name="other")
    error = refusal_of("scaling", "cost", one, other, "--recipe", "small", *files)
    assert error.value == "run-2: 10 and 21"


def test_a_folder_of_a_run_gives_its_rate_and_interval(cost, tmp_path):
    record = make_gpu_record()
    (row,) = cost(write_run(tmp_path / "run", record), "--recipe", "mosaicml-all-512")
    summary = record["summary"]
    interval = summary["images_per_second_interval"]
    for end, rate in (
        ("", summary["images_per_second"]),
        ("_low", interval["high"]),
        ("_high", interval["low"]),
    ):
        assert row[f"days_to_train{end}"] == pytest.approx(2_867_200_000 / rate / 86_400)
    assert (row["gpu"], row["num_gpus"]) == ("NVIDIA H200", 8)


def test_half_a_gpu_a_duplicate_row_and_a_run_that_trains_nothing_are_refused(
    write_table, repository
):
    command = ("scaling", "cost", "--recipe", "mosaicml-all-512")
    table = write_table("H100,8.5,512,10", "H100,2,512,20")
    assert "'8.5' as num_gpus" in str(refusal_of(*command, table))
    table = write_table("H100,2,512,20", "H100,2,512,20")
    error = refusal_of(*command, table)
    assert (error.value, error.flag) == ("2 rows, 1 of them different", "TABLE")
    (run, *_) = sorted((repository / "results" / "runs").glob("*_feed-mds-512px"))
    error = refusal_of(*command, run)
    assert (error.value, error.flag) == (f"{run}: feed", "TABLE")


def test_tables_without_a_rate_and_a_folder_that_is_not_there_are_refused(quoted, write_table):
    command = ("scaling", "cost", "--recipe", "mosaicml-all-512")
    assert refusal_of(*command).flag == "TABLE and --where"
    assert refusal_of(*command, write_table("H100,8,512,")).flag == "TABLE and --where"
    table = quoted / "mosaicml_diffusion_a100_cost.csv"
    assert refusal_of(*command, table).flag == "the path given"
    table = quoted / "aws_p5_scaling.csv"
    assert refusal_of(*command, table, "--out", "no/such/folder").flag == "--out"


MIXED = ("X,8,256,online,4,10", "X,8,512,precomputed,4,10")
BOTH = ("A100-40GB,8,256,online,4,10", "A100-SXM4-80GB,8,256,online,4,20", "B,8,256,online,4,9")
SEVERAL = ("X,8,256,online,4,10", "X,8,256,online,8,20", "X,8,512,online,4,20")


@pytest.mark.parametrize(
    ("rows", "flags", "flag", "value"),
    [
        (
            SEVERAL[2:],
            "mosaicml",
            "TABLE or --recipe",
            "left out: 8 GPUs, without a figure at 256 px",
        ),
        (SEVERAL, "stability", "--recipe", "stability"),
        (SEVERAL, "any --price gold", "--price", "gold"),
        (SEVERAL, "any --price -1", "--price", "-1"),
        (SEVERAL, "any --prices none.yaml", "--prices", "none.yaml"),
        (MIXED, "any", "--where latents=...", "online and precomputed"),
        (BOTH, "any --where gpu=A100", "--where gpu=...", "A100-40GB and A100-SXM4-80GB"),
        (SEVERAL, "any", "--where micro_batch=...", "4 and 8"),
    ],
)
def test_what_cannot_be_worked_out_is_refused(write_table, rows, flags, flag, value):
    header = "gpu,num_gpus,image_size,latents,micro_batch,images_per_second"
    table = write_table(*rows, header=header)
    error = refusal_of("scaling", "cost", table, "--recipe", *flags.split())
    assert (error.flag, error.value) == (flag, value)


PRICE = "prices: [{name: a, gpus: [X], value: %s, unit: %s, per: GPU-hour, source: b, date: c}]"
RECIPE = "seed: {about: a, source: b%s}"


@pytest.mark.parametrize(
    ("flag", "content"),
    [
        ("--prices", "prices: [{name: a, gpus: [X]}]"),
        ("--prices", "prices: none"),
        ("--prices", PRICE % ("true", "USD")),
        ("--prices", PRICE % (0, "USD")),
        ("--prices", PRICE % (1, "EUR")),
        ("--prices", "- a list"),
        ("--recipes", RECIPE % ""),
        ("--recipes", RECIPE % ", stages: []"),
        ("--recipes", RECIPE % ", stages: [{image_size: 64, num_images: 0}]"),
    ],
)
def test_a_file_of_prices_or_recipes_is_checked(tmp_path, write_table, flag, content):
    (tmp_path / "file.yaml").write_text(content)
    table = write_table("X,8,256,1", "X,8,512,1")
    error = refusal_of("scaling", "cost", table, "--recipe", "any", flag, "file.yaml")
    assert (error.flag, error.value) == (flag, "file.yaml")
