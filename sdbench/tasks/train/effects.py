"""Whether what the user asks for has an effect."""

from __future__ import annotations

from sdbench.base.errors import ConfigError
from sdbench.settings.recipe import TrainConfig
from sdbench.settings.request import Request
from sdbench.settings.setting import Setting, declarations


def check_effects(request: Request[TrainConfig]) -> None:
    """Check that each setting that the user gave has beside it what it takes to have an effect.

    Raises:
        ConfigError: One of them changes nothing.
    """
    settings = declarations(TrainConfig)
    for name, declared in settings.items():
        others = [settings[other] for other in declared.acts_beside]
        acts = any(getattr(request.config, other.name) != other.default for other in others)
        if others and not acts and _is_asked_for(request, declared):
            raise ConfigError(
                f"{declared.flag} has no effect",
                value=getattr(request.config, name),
                allowed=f"only with {' or '.join(map(_describe_choice, others))}",
                flag=" or ".join(one.flag for one in (declared, *others)),
            )


def _is_asked_for(request: Request[TrainConfig], declared: Setting) -> bool:
    """Whether the user wants what a setting does, to judge by where its value comes from.

    A file has more than that: what --print_config has written, the keys of another program, and
    what belongs to something that a flag switches off.
    """
    name = declared.name
    if request.origin[name] != "file":
        return request.origin[name] == "flag"
    is_print_outs = bool(declared.presets) or getattr(request.config, name) == declared.default
    is_switched_off = any(request.origin[other] == "flag" for other in declared.acts_beside)
    return not (is_print_outs or is_switched_off or name in request.translation.keys)


def _describe_choice(other: Setting) -> str:
    """A value of a setting beside which another one acts."""
    if other.default in (None, False):
        return other.flag
    return f"another {other.flag} than {other.default}"
