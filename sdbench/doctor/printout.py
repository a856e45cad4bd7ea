"""How is what all nodes have found shown to a person, and to a script?"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from sdbench.base.escape import for_terminal
from sdbench.doctor.finding import ERROR, LEVELS, WARNING, Finding, number_of

MIN_TEXT_WIDTH = 40


@dataclasses.dataclass(frozen=True)
class Line:
    """What one or more nodes found in the same words.

    Attributes:
        name: Of the check.
        nodes: Numbers of the nodes; empty for what was found on all of them together.
        finding: What was found.
        is_shared: All nodes that looked found it.
    """

    name: str
    nodes: tuple[int, ...]
    finding: Finding
    is_shared: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        model_name: What is to be trained.
        hosts: Host name of each node, for the eyes of the user alone.
        num_ranks: Ranks that the doctor was started with.
        lines: The findings, in order.
    """

    model_name: str
    hosts: Sequence[str]
    num_ranks: int
    lines: Sequence[Line]

    def count(self, level: str) -> int:
        """How many lines have a level."""
        return Counter(line.finding.level for line in self.lines)[level]

    def exit_code(self, *, strict: bool) -> int:
        """1 if there is an error, and with `strict` also for a warning; else 0."""
        return int(self.count(ERROR) > 0 or (strict and self.count(WARNING) > 0))


def merge(nodes: Sequence[Mapping[str, Finding]]) -> list[Line]:
    """Make lines of the findings of all nodes, the same words of several nodes once.

    Args:
        nodes: Name of each check to what it found, by node.
    """
    lines = []
    for name in dict.fromkeys(name for findings in nodes for name in findings):
        numbers_of: dict[Finding, list[int]] = {}
        for number, findings in enumerate(nodes):
            if name in findings:
                numbers_of.setdefault(findings[name], []).append(number)
        lines += [
            Line(name, tuple(numbers), finding, is_shared=len(numbers_of) == 1)
            for finding, numbers in numbers_of.items()
        ]
    return lines


def to_text(report: Report, *, width: int) -> str:
    """The report for a terminal of so many columns."""
    name_width = max(len(line.name) for line in report.lines)
    blocks = [_headline(report)]
    if len(report.hosts) > 1:
        hosts = (f"node {number} is {host}" for number, host in enumerate(report.hosts))
        blocks.append("\n".join(_wrap(", ".join(hosts), indent="", width=width)))
    blocks.append(
        "\n".join(_to_lines(line, name_width=name_width, width=width) for line in report.lines)
    )
    blocks.append(_totals(report))
    return "\n\n".join(blocks)


def _headline(report: Report) -> str:
    return for_terminal(
        f"{report.model_name}: {number_of(report.num_ranks, 'rank')} on "
        f"{number_of(len(report.hosts), 'node')}"
    )


def _totals(report: Report) -> str:
    counts = {level: report.count(level) for level in reversed(LEVELS)}
    plural = {ERROR: "error", WARNING: "warning"}
    return ", ".join(
        number_of(number, plural[level]) if level in plural else f"{number} {level}"
        for level, number in counts.items()
    )


def _to_lines(line: Line, *, name_width: int, width: int) -> str:
    finding = line.finding
    begin = f"  {finding.level:<7}  {line.name:<{name_width}}  "
    where = "" if line.is_shared else f"node {shorten(line.nodes)}: "
    wrapped = _wrap(where + finding.found, indent=" " * len(begin), width=width)
    if finding.advice:
        wrapped += _wrap(f"-> {finding.advice}", indent=" " * len(begin), width=width)
    return begin + "\n".join(wrapped).lstrip()


def _wrap(text: str, *, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        for_terminal(text),
        max(width, len(indent) + MIN_TEXT_WIDTH),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def shorten(numbers: Sequence[int]) -> str:
    """Sorted numbers with runs of them as ranges: ``0, 2-5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def to_json(report: Report, *, strict: bool) -> str:
    """The report for a script, without any host name."""
    document = {
        "status": ["ok", "error"][report.exit_code(strict=strict)],
        "model_name": report.model_name,
        "num_nodes": len(report.hosts),
        "num_ranks": report.num_ranks,
        "counts": {level: report.count(level) for level in reversed(LEVELS)},
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
    """The text with the number of a node in place of its name, with or without its domain."""
    for number, host in enumerate(hosts):
        for name in (host, host.partition(".")[0]):
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", f"node {number}", text)
    return text
