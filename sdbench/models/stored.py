"""The weights in safetensors files by name, and how they differ from those that a model has.

Releases of the libraries, and other programs, name some weights differently: `NAMINGS` has the
names that are read. torch is not imported here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.base.outside import read_json_object

Shape = tuple[int, ...]
# Types of safetensors that are numbers by themselves; integers are so with scales beside them.
FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
# So many names of a kind are in an error.
NUM_NAMED = 2


@dataclass(frozen=True)
class Naming:
    """The names that files may have for the weights of a class.

    Attributes:
        renamed: What turns another name into the class's own, by `re.sub`.
        unread: What else a file may hold, as regular expressions.
    """

    renamed: Mapping[str, str]
    unread: tuple[str, ...] = ()

    def own_name(self, name: str) -> str:
        """The class's own name of a weight."""
        for other, own in self.renamed.items():
            name = re.sub(other, own, name)
        return name

    def is_read(self, name: str) -> bool:
        """Whether the class has a use for a weight, by its own name for it."""
        return not any(re.search(pattern, name) for pattern in self.unread)


CLIP_NAMING = Naming(
    # transformers 5.6 and later save a CLIPTextModel without this level of the hub's names.
    renamed={r"^(embeddings|encoder\.layers|final_layer_norm)\.": r"text_model.\1."},
    # 0, 1, 2, ..., which transformers before 4.31 saved.
    unread=(r"^text_model\.embeddings\.position_ids$",),
)
NAMINGS = {
    "CLIPTextModel": CLIP_NAMING,
    "CLIPTextModelWithProjection": CLIP_NAMING,
    "T5EncoderModel": Naming(
        # One weight with two names, of which files have one or both.
        renamed={r"^encoder\.embed_tokens\.weight$": "shared.weight"},
        # The rest of a whole T5.
        unread=(r"^encoder\.embed_tokens\.weight$", r"^decoder\.", r"^lm_head\."),
    ),
    "AutoencoderKL": Naming(
        # diffusers' AttentionBlock, which its Attention has replaced.
        renamed={
            rf"(\.attentions\.\d+\.){other}\.": rf"\1{own}."
            for other, own in {
                "query": "to_q",
                "key": "to_k",
                "value": "to_v",
                "proj_attn": "to_out.0",
            }.items()
        }
    ),
}


class StoredWeight(NamedTuple):
    """A tensor in a file: its name there, its shape, and its type as safetensors calls it."""

    file: Path
    name: str
    shape: Shape
    dtype: str


def _weight_files(folder: Path, stem: str, *, flag: str) -> list[Path]:
    """The files with the weights of a part: one, or the shards that an index lists.

    A ConfigError refuses a folder without them, or with both, and names shards that are not there.
    """
    single, index = (folder / f"{stem}.safetensors{end}" for end in ("", ".index.json"))
    if single.is_file() and not index.is_file():
        return [single]
    if single.is_file():
        raise ConfigError(
            "the folder has weights in one file and an index of shards, which may differ",
            value=str(folder),
            allowed=f"{single.name}, or {index.name} with its shards",
            flag=flag,
        )
    if not index.is_file():
        raise ConfigError(
            "the model folder has no safetensors weights, and other formats can carry code",
            value=str(folder),
            allowed=f"{single.name} or {index.name}",
            flag=flag,
        )
    try:
        names = sorted(set(read_json_object(index)["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("it lists no files beside it")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the index of the shards of weights cannot be read ({error})",
            value=str(index),
            allowed="the whole file: copy or download it again",
            flag=flag,
        ) from None
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ConfigError(
            f"{len(absent)} of {len(names)} shards of weights are not there: {_first(absent)}",
            value=str(folder),
            allowed=f"all shards that {index.name} lists: copy or download them again",
            flag=flag,
        )
    return [folder / name for name in names]


def read_headers(folder: Path, stem: str, *, flag: str) -> dict[str, StoredWeight]:
    """The weights in the files of a folder, by their names there; `stem` begins the files' names.

    A ConfigError names a file that is not there, damaged or cut off, as its header says how long it
    is, or that has a weight of another one.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, StoredWeight] = {}
    for file in _weight_files(folder, stem, flag=flag):
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118
                    tensor = opened.get_slice(name)
                    if name in found:
                        raise ConfigError(
                            f"two files of weights have {name}",
                            value=[found[name].file.name, file.name],
                            allowed="the shards of one model",
                            flag=flag,
                        )
                    found[name] = StoredWeight(
                        file, name, tuple(tensor.get_shape()), tensor.get_dtype()
                    )
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"a file of weights is damaged or cut off ({error})",
                value=str(file),
                allowed="the whole file: copy or download it again",
                flag=flag,
            ) from None
    return found


def by_own_names(stored: Mapping[str, StoredWeight], kind: str) -> dict[str, StoredWeight]:
    """Weights by the names of a class of `NAMINGS`, or of another one, without what it ignores."""
    naming = NAMINGS.get(kind, Naming({}))
    found = {}
    for name, one in stored.items():
        own = naming.own_name(name)
        found[name if own in stored else own] = one
    return {name: one for name, one in found.items() if naming.is_read(name)}


def compare_weights(
    expected: Mapping[str, Shape],
    there: Mapping[str, Shape],
    *,
    what: str,
    value: str,
    allowed: str,
    flag: str,
) -> None:
    """Raise a ConfigError unless weights are there with the names and shapes that a model has.

    `what` says, as a sentence without its end, that they are not those of the model.
    """
    missing = sorted(expected.keys() - there.keys())
    left_over = sorted(there.keys() - expected.keys())
    misshapen = [
        f"{name}, {list(there[name])} in place of {list(shape)}"
        for name, shape in expected.items()
        if there.get(name, shape) != shape
    ]
    if not (missing or left_over or misshapen):
        return
    if misshapen:
        reason = "they seem to be those of another model"
    elif not left_over:
        reason = "a part of them seems not to be there, such as a shard"
    elif Counter(map(expected.get, missing)) == Counter(map(there.get, left_over)):
        reason = "the shapes agree, so another version or program seems to have named them"
    elif missing:
        reason = "they seem to be those of another model"
    else:
        reason = "they seem to be those of a larger model"
    counts = {"missing": missing, "left over": left_over, "of another shape": misshapen}
    said = [f"{len(some)} {kind} ({_first(some)})" for kind, some in counts.items() if some]
    raise ConfigError(
        f"{what}: of {len(expected)} weights {', '.join(said)}; {reason}",
        value=value,
        allowed=allowed,
        flag=flag,
    )


def _first(names: list[str]) -> str:
    more = ["..."] if len(names) > NUM_NAMED else []
    return "; ".join(names[:NUM_NAMED] + more)
