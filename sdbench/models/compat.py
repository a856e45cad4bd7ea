"""`change_class`: changes the class of an existing module of torch or diffusers."""

from __future__ import annotations

from torch import nn


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module another `forward` in place; its weights, their names and its hooks stay.

    `kind` is derived from the module's class, without a constructor, which would not be run.
    """
    assert kind.__bases__ == (type(module),) and kind.__init__ is type(module).__init__
    module.__class__ = kind
