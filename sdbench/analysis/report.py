"""Makes the tables, plots and pages of a results folder from records and from quoted figures.

The same files give the same bytes: the output has no date and no host name, and does not depend on
the order of files.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sdbench.analysis import feed_table, throughput_plots, training_times
from sdbench.analysis.ladder import read_configurations
from sdbench.analysis.ladder_tables import make_ladder_tables, make_pair_tables
from sdbench.analysis.quoted import fold_by_source, load_figures, make_seed_table, make_target_table
from sdbench.analysis.run_page import make_run_page
from sdbench.analysis.throughput_table import make_headline_table, make_tables
from sdbench.analysis.version_table import make_version_table
from sdbench.analysis.which_gpu import make_gpu_rows, read_extras
from sdbench.base.errors import EXIT_FAILED, EXIT_OK, ConfigError
from sdbench.base.escape import for_markdown
from sdbench.base.files import refused_unless_read, refused_unless_written, replace_file
from sdbench.base.outside import read_text
from sdbench.base.units import counted
from sdbench.record.configuration import group
from sdbench.record.row import FEED_COLUMNS, RUN_COLUMNS, format_csv, make_feed_row, make_row
from sdbench.record.store import BENCHMARK, OK, RECORD_NAME, TRAIN, kind_of
from sdbench.report import run_plots
from sdbench.report.figures import write_out
from sdbench.report.markers import BEGIN, END, fill_blocks
from sdbench.report.page import Section, format_page
from sdbench.report.plots import plain_style, save
from sdbench.report.runs import name_runs, read_record, read_time, use_each
from sdbench.report.tables import Table, to_captioned_markdown, to_folded_markdown
from sdbench.results.submissions import load_submissions
from sdbench.settings.kinds import PATH
from sdbench.settings.request import parse
from sdbench.settings.setting import setting

# Rows of the tables of a folder, by table.
Figures = Mapping[str, Sequence[dict[str, Any]]]
RUNS = "runs"
README, LADDER_PAGE = "README.md", "ladder.md"
PAGE_NAME = "report.html"
NO_RUNS = "No runs yet."
COMPARISON, HEADLINES, TARGETS, OTHERS = "comparison", "headlines", "targets", "others"
MEASURED, TIMES, DATA = "measured", "training-times", "data"
SPEED_UPS, VERSIONS = "speed-ups", "versions"
# In the order of the page: the heading of each part, how to read it, and its charts.
SECTIONS: dict[str, tuple[str, str, Sequence[str]]] = {
    COMPARISON: (
        "A100 against H100",
        "Eight GPUs of one machine, Stable Diffusion 2 at 512 px, global batch 2048, images/s over "
        "all eight: the figures of AWS (2024), each of one run, and their ratio.",
        (throughput_plots.MICRO_BATCH,),
    ),
    SPEED_UPS: (
        "Speed-ups",
        "What each speed-up gains, alone and on top of those above it; what Composer, the EMA, "
        "micro-batches and ranks cost or gain.",
        (),
    ),
    HEADLINES: (
        "Best of each machine",
        "What was measured here, or by whom a row names. Of the configurations of a machine, a "
        "model and a kind of work, the one whose 95 % interval begins highest. A configuration "
        "without a flag goes before one with a flag, then one whose interval begins above half of "
        "the median, then one with an interval between runs.",
        (),
    ),
    TARGETS: (
        "Which GPU for Flux.1",
        "Runs until a validation loss is reached: MLPerf's of Flux.1 schnell, from random weights "
        "to 0.586, the fastest GPU first. Images/s are those of training alone, the minutes those "
        "of the whole run with its validation. TFLOP/s: images/s times the arithmetic of a trained "
        "image, whatever the precision it was computed in.",
        (),
    ),
    OTHERS: (
        "Figures of others",
        "As their authors gave them; open a source to see them.",
        (throughput_plots.SPEED_UP, throughput_plots.SCALING),
    ),
    MEASURED: (
        "All measured",
        "Images/s over all devices. Three or more runs of one configuration show their median "
        "and a 95 % interval between runs, fewer the interval within each run. Figures with "
        "the encoders in the step are never in one table with those on latents. Tick two rows to "
        "set them beside each other.",
        (throughput_plots.OTHER_MICRO_BATCHES, *run_plots.NAMES),
    ),
    TIMES: (
        "Training times",
        "A whole run of train.py against the number of workers, from its start to its end. A run "
        "that was resumed has no row, as its record has the time of its last process only.",
        (),
    ),
    DATA: (
        "Data",
        "How fast a data source alone was read, without a model, and how fast data sets were "
        "encoded beforehand.",
        (),
    ),
    VERSIONS: (
        "Versions",
        "The same work measured on several versions of torch, diffusers and this suite, with the "
        "verdict of `python -m sdbench compare`.",
        (),
    ),
}
# Places for tables in the texts that are written by hand. Texts other than README.md are optional.
PLACES = {
    README: (COMPARISON, HEADLINES, TARGETS, OTHERS, DATA, TIMES),
    LADDER_PAGE: ("ladder", "engines", "ema", "micro-batches", "ranks", MEASURED),
}
# Other pages of a folder of results that the page links to, if they are there.
LINKS = {
    "results in words": README,
    "predictions and their errors": "predictions.md",
    "speed-ups": LADDER_PAGE,
    "engines": "engines.md",
    "memory": "memory.md",
    "limits": "limits.md",
    "nodes": "scaling.md",
    "figures of others": "quoted/README.md",
    "all runs": "runs/",
    "how to compare, cost and publish": "../docs/results.md",
    "how to measure": "../docs/measure.md",
    "how to train": "../docs/train.md",
}
CHARTS = (*throughput_plots.NAMES, *run_plots.NAMES)
MADE_FROM = (
    "Made by python -m sdbench report from the records in runs/ and from other people's figures in "
    "quoted/. The same rows, unrounded: throughput.csv and data.csv beside this page."
)
EPILOG = """\
examples:
  python -m sdbench report runs/first
      a page of one run, also while it runs: runs/first/report.html
  python -m sdbench report runs --out my.html
      a page of your own runs
  python -m sdbench report
      results/ of this checkout again
  python -m sdbench report --folder my-results
      a folder that `publish --folder my-results` has begun
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Flags of report and publish."""

    folder: Path = setting(PATH, Path("results"), "folder of the results and of the pages made")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageFlags(ReportFlags):
    """Flags of report."""

    runs: tuple[Path, ...] = setting(
        PATH,
        (),
        "a run, or folders of runs, for a page of these alone",
        is_positional=True,
        takes_several=True,
        spelling="[RUNS ...]",
    )
    out: Path | None = setting(
        PATH,
        None,
        f"the page of the runs that are given (default: {PAGE_NAME}, in the folder of a run)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Make a page of runs, or everything of a folder; exit with 1 if a file is left out."""
    request = parse(
        PageFlags,
        argv,
        prog="python -m sdbench report",
        description="Make a page of one run or of several, or the tables, plots and pages of a "
        "folder of results, from its records and from other people's figures.",
        epilog=EPILOG,
    )
    flags = request.config
    unused = "folder" if flags.runs else "out"
    if request.is_users(unused):
        raise ConfigError(
            "--out needs RUNS, and --folder takes no RUNS",
            value=str(getattr(flags, unused)),
            allowed="RUNS with --out, or --folder",
            flag=f"--{unused}",
        )
    made, left_out = write_page(flags.runs, flags.out) if flags.runs else rebuild(flags.folder)
    print(made)
    return EXIT_FAILED if left_out else EXIT_OK


