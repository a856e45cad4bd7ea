"""Writes what is known of the predictions: results/predictions.csv, and tables and a plot.

    python tools/try_predictions.py

Every GPU, source and model is predicted from the figures of the others, for the tables of
results/predictions.md. results/predictions.csv has the predictions for the works of `WORKS`;
results/index.html shows them beside measured and published figures.
"""

from __future__ import annotations

import datetime
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sdbench.base.carried import RESULTS  # noqa: E402
from sdbench.forecast import law  # noqa: E402
from sdbench.forecast.law import Case, Tested  # noqa: E402
from sdbench.forecast.predict import PredictSettings, predict_rows  # noqa: E402
from sdbench.record.configuration import group  # noqa: E402
from sdbench.record.row import format_csv  # noqa: E402
from sdbench.report.plots import make_figure, plain_style  # noqa: E402
from sdbench.report.tables import make_table, to_markdown  # noqa: E402
from sdbench.results.frame import PREDICTIONS  # noqa: E402
from sdbench.settings.request import parse  # noqa: E402

# Of the tables of the seed documents that have images/s.
SEED_SOURCES = ("AWS", "MosaicML, benchmark", "MosaicML, latents")
LORA = "--latents precomputed --lora_rank 16 --precision bf16"
# What is predicted, as flags of predict, for the numbers of GPUs of `COUNTS`.
WORKS = (
    "--model_name sd2-base --image_size 512 --latents precomputed",
    "--model_name sd2-base --image_size 512 --latents online",
    "--model_name sd2-base --image_size 256 --latents precomputed",
    f"--model_name sd2-base --image_size 512 {LORA}",
    "--model_name sdxl --image_size 1024 --latents precomputed",
    f"--model_name sdxl --image_size 1024 {LORA}",
    "--model_name sd3-medium --image_size 1024 --latents precomputed",
    f"--model_name sd3-medium --image_size 1024 {LORA}",
    "--model_name flux-schnell --image_size 256 --latents precomputed --sharding full",
    f"--model_name flux-schnell --image_size 1024 {LORA}",
)
COUNTS = (1, 8, 16, 64)
# Figures that were looked up when the law was done, of GPUs that it does not know.
UNSEEN = {"milabench_diffusion_more": ("milabench", law.EAGER)}


def find_coverage(cases: Sequence[Case]) -> dict[str, float]:
    """Share of figures inside their intervals, by kind of prediction.

    What is left out is in neither the law nor the errors that the width of its interval is from.
    """
    inside = defaultdict(list)
    for members in group(law.leave_out(cases), key_of=lambda one: one.group).values():
        left = {one.case for one in members}
        others = law.leave_out([case for case in cases if case not in left])
        for one in members:
            if any(other.pool == one.pool for other in others):
                half = math.log(law.find_factor(others, one.pool))
                inside[one.pool].append(abs(one.log_error) <= half)
    return {pool: statistics.fmean(found) for pool, found in inside.items()}


def list_groups(tested: Sequence[Tested]) -> Iterator[dict[str, Any]]:
    """A row for each GPU, source and model that was left out."""
    for (kind, name), members in group(tested, key_of=lambda one: one.group).items():
        ratios = [one.predicted / one.case.images_per_second for one in members]
        errors = [abs(ratio - 1) for ratio in ratios]
        yield {
            "left out": kind,
            "name": name,
            "figures": len(members),
            "median of predicted / known": round(statistics.median(ratios), 3),
            "median error, %": round(100 * statistics.median(errors), 1),
            "largest error, %": round(100 * max(errors), 1),
            "model is known": not members[0].is_new,
        }


def list_pools(cases: Sequence[Case], tested: Sequence[Tested]) -> Iterator[dict[str, Any]]:
    """A row for each kind of prediction: its errors, and how often its interval is right."""
    coverage = find_coverage(cases)
    for pool, members in group(tested, key_of=lambda one: one.pool).items():
        errors = sorted(abs(one.predicted / one.case.images_per_second - 1) for one in members)
        yield {
            "predictions of": pool,
            "tests": len(members),
            "figures": len({one.case for one in members}),
            "median error, %": round(100 * statistics.median(errors), 1),
            "90 % are within, %": round(100 * errors[math.ceil(0.9 * len(errors)) - 1], 1),
            "factor of the interval": round(law.find_factor(tested, pool), 2),
            "figures inside, %": round(100 * coverage[pool], 1) if pool in coverage else None,
        }


