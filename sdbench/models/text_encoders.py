"""`class_of_text_encoder`: text encoders whose weights are named as in the hub's folders.

transformers 5.6 dropped the level `text_model.` from the names of a CLIPTextModel, and folders,
LoRA files and checkpoints hold weights by name. Here the model itself has the hub's names, with any
transformers, so that only the names in a folder or file of others are translated.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers.models.clip import modeling_clip


def class_of_text_encoder(name: str) -> Any:
    """The class of transformers with this name, or one that adds the level of the hub's names."""
    has_level = hasattr(modeling_clip, "CLIPTextTransformer")  # transformers before 5.6
    if name == "CLIPTextModel" and not has_level:
        return CLIPTextModel
    return getattr(transformers, name)


class CLIPTextModel(modeling_clip.CLIPPreTrainedModel):
    """transformers' CLIPTextModel of 5.6 and later, as the module `text_model`."""

    # Saved configurations, and pipelines of diffusers, name module and class.
    __module__ = modeling_clip.__name__
    config_class = transformers.CLIPTextConfig

    def __init__(self, config: transformers.CLIPTextConfig) -> None:
        super().__init__(config)
        self.text_model = transformers.CLIPTextModel._from_config(config)
        self.post_init()

    @classmethod
    def is_custom_code(cls) -> bool:
        """True: transformers does not rename weights here as for its own class of this name."""
        return True

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.text_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.text_model.set_input_embeddings(value)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Encode as transformers' CLIPTextModel."""
        return self.text_model(*args, **options)
