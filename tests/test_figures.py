"""Tables of figures: what is read, and what is no table."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdbench.base.errors import ConfigError
from sdbench.report.figures import read_figures
from tests.refusals import refused


def read(tmp_path: Path, content: str | bytes, **arguments) -> list[dict]:
    path = tmp_path / "table.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_figures(path, **arguments)


HOSTILE = "=cmd|' /C calc'!A0\n<b>H100, \u4e2d\u6587 \U0001f600"


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (
            "source,num_gpus,ema,images_per_second,note\na,8,true,142.69,\nb,0,false,1e3,4\n",
            [
                {"source": "a", "num_gpus": 8, "ema": True, "images_per_second": 142.69},
                {"source": "b", "num_gpus": 0, "ema": False, "images_per_second": 1e3, "note": 4},
            ],
        ),
        # A name stays text even if it looks like a number, and so does what only Python reads.
        (
            "gpu,git_commit,model\n4090,1234567,true\n",
            [{"gpu": "4090", "git_commit": "1234567", "model": "true"}],
        ),
        ("a,b,c,d,e\nnan,inf,-,0x10,1_000\n", [dict(a="nan", b="inf", c="-", d="0x10", e="1_000")]),
        (f'gpu,images_per_second\n"{HOSTILE}",1\n', [{"gpu": HOSTILE, "images_per_second": 1}]),
        # A byte order mark and blank lines are no content.
        (b"\xef\xbb\xbfgpu,num_gpus\r\n\r\nH100,8\r\n\r\n", [{"gpu": "H100", "num_gpus": 8}]),
    ],
)
def test_cells_become_numbers_bools_none_or_stay_text(tmp_path, content, rows):
    found = read(tmp_path, content)
    assert [{name: one for name, one in row.items() if one is not None} for row in found] == rows
    assert {type(row["num_gpus"]) for row in found if "num_gpus" in row} <= {int}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "gpu,gpu\n1,2\n",
        "gpu,\n1,2\n",
        "gpu,num_gpus\nH100\n",
        "gpu,num_gpus\nH100,8\nH100,8,9\n",
        "images_per_second\n1\nfast\n",
        "images_per_second\n0\n",
        "images_per_second_high\n1e999\n",
        "num_gpus\n-8\n",
        "matmul_tflops\nunknown\n",
        b"gpu\n\xff\xfe\n",
        'gpu\n"H100\n',
    ],
)
def test_what_is_no_table_is_refused(tmp_path, content):
    with refused("the path given", value=str(tmp_path / "table.csv")):
        read(tmp_path, content)
    with refused("the path given", value=str(tmp_path)):
        read_figures(tmp_path)


@pytest.mark.parametrize("name", ["aws_p5_scaling", "results/quoted/aws_p5_scaling.csv"])
def test_a_table_of_the_suite_is_found_by_its_name_in_any_folder(repository, name):
    Path("aws_p5_scaling").mkdir()  # a folder is no table
    of_suite = read_figures(repository / "results/quoted/aws_p5_scaling.csv")
    assert read_figures(Path(name)) == of_suite
    Path("aws_p5_scaling.csv").write_text("gpu\nH100\n")
    assert read_figures(Path("aws_p5_scaling.csv")) == [{"gpu": "H100"}]


def test_an_unknown_table_is_refused_with_those_that_exist(repository):
    with pytest.raises(ConfigError) as caught:
        read_figures(Path("aws_p5_scalin.csv"))
    assert caught.value.what == "this is no file, and no table of the suite has this name"
    first, *names = caught.value.allowed.split(" | ")
    tables = [*repository.glob("results/quoted/*.csv"), repository / "results/throughput.csv"]
    assert (first, names[0]) == ("the path of a file", "aws_p5_scaling")
    assert sorted(names) == sorted(path.stem for path in tables)


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(ConfigError, match="lacks the column num_gpus, image_size"):
        read(tmp_path, "gpu\nH100\n", required=("gpu", "num_gpus", "image_size"))
