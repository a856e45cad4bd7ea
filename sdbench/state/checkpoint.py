"""`Checkpoint`: the files of a checkpoint on disk, the names of its tensors, and reading them.

    step_00000120/            has this name only when it is whole
        checkpoint.json       step, facts about the run, size and CRC-32 of each other file
        .metadata             where each part of each tensor is, by torch.distributed.checkpoint
        __<rank>_0.distcp     the parts that a rank has written

Tensors are read with weights_only. `.metadata` is a pickle; the unpickler that reads it knows only
the classes that it consists of.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import warnings
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    MetadataIndex,
    TensorProperties,
)

from sdbench.base.errors import ConfigError
from sdbench.base.files import crc32_of, write_json
from sdbench.base.secrets import redact_values
from sdbench.ranks.distributed import Ranks, gather

SCHEMA_VERSION = 1
DESCRIPTION_NAME = "checkpoint.json"
METADATA_NAME = ".metadata"
# Prefixes of weights, before `<module>.<parameter>`: trained, the fp32 copies that an optimizer
# keeps of bf16 weights, moving averages, and frozen ones that the run keeps.
TRAINED_PREFIX, COPIES_PREFIX = "model.", "fp32."
AVERAGED_PREFIX, FROZEN_PREFIX = "ema.", "frozen."
ALONE = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
# The names in a pickle that `.metadata` needs. Each of them only makes a value.
KNOWN_TO_PICKLE = {
    (known.__module__, known.__qualname__): known
    for known in (
        dcp.Metadata,
        dcp.TensorStorageMetadata,
        dcp.ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        _MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
}
KNOWN_TO_PICKLE |= {("torch", n): one for n, one in vars(torch).items() if type(one) is torch.dtype}

# Each rank reads for itself, and a run of one rank writes without a process group.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
# A deprecation within torch itself.
warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: all its files are there, with the sizes that they were saved with.

    Attributes:
        folder: Where it is.
        step: Step after which it was saved.
        facts: What was saved about the run beside the tensors.
        files: Size in bytes (``bytes``) and checksum (``crc32``) of each file, by name.
        is_finite: Whether all values were finite when they were written. Versions of this suite
            that did not check wrote nothing about it.
        ranks: The ranks that read it.
        is_checked: Whether the checksums of all files have been checked.
        passed_over: Why newer checkpoints of the run were not taken, a sentence for each.
    """

    folder: Path
    step: int
    facts: dict[str, Any]
    files: dict[str, dict[str, Any]]
    is_finite: bool = False
    ranks: Ranks = ALONE
    is_checked: bool = False
    passed_over: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: Path, *, ranks: Ranks = ALONE) -> Checkpoint:
        """Open a checkpoint.

        Raises:
            ConfigError: A file is missing or has another size, or the description is damaged.
        """
        path = folder / DESCRIPTION_NAME
        try:
            content = json.loads(path.read_bytes())
            crc32 = content.pop("crc32")
        except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
            raise _damaged(path, f"it cannot be read ({error})") from None
        if crc32 != _crc32_of(content):
            raise _damaged(path, "its checksum is another one")
        if content.pop("schema_version") != SCHEMA_VERSION:
            raise _damaged(path, f"its schema_version is not {SCHEMA_VERSION}")
        for name, described in content["files"].items():
            try:
                size = (folder / name).stat().st_size
            except OSError as error:
                raise _unreadable(folder / name, error) from None
            if size != described["bytes"]:
                what = f"it has {size} bytes; {described['bytes']} were saved"
                raise _damaged(folder / name, what)
        return cls(folder=folder, ranks=ranks, **content)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The saved tensors on the meta device, with their whole size and dtype.

        Raises:
            ConfigError: `.metadata` is damaged.
        """
        return {
            name: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
            for name, saved in self._read_metadata().state_dict_metadata.items()
        }

    def check_share(self) -> None:
        """Check the checksums of this rank's share of the files.

        The ranks of each node check all files: a disk or a cache may fail on one node alone, and
        what has been read here is loaded from memory.
        """
        for name in self._share_of(self.files):
            self._check_file(name)

    def check_share_of_values(self) -> None:
        """Check that this rank's share of the values is finite, unless its save has done that."""
        if self.is_finite:
            return
        metadata = self._read_metadata()
        for name in self._share_of(metadata.state_dict_metadata):
            like = metadata.state_dict_metadata[name]
            tensor = torch.empty(like.size, dtype=like.properties.dtype)
            self._read({name: tensor}, metadata)
            if find_not_finite([(name, tensor)]) is not None:
                raise ConfigError(
                    "The state in the checkpoint is not finite",
                    value=f"{name} in {self.folder}",
                    allowed="a checkpoint with finite values, such as an earlier one",
                    flag="--resume",
                )

    def _share_of(self, names: Iterable[str]) -> list[str]:
        return sorted(names)[self.ranks.local_rank :: self.ranks.local_world_size]

    def load_into(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read values into tensors in place, each rank its own part. All ranks call it.

        Checksums are checked first, unless they have been. DTensors may have other placements, or
        another number of ranks, than when they were saved. If one rank finds that a file is
        damaged, or that a tensor was not saved or had another size or dtype, nothing is loaded, and
        all raise its ConfigError.
        """
        fault = None
        try:
            if not self.is_checked:
                self.check_share()
            self._check_tensors(tensors)
        except ConfigError as error:
            fault = error
        for found in gather(fault, self.ranks):
            if found is not None:
                raise found
        self._read(tensors, self._read_metadata())

    def _read(self, tensors: Mapping[str, torch.Tensor], metadata: dcp.Metadata) -> None:
        dcp.load(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_reader=_Reader(self.folder, metadata),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )

    def _check_file(self, name: str) -> None:
        try:
            found = describe_file(self.folder / name)
        except OSError as error:
            raise _unreadable(self.folder / name, error) from None
        if found != self.files[name]:
            raise _damaged(self.folder / name, "its checksum is not the one that was saved")

    def _check_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        saved = self.tensors()
        for name, tensor in tensors.items():
            known = _describe(saved[name]) if name in saved else "not saved"
            if known != _describe(tensor):
                raise ConfigError(
                    "The checkpoint is that of another job",
                    value=f"{name}: {known}",
                    allowed=_describe(tensor),
                    flag="--resume",
                )

    def _read_metadata(self) -> dcp.Metadata:
        self._check_file(METADATA_NAME)
        try:
            with (self.folder / METADATA_NAME).open("rb") as file:
                metadata = _Unpickler(file).load()
        except Exception as error:  # a damaged pickle may raise anything
            what = f"it is no description of tensors ({error})"
            raise _damaged(self.folder / METADATA_NAME, what) from None
        return metadata


def weights_of(tensors: Mapping[str, torch.Tensor], *, use_ema: bool) -> dict[str, torch.Tensor]:
    """The trained weights in a checkpoint and the frozen ones that it keeps, by their own names.

    fp32 copies take the place of bf16 weights, and with `use_ema` the moving averages. If there are
    none, that is a ConfigError.
    """
    if use_ema and not any(name.startswith(AVERAGED_PREFIX) for name in tensors):
        raise ConfigError(
            "the run kept no moving average of its weights",
            value=True,
            allowed="the weights themselves: --no_ema",
            flag="--ema",
        )
    trained = (AVERAGED_PREFIX,) if use_ema else (TRAINED_PREFIX, COPIES_PREFIX)
    return {
        name.removeprefix(prefix): tensor
        for prefix in (*trained, FROZEN_PREFIX)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


class _Reader(dcp.FileSystemReader):
    """Reads tensors by metadata that have been read and checked."""

    def __init__(self, folder: Path, metadata: dcp.Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self._metadata


class _Unpickler(pickle.Unpickler):
    """Knows only what `.metadata` consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN_TO_PICKLE:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
        return KNOWN_TO_PICKLE[module, name]


def write_description(
    folder: Path, *, step: int, facts: Mapping[str, Any], files: Mapping[str, Any]
) -> None:
    """Write `checkpoint.json` without secrets, for finite values, and sync the folder to disk."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "facts": facts,
        "files": files,
        "is_finite": True,
    }
    content = redact_values(content)
    write_json(folder / DESCRIPTION_NAME, {**content, "crc32": _crc32_of(content)})
    synchronize(folder)


def find_not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first tensor with a value that is not finite; None if all are finite.

    Each is read once, on its device, and only its minimum and maximum are allocated, both NaN if
    one value is. On a CPU this takes a third of the time of a norm.
    """
    ends = [
        (name, torch.aminmax(tensor))
        for name, tensor in named
        if tensor.is_floating_point() and tensor.numel()
    ]
    for name, (smallest, largest) in ends:
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            return name
    return None


def describe_file(path: Path) -> dict[str, Any]:
    """Size and checksum of a file as it is read back."""
    crc32, num_bytes = crc32_of(path)
    return {"bytes": num_bytes, "crc32": f"{crc32:08x}"}


def synchronize(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc32_of(content: Any) -> str:
    return f"{zlib.crc32(json.dumps(content).encode()):08x}"


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.size())}"


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return _damaged(path, f"it cannot be read ({error.strerror})")


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"A file of the checkpoint is damaged: {what}",
        value=str(path),
        allowed="a checkpoint as it was saved, such as an earlier one",
        flag="--resume",
    )
