"""Losses that stay on the device until they are asked for."""

from __future__ import annotations

import torch

from sdbench.measure.losses import NUM_AT_FIRST, Losses


def test_they_are_what_was_added_whatever_becomes_of_the_tensors():
    losses, one = Losses(), torch.zeros(1)
    for index in range(2 * NUM_AT_FIRST + 1):
        one.fill_(index / 3)
        losses.add(one)
        if index == 5:
            assert losses.at(2) == float(torch.tensor(2 / 3))
    assert len(losses) == 2 * NUM_AT_FIRST + 1
    assert losses.read() == (torch.arange(2 * NUM_AT_FIRST + 1) / 3).tolist()
    assert losses.first_not_finite is None


def test_the_first_that_is_not_finite_is_found_when_it_is_read():
    losses = Losses()
    for loss in (1.0, 2.0):
        losses.add(torch.tensor(loss))
    losses.read()
    for loss in (3.0, float("inf"), float("nan")):
        losses.add(torch.tensor(loss))
    assert losses.first_not_finite is None
    assert losses.at(4) != losses.at(4)
    losses.add(torch.tensor(float("nan")))
    losses.read()
    assert losses.first_not_finite == 3
    losses.forgive()
    assert losses.first_not_finite is None
    losses.add(torch.tensor(float("inf")))
    losses.read()
    assert losses.first_not_finite == 6
