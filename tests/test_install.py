"""`pip install .` gives a command that works without a checkout."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests.refusals import printed_refusal
from tests.report.results_folder import make_record, make_results


@pytest.fixture(scope="module")
def site(tmp_path_factory, repository) -> Path:
    """What pip installs from a copy of the sources, in a folder of its own."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    ignore = shutil.ignore_patterns("__pycache__", "runs")
    for name in ("sdbench", "configs", "results"):
        shutil.copytree(repository / name, source / name, ignore=ignore)
    site = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", site)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    return site


@pytest.fixture
def sdbench(site, tmp_path):
    """Run the installed command in a folder that holds nothing of the suite."""

    def run(*argv: str | Path, exit_code: int = 0) -> str:
        done = subprocess.run(
            [site / "bin" / "sdbench", *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == exit_code, done.stdout + done.stderr
        return done.stderr if exit_code else done.stdout

    return run


def test_every_file_of_the_package_is_installed_with_the_recipes_and_the_tables(site, repository):
    def files(folder: Path, *patterns: str) -> set[Path]:
        found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
        return {path.relative_to(folder) for path in found if "__pycache__" not in path.parts}

    carried = ("configs/**/*.yaml", "results/quoted/*.csv", "results/throughput.csv")
    of_results = {Path("carried", path) for path in files(repository, *carried)}
    assert len(of_results) > 40
    assert files(site / "sdbench", "**/*") == files(repository / "sdbench", "**/*") | of_results
    assert [path.name for path in site.iterdir() if path.suffix != ".dist-info"] == [
        "sdbench",
        "bin",
    ]


def test_the_installed_package_asks_for_what_pyproject_declares(site, repository):
    (metadata,) = site.glob("sdbench-*.dist-info")
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_extras = [f'{pin}; extra == "{extra}"' for extra, pins in extras.items() for pin in pins]
    installed = Distribution.at(metadata)
    assert installed.requires == project["dependencies"] + of_extras
    assert installed.metadata.get_all("Provides-Extra") == [*extras]
    assert installed.metadata["Requires-Python"] == "<3.15,>=3.11"


# Python finds these packages in no folder, as if they were not installed.
WITHOUT_PACKAGES = """
import sys
import tomllib
from importlib.machinery import PathFinder

class WithoutPackages(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_hidden = name.split(".")[0] in {names}
        return None if is_hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutPackages
"""


@pytest.fixture
def refused_without(tmp_path, repository):
    """Run a program of the checkout without these packages; returns what it prints on stderr."""

    def run(names: tuple[str, ...], program: str, *argv: str) -> str:
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_PACKAGES.format(names=names))
        refusal = subprocess.run(
            [sys.executable, repository / program, *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{repository}"},
            capture_output=True,
            text=True,
        )
        assert refusal.returncode == 2, refusal.stderr
        assert not (tmp_path / "runs").exists()
        return refusal.stderr

    return run


LORA = ("--lora_rank", "4", "--max_duration", "1ba")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "flag", "argv"),
    [
        (("ray", "lightning"), "--engine", ("--engine", "ray")),
        (("torchao",), "--optimizer", ("--optimizer", "adamw_8bit")),
        (("torchao",), "--frozen_bits", (*LORA, "--frozen_bits", "int8")),
    ],
    ids=str,
)
def test_without_an_extra_what_needs_it_says_how_to_install_it(refused_without, names, flag, argv):
    program = "train.py" if "--lora_rank" in argv else "benchmark.py"
    printed = refused_without(names, program, "--model_name", "tiny", "--use_synth_data", *argv)
    assert "pip install --no-deps -r requirements-all.txt" in printed
    assert printed_refusal(printed).flag == flag


@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("benchmark.py", "psutil"),
        ("sdbench", "numpy"),
        ("calculate_number_of_parameters.py", "torch"),
    ],
)
def test_another_python_is_told_to_be_without_the_packages(refused_without, program, package):
    argv = ("report",) if program == "sdbench" else ()
    printed = refused_without((package,), program, *argv)
    assert len(printed.splitlines()) == 1
    assert printed_refusal(printed).value == sys.executable


