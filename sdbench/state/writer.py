"""Writes one checkpoint: reading the tensors, writing them, and the rename that makes it whole.

torch.distributed.checkpoint has the ranks agree on who writes what, and tells all of them of the
error of one; these classes are its storage and its planner.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from sdbench.base.errors import RunError
from sdbench.state.checkpoint import (
    METADATA_NAME,
    Checkpoint,
    describe_file,
    synchronize,
    write_description,
)

# What a tensor takes in a file beside its values.
OVERHEAD_BYTES = 2048


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes one checkpoint into a hidden folder, which gets its name when it is whole.

    Attributes:
        step: As in `Checkpoint`.
        is_read: Set when this rank's part of the tensors has been read: they may change.
    """

    def __init__(self, folder: Path, *, step: int, facts: Mapping[str, Any]) -> None:
        """Write nothing yet.

        Args:
            folder: Of the checkpoint when it is whole.
            step: As in `Checkpoint`.
            facts: As in `Checkpoint`.
        """
        # Files are brought to the disk here, after `is_read` has been set. What is on a GPU is
        # copied by the planner.
        hidden = folder.with_name(f".{folder.name}.writing")
        super().__init__(hidden, sync_files=False, per_thread_copy_ahead=0)
        self._folder = folder
        self.step = step
        self._facts = facts
        self.is_read = threading.Event()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make room: what an earlier save has left goes."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            remove_remains(self._folder.parent)

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Refuse, on the first rank, what the disk cannot take."""
        num_bytes = sum(
            item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
            + OVERHEAD_BYTES
            for plan in plans
            for item in plan.items
        )
        free_bytes = shutil.disk_usage(self._folder.parent).free
        if num_bytes > free_bytes:
            needs = f"{num_bytes / 2**30:.3g} GiB are needed and {free_bytes / 2**30:.3g} GiB free"
            raise RunError(f"no space left on the disk: {needs}")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        """Write this rank's part, and bring it to the disk."""
        if isinstance(planner, CopyingPlanner):
            planner.copy(plan)
            self.is_read.set()
        try:
            written = super().write_data(plan, planner).value()
        except RuntimeError as error:
            # Of a failed write torch.save only says where it was; the reason is what came before.
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
        Checkpoint.open(self.path)  # which it must stand before it gets its name
        hide(self._folder)  # a run that went back to an earlier step comes here again
        self.path.rename(self._folder)
        synchronize(self._folder.parent)

    def storage_meta(self) -> None:
        """Leave the machine's path out of the metadata."""
        return None


class CopyingPlanner(dcp.DefaultSavePlanner):
    """Copies what this rank writes to host memory, while the GPU works on."""

    def __init__(self, buffers: dict[Any, torch.Tensor]) -> None:
        """Copy nothing yet; the GPU's work up to now comes before the copies.

        Args:
            buffers: Host memory of the copies of earlier saves, which is used again.
        """
        super().__init__(flatten_state_dict=False)
        self._buffers = buffers
        self._stream = None
        if torch.cuda.is_initialized():
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, plan: dcp.SavePlan) -> None:
        """Copy the tensors of this rank's plan, and wait until that is done."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)  # of this thread
        with torch.cuda.stream(self._stream):
            for item in plan.items:
                tensor = super().resolve_data(item).detach()
                buffer = self._buffers.get(item.index)
                if buffer is None or (buffer.size(), buffer.dtype) != (tensor.size(), tensor.dtype):
                    buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                    self._buffers[item.index] = buffer
                buffer.copy_(tensor, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def resolve_data(self, write_item: Any) -> torch.Tensor:
        """The copy of what is to be written."""
        return self._buffers[write_item.index]


def hide(folder: Path) -> None:
    """Take a checkpoint, if it is there, out of the way of those who look for one."""
    if folder.exists():
        folder.rename(folder.with_name(f".{folder.name}.removing"))


def find_remains(folder: Path) -> list[Path]:
    """Parts of checkpoints that a save or a removal has left when it was killed."""
    return sorted(folder.glob(".step_*"))


def remove_remains(folder: Path) -> None:
    """Remove them."""
    for remains in find_remains(folder):
        shutil.rmtree(remains, ignore_errors=True)
