"""Network namespaces that pass for nodes, with an address each and a bridge between them.

Only root makes them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def make_nodes(number: int) -> Iterator[list[str]]:
    """The names of network namespaces that reach each other, each by its interface ``eth0``."""
    ours = f"sdb{os.getpid()}"  # the names of interfaces have at most 15 characters
    names = [f"{ours}-{index}" for index in range(number)]
    try:
        _ip(f"link add {ours} type bridge")
        _ip(f"link set {ours} up")
        for index, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"link add {ours}v{index} type veth peer name eth0 netns {name}")
            _ip(f"link set {ours}v{index} master {ours} up")
            _ip(f"-n {name} address add {address_of(index)}/24 dev eth0")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set eth0 up")
        yield names
    finally:
        # With a namespace its interfaces go too, but at some later time.
        links = [f"link delete {ours}v{index}" for index in range(number)]
        for words in (*links, *(f"netns delete {name}" for name in names), f"link delete {ours}"):
            subprocess.run(["ip", *words.split()], check=False, capture_output=True)


def address_of(index: int) -> str:
    """The address of a node, by its number from 0."""
    return f"10.77.0.{index + 1}"


def limit_links(names: Sequence[str], rate_mbit: int | None) -> None:
    """Hold what each node sends, and so what another receives, to a rate, or let it go."""
    for name in names:
        kind = "pfifo" if rate_mbit is None else f"tbf rate {rate_mbit}mbit burst 128kb latency 1s"
        words = f"tc -n {name} qdisc replace dev eth0 root {kind}"
        subprocess.run(words.split(), check=True)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