@pytest.mark.slow
def test_the_installed_command_works_in_any_folder(sdbench, tmp_path, repository):
    assert "verify-data" in sdbench("--help")
    table = repository / "results/quoted/aws_p5_scaling.csv"
    assert " 84.23 " in sdbench("scaling", "cost", table, "--recipe", "mosaicml-all-512")
    results = make_results(tmp_path / "results", make_record())
    sdbench("report", "--folder", results)
    assert "sd2-base" in (results / "index.html").read_text()


@pytest.mark.slow
def test_the_installed_package_has_the_recipes_and_the_tables(sdbench, picture_folder):
    table = "aws_p4de_p5_single_node"
    compared = sdbench("compare", table, "--between", "gpu")
    assert " 1.83x " in compared
    assert sdbench("compare", f"results/quoted/{table}.csv", "--between", "gpu") == compared
    predict = ("predict", "--model_name", "sd2-base", "--latents", "precomputed", "--num_gpus", "8")
    assert "NVIDIA B200 " in sdbench(*predict, "--gpu", "B200,H200")
    train = ("train", "--remote", picture_folder, "--dry_run", "--config")
    assert "\nmax_duration: 300ba" in sdbench(*train, "laptop")
    for caption in picture_folder.glob("*.txt"):
        caption.unlink()
    prompts = ("--prompt", "a unqtkn dog", "--class_prompt", "a dog", "--model_name", "tiny")
    steps = sdbench("dreambooth", picture_folder, *prompts, "--dry_run").splitlines()
    assert steps[2].startswith("python -m sdbench train --config configs/dreambooth.yaml ")
    for argv, name, flag in (
        (("compare", f"{table}s", "--between", "gpu"), table, "the path given"),
        ((*train, "configs/laptops.yaml"), "laptop", "--config"),
    ):
        refusal = printed_refusal(sdbench(*argv, exit_code=2))
        assert refusal.allowed.startswith(f"the path of a file | {name} | ")
        assert refusal.flag == flag


@pytest.mark.slow
def test_the_programs_are_commands_of_the_installed_package(sdbench):
    usage = "usage: python -m sdbench {} ".format
    for name in ("benchmark", "train", "generate", "data"):
        assert sdbench(name, "--help").startswith(usage(name))
    assert "\nnum_batches: 7" in sdbench("data", "--num_batches", "7", "--print_config")


@pytest.mark.parametrize(
    ("argv", "file"),
    [
        (("sweep", "sweep.yaml"), "benchmark.py"),
        (("render", "eks"), "multi-node/3.stable-diffusion-eks.yaml-template"),
    ],
)
def test_a_command_without_its_checkout_names_the_file_that_it_needs(sdbench, tmp_path, argv, file):
    (tmp_path / "sweep.yaml").write_text("grid: {use_ema: [true]}")
    refusal = printed_refusal(sdbench(*argv, exit_code=2))
    needs = f"this command needs {file} of a checkout of the suite, which no installed package has"
    assert (refusal.what, refusal.flag) == (needs, "cd")


def test_a_run_of_an_installed_package_is_repeated_by_its_command_and_not_by_a_script(site):
    code = (
        "from sdbench.ranks.launcher import typed_command as t; print(t(['benchmark.py', '--a']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert ast.literal_eval(printed) == ["python", "-m", "sdbench", "benchmark", "--a"]


def test_the_commit_of_another_checkout_is_not_taken_for_the_packages(site, tmp_path):
    shutil.copytree(site, tmp_path / "site-packages")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("site-packages")
    subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "-m", "mine"], cwd=tmp_path, check=True)
    code = "from sdbench.record.provenance import git_state; print(git_state())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site-packages"), "SDBENCH_GIT_COMMIT": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{'commit': None, 'dirty': None}\n"
