"""`parse_recorded` reads a command line whose --config may be the record of a run.

A record may come from a stranger. Its settings are taken, but no `pipe:` command and no cluster.
Its launcher, its number of ranks and its environment are only told, where they differ from those
here. What only a record needs is imported when one is read: --help answers as fast without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from sdbench import NUM_CPUS
from sdbench.base.errors import ConfigError
from sdbench.base.escape import for_terminal
from sdbench.ranks.launcher import COMPOSER, NO_LAUNCHER, TORCHRUN, launcher_name
from sdbench.record.store import BENCHMARK, FEED, RECORD_NAME, TRAIN, kind_of
from sdbench.settings.data import DataSettings
from sdbench.settings.file import CONFIG_FLAG
from sdbench.settings.ray import RAY
from sdbench.settings.request import Request, Translation
from sdbench.settings.setting import GPU, declarations

# The program that makes records of a kind.
PROGRAMS = {BENCHMARK: "benchmark.py", FEED: "data.py", TRAIN: "train.py"}
# Imported when one is asked for.
PARSERS = {
    BENCHMARK: "sdbench.settings.config:parse_request",
    FEED: "sdbench.settings.feed:parse_request",
    TRAIN: "sdbench.settings.recipe:parse_request",
}
# Its run begins anew: it has its own folder, no copies, no older run to go on with, no scheduler.
OF_THE_RUN = {"results_dir", "resume", "max_failures", "ray_storage_path", "stop_grace_s"}
# For a record without ranks: data.py is one process, unless Ray starts its trainers.
ONE_RANK = {"world_size": 1, "num_nodes": 1, "ranks_per_node": 1, "launcher": NO_LAUNCHER}


def parse_recorded(kind: str, argv: Sequence[str], **texts: Any) -> Request:
    """Read the command line of a program, where --config may also be a record of its kind.

    `texts` are other arguments of `request.parse`. The notes of the request then tell what the
    record does not say, what differs from it here, and how its run was started, if not as this one.
    """
    parse = resolve_name(PARSERS[kind])
    taken: list[tuple[dict[str, Any], list[str]]] = []

    def read(path: str, given: Collection[str]) -> dict[str, Any] | None:
        file = Path(path)
        if file.name != RECORD_NAME and not (file / RECORD_NAME).is_file():
            return None
        from sdbench.report.runs import read_record  # numpy, which no other command line needs

        record = read_record(file, flag=CONFIG_FLAG)
        _check_kind(kind_of(record), path, program=PROGRAMS[kind])
        settings, unknown = _settings_to_give(record, parse, given=given)
        taken.append((record, unknown))
        return settings

    request = parse(argv, read_record=read, **texts)
    if not taken:
        return request
    ((record, unknown),) = taken
    data_here, gpu = _check_data(record, request.config), _check_gpus(record)
    lacking, differences = _compare(record, data_here, gpu=gpu)
    notes = [
        "\n".join([heading, *(f"  {for_terminal(sentence)}" for sentence in sentences)])
        for heading, sentences in (
            ("The record does not say:", [*unknown, *lacking]),
            ("Here it is not as in the record:", differences),
        )
        if sentences
    ]
    notes += _tell_start(record, [PROGRAMS[kind], *argv])
    return dataclasses.replace(request, translation=Translation(notes=tuple(notes)))


def _check_kind(kind: str, path: str, *, program: str) -> None:
    other = PROGRAMS.get(kind)
    if other != program:
        raise ConfigError(
            "this is not a record of this program",
            value=kind,
            allowed=f"{other} --config {path}" if other else f"a record of {program}",
            flag=CONFIG_FLAG,
        )


def _tell_start(record: Mapping[str, Any], command: Sequence[str]) -> list[str]:
    """How a run was started, unless this process was in the same way; `command` is the rest."""
    ranks = record.get("ranks", ONE_RANK)
    launcher, num_ranks = ranks["launcher"], ranks["world_size"]
    here = [int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    is_same = launcher in (None, launcher_name()) and here == [num_ranks, ranks["ranks_per_node"]]
    if is_same or record["config"]["engine"] == RAY:  # the program itself has Ray start them
        return []
    if ranks["num_nodes"] > 1:
        where = f"{num_ranks} ranks on {ranks['num_nodes']} nodes"
        return [f"The run of the record had {where}: see multi-node/README.md"]
    launcher = launcher or (COMPOSER if num_ranks > 1 else NO_LAUNCHER)
    starts = {COMPOSER: "-n", TORCHRUN: "--nproc_per_node"}
    words = [launcher, starts[launcher], str(num_ranks)] if launcher in starts else ["python"]
    # Unchanged, to be copied.
    return [f"The run of the record was started so: {shlex.join([*words, *command])}"]


def _settings_to_give(
    record: Mapping[str, Any], parse: Callable[..., Request], *, given: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """The settings that are taken from a record, and a sentence on settings that are unknown.

    Those that the command line has given are left out, and those that this version's default or
    preset gives by itself.
    """
    recorded, unknown = record["config"], []
    kept = {"preset": recorded["preset"]} if "preset" in recorded else {}
    flags = [f"--{name}={value}" for name, value in kept.items()]
    own = parse(flags, description="", epilog="").config
    declared = declarations(type(own))
    for name, one in declared.items():
        if name == "preset" or name in OF_THE_RUN or name in given:
            continue
        value = recorded[name]
        if value == getattr(own, name):
            continue
        is_elsewhere = _is_left_out(value, declared)
        if name == "local" and is_elsewhere and recorded["remote"]:
            continue  # copies of the data go to the cache
        if value is None:
            unknown.append(name)
            continue
        if is_elsewhere or (name == "ray_address" and value != "auto"):
            raise ConfigError(
                f"a record does not say where {one.flag} is: places, commands and clusters are not "
                "left to it",
                value=value,
                allowed=f"its place: {one.flag} PLACE{_tell_how_made(record)}",
                flag=one.flag,
            )
        kept[name] = value
    if recorded["engine"] == RAY and "num_ray_workers" not in given:
        # A record of data.py has no ranks; its result tells how many there were.
        of_feed = (record["summary"] or {}).get("ray", {}).get("num_trainers")
        num_trainers = record["ranks"]["world_size"] if "ranks" in record else of_feed
        kept |= {} if num_trainers is None else {"num_ray_workers": num_trainers}
    revision = record.get("workload", {}).get("revision")
    if revision is not None and not {"model_name", "model_revision"} & {*given}:
        kept["model_revision"] = revision
    names = ", ".join(unknown)
    return kept, [f"settings, which have this version's values: {names}"] if unknown else []


def _is_left_out(value: Any, names: Mapping[str, Any]) -> bool:
    """Return True for a command, and for ``<flag>``, which `publish` writes for a path.

    A record keeps only the program of a ``pipe:`` command. Braces may expand to one as well.
    """
    from braceexpand import UnbalancedBracesError, braceexpand

    from sdbench.data.places.command_output import PIPE

    if not isinstance(value, str):
        return False
    places = [value]
    with contextlib.suppress(UnbalancedBracesError):  # a text, or refused by the program itself
        places += braceexpand(value)
    is_command = any(place.startswith(PIPE) for place in places)
    return is_command or any(f"<{name}>" in value for name in names)


def _check_gpus(record: Mapping[str, Any]) -> str | None:
    """The model of the first GPU here; refuses a machine with fewer GPUs than the run had."""
    from sdbench.measure.host import ask, open_nvml

    nvml = open_nvml()
    num_gpus = 0 if nvml is None else ask(nvml, "nvmlDeviceGetCount") or 0
    needed = record.get("ranks", ONE_RANK)["ranks_per_node"]
    on_ray = record["config"]["engine"] == RAY  # its nodes may be others
    if record["machine"]["device_type"] == GPU and num_gpus < needed and not on_ray:
        raise ConfigError(
            f"the run had {needed} x {record['machine']['device_name']}, and this machine has too "
            "few GPUs",
            value=f"{num_gpus} GPUs",
            allowed=f"a machine with {needed} GPUs, with its driver and the package nvidia-ml-py",
            flag=CONFIG_FLAG,
        )
    first = ask(nvml, "nvmlDeviceGetHandleByIndex", 0) if num_gpus else None
    return None if first is None else ask(nvml, "nvmlDeviceGetName", first)


def _check_data(record: Mapping[str, Any], config: DataSettings) -> dict[str, Any] | None:
    """The facts of the data set, as a record has them; refuses one that is not here."""
    from sdbench.data import describe_data

    try:
        return describe_data(config)
    except ConfigError as error:
        raise ConfigError(
            f"the data set of the record is not here ({error.what[:1].lower()}{error.what[1:]})",
            value=error.value,
            allowed=f"{error.allowed}; another place, by a flag{_tell_how_made(record)}",
            flag=error.flag,
        ) from None


def _tell_how_made(record: Mapping[str, Any]) -> str:
    """The end of a sentence: how the data set was made, if the record says so."""
    sentence = ""
    for facts in filter(None, (record["data"] or {}).get("made_by", ())):
        told = [f"{name} {value}" for name, value in facts.items() if name != "command" and value]
        sentence += f"; it was made by {facts['command']}: {', '.join(told)}"
    return sentence


def _compare(
    record: Mapping[str, Any], data_here: Mapping[str, Any] | None, *, gpu: str | None
) -> tuple[list[str], list[str]]:
    """Facts, other than settings, that the record lacks, and sentences on facts that differ."""
    from sdbench.measure.host import read_cpu
    from sdbench.record.provenance import (
        git_state,
        other_versions,
        package_versions,
        speed_environment,
    )

    machine, git, state = record["machine"], record["git"], git_state()
    data_then, workload = record["data"], record.get("workload", {})
    then = {
        "machine": f"{machine['num_cpu_cores']} cores of {machine['cpu_name']}",
        "GPU": machine["device_name"] if machine["device_type"] == GPU else None,
        **record["versions"],
        **(record["other_versions"] or {}),
        **record["environment"],
    }
    now = {
        "machine": f"{NUM_CPUS} cores of {read_cpu()[0]}",
        "GPU": gpu,
        **package_versions(),
        **({} if record["other_versions"] is None else other_versions()),
        **speed_environment(),
    }
    if git["commit"] is not None:
        then["commit"], now["commit"] = git["commit"], state["commit"]
    if data_then is not None and data_then["sha256"] != (data_here or {}).get("sha256"):
        then["data set"], now["data set"] = map(_describe_data, (data_then, data_here))
    differences = [
        f"{name} {then.get(name)} -> {now.get(name)}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    if state["dirty"]:
        differences.append("this checkout has changes that are in no commit")
    lacks = {
        "what started its ranks": record.get("ranks", ONE_RANK)["launcher"] is None,
        "a hash of its data set": data_here is not None and data_then is None,
        "a hash of its weights": workload.get("weights") == "loaded" and not workload["revision"],
        "the versions of its other packages": record["other_versions"] is None,
        "its commit": git["commit"] is None,
        "the uncommitted changes that it ran with": git["dirty"],
    }
    return [fact for fact, is_lacking in lacks.items() if is_lacking], differences


def _describe_data(facts: Mapping[str, Any] | None) -> str:
    if facts is None:
        return "synthetic"
    size = "" if facts["num_bytes"] is None else f", {facts['num_bytes']} bytes"
    return f"{facts['num_files']} files{size}, sha256 {facts['sha256'][:12]}"
