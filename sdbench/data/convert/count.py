"""`count_tars` counts the samples of each tar, which streaming has to know."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from sdbench.base.errors import ConfigError, RunError, blamed_on
from sdbench.base.files import replace_file
from sdbench.base.secrets import redact
from sdbench.base.units import counted
from sdbench.data.convert.chunk_formats import to_json
from sdbench.data.formats.tar_members import ARRAY_ENDING, CAPTION_EXTENSIONS, list_groups
from sdbench.data.places.command_output import PIPE
from sdbench.data.places.image_names import image_extensions
from sdbench.data.places.place_files import find_files
from sdbench.data.places.remote import in_parallel, path_of
from sdbench.data.places.remote_files import open_stream


def count_tars(place: str, out: Path, *, read_avif: bool) -> None:
    """Write a JSON file with the number of samples of each tar of a place, by the tar's name.

    Every tar is read once, where it is, and nothing of it is kept. One that cannot be read is
    printed and left out of the file, and a RunError tells how many there are.
    """
    _check_folder(out)
    with blamed_on("PLACE"):
        tars = find_files(place, data_format="webdataset", is_told=True)
        names = _name(tars)
    images = image_extensions(read_avif=read_avif)
    kinds = (*images, *CAPTION_EXTENSIONS, ARRAY_ENDING[1:])
    sizes_found = in_parallel(functools.partial(_try_to_count, kinds=kinds), tars)
    found = dict(zip(names, sizes_found, strict=True))
    sizes = {name: size for name, size in found.items() if size is not None}
    replace_file(out, to_json(sizes))
    if len(sizes) < len(tars):
        raise RunError(
            f"{len(tars) - len(sizes)} of {len(tars)} tars cannot be counted (see above); "
            f"{out} has the {len(sizes)} others. The next call counts all tars again."
        )
    samples = counted(sum(sizes.values()), "sample")
    print(f"{samples} in {counted(len(tars), 'tar')}: {out}")


def _check_folder(out: Path) -> None:
    """Check that the file can be written, before hours of reading."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(
            "The numbers of samples cannot be written to this file",
            value=str(out),
            allowed="a file in a folder that exists",
            flag="--out",
        )


def _try_to_count(tar: str, *, kinds: Sequence[str]) -> int | None:
    """Count the samples of a tar; print a line and return None if it cannot be read."""
    try:
        with open_stream(tar) as file:
            groups = list_groups(file, tar, kinds=kinds)
            return sum(is_sample for _, _, is_sample in groups)
    except (OSError, RunError) as error:
        print(redact(str(error)), file=sys.stderr)
        return None


def _name(tars: Sequence[str]) -> list[str]:
    """Return the end of each tar's path, as long as it takes to tell them apart."""
    commands = [tar for tar in tars if tar.startswith(PIPE)]
    if commands:
        raise ConfigError(
            "The tar that a command prints has no name in the table of sizes",
            value=commands[0],
            allowed="the files that the command reads",
            flag="--remote or --local",
        )
    paths = [path_of(tar).split("/") for tar in tars]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(
        "Two tars have the same path",
        value=next(tar for at, tar in enumerate(tars) if names[at] in names[:at]),
        allowed="each tar once; hosts with the same paths one at a time",
        flag="--remote or --local",
    )
