"""Hundreds of random inputs: each is taken or refused in a sentence, and none takes long.

Flags, YAML, records, tables and tars are damaged by a seeded generator and given to the commands
in this process: no exception, no exit code but 0, 1, 2 and 130, nothing over 5 s, and nothing that
acts on a terminal.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import pkgutil
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import benchmark
import train
from sdbench import cli
from sdbench.analysis.compare import CompareFlags
from sdbench.forecast.cost import CostFlags
from sdbench.run import TASKS
from sdbench.settings.config import SETTINGS
from sdbench.settings.recipe import TrainConfig
from sdbench.settings.setting import REQUIRED, Setting, declarations
from tests.data.datasets import write_tars
from tests.report.results_folder import RESULTS, make_record, make_results

SEED = 18
LIMIT_S = 10.0
# Of each kind.
NUM_INPUTS = 50
EXIT_CODES = {0, 1, 2, 130}
ROOT = RESULTS.parent
# Values that are wrong nearly everywhere, and some that are right somewhere.
TEXTS = (
    *("", " ", "0", "-1", "1", "2", "3.5", "1e308", "1e-320", "nan", "-inf", "9" * 30, "9" * 5000),
    *("true", "null", "auto", "x", "\x1b[2J", "\u202e", "\u4e2d", "caf\u00e9", "a/b", "..", "/"),
    *("%s", "{a: 1}", "{a: [1, 2}", "[" * 300, "${lr}", "${", "???", "a=b", "=", "--", "-", "'"),
    *('"', "#", "1,2,3", "8,16,...,512", "1,3,...,999999999999", "50%"),
    *("2026-11-20", "9999-12-31", "none", "tiny", "seed", "fp32", "5ep", "\\", "a\nb"),
    *("\t", "\0"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 10**30, 0.5, 1e308, 1e-320, float("nan"), float("inf")),
    *("", "x", "ok", "\x1b[2J", "\ud800", "a" * 10_000, "../x", "nan", "512"),
    *([], {}, [1], {"x": 1}, [[[]]], {"low": 1}, ["drift"], ["drift", "drift"]),
)
# These start a cluster, or ask a hub or a store on the network.
NOT_IN_PROCESS = {"engine", "ray_address", "model_name", "remote", "streams", "ray_storage_path"}


class Inputs:
    """Makes inputs from a seed, and keeps their files in a folder."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.folder = folder

    def flags(self, declared: dict[str, Setting], *, num: int = 3) -> list[str]:
        """Random values of some flags, those that are required among them."""
        names = [name for name in declared if name not in NOT_IN_PROCESS]
        chosen = self.random.sample(names, self.random.randint(1, num))
        chosen += [name for name in names if declared[name].default is REQUIRED]
        argv = []
        for name in dict.fromkeys(chosen):
            one = declared[name]
            values = [self.value_of(one) for _ in range(1 + one.takes_several)]
            if one.is_positional:
                argv = [*values, *argv]
            elif one.kind.allowed == "true | false":
                argv.append(f"--{self.random.choice(['', 'no_'])}{name}")
            elif self.random.random() < 0.5:
                argv += [one.flag, *values]
            else:
                argv.append(f"{one.flag}={values[0]}")
        return argv

    def value_of(self, declared: Setting) -> str:
        """A random text, or one that the setting may take."""
        if self.random.random() < 0.3:
            return self.text().replace("\0", "0")  # no argument holds a NUL
        choices = declared.kind.allowed.split(" | ")
        if len(choices) > 1:
            return self.random.choice(choices)
        number = self.random.choice(["1", "2", "8", "512", "0.5"])
        return number if declared.kind.metavar in ("N", "X") else self.text().replace("\0", "0")

    def damage(self, content: bytes) -> bytes:
        """Cut, repeat, exchange or replace some bytes or lines."""
        for _ in range(self.random.randint(1, 3)):
            lines = content.split(b"\n")
            at, kind = self.random.randrange(len(content) + 1), self.random.randrange(7)
            line = self.random.randrange(len(lines))
            if kind == 0:
                content = content[:at]
            elif kind == 1:
                content = content[:at] + bytes([self.random.randrange(256)]) + content[at + 1 :]
            elif kind == 2:
                content = content[:at] + self.text().encode() + content[at:]
            elif kind == 3:
                content = b"\n".join([*lines[:line], lines[line], *lines[line:]])
            elif kind == 4:
                content = b"\n".join([*lines[:line], *lines[line + 1 :]])
            elif kind == 5:
                mark = self.random.choice([b":", b",", b"="])
                head, found, _ = lines[line].partition(mark)
                lines[line] = head + found + b" " * (mark == b":") + self.text().encode()
                content = b"\n".join(lines)
            else:
                start = self.random.randrange(len(content) + 1)
                content = content[:start] + content[at : at + 40] + content[start:]
        return content

    def text(self) -> str:
        return self.random.choice(TEXTS)

    def damage_value(self, value: Any) -> Any:
        """A JSON value with one value of it at any depth replaced, removed or renamed."""
        value = json.loads(json.dumps(value))
        place, name = value, None
        while isinstance(place, dict | list) and place:
            key = self.random.choice([*place] if isinstance(place, dict) else range(len(place)))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or self.random.random() < 0.15:
                name = key
                break
            place = inner
        if name is None:
            return self.random.choice(VALUES)
        kind = self.random.randrange(5)
        if kind == 0:
            del place[name]
        elif kind == 1 and isinstance(place, dict):
            place[self.text()] = place.pop(name)
        else:
            place[name] = self.random.choice(VALUES)
        return value

    def file(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


STEPS = b"index,phase,step_time_s,data_wait_s,loss\n0,warmup,9.0,0.1,1.0\n1,measured,4.0,0.1,0.9\n"
TRAIN_STEPS = b"step,loss,learning_rate,images_per_second,data_wait_percent\n" + b"".join(
    b"%d,%d.5,0.1,2.5,1.5\n" % (step, step) for step in range(1, 5)
)
_COMMON = {"time_utc": "2026-11-21T05:00:00+00:00", "step": 2, "seconds": 0.5}
_RESTART = {"num_lost_steps": 1, "lost_s": 1.0, "down_s": 2.0, "passed_over": ["step 3: cut off"]}
EVENTS = (
    {**_COMMON, **_RESTART, "event": "begin"},
    {**_COMMON, "event": "save", "error": None, "num_bytes": 10**9, "stall_s": 0.1},
    {
        **{**_COMMON, "event": "validation", "loss": 0.5, "ema_loss": 0.6},
        **{"timesteps": [1, 500], "by_timestep": [0.1, 0.9]},
    },
    {**_COMMON, "event": "scores", "num_pictures": 8, "fid": 20.5, "clip_score": 0.3},
    {**_COMMON, "event": "samples", "file": None},
    {**_COMMON, **_RESTART, "event": "begin"},
    {**_COMMON, "event": "bad_loss"},
    {**_COMMON, "event": "end"},
)

Case = tuple[Callable[[list[str]], int], list[str]]


def flags_of_programs(inputs: Inputs) -> Iterator[Case]:
    """Random flags of benchmark.py and train.py, which say what they would do."""
    while True:
        yield benchmark.main, [*inputs.flags(SETTINGS), "--model_name=tiny", "--print_config"]
        declared = declarations(TrainConfig)
        yield train.main, [*inputs.flags(declared), "--model_name=tiny", "--print_config"]


def flags_of_commands(inputs: Inputs) -> Iterator[Case]:
    """Random flags, behind right ones, of the commands that compute from tables and records."""
    quoted = RESULTS / "quoted"
    by_gpu = str(quoted / "aws_p4de_p5_single_node.csv")
    costs = [str(quoted / "mosaicml_diffusion_a100.csv"), "--recipe", "mosaicml"]
    optional = {
        name: one
        for name, one in declarations(CostFlags).items()
        if one.default is not REQUIRED and not one.is_positional
    }
    while True:
        yield cli.main, ["scaling", "cost", *costs, *inputs.flags(optional, num=1)]
        declared = declarations(CompareFlags)
        flags = inputs.flags({name: declared[name] for name in declared if name != "sides"}, num=1)
        yield cli.main, ["compare", by_gpu, "--between", "gpu", *flags]
        name = inputs.random.choice([*cli.COMMANDS, inputs.text()])
        yield cli.main, [name, inputs.text().strip("-"), "--x"]  # behind -- it would be a name


def yaml_files(inputs: Inputs) -> Iterator[Case]:
    """Damaged sweeps, config files, recipes and prices."""
    sweeps = [path.read_bytes() for path in sorted(ROOT.glob("sweeps/*.yaml"))]
    configs = [path.read_bytes() for path in sorted(ROOT.glob("configs/*.yaml"))]
    forecast = ROOT / "sdbench" / "forecast"
    table = str(RESULTS / "quoted" / "mosaicml_diffusion_a100.csv")
    cost = ["scaling", "cost", table, "--recipe", "mosaicml"]
    inputs.file("benchmark.py", b"")
    for number in itertools.count():
        content = b"launcher: python\n" + inputs.random.choice(sweeps).replace(b"launcher:", b"#")
        sweep = inputs.file(f"sweep-{number}.yaml", inputs.damage(content))
        yield cli.main, ["sweep", str(sweep), "--dry_run", "--folder", f"sweep-{number}"]
        config = inputs.file(f"run-{number}.yaml", inputs.damage(inputs.random.choice(configs)))
        yield train.main, ["--config", str(config), "--model_name=tiny", "--print_config"]
        flag = inputs.random.choice(["recipes", "prices"])
        content = inputs.damage((forecast / f"{flag}.yaml").read_bytes())
        yield cli.main, [*cost, f"--{flag}", str(inputs.file(f"{flag}-{number}.yaml", content))]


def records(inputs: Inputs) -> Iterator[Case]:
    """Damaged records and histories among whole ones, in every command that reads them."""
    published = [
        json.loads(path.read_text())
        for name in ("feed-mds-*", "precompute-*", "small-128px-fast-dreambooth")
        for path in sorted(RESULTS.glob(f"runs/*_{name}/record.json"))[:1]
    ]
    whole = [make_record(), make_record(), *published]
    other = json.dumps(make_record(run_id="20261121T000000Z_a_b")).encode()
    inputs.file("whole/record.json", other)
    for number in itertools.count():
        results = make_results(inputs.folder / f"results-{number}", quoted=False)
        for index in range(10):
            content = inputs.random.choice(whole)
            if index % 5:  # of the others steps and events are damaged
                content = inputs.damage_value(content)
            text = json.dumps(content).encode()
            text = inputs.damage(text) if index % 5 == 4 else text
            folder = f"results-{number}/runs/{name_of(content) or index}"
            file = inputs.file(f"{folder}/record.json", text)
            is_training = isinstance(content, dict) and content.get("kind") == "train"
            steps = TRAIN_STEPS if is_training else STEPS
            inputs.file(f"{folder}/steps.csv", inputs.damage(steps) if index % 2 else steps)
            events = [inputs.damage_value(one) if index % 2 else one for one in EVENTS]
            lines = "".join(f"{json.dumps(one)}\n" for one in events)
            inputs.file(f"{folder}/history.jsonl", lines.encode())
            inputs.file(f"{folder}/stdout.log", inputs.text().encode())
            yield cli.main, ["compare", str(file.parent), str(inputs.folder / "whole")]
            yield cli.main, ["report", str(file.parent)]
            yield cli.main, ["scaling", "cost", str(file.parent), "--recipe", "mosaicml-all-512"]
        yield cli.main, ["report", "--folder", str(results)]
        elsewhere = make_results(inputs.folder / f"published-{number}", quoted=False)
        runs = map(str, results.glob("runs/*"))
        yield cli.main, ["publish", *runs, "--folder", str(elsewhere)]


def name_of(content: Any) -> str | None:
    """The run id of a record, if a folder can have that name."""
    run_id = content.get("run_id") if isinstance(content, dict) else None
    is_name = isinstance(run_id, str) and run_id.isprintable() and "/" not in run_id
    return run_id if is_name and run_id not in ("", "..") and len(run_id) < 200 else None


def tables(inputs: Inputs) -> Iterator[Case]:
    """Damaged tables of figures."""
    quoted = [*sorted(RESULTS.glob("quoted/*.csv")), RESULTS / "throughput.csv"]
    for number in itertools.count():
        results = make_results(inputs.folder / f"tables-{number}", quoted=False)
        for _ in range(5):
            source = inputs.random.choice(quoted)
            content = inputs.damage(source.read_bytes())
            table = str(inputs.file(f"tables-{number}/quoted/{source.name}", content))
            yield cli.main, ["compare", table, str(source)]
            yield cli.main, ["compare", table, "--between", "gpu"]
            yield cli.main, ["scaling", "cost", table, "--recipe", "mosaicml"]
        yield cli.main, ["report", "--folder", str(results)]


def tars(inputs: Inputs) -> Iterator[Case]:
    """Damaged tars of pictures and captions."""
    write_tars(inputs.folder / "whole")
    whole = next((inputs.folder / "whole").glob("*.tar")).read_bytes()
    for number in itertools.count():
        file = inputs.file(f"{number}.tar", inputs.damage(whole))
        yield cli.main, ["verify-data", str(file), "--deep", "--num_workers", "0"]


ALL = (flags_of_programs, flags_of_commands, yaml_files, records, tables, tars)


def run(main: Callable[[list[str]], int], argv: list[str]) -> tuple[Any, str | None]:
    """The exit code of a command, and what is wrong with how it ends, if anything is."""
    output = io.StringIO()
    began_s = time.process_time()  # other tests run meanwhile; what hangs meets pytest's time limit
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(argv)
        except SystemExit as end:  # of argparse
            code = end.code
        except BaseException as error:
            return None, "".join(traceback.format_exception(error)[-4:])
    taken_s = time.process_time() - began_s
    text = output.getvalue()
    acting = {"\x1b", "\x07", "\u202e", "\0"} & {*text}
    if code not in EXIT_CODES:
        return code, f"exit code {code}"
    if taken_s > LIMIT_S:
        return code, f"{taken_s:.1f} s"
    if "Traceback" in text or (code == 2 and len(text.strip()) < 20):
        return code, text[-2000:]
    return code, f"prints {acting}" if acting else None


@pytest.mark.usefixtures("plain_replay")  # the memory of another step takes seconds
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_every_random_input_is_taken_or_refused_in_a_sentence(tmp_path, launched, make):
    for entry in TASKS.values():  # what is imported once is no part of an input's time
        pkgutil.resolve_name(entry)
    run(benchmark.main, ["--model_name=tiny", "--print_config"])
    codes, faults = Counter(), []
    cases = make(Inputs(SEED, tmp_path))
    for number, (main, argv) in zip(range(NUM_INPUTS), cases, strict=False):
        code, fault = run(main, argv)
        codes[code] += 1
        if fault is not None:
            faults.append(f"input {number}, {' '.join(map(repr, argv))[:1000]}:\n{fault}")
    print(f"exit codes: {dict(codes)}")
    assert not faults, f"{len(faults)} faults\n\n" + "\n\n".join(faults[:8])
    # Not all is refused for one and the same reason.
    assert len(codes) > 1