def write_page(places: Sequence[Path], out: Path | None) -> tuple[str, list[Path]]:
    """Write a page of all runs in or below some folders, or of the run that is the only folder.

    Returns:
        What was made, in words; and the files that cannot be read, which are named on stderr.

    Raises:
        ConfigError: There is no run that ended well, or the page cannot be written.
    """
    for place in places:
        if not place.exists():
            allowed = "a folder with runs in it"
            raise ConfigError("no such folder", value=str(place), allowed=allowed, flag="RUNS")
    if len(places) == 1 and (places[0] / RECORD_NAME).is_file():
        page, bad_steps = make_run_page(places[0])
        write_out(out or places[0] / PAGE_NAME, page)
        return "a page of 1 run", bad_steps
    files = [file for place in places for file in sorted(place.rglob(RECORD_NAME))]
    read, left_out = use_each(files, lambda file: (read_record(file, flag="RUNS"), file.parent))
    # A run counts once, however many copies of its folder there are.
    runs = {record["run_id"]: (record, folder) for record, folder in read}
    records = [record for record, _ in runs.values()]
    ended_well = [record for record in records if record["status"] == OK]
    if not ended_well:
        raise ConfigError(
            f"none of {counted(len(records), 'run')} ended well"
            if records
            else "these folders hold no run",
            value=" ".join(map(str, places)),
            allowed=f"folders with the {RECORD_NAME} of a run that ended well, in or below them",
            flag="RUNS",
        )
    folders = {run_id: folder for run_id, (_, folder) in runs.items()}
    where = name_runs([str(place) for place in places])
    ladder = _make_ladder(_ended_well(records))
    sections, bad_steps = _make_sections(ended_well, folders, ladder, where=where)
    shown = [section for section in sections.values() if section.has_content]
    reasons = group(records, key_of=_why_no_row)
    texts = [
        f"{name_runs([record['run_id'] for record in alike])} ({reason})"
        for reason, alike in reasons.items()
        if reason is not None
    ]
    missing = [f"Runs without a row: {'; '.join(texts)}."] if texts else []
    made_from = f"Made by python -m sdbench report, from records of runs in {where}."
    write_out(out or Path(PAGE_NAME), format_page(shown, made_from=" ".join([made_from, *missing])))
    summary = f"a page of {counted(len(reasons.get(None, ())), 'run')}"
    return "\n".join([summary, *missing]), [*left_out, *bad_steps]


