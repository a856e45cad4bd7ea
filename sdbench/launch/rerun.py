"""The command `python -m sdbench rerun`: repeats a run from its record alone.

A record may come from a stranger. Only its settings, its numbers of ranks and its variables of
speed reach the command: no program, no `pipe:` command, no path in a variable, no other variable.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.base.errors import EXIT_OK, ConfigError
from sdbench.base.escape import for_terminal, without_controls
from sdbench.data.command_output import PIPE
from sdbench.launch.child import check_suite_is_here, run_in_terminal
from sdbench.launch.rerun_here import (
    DATA,
    ONE_RANK,
    WEIGHTS,
    check_gpus,
    check_weights,
    describe_data_here,
    tell_differences,
    tell_how_made,
    tell_unknown_facts,
)
from sdbench.launch.sweep_file import to_flags
from sdbench.ranks.launcher import COMPOSER, NO_LAUNCHER, TORCHRUN
from sdbench.record.provenance import (
    ENVIRONMENT_NAMES,
    ENVIRONMENT_PREFIXES,
    speed_environment,
)
from sdbench.record.store import BENCHMARK, FEED, OK, TRAIN, kind_of
from sdbench.report.runs import read_record
from sdbench.settings.kinds import PATH, SWITCH
from sdbench.settings.ray import RAY
from sdbench.settings.request import parse
from sdbench.settings.setting import (
    GPU,
    NO_OLDER_RECORD,
    REQUIRED,
    Setting,
    declarations,
    of_device,
    setting,
)

EPILOG = """\
examples:
  python -m sdbench rerun results/runs/RUN --dry_run
  python -m sdbench rerun runs/20261121T050000Z_2-core-cpu_tiny-64px-fast
  python -m sdbench rerun results/runs/RUN -- --remote my-mds

Before the run it says what the record does not know, and what is not as in the record: the commit,
packages, the data set. Flags behind -- replace settings of the record: the places of data and
weights are left out of a record that is published. The exit code is that of the run; 2 bad input,
130 stopped.
"""


class Program(NamedTuple):
    """The program that makes records of a kind, and its settings as ``module:class``."""

    name: str
    settings: str


PROGRAMS = {
    BENCHMARK: Program("benchmark.py", "sdbench.settings.config:BenchmarkConfig"),
    FEED: Program("data.py", "sdbench.settings.feed:FeedSettings"),
    TRAIN: Program("train.py", "sdbench.settings.recipe:TrainConfig"),
}
# A rerun begins anew: it has its own folder, no copies, and no older run to go on with.
OF_THE_RUN = ("results_dir", "resume", "max_failures", "ray_storage_path", "stop_grace_s")
WHAT_IS_AT = {
    **dict.fromkeys(("remote", "local", "streams", "class_remote", "validation_remote"), DATA),
    **dict.fromkeys(("model_name", "init_from"), WEIGHTS),
}
CHOOSES_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerunFlags:
    """Flags of rerun."""

    record: Path = setting(
        PATH, REQUIRED, "folder of a run, or its record.json", is_positional=True
    )
    folder: Path | None = setting(
        PATH, None, "for the new run (default: runs/rerun_<name of the run>)"
    )
    dry_run: bool = setting(SWITCH, False, "print the command and stop")


@dataclasses.dataclass(frozen=True)
class Rerun:
    """A command as a person types it, and the sentences to print before it.

    Attributes:
        environment: Assignments of variables, ``NAME=value``.
        command: Launcher, program and flags.
        unknown: What the record does not say.
        differences: What differs from the record.
    """

    environment: tuple[str, ...]
    command: tuple[str, ...]
    unknown: tuple[str, ...]
    differences: tuple[str, ...]

    @property
    def printed(self) -> str:
        """The command line, environment included."""
        before = ["env", *self.environment] if self.environment else []
        return shlex.join([*before, *self.command])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a record's command once more; returns its exit code, 0 if it was only printed.

    Raises:
        ConfigError: Something that the run needs is not here, or the record does not say it.
        RunError: The data set is elsewhere and cannot be reached.
    """
    request = parse(
        RerunFlags,
        argv,
        prog="python -m sdbench rerun",
        description="Run what a record says once more: launcher, ranks, settings, environment.",
        epilog=EPILOG,
        rest="FLAGS ...",
    )
    flags = request.config
    record = read_record(flags.record, flag="RECORD")
    folder = flags.folder or Path("runs", f"rerun_{record['run_id']}")
    rerun = plan(record, request.rest, folder=folder)
    for heading, sentences in (
        ("The record does not say:", rerun.unknown),
        ("Here it is not as in the record:", rerun.differences),
    ):
        if sentences:
            lines = [heading, *(f"  {for_terminal(sentence)}" for sentence in sentences)]
            print("\n".join(lines), file=sys.stderr)
    print(without_controls(rerun.printed), flush=True)  # unchanged, to be copied
    if flags.dry_run:
        return EXIT_OK
    exit_code, _ = run_in_terminal(rerun.command, folder=folder, variables=rerun.environment)
    is_comparable = kind_of(record) == BENCHMARK and record["status"] == OK
    if exit_code == EXIT_OK and is_comparable:
        before = flags.record if flags.record.is_dir() else flags.record.parent
        words = shlex.join(["python", "-m", "sdbench", "compare", str(before), str(folder)])
        print(f"\nbeside the record: {without_controls(words)}")
    return exit_code


