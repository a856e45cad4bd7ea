"""The kinds of records, and `kind_of`, which tells that of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Kinds of records, named as their tasks. Benchmark records have no key "kind".
BENCHMARK = "benchmark"
FEED = "feed"
PRECOMPUTE = "precompute"
PROFILE = "profile"
TRAIN = "train"


def kind_of(record: Mapping[str, Any]) -> str:
    """The kind of a record: one of these names."""
    return record.get("kind", BENCHMARK)
