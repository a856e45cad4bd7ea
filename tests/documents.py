"""The commands of the guides, as they stand in their blocks of code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# In the order in which one reads them.
GUIDES = (
    "README.md",
    "docs/measure.md",
    "docs/data.md",
    "docs/train.md",
    "docs/models.md",
    "docs/subject.md",
    "docs/results.md",
    "docs/submit.md",
    "docs/accept.md",
    "multi-node/ray.md",
)
LAUNCHERS = ("composer", "torchrun", "python")
ON_RAY = "--engine ray"  # starts a cluster


def blocks(language: str, documents: Sequence[str] = GUIDES) -> list[str]:
    """The blocks of code in a language."""
    text = "".join((ROOT / document).read_text() for document in documents)
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands(documents: Sequence[str] = GUIDES) -> list[str]:
    """The lines of the blocks that are typed in a shell, each once."""
    lines = [line for block in blocks("bash", documents) for line in block.splitlines()]
    return list(dict.fromkeys(filter(str.strip, lines)))


def launched() -> list[str]:
    """Those of them that start a program of this suite without Ray."""
    return [line for line in commands() if line.split()[0] in LAUNCHERS and ON_RAY not in line]
