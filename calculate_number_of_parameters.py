"""Count the parameters of a model, and the trained ones."""

# PYTHON_ARGCOMPLETE_OK: a shell may start this to complete a command line.

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from sdbench.base.errors import ConfigError
from sdbench.base.stop import run_program, stoppable
from sdbench.settings.kinds import SWITCH
from sdbench.settings.request import parse
from sdbench.settings.setting import setting, shared
from sdbench.settings.training import ModelSettings

EPILOG = """examples:
  python calculate_number_of_parameters.py
  python calculate_number_of_parameters.py --model_name sd1-base
  python calculate_number_of_parameters.py --csv > parameters.csv
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountFlags:
    """Flags of this program."""

    model_name: str = shared(
        ModelSettings, "model_name", help="built-in architecture, diffusers folder or hub id"
    )
    csv: bool = setting(SWITCH, False, "print one row per sub-model and their total as CSV")


@stoppable
def main(argv: Sequence[str] | None = None) -> int:
    """Print the number of parameters of a model; returns 2 for a model that cannot be had."""
    try:
        flags = parse(CountFlags, argv, description=__doc__, epilog=EPILOG).config
        # Heavy imports come after the parser so that --help answers at once.
        from sdbench.models.architecture import resolve_architecture

        # Shapes are enough: no weights are downloaded.
        architecture = resolve_architecture(flags.model_name, random_weights=True)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from sdbench.models.components import count_parameters

    counts, denoiser = count_parameters(architecture), architecture.family.denoiser
    total, trainable = sum(counts.values()), counts[denoiser]
    if flags.csv:
        print("sub_model,total,trainable")
        for part, number in counts.items():
            print(f"{part},{number},{number if part == denoiser else 0}")
        print(f"total,{total},{trainable}")
    else:
        print(f"Model has {total / 1e6} M parameters and {trainable / 1e6} M trainable_params")
    return 0


if __name__ == "__main__":
    run_program(main)
