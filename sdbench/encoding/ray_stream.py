"""Stages of Ray Data that read, decode and encode batches in actors all over a cluster.

A row is a batch, from the numbers of its samples to its latents, and a block has one row. So Ray
schedules, retries, bounds in memory and delivers whole batches, and they keep their order whichever
actor is faster. A `Failure` takes the place of a batch that cannot be made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sdbench.base.errors import RunError
from sdbench.base.host_memory import can_keep_freed_memory, keep_freed_memory
from sdbench.base.stop import waited
from sdbench.ranks.ray_cluster import carried_variables, has_room, resources_in_words, tidy_up
from sdbench.settings.online import ANY, ActorSettings

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

# Columns of a row: its number, and the output of the stage before.
NUMBER, CONTENT = "id", "content"
# Rows that one task begins; it is repeated as a whole if its process is lost.
NUMBERS_PER_TASK = 64
# Batches in flight per actor: the one it works on, and the next one.
NUM_IN_FLIGHT = 2
# Ray Data reserves half of its memory limit, in equal parts for each stage.
SHARED_FRACTION = 0.5
# How long the end of a stream may take.
PATIENCE_S = 5.0


class Failure(NamedTuple):
    """Takes the place of a batch that could not be made; the reason is a sentence."""

    reason: str


class Row(NamedTuple):
    """A row of a stream: its number from 0, and the last stage's output or a `Failure`."""

    number: int
    content: Any