def _why_no_row(record: dict[str, Any]) -> str | None:
    """Why no table of a page has a row for a run; None if one has."""
    if record["status"] != OK:
        return record["status"]
    if kind_of(record) == TRAIN and training_times.is_resumed(record):
        return (
            "resumed: the record has the time of the last process only; python -m sdbench report "
            "RUN makes a page of such a run"
        )
    return None


def rebuild(results: Path) -> tuple[str, list[Path]]:
    """Make the tables, plots and pages of a results folder; returns a summary and what is left out.

    A record or a table that cannot be read is named on stderr and left out. A folder with runs gets
    a README.md if it has none. If a text with places for tables cannot be used, nothing is written.
    """
    files = sorted(results.glob(f"{RUNS}/*/{RECORD_NAME}"))
    records, left_out = use_each(files, _load_record)
    quoted, bad_quoted = load_figures(results / "quoted")
    folders = {record["run_id"]: results / RUNS / record["run_id"] for record in records}
    submitted, bad_submitted = load_submissions(results, known=folders)
    ladder = _make_ladder(_ended_well(records))
    sections, bad_steps = _make_sections(
        records,
        folders,
        ladder,
        where=f"{results.absolute().name}/{RUNS}",
        quoted=quoted,
        submitted=submitted,
    )
    predicted, sources, bad_extras = read_extras(results)
    left_out += [*bad_quoted, *bad_submitted, *bad_steps, *bad_extras]
    figures = _figures_of(quoted)
    rows = [*map(make_row, [*_of_kind(records, BENCHMARK), *submitted]), *figures]
    # Those of figures first: a submitted result must not move the cells of all other rows.
    names = (name for row in [*figures, *rows] for name in row)
    columns = tuple(dict.fromkeys((*RUN_COLUMNS, *names)))

    # Everything is made before anything is written.
    shown = [section for section in sections.values() if section.has_content]
    texts = {
        results / "throughput.csv": format_csv(rows, columns=columns),
        results / "data.csv": format_csv(
            map(make_feed_row, _loaded(records)), columns=FEED_COLUMNS
        ),
        results / "index.html": format_page(
            shown,
            gpus=make_gpu_rows(_ended_well(records), figures, predicted, sources),
            links=[link for link in LINKS.items() if (results / link[1]).exists()],
            made_from=MADE_FROM,
        ),
    }
    generated = {name: _format_section(section) for name, section in sections.items()}
    generated |= {name: to_captioned_markdown(group) or NO_RUNS for name, group in ladder.items()}
    for name, places in PLACES.items():
        path = results / name
        if path.exists():
            text = _read_text(path)
        elif name == README and (results / RUNS).is_dir():
            text = _begin_readme()
        elif name != README:
            continue
        else:
            raise ConfigError(
                "the folder has neither a README.md nor runs",
                value=str(path),
                allowed="a folder that `publish --folder` has begun, or RUNS for a page of runs",
                flag="--folder",
            )
        # Without a target, the text of an older folder needs no place for one.
        needed = [
            place
            for place in places
            if place != TARGETS or sections[place].has_content or BEGIN.format(place) in text
        ]
        texts[path] = fill_blocks(text, {place: generated[place] for place in needed}, path=path)

    plots = [plot for section in sections.values() for plot in section.plots]
    with refused_unless_written(results, flag="--folder"):
        for path, text in texts.items():
            replace_file(path, text)
        save(plots, results / "plots", charts=CHARTS)
    summary = (
        "made README.md, throughput.csv, data.csv, index.html and "
        f"{counted(len(plots), 'plot')} in {results} from {counted(len(records), 'run')} and "
        f"{counted(len(figures), 'figure')} of others"
    )
    if submitted:
        summary += f"\nwith {counted(len(submitted), 'run')} that others have submitted"
    missing = sorted(set(CHARTS) - {plot.chart for plot in plots})
    if missing:
        summary += f"\nnot drawn, for want of data: {', '.join(missing)}"
    if left_out:
        summary += f"\nleft out, as they cannot be read: {counted(len(left_out), 'file')}"
    return summary, left_out


