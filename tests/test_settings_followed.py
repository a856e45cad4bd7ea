"""Settings can be followed from where they are declared to where they are read, by their types."""

from __future__ import annotations

import re

import pytest

from sdbench.data import PlaceSettings
from sdbench.doctor.doctor import DoctorSettings
from sdbench.drawing.generate import GenerateFlags
from sdbench.encoding.precompute import PrecomputeSettings
from sdbench.measure.hardware import Machine
from sdbench.plan.draft import DraftSettings
from sdbench.plan.resolve import ModelChoice
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.feed import FeedSettings
from sdbench.settings.recipe import TrainConfig
from sdbench.settings.setting import RuledMachine, RuledRanks, RuledSettings

PLANNED = (BenchmarkConfig, TrainConfig, FeedSettings, PrecomputeSettings)


def members(*classes):
    """The names of fields, properties and methods."""
    bases = [base for one in classes for base in one.__mro__]
    names = {
        name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))
    }
    return {name for name in names if not name.startswith("_")}


def test_no_settings_are_of_any_type(repository):
    files = sorted((repository / "sdbench").rglob("*.py"))
    assert [f for f in files if re.search(r"(config|settings): Any\b", f.read_text())] == []


@pytest.mark.parametrize(
    ("protocol", "classes"),
    [
        (PlaceSettings, (*PLANNED, DoctorSettings)),
        (DraftSettings, PLANNED),
        (ModelChoice, PLANNED),
        (RuledMachine, (Machine,)),
        (RuledRanks, (Ranks,)),
    ],
)
def test_a_protocol_asks_for_nothing_that_one_of_its_classes_lacks(protocol, classes):
    assert [one for one in classes if not members(protocol) <= members(one)] == []


def test_rules_read_what_their_protocol_tells_and_programs_have(repository):
    files = (repository / "sdbench/settings").rglob("*.py")
    reading = re.compile(r"\b(?:s|situation)\.config\.(\w+)")
    read = {name for file in files for name in reading.findall(file.read_text())}
    assert len(read) > 10
    assert read <= members(RuledSettings) <= members(*PLANNED, GenerateFlags)
