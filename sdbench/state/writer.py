"""Writes one checkpoint: reading the tensors, writing them, and the rename that makes it whole.

torch.distributed.checkpoint has the ranks agree on who writes what, and reports an error of one
rank to all; these classes are its storage and its planner.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import checkpoint as dcp

from sdbench.base.errors import RunError
from sdbench.state.checkpoint_files import (
    METADATA_NAME,
    Checkpoint,
    describe_file,
    find_not_finite,
    synchronize,
    write_description,
)

# Size of a tensor in a file, beyond its values.
OVERHEAD_BYTES = 2048
# Share of the host's free memory that the copies of a save may take. The rest is for what a step
# allocates, and for pages on their way to the disk.
MAX_SHARE_OF_COPIES = 0.8


class NotFinite(RunError):
    """A tensor that was to be saved has a value that is not finite; its name is the message."""


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes one checkpoint into a hidden folder, which gets its name when it is whole.

    Attributes:
        is_read: Set when this rank's part of the tensors has been read; then they may change.
        is_copied: Whether they were copied first, or read in place.
    """

    def __init__(
        self, folder: Path, *, step: int, facts: Mapping[str, Any], make_room: Callable[[int], None]
    ) -> None:
        """Write nothing yet; `make_room` removes old checkpoints until that many bytes are free."""
        # Files are synced to disk here, after `is_read` has been set. The planner copies.
        hidden = folder.with_name(f".{folder.name}.writing")
        super().__init__(hidden, sync_files=False, per_thread_copy_ahead=0)
        self._folder = folder
        self.step = step
        self._facts = facts
        self._make_room = make_room
        self.is_read = threading.Event()
        self.is_copied = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remove the remains of earlier saves."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            remove_remains(self._folder.parent)

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Make room on the disk, on the first rank, or refuse what does not fit."""
        num_bytes = sum(
            item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
            + OVERHEAD_BYTES
            for plan in plans
            for item in plan.items
        )
        self._make_room(num_bytes)
        free_bytes = shutil.disk_usage(self._folder.parent).free
        if num_bytes > free_bytes:
            needs = f"{num_bytes / 2**30:.3g} GiB are needed and {free_bytes / 2**30:.3g} GiB free"
            raise RunError(f"no space left on the disk: {needs}")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        """Write this rank's part, and sync it to disk, unless a value is not finite."""
        assert isinstance(planner, CopyingPlanner)
        self.is_copied = planner.copy(plan)
        if self.is_copied:
            self.is_read.set()
        # Values are checked in this thread: if they are copies, training goes on meanwhile.
        parts = ((item.index.fqn, planner.resolve_data(item)) for item in plan.items)
        bad = find_not_finite(parts)
        if bad is not None:
            raise NotFinite(bad)
        try:
            written = super().write_data(plan, planner).value()
        except RuntimeError as error:
            # torch.save only says where a write failed; the reason is the error before.
            raise error.__context__ or error from None
        self.is_read.set()
        files = {}
        for name in sorted({result.storage_data.relative_path for result in written}):
            synchronize(self.path / name)
            files[name] = describe_file(self.path / name)
        done: torch.futures.Future = torch.futures.Future()
        done.set_result((written, files))
        return done

    def finish(self, metadata: dcp.Metadata, results: list[Any]) -> None:
        """Make the checkpoint whole, on the first rank, when all have written their parts."""
        super().finish(metadata, [written for written, _ in results])
        synchronize(self.path / METADATA_NAME)
        files = {METADATA_NAME: describe_file(self.path / METADATA_NAME)}
        for _, described in results:
            files |= described
        write_description(self.path, step=self.step, facts=self._facts, files=files)
        Checkpoint.open(self.path)  # which checks it before it gets its name
        hide(self._folder)  # a run that went back to an earlier step comes here again
        self.path.rename(self._folder)
        synchronize(self._folder.parent)

    def storage_meta(self) -> None:
        """Return no metadata: the parent class would store the path of the folder."""


class CopyingPlanner(dcp.DefaultSavePlanner):
    """Copies the tensors that this rank writes to host memory, if there is room.

    Memory is copied far faster than a disk writes, so training goes on sooner.
    """

    def __init__(self, buffers: dict[Any, torch.Tensor], *, num_sharing: int) -> None:
        """Copy nothing yet; the GPU's work up to now comes before the copies.

        The buffers of earlier saves are reused; `num_sharing` ranks share the host's memory.
        """
        super().__init__(flatten_state_dict=False)
        self._buffers = buffers
        self._num_sharing = num_sharing
        self._stream = None
        if torch.cuda.is_initialized():
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, plan: dcp.SavePlan) -> bool:
        """Copy the tensors of this rank's plan, and wait; False if there was no room for it."""
        resolve = super().resolve_data
        tensors = {item.index: resolve(item).detach() for item in plan.items}
        missing = {
            index: tensor
            for index, tensor in tensors.items()
            if not _fits(self._buffers.get(index), tensor)
        }
        free_bytes = psutil.virtual_memory().available / self._num_sharing
        if sum(tensor.nbytes for tensor in missing.values()) > MAX_SHARE_OF_COPIES * free_bytes:
            self._buffers.clear()
            return False
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)  # of this thread
        with torch.cuda.stream(self._stream):
            for index, tensor in tensors.items():
                if index in missing:
                    self._buffers[index] = torch.empty_like(
                        tensor, device="cpu", pin_memory=tensor.is_cuda
                    )
                self._buffers[index].copy_(tensor, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return True

    def resolve_data(self, write_item: Any) -> torch.Tensor:
        """The copy of the tensor to write, or the tensor itself."""
        copied = self._buffers.get(write_item.index)
        return super().resolve_data(write_item) if copied is None else copied


def _fits(buffer: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return buffer is not None and (buffer.size(), buffer.dtype) == (tensor.size(), tensor.dtype)


def hide(folder: Path) -> Path:
    """Rename a checkpoint, if it is there, so that no search finds it; returns its new place."""
    hidden = folder.with_name(f".{folder.name}.removing")
    if folder.exists():
        folder.rename(hidden)
    return hidden


def find_remains(folder: Path) -> list[Path]:
    """Parts of checkpoints that a killed save or removal has left."""
    return sorted(folder.glob(".step_*"))


def remove_remains(folder: Path) -> None:
    """Remove what `find_remains` finds."""
    for remains in find_remains(folder):
        shutil.rmtree(remains, ignore_errors=True)
