"""The report of the doctor, as text for a person and as JSON for a script."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.base.escape import for_terminal
from sdbench.doctor.finding import ERROR, LEVELS, WARNING, Finding
from sdbench.doctor.speed import RULE, format_speed

MIN_TEXT_WIDTH = 40


def make_line(name: str, finding: Finding, *, nodes: Sequence[int] = ()) -> dict[str, Any]:
    """A finding of a check with the numbers of the nodes; empty: of all nodes together."""
    return {"name": name, "nodes": list(nodes), **finding._asdict()}


def merge(nodes: Sequence[Mapping[str, Finding]]) -> list[dict[str, Any]]:
    """Make lines from each node's findings by check; equal findings of nodes become one line."""
    numbers_of: dict[tuple[str, Finding], list[int]] = {}
    for name in nodes[0]:
        for number, findings in enumerate(nodes):
            if name in findings:
                numbers_of.setdefault((name, findings[name]), []).append(number)
    return [make_line(name, found, nodes=numbers) for (name, found), numbers in numbers_of.items()]


def make_report(
    lines: Sequence[dict[str, Any]],
    *,
    model_name: str,
    hosts: Sequence[str],
    num_ranks: int,
    strict: bool,
    speed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the document to print; errors, and with `strict` warnings, make its status ``error``.

    It has a key `speed` if that was measured.
    """
    levels = [line["level"] for line in lines]
    counts = {level: levels.count(level) for level in reversed(LEVELS)}
    is_bad = counts[ERROR] > 0 or (strict and counts[WARNING] > 0)
    return {
        "status": "error" if is_bad else "ok",
        "model_name": model_name,
        "num_nodes": len(hosts),
        "num_ranks": num_ranks,
        "counts": counts,
        "findings": lines,
    } | ({} if speed is None else {"speed": speed})


def to_text(report: Mapping[str, Any], *, hosts: Sequence[str], width: int) -> str:
    """Format the report for a terminal of this width."""
    head = f"{report['model_name']}: ranks {report['num_ranks']}, nodes {len(hosts)}"
    blocks = [_wrap(head, width=width)]
    if len(hosts) > 1:
        names = (f"node {number} is {host}" for number, host in enumerate(hosts))
        blocks.append(_wrap(", ".join(names), width=width))
    blocks.append("")
    name_width = max(len(line["name"]) for line in report["findings"])
    for line in report["findings"]:
        begin = f"  {line['level']:<7}  {line['name']:<{name_width}}  "
        is_of_some = 0 < len(line["nodes"]) < len(hosts)
        where = f"node {', '.join(map(str, line['nodes']))}: " if is_of_some else ""
        blocks.append(_wrap(where + line["found"], begin=begin, width=width))
        if line["advice"]:
            blocks.append(_wrap(f"-> {line['advice']}", begin=" " * len(begin), width=width))
    if "speed" in report:
        table = format_speed(report["speed"], hosts=hosts)
        blocks += ["", table, "", _wrap(RULE, width=width)]
    counts = (f"{level} {number}" for level, number in report["counts"].items())
    return "\n".join([*blocks, "", ", ".join(counts)])


def _wrap(text: str, *, begin: str = "", width: int) -> str:
    """Lines of a text behind `begin`, all equally far to the right."""
    return textwrap.fill(
        for_terminal(text),
        max(width, len(begin) + MIN_TEXT_WIDTH),
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_on_hyphens=False,
    )


def to_json(report: Mapping[str, Any], *, hosts: Sequence[str]) -> str:
    """Format the report as JSON, without host names."""
    lines = [
        line | {key: hide_hosts(line[key], hosts) for key in ("found", "advice")}
        for line in report["findings"]
    ]
    return json.dumps({**report, "findings": lines}, indent=2)


def hide_hosts(text: str, hosts: Sequence[str]) -> str:
    """Replace names of nodes, with or without domain, by their numbers."""
    for number, host in enumerate(hosts):
        for name in (host, host.partition(".")[0]):
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", f"node {number}", text)
    return text
