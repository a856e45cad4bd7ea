"""Which pairs of image and caption does a folder or a set of tar files hold?

Used by the conversion to MDS; nothing here decodes an image.
"""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sdbench.errors import ConfigError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
CAPTIONS_FILE = "captions.csv"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One image and its caption as they were found.

    Attributes:
        name: File name or tar key, for messages.
        image: The image file's bytes; None when there is a caption without an image.
        caption: The caption without surrounding white space; None when there is none.
    """

    name: str
    image: bytes | None
    caption: str | None


def find_tars(source: str) -> list[Path]:
    """The tar files that `source` means: one tar, a folder of tars, or a brace expression.

    Raises:
        ConfigError: One of them does not exist, or there is none.
    """
    if Path(source).is_dir():
        tars = sorted(Path(source).glob("*.tar"))
    else:
        from braceexpand import braceexpand

        tars = [Path(name) for name in braceexpand(source)]
    missing = [str(path) for path in tars if not path.is_file()]
    if missing or not tars:
        raise ConfigError(
            "No such tar file" if missing else "The folder holds no tar file",
            value=missing[0] if missing else source,
            allowed="a tar, a folder of tars, or a quoted pattern like 'data/{00000..00009}.tar'",
            flag="SOURCE",
        )
    return tars


def count_tar_images(tars: list[Path]) -> int:
    """Count the samples with an image, reading nothing but the tars' headers."""
    num_images = 0
    for path in tars:
        with tarfile.open(path) as tar:
            keys = {_split_key(member.name) for member in tar if member.isfile()}
        num_images += len({key for key, extension in keys if extension in IMAGE_EXTENSIONS})
    return num_images


def read_tars(tars: list[Path]) -> Iterator[Pair]:
    """Yield the samples of WebDataset tars, in order.

    A caption comes from the member ``txt``, else from the field ``caption`` of ``json``.
    """
    import webdataset

    samples = webdataset.WebDataset(
        [str(path) for path in tars], shardshuffle=False, empty_check=False
    )
    for sample in samples:
        images = [sample[name] for name in IMAGE_EXTENSIONS if name in sample]
        text = sample["txt"].decode("utf-8") if "txt" in sample else None
        if text is None and "json" in sample:
            text = json.loads(sample["json"]).get("caption")
        yield Pair(
            name=f"{sample['__url__']}:{sample['__key__']}",
            image=images[0] if images else None,
            caption=_clean(text),
        )


def list_folder(folder: Path) -> list[tuple[Path, str | None]]:
    """List a folder's images with their captions, sorted by path, sub-folders included.

    ``captions.csv`` (columns file, caption; paths relative to the folder) decides when it is
    there; else the caption of ``a.jpg`` is the text of ``a.txt``, None without one.

    Raises:
        ConfigError: There is no such folder, or the CSV lacks a column.
    """
    if not folder.is_dir():
        raise ConfigError(
            "No such source", value=str(folder), allowed="a folder or tar files", flag="SOURCE"
        )
    table = folder / CAPTIONS_FILE
    if table.is_file():
        return _read_captions(table)
    images = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower().lstrip(".") in IMAGE_EXTENSIONS and path.is_file()
    )
    texts = [path.with_suffix(".txt") for path in images]
    return [
        (image, _clean(text.read_text(encoding="utf-8")) if text.is_file() else None)
        for image, text in zip(images, texts, strict=True)
    ]


def read_folder(folder: Path) -> Iterator[Pair]:
    """Yield the images and captions of `list_folder`."""
    for path, caption in list_folder(folder):
        image = path.read_bytes() if path.is_file() else None
        yield Pair(name=str(path), image=image, caption=caption)


def _read_captions(table: Path) -> list[tuple[Path, str | None]]:
    with table.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        columns = reader.fieldnames or []
        if not {"file", "caption"} <= set(columns):
            raise ConfigError(
                f"{table} lacks a column",
                value=", ".join(columns),
                allowed="a header line with the columns file and caption",
                flag="SOURCE",
            )
        return [(table.parent / row["file"], _clean(row["caption"])) for row in reader]


def _clean(text: str | None) -> str | None:
    """A caption without surrounding white space; None when nothing is left."""
    return (text or "").strip() or None


def _split_key(name: str) -> tuple[str, str]:
    """Split a member's path as WebDataset does: at the first dot of the file name."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()
