"""What all trainings of these tests share."""

import pytest


@pytest.fixture(autouse=True)
def alike_in_memory(plain_replay) -> None:
    """Estimate the memory of all steps alike: test_parts.py asks for an estimate of its own."""
