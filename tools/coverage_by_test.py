"""A plugin of pytest: the coverage of a process that a test starts has the test's id as context.

It is for `mutation_runs.py`, which says how it is used.
"""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    """Read by coverage where a process starts: only there, or workers of xdist had a context."""
    os.environ["SDBENCH_TEST"] = nodeid + "|sub"
    os.environ["COVERAGE_PROCESS_START"] = os.environ["COVERAGE_OF_PROCESSES"]
