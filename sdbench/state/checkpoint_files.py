"""`Checkpoint`: the files of a checkpoint on disk, the names of its tensors, and reading them.

    step_00000120/            has this name only when it is whole, and no other one of a step
        checkpoint.json       step, facts about the run, size and CRC-32 of each other file
        .metadata             where each part of each tensor is, by torch.distributed.checkpoint
        __<rank>_0.distcp     the parts that a rank has written

Tensors are read with weights_only. `.metadata` is a pickle; the unpickler that reads it knows only
the classes that it consists of.
"""

from __future__ import annotations

import dataclasses
import enum
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
from sdbench.ranks.distributed import ALONE, Ranks, gather

# Increased with every change of the files and facts, and with `models.architecture.DRAWING`:
# checkpoints do not hold frozen random weights, so only a version that draws the same ones may
# resume from them.
SCHEMA_VERSION = 4
DESCRIPTION_NAME = "checkpoint.json"
METADATA_NAME = ".metadata"
PREFIX = "step_"
# Prefixes of weights, before `<module>.<parameter>`: trained, the fp32 copies that an optimizer
# keeps of bf16 weights, moving averages, and frozen ones that the run keeps.
TRAINED_PREFIX, COPIES_PREFIX = "model.", "fp32."
AVERAGED_PREFIX, FROZEN_PREFIX = "ema.", "frozen."
# The names that the pickle in `.metadata` may use. Each of them only makes a value.
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


class OtherStepError(ConfigError):
    """The folder of a checkpoint has the name of another step."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: all its files are there, with the sizes that they were saved with.

    Attributes:
        step: Step after which it was saved.
        facts: What was saved about the run beside the tensors.
        files: Size and checksum of each file, from `describe_file`, by name.
        metadata: What `.metadata` says, whose checksum is right.
        ranks: Ranks that read it.
        is_checked: Whether the checksums of all files have been checked.
        passed_over: Why newer checkpoints of the run were not taken, a sentence for each.
    """

    folder: Path
    step: int
    facts: dict[str, Any]
    files: dict[str, dict[str, Any]]
    metadata: dcp.Metadata
    ranks: Ranks = ALONE
    is_checked: bool = False
    passed_over: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: Path, *, ranks: Ranks = ALONE) -> Checkpoint:
        """Open a checkpoint.

        Raises ConfigError if a file is missing or has another size, or if the description is
        damaged or of another version, or that of the tensors is damaged, and OtherStepError if the
        folder has the name of another step.
        """
        path = folder / DESCRIPTION_NAME
        try:
            content = json.loads(path.read_bytes())
            crc32 = content.pop("crc32")
        except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
            raise _damaged(path, f"it cannot be read ({error})") from None
        if crc32 != _crc32_of(content):
            raise _damaged(path, "its checksum is another one")
        if (version := content.pop("schema_version")) != SCHEMA_VERSION:
            raise ConfigError(
                "The checkpoint was saved by another version of the suite",
                value=f"{path}: schema_version {version}",
                allowed=f"schema_version {SCHEMA_VERSION}, as this version saves",
                flag="--resume",
            )
        for name, described in content["files"].items():
            try:
                size = (folder / name).stat().st_size
            except OSError as error:
                raise _unreadable(folder / name, error) from None
            if size != described["bytes"]:
                what = f"it has {size} bytes; {described['bytes']} were saved"
                raise _damaged(folder / name, what)
        name = folder.resolve().name
        named = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and named.isdecimal() and int(named) != content["step"]:
            raise OtherStepError(
                "The folder of the checkpoint has the name of another step",
                value=f"{folder}, which holds step {content['step']}",
                allowed=f"the name that it was saved with, {PREFIX}{content['step']:08d}; or move "
                "the folder elsewhere",
                flag="the name of the folder",
            )
        _check_file(folder / METADATA_NAME, content["files"])
        metadata = _read_metadata(folder / METADATA_NAME)
        return cls(folder=folder, ranks=ranks, metadata=metadata, **content)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The saved tensors on the meta device, with their whole size and dtype."""
        return {
            name: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
            for name, saved in self.metadata.state_dict_metadata.items()
        }

    def check_share(self) -> None:
        """Check the checksums of this rank's share of the files.

        The ranks of each node check all files: a disk or a cache may fail on one node alone, and
        what has been read here is loaded from memory.
        """
        for name in sorted(self.files)[self.ranks.local_rank :: self.ranks.local_world_size]:
            _check_file(self.folder / name, self.files)

    def read(self, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Read the tensors whose names begin with one of the prefixes, to the CPU."""
        tensors = {
            name: torch.empty_like(like, device="cpu")
            for name, like in self.tensors().items()
            if name.startswith(prefixes)
        }
        self.load_into(tensors)
        return tensors

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
        dcp.load(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_reader=_Reader(self.folder, self.metadata),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )

    def _check_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        saved = self.tensors()
        for name, tensor in tensors.items():
            known = _describe(saved[name]) if name in saved else "not saved"
            if known != _describe(tensor):
                raise ConfigError(
                    "The checkpoint is of another job",
                    value=f"{name}: {known}",
                    allowed=_describe(tensor),
                    flag="--resume",
                )


def weight_prefixes(*, use_ema: bool) -> tuple[str, ...]:
    """Prefixes of the trained weights, or of their averages, and of the frozen ones.

    Later ones win: fp32 copies take the place of bf16 weights.
    """
    trained = (AVERAGED_PREFIX,) if use_ema else (TRAINED_PREFIX, COPIES_PREFIX)
    return (*trained, FROZEN_PREFIX)


def weights_of(tensors: Mapping[str, torch.Tensor], *, use_ema: bool) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint's tensors, see `weight_prefixes`, by their own names."""
    return {
        name.removeprefix(prefix): tensor
        for prefix in weight_prefixes(use_ema=use_ema)
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
    """Loads only the classes that `.metadata` consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        if (module, name) not in KNOWN_TO_PICKLE:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
        return KNOWN_TO_PICKLE[module, name]


def _member_of(kind: Any, name: str) -> Any:
    """The member of an enumeration: Python 3.11.0 to 3.11.3 pickle it by `getattr`."""
    if not isinstance(kind, enum.EnumMeta):
        raise pickle.UnpicklingError(f"an attribute of {kind!r} has no place in it")
    return kind[name]


def write_description(
    folder: Path, *, step: int, facts: Mapping[str, Any], files: Mapping[str, Any]
) -> None:
    """Write `checkpoint.json` without secrets, and sync the folder to disk."""
    content = redact_values(
        {"schema_version": SCHEMA_VERSION, "step": step, "facts": facts, "files": files}
    )
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


def _check_file(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare a file with its description among those of a checkpoint."""
    try:
        found = describe_file(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    if found != files[path.name]:
        raise _damaged(path, "its checksum is not the one that was saved")


def _read_metadata(path: Path) -> dcp.Metadata:
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise _damaged(path, f"it is no description of tensors ({error})") from None
    return metadata


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
