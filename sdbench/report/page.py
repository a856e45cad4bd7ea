"""Makes HTML pages of tables and charts.

A page needs no network and no other file: it contains its charts as SVG, and the script that
searches, sorts and compares rows and describes the points of a chart. The template escapes every
text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.report.plots import MARKERS, Plot
from sdbench.report.tables import Fold, Table

# Of rows, which a reader may hide by their kind.
KINDS = (*MARKERS, "submitted", "predicted")


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page: a sentence on how to read it, tables, folded tables, charts and pictures.

    A picture is a caption and a data URI.
    """

    heading: str
    help_text: str
    tables: Sequence[Table] = ()
    folds: Sequence[Fold] = ()
    plots: Sequence[Plot] = ()
    pictures: Sequence[tuple[str, str]] = ()

    @property
    def has_content(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.tables or self.folds or self.plots or self.pictures)


def format_page(
    sections: Sequence[Section],
    *,
    gpus: Sequence[Mapping[str, Any]] = (),
    links: Sequence[tuple[str, str]] = (),
    **values: Any,
) -> str:
    """Render a page from the template beside this file, with values that it shows.

    Args:
        sections: The parts of the page.
        gpus: Rows of the question "which GPU?", which the page then begins with.
        links: Names and addresses of other pages.
        values: `made_from`, and the `name` of the page if it has one.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    notes: dict[str, Sequence[str]] = {}
    for plot in (plot for section in sections for plot in section.plots):
        notes |= plot.notes
    page = environment.get_template("page.html.j2")
    return (
        page.render(sections=sections, notes=notes, kinds=KINDS, gpus=gpus, links=links, **values)
        + "\n"
    )