def _make_sections(
    records: Sequence[dict[str, Any]],
    folders: Mapping[str, Path],
    ladder: Mapping[str, Sequence[Table]],
    *,
    where: str,
    quoted: Figures = MappingProxyType({}),
    submitted: Sequence[dict[str, Any]] = (),
) -> tuple[dict[str, Section], list[Path]]:
    """Make the sections of a page; also return the tables of steps that cannot be read.

    `folders` has the folder of each run by run id, `ladder` is what `_make_ladder` returns, and
    `where` is the name of the folder with all runs. Runs that were `submitted` are in tables of
    throughput, and in no chart and no ladder.
    """
    ended_well = _ended_well(records)
    times = training_times.collect(
        _of_kind(records, TRAIN), [row for rows in quoted.values() for row in rows], folder=where
    )
    measured = [
        {**make_row(record), "command": shlex.join(record["command"]), "folder": where}
        for record in ended_well
    ]
    rows = [*measured, *_figures_of(quoted)]
    with plain_style():
        step_times, bad_steps = run_plots.draw_step_times(ended_well, folders)
        plots = [
            *throughput_plots.draw_micro_batch(rows),
            *throughput_plots.draw_scaling(rows),
            *run_plots.draw_breakdown(ended_well),
            *step_times,
        ]
    shown = [*ended_well, *submitted]
    tables = {
        COMPARISON: [make_seed_table(quoted, map(make_row, shown))],
        HEADLINES: [make_headline_table(shown)],
        TARGETS: [make_target_table(row for rows in quoted.values() for row in rows)],
        MEASURED: make_tables(shown),
        TIMES: [training_times.make_time_table(times)],
        DATA: [feed_table.make_data_table(_loaded(records))],
        SPEED_UPS: [table for group in ladder.values() for table in group],
        VERSIONS: [make_version_table(ended_well)],
    }
    folds = {OTHERS: fold_by_source(quoted.items())}
    sections = {
        name: Section(
            heading,
            help_text,
            [table for table in tables.get(name, ()) if table is not None and table.rows],
            folds.get(name, ()),
            [plot for plot in plots if plot.chart in charts],
        )
        for name, (heading, help_text, charts) in SECTIONS.items()
    }
    return sections, bad_steps


def _of_kind(records: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if kind_of(record) == kind]


def _loaded(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of runs that read data and train nothing."""
    return [record for record in records if kind_of(record) not in (BENCHMARK, TRAIN)]


def _ended_well(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in _of_kind(records, BENCHMARK) if record["status"] == OK]


def _figures_of(tables: Figures) -> list[dict[str, Any]]:
    """The figures of others that have a rate."""
    rows = itertools.chain.from_iterable(tables.values())
    return [row for row in rows if row.get("images_per_second") is not None]


def _begin_readme() -> str:
    """A README.md with a heading and a place for each of its tables."""
    parts = ["# Results", "The page [index.html](index.html) has these tables too."]
    for place in (place for place in PLACES[README] if place != TARGETS):
        heading, help_text, _ = SECTIONS[place]
        parts += [f"## {heading}", help_text, f"{BEGIN.format(place)}\n{END.format(place)}"]
    return "\n\n".join(parts) + "\n"


def _make_ladder(ended_well: Sequence[dict[str, Any]]) -> dict[str, list[Table]]:
    """Tables of the speed-ups, by the names of their places in ladder.md."""
    configurations = read_configurations(ended_well)
    pairs = make_pair_tables(configurations)
    return {
        "ladder": make_ladder_tables(configurations),
        **{name: [table] if table.rows else [] for name, table in pairs.items()},
    }


def _load_record(path: Path) -> dict[str, Any]:
    record = read_record(path, flag="--folder")
    if record["run_id"] != path.parent.name:  # a copy would count as one more run
        raise ConfigError(
            "a published record is in the folder of another run",
            value=str(path),
            allowed=f"the folder {record['run_id']}",
            flag="--folder",
        )
    read_time(record["started_utc"], of=path)  # the ladder compares runs by their times
    return record


def _read_text(path: Path) -> str:
    what, allowed = "a text with places for tables", "a text file in UTF-8"
    with refused_unless_read(path, what, allowed=allowed, flag="--folder"):
        return read_text(path)


def _format_section(section: Section) -> str:
    """The tables, folds and charts of a section in markdown."""
    titles = [(plot, for_markdown(plot.title)) for plot in section.plots]
    pictures = [f"**{title}**\n\n![{title}](plots/{plot.name}.png)" for plot, title in titles]
    parts = [to_captioned_markdown(section.tables), to_folded_markdown(section.folds), *pictures]
    return "\n\n".join(filter(None, parts)) or NO_RUNS
