"""Makes the tables, plots and pages of a results folder from records and from quoted figures.

It makes all of results/ but runs/, quoted/, modelled/, comparisons/ and the text around the
markers. The same files give the same bytes: no date, no name of a machine and no order of the file
system gets in.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.record.row import COLUMNS, format_csv, make_row
from sdbench.record.store import BENCHMARK, OK, kind_of, replace_file
from sdbench.report import feed_table, loss_band, result_page, run_plots, throughput_plots
from sdbench.report.ladder import read_configurations
from sdbench.report.ladder_pairs import make_pair_tables
from sdbench.report.ladder_tables import make_ladder_tables, make_pending_tables
from sdbench.report.markers import BEGIN, END, fill_block
from sdbench.report.page import Section, format_page
from sdbench.report.plots import Plot, plain_style, save
from sdbench.report.quoted import load_figures, make_other_tables, make_seed_table
from sdbench.report.records import read_record
from sdbench.report.tables import Table, to_captioned_markdown, to_markdown
from sdbench.report.throughput_table import make_tables

RUNS, NUMERICS = "runs", "numerics"
LADDER_PAGE = "ladder.md"
NOT_MEASURED = "not-measured"
NO_RUNS = "No runs yet."
PLOT_NAMES = (*throughput_plots.NAMES, *run_plots.NAMES)
EPILOG = """\
examples:
  python -m sdbench report
  python -m sdbench report --results my-results
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Make the tables, plots and pages of a results folder again.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        The exit code.

    Raises:
        ConfigError: For a folder without a README.md that has places for tables, and for a record
            or a table that cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sdbench report",
        description="Make tables, plots and a page from records and from other people's figures.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="(default: results)")
    arguments = parser.parse_args(argv)
    print(rebuild(arguments.results))
    return 0


def rebuild(results: Path) -> str:
    """Make everything in a results folder that is made from something else in it.

    Args:
        results: Holds README.md and, as far as there are any, runs/, quoted/, modelled/ and pages/.

    Returns:
        What was made, and which plots have no data, for a person.

    Raises:
        ConfigError: If a file is not what it should be. Nothing is written then.
    """
    content = _Content.load(results)
    plots = content.draw_plots(results / RUNS)
    tables = content.make_throughput_tables()
    data_table = feed_table.make_data_table(content.loaded)
    ladder = content.make_ladder()
    page = format_page(_make_sections(content, tables, data_table, ladder), plots)

    # Everything is made before anything is written.
    readme = _read_text(results / "README.md")
    for name, text in (
        ("throughput", _format_throughput(tables, plots)),
        ("data", to_markdown(data_table) if data_table.rows else NO_RUNS),
    ):
        readme = _fill(readme, name, text, path=results / "README.md")
    texts = {
        results / "README.md": readme,
        results / "throughput.csv": content.format_throughput_csv(),
        results / "data.csv": feed_table.format_csv(content.loaded),
        results / "index.html": page,
    }
    ladder_page = results / LADDER_PAGE
    if ladder_page.exists():
        texts[ladder_page] = _read_text(ladder_page)
        for name, group in ladder.items():
            text = to_captioned_markdown(group) if group else NO_RUNS
            texts[ladder_page] = _fill(texts[ladder_page], name, text, path=ladder_page)
    for path in sorted((results / "pages").glob("*.md")):
        texts[path] = result_page.fill(_read_text(path), content.ended_well, path=path)

    for path, text in texts.items():
        replace_file(path, text)
    save(plots, results / "plots", names=PLOT_NAMES)
    return _describe(content, plots, results)


