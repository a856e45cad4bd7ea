"""The command count-samples: the number of samples of each tar, which streaming has to know."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from sdbench.base.errors import ConfigError, blamed_on
from sdbench.data.command_output import PIPE
from sdbench.data.formats.files import find_files
from sdbench.data.formats.tar_members import CAPTION_EXTENSIONS, list_samples
from sdbench.data.formats.webdataset import SUFFIX
from sdbench.data.image_files import image_extensions
from sdbench.data.prepare.chunk_formats import write_exact_json
from sdbench.data.remote import in_parallel, path_of
from sdbench.data.remote_files import open_stream
from sdbench.settings.data import DataSettings
from sdbench.settings.kinds import PATH, TEXT
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting, shared

EPILOG = """\
examples:
  a folder:     python -m sdbench count-samples data/tars --out sizes.json
  in a bucket:  python -m sdbench count-samples 's3://bucket/{00..15}.tar' \\
                  --out sizes.json
  stream them:  python data.py --remote 's3://bucket/{00..15}.tar' \\
                  --remote_files stream --tar_sizes sizes.json

Every tar is read once, from its first byte to its last, and nothing of it is kept.

exit codes: 0 ok, 1 a tar cannot be read, 2 bad input, 130 Ctrl-C
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountFlags:
    """Flags of count-samples."""

    place: str = setting(
        TEXT, REQUIRED, "a folder of tars, a tar or its URL; several in braces", is_positional=True
    )
    out: Path = setting(PATH, REQUIRED, "JSON file for the numbers, by the names of the tars")
    read_avif: bool = shared(DataSettings, "read_avif")


def main(argv: Sequence[str] | None = None) -> int:
    """Count as the command line says; return the exit code.

    Raises:
        ConfigError: There is no tar at that place, or two have the same name.
        RunError: A tar cannot be read, or is damaged.
    """
    flags = parse(
        CountFlags,
        argv,
        prog="python -m sdbench count-samples",
        description="Count the samples of tars, so that they can be streamed.",
        epilog=EPILOG,
    ).config
    with blamed_on("PLACE"):
        tars = find_files(flags.place, suffix=SUFFIX, is_told=True)
        names = _name(tars)
    kinds = (*image_extensions(read_avif=flags.read_avif), *CAPTION_EXTENSIONS)
    sizes = in_parallel(functools.partial(count_samples, kinds=kinds), tars)
    write_exact_json(flags.out, dict(zip(names, sizes, strict=True)))
    print(f"{sum(sizes)} samples in {len(tars)} tar{'s' * (len(tars) > 1)}: {flags.out}")
    return 0


def count_samples(tar: str, *, kinds: Sequence[str]) -> int:
    """How many samples a tar holds.

    Args:
        tar: Path or URL.
        kinds: As `list_samples` takes them.

    Raises:
        RunError: It cannot be read, or is damaged.
    """
    with open_stream(tar) as file:
        return sum(1 for _ in list_samples(file, tar, kinds=kinds, take=lambda *_: None))


def _name(tars: Sequence[str]) -> list[str]:
    """The end of each tar's path, as long as it takes to tell them apart."""
    commands = [tar for tar in tars if tar.startswith(PIPE)]
    if commands:
        raise ConfigError(
            "What a command prints has no name to be counted under",
            value=commands[0],
            allowed="the files that it reads",
            flag="--remote or --local",
        )
    paths = [path_of(tar).split("/") for tar in tars]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(
        "A tar is named twice",
        value=next(tar for tar in tars if tars.count(tar) > 1),
        allowed="each once",
        flag="--remote or --local",
    )
