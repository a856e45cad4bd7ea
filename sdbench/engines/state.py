"""`TrainState`: everything that decides how a training run goes on, as named tensors and JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdbench.engines.ema import ForeachEma
from sdbench.engines.job import TrainJob
from sdbench.engines.sharding import forget_gathered, held_weights
from sdbench.models.precision import PRECISIONS
from sdbench.ranks.distributed import Ranks

# Ranks take seeds beside one another: more than there are ranks.
SEEDS_OF_A_STEP = 1_000_003


class Positioned(Protocol):
    """A source of batches that can be resumed."""

    def state_dict(self) -> dict[str, Any]:
        """The position behind the batch that was trained on last."""


class TrainingHooks(Protocol):
    """What is done around the steps of a run that is meant to last."""

    def begins(self, state: TrainState) -> None:
        """All is built and placed, and nothing is trained yet: the moment to restore a state."""

    def gradients_ready(self, loss: Tensor, norm: Tensor | None) -> None:
        """All gradients of a step are there, and its update is next.

        Called in every step, before optimizer, scaler and average change the state. It may leave
        the update out.

        Args:
            loss: Of this rank's batch, on the device.
            norm: Of all gradients before they were clipped, on the device; None where it is not
                known, as the gradients are not clipped.
        """

    def step_ended(self, state: TrainState) -> None:
        """A step has ended and the watch knows of it."""


class TrainState:
    """The state of one rank between two steps.

    Attributes:
        num_steps: Steps trained, those before a resume included.
        is_skipped: Whether the update of the step under way, or of the last one, is left out.
    """

    def __init__(
        self,
        job: TrainJob,
        optimizer: torch.optim.Optimizer,
        *,
        ema: ForeachEma | None,
        batches: Positioned,
        scaler: torch.amp.GradScaler | None,
        config: Any,
    ) -> None:
        """Join the parts.

        Args:
            job: With the model as it was placed, or shared out.
            optimizer: Of the job's trained weights.
            ema: Their moving average, if there is one.
            batches: Know the position in the data.
            scaler: Of the gradients of fp16; None where the engine keeps it to itself.
            config: The resolved config.
        """
        self.num_steps = 0
        self._job = job
        self._optimizer = optimizer
        self._ema = ema
        self._batches = batches
        self._scaler = scaler
        self._config = config
        self._random_states: dict[str, Tensor] = {}
        self._loaded_scale: dict[str, Any] = {}
        self.is_skipped = False

    def skip_update(self) -> None:
        """Leave out the update of the step under way; called when its gradients are there."""
        # The optimizers leave a weight without a gradient alone, its decay included.
        self._optimizer.zero_grad(set_to_none=True)
        self.is_skipped = True

    def gradient_norm(self) -> Tensor:
        """The norm of this rank's gradients, on the device."""
        weights = self._job.trained_weights().values()
        norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def use_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Save the scale of fp16 losses as well, and restore what was loaded of it."""
        self._scaler = scaler
        self._load_scale()

    @property
    def position(self) -> dict[str, Any]:
        """The position in the data behind the batch that was trained on last."""
        return self._batches.state_dict()

    @property
    def averages(self) -> dict[str, Tensor] | None:
        """The averages that this rank keeps, by the name of the weight; None without an EMA."""
        return None if self._ema is None else self._ema.state_dict()["averages"]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of this rank by name, which share memory with the run's own.

        ``model.*``, ``fp32.*``, ``ema.*`` and ``optimizer.*`` end in the name of a trained weight,
        ``frozen.*`` in that of one the job keeps; ``random.<rank>.*`` are copies, and ``model.*``
        where FSDP shares out fp32 copies. Under ZeRO-1 a rank has a part of the optimizer and the
        average; what several ranks have is the same on each.
        """
        forget_gathered(self._job)
        weights = self._job.trained_weights()
        named = {f"model.{name}": weight.detach() for name, weight in weights.items()}
        named |= {f"frozen.{name}": weight for name, weight in self._job.kept.items()}
        held = held_weights(self._job, self._optimizer, sharding=self._config.sharding)
        # `optim`: the optimizer of this rank's part inside torch's ZeroRedundancyOptimizer.
        states = getattr(self._optimizer, "optim", self._optimizer).state
        has_copies = self._config.master_weights == "fp32"
        dtype = PRECISIONS[self._config.precision].weights
        for name, weight in held.items():
            if has_copies:
                named[f"fp32.{name}"] = weight.detach()
            if weight is weights[name] and has_copies:
                # FSDP makes the weight of the copy for each step. It is saved as the others are.
                named[f"model.{name}"] = weight.detach().to(dtype)
            # Some optimizers have no state. One that has some has it of each weight.
            assert weight in states or not states, f"the optimizer has no state of {name}"
            for key, value in states.get(weight, {}).items():
                named[f"optimizer.{key}.{name}"] = value
        named |= {f"ema.{name}": average for name, average in (self.averages or {}).items()}
        return named | _random_states()

    def facts(self) -> dict[str, Any]:
        """The rest of the state, as JSON; the same on every rank."""
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
        """The tensors to load into, as `tensors`.

        Random states are among them where this number of ranks has saved them for these devices.

        Args:
            facts: What `facts` gave when the state was saved.
            saved: Names of the tensors that were saved.
        """
        self.make_optimizer_state()
        named = self.tensors()
        has_ranks = facts["world_size"] == Ranks.from_environment().world_size
        for name in _random_states():
            if not has_ranks or name not in saved:
                del named[name]
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
        """Take over what belongs to weights that were loaded into `tensors`; the rest goes on.

        Args:
            facts: What `facts` gave when they were saved.
        """
        if self._ema is not None:
            self._ema.num_steps = facts["ema_num_steps"]
        self._loaded_scale = facts["scaler"] or {}
        self._load_scale()

    def _load_scale(self) -> None:
        if self._scaler is not None and self._loaded_scale:
            self._scaler.load_state_dict(self._loaded_scale)

    def restore_random_state(self) -> None:
        """Set torch's generators as they were saved; called when nothing else draws any more.

        Those that were not saved, for another number of ranks or another device, begin anew: with a
        seed of this step's own, lest the noise of the first steps comes again.
        """
        if self.num_steps > 0:
            torch.manual_seed(torch.initial_seed() + SEEDS_OF_A_STEP * self.num_steps)
        rank = Ranks.from_environment().rank
        for name, value in self._random_states.items():
            if name == f"random.{rank}.cpu":
                torch.set_rng_state(value)
            else:
                torch.cuda.set_rng_state(value)

    def make_optimizer_state(self) -> None:
        """Have the optimizer make its state, as it is before the first step.

        It makes it in a step: this one changes no weight. A run whose first updates are all left
        out has something to save then.
        """
        weights = self._job.trained_weights().values()
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        for group in self._optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        self._optimizer.step()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        states = getattr(self._optimizer, "optim", self._optimizer).state
        for values in states.values():
            for value in values.values():
                value.zero_()


def _random_states() -> dict[str, Tensor]:
    """Copies of the states of torch's generators on this rank."""
    rank = Ranks.from_environment().rank
    states = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states