def list_seed(tested: Sequence[Tested]) -> Iterator[dict[str, Any]]:
    """The rows of the seeds' tables, predicted from the figures of everybody else."""
    for one in tested:
        if one.left_out == "source" and one.case.source in SEED_SOURCES:
            known = one.case.images_per_second
            yield {
                "source": one.case.origin,
                "GPU": one.case.card.name,
                "GPUs": one.case.num_gpus,
                "px": one.case.image_size,
                "micro-batch": int(one.case.micro_batch),
                "published, images/s": known,
                "predicted, images/s": round(one.predicted, 1),
                "error, %": round(100 * (one.predicted / known - 1), 1),
            }


def list_unseen(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Figures of GPUs of other kinds, predicted from all figures of the law."""
    fitted = law.Law(cases)
    for case in law.load_cases(UNSEEN):
        if not case.source.startswith("this suite"):
            predicted = fitted.predict(case).images_per_second
            yield {
                "GPU": case.card.name,
                "micro-batch": int(case.micro_batch),
                "published, images/s": case.images_per_second,
                "predicted, images/s": round(predicted, 2),
                "error, %": round(100 * (predicted / case.images_per_second - 1), 1),
            }


def draw(tested: Sequence[Tested], path: Path) -> None:
    """Predicted against published images/s of one GPU."""
    with plain_style():
        sources = "results/quoted and results/throughput.csv; each point without its own GPU"
        figure, (axes,) = make_figure([4.2], sources=sources)
        shown = [one for one in tested if one.left_out == "GPU"]
        for name, members in group(shown, key_of=lambda one: one.case.card.name).items():
            known = [1 / one.case.seconds for one in members]
            predicted = [one.predicted / one.case.num_gpus for one in members]
            axes.loglog(known, predicted, "o", label=name.replace("NVIDIA ", ""), alpha=0.7)
        ends = (6, 400)
        axes.plot(ends, ends, color="#555555", linewidth=1)
        for factor in (1 / 1.2, 1.2):
            axes.plot(ends, [factor * end for end in ends], color="#BBBBBB", linewidth=0.8)
        axes.set(xlim=ends, ylim=ends)
        axes.set_xlabel("published or measured, images/s of one GPU")
        axes.set_ylabel("predicted, images/s of one GPU")
        axes.set_title("Predicted without any figure of the GPU; grey lines: 20 % off")
        axes.legend()
        figure.savefig(path, dpi=130, metadata={"Software": None})


# Columns of predictions.csv that are of the kind of prediction: `list_pools` by its headings.
OF_POOL = {
    "pool_tests": "tests",
    "pool_median_error_percent": "median error, %",
    "tested_inside_percent": "figures inside, %",
}
# Columns of a prediction that are not of the prediction alone.
OTHERS = ("known", "price_source", "usd_per_million", "usd_per_million_low", "usd_per_million_high")


def list_predictions(cases: Sequence[Case], tested: Sequence[Tested]) -> Iterator[dict[str, Any]]:
    """The rows of predictions.csv, each with the error of its kind of prediction."""
    pools = {row["predictions of"]: row for row in list_pools(cases, tested)}
    for flags in WORKS:
        for num_gpus in COUNTS if "sharding" not in flags else COUNTS[1:]:
            argv = [*flags.split(), "--num_gpus", str(num_gpus)]
            request = parse(PredictSettings, argv, prog="predict", description="", epilog="")
            for row in predict_rows(request, cases, tested):
                print(row["model"], row["image_size"], row["gpu"], row["images_per_second"])
                yield {
                    **{name: value for name, value in row.items() if name not in OTHERS},
                    "why": None if row["images_per_second"] else row["why"],
                    **{name: pools[row["pool"]][of] for name, of in OF_POOL.items()},
                    "predicted_on": datetime.datetime.now(datetime.UTC).date().isoformat(),
                }


if __name__ == "__main__":
    cases = law.load_cases()
    tested = law.leave_out(cases)
    tables = (list_groups(tested), list_seed(tested), list_unseen(cases))
    for table in (list_pools(cases, tested), *tables):
        print(to_markdown(make_table(table)))
        print()
    draw(tested, RESULTS / "predictions.png")
    rows = list(list_predictions(cases, tested))
    (RESULTS / PREDICTIONS).write_text(format_csv(rows, columns=tuple(rows[0])), encoding="utf-8")
