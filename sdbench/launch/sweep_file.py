"""`read_sweep_file` reads the cells of a sweep, and checks all of them before a run is started.

A sweep file is YAML with a launcher and settings of benchmark.py: `base` holds for every cell,
`grid` is multiplied out, `list` names cells one by one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.base.outside import shorten
from sdbench.base.secrets import redact_values
from sdbench.base.yaml_file import read_mapping
from sdbench.launch.child import check_suite_is_here, find_program, split_words
from sdbench.settings.config import SETTINGS, BenchmarkConfig
from sdbench.settings.kinds import REPEATS, SECONDS
from sdbench.settings.request import parse, raise_unknown
from sdbench.settings.rules import check
from sdbench.settings.setting import Setting

DEFAULTS: dict[str, Any] = {
    "launcher": "composer",
    "script": "benchmark.py",
    "timeout_s": 3600.0,
    "budget_s": None,
    "repeats": 1,
    "base": {},
    "grid": {},
    "list": [],
}
NUM_KEY_DIGITS = 12
# A year of runs of 5 minutes; a grid grows beyond it by one key too many.
MAX_RUNS = 100_000


class Cell(NamedTuple):
    """One configuration of a sweep."""

    settings: Mapping[str, Any]
    varied: Mapping[str, Any]  # the settings that differ between cells, in the file's order
    key: str  # hash of the settings and of how they are launched
    command: tuple[str, ...]

    @property
    def described(self) -> str:
        """The settings that it varies, as text without secrets."""
        varied = redact_values(self.varied)
        settings = ", ".join(f"{name}={value}" for name, value in varied.items())
        return settings or "the one cell"


class SweepFile(NamedTuple):
    """A checked sweep file."""

    cells: tuple[Cell, ...]
    repeats: int
    timeout_s: float  # bound on a run
    budget_s: float | None  # bound on one start of the whole sweep


def read_sweep_file(path: Path) -> SweepFile:
    """Read and check a sweep file; a mistake in it is a ConfigError."""
    content = {**DEFAULTS, **read_mapping(path, allowed="a YAML file of a sweep", flag="FILE")}
    if not (content["grid"] or content["list"]):
        raise _wrong(path, "grid, list", None, "at least one of them")
    for key in content.keys() - DEFAULTS.keys():
        flag = f"{shorten(str(key))} in {path}"
        raise_unknown(str(key), known=list(DEFAULTS), where="key", flag=flag)
    for key, kind in (("timeout_s", SECONDS), ("budget_s", SECONDS), ("repeats", REPEATS)):
        if content[key] is None and DEFAULTS[key] is None:
            continue
        try:
            content[key] = kind.parse(content[key])
        except (TypeError, ValueError):
            raise _wrong(path, key, content[key], kind.allowed) from None
    if content["script"] == DEFAULTS["script"]:
        check_suite_is_here(DEFAULTS["script"])
    if not Path(str(content["script"])).is_file():
        raise _wrong(path, "script", content["script"], "a file, from the folder you are in")
    launcher = split_words(str(content["launcher"]), flag=f"launcher in {path}")
    start = [*find_program(launcher), str(content["script"])]
    settings = _expand(path, content)
    shared = {
        name
        for name in settings[0]
        if all(name in cell and cell[name] == settings[0][name] for cell in settings)
    }
    launched_by = [content["launcher"], content["script"]]
    cells: dict[str, Cell] = {}
    for of_cell in settings:
        text = json.dumps([launched_by, of_cell], sort_keys=True)
        cell = Cell(
            settings=of_cell,
            varied={name: value for name, value in of_cell.items() if name not in shared},
            key=hashlib.sha256(text.encode()).hexdigest()[:NUM_KEY_DIGITS],
            command=(*start, *to_flags(of_cell)),
        )
        _check_cell(path, cell)
        if cells.setdefault(cell.key, cell) is not cell:
            raise _wrong(path, "grid, list", dict(cell.varied), "each cell once")
    bounds = (content[key] for key in SweepFile._fields[1:])
    return SweepFile(tuple(cells.values()), *bounds)


def _check_cell(path: Path, cell: Cell) -> None:
    """Refuse a cell whose settings do not suit each other, on whatever machine."""
    try:
        check(parse(BenchmarkConfig, to_flags(cell.settings), description="", epilog=""))
    except ConfigError as error:
        raise ConfigError(
            f"a cell of the sweep would be refused ({cell.described}): {error.what}",
            value=error.value,
            allowed=error.allowed,
            flag=f"{error.flag} in {path}",
        ) from None


def to_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as flags; those without a value are left out."""
    flags = []
    for name, value in settings.items():
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no_{name}")
        else:
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)  # JSON is YAML
            flags.append(f"--{name}={text}")
    return flags


def _expand(path: Path, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of each cell: the grid multiplied out, then the list."""
    base, grid, cells = content["base"], content["grid"], content["list"]
    if not isinstance(base, dict):
        raise _wrong(path, "base", base, "settings and their values")
    if not isinstance(grid, dict) or not all(isinstance(v, list) and v for v in grid.values()):
        raise _wrong(path, "grid", grid, "settings, each with a list of values")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise _wrong(path, "list", cells, "a list of settings and their values")

    def find(name: Any) -> Setting:
        if name not in SETTINGS:
            raise_unknown(str(name), known=list(SETTINGS), where=f"setting in {path}")
        if name == "results_dir":
            raise _wrong(path, name, name, "nothing: each run gets a folder of its own")
        return SETTINGS[name]

    base, *cells = (
        {name: find(name).parse(value) for name, value in given.items()} for given in (base, *cells)
    )
    grid = {name: [find(name).parse(value) for value in grid[name]] for name in grid}
    num_cells = len(cells) + (math.prod(map(len, grid.values())) if grid else 0)
    if num_cells * content["repeats"] > MAX_RUNS:
        num_runs = f"{num_cells} cells x {content['repeats']}"
        raise _wrong(path, "grid, list, repeats", num_runs, f"at most {MAX_RUNS:,} runs")
    products = itertools.product(*grid.values()) if grid else ()
    varied = [dict(zip(grid, values, strict=True)) for values in products]
    return [{**base, **cell} for cell in [*varied, *cells]]


def _wrong(path: Path, key: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(
        f"`{key}` of the sweep file is wrong", value=value, allowed=allowed, flag=f"{key} in {path}"
    )
