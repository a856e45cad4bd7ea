"""--huge_pages begins the program again, once and said, in the environment that glibc reads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import benchmark
from sdbench.base import host_memory
from sdbench.record.store import load_record

needs_huge_pages = pytest.mark.skipif(
    not host_memory.can_use_huge_pages(), reason="no glibc 2.35, or a kernel without huge pages"
)
RUN = (
    *("--model_name", "tiny", "--use_synth_data", "--engine", "torch", "--no_measure_peak"),
    *("--warmup_batches", "0", "--measure_batches", "3", "--profile_batches", "0"),
)


def start(*argv, tunables=None):
    environment = {name: v for name, v in os.environ.items() if name != "GLIBC_TUNABLES"}
    if tunables is not None:
        environment["GLIBC_TUNABLES"] = tunables
    return subprocess.run(
        [sys.executable, benchmark.__file__, *RUN, *argv],
        env=environment,
        capture_output=True,
        text=True,
    )


@needs_huge_pages
@pytest.mark.parametrize("before", [None, "glibc.malloc.check=0"])
def test_the_program_begins_again_and_its_record_has_the_environment(tmp_path, before):
    end = start("--huge_pages", "--results_dir", str(tmp_path), tunables=before)
    assert end.returncode == 0, end.stderr
    tunables = "glibc.malloc.hugetlb=1" if before is None else f"{before}:glibc.malloc.hugetlb=1"
    assert end.stderr.count(f"begins again with GLIBC_TUNABLES={tunables}\n") == 1
    (path,) = tmp_path.glob("*/record.json")
    record = load_record(path)
    assert record["status"] == "ok" and record["config"]["huge_pages"] is True
    assert record["environment"]["GLIBC_TUNABLES"] == tunables


@needs_huge_pages
def test_a_process_that_has_begun_so_goes_on():
    end = start("--huge_pages", "--print_config", tunables="glibc.malloc.hugetlb=1")
    assert end.returncode == 0 and "begins again" not in end.stderr
    assert "huge_pages: true" in end.stdout


def test_a_program_called_within_another_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert benchmark.main([*RUN, "--huge_pages"]) == 2
    assert "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in its environment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("[always] madvise never", True),
        ("always [madvise] never", True),
        ("always madvise [never]", False),
        (None, False),
    ],
)
def test_the_kernels_choice_is_read(choice, expected, tmp_path, monkeypatch):
    if not host_memory.can_keep_freed_memory():
        pytest.skip("no glibc")
    file = tmp_path / "enabled"
    if choice is not None:
        file.write_text(choice)
    monkeypatch.setattr(host_memory, "KERNELS_CHOICE", file)
    monkeypatch.setattr(host_memory, "FIRST_GLIBC_WITH_HUGE_PAGES", (2, 0))
    assert host_memory.can_use_huge_pages() is expected
    monkeypatch.setattr(host_memory, "FIRST_GLIBC_WITH_HUGE_PAGES", (99, 0))
    assert host_memory.can_use_huge_pages() is False
