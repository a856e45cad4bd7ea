"""What all trainings of these tests share."""

import pytest


@pytest.fixture(autouse=True)
def quick(launched, plain_replay) -> None:
    """No Ray cluster, and one estimate of memory: test_parts.py asks for one of its own."""
