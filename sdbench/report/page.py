"""One HTML page of all tables and plots.

The page needs no network and no other file: plots are data URIs, the script that sorts and filters
is a few lines inside it. The template escapes every text.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sdbench.report.plots import Plot
from sdbench.report.tables import Table

TEMPLATE = Path(__file__).with_name("page.html.j2")
KINDS = ("measured", "quoted", "modelled")


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, a sentence on how to read what is below it, and tables."""

    heading: str
    help_text: str
    tables: Sequence[Table]


def format_page(sections: Sequence[Section], plots: Sequence[Plot]) -> str:
    """Fill the template.

    Args:
        sections: Shown above the plots.
        plots: Charts, drawn.

    Returns:
        The page as HTML.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    pictures = [
        (plot.name, plot.title, base64.b64encode(plot.svg.encode()).decode()) for plot in plots
    ]
    return template.render(sections=sections, pictures=pictures, kinds=KINDS) + "\n"
