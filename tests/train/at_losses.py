"""`before_each_loss`: something happens within the forward pass of a step of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from sdbench.training import train_job


def before_each_loss(patch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Call `act` with the number of the loss, from 1 on, before each loss of this process."""
    build, number = train_job.build, 0

    def build_acting(*args, **options):
        job = build(*args, **options)

        def loss(output):
            nonlocal number
            number += 1
            act(number)
            return job.loss(output)

        return dataclasses.replace(job, loss=loss)

    patch.setattr(train_job, "build", build_acting)
