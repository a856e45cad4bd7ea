"""`make` installs by uv from where pip would have, once, and again what was cut off."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from tools import uv_install

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
    pip = uv_install.parse_pip_settings(listed) | pip
    assert uv_install.translate(pip, environ) == (variables, flags)


# Stands for pip and uv: logs its arguments, and fails if a file says so.
FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
  *"-m venv"*) for to; do :; done; rm -rf "$to"; mkdir -p "$to/bin"; cp "$0" "$to/bin/python";;
  *uv_install*) test ! -e "$CUT_OFF";;
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
    return [line for line in lines if "uv_install" in line]


def test_nothing_is_installed_twice(make):
    (line,) = installs(make("settings"))
    assert line == "tools/uv_install.py -r requirements.txt -c constraints.txt"
    assert not installs(make("settings"))
    # The rest is added once, and serves the others.
    (line,) = installs(make("test-ray"))
    assert line.count("-r ") == 3
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


def test_the_newer_torch_has_an_environment_of_its_own(make):
    make("settings")
    lines = make("settings", "TORCH=2.14")
    assert any("-m venv --clear .venv-torch-2.14" in line for line in lines)
    assert installs(lines) == [
        "tools/uv_install.py -r requirements.txt -c constraints-torch-2.14.txt "
        "--override overrides-torch-2.14.txt"
    ]
    assert not installs(make("settings"))


def test_another_torch_is_refused_by_name(make):
    refusal = make("settings", "TORCH=2.9", fails=True)[-1]
    assert "got '2.9'; allowed: 2.7 " in refusal
    assert "2.14 " in refusal and "change it with TORCH" in refusal


def test_both_sets_pin_what_they_replace(repository):
    def pins(name: str) -> dict[str, str]:
        text = (repository / name).read_text()
        return dict(re.findall(r"^([\w.\-]+)(?:\[[\w,]+\])?[=>]=([^\s;]+)", text, re.MULTILINE))

    wanted, replaced = pins("requirements.txt"), pins("overrides-torch-2.14.txt")
    newer = {name.lower(): pin for name, pin in pins("constraints-torch-2.14.txt").items()}
    assert {*replaced} < {*wanted}
    assert newer["torch"] == replaced["torch"]
    assert newer["torchvision"] == replaced["torchvision"]
    for name in {*wanted} - {*replaced}:
        assert newer[name.lower()] == wanted[name], name
