"""`make` installs by uv from where pip would have, once, and again what was cut off."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import uv_pip

LISTED = r"""
:env:.find-links='/wheels'
:env:.default-timeout='180'
:env:.disable-pip-version-check='1'
download.index-url='https://of.download/simple'
global.cert='/etc/company.crt'
global.constraint='/etc/constraints.txt'
global.extra-index-url='\nfile:///mirror/simple\nfile:///more/simple'
global.find-links='/elsewhere'
global.index-url='https://user:pw=1@global/simple'
global.proxy='http://proxy:3128'
install.index-url='https://of.install/simple'
install.trusted-host='one two:8080'
"""


PLACES = {
    "UV_DEFAULT_INDEX": "https://of.install/simple",
    "UV_INDEX": "file:///mirror/simple file:///more/simple",
    "UV_INDEX_STRATEGY": "unsafe-best-match",
    "UV_FIND_LINKS": "/wheels",
}
OTHERS = {
    "UV_CONSTRAINT": "/etc/constraints.txt",
    "UV_INSECURE_HOST": "one two:8080",
    "UV_HTTP_TIMEOUT": "180",
    "SSL_CERT_FILE": "/etc/company.crt",
    "ALL_PROXY": "http://proxy:3128",
}


@pytest.mark.parametrize(
    ("listed", "pip", "environ", "variables", "flags"),
    [
        (LISTED, {}, {}, PLACES | OTHERS, []),
        (
            *("", {"no-index": "1", "find-links": "/one /two"}, {}),
            *({"UV_FIND_LINKS": "/one,/two"}, ["--no-index"]),
        ),
        # Places that the user gave uv are the only ones, and a variable that is set stays.
        (LISTED, {"no-index": "true"}, {"UV_INDEX": "https://mine"}, OTHERS, []),
        # pip reads a bundle of certificates, too.
        ("", {}, {"REQUESTS_CA_BUNDLE": "/ca.crt"}, {"SSL_CERT_FILE": "/ca.crt"}, []),
    ],
)
def test_settings_of_pip_become_those_of_uv(listed, pip, environ, variables, flags):
    pip = uv_pip.parse_pip_settings(listed) | pip
    assert uv_pip.translate(pip, environ) == (variables, flags)


# Stands for pip and uv: logs its arguments, and fails if a file says so.
FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
  *"-m venv"*) for to; do :; done; rm -rf "$to"; mkdir -p "$to/bin"; cp "$0" "$to/bin/python";;
  *uv_pip*) test ! -e "$CUT_OFF";;
esac
"""


@pytest.fixture
def make(tmp_path, repository):
    """Run make in a folder with a Python that installs nothing; returns the calls of Python."""
    for path in [repository / "Makefile", *repository.glob("*.txt")]:
        shutil.copy(path, tmp_path)
    (tmp_path / "docs").mkdir()
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def make(*argv: str, fails: bool = False) -> list[str]:
        log.write_text("")
        # `make test TORCH=2.14` hands its own variables to every make below it.
        ours = {"VENV", "TORCH", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL"}
        environ = {name: value for name, value in os.environ.items() if name not in ours}
        done = subprocess.run(
            ["make", f"PYTHON={python}", *argv],
            cwd=tmp_path,
            env={**environ, "LOG": str(log), "CUT_OFF": str(tmp_path / "cut_off")},
            capture_output=True,
            text=True,
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return [*log.read_text().splitlines(), *([done.stderr] if fails else [])]

    return make


def installs(lines: list[str]) -> list[str]:
    return [line for line in lines if "uv_pip" in line]


def test_nothing_is_installed_twice(make):
    (line,) = installs(make("settings"))
    assert line == "tools/uv_pip.py install --no-deps -r requirements.txt"
    assert not installs(make("settings"))
    # The rest is added once, and serves the others.
    (line,) = installs(make("test-ray"))
    assert line == "tools/uv_pip.py install --no-deps -r requirements-dev.txt"
    assert not installs(make("test")) and not installs(make("settings"))


def test_an_installation_that_was_cut_off_is_made_again_from_nothing(make, tmp_path):
    (tmp_path / "cut_off").touch()
    assert any("-m venv" in line for line in make("settings", fails=True))
    (tmp_path / "cut_off").unlink()
    again = make("settings")
    assert any("-m venv --clear .venv" in line for line in again)
    assert installs(again)
    # What was whole is kept, and added to.
    assert not any("-m venv" in line for line in make("test"))


def test_the_older_torch_has_an_environment_of_its_own(make):
    make("settings")
    lines = make("settings", "TORCH=2.7")
    assert any("-m venv --clear .venv-torch-2.7" in line for line in lines)
    assert installs(lines) == ["tools/uv_pip.py install --no-deps -r requirements-torch-2.7.txt"]
    assert not installs(make("settings"))


def test_another_torch_is_refused_by_name(make):
    refusal = make("settings", "TORCH=2.14", fails=True)[-1]
    assert "got '2.14'; allowed: 2.11 " in refusal
    assert "2.7 " in refusal and "change it with TORCH" in refusal


def test_publish_asks_for_the_run_before_it_installs_anything(make):
    *lines, refusal = make("publish", fails=True)
    assert lines == []
    assert "make publish RUN=" in refusal


def test_a_python_that_does_not_fit_is_refused_before_anything_is_made(make, tmp_path, repository):
    old = tmp_path / "old-python"
    old.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 10, 9)\n$2'"
    )
    old.chmod(0o755)
    refusal = make("settings", f"PYTHON={old}", "PATH=/usr/bin:/bin", fails=True)[-1]
    assert "Python 3.11 to 3.14 is needed" in refusal
    assert not (tmp_path / ".venv").exists()


def test_a_program_names_the_python_that_it_needs(repository):
    code = "import sys; sys.version_info = (3, 10, 9); import sdbench"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Python 3.11 or newer is needed: got 3.")


def read_pins(file: Path) -> dict[str, set[str]]:
    """The packages of a file of requirements, each with its versions: they differ by Python."""
    pins = defaultdict(set)
    for line in file.read_text().splitlines():
        requirement = line.partition("#")[0].strip()
        if requirement:
            pin = Requirement(requirement)
            (version,) = pin.specifier
            assert version.operator == "==", line
            pins[pin.name].add(version.version)
    return dict(pins)


def test_the_files_of_packages_hold_one_set_and_all_that_is_declared(repository):
    declared = tomllib.loads((repository / "pyproject.toml").read_text())
    project = declared["project"]
    running = read_pins(repository / "requirements.txt")
    everything = read_pins(repository / "requirements-all.txt")
    tests = read_pins(repository / "requirements-dev.txt")
    assert running.items() <= everything.items() <= tests.items()
    lines = (repository / "overrides.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    overrides = {pin.name: pin for pin in pins}
    for lines, pins in (
        (project["dependencies"], running),
        (chain(*project["optional-dependencies"].values()), everything),
        (project["dependencies"], read_pins(repository / "requirements-torch-2.7.txt")),
    ):
        for wanted in map(Requirement, lines):
            of_set = wanted if pins["torch"] == {"2.7.0"} else overrides.get(wanted.name, wanted)
            assert all(version in of_set.specifier for version in pins[wanted.name]), wanted
    assert running["torch"] == {"2.11.0"}


def test_what_the_host_of_a_gpu_lacks_is_pinned(repository):
    pins = read_pins(repository / "requirements.txt")
    lines = (repository / "single-node/gpu-host-lacks.txt").read_text().splitlines()
    names = {canonicalize_name(line) for line in lines if not line.startswith("#")}
    assert names <= {canonicalize_name(name) for name in pins}
