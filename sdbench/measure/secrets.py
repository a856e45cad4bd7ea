"""How are the passwords of the environment kept out of what a run writes?

A token may come into a record with a command line, or into a log with a library's error message.
Whatever the environment holds under a name that says secret is replaced, where it is written, by
that name.
"""

from __future__ import annotations

import json
import os
import re

SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)
# A shorter value, such as `true` or `0`, is no secret, and would be found in innocent text.
MIN_SECRET_LENGTH = 8


def is_secret_name(name: str) -> bool:
    """Whether an environment variable's name says that its value is a secret."""
    return SECRET_NAME.search(name) is not None


def redact(text: str) -> str:
    """The text with ``<NAME>`` in place of the value of each secret variable of the environment."""
    for name, value in os.environ.items():
        if len(value) >= MIN_SECRET_LENGTH and is_secret_name(name):
            for form in (value, json.dumps(value)[1:-1]):
                text = text.replace(form, f"<{name}>")
    return text
