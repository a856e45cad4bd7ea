"""What a model learns to predict, as modules: a `Ddpm` schedule of noise, or a rectified `Flow`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdbench.models.family import DDPM, FlowSettings
from sdbench.models.noising.ddpm import Ddpm
from sdbench.models.noising.flow import Flow
from sdbench.models.noising.noising import Noising
from sdbench.models.objective import PLAIN, Objective


def make_objective(
    kind: str,
    scheduler: Mapping[str, Any],
    objective: Objective = PLAIN,
    *,
    flow: FlowSettings | None = None,
) -> Noising:
    """Make the objective of a training.

    `kind` is ``family.DDPM`` or ``family.FLOW``, `scheduler` the configuration of the model's
    scheduler of diffusers, `objective` what the run changes, `flow` the family's own choice.
    """
    if kind == DDPM:
        return Ddpm(scheduler, objective)
    return Flow(scheduler, objective.flow_settings(flow or FlowSettings()))
