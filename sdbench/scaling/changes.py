"""What can be done about the overhead of a step, by name."""

from __future__ import annotations

import dataclasses

from sdbench.measure import phases

ENCODERS = (phases.VAE_ENCODE, phases.TEXT_ENCODE)


@dataclasses.dataclass(frozen=True)
class Change:
    """What is done about the overhead.

    Attributes:
        shares: The GPUs of a node share out optimizer and moving average.
        halves: Gradients travel in 16 bits instead of 32.
        hides_behind: Phases of a micro-batch during which gradients travel.
        hides_rest: What is no phase of the device is hidden, as CUDA graphs do.
    """

    shares: bool = False
    halves: bool = False
    hides_behind: tuple[str, ...] = ()
    hides_rest: bool = False

    def __or__(self, other: Change) -> Change:
        return Change(
            self.shares or other.shares,
            self.halves or other.halves,
            tuple(dict.fromkeys(self.hides_behind + other.hides_behind)),
            self.hides_rest or other.hides_rest,
        )


CHANGES = {
    "shared": Change(shares=True),
    "16_bit": Change(halves=True),
    "behind_backward": Change(hides_behind=(phases.BACKWARD,)),
    "behind_encoders": Change(hides_behind=ENCODERS),
    "no_rest": Change(hides_rest=True),
}
