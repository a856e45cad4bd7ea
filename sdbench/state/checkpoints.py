"""`Checkpoints` of a run: saved in the background, found again, and removed when they are old.

<run>/checkpoints/step_00000120/             a whole checkpoint
<run>/checkpoints/.step_00000130.writing/    one that is being written, or was when it was killed
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from sdbench.base.errors import ConfigError, RunError
from sdbench.ranks.distributed import Ranks, broadcast, gather, maximum_on_hosts
from sdbench.record.store import FAILED, INVALID
from sdbench.state.checkpoint_files import ALONE, PREFIX, Checkpoint, OtherStepError
from sdbench.state.writer import (
    CheckpointWriter,
    CopyingPlanner,
    NotFinite,
    find_remains,
    hide,
    remove_remains,
)

FOLDER_NAME = "checkpoints"
# Tensors up to this size are copied at once: some, such as random states, change in a step's
# forward pass.
SMALL_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """How a save has ended.

    Attributes:
        stall_s: How long training on this rank waited for it.
        is_copied: Whether this rank's part was copied in memory before it was written.
        num_bytes: Size of the tensors of all ranks; 0 if it failed.
        error: Why there is no checkpoint; None if all went well.
        not_finite: Name of a tensor with a value that is not finite, or None.
    """

    step: int
    duration_s: float
    stall_s: float
    is_copied: bool
    num_bytes: int
    error: str | None
    not_finite: str | None


class Checkpoints:
    """The checkpoints of one run folder.

    A save is written in a thread while training goes on. If the host's memory has room for a copy
    of what this rank writes, the thread copies it first, and keeps that memory for the next save.
    Else it reads the tensors in place. The state does not change between two optimizer steps, so
    training waits for either only before the next one::

        checkpoints.begin_save(step, tensors, facts)
        loss.backward()
        checkpoints.wait_until_read()
        optimizer.step()

    A process that ends waits for the current save, unless it is killed.
    """

    def __init__(self, folder: Path, *, ranks: Ranks, keep: int, keep_every: int | None) -> None:
        """Write nothing yet. All ranks do this together, when they have joined.

        The `keep` newest checkpoints are kept, and the ones at multiples of `keep_every` steps.
        """
        assert keep >= 1
        self.folder = folder / FOLDER_NAME
        self._ranks = ranks
        self._keep = keep
        self._keep_every = keep_every
        # A separate group, as the ranks' other communication goes on in the meantime.
        self._group = torch.distributed.new_group(backend="gloo") if ranks.world_size > 1 else None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._buffers: dict[Any, torch.Tensor] = {}
        # The current save: its writer, its result, and how long training has stood still for it.
        self._writer: CheckpointWriter | None = None
        self._ended: concurrent.futures.Future[SaveReport] | None = None
        self._stall_s = 0.0
        self._reports: list[SaveReport] = []
        # Steps whose checkpoints are not removed, however old they become.
        self.held: set[int] = set()
        # The newest one whose checksums are known to be right, from saving or reading it.
        self._verified: set[int] = set()

    def newest(self) -> Checkpoint | None:
        """The newest undamaged checkpoint, the same on all ranks, which all call this.

        All checksums are checked; a file that one rank cannot read counts as damaged for all.
        Checkpoints that are passed over are printed. If all are damaged, that is a ConfigError.
        """
        found = find_newest(self.folder.parent, ranks=self._ranks, reads_all=True)
        self._verified = set() if found is None else {found.step}
        if self._ranks.rank == 0:
            for remains in find_remains(self.folder):
                print(f"A checkpoint that was not finished is passed over: {remains}", flush=True)
            tell_of_passed_over(found)
        return found

    def begin_save(
        self, step: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
    ) -> None:
        """Begin to save, after waiting for the previous save. All ranks call it.

        Args:
            step: Optimizer steps taken.
            tensors: The whole state by name: tensors that are equal on all ranks, DTensors, and
                tensors under a name that only this rank gives. Must not change until
                `wait_until_read` returns, unless they have at most 64 KiB.
            facts: More about the run, as JSON has it; those of the first rank are saved.
        """
        facts = json.loads(json.dumps(facts, allow_nan=False))
        self._collect()
        started_s = time.perf_counter()
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if tensor.nbytes <= SMALL_BYTES:  # a DTensor counts as a whole
                tensors[name] = tensor.clone()
        planner = CopyingPlanner(self._buffers, num_sharing=self._ranks.local_world_size)
        make_room = functools.partial(self._make_room, step)
        path = path_of(self.folder, step)
        self._writer = CheckpointWriter(path, step=step, facts=facts, make_room=make_room)
        self._ended = self._thread.submit(self._write, started_s, self._writer, planner, tensors)
        self._stall_s = time.perf_counter() - started_s

    @property
    def is_reading(self) -> bool:
        """Whether a save still reads the tensors, which must not change yet."""
        return self._writer is not None and not self._writer.is_read.is_set()

    def wait_until_read(self) -> None:
        """Wait until the tensors may change. Call it before each optimizer step."""
        if self.is_reading:
            with self._standing_still():
                self._writer.is_read.wait()

    def finish(self) -> None:
        """Wait for the current save, if there is one; a RunError on all ranks if it failed."""
        report = self._collect()
        if report is not None and report.error is not None:
            raise RunError(
                f"the checkpoint of step {report.step} was not saved: {report.error}",
                status=FAILED if report.not_finite is None else INVALID,
            )

    def poll(self) -> list[SaveReport]:
        """The saves that have ended since the last call. All ranks call it after the same steps.

        A save has ended once it has on all ranks: they get the same reports from the same call, and
        act on an error together. A rank that acted a step earlier would leave the others waiting.
        """
        if self._ended is not None:
            is_under_way = not self._ended.done()
            if not maximum_on_hosts(int(is_under_way), self._ranks):
                self._collect()
        reports, self._reports = self._reports, []
        return reports

    def _collect(self) -> SaveReport | None:
        """Wait for the current save, and note how it has ended."""
        if self._ended is None:
            return None
        with self._standing_still():
            ended = self._ended.result()
        report = dataclasses.replace(ended, stall_s=self._stall_s)
        self._reports.append(report)
        self._writer = self._ended = None
        return report

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self._stall_s += time.perf_counter() - started_s

    def _write(
        self,
        started_s: float,
        writer: CheckpointWriter,
        planner: dcp.SavePlanner,
        tensors: dict[str, torch.Tensor],
    ) -> SaveReport:
        """Save, in the thread; the report has no stall yet."""
        num_bytes, error, not_finite = 0, None, None
        try:
            metadata = dcp.save(
                tensors,
                storage_writer=writer,
                planner=planner,
                process_group=self._group,
                no_dist=self._group is None,
            )
            num_bytes = sum(
                saved.size.numel() * saved.properties.dtype.itemsize
                for saved in metadata.state_dict_metadata.values()
            )
        except (dcp.CheckpointException, Exception) as caught:
            error, not_finite = self._describe(caught)
        finally:
            writer.is_read.set()
        if self._ranks.rank == 0:
            if error is None:
                self._verified = {writer.step}
                self._remove_old(writer.step)
            remove_remains(self.folder)
        duration_s = time.perf_counter() - started_s
        return SaveReport(
            writer.step, duration_s, 0.0, writer.is_copied, num_bytes, error, not_finite
        )

    def _describe(self, error: BaseException) -> tuple[str, str | None]:
        """An error in a line, with its rank if there are several, and the name of a bad tensor."""
        where, not_finite = "", None
        if isinstance(error, dcp.CheckpointException):
            failures = [failure for failure, _ in error.failures.values()]
            not_finite = next((str(one) for one in failures if isinstance(one, NotFinite)), None)
            where = f"rank {next(iter(error.failures))}: " if self._ranks.world_size > 1 else ""
            error = failures[0]
        if isinstance(error, NotFinite):
            return f"{where}{error} is not finite", not_finite
        return where + (str(error).splitlines() or [type(error).__name__])[0], not_finite

    def _remove_old(self, step: int) -> None:
        """Remove the checkpoints that are not to be kept beside this newest one.

        Checkpoints of later steps, from which the run went back, stay for the user to remove.
        """
        steps = [known for known in _list_steps(self.folder) if known <= step]
        for old in steps[: -self._keep]:
            if not self._stays(old):
                with contextlib.suppress(OSError):  # one checkpoint too many does no harm
                    hide(path_of(self.folder, old))

    def _make_room(self, step: int, num_bytes: int) -> None:
        """Remove the oldest checkpoints until this many bytes are free for one of this step.

        Only while a checkpoint stays that is known to be whole: else a run that is killed now would
        have none. Nothing is removed if removing all of them would not free enough.
        """
        steps = [known for known in _list_steps(self.folder) if known <= step]
        if not self._verified & set(steps):
            return
        removable = [
            path_of(self.folder, old)
            for old in steps
            if old not in self._verified and not self._stays(old)
        ]
        files = (file for path in removable for file in path.iterdir())
        if shutil.disk_usage(self.folder).free + sum(f.stat().st_size for f in files) < num_bytes:
            return
        for path in removable:
            if shutil.disk_usage(self.folder).free >= num_bytes:
                return
            shutil.rmtree(hide(path), ignore_errors=True)  # a kill leaves only hidden remains

    def _stays(self, old: int) -> bool:
        is_kept = bool(self._keep_every) and old % self._keep_every == 0
        return is_kept or old in self.held


def find_newest(
    run: Path, *, ranks: Ranks = ALONE, reads_all: bool = False, before: float = math.inf
) -> Checkpoint | None:
    """The newest whole checkpoint of a run, the same on all ranks, which call it.

    `reads_all` checks the checksums of all files, and not only their sizes. Steps from `before` on
    are left out. A folder with the name of another step is a ConfigError: a save of that step would
    remove it.
    """
    folder = run / FOLDER_NAME
    passed_over: list[str] = []
    steps = [step for step in broadcast(_list_steps(folder), ranks) if step < before]
    for step in reversed(steps):
        fault = None
        try:
            found = Checkpoint.open(path_of(folder, step), ranks=ranks)
            if reads_all:
                found.check_share()
        except ConfigError as error:
            fault = error
        faults = [of_rank for of_rank in gather(fault, ranks) if of_rank is not None]
        for refused in faults:
            if isinstance(refused, OtherStepError):
                raise refused
        if not faults:
            return dataclasses.replace(found, is_checked=reads_all, passed_over=tuple(passed_over))
        passed_over.append(f"{faults[0].what} ({faults[0].value})")
    if passed_over:
        raise ConfigError(
            "none of the run's checkpoints is whole",
            value=passed_over,
            allowed=f"a whole one, put back into {folder}; to begin again from step 0: another "
            f"--run_name, or this one without {folder}",
            flag="--run_name",
        )
    return None


def tell_of_passed_over(found: Checkpoint | None) -> None:
    """Print why newer checkpoints were not taken."""
    for reason in found.passed_over if found is not None else ():
        print(f"A checkpoint is passed over. {reason}", flush=True)


def path_of(folder: Path, step: int) -> Path:
    """The folder of a checkpoint."""
    return folder / f"{PREFIX}{step:08d}"


def _list_steps(folder: Path) -> list[int]:
    numbers = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")]
    return sorted(int(number) for number in numbers if number.isdecimal())
