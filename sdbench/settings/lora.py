"""`LoraSettings`: training small matrices beside frozen weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.settings.kinds import POSITIVE, POSITIVE_NUMBER, Kind, one_of
from sdbench.settings.parallel import WHOLE_WEIGHTS
from sdbench.settings.setting import Beside, Rule, needs_package, setting
from sdbench.settings.training import ModelSettings


def _parse_names(value: Any) -> str:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(
        isinstance(name, str) and name.strip() for name in names
    ):
        raise ValueError
    return ",".join(name.strip() for name in names)


class LoraFile(NamedTuple):
    """LoRA to draw with; weight 1 applies it as trained."""

    path: str
    weight: float = 1.0

    @property
    def files(self) -> list[Path]:
        """The file, and if it is there the file of PEFT beside it, which has alpha."""
        places = (Path(self.path), Path(self.path).with_name("adapter_config.json"))
        return [places[0], *filter(Path.is_file, places[1:])]


def _parse_file(value: Any) -> LoraFile:
    if not isinstance(value, str) or not value:
        raise ValueError
    path, _, weight = value.rpartition(":")
    try:
        share = float(weight)
    except ValueError:  # a name with a colon in it, or none
        return LoraFile(value)
    if not path or not math.isfinite(share):
        raise ValueError
    return LoraFile(path, share)


LORA_FILE = Kind("FILE, or FILE:WEIGHT with a number", _parse_file, "FILE[:WEIGHT]")
NAMES = Kind("names with commas between them", _parse_names, "NAME,...")
LOW_BIT = ("int8", "nf4")
WITH_LORA = Beside(("lora_rank",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """LoRA in place of training all weights."""

    GROUP = ModelSettings.GROUP
    IDENTIFIES = True

    lora_rank: int | None = setting(
        POSITIVE,
        None,
        "train LoRA of this rank in fp32 and freeze the weights (default: train the weights)",
    )
    lora_alpha: float | None = setting(
        POSITIVE_NUMBER,
        None,
        "alpha: LoRA is scaled by alpha / rank (default: the rank, a factor of 1)",
        acts_beside=(WITH_LORA,),
    )
    frozen_bits: str = setting(
        one_of("same", *LOW_BIT),
        "same",
        "numbers of the frozen linear layers of the U-Net or transformer: int8, 8 bits with a "
        "scale for each row; nf4, 4 bits as in QLoRA; same: those of --precision. The finished "
        "LoRA can be used with any of them",
        acts_beside=(WITH_LORA,),
        rules=(
            needs_package(LOW_BIT, "torchao"),
            Rule(
                LOW_BIT,
                lambda s: s.config.sharding in WHOLE_WEIGHTS,
                "weights of few bits are not sharded by FSDP",
                others=("sharding",),
            ),
            Rule(
                LOW_BIT,
                lambda s: getattr(s.config, "init_from", None) is None,
                "weights of another run are not brought to few bits",
                allowed="same, or --model_name with the export of that run",
                others=("init_from",),
            ),
        ),
    )
    # As in diffusers, examples/dreambooth/train_dreambooth_lora.py.
    lora_layers: str = setting(
        NAMES,
        "to_q,to_k,to_v,to_out.0",
        "linear layers of the U-Net or transformer that get LoRA: full names, or the ends of names "
        "after a dot",
        acts_beside=(WITH_LORA,),
    )
    lora_text_encoder_layers: str = setting(
        NAMES,
        "q_proj,k_proj,v_proj,out_proj",
        "the same for the text encoder (--train_text_encoder)",
        acts_beside=(WITH_LORA, Beside(("train_text_encoder",))),
    )
