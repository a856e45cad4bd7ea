"""Presets by name, and values that differ by device."""

from sdbench.settings.config import PRESETS
from sdbench.settings.setting import PerDevice

__all__ = ["PRESETS", "PerDevice"]
