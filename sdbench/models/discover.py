"""Finds the families of models: each package in this folder that has a module `family`."""

from __future__ import annotations

import functools
import pkgutil
from pathlib import Path
from typing import Any

from sdbench.base.outside import read_json_object
from sdbench.models.family import ZEROS_KEY, Family

SIZES_FOLDER = "sizes"
# Of a folder of diffusers, the file that names the pipeline.
PIPELINE_FILE = "model_index.json"


@functools.cache
def families() -> dict[str, Family]:
    """The families by name; Stable Diffusion 1 and 2 come first."""
    names = [path.parent.name for path in Path(__file__).parent.glob("*/family.py")]
    found = [pkgutil.resolve_name(f"{__package__}.{name}.family:FAMILY") for name in names]
    return {family.name: family for family in sorted(found, key=_default_first)}


def _default_first(family: Family) -> tuple[bool, str]:
    return not family.is_default, family.name


@functools.cache
def built_in_files() -> dict[str, Path]:
    """The JSON files of built-in architectures by name, in the folder ``sizes`` of their family."""
    here = Path(__file__).parent
    return {path.stem: path for path in sorted(here.glob(f"*/{SIZES_FOLDER}/*.json"))}


def family_of_file(path: Path) -> Family:
    """The family of a built-in architecture."""
    return families()[path.parent.parent.name]


def detect_family(folder: Path) -> Family | None:
    """The family that the parts of a folder suit best; None: they suit no family."""
    suited = [
        family
        for family in families().values()
        if has_all_parts(folder, family) and has_denoiser(folder, family)
    ]
    return max(suited, key=lambda one: len(one.parts), default=None)


def has_all_parts(folder: Path, family: Family) -> bool:
    """Whether a folder has all parts that each model of a family has."""
    return all((folder / part).is_dir() for part in family.required_parts)


def has_denoiser(folder: Path, family: Family) -> bool:
    """Whether a folder says that its denoiser is of the class that a family has."""
    class_name = family.parts[family.denoiser]
    return _say(folder / family.denoiser / "config.json", "_class_name") == class_name


def said_pipeline(folder: Path) -> str | None:
    """The class of diffusers that the folder's model_index.json names, if it has one."""
    return _say(folder / PIPELINE_FILE, "_class_name")


def asks_for_zeros(folder: Path) -> bool:
    """Whether diffusers draws with zeros in place of the empty prompt: so it does unless told."""
    said = _say(folder / "model_index.json", ZEROS_KEY)
    return said_pipeline(folder) is not None and said is not False


def _say(file: Path, key: str) -> Any:
    """What a JSON file says; None if it is not there, is no JSON, or does not say it."""
    try:
        return read_json_object(file).get(key)
    except (OSError, ValueError):
        return None
