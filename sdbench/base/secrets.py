"""Removes passwords and tokens from what a run writes and prints.

Three kinds are recognised: values of environment variables with names such as TOKEN; parts of a URL
that may be secret (user info, query, fragment); and keys, headers and tokens of known forms. Of a
``pipe:`` command only the program's name is kept, since any argument may be a secret.

The configuration keeps the real values: `redact` is for text that is printed or written, and
`redact_values` for values.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from sdbench.base.escape import as_utf8

SECRET_NAME = re.compile(
    r"PASS(WORD|WD|PHRASE)"
    r"|(^|_)((API|ACCESS|PRIVATE|SECRET)_?)?KEY(_|$)"
    r"|(^|_)(TOKEN|SECRET|CREDENTIALS?|PWD|PAT|SAS|AUTH|CONNECTION_STRING)(_|$)",
    re.IGNORECASE,
)
# Folders, not passwords.
INNOCENT_NAMES = ("PWD", "OLDPWD")
URL_PASSWORD = re.compile(r"^\w[\w+.-]*://[^/@:\s]*:([^/@\s]+)@")
# Shorter values, such as `true` or `0`, are no secrets and occur in any text.
MIN_SECRET_LENGTH = 8

# Patterns in the order of replacement, each with its replacement; a name marks a form of secrets.
# Packages that find secrets (detect-secrets, gitleaks) also go by entropy, which takes a commit or
# a digest for one, read source code line by line, and replace nothing.
SHAPES: tuple[tuple[str | None, re.Pattern[str], str], ...] = (
    (
        "user info of a URL",
        # In these stores' URLs a container stands before the @. A password may hold a slash that
        # should have been encoded; host:port/path@version has none.
        re.compile(
            r"(?<!oci)(?<!abfs)(?<!abfss)(?<!wasb)(?<!wasbs)://"
            r"(?:[^\s/?#]*@|[^\s/:@]*:(?!\d+[/?#])[^\s@]*@)"
        ),
        "://",
    ),
    (
        None,
        # The query and the fragment of a URL, up to the next one of a list; or the query of a path
        # alone, as urllib3 names it.
        re.compile(
            r"(://[^\s?#\"'<>]*)[?#](?:(?!,[\w+.-]+://)[^\s\"'<>])*|\?[\w.~%-]+=[^\s\"'<>]*"
        ),
        r"\1",
    ),
    (
        "a signature or key of a URL",
        re.compile(
            r"(?i)(?<![\w-])(X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|Signature|sig"
            r"|AWSAccessKeyId|(?<=[?&])(?:(?:access_|auth_)?token|(?:api_?)?key|password|secret))"
            r"=[^\s&\"'<>]+"
        ),
        r"\1=<secret>",
    ),
    (
        "an Authorization header",
        re.compile(r"(?i)(\bauthorization\b\W{1,4})(?:bearer|basic|token)\s+[^\s\"'\\<>]+"),
        r"\1<secret>",
    ),
    ("an AWS access key id", re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), "<secret>"),
    (
        "a private key",
        re.compile(r"(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [^-]*-----|\Z)"),
        "<secret>",
    ),
    (
        "a token",
        re.compile(r"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{36,})"),
        "<secret>",
    ),
)
# A command in quotes, as repr, JSON, CSV and a shell write them, ends with the quote; without
# quotes it ends with its line. COMMAND stands for a command in our own help texts.
COMMAND = re.compile(
    r"(?m)(?P<quote>[\"'])(?P<flag>--?[\w-]+=)?pipe:"
    r"(?P<quoted>(?:\\.|(?P=quote){2}|(?P=quote)(?:\"'\"|\\')'|(?!(?P=quote))[^\\\n])*)"
    r"(?P=quote)(?=[\s,;:.)\]}]|$)"
    r"|(?<![\w.])(?<!Broken )pipe:(?!COMMAND\b)(?P<line>.*)"
)
COMMAND_VALUE = re.compile(r"(?s)(?P<flag>--?[\w-]+=)?pipe:(?P<command>.*)")
# The name at the end of a path; an assignment, as in `TOKEN=... curl`, does not match.
PROGRAM = re.compile(r"\s*(?:[\w.+-]*/)*([\w.+-]+)(?=[\s\"'|;]|$)")


def is_secret_name(name: str) -> bool:
    """Whether an environment variable's name says that its value is a secret."""
    return name not in INNOCENT_NAMES and SECRET_NAME.search(name) is not None


def redact(text: str) -> str:
    """The text without secrets.

    URLs lose user info, query and fragment, and ``pipe:`` commands their arguments; ``<secret>``
    replaces known forms of secrets, and ``<NAME>`` the secret in the environment variable NAME. A
    ``pipe:`` command without quotes ends with its line, so a message that goes on after one has to
    quote it (``!r``).
    """
    text = COMMAND.sub(_without_arguments, text)
    for _, pattern, replacement in SHAPES:
        text = pattern.sub(replacement, text)
    return redact_environment(text)


def redact_environment(text: str) -> str:
    """The text with ``<NAME>`` in place of each secret of the environment variable NAME."""
    for name, secret in _secrets(tuple(os.environ.items())):
        for form in (secret, json.dumps(secret)[1:-1]):
            text = text.replace(form, f"<{name}>")
    return text


def redact_values(value: Any) -> Any:
    """A JSON value with every text in it redacted, and as UTF-8 can hold it.

    A text that begins with ``pipe:``, or with a flag and ``pipe:``, is one command to its end.
    """
    if isinstance(value, Mapping):
        return {name: redact_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(item) for item in value]
    if not isinstance(value, str):
        return value
    value = as_utf8(value)
    command = COMMAND_VALUE.fullmatch(value)
    return redact(f"{command['flag'] or ''}{_program(command['command'])}" if command else value)


def find_secrets(text: str) -> list[str]:
    """Names, as in `SHAPES`, of the secrets that a text seems to hold."""
    return [name for name, pattern, _ in SHAPES if name is not None and pattern.search(text)]


def _without_arguments(match: re.Match[str]) -> str:
    if match["quote"] is None:
        return _program(match["line"])
    return f"{match['quote']}{match['flag'] or ''}{_program(match['quoted'])}{match['quote']}"


def _program(command: str) -> str:
    program = PROGRAM.match(command)
    return f"pipe:{program[1] if program else ''}"


@functools.lru_cache(maxsize=1)
def _secrets(environment: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Name and value of secret environment variables, and each line of values of several lines.

    To look for them takes longer than the rest of `redact`, and the environment rarely changes.
    """
    secrets = []
    for name, value in environment:
        found = []
        if is_secret_name(name):
            found = [value, *value.splitlines()]
        elif (url := URL_PASSWORD.match(value)) is not None:
            found = [url[1]]
        secrets += [(name, secret) for secret in found if len(secret) >= MIN_SECRET_LENGTH]
    return secrets
