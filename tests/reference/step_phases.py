"""Where does the time of one training step go on a CPU?

Runs the parts of a preset in a plain loop, without a trainer, and times each phase by the host's
clock, which on a CPU is the device's. The profile of a run inside the suite is a later issue's.

    python tests/reference/step_phases.py --preset fast --output phases.json
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a script's own folder is on the path, the repository is not

from sdbench.config import parse_request  # noqa: E402
from sdbench.distributed import Ranks  # noqa: E402
from sdbench.measure.hardware import as_dict, inspect_machine  # noqa: E402
from sdbench.measure.provenance import git_state, package_versions  # noqa: E402
from sdbench.resolve import resolve  # noqa: E402
from sdbench.workloads import pretrain  # noqa: E402

PHASES = ("vae_encode", "text_encode", "unet_forward", "backward", "optimizer")


class PhaseClock:
    """Adds up the time inside wrapped calls."""

    def __init__(self) -> None:
        self.times_s: dict[str, list[float]] = collections.defaultdict(list)

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            result = function(*args, **kwargs)
            self.times_s[phase].append(time.perf_counter() - started_s)
            return result

        return timed


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--model_name", default="sd2-base")
    parser.add_argument("--warmup_batches", type=int, default=2)
    parser.add_argument("--measure_batches", type=int, default=10)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args(argv)
    flags = ["--use_synth_data", "--num_workers", "0", "--preset", arguments.preset]
    request = parse_request(
        [*flags, "--model_name", arguments.model_name], description="", epilog=""
    )
    machine = inspect_machine()
    plan = resolve(request, machine=machine, ranks=Ranks.from_environment())
    if plan.machine.device_type != "cpu":
        sys.exit("this script times a CPU: a GPU runs behind the host's clock")
    parts = pretrain.build(plan)
    optimizer = parts.make_optimizer(parts.model)
    model, batches, clock = parts.model, iter(parts.loader), PhaseClock()
    model.vae.encode = clock.wrap("vae_encode", model.vae.encode)
    model.text_encoder.forward = clock.wrap("text_encode", model.text_encoder.forward)
    model.unet.forward = clock.wrap("unet_forward", model.unet.forward)

    def step() -> None:
        loss = parts.loss(model(next(batches)))
        clock.wrap("backward", loss.backward)()
        clock.wrap("optimizer", optimizer.step)()
        optimizer.zero_grad()

    for _ in range(arguments.warmup_batches + arguments.measure_batches):
        clock.wrap("step", step)()
    medians_s = {
        phase: statistics.median(clock.times_s[phase][arguments.warmup_batches :])
        for phase in ("step", *PHASES)
    }
    medians_s["other"] = medians_s["step"] - sum(medians_s[phase] for phase in PHASES)
    for phase, median_s in medians_s.items():
        print(f"{phase:<13} {median_s:8.3f} s  {100 * median_s / medians_s['step']:5.1f} %")
    content = {
        "preset": arguments.preset,
        "micro_batch": plan.config.device_train_microbatch_size,
        "image_size": plan.config.image_size,
        "num_measured_steps": arguments.measure_batches,
        "median_s": medians_s,
        "machine": as_dict(machine),
        "versions": package_versions(),
        "git": git_state(),
    }
    arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
