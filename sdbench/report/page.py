"""Makes HTML pages of tables and plots.

A page needs no network and no other file: plots are data URIs, and the script that sorts and
filters is in the page. The template escapes every text.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.report.plots import Plot
from sdbench.report.tables import Table

RESULTS_TEMPLATE = "page.html.j2"
KINDS = ("measured", "quoted", "modelled")


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, a sentence on how to read the tables below it, and the tables."""

    heading: str
    help_text: str
    tables: Sequence[Table]


def format_page(
    sections: Sequence[Section],
    plots: Sequence[Plot],
    *,
    template: str = RESULTS_TEMPLATE,
    **values: Any,
) -> str:
    """Make a page.

    Args:
        sections: Shown above the plots.
        plots: The charts.
        template: File beside this one; all but that of the results extend it.
        **values: For the blocks of the template.

    Returns:
        The page as HTML.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pictures = [
        (plot.name, plot.title, base64.b64encode(plot.svg.encode()).decode()) for plot in plots
    ]
    page = environment.get_template(template)
    return page.render(sections=sections, pictures=pictures, kinds=KINDS, **values) + "\n"
