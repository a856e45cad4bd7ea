"""`Neighbours` tells which processes beside those of this run use the CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from typing import Any

# Share of the machine's cores. On an idle machine all processes together use less.
MIN_SHARE = 0.1
MAX_NAMED = 3
# The kernel counts in hundredths of a second.
MIN_PERIOD_S = 0.3


class Neighbours:
    """Looks at all processes when it is made, and again when it is asked."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._before_s = {one["pid"]: _cpu_s(one) for one in _look()}

    def describe(self, own: Collection[int]) -> str | None:
        """Who has used how many cores since, in words; None if it is next to nothing.

        `own` are the process ids of the ranks. Their children and the programs that have started
        this process belong to the run, too.
        """
        time.sleep(max(self._began_s + MIN_PERIOD_S - time.monotonic(), 0.0))
        period_s, num_cores = time.monotonic() - self._began_s, os.cpu_count() or 1
        found = {one["pid"]: one for one in _look()}
        parents = {pid: one["ppid"] for pid, one in found.items()}
        started_by = _line_of(os.getpid(), parents)
        cores = {
            pid: max(_cpu_s(one) - self._before_s.get(pid, 0.0), 0.0) / period_s
            for pid, one in found.items()
            if pid not in started_by and _line_of(pid, parents).isdisjoint(own)
        }
        total = sum(cores.values())
        if total < MIN_SHARE * num_cores:
            return None
        largest = sorted(cores, key=cores.__getitem__, reverse=True)[:MAX_NAMED]
        named = [pid for pid in largest if cores[pid] >= total / 10] or largest
        who = "another process uses" if len(named) == 1 else "other processes use"
        names = ", ".join(f"{found[pid]['name']} (pid {pid})" for pid in named)
        return f"{who} {total:.1f} of {num_cores} cores: {names}"


def _look() -> list[dict[str, Any]]:
    """All processes whose times can be read."""
    import psutil

    seen = [one.info for one in psutil.process_iter(["pid", "ppid", "name", "cpu_times"])]
    return [one for one in seen if one["cpu_times"] is not None]


def _cpu_s(one: Mapping[str, Any]) -> float:
    return one["cpu_times"].user + one["cpu_times"].system


def _line_of(pid: int, parents: Mapping[int, int]) -> set[int]:
    """A process and all that it comes from."""
    line: set[int] = set()
    while pid and pid not in line:
        line.add(pid)
        pid = parents.get(pid, 0)
    return line
