"""Style, layout and files of charts.

Charts have colours that colour-blind readers can tell apart, units on every axis, and the sources
of their figures below. The files have no date, so that the same records give the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.base.escape import for_plot
from sdbench.base.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design" (2008), without their yellow, which is faint on white.
SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# Paul Tol, "Colour schemes" (SRON technical note, 2021), the scheme "muted" with its pale grey, and
# a dark one.
PART_COLOURS = (
    *("#CC6677", "#DDCC77", "#332288", "#88CCEE", "#117733", "#44AA99"),
    *("#882255", "#555555", "#999933", "#AA4499", "#BBBBBB"),
)
MARKERS = {"measured": "D", "quoted": "o"}
# As wide as a phone: 5.2 x 72 = 374 pixels, so that a label of 8 points has 8 pixels.
WIDTH_INCHES = 5.2
# Ids such as patch_1 and matplotlib.axis_2, which several charts on one page would share.
NUMBERED_ID = re.compile(r' id="(?:matplotlib\.)?[A-Za-z0-9]+_[0-9]+"')
METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
DOTS_PER_INCH = 130
# Characters in a line of a title.
MAX_TITLE = 62
STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    # A fixed place for the title: finding one takes a seventh of the drawing time.
    "axes.titley": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    # Text stays text: it can be searched, read aloud and is a tenth of the size of its outlines.
    "svg.fonttype": "none",
    # Salt of the ids in the SVG, which are random otherwise.
    "svg.hashsalt": "sdbench",
}


@dataclasses.dataclass(frozen=True)
class Plot:
    """A rendered chart, or one panel of a chart.

    Attributes:
        chart: Name of the chart.
        index: Index of the panel, from 0.
        title: Also the alternative text of the picture.
        notes: Text that the page shows at each point of a line or at a bar, by its id in the SVG,
            which begins with the name.
    """

    chart: str
    index: int
    title: str
    svg: str
    png: bytes
    notes: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """File name without extension."""
        return name_panel(self.chart, self.index)

    @property
    def svg_element(self) -> str:
        """The chart as an element of an HTML page, without the ids that matplotlib numbers."""
        element = self.svg[self.svg.index("<svg") :]
        return NUMBERED_ID.sub("", METADATA.sub("", element))


@contextlib.contextmanager
def plain_style() -> Iterator[None]:
    """Draw with matplotlib's defaults and `STYLE`, whatever the user's own settings are."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        # A character that the font lacks is a box in the PNG; in the SVG the viewer chooses a font.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        yield


def make_figure(
    heights_inches: Sequence[float],
    *,
    sources: str,
    above: float = 0.4,
    left: float = 0.85,
    gap: float = 0.85,
    below: float = 0.55,
) -> tuple[Figure, list[Axes]]:
    """Make axes one below the other, with up to three lines of sources under them.

    All sizes are in inches. `above` is the space for a title or a legend, `left` and `below` for
    labels of the axes.
    """
    from matplotlib.figure import Figure

    lines = textwrap.wrap(sources, 82, max_lines=3, placeholder=" ...")
    right = 0.2
    below += 0.1 + 0.14 * len(lines)
    total = above + sum(heights_inches) + gap * (len(heights_inches) - 1) + below
    figure = Figure(figsize=(WIDTH_INCHES, total), dpi=DOTS_PER_INCH)
    axes, top = [], total - above
    for height in heights_inches:
        width = (WIDTH_INCHES - left - right) / WIDTH_INCHES
        place = (left / WIDTH_INCHES, (top - height) / total, width, height / total)
        axes.append(figure.add_axes(place))
        top -= height + gap
    text = "\n".join(for_plot(line) for line in lines)
    figure.text(0.01, 0.06 / total, text, fontsize=7.5, color="#444444", va="bottom")
    return figure, axes


def set_title(ax: Axes, text: str, **style: Any) -> None:
    """Give axes a title of at most two lines."""
    lines = textwrap.wrap(for_plot(text), MAX_TITLE, max_lines=2, placeholder=" ...")
    ax.set_title("\n".join(lines), **style)


def shorten(text: Any, *, length: int = 60) -> str:
    """Shorten a text to a label of at most `length` characters."""
    label = " ".join(str(text).split())
    return for_plot(label if len(label) <= length else f"{label[: length - 3]}...")


def name_panel(chart: str, index: int) -> str:
    """The name of a panel, counted from 0; the first has the name of its chart."""
    return f"{chart}-{index + 1}" if index else chart


def render(
    figure: Figure,
    *,
    chart: str,
    title: str,
    index: int = 0,
    notes: Mapping[str, Sequence[str]] | None = None,
) -> Plot:
    """Render a figure as SVG and PNG, without the date and the version of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    svg, png = io.StringIO(), io.BytesIO()
    metadata = {"Title": title, "Date": None, "Creator": None, "Type": None, "Format": None}
    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    FigureCanvasSVG(figure).print_svg(svg, metadata=metadata)  # last: it sets the figure to 72 dpi
    return Plot(chart, index, title, svg.getvalue(), png.getvalue(), notes or {})


def save(plots: Iterable[Plot], folder: Path, *, charts: Sequence[str]) -> None:
    """Write the plots. Delete files of panels that were not drawn; `charts` names all charts."""
    folder.mkdir(exist_ok=True)
    pictures = {}
    for plot in plots:
        pictures |= {f"{plot.name}.svg": plot.svg, f"{plot.name}.png": plot.png}
    for name, picture in pictures.items():
        replace_file(folder / name, picture)
    possible = re.compile(rf"({'|'.join(map(re.escape, charts))})(-[0-9]+)?\.(svg|png)")
    for path in folder.iterdir():
        if possible.fullmatch(path.name) and path.name not in pictures:
            path.unlink()
