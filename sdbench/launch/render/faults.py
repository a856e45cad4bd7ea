"""`find_faults` finds faults of a manifest that no schema and no server finds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.launch.render.variables import MAX_PORT, MIN_PORT

# Keys whose value is a number of pods, nodes or ranks.
COUNT_KEYS = (
    *("replicas", "minReplicas", "maxReplicas", "maxRestarts"),
    *("numNodes", "numProcPerNode"),
)
PORT_KEYS = ("containerPort", "hostPort", "port", "rdzvPort")
# Devices, which Kubernetes hands out only whole: their names have a domain before a slash.
DEVICE_KEY = re.compile(r".+\..+/.+")
IMAGE = re.compile(r"[^:\s]+(:[0-9]+/[^:\s]+)?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
# The keys that lead to a part of a document.
Place = tuple[str, ...]


def find_faults(documents: Sequence[Mapping[str, Any]], *, flag: str) -> list[ConfigError]:
    """All faults of the documents of a manifest; `flag` is what the user can change."""
    return [
        ConfigError(f"{'.'.join(place)}: {problem}", value=value, allowed=allowed, flag=flag)
        for document in documents
        for place, value in walk(document, (str(document["kind"]),))
        for problem, allowed in _find_in(place, value)
    ]


def walk(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    """A part of a document and all parts below it, each with its place."""
    yield place, value
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from walk(part, (*place, str(key)))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from walk(part, (*place, str(number)))


def _find_in(place: Place, value: Any) -> Iterator[tuple[str, str]]:
    """The faults of one part, each with the allowed values."""
    key = place[-1]
    # Braces may be meant in arguments, as in the name of many tars; the kubelet fills in $(NAME).
    unfilled = r"\$[{(]" if {"args", "command", "entrypoint"} & set(place[-2:]) else r"[{}$]"
    if value is None or value == "":
        yield "the value is empty, as after a variable that was not set", "a value"
    elif isinstance(value, str) and re.search(unfilled, value):
        yield "a variable was left unfilled", "text without braces and dollar signs"
    elif key in COUNT_KEYS and (isinstance(value, bool) or not isinstance(value, int)):
        yield "this is not a number", "a whole number without quotes"
    elif key in PORT_KEYS and isinstance(value, int) and not MIN_PORT <= value <= MAX_PORT:
        yield "this port is for root alone", f"a port from {MIN_PORT} to {MAX_PORT}"
    elif key == "image" and not IMAGE.fullmatch(str(value)):
        yield "this image has no tag", "NAME:TAG"
    elif key == "resources" and isinstance(value, Mapping):
        requests, limits = value.get("requests") or {}, value.get("limits") or {}
        for name in sorted({*requests, *limits}):
            if DEVICE_KEY.fullmatch(name) and requests.get(name) != limits.get(name):
                yield f"requests and limits of {name} differ", "the same number in both"
    elif key == "env" and isinstance(value, list):
        names = [variable.get("name") for variable in value]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"the variable {name} is listed twice", "each variable once"