@dataclasses.dataclass(frozen=True)
class _Content:
    """The contents of a results folder that the rest is made from.

    Attributes:
        trained: Records of training runs.
        compared: Training runs whose losses are compared, and not their speed.
        loaded: Records of runs that loaded or encoded data.
        quoted: Rows of other people's tables, by file.
        modelled: Rows of predicted tables, by file.
    """

    trained: list[dict[str, Any]]
    compared: list[loss_band.LossRun]
    loaded: list[dict[str, Any]]
    quoted: dict[str, list[dict[str, Any]]]
    modelled: dict[str, list[dict[str, Any]]]

    @classmethod
    def load(cls, results: Path) -> _Content:
        records = [_load_record(path) for path in sorted(results.glob(f"{RUNS}/*/record.json"))]
        return cls(
            trained=[record for record in records if kind_of(record) == BENCHMARK],
            compared=load_losses(results),
            loaded=[record for record in records if kind_of(record) != BENCHMARK],
            quoted=load_figures(results / "quoted", kind="quoted"),
            modelled=load_figures(results / "modelled", kind="modelled"),
        )

    @property
    def ended_well(self) -> list[dict[str, Any]]:
        """The training runs that have a figure."""
        return [record for record in self.trained if record["status"] == OK]

    @property
    def figures(self) -> list[dict[str, Any]]:
        """Quoted and modelled rows that have images/s."""
        tables = (*self.quoted.values(), *self.modelled.values())
        return [row for rows in tables for row in rows if row.get("images_per_second") is not None]

    def make_throughput_tables(self) -> list[Table]:
        """One table per kind of work, and the seed's own."""
        seed_table = make_seed_table(self.quoted, map(make_row, self.ended_well))
        tables = make_tables(self.ended_well, self.figures)
        return tables if seed_table is None else [*tables, seed_table]

    def make_ladder(self) -> dict[str, list[Table]]:
        """Tables of the speed-ups by the names of their places; those without rows are left out."""
        configurations = read_configurations(self.ended_well)
        pairs = make_pair_tables(configurations)
        return {
            "ladder": make_ladder_tables(configurations),
            NOT_MEASURED: make_pending_tables(configurations),
            **{name: [table] if table.rows else [] for name, table in pairs.items()},
            "loss-band": loss_band.make_tables(loss_band.find_bands(self.compared)),
        }

    def draw_plots(self, runs: Path) -> list[Plot]:
        """Every plot that has data."""
        rows = [*map(make_row, self.ended_well), *self.figures]
        with plain_style():
            drawn = (
                throughput_plots.draw_micro_batch(rows),
                *throughput_plots.draw_scaling(rows),
                run_plots.draw_breakdown(self.ended_well),
                run_plots.draw_step_times(self.ended_well, runs),
            )
        return [plot for plot in drawn if plot is not None]

    def format_throughput_csv(self) -> str:
        """One wide row per run and per figure of others, of any status, unrounded."""
        figures = self.figures
        columns = dict.fromkeys((*COLUMNS, *(name for row in figures for name in row)))
        return format_csv([*map(make_row, self.trained), *figures], columns=tuple(columns))


def load_losses(results: Path) -> list[loss_band.LossRun]:
    """Runs whose losses are compared.

    Args:
        results: The results folder.

    Raises:
        ConfigError: A record, or the losses of a run, cannot be read.
    """
    return [
        loss_band.read_run(_load_record(path), path.parent)
        for path in sorted(results.glob(f"{NUMERICS}/*/record.json"))
    ]


def _load_record(path: Path) -> dict[str, Any]:
    record = read_record(path, flag="--results")
    if record["run_id"] != path.parent.name:  # a copy would count as one more run
        raise ConfigError(
            "a published record is in the folder of another run",
            value=str(path),
            allowed=f"the folder {record['run_id']}",
            flag="--results",
        )
    return record


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a text with places for tables cannot be read ({error})",
            value=str(path),
            allowed="a text file in UTF-8",
            flag="--results",
        ) from None


def _fill(text: str, name: str, content: str, *, path: Path) -> str:
    """Put a generated part into its place."""
    return fill_block(text, content, begin=BEGIN.format(name), end=END.format(name), path=path)


def _format_throughput(tables: Sequence[Table], plots: Sequence[Plot]) -> str:
    if not tables:
        return "No figures yet."
    pictures = [f"**{plot.title}**\n\n![{plot.title}](plots/{plot.name}.png)" for plot in plots]
    return "\n\n".join([to_captioned_markdown(tables), *pictures])


def _make_sections(
    content: _Content,
    tables: list[Table],
    data_table: Table,
    ladder: dict[str, list[Table]],
) -> list[Section]:
    sections = [
        Section(
            "Throughput",
            "Images/s over all devices. Three or more runs of one configuration show their median "
            "and a 95 % interval between runs, fewer the interval within each run. Figures with "
            "the encoders in the step are never in one table with those on latents.",
            tables,
        ),
        Section(
            "Speed-ups",
            "What each speed-up gains, alone and on top of those above it; what Composer, the EMA, "
            "micro-batches and ranks cost or gain; whether the losses stay those of fp32.",
            [table for name, group in ladder.items() if name != NOT_MEASURED for table in group],
        ),
        Section(
            "Data",
            "How fast a data source alone was read, without a model, and how fast data sets were "
            "encoded beforehand.",
            [data_table] if data_table.rows else [],
        ),
        Section(
            "Other figures of other people",
            "Days, costs and rates per GPU as their authors gave them.",
            make_other_tables(content.quoted),
        ),
    ]
    return [section for section in sections if section.tables]


def _describe(content: _Content, plots: Sequence[Plot], results: Path) -> str:
    lines = [
        f"made README.md, throughput.csv, data.csv, index.html and {len(plots)} plots in {results} "
        f"from {len(content.trained) + len(content.loaded)} runs and {len(content.figures)} "
        "figures of others"
    ]
    missing = sorted(set(PLOT_NAMES) - {plot.name for plot in plots})
    if missing:
        lines.append(f"not drawn, for want of data: {', '.join(missing)}")
    return "\n".join(lines)
