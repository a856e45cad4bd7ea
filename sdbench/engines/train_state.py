"""`TrainState`: everything that a training run resumes from, as named tensors and JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdbench.engines.device_batches import Batches
from sdbench.engines.ema import ForeachEma
from sdbench.engines.job import TrainJob
from sdbench.engines.sharding import forget_gathered, held_weights, own_optimizer
from sdbench.models.weights import PRECISIONS
from sdbench.ranks.distributed import Ranks
from sdbench.settings.recipe import EngineConfig

# Larger than the number of ranks, whose seeds are consecutive.
SEEDS_OF_A_STEP = 1_000_003


class TrainState:
    """The state of one rank between two steps.

    It stays as it is until the update of the next step begins, and may be saved until then.

    Attributes:
        num_steps: Steps that have been trained, those before a resume included.
        is_skipped: Whether the update of the current or the last step is skipped.
        is_whole: Whether the state is that behind `num_steps`, with a step of this process.
    """

    def __init__(
        self,
        job: TrainJob,
        optimizer: torch.optim.Optimizer,
        *,
        ema: ForeachEma | None,
        batches: Batches,
        config: EngineConfig,
    ) -> None:
        self.num_steps = 0
        self.is_skipped = False
        self.is_whole = False
        self._job = job
        self._optimizer = optimizer
        self._ema = ema
        self._batches = batches
        self._scaler: torch.amp.GradScaler | None = None
        self._config = config
        self._random_states: dict[str, Tensor] = {}
        # The position in the data after the batch that was trained on last.
        self.position: dict[str, Any] = {}
        self._loaded_scale: dict[str, Any] = {}

    def use_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Save the scale of fp16 losses too, and restore it if one was loaded."""
        self._scaler = scaler
        self._load_scale()

    def skip_update(self) -> None:
        """Skip the update of the current step; called when its gradients are there."""
        # The optimizers leave a weight without a gradient alone, without decay.
        self._optimizer.zero_grad(set_to_none=True)
        self.is_skipped = True

    def update_begins(self) -> None:
        """The update of a step is about to change the state."""
        self.is_whole = False

    def update_ended(self) -> None:
        """Count a step, and note what the next one changes before its update."""
        self.num_steps += 1
        self.position = self._batches.state_dict()
        self._random_states = _random_states()
        self.is_whole = True

    def gradient_norm(self) -> Tensor:
        """The norm of this rank's gradients, on the device."""
        weights = self._job.trained_weights().values()
        norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @property
    def averages(self) -> dict[str, Tensor] | None:
        """The averages that this rank keeps, by the name of the weight; None without an EMA."""
        return None if self._ema is None else self._ema.averages

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of this rank by name, which share memory with the run's own.

        ``model.*``, ``fp32.*``, ``ema.*`` and ``optimizer.*`` end in the name of a trained weight,
        ``frozen.*`` in the name of a weight that the job keeps. ``random.<rank>.*`` are copies, and
        so is ``model.*`` if FSDP shards fp32 copies. With ZeRO-1 each rank has a part of the
        optimizer and the average; what several ranks have is equal on all of them. There are random
        states behind a step, as it has left them.
        """
        # Here, since a measurement does without torch.distributed.checkpoint.
        from sdbench.state import checkpoint_files as names

        forget_gathered(self._job)
        weights = self._job.trained_weights()
        named = {names.TRAINED_PREFIX + name: weight.detach() for name, weight in weights.items()}
        named |= {names.FROZEN_PREFIX + name: weight for name, weight in self._job.kept.items()}
        held = held_weights(self._job, self._optimizer)
        has_copies = self._config.master_weights == "fp32"
        dtype = PRECISIONS[self._config.precision].weights
        states = own_optimizer(self._optimizer).state
        for name, weight in held.items():
            if has_copies:
                named[names.COPIES_PREFIX + name] = weight.detach()
            if weight is weights[name] and has_copies:
                # FSDP makes the weight from the copy in each step. It is saved like the others.
                named[names.TRAINED_PREFIX + name] = weight.detach().to(dtype)
            # An optimizer has state for all weights or, like plain SGD, for none.
            assert weight in states or not states, f"the optimizer has no state of {name}"
            for key, value in states.get(weight, {}).items():
                for part, tensor in _plain_tensors(value).items():
                    named[f"optimizer.{key}{part}.{name}"] = tensor
        named |= {names.AVERAGED_PREFIX + name: one for name, one in (self.averages or {}).items()}
        return named | self._random_states

    def facts(self) -> dict[str, Any]:
        """The rest of the state as JSON, equal on all ranks."""
        return {
            "num_steps": self.num_steps,
            "world_size": Ranks.from_environment().world_size,
            "data": self.position,
            "ema_num_steps": None if self._ema is None else self._ema.num_steps,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    def prepare_to_load(
        self, facts: Mapping[str, Any], *, saved: Collection[str]
    ) -> dict[str, Tensor]:
        """The tensors to load into, as `tensors`, for these facts and names of saved tensors.

        Random states are among them if the same number of ranks has saved them for these devices.
        """
        named = self.tensors()
        if facts["world_size"] == Ranks.from_environment().world_size:
            random_states = _random_states().items()
            named |= {name: value for name, value in random_states if name in saved}
        return named

    def loaded(self, named: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Take over what was loaded into the tensors of `prepare_to_load`."""
        self._random_states = {
            name: value for name, value in named.items() if name.startswith("random.")
        }
        self.num_steps = facts["num_steps"]
        self._job.loader.load_state_dict(facts["data"])
        self.went_back(facts)

    def went_back(self, facts: Mapping[str, Any]) -> None:
        """Take over the facts of weights that were loaded into `tensors`.

        Steps, data and random numbers are not reset.
        """
        if self._ema is not None:
            self._ema.num_steps = facts["ema_num_steps"]
        self._loaded_scale = facts["scaler"] or {}
        self._load_scale()

    def restore_random_state(self) -> None:
        """Set torch's generators as they were saved; called after the last other random draw.

        Generators whose state was not saved, for another number of ranks or another device, are
        seeded by the step: the noise of the first steps must not be repeated.
        """
        if self.num_steps > 0:
            torch.manual_seed(torch.initial_seed() + SEEDS_OF_A_STEP * self.num_steps)
        rank = Ranks.from_environment().rank
        for name, value in self._random_states.items():
            if name == f"random.{rank}.cpu":
                torch.set_rng_state(value)
            else:
                torch.cuda.set_rng_state(value)

    def _load_scale(self) -> None:
        if self._scaler is not None and self._loaded_scale:
            self._scaler.load_state_dict(self._loaded_scale)


def _plain_tensors(state: Tensor) -> dict[str, Tensor]:
    """A tensor of an optimizer's state; of torchao's, the two that change: codes and scale."""
    if hasattr(state, "codes"):
        return {"_codes": state.codes, "_scale": state.scale}
    return {"": state}


def _random_states() -> dict[str, Tensor]:
    """Copies of the states of torch's generators on this rank."""
    rank = Ranks.from_environment().rank
    states = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states
