"""Checks of what a repeated run needs of this machine, and how this machine differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdbench import data
from sdbench.base.errors import ConfigError
from sdbench.measure.host import ask, num_cpu_cores, open_nvml, read_cpu
from sdbench.models.architecture import resolve_architecture
from sdbench.ranks.launcher import NO_LAUNCHER
from sdbench.record.provenance import git_state, other_versions, package_versions
from sdbench.settings.ray import RAY
from sdbench.settings.setting import GPU

# For a record without ranks: data.py is one process, unless Ray starts its trainers.
ONE_RANK = {"world_size": 1, "num_nodes": 1, "ranks_per_node": 1, "launcher": NO_LAUNCHER}
DATA, WEIGHTS = "data set is", "weights are"


def check_gpus(record: Mapping[str, Any]) -> tuple[int, str | None]:
    """Number of GPUs of this machine and model of the first.

    Raises:
        ConfigError: The run had more.
    """
    nvml = open_nvml()
    num_gpus = 0 if nvml is None else ask(nvml, "nvmlDeviceGetCount") or 0
    first = ask(nvml, "nvmlDeviceGetHandleByIndex", 0) if num_gpus else None
    name_here = None if first is None else ask(nvml, "nvmlDeviceGetName", first)
    if record["machine"]["device_type"] != GPU:
        return num_gpus, name_here
    needed = record.get("ranks", ONE_RANK)["ranks_per_node"]
    on_ray = record["config"].get("engine") == RAY  # its nodes may be others
    if num_gpus < needed and not on_ray:
        name = record["machine"]["device_name"]
        raise ConfigError(
            f"the run had {needed} x {name}, and this machine has too few GPUs",
            value=f"{num_gpus} GPUs",
            allowed=f"a machine with {needed} GPUs, with its driver and the package nvidia-ml-py",
            flag="RECORD",
        )
    return num_gpus, name_here


def check_weights(record: Mapping[str, Any], config: Any) -> None:
    """Refuse a model that is not here; the run itself looks for a model of the hub."""
    name = getattr(config, "model_name", None)
    is_of_hub = record.get("workload", {}).get("revision") is not None
    if name is None or is_of_hub:
        return
    try:
        resolve_architecture(name, random_weights=config.random_weights)
    except ConfigError as error:
        raise _not_here(WEIGHTS, error) from None


def describe_data_here(config: Any, *, how_made: str) -> dict[str, Any] | None:
    """The facts of the data set, as a record has them.

    Raises:
        ConfigError: The data set is not here.
        RunError: Its place cannot be reached.
    """
    try:
        return data.describe_data(config)
    except ConfigError as error:
        raise _not_here(DATA, error, more=how_made) from None


def _not_here(what: str, error: ConfigError, *, more: str = "") -> ConfigError:
    noun, _, verb = what.rpartition(" ")
    reason = error.what[:1].lower() + error.what[1:]
    return ConfigError(
        f"the {noun} of the record {verb} not here ({reason})",
        value=error.value,
        allowed=f"{error.allowed}; another place behind --{more}",
        flag=error.flag,
    )


def tell_how_made(record: Mapping[str, Any]) -> str:
    """The end of a sentence: how the data set was made, if the record says so."""
    sentence = ""
    for provenance in filter(None, (record.get("data") or {}).get("made_by", ())):
        facts = {name: value for name, value in provenance.items() if value is not None}
        command = facts.pop("command", None)
        told = ", ".join(f"{name} {value}" for name, value in facts.items())
        sentence += f"; it was made by {command}: {told}"
    return sentence


def tell_differences(
    record: Mapping[str, Any], data_here: dict[str, Any] | None, *, gpu: str | None
) -> list[str]:
    """Sentences on the machine, the commit, the packages and the data set that differ.

    `data_here` is from `describe_data_here`, `gpu` the model of the GPUs that the run gets.
    """
    machine, sentences = record["machine"], []
    cpus = (machine["num_cpu_cores"], machine["cpu_name"]), (num_cpu_cores(), read_cpu()[0])
    if cpus[0] != cpus[1]:
        before, here = (f"{num_cores} cores of {name}" for num_cores, name in cpus)
        sentences.append(f"{before} -> {here}")
    if gpu is not None and gpu != machine["device_name"]:
        sentences.append(f"{machine['device_name']} -> {gpu}")
    commit, state = record["git"]["commit"], git_state()
    if commit != state["commit"] and commit is not None:
        sentences.append(f"commit {commit} -> {state['commit'] or 'not known'}")
    if state["dirty"]:
        sentences.append("this checkout has changes that are in no commit")
    before = {**record["versions"], **record.get("other_versions", {})}
    here = {**package_versions(), **other_versions()}
    # An older record does not name all packages.
    names = sorted({*before, *here}) if "other_versions" in record else list(before)
    changes = [
        f"{name} {before.get(name) or 'none'} -> {here.get(name) or 'none'}"
        for name in names
        if before.get(name) != here.get(name)
    ]
    if changes:
        sentences.append(f"packages: {', '.join(changes)}")
    data_before = record.get("data")
    if data_before is not None and data_before["sha256"] != (data_here or {}).get("sha256"):
        sentences.append(f"the data set: {_describe(data_before)} -> {_describe(data_here)}")
    return sentences


def _describe(facts: Mapping[str, Any] | None) -> str:
    if facts is None:
        return "synthetic"
    size = "" if facts["num_bytes"] is None else f", {facts['num_bytes']} bytes"
    return f"{facts['num_files']} files{size}, sha256 {facts['sha256'][:12]}"


def tell_unknown_facts(record: Mapping[str, Any], *, has_data: bool) -> list[str]:
    """Sentences on facts other than settings that this record lacks."""
    sentences = []
    if has_data and record.get("data") is None:
        sentences.append("a hash of its data set: the one here is taken for the same")
    if record.get("workload", {}).get("weights") == "loaded" and not record["workload"]["revision"]:
        sentences.append("a hash of its weights: the ones here are taken for the same")
    if "other_versions" not in record:
        sentences.append(f"the versions of packages other than the {len(record['versions'])} named")
    if record["git"]["commit"] is None:
        sentences.append("its commit")
    if record["git"]["dirty"]:
        sentences.append("the changes to its commit, with which it ran")
    return sentences
