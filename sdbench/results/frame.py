"""`load`: records of runs and other people's figures as one frame of pandas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.base.carried import RESULTS, THROUGHPUT
from sdbench.base.errors import ConfigError
from sdbench.record.columns import COLUMNS, COUNT, NAME, NUMBER, POSITIVE, SWITCH
from sdbench.record.record_kinds import BENCHMARK, TRAIN, kind_of
from sdbench.record.row import make_feed_row, make_row, make_training_row
from sdbench.record.store import RECORD_NAME
from sdbench.report.figures import COPY, QUOTED, mark_copies, read_figures
from sdbench.report.runs import read_record, use_each
from sdbench.results.submissions import load_submissions

if TYPE_CHECKING:
    import pandas as pd

# The table of predictions in a folder of results.
PREDICTIONS = "predictions.csv"
# pandas' types that have a value for what is not known.
TYPES = {
    NAME: "string",
    SWITCH: "boolean",
    COUNT: "Int64",
    POSITIVE: "Float64",
    NUMBER: "Float64",
}


def load(folder: str | Path = RESULTS) -> pd.DataFrame:
    """Load all figures of a folder, one in a row.

    A figure is a run of benchmark.py, train.py, data.py or precompute, of any status, or one that
    somebody else submitted or published, or that is predicted. The columns are those of
    `sdbench.record.columns.COLUMNS`, in which units and meanings stand; what is not known is NA. A
    run counts once, however many copies of its record there are. A file that cannot be read is
    named on stderr and left out.

    Args:
        folder: A folder of results (its runs/, quoted tables and predictions are read), or one
            with runs in it, at any depth. The default is ``results/`` of this checkout; an
            installed package has the published figures without the records that they come from.

    Raises:
        ConfigError: The folder holds no figure.
    """
    import pandas as pd

    place = Path(folder)
    rows = list(_rows_of_records(place))
    submitted, _ = load_submissions(place, known=[row["source"] for row in rows])
    rows += [*map(make_row, submitted), *_rows_of_tables(place)]
    if not rows:
        raise ConfigError(
            "this folder holds no figure",
            value=str(folder),
            allowed=f"a folder with a {RECORD_NAME} in it or below, or with quoted/*.csv",
            flag="folder",
        )
    frame = pd.DataFrame(rows, columns=[*COLUMNS])
    return frame.astype({name: TYPES[column.holds] for name, column in COLUMNS.items()})


def _rows_of_records(folder: Path) -> Iterator[dict[str, Any]]:
    # A folder of results has other records beside its runs, whose times say nothing.
    runs = folder / "runs"
    files = sorted((runs if runs.is_dir() else folder).rglob(RECORD_NAME))
    rows, _ = use_each(files, lambda file: _make_row(read_record(file, flag="folder")))
    yield from (row for row in mark_copies(rows) if row["status"] != COPY)


def _make_row(record: dict[str, Any]) -> dict[str, Any]:
    makers = {BENCHMARK: make_row, TRAIN: make_training_row}
    return makers.get(kind_of(record), make_feed_row)(record)


def _rows_of_tables(folder: Path) -> Iterator[dict[str, Any]]:
    if folder == RESULTS and not (folder / "runs").is_dir():
        yield from read_figures(THROUGHPUT)  # of an installed package; it has the quoted ones too
        return
    tables, _ = use_each(sorted(folder.glob("quoted/*.csv")), read_figures)
    for table in tables:
        yield from ({**row, "kind": QUOTED} for row in table)
    predicted, _ = use_each(folder.glob(PREDICTIONS), read_figures)
    for table in predicted:
        yield from table
