"""Stands in for benchmark.py where only what starts it is under test: quick, and without torch.

What it does is said by the micro-batch, 8 and more run out of memory, and by the seed: 2 hangs, 3
is killed, 4 is bad input, 5 takes a second, 6 writes the record of another version. Every start
leaves a line in $STARTS.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sdbench.base.cause import report_cause  # noqa: E402
from sdbench.base.errors import ConfigError  # noqa: E402
from sdbench.record.store import OOM, UNFINISHED_REASON, RunFolder  # noqa: E402
from tests.runs import follow_rate  # noqa: E402

OOM_FROM = 8


def refuse(error: ConfigError) -> int:
    """As the doors do."""
    print(f"error: {error}", file=sys.stderr)
    report_cause(type(error).__name__, str(error))
    return 2


def main() -> int:
    """Write a record as benchmark.py would."""
    parser = argparse.ArgumentParser()
    for name in ("device_train_microbatch_size", "seed", "batch_size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--results_dir", required=True)
    arguments, _ = parser.parse_known_args()
    with open(os.environ["STARTS"], "a") as starts:
        starts.write(" ".join(sys.argv[1:-2]) + "\n")
    if arguments.seed in (4, 5):
        print(" ".join(sys.argv), flush=True)
    if arguments.seed == 4:
        return refuse(ConfigError("the seed is unlucky", value=4, allowed="5", flag="--seed"))
    micro_batch = arguments.device_train_microbatch_size or 1
    (template,) = (ROOT / "results" / "runs").glob("20261121T055223Z_*/record.json")
    record = json.loads(template.read_text())
    folder = RunFolder(RunFolder.create(arguments.results_dir, machine="fake", name="tiny"))
    record["run_id"] = folder.path.name
    record["started_utc"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record["config"]["device_train_microbatch_size"] = micro_batch
    # 1 - 0.5 / micro-batch times 10: larger ones are faster, with less and less to gain.
    record["config"]["batch_size"] = arguments.batch_size or micro_batch
    if arguments.seed == 6:
        record["schema_version"] = 0
    record["summary"]["images_per_second"] = 10 * (1 - 0.5 / micro_batch)
    follow_rate(record)
    ended = dict(record)
    record |= {"status": "failed", "reason": UNFINISHED_REASON, "summary": None}
    duration_s, record["duration_s"] = record["duration_s"], None
    folder.write_record(record)
    if arguments.seed == 2:
        # As a rank beside the one that is asked to end, deaf to everything but SIGKILL.
        deaf = (
            "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print('rank', os.getpid(), flush=True); time.sleep(600)"
        )
        subprocess.Popen([sys.executable, "-c", deaf])
        time.sleep(600)
    if arguments.seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if arguments.seed == 5:
        time.sleep(1)
    if micro_batch >= OOM_FROM:
        reason = "rank 0: OutOfMemoryError: CUDA out of memory."
        folder.write_record(record | {"status": OOM, "reason": reason, "duration_s": duration_s})
        return 1
    folder.write_record(ended)
    return 0


if __name__ == "__main__":
    sys.exit(main())
