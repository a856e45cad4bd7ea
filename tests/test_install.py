"""`pip install .` gives a command that works without a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests.refusals import printed_refusal
from tests.report.results_folder import make_record, make_results


@pytest.fixture(scope="module")
def site(tmp_path_factory, repository) -> Path:
    """What pip installs from a copy of the sources, in a folder of its own."""
    source = tmp_path_factory.mktemp("source")
    files = ("pyproject.toml", "requirements.txt", "requirements-ray.txt", "README.md", "LICENSE")
    for name in files:
        shutil.copy(repository / name, source)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(repository / "sdbench", source / "sdbench", ignore=ignore)
    site = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", site)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    return site


@pytest.fixture
def sdbench(site, tmp_path):
    """Run the installed command in a folder that holds nothing of the suite."""

    def run(*argv: str | Path) -> str:
        done = subprocess.run(
            [site / "bin" / "sdbench", *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_every_file_of_the_package_is_installed(site, repository):
    def files(folder: Path) -> set[Path]:
        found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        return {path for path in found if "__pycache__" not in path.parts}

    assert files(site / "sdbench") == files(repository / "sdbench")


def test_the_package_asks_for_what_requirements_txt_pins(site, repository):
    (metadata,) = site.glob("sdbench-*.dist-info")

    def pins(name: str) -> list[str]:
        return re.findall(r"^[^#\n]+", (repository / name).read_text(), re.MULTILINE)

    of_extra = [f'{pin}; extra == "ray"' for pin in pins("requirements-ray.txt")]
    assert Distribution.at(metadata).requires == pins("requirements.txt") + of_extra
    assert Distribution.at(metadata).metadata.get_all("Provides-Extra") == ["ray"]


# As on a machine without requirements-ray.txt: its packages are found in no folder.
WITHOUT_RAY = """
import sys
from importlib.machinery import PathFinder

class WithoutRay(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_hidden = name.split(".")[0] in ("ray", "lightning")
        return None if is_hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutRay
"""


@pytest.mark.slow
def test_without_the_extra_the_engine_ray_says_how_to_install_it(tmp_path, repository):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_RAY)
    argv = ("--model_name", "tiny", "--use_synth_data", "--engine", "ray")
    refusal = subprocess.run(
        [sys.executable, repository / "benchmark.py", *argv],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert refusal.returncode == 2, refusal.stderr
    assert "pip install -r requirements-ray.txt -c constraints.txt" in refusal.stderr
    assert printed_refusal(refusal.stderr).flag == "--engine"
    assert not (tmp_path / "runs").exists()


def test_the_installed_command_works_in_any_folder(sdbench, tmp_path, repository):
    assert "verify-data" in sdbench("--help")
    assert "16" in sdbench(
        *("scaling", "predict", repository / "results/quoted/aws_p5_scaling.csv"),
        *("--num_gpus", "16"),
    )
    results = make_results(tmp_path / "results", make_record())
    sdbench("report", "--folder", results)
    assert "sd2-base" in (results / "index.html").read_text()