def plan(record: dict[str, Any], rest: Sequence[str], *, folder: Path) -> Rerun:
    """The command for a folder; flags in `rest` replace settings of the record."""
    kind = kind_of(record)
    if kind not in PROGRAMS:
        raise ConfigError(
            "a record of this kind is not repeated",
            value=kind,
            allowed=" | ".join(PROGRAMS),
            flag="RECORD",
        )
    program, config_type = PROGRAMS[kind].name, pkgutil.resolve_name(PROGRAMS[kind].settings)
    check_suite_is_here(program)
    given = parse(config_type, rest, description="", epilog="", prog=program)
    replaced = {name for name, origin in given.origin.items() if origin == "flag"}
    if "results_dir" in replaced:
        raise ConfigError(
            "the folder of the new run is given before --",
            value=given.config.results_dir,
            allowed="--folder",
            flag="--results_dir",
        )
    on_gpu = record["machine"]["device_type"] == GPU
    kept, unknown = _settings_to_give(
        record, config_type, on_gpu=on_gpu, without=replaced | {*OF_THE_RUN}
    )
    ranks = {**ONE_RANK, "launcher": None, **record["ranks"]} if "ranks" in record else ONE_RANK
    start, unknown_start = _start(
        ranks, engine=record["config"].get("engine"), environment=record["environment"]
    )
    # A record of data.py has no ranks; its result tells how many there were.
    of_feed = (record["summary"] or {}).get("ray", {}).get("num_trainers")
    num_trainers = ranks["world_size"] if "ranks" in record else of_feed
    on_ray = record["config"].get("engine") == RAY
    if on_ray and num_trainers is not None and "num_ray_workers" not in replaced:
        kept["num_ray_workers"] = num_trainers
    revision = record.get("workload", {}).get("revision")
    if revision is not None and not replaced & {"model_name", "model_revision"}:
        kept["model_revision"] = revision
    arguments = [*to_flags(kept), *rest]
    config = parse(config_type, arguments, description="", epilog="", prog=program).config
    num_gpus, gpu = check_gpus(record)
    check_weights(record, config)
    data_here = describe_data_here(config, how_made=tell_how_made(record))
    environment, told = _environment(record, hides_gpus=not on_gpu and num_gpus > 0)
    differences = [*tell_differences(record, data_here, gpu=gpu if on_gpu else None), *told]
    if kept_apart := _tell_kept_apart(record["config"], without=replaced):
        differences.append(kept_apart)
    if replaced:
        flags = ", ".join(f"--{name}" for name in sorted(replaced))
        differences.append(f"settings, by your flags: {flags}")
    return Rerun(
        environment=tuple(environment),
        command=(*start, program, *arguments, "--results_dir", str(folder)),
        unknown=(
            *unknown_start,
            *unknown,
            *tell_unknown_facts(record, has_data=data_here is not None),
        ),
        differences=tuple(differences),
    )


def _settings_to_give(
    record: Mapping[str, Any], config_type: type, *, on_gpu: bool, without: set[str]
) -> tuple[dict[str, Any], list[str]]:
    """The settings that a command line has to name, and sentences on those that are not recorded.

    A setting is left out if this version's default or preset gives its value by itself, or if it is
    in `without`.
    """
    recorded, declared = record["config"], declarations(config_type)
    preset = {"preset": recorded["preset"]} if "preset" in declared else {}
    own = parse(config_type, to_flags(preset), description="", epilog="").config
    kept, unknown, sentences = dict(preset), [], []
    for name, one in declared.items():
        if name in without or name in preset:
            continue
        if name not in recorded and one.before is NO_OLDER_RECORD:
            unknown.append(name)
            continue
        value = recorded.get(name, one.before)
        if value == of_device(getattr(own, name), on_gpu=on_gpu):
            continue
        if name == "local" and _is_left_out(value, declared) and recorded.get("remote"):
            sentences.append("where copies of the data lay (--local): they go to the cache")
            continue
        kept[name] = _check_value(one, value, declared, how_made=tell_how_made(record))
    if unknown:
        sentences.append(f"settings, which have this version's values: {', '.join(unknown)}")
    if recorded.get("resume", "never") != "never":
        sentences.append("with which checkpoint it went on, if any: this run begins anew")
    gone = sorted(recorded.keys() - declared.keys())
    if gone:
        values = ", ".join(f"{name} {recorded[name]}" for name in gone)
        sentences.append(f"what this version has in the place of its settings {values}")
    return kept, sentences


