"""Stages of Ray Data that read, decode and encode batches in actors all over a cluster.

A row is a batch, from the numbers of its samples to its latents, and a block has one row: so the
unit that is scheduled, retried, bounded in memory and handed to a rank is the batch, and batches
keep their order whichever actor is faster. A batch that cannot be made stays in its place as a
`Failure`.
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

# Columns of a row: its number, and what the stage before has made of it.
NUMBER, CONTENT = "id", "content"
# Rows whose numbers one task gives; it is done again as a whole if its node is lost.
NUMBERS_PER_TASK = 64
# Batches that an actor has under way: one that it works on, and the next one.
NUM_IN_FLIGHT = 2
# Ray Data keeps half of the memory it is given apart, in equal parts for each stage.
SHARED_FRACTION = 0.5
# How often a thread looks whether it is still wanted, and how long its end may take.
PERIOD_S, PATIENCE_S = 0.2, 5.0


class Failure(NamedTuple):
    """What stands in the place of a batch that could not be made.

    Attributes:
        reason: A sentence.
    """

    reason: str


class Row(NamedTuple):
    """A row of a stream.

    Attributes:
        number: From 0.
        content: What the last stage has made of it, or a `Failure`.
    """

    number: int
    content: Any


class Stage:
    """Work on one row at a time, in an actor; made there."""

    def work(self, content: Any) -> Any:
        """What becomes of a row: the content for the next stage.

        Args:
            content: What the stage before gave; the row's number in the first stage.

        Raises:
            Exception: It cannot be done; the row becomes a `Failure`, which passes all stages.
        """
        raise NotImplementedError

    def __call__(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Work on a block of one row."""
        _, content = unpack(rows)
        if not isinstance(content, Failure):
            try:
                content = self.work(content)
            except Exception as error:  # whatever it is, the batch is lost and the stream goes on
                content = Failure(describe_error(error))
        # As bytes, which Arrow takes as they are; of a tuple it would make a list.
        pickled = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
        return {NUMBER: rows[NUMBER], CONTENT: np.array([pickled], dtype=object)}


def unpack(rows: Mapping[str, np.ndarray]) -> Row:
    """The number and the content of a block's one row; without a content it is the number."""
    (number,) = map(int, rows[NUMBER])
    if CONTENT not in rows:
        return Row(number, number)
    (pickled,) = rows[CONTENT]
    return Row(number, pickle.loads(pickled))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """The actors of a stage.

    Attributes:
        stage: What they are.
        arguments: Of its constructor.
        num_actors: How many of them.
        resources: What each takes of its node, by Ray's names; nothing where empty.
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
        num_rows: Rows, numbered from 0.
        row_bytes: About the size of a row where it is largest.
        num_ahead: Rows to keep ready before whoever reads the stream, about.

    Returns:
        Rows ``{id, content}`` in order, one in a block. The memory of blocks that wait is bounded
        by Ray Data: a stage pauses while those behind it are full.

    Raises:
        RunError: The cluster is too small for the actors.
    """
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    check_room(pools)
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
        # No CPU for a moment's work, for which a full cluster would have none left.
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
    """The numbers of the rows, as something that Ray Data reads."""
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
        """Begin to read.

        Args:
            rows: Of `make_stream`, or a part of them.
        """
        self._rows = rows
        # Rows, then None or an error.
        self._taken: queue.Queue[Row | RunError | None] = queue.Queue(maxsize=1)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def take(self, *, timeout_s: float) -> Row | None:
        """The next row; None behind the last.

        Raises:
            TimeoutError: None came in time.
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
        """Read no more. Ray Data ends the actors when the ends of all ranks are closed."""
        self._is_closed.set()
        self._thread.join(PATIENCE_S)

    def describe(self) -> str:
        """What Ray Data tells of all stages."""
        return self._rows.stats()

    def _read(self) -> None:
        last: RunError | None = None
        try:
            for block in self._rows.iter_batches(batch_size=None, batch_format="numpy"):
                if not self._put(unpack(block)):
                    return
        except Exception as error:  # of Ray, which has many kinds
            last = RunError(f"Ray Data failed: {describe_error(error)}")
        self._put(last)

    def _put(self, row: Row | RunError | None) -> bool:
        """Hand a row over; False when nobody wants it any more."""
        while not self._is_closed.is_set():
            try:
                self._taken.put(row, timeout=PERIOD_S)
                return True
            except queue.Full:
                continue
        return False


def check_room(pools: Sequence[Pool]) -> None:
    """Check that a cluster without anything else on it has room for all actors.

    Raises:
        RunError: It has not: Ray would wait for a node to join, without a word.
    """
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
    """The pool of encoders that settings describe.

    Args:
        stage: Takes the `resources` of its actor besides the arguments.
        settings: The actors.
        arguments: Of the stage's constructor.
    """
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
    """What an encoder takes: as the user says, else a GPU if the cluster has one, or a CPU."""
    import ray

    if settings.encoder_resources is not None:
        return dict(settings.encoder_resources)
    return {"GPU": 1.0} if ray.cluster_resources().get("GPU") else {"CPU": 1.0}


def set_up_encoder_process(resources: Mapping[str, float]) -> str:
    """Set up the process of an encoder.

    Returns:
        Its device, for torch. Ray shows a process only the GPUs that it has given to it.
    """
    if resources.get("GPU"):
        return "cuda:0"
    if can_keep_freed_memory():
        keep_freed_memory()
    return "cpu"


def describe_error(error: BaseException) -> str:
    """An error in one line, with its kind where that says more than the message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RunError):
        return " ".join(lines)
    name = type(error).__name__
    return f"{name}: {lines[-1]}" if lines else name
