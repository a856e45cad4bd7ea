"""Makes HTML pages of tables and charts.

A page needs no network and no other file: charts are SVG in the page, and so is the script that
searches, sorts and compares rows and tells what a point of a chart is. The template escapes every
text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.report.plots import Plot
from sdbench.report.tables import Fold, Table

RESULTS_TEMPLATE = "page.html.j2"
KINDS = ("measured", "quoted", "modelled")


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        heading: Its heading.
        help_text: A sentence on how to read it.
        tables: Its tables.
        folds: Tables below them that a reader opens.
        plots: Charts below these.
    """

    heading: str
    help_text: str
    tables: Sequence[Table] = ()
    folds: Sequence[Fold] = ()
    plots: Sequence[Plot] = ()

    @property
    def has_content(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.tables or self.folds or self.plots)


def format_page(
    sections: Sequence[Section], *, template: str = RESULTS_TEMPLATE, **values: Any
) -> str:
    """Make a page.

    Args:
        sections: Its parts, in order.
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
    notes = {
        gid: texts
        for section in sections
        for plot in section.plots
        for gid, texts in plot.notes.items()
    }
    page = environment.get_template(template)
    return page.render(sections=sections, notes=notes, kinds=KINDS, **values) + "\n"
