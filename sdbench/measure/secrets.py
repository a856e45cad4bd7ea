"""How are the passwords of the environment kept out of what a run writes?

A token may come into a record with a command line, or into a log with a library's error message.
Whatever the environment holds under a name that says secret is replaced, where it is written, by
that name, and so is the password in a URL that it holds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

SECRET_NAME = re.compile(
    r"PASS(WORD|WD|PHRASE)"
    r"|(^|_)((API|ACCESS|PRIVATE|SECRET)_?)?KEY(_|$)"
    r"|(^|_)(TOKEN|SECRET|CREDENTIALS?|PWD|PAT|SAS|AUTH|CONNECTION_STRING)(_|$)",
    re.IGNORECASE,
)
# Folders, not passwords.
INNOCENT_NAMES = ("PWD", "OLDPWD")
URL_PASSWORD = re.compile(r"^\w[\w+.-]*://[^/@:\s]*:([^/@\s]+)@")
# A shorter value, such as `true` or `0`, is no secret, and would be found in innocent text.
MIN_SECRET_LENGTH = 8


def is_secret_name(name: str) -> bool:
    """Whether an environment variable's name says that its value is a secret."""
    return name not in INNOCENT_NAMES and SECRET_NAME.search(name) is not None


def redact(text: str) -> str:
    """The text with ``<NAME>`` in place of each secret of the environment variable NAME."""
    for name, secret in _secrets():
        for form in (secret, json.dumps(secret)[1:-1]):
            text = text.replace(form, f"<{name}>")
    return text


def _secrets() -> Iterator[tuple[str, str]]:
    """Secrets with the variables that hold them; of one with several lines each line as well."""
    for name, value in os.environ.items():
        found = []
        if is_secret_name(name):
            found = [value, *value.splitlines()]
        elif (url := URL_PASSWORD.match(value)) is not None:
            found = [url[1]]
        yield from ((name, secret) for secret in found if len(secret) >= MIN_SECRET_LENGTH)