def _check_value(
    one: Setting, value: Any, declared: Mapping[str, Setting], *, how_made: str
) -> Any:
    """Return the value of a setting, unless the record lacks it or may not choose it."""
    if value is None:
        raise ConfigError(
            "a setting of the record has no value, and in this version it always has one",
            value=f"{one.name}: null",
            allowed=f"{one.kind.allowed}, behind --",
            flag=one.flag,
        )
    if one.name == "ray_address" and value != "auto":
        raise ConfigError(
            "which Ray cluster is joined is not left to a record, since its programs run here",
            value=value,
            allowed=f"its address, behind --: -- {one.flag} ADDRESS",
            flag=one.flag,
        )
    if _is_left_out(value, declared):
        what = WHAT_IS_AT.get(one.name, f"file of {one.flag} is")
        raise ConfigError(
            f"the record does not say where the {what}: places on a machine and arguments of "
            "commands are left out of records",
            value=value,
            allowed=f"its place, behind --: -- {one.flag} PLACE"
            + (how_made if what == DATA else ""),
            flag=one.flag,
        )
    return value


def _is_left_out(value: Any, names: Mapping[str, Any]) -> bool:
    """Return True for a command, and for the name of a flag, as `publish` writes for a path.

    A record keeps only the program of a ``pipe:`` command. Braces may expand to one as well.
    """
    from braceexpand import UnbalancedBracesError, braceexpand

    if not isinstance(value, str):
        return False
    if value.startswith(PIPE) or any(f"<{name}>" in value for name in names):
        return True
    try:
        return any(place.startswith(PIPE) for place in braceexpand(value))
    except UnbalancedBracesError:  # a text, or a place that the program itself refuses
        return False


def _tell_kept_apart(recorded: Mapping[str, Any], *, without: set[str]) -> str | None:
    """A sentence on the copies and restarts of the record, which are left out; None without any."""
    names = [
        name
        for name in ("max_failures", "ray_storage_path")
        if name not in without and recorded.get(name)
    ]
    flags = ", ".join(f"--{name} {recorded[name]}" for name in names)
    return f"left out, since the run begins anew and is kept here alone: {flags}" if names else None


def _start(
    ranks: Mapping[str, Any], *, engine: str | None, environment: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The words before the program, and a sentence if the record does not name the launcher."""
    num_ranks, launcher = ranks["world_size"], ranks["launcher"]
    if engine == RAY:  # the program itself has Ray start them
        return ["python"], []
    if ranks["num_nodes"] > 1:
        raise ConfigError(
            f"the run had {num_ranks} ranks on several nodes, which their cluster has to start",
            value=f"{ranks['num_nodes']} nodes",
            allowed="a run on one node; for several: multi-node/README.md",
            flag="RECORD",
        )
    unknown = []
    if launcher is None and num_ranks == 1:
        launcher = NO_LAUNCHER
        unknown = ["how its one process was started: it is started alone"]
    elif launcher is None:
        # Of several ranks torchrun sets the variable where nobody has, and composer does not.
        launcher = TORCHRUN if "OMP_NUM_THREADS" in environment else COMPOSER
        unknown = [f"what started its {num_ranks} ranks: {launcher} is taken"]
    starts = {
        COMPOSER: [COMPOSER, "-n", str(num_ranks)],
        TORCHRUN: [TORCHRUN, "--nproc_per_node", str(num_ranks)],
    }
    return starts.get(launcher, ["python"]), unknown


def _environment(record: Mapping[str, Any], *, hides_gpus: bool) -> tuple[list[str], list[str]]:
    """Assignments of the record's variables, and sentences on the variables that are left out.

    A path belongs to the machine of the record, and may name a library that is loaded.
    """
    recorded, here = record["environment"], speed_environment()
    is_on_gpu = record["machine"]["device_type"] == GPU
    assigned, told = {}, []
    for name, value in recorded.items():
        if not name.startswith(ENVIRONMENT_PREFIXES) and name not in ENVIRONMENT_NAMES:
            told.append(f"{name} is not set: it is no variable that changes speed")
        elif here.get(name) == value:
            assigned[name] = value
        elif name == CHOOSES_GPUS and is_on_gpu:
            told.append(f"{name}={value} is not set: it chose among the GPUs of its machine")
        elif "/" in value:
            told.append(f"{name}={value} is not set: it has a path; set it here if it is right")
        else:
            assigned[name] = value
    told += [
        f"{name}={here[name]} is set here and was not" for name in here if name not in assigned
    ]
    if hides_gpus:
        told.append(f"this machine has GPUs and the run had none: {CHOOSES_GPUS} hides them")
        assigned[CHOOSES_GPUS] = ""
    return [f"{name}={value}" for name, value in sorted(assigned.items())], told
