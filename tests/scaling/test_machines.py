"""The machines of a training, by hand, from records, and against the seeds' table."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import pytest

from tests.refusals import refusal_of
from tests.report.results_folder import make_record
from tests.scaling.conftest import recipe

# 10 trainers of 20 images/s at half of that: 100. With a margin of a fifth, 120 are to be fed.
RECIPE = recipe("hundred", (64, 3_600_000))
PRICES = """\
machines:
  - {name: trainer, gpus: [X100], num_devices: 4, num_cpu_cores: 16, value: 10, unit: USD,
     per: machine-hour, source: a, date: 2026-11-22}
  - {name: encoder, gpus: [X10], num_devices: 2, num_cpu_cores: 3, value: 2, unit: USD,
     per: machine-hour, source: b, date: 2026-11-22}
"""
BESIDE, IN_STEP = "encoders beside the trainers", "encoders in the step"
ONCE = "latents made once, before"
GIVEN = {
    "recipe": "hundred",
    "num_trainers": 10,
    "scaling_efficiency": 0.5,
    "margin": 0.2,
    "trainer_rates": "64=20:18:25",
    "encoder_rates": "64=7:6:8",
    "decoder_rates": "64=3",
    "in_step_rates": "64=8",
    "trainer_machine": "trainer",
    "encoder_machine": "encoder",
}


@pytest.fixture
def command(tmp_path):
    """Makes the arguments of a plan with changes; None leaves a flag out."""
    (tmp_path / "recipes.yaml").write_text(RECIPE)
    (tmp_path / "prices.yaml").write_text(PRICES)
    files = {"recipes": tmp_path / "recipes.yaml", "prices": tmp_path / "prices.yaml"}

    def make(**changes) -> list[str]:
        values = {**GIVEN, **files, **changes}
        return [
            str(part)
            for name, value in values.items()
            if value is not None
            for part in (f"--{name}", *(value if isinstance(value, list) else [value]))
        ]

    return make


@pytest.fixture
def plan(command, rows_of):
    """Plans, and gives the rows by way, each way with its jobs in order."""

    def run(**changes) -> dict[str, list[dict]]:
        ways: dict[str, list[dict]] = {}
        for row in rows_of("machines", *command(**changes)):
            ways.setdefault(row["way"], []).append(row)
        return ways

    return run


def amounts(row: dict, name: str) -> tuple:
    return tuple(row[f"{name}{end}"] for end in ("", "_low", "_high"))


def test_encoders_and_decoders_are_as_many_as_feed_the_trainers(plan, capsys):
    ways = plan()
    (row,) = ways[BESIDE]
    # 120 / 7 = 17.1, 120 / 3 = 40; of its 3 cores, 40 decoders take 14 machines of encoders.
    assert (row["num_trainers"], row["num_encoders"], row["num_decoders"]) == (10, 18, 40)
    assert row["machines"] == "3 x trainer, 14 x encoder"
    assert row["slowest"] == "trainers"
    # 5 x 18 to 5 x 25 images/s.
    assert amounts(row, "images_per_second") == pytest.approx((100, 90, 125))
    assert amounts(row, "hours") == pytest.approx((10, 8, 100 / 9))
    assert amounts(row, "cost_usd") == pytest.approx((580, 464, 58 * 100 / 9))
    # At worst 150 images/s for encoders of 6, at best 108 for those of 8.
    table = capsys.readouterr().out
    assert " 18  14 to 25 " in table
    assert " 40  n/a " in table
    # 120 / (120 / 52) is more than 52 in floating point.
    assert plan(encoder_rates=f"64={120 / 52!r}")[BESIDE][0]["num_encoders"] == 52


def test_the_other_ways_to_encode(plan):
    ways = plan()
    (row,) = ways[IN_STEP]
    assert (row["num_encoders"], row["machines"], row["slowest"]) == (0, "3 x trainer", "trainers")
    assert amounts(row, "hours") == (25, None, None)
    assert row["cost_usd"] == pytest.approx(750)
    encode, train = ways[ONCE]
    # 18 encoders do 126 images/s, 40 decoders 120.
    assert (encode["num_trainers"], encode["slowest"]) == (0, "decoders")
    assert encode["hours"] == pytest.approx(3_600_000 / 120 / 3600)
    assert encode["cost_usd"] == pytest.approx(28 * encode["hours"])
    assert (train["num_encoders"], train["num_decoders"]) == (0, 0)
    assert amounts(train, "hours") == pytest.approx((10, 8, 100 / 9))
    assert train["cost_usd"] == pytest.approx(300)
    # Without rates of trainers that encode; a data set that is seen often is encoded once.
    ways = plan(in_step_rates=None, num_dataset_images=360_000)
    assert list(ways) == [BESIDE, ONCE]
    encode, train = ways[ONCE]
    assert encode["hours"] == pytest.approx(360_000 / 120 / 3600)
    assert train["hours"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("changes", "slowest", "rate"),
    [
        ({"num_encoders": 10}, "encoders", (70, 60, 80)),
        # 13 encoders do 91, 78 to 104, and the trainers 90 at least.
        ({"num_encoders": 13}, "encoders or trainers", (91, 78, 104)),
        ({"num_encoders": 40}, "trainers", (100, 90, 125)),
        # The decoders' rate is given without an interval.
        ({"num_decoders": 5}, "decoders", (15, None, None)),
        # Trainers that encode decode on their own cores: 48 of 3 machines.
        ({"decoder_rates": "64=0.5"}, "decoders", (24, None, None)),
    ],
)
def test_with_the_workers_that_one_has_the_slowest_decides(plan, changes, slowest, rate):
    (row,) = plan(**changes)[IN_STEP if "decoder_rates" in changes else BESIDE]
    assert row["slowest"] == slowest
    assert amounts(row, "images_per_second") == rate
    assert row["hours"] == pytest.approx(1000 / rate[0])


def test_the_seeds_table_comes_back(plan):
    # Its trainers take 4096 images in 0.9227 s. The rate at 512 px is told nowhere: it is what the
    # hours leave for that stage.
    trained = 4096 / 0.9227
    rates = {256: trained, 512: 1.7408e9 / (13165 / 32 * 3600 - 1.1264e9 / trained)}
    ways = plan(
        **dict.fromkeys(("recipes", "prices", "in_step_rates")),
        **{
            f"{worker}_rates": [f"{size}={rate / number!r}" for size, rate in rates.items()]
            for worker, number in (("trainer", 32), ("encoder", 48), ("decoder", 192))
        },
        recipe="anyscale",
        num_trainers=32,
        scaling_efficiency=1,
        margin=0,
        trainer_machine="p4de.24xlarge-reserved",
        encoder_machine="g5.2xlarge",
    )
    # Its dollars are those of the A100 alone.
    _, at_256, _, at_512 = ways[ONCE]
    assert 32 * (at_256["hours"] + at_512["hours"]) == pytest.approx(13165)
    assert at_256["cost_usd"] + at_512["cost_usd"] == pytest.approx(39511, rel=1e-4)
    row, _ = ways[BESIDE]
    assert (row["num_encoders"], row["num_decoders"]) == (48, 192)
    # 192 decoders have a core each on the 8 of 48 machines.
    assert row["machines"] == "4 x p4de.24xlarge-reserved, 48 x g5.2xlarge-on-demand"


# Rates from records.


@pytest.fixture
def write(tmp_path):
    """A function that writes a record and returns its path."""
    numbers = itertools.count()

    def to_file(record: dict) -> str:
        path = tmp_path / f"record-{next(numbers)}.json"
        path.write_text(json.dumps(record))
        return str(path)

    return to_file


def trainer_record(rate=40.0, **changes) -> dict:
    """A run on latents with 2 ranks, 64 px."""
    return make_record(
        config__image_size=64,
        config__latents="precomputed",
        ranks__world_size=2,
        summary__images_per_second=rate,
        summary__images_per_second_per_device=rate / 2,
        **changes,
    )


@pytest.fixture
def published(repository):
    """A function from a job to its first record, of 64 px, with changes of its settings."""

    def read(job: str, **settings) -> dict:
        path = sorted(repository.glob(f"results/runs/*_{job}/record.json"))[0]
        record = json.loads(path.read_text())
        record["config"].update(image_size=64, **settings)
        return record

    return read


def test_rates_of_records_are_those_of_one_worker(plan, write, published):
    encoder, decoder = published("precompute-mds-512px"), published("feed-mds-512px")
    encoder["summary"].update(images_per_second=28.0, images_per_second_per_device=7.0)
    encoder["summary"]["images_per_second_interval"].update(low=24.0, high=32.0)
    decoder["summary"].update(images_per_second=6.0, images_per_second_per_core=3.0)
    decoder["summary"]["images_per_second_interval"].update(low=4.0, high=8.0)
    ways = plan(
        trainer_rates=[write(trainer_record(rate)) for rate in (36.0, 40.0, 41.0)],
        encoder_rates=write(encoder),
        decoder_rates=write(decoder),
        num_encoders=2,
        num_decoders=3,
    )
    encode, train = ways[ONCE]
    # Two encoders do 14, 12 to 16; three decoders 9, 6 to 12. The low end is that of the slowest.
    assert amounts(encode, "images_per_second") == pytest.approx((9, 6, 12))
    # A t interval of three runs on the logarithms: 4.3027 standard errors.
    logs = [math.log(rate) for rate in (18.0, 20.0, 20.5)]
    half = 4.302653 * statistics.stdev(logs) / math.sqrt(3)
    low, high = (math.exp(statistics.fmean(logs) + sign * half) for sign in (-1, 1))
    _, *ends = amounts(train, "images_per_second")
    assert ends == pytest.approx([5 * low, 5 * high], rel=1e-6)


def test_a_record_of_ray_data_has_both_rates(plan, write, published):
    record = published("feed-mds-512px", engine="ray", emulate_step_seconds=0.5)
    interval = record["summary"]["images_per_second_interval"]
    record["summary"]["ray"] = {
        "num_trainers": 2,
        "num_decoders": 4,
        "num_encoders": 2,
        "images_per_second_per_decoder": 3.0,
        "images_per_second_per_decoder_interval": {**interval, "low": 2.0, "high": 4.0},
        "images_per_second_per_encoder": 7.0,
        "images_per_second_per_encoder_interval": {**interval, "low": 6.0, "high": None},
        "num_decoders_for_target": 1,
        "num_encoders_for_target": 1,
        "target_images_per_second": 1.0,
        "num_failed_blocks": 0,
    }
    path = write(record)
    ways = plan(encoder_rates=path, decoder_rates=path, num_encoders=10, num_decoders=20)
    encode, _ = ways[ONCE]
    # 10 encoders do 70, 60 at least; 20 decoders 60, 40 to 80.
    assert amounts(encode, "images_per_second") == (60, 40, None)


def test_records_of_other_work_are_refused(command, write, published):
    online, trainer = write(make_record(config__image_size=64)), write(trainer_record())
    failed = trainer_record() | {"status": "failed", "reason": "a test", "summary": None}
    on_ray = published("precompute-mds-512px", engine="ray")
    emulated = published("feed-mds-512px", emulate_step_seconds=0.5)
    emulated["summary"]["images_per_second_per_core"] = None
    for name, rates in (
        ("trainer_rates", online),
        ("trainer_rates", write(failed)),
        ("in_step_rates", trainer),
        ("encoder_rates", online),
        ("encoder_rates", write(on_ray)),
        ("decoder_rates", write(emulated)),
        # Two configurations have no mean.
        ("trainer_rates", [trainer, write(trainer_record(config__batch_size=4096))]),
        ("trainer_rates", ["64=3", "64=4"]),
    ):
        assert refusal_of("scaling", "machines", *command(**{name: rates})).flag == f"--{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trainer_rates", "64=0"),
        ("trainer_rates", "64=3:4:5"),
        ("decoder_rates", "64=nan"),
        ("encoder_rates", "128=3"),
        ("encoder_rates", "nowhere"),
        ("scaling_efficiency", 1.1),
        ("trainer_machine", "p5"),
        ("margin", -0.1),
        # Of the file of prices: what stands for the first text.
        ("prices", ("num_devices: 4", "num_devices: 0")),
        ("prices", ("per: machine-hour", "per: GPU-hour")),
    ],
)
def test_what_cannot_be_planned_with_is_refused(command, tmp_path, name, value):
    if name == "prices":
        path = tmp_path / "other.yaml"
        path.write_text(PRICES.replace(*value, 1))
        value = path
    error = refusal_of("scaling", "machines", *command(**{name: value}))
    assert error.flag.split()[0] == f"--{name}"
