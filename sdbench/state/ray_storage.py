"""`RayStorage` copies checkpoints through Ray Train to any file system of Arrow, and back."""

from __future__ import annotations

import os
import shutil

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from sdbench.ranks.distributed import Ranks, gather
from sdbench.state.checkpoints import Checkpoints, path_of


class RayStorage:
    """The copies of a run's checkpoints in the storage of its Ray Train run, under the same names.

    The first rank copies; all ranks see the folder of the run.
    """

    def __init__(self, checkpoints: Checkpoints, *, ranks: Ranks) -> None:
        self._checkpoints = checkpoints
        self._folder = checkpoints.folder
        self._ranks = ranks

    def fetch(self) -> None:
        """Copy the newest checkpoint here, unless it or a later one is here. All ranks call it."""
        stored = ray.train.get_checkpoint()
        if stored is not None and self._ranks.rank == 0:
            name = os.path.basename(stored.path)
            # Steps in the names are padded with zeros, so names sort as steps do.
            here = max((path.name for path in self._folder.glob("step_*")), default="")
            if here < name:
                print(f"Fetching {name} from {stored.path}", flush=True)
                self._folder.mkdir(parents=True, exist_ok=True)
                hidden = self._folder / f".{name}.fetching"
                shutil.rmtree(hidden, ignore_errors=True)
                stored.to_directory(hidden)
                hidden.rename(self._folder / name)
        gather(None, self._ranks)  # no rank looks for checkpoints before it is there

    def keep(self, step: int) -> None:
        """Begin to copy the checkpoint of a step. All ranks call it after the same step.

        The checkpoint is held until it is copied: with a store slower than the saves it would be
        removed as an old one, for which Ray ends the run. It is a RuntimeError if the previous copy
        has failed.
        """
        is_first = self._ranks.rank == 0
        storage = ray.train.get_context().get_storage()
        checkpoint = path_of(self._folder, step)
        if is_first:
            self._checkpoints.held.add(step)

        def upload(local: Checkpoint, name: str) -> Checkpoint:
            copied = storage.persist_current_checkpoint(local, name)
            self._checkpoints.held.discard(step)
            return copied

        ray.train.report(
            {},
            checkpoint=Checkpoint.from_directory(checkpoint) if is_first else None,
            checkpoint_dir_name=checkpoint.name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=upload,
            delete_local_checkpoint_after_upload=False,
        )
