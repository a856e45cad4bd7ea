"""Rooms import only those below them, programs start without heavy packages, texts are ASCII."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from sdbench.cli import COMMANDS

SCRIPTS = ("benchmark", "data", "calculate_number_of_parameters")
# Packages that cost seconds to import, or are not on every machine.
HEAVY_PACKAGES = {
    "boto3",
    "composer",
    "diffusers",
    "jinja2",
    "lightning",
    "matplotlib",
    "pandas",
    "pyarrow",
    "ray",
    "scipy",
    "streaming",
    "torch",
    "torchvision",
    "transformers",
    "wandb",
    "webdataset",
}
QUIET_STATEMENTS = (
    ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
)


def test_rooms_import_only_those_below_them(repository):
    # The contracts are in pyproject.toml.
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def loaded_packages(folder, modules):
    """Heavy packages that a fresh interpreter has loaded after it has imported these modules."""
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, check=True, capture_output=True, text=True
    ).stdout
    return HEAVY_PACKAGES & set(output.split())


def test_programs_start_without_heavy_packages(repository):
    # Not data.py, which offers the data set classes: they derive from torch's.
    modules = ["benchmark", "calculate_number_of_parameters", "sdbench.cli"]
    modules += [f"sdbench.{module}" for module, _ in COMMANDS.values()]
    assert loaded_packages(repository, modules) == set()


@pytest.mark.parametrize("script", SCRIPTS)
def test_importing_a_script_runs_nothing(repository, script):
    def is_quiet(node):
        if isinstance(node, ast.If):
            return ast.unparse(node.test) in ("__name__ == '__main__'", "TYPE_CHECKING")
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return is_text or isinstance(node, QUIET_STATEMENTS)

    body = ast.parse((repository / f"{script}.py").read_text()).body
    assert [ast.unparse(node) for node in body if not is_quiet(node)] == []


def test_every_text_file_is_ascii_and_names_no_home(repository):
    if not (repository / ".git").exists():
        pytest.skip("not a git checkout: which files belong to the project is unknown")
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    found = {}
    for path in (repository / name for name in names if name):
        content = path.read_bytes() if path.is_file() else b"\0"
        if b"\0" in content:
            continue
        text = content.decode("utf-8")
        wrong = [line for line in text.splitlines() if not line.isascii()]
        wrong += re.findall(r"/(?:home|root|Users)/\w+", text)
        if wrong:
            found[str(path)] = wrong
    assert found == {}
