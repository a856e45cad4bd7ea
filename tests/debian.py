"""Programs of Debian packages for tests marked `system`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def find_program(name: str, *, package: str, folder: Path) -> str:
    """Path of an installed program, or of one that is unpacked from a Debian package.

    Unpacking installs nothing and starts no service. The test is skipped where neither is possible.
    """
    program = shutil.which(name)
    if program is not None:
        return program
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"{name} is not installed, and only root can get {package} by apt-get")
    folder.mkdir(exist_ok=True)
    download = ["apt-get", "-qq", "download", package]
    if subprocess.run(download, cwd=folder, check=False, capture_output=True).returncode != 0:
        subprocess.run(["apt-get", "-qq", "update"], check=True)
        subprocess.run(download, cwd=folder, check=True)
    (archive,) = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg", "-x", str(archive), str(folder)], check=True)
    return str(folder / "usr" / "bin" / name)
