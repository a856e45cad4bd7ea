"""What is wrong with a manifest that no schema sees?

Servers and schemas accept a variable that was left unfilled, a number of pods that is empty, and
devices asked for other than limited, and the job then fails on a node, or runs as another one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sdbench.launch.render.variables import MAX_PORT, MIN_PORT

# Where a number of pods, nodes or ranks stands.
COUNT_KEYS = (
    "replicas",
    "minReplicas",
    "maxReplicas",
    "maxRestarts",
    "numNodes",
    "numProcPerNode",
)
PORT_KEYS = ("containerPort", "hostPort", "port", "rdzvPort")
# Devices, which Kubernetes hands out only whole: their names have a domain before a slash.
DEVICE_KEY = re.compile(r".+\..+/.+")
IMAGE = re.compile(r"[^:\s]+(:[0-9]+/[^:\s]+)?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that would go wrong.

    Attributes:
        place: Where, as ``PyTorchJob.spec.pytorchReplicaSpecs.Worker.replicas``.
        problem: What is wrong, as the start of a sentence.
        value: What stands there.
        allowed: What may stand there.
    """

    place: str
    problem: str
    value: Any
    allowed: str


def find_faults(documents: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """Everything that is wrong with the documents of a manifest, in their order."""
    faults = []
    for document in documents:
        for place, value in _walk(document, (str(document.get("kind", "document")),)):
            faults += [
                Fault(".".join(place), problem, value, allowed)
                for problem, allowed in _look_at(place, value)
            ]
    return faults


def _walk(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield place, value
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _walk(part, (*place, str(key)))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _walk(part, (*place, str(number)))


def _look_at(place: tuple[str, ...], value: Any) -> Iterator[tuple[str, str]]:
    key = place[-1]
    if value is None or value == "":
        yield "nothing stands there, as after a variable that was not set", "a value"
    elif isinstance(value, str) and _is_unfilled(place, value):
        yield "a variable was left unfilled", "text without braces and dollar signs"
    elif key in COUNT_KEYS and (isinstance(value, bool) or not isinstance(value, int)):
        yield "this is not a number", "a whole number without quotes"
    elif key in PORT_KEYS and isinstance(value, int) and not MIN_PORT <= value <= MAX_PORT:
        yield "this port is for root alone", f"a port from {MIN_PORT} to {MAX_PORT}"
    elif key == "image" and not IMAGE.fullmatch(str(value)):
        yield "this image has no tag", "NAME:TAG"
    elif key == "resources" and isinstance(value, Mapping):
        yield from _compare_devices(value)
    elif key == "env" and isinstance(value, list):
        yield from _find_repeated(value)


def _is_unfilled(place: tuple[str, ...], text: str) -> bool:
    if "args" in place[-2:] or "command" in place[-2:]:
        # Braces may be meant there, as in the name of many tars; the kubelet fills in $(NAME).
        return re.search(r"\$[{(]", text) is not None
    return re.search(r"[{}$]", text) is not None


def _compare_devices(resources: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    for name in sorted({*requests, *limits}):
        if DEVICE_KEY.fullmatch(name) and requests.get(name) != limits.get(name):
            yield f"requests and limits of {name} differ", "the same number in both"


def _find_repeated(env: Sequence[Any]) -> Iterator[tuple[str, str]]:
    names = [variable.get("name") for variable in env if isinstance(variable, Mapping)]
    for name in sorted({str(name) for name in names if names.count(name) > 1}):
        yield f"the variable {name} stands there twice", "each variable once"