class Stage:
    """Processes one row at a time in an actor, where it is constructed."""

    def work(self, content: Any) -> Any:
        """Turn the output of the stage before (in the first stage, the row's number) into its own.

        Whatever it raises turns the row into a `Failure`, which passes through all stages.
        """
        raise NotImplementedError

    def __call__(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Process a block of one row."""
        _, content = unpack(rows)
        if not isinstance(content, Failure):
            try:
                content = self.work(content)
            except Exception as error:  # the batch is lost, and the stream goes on
                content = Failure(_describe_error(error))
        tidy_up()  # all that a stage needs is imported
        # As bytes, which Arrow stores as they are; it would turn a tuple into a list.
        pickled = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
        return {NUMBER: rows[NUMBER], CONTENT: np.array([pickled], dtype=object)}


def unpack(rows: Mapping[str, np.ndarray]) -> Row:
    """The one row of a block; its content is the number before the first stage."""
    (number,) = map(int, rows[NUMBER])
    if CONTENT not in rows:
        return Row(number, number)
    (pickled,) = rows[CONTENT]
    return Row(number, pickle.loads(pickled))


@dataclasses.dataclass(frozen=True)
class Pool:
    """The actors of a stage."""

    make_stage: functools.partial[Stage]
    num_actors: int = 1
    # Whether each n-th row is for the same one of n actors, and comes there in order; of the first
    # stage alone. Otherwise any actor that is free takes a row.
    takes_turns: bool = False
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of each actor
    accelerator_type: str | None = None  # kind of GPU of their nodes; None: any


def make_stream(pools: Sequence[Pool], *, num_rows: int, row_bytes: int, num_ahead: int) -> Dataset:
    """Describe a stream of rows ``{id, content}``; nothing runs before it is read.

    The rows stay in order, one in a block. Ray Data bounds the memory of waiting blocks to
    about `num_ahead` rows of `row_bytes`: a stage pauses while those after it are full.
    """
    from ray.data import DataContext

    _check_room(pools)
    logging.getLogger("ray.data").setLevel(logging.WARNING)  # no line for each stream that ends
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = 1  # byte: no two rows in a block
    options = context.execution_options
    options.preserve_order = True
    options.resource_limits = options.resource_limits.copy(
        object_store_memory=num_ahead * row_bytes / SHARED_FRACTION
    )
    first, *others = pools
    with DataContext.current(context):
        if first.takes_turns:
            # One actor each, whose outputs Ray Data takes in turn.
            one = dataclasses.replace(first, num_actors=1)
            parts = [
                _begin(one, range(turn, num_rows, first.num_actors), suffix=str(turn))
                for turn in range(min(first.num_actors, num_rows))
            ]
            rows = parts[0].union(*parts[1:]) if len(parts) > 1 else parts[0]
        else:
            rows = _begin(first, range(num_rows))
        for pool in others:
            rows = _append(rows, pool)
    return rows


def _begin(pool: Pool, numbers: range, *, suffix: str = "") -> Dataset:
    """The first stage of the rows with these numbers."""
    import ray

    # Numbers take no CPU: a full cluster would have none left. With the resources of a single actor
    # they are made in its process, and not in another one beside it.
    num_cpus = pool.resources.get("CPU", 0) if pool.num_actors == 1 else 0
    rows = ray.data.read_datasource(_make_numbers(numbers), num_cpus=num_cpus)
    return _append(rows, pool, suffix=suffix)


class _InActor:
    """Makes a stage in its actor.

    Processes of Ray Data that only pass the class on do without what the stage imports, e.g. torch.
    """

    def __init__(self, pickled: bytes, variables: bytes) -> None:
        os.environ |= pickle.loads(variables)
        self._stage = pickle.loads(pickled)()

    def __call__(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._stage(rows)


def _append(rows: Dataset, pool: Pool, *, suffix: str = "") -> Dataset:
    import ray
    from ray.data import ActorPoolStrategy

    options: dict[str, Any] = {"num_cpus": pool.resources.get("CPU", 0)}
    if "GPU" in pool.resources:
        options["num_gpus"] = pool.resources["GPU"]
    if named := {k: v for k, v in pool.resources.items() if k not in ("CPU", "GPU")}:
        options["resources"] = named
    if pool.accelerator_type is not None:
        options["accelerator_type"] = pool.accelerator_type
    return rows.map_batches(
        # Ray Data's statistics have its name, and only the first stage of a name.
        type(pool.make_stage.func.__name__ + suffix, (_InActor,), {}),
        fn_constructor_args=(
            ray.cloudpickle.dumps(pool.make_stage),
            pickle.dumps(carried_variables()),
        ),
        batch_size=None,  # a block, which is one row
        batch_format="numpy",
        compute=ActorPoolStrategy(
            size=pool.num_actors, max_tasks_in_flight_per_actor=NUM_IN_FLIGHT
        ),
        **options,
    )


def _make_numbers(numbers: range) -> Any:
    """A data source of Ray Data with the numbers of rows."""
    import pyarrow
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Numbers(Datasource):
        def estimate_inmemory_data_size(self) -> int:
            return 8 * len(numbers)

        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
            return [
                make_task(numbers[first : first + NUMBERS_PER_TASK])
                for first in range(0, len(numbers), NUMBERS_PER_TASK)
            ]

    def make_task(part: range) -> ReadTask:
        return ReadTask(
            lambda: (pyarrow.table({NUMBER: [number]}) for number in part),
            BlockMetadata(
                num_rows=len(part), size_bytes=8 * len(part), input_files=None, exec_stats=None
            ),
        )

    return Numbers()


class StreamEnd:
    """An end of a stream, read one row ahead."""

    def __init__(self, rows: DataIterator, *, timeout_s: float) -> None:
        """Begin to read rows of `make_stream`; `timeout_s` is how long each may take."""
        self._rows = rows
        self._timeout_s = timeout_s
        self._blocks = iter(rows.iter_batches(batch_size=None, batch_format="numpy"))
        self._coming = self._begin()

    def _begin(self) -> Future[Row | None]:
        # In a thread that the exit of the process does not wait for, unlike those of a pool.
        coming: Future[Row | None] = Future()
        threading.Thread(target=self._read, args=(coming,), daemon=True).start()
        return coming

    def _read(self, coming: Future[Row | None]) -> None:
        try:
            block = next(self._blocks, None)
            coming.set_result(None if block is None else unpack(block))
        except Exception as error:  # Ray raises many kinds
            coming.set_exception(RunError(f"Ray Data failed: {_describe_error(error)}"))

    def take(self) -> Row | None:
        """The next row; None after the last one."""
        coming = [self._coming]
        if not waited(lambda wait_s: bool(futures.wait(coming, wait_s).done), self._timeout_s):
            raise RunError(
                f"Ray Data gave no batch for {self._timeout_s:g} s: a decoder or an encoder is "
                "stuck, or has no place in the cluster. --data_timeout_s sets how long to wait."
            )
        row = self._coming.result()
        self._coming = self._begin()
        return row

    def close(self) -> None:
        """Stop reading. Ray Data ends the actors when the ends of all ranks are closed."""
        with contextlib.suppress(RunError, futures.TimeoutError):
            self._coming.result(PATIENCE_S)
            self._blocks.close()

    def describe(self) -> str:
        """Ray Data's own statistics of all stages."""
        return self._rows.stats()


def _check_room(pools: Sequence[Pool]) -> None:
    """Check that the empty cluster has room for all actors, or Ray would wait silently."""
    import ray

    needed: dict[str, float] = {}
    for pool in pools:
        for name, amount in pool.resources.items():
            needed[name] = needed.get(name, 0) + pool.num_actors * amount
        if pool.accelerator_type is not None:
            name = f"accelerator_type:{pool.accelerator_type}"
            needed[name] = 0.001  # what Ray asks of a node for the kind of its accelerator
    if not has_room(needed):
        raise RunError(
            f"the Ray cluster is too small for the decoders and encoders: they take "
            f"{resources_in_words(needed)} (--num_decoders, --num_encoders, --encoder_resources, "
            f"--encoder_accelerator_type), and it has {resources_in_words(ray.cluster_resources())}"
        )


def encoder_pool(stage: type[Stage], settings: ActorSettings, **arguments: Any) -> Pool:
    """The pool of encoders; the stage takes `arguments` and the `resources` of its actor."""
    resources = encoder_resources(settings)
    kind = settings.encoder_accelerator_type
    return Pool(
        functools.partial(stage, resources=resources, **arguments),
        num_actors=settings.num_encoders,
        resources=resources,
        accelerator_type=None if kind == ANY else kind,
    )


def encoder_resources(settings: ActorSettings) -> dict[str, float]:
    """Resources of an encoder: the user's, else a GPU if the cluster has one, else a CPU."""
    import ray

    if settings.encoder_resources is not None:
        return dict(settings.encoder_resources)
    return {"GPU": 1.0} if ray.cluster_resources().get("GPU") else {"CPU": 1.0}


def set_up_encoder_process(resources: Mapping[str, float]) -> str:
    """Set up the process of an encoder; return its device.

    Ray shows a process only the GPUs that it has assigned to it.
    """
    if resources.get("GPU"):
        return "cuda:0"
    if can_keep_freed_memory():
        keep_freed_memory()
    return "cpu"


def _describe_error(error: BaseException) -> str:
    """An error in one line, with its type unless it is a `RunError`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RunError):
        return " ".join(lines)
    name = type(error).__name__
    return f"{name}: {lines[-1]}" if lines else name
