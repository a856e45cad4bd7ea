"""Commands that install the suite's packages, and whether an optional one is installed."""

from __future__ import annotations

import importlib.util

INSTALL = "pip install --no-deps -r requirements.txt"
# With what only some settings need: torchao, Ray, Lightning, python-etcd.
INSTALL_ALL = "pip install --no-deps -r requirements-all.txt"


def is_installed(name: str) -> bool:
    """Whether Python finds a package, which is not imported."""
    return importlib.util.find_spec(name) is not None
