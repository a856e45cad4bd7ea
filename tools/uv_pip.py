"""Runs `uv pip install` or `uv pip compile` with the places that pip is set to use.

uv does not read pip's settings: with a proxy index pip works and uv finds nothing. So pip's
settings are put into the variables that uv reads. Variables that the user has set for uv stay.

    .venv/bin/python tools/uv_pip.py install --no-deps -r requirements.txt
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# pip's name, uv's variable, and what uv puts between several values; pip has white space there.
PLACES = (
    ("index-url", "UV_DEFAULT_INDEX", None),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
)
CONNECTIONS = (
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("constraint", "UV_CONSTRAINT", " "),
    ("timeout", "UV_HTTP_TIMEOUT", None),
    ("default-timeout", "UV_HTTP_TIMEOUT", None),
    ("cert", "SSL_CERT_FILE", None),
    ("client-cert", "SSL_CLIENT_CERT", None),
    ("proxy", "ALL_PROXY", None),
)
# If one of these says where packages come from, pip's places are ignored.
USERS_PLACES = {
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"),
    *("UV_INDEX_STRATEGY", "UV_CONFIG_FILE", "UV_OFFLINE"),
}
USERS_PROXIES = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}


def parse_pip_settings(listed: str) -> dict[str, str]:
    """Parse the output of `pip config list`: the environment overrides [install] and [global]."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections:
            sections[section][name] = ast.literal_eval(value)
    return {**sections["global"], **sections["install"], **sections[":env:"]}


def translate(
    pip: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the variables and flags of uv for the settings of `parse_pip_settings`."""
    is_set = {name for name, value in environ.items() if value}
    rows, flags = list(CONNECTIONS), []
    if not is_set & USERS_PLACES:
        rows += PLACES
        if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            flags = ["--no-index"]
    variables = {}
    for name, variable, separator in rows:
        values = pip.get(name, "").split()
        if values and variable not in is_set:
            variables[variable] = values[0] if separator is None else separator.join(values)
    if "UV_INDEX" in variables:
        # As pip does: the best version of all indexes, not of the first that knows the name.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if {name.upper() for name in is_set} & USERS_PROXIES:
        variables.pop("ALL_PROXY", None)
    # pip reads these two as well.
    for bundle in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if environ.get(bundle) and "SSL_CERT_FILE" not in is_set:
            variables.setdefault("SSL_CERT_FILE", environ[bundle])
    return variables, flags


def main() -> None:
    """Become `uv pip` with the arguments of this program, for the environment of this Python."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    variables, flags = translate(parse_pip_settings(listed.stdout), os.environ)
    uv = str(Path(sys.executable).with_name("uv"))
    command, *rest = sys.argv[1:]
    argv = [uv, "pip", command, "--python", sys.executable, *flags, *rest]
    sys.stdout.flush()
    os.execve(uv, argv, {**os.environ, **variables})


if __name__ == "__main__":
    main()
