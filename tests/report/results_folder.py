"""Results folders to make tables, plots and pages from."""

from __future__ import annotations

import copy
import csv
import dataclasses
import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.analysis.report import PLACES, README
from sdbench.measure.timer import Step
from sdbench.record import formulas
from sdbench.record.formulas import MEASURED, PROFILED, WARMUP
from sdbench.record.store import load_record
from sdbench.report.markers import BEGIN, END
from sdbench.report.tables import Table
from sdbench.settings.config import PRESETS
from sdbench.settings.setting import PerDevice
from tests.runs import follow_rate

RESULTS = Path(__file__).resolve().parents[2] / "results"
PARTS_S = {
    "data_wait": 0.1,
    "host_to_device": 0.1,
    "vae_encode": 0.5,
    "text_encode": 0.1,
    "unet_forward": 0.9,
    "backward": 1.6,
    "gradient_communication": 0.2,
    "rank_wait": 0.0,
    "optimizer": 0.3,
    "ema": 0.1,
    "other": 0.1,
}
DRIFTING = {"summary__flags": ["drift"], "summary__stability": "drift"}
BREAKDOWN = {"num_steps": 5, "step_time_s": 4.0, "seconds": PARTS_S}
# Line breaks, the marks of markdown, HTML and CSV, two dollar signs, and letters beyond ASCII.
HOSTILE = '=cmd()|<b>"x"</b> `a` $x^2$ *s* _u_ [l](http://x)\nsecond \u00e9\u4e2d\u202e'


@functools.cache
def _published_record() -> dict[str, Any]:
    path = sorted(RESULTS.glob("runs/*_sd2-base-256px-fast/record.json"))[0]
    return load_record(path)


def make_record(**changes: Any) -> dict[str, Any]:
    """A published record of `fast` at 256 px with changes, e.g. ``config__use_ema=True``."""
    record = copy.deepcopy(_published_record())
    _set(record, changes)
    follow_rate(record)
    _set(record, changes)  # what is given stands
    return record


def _set(record: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for path, value in changes.items():
        *folders, name = path.split("__")
        place = functools.reduce(dict.__getitem__, folders, record)
        place[name] = value


def make_gpu_record(**changes: Any) -> dict[str, Any]:
    """A run on eight H200 at 512 px, global batch 2048, with EMA, unless changed."""
    gpu = {
        "machine__device_type": "cuda",
        "machine__device_name": "NVIDIA H200",
        "ranks__world_size": 8,
        "config__image_size": 512,
        "config__batch_size": 2048,
        "config__use_ema": True,
    }
    return make_record(**{**gpu, **changes})


def make_recipe(
    rate: float = 1.0, *, preset: str = "seed", on_gpu: bool = False, **settings: Any
) -> dict[str, Any]:
    """A run of a preset with these settings given as flags, and images/s.

    Its steps take as long as a batch of 2 does at that rate.
    """
    record = make_gpu_record() if on_gpu else make_record()
    record["machine"]["device_type"] = "cuda" if on_gpu else "cpu"
    record["ranks"]["world_size"] = settings.pop("num_ranks", 1)
    values = {
        name: (value.gpu if on_gpu else value.cpu) if isinstance(value, PerDevice) else value
        for name, value in PRESETS[preset].items()
    }
    defaults = {"preset": preset, "num_threads": 2, "use_ema": False}
    record["config"].update({**values, **defaults, **settings})
    record["origin"].update(dict.fromkeys(values, "preset"), num_threads="default")
    record["origin"].update(dict.fromkeys(settings, "flag"))
    record["summary"]["images_per_second"] = rate
    follow_rate(record)["summary"]["step_time_p50_s"] = 2 / rate
    return record


def rows_of(table: Table) -> list[dict[str, str]]:
    """The rows of a table as texts by heading."""
    names = [column.name for column in table.columns]
    return [dict(zip(names, (cell.text for cell in row), strict=True)) for row in table.rows]


def make_text(results: Path, name: str = README) -> None:
    """A text with places for its tables."""
    blocks = [f"{BEGIN.format(place)}\n{END.format(place)}\n" for place in PLACES[name]]
    (results / name).write_text("before\n" + "between\n".join(blocks) + "after\n")


def make_results(results: Path, *records: dict[str, Any], quoted: bool = True) -> Path:
    """A results folder with these runs, each under a name of its own and with steps."""
    results.mkdir(exist_ok=True)
    make_text(results)
    if quoted:
        shutil.copytree(RESULTS / "quoted", results / "quoted")
    for number, record in enumerate(records):
        record = {**record, "run_id": f"{number:04d}{record['run_id'][4:]}"}
        write_run(results / "runs" / record["run_id"], record)
    return results


def write_run(
    folder: Path, record: dict[str, Any], *, losses: Sequence[float] | None = None
) -> Path:
    """The folder of a run: the published steps at the record's rate, or equal ones of `losses`."""
    folder.mkdir(parents=True)
    if record["summary"] is not None and "kind" not in record:
        if losses is None:
            record, steps = _with_profile(record, _published_steps(record["summary"]["window_s"]))
        else:
            record, steps = _with_losses(record, losses)
        lines = ["index,phase,step_time_s,data_wait_s,loss"]
        lines += [
            f"{index},{step.phase},{step.step_time_s!r},{step.data_wait_s!r},{step.loss!r}"
            for index, step in enumerate(steps)
        ]
        (folder / "steps.csv").write_text("\n".join(lines) + "\n")
    (folder / "record.json").write_text(json.dumps(record))
    (folder / "stdout.log").write_text("step 1\n")
    return folder


def _published_steps(window_s: float) -> list[Step]:
    """The steps of the published record, all longer by the same factor for a window of this."""
    published = _published_record()
    factor = window_s / published["summary"]["window_s"]
    with (RESULTS / "runs" / published["run_id"] / "steps.csv").open() as file:
        return [
            Step(
                int(row["index"]),
                row["phase"],
                factor * float(row["step_time_s"]),
                factor * float(row["data_wait_s"]),
                float(row["loss"]),
            )
            for row in csv.DictReader(file)
        ]


def _with_profile(record: dict[str, Any], steps: list[Step]) -> tuple[dict[str, Any], list[Step]]:
    """The steps and behind them those of the record's breakdown, and the record of such a run."""
    breakdown = record["summary"]["breakdown"] or {"num_steps": 0}
    steps += [dataclasses.replace(steps[-1], phase=PROFILED)] * breakdown["num_steps"]
    counts = {"num_steps": len(steps), "num_images": len(steps) * record["config"]["batch_size"]}
    return record | {"workload": record["workload"] | counts}, steps


def _with_losses(
    record: dict[str, Any], losses: Sequence[float]
) -> tuple[dict[str, Any], list[Step]]:
    """Equal steps with these losses, the first of them warm-up, and the record of such a run."""
    images_per_step = record["config"]["batch_size"]
    time_s = images_per_step / record["summary"]["images_per_second"]
    phases = [WARMUP] + [MEASURED] * (len(losses) - 1)
    steps = [
        Step(index, phase, time_s, 0.0, loss)
        for index, (phase, loss) in enumerate(zip(phases, losses, strict=True))
    ]
    window_s = time_s * (len(losses) - 1)
    of_steps = formulas.of_steps(steps, images_per_step=images_per_step, window_s=window_s)
    counts = {"num_steps": len(losses), "num_images": len(losses) * images_per_step}
    changed = {
        "workload": record["workload"] | counts,
        "summary": record["summary"] | of_steps | {"flags": None},
        "duration_s": 2 * time_s * len(losses),
    }
    return record | changed, steps
