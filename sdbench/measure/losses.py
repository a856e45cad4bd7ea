"""`Losses` keeps the losses of the steps on the device until they are read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NUM_AT_FIRST = 1024


class Losses:
    """One loss per step. Adding one does not wait for the device; reading waits.

    Attributes:
        first_not_finite: Index of the first step with a loss that is not finite, among the losses
            read since `forgive`; else None.
    """

    def __init__(self) -> None:
        self.first_not_finite: int | None = None
        self._read: list[float] = []
        self._unread: Tensor | None = None
        self._num_unread = 0

    def __len__(self) -> int:
        return len(self._read) + self._num_unread

    def add(self, loss: Tensor) -> None:
        """Copy the loss of the next step, one number on the device."""
        import torch

        if self._unread is None:
            self._unread = loss.new_empty(NUM_AT_FIRST, dtype=torch.float64)
        elif self._num_unread == len(self._unread):
            self._unread = torch.cat([self._unread, torch.empty_like(self._unread)])
        self._unread[self._num_unread] = loss.detach().squeeze()
        self._num_unread += 1

    def read(self) -> list[float]:
        """All losses so far."""
        if self._num_unread:
            assert self._unread is not None
            new = self._unread[: self._num_unread].tolist()
            self._num_unread = 0
            bad = (index for index, loss in enumerate(new) if not math.isfinite(loss))
            if self.first_not_finite is None and (first := next(bad, None)) is not None:
                self.first_not_finite = len(self._read) + first
            self._read += new
        return self._read

    def forgive(self) -> None:
        """Check only later losses for values that are not finite."""
        self.read()
        self.first_not_finite = None

    def at(self, index: int) -> float:
        """The loss of one step."""
        return self._read[index] if index < len(self._read) else self.read()[index]
