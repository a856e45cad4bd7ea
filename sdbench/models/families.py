"""Finds the families of models: each package in this folder that has a module `family`."""

from __future__ import annotations

import functools
import json
import pkgutil
from pathlib import Path

from sdbench.models.family import SAID_OF_CLASS, Family

SIZES_FOLDER = "sizes"


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
    config_file = folder / family.denoiser / "config.json"
    return _says_class(config_file, family.parts[family.denoiser])


def said_pipeline(folder: Path) -> str | None:
    """The class of diffusers that the folder's model_index.json names, if it has one."""
    try:
        return json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _says_class(config_file: Path, class_name: str) -> bool:
    key, wanted = SAID_OF_CLASS.get(class_name, ("_class_name", class_name))
    try:
        return json.loads(config_file.read_text(encoding="utf-8"))[key] == wanted
    except (OSError, ValueError, KeyError, TypeError):
        return False
