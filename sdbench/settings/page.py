"""`make_page`: docs/settings.md, the tables of all settings of benchmark.py."""

from __future__ import annotations

from sdbench.settings.config import SETTINGS
from sdbench.settings.setting import Setting

HEAD = """\
# Settings of benchmark.py

Each is a flag (`--batch_size 64`), an argument (`batch_size=64`), a key of a `--config` file
(`batch_size: 64`) and a line of `--print_config`. `--no_use_ema` turns the switch `--use_ema` off.
Where there is no default, the program chooses a value for the machine and prints it, or nothing is
set.

This page is made from the declarations in `sdbench/settings/` by `make settings`.
"""


def make_page() -> str:
    """The text of docs/settings.md."""
    lines, group = [HEAD.rstrip("\n")], None
    for declared in SETTINGS.values():
        if declared.group != group:
            group = declared.group
            lines += ["", f"## {group[0].upper()}{group[1:]}", ""]
            lines += ["| flag | values | default | what it does |", "|---|---|---|---|"]
        lines.append(_make_row(declared))
    return "\n".join(lines) + "\n"


def _make_row(declared: Setting) -> str:
    default = declared.default_in_words.removeprefix("default: ")
    cells = (f"`{declared.flag}`", declared.kind.allowed, default, declared.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(make_page(), end="")
