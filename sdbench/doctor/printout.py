"""The report of the doctor, as text for a person and as JSON for a script."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Mapping, Sequence

from sdbench.base.escape import for_terminal
from sdbench.doctor.finding import ERROR, LEVELS, WARNING, Finding

MIN_TEXT_WIDTH = 40


@dataclasses.dataclass(frozen=True)
class Line:
    """A finding of a check with the numbers of the nodes; empty: of all nodes together."""

    name: str
    nodes: tuple[int, ...]
    finding: Finding


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings in order. Host names are only for the user's terminal."""

    model_name: str
    hosts: Sequence[str]
    num_ranks: int
    lines: Sequence[Line]

    def counts(self) -> dict[str, int]:
        """Return the number of lines of each level, the most severe first."""
        levels = [line.finding.level for line in self.lines]
        return {level: levels.count(level) for level in reversed(LEVELS)}

    def exit_code(self, *, strict: bool) -> int:
        """Return 1 if there is an error, or with `strict` a warning; else 0."""
        counts = self.counts()
        return int(counts[ERROR] > 0 or (strict and counts[WARNING] > 0))


def merge(nodes: Sequence[Mapping[str, Finding]]) -> list[Line]:
    """Make lines from each node's findings by check; equal findings of nodes become one line."""
    numbers_of: dict[tuple[str, Finding], list[int]] = {}
    for name in nodes[0]:
        for number, findings in enumerate(nodes):
            if name in findings:
                numbers_of.setdefault((name, findings[name]), []).append(number)
    return [Line(name, tuple(numbers), found) for (name, found), numbers in numbers_of.items()]


def to_text(report: Report, *, width: int) -> str:
    """Format the report for a terminal of this width."""
    head = f"{report.model_name}: ranks {report.num_ranks}, nodes {len(report.hosts)}"
    blocks = _wrap(head, indent="", width=width)
    if len(report.hosts) > 1:
        hosts = (f"node {number} is {host}" for number, host in enumerate(report.hosts))
        blocks += _wrap(", ".join(hosts), indent="", width=width)
    blocks.append("")
    name_width = max(len(line.name) for line in report.lines)
    for line in report.lines:
        begin = f"  {line.finding.level:<7}  {line.name:<{name_width}}  "
        is_of_some = line.nodes and len(line.nodes) < len(report.hosts)
        where = f"node {', '.join(map(str, line.nodes))}: " if is_of_some else ""
        wrapped = _wrap(where + line.finding.found, indent=" " * len(begin), width=width)
        if line.finding.advice:
            wrapped += _wrap(f"-> {line.finding.advice}", indent=" " * len(begin), width=width)
        blocks.append(begin + "\n".join(wrapped).lstrip())
    counts = (f"{level} {number}" for level, number in report.counts().items())
    return "\n".join([*blocks, "", ", ".join(counts)])


def _wrap(text: str, *, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        for_terminal(text),
        max(width, len(indent) + MIN_TEXT_WIDTH),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def to_json(report: Report, *, strict: bool) -> str:
    """Format the report as JSON, without host names."""
    document = {
        "status": ["ok", "error"][report.exit_code(strict=strict)],
        "model_name": report.model_name,
        "num_nodes": len(report.hosts),
        "num_ranks": report.num_ranks,
        "counts": report.counts(),
        "findings": [
            {
                "name": line.name,
                "nodes": list(line.nodes),
                "level": line.finding.level,
                "found": hide_hosts(line.finding.found, report.hosts),
                "advice": hide_hosts(line.finding.advice, report.hosts),
            }
            for line in report.lines
        ],
    }
    return json.dumps(document, indent=2)


def hide_hosts(text: str, hosts: Sequence[str]) -> str:
    """Replace names of nodes, with or without domain, by their numbers."""
    for number, host in enumerate(hosts):
        for name in (host, host.partition(".")[0]):
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", f"node {number}", text)
    return text
