"""Count the parameters of a model, and those of them that are trained."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence

EPILOG = """examples:
  python calculate_number_of_parameters.py
  python calculate_number_of_parameters.py --model_name sd1-base
  python calculate_number_of_parameters.py --csv > parameters.csv
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the number of parameters of a model.

    Args:
        argv: Command-line arguments without the program's name; None takes the process's own.

    Returns:
        The exit code: 0, or 2 for a model that cannot be had.
    """
    arguments = _parse(argv)
    # Heavy imports come after the parser so that --help answers at once.
    from sdbench.base.errors import ConfigError
    from sdbench.models.architecture import resolve_architecture

    try:
        architecture, note = resolve_architecture(arguments.model_name)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if note is not None:
        print(note, file=sys.stderr)
    from sdbench.models.parameters import ParameterCount, count_parameters

    rows = count_parameters(architecture)
    total = ParameterCount(
        "total", sum(row.total for row in rows), sum(row.trainable for row in rows)
    )
    if arguments.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(ParameterCount._fields)
        writer.writerows([*rows, total])
    else:
        print(
            f"Model has {total.total / 1e6} M parameters and "
            f"{total.trainable / 1e6} M trainable_params"
        )
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model_name",
        default="sd2-base",
        help="built-in architecture, diffusers folder or hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--csv", action="store_true", help="print one row per sub-model and their total as CSV"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
