"""Namespaces, to break a machine for one process and no other."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess

import pytest


def enter(*kinds: str, programs: tuple[str, ...] = ()) -> list[str]:
    """The beginning of a command that runs in namespaces of its own.

    The test is skipped where they cannot be made.

    Args:
        kinds: Options of unshare, e.g. ``--mount``.
        programs: What else the command needs.
    """
    missing = [name for name in ("unshare", *programs) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: util-linux, iproute2)")
    # Another user becomes root of a namespace of users, where the system allows it.
    options = kinds if os.getuid() == 0 else ("--user", "--map-root-user", *kinds)
    command = ["unshare", *options]
    if subprocess.run([*command, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip(f"namespaces cannot be made here: {shlex.join(command)} fails")
    return command
