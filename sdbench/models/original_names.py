"""`names_in_unet` and `names_by_table`: layers by their names in the code of a model's authors.

Weights and LoRA of others carry these names; diffusers, and so this suite, has names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# Layers by the original name; several layers of ours hold the rows of one, from the first on.
OriginalNames = dict[str, tuple[str, ...]]
# Rows of original names and ours, several with spaces between them. The keys are what the names of
# a group begin with; `*` is the number of a block.
NameTable = Mapping[tuple[str, str], Mapping[str, str]]

# Of a U-Net: layers beside its blocks, and layers in a block with convolutions.
BESIDE_BLOCKS = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
IN_RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}


def names_in_unet(layers: Iterable[str]) -> OriginalNames:
    """The layers of a U-Net, by their names in the code of Stable Diffusion 1, 2 and XL.

    There the blocks of all levels are numbered together, and what changes the size of pictures is
    a block (on the way down) or part of the last one of its level (on the way up).
    """
    layers = tuple(layers)
    # Each level has one block more on the way up, and the change of size on the way down.
    resnets = (re.match(r"up_blocks\.0\.resnets\.(\d+)\.", layer) for layer in layers)
    level_size = 1 + max(int(found[1]) for found in resnets if found)
    with_attention = {layer.partition(".attentions.")[0] for layer in layers}
    names = {}
    for layer in layers:
        first, *place = layer.split(".")
        if layer in BESIDE_BLOCKS:
            names[BESIDE_BLOCKS[layer]] = (layer,)
            continue
        if first == "mid_block":
            kind, number, *inner = place
            block = f"middle_block.{1 if kind == 'attentions' else 2 * int(number)}"
        else:
            level, kind, number, *inner = place
            is_down = first == "down_blocks"
            within = int(number) if kind in ("resnets", "attentions") else level_size - 1
            position = int(level) * level_size + is_down + within
            part = 1 if kind == "attentions" else 0
            if kind == "upsamplers":
                part = 2 if f"{first}.{level}" in with_attention else 1
            elif kind == "downsamplers":
                inner = ["op"]
            block = f"{'input' if is_down else 'output'}_blocks.{position}.{part}"
        rest = ".".join(inner)
        names[f"{block}.{IN_RESNET[rest] if kind == 'resnets' else rest}"] = (layer,)
    return names


def names_by_table(table: NameTable, layers: Iterable[str]) -> OriginalNames:
    """The layers of a transformer by the original names of a table, as far as it has them."""
    known = set(layers)
    numbers = {number for layer in known for number in re.findall(r"\d+", layer)}
    names = {}
    for (original_group, own_group), rows in table.items():
        for number in numbers if "*" in own_group else {""}:
            for original, own in rows.items():
                found = tuple(f"{own_group}{name}".replace("*", number) for name in own.split())
                if known.issuperset(found):
                    names[f"{original_group}{original}".replace("*", number)] = found
    return names
