"""Stages of Ray Data that read, decode and encode batches in actors all over a cluster.

A row is a batch, from the numbers of its samples to its latents, and a block has one row. So Ray
schedules, retries, bounds in memory and delivers whole batches, and they keep their order whichever
actor is faster. A `Failure` takes the place of a batch that cannot be made.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sdbench.base.errors import RunError
from sdbench.base.host_memory import can_keep_freed_memory, keep_freed_memory
from sdbench.ranks.ray_cluster import resources_in_words
from sdbench.settings.online import ANY, ActorSettings

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

# Columns of a row: its number, and the output of the stage before.
NUMBER, CONTENT = "id", "content"
# Row numbers that one task makes; it is repeated as a whole if its node is lost.
NUMBERS_PER_TASK = 64
# Batches in flight per actor: the one it works on, and the next one.
NUM_IN_FLIGHT = 2
# Ray Data reserves half of its memory limit, in equal parts for each stage.
SHARED_FRACTION = 0.5
# How often a thread checks whether it is still needed, and how long its end may take.
PERIOD_S, PATIENCE_S = 0.2, 5.0


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """The actors of a stage.

    Attributes:
        stage: Their class.
        arguments: Of its constructor.
        num_actors: Number of actors.
        resources: That each actor takes of its node, by Ray's names.
        accelerator_type: Kind of GPU of their nodes; None: any.
    """

    stage: type[Stage]
    arguments: Mapping[str, Any]
    num_actors: int = 1
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    accelerator_type: str | None = None


def make_stream(pools: Sequence[Pool], *, num_rows: int, row_bytes: int, num_ahead: int) -> Dataset:
    """Describe a stream of rows through stages; nothing runs before it is read.

    Args:
        pools: Of each stage, in order.
        num_rows: Number of rows.
        row_bytes: Approximate size of a row where it is largest.
        num_ahead: Approximate number of rows to keep ready for the reader.

    Returns:
        Rows ``{id, content}`` in order, one in a block. Ray Data bounds the memory of waiting
        blocks: a stage pauses while those after it are full.

    Raises:
        RunError: The cluster is too small for the actors.
    """
    import ray
    from ray.data import ActorPoolStrategy, DataContext

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
    with DataContext.current(context):
        # Takes no CPU: a full cluster would have none left.
        rows = ray.data.read_datasource(_make_numbers(num_rows), num_cpus=0)
        for pool in pools:
            others = {k: v for k, v in pool.resources.items() if k not in ("CPU", "GPU")}
            rows = rows.map_batches(
                pool.stage,
                fn_constructor_kwargs=dict(pool.arguments),
                batch_size=1,
                batch_format="numpy",
                compute=ActorPoolStrategy(
                    size=pool.num_actors, max_tasks_in_flight_per_actor=NUM_IN_FLIGHT
                ),
                num_cpus=pool.resources.get("CPU", 0),
                num_gpus=pool.resources.get("GPU", 0),
                resources=others or None,
                accelerator_type=pool.accelerator_type,
            )
    return rows


def _make_numbers(num_rows: int) -> Any:
    """A data source of Ray Data with the numbers of the rows."""
    import pyarrow
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Numbers(Datasource):
        def estimate_inmemory_data_size(self) -> int:
            return 8 * num_rows

        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
            return [
                make_task(range(first, min(first + NUMBERS_PER_TASK, num_rows)))
                for first in range(0, num_rows, NUMBERS_PER_TASK)
            ]

    def make_task(numbers: range) -> ReadTask:
        size = {"num_rows": len(numbers), "size_bytes": 8 * len(numbers)}
        return ReadTask(
            lambda: (pyarrow.table({NUMBER: [number]}) for number in numbers),
            BlockMetadata(**size, input_files=None, exec_stats=None),
        )

    return Numbers()


class StreamEnd:
    """An end of a stream, read in a thread one row ahead."""

    def __init__(self, rows: DataIterator) -> None:
        """Begin to read rows of `make_stream`."""
        self._rows = rows
        # Rows, then None or an error at the end.
        self._taken: queue.Queue[Row | RunError | None] = queue.Queue(maxsize=1)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def take(self, *, timeout_s: float) -> Row | None:
        """The next row; None after the last one.

        Raises:
            TimeoutError: No row came in time.
            RunError: Ray Data has failed.
        """
        try:
            row = self._taken.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(row, RunError):
            raise row
        return row

    def close(self) -> None:
        """Stop reading. Ray Data ends the actors when the ends of all ranks are closed."""
        self._is_closed.set()
        self._thread.join(PATIENCE_S)

    def describe(self) -> str:
        """Ray Data's own statistics of all stages."""
        return self._rows.stats()

    def _read(self) -> None:
        last: RunError | None = None
        try:
            for block in self._rows.iter_batches(batch_size=None, batch_format="numpy"):
                if not self._put(unpack(block)):
                    return
        except Exception as error:  # Ray raises many kinds
            last = RunError(f"Ray Data failed: {_describe_error(error)}")
        self._put(last)

    def _put(self, row: Row | RunError | None) -> bool:
        """Hand a row over; return False if this end is closed."""
        while not self._is_closed.is_set():
            try:
                self._taken.put(row, timeout=PERIOD_S)
                return True
            except queue.Full:
                continue
        return False


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
    there = ray.cluster_resources()
    if any(amount > there.get(name, 0) for name, amount in needed.items()):
        raise RunError(
            f"the Ray cluster is too small for the decoders and encoders: they take "
            f"{resources_in_words(needed)} (--num_decoders, --num_encoders, --encoder_resources, "
            f"--encoder_accelerator_type), and it has {resources_in_words(there)}"
        )


def encoder_pool(stage: type[Stage], settings: ActorSettings, **arguments: Any) -> Pool:
    """The pool of encoders; the stage takes `arguments` and the `resources` of its actor."""
    resources = encoder_resources(settings)
    kind = settings.encoder_accelerator_type
    return Pool(
        stage=stage,
        arguments=arguments | {"resources": resources},
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
