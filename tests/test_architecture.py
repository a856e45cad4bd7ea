"""Imports of rooms, programs and runs, ASCII texts, and the tasks and rooms of CONTRIBUTING.md."""

from __future__ import annotations

import graphlib
import pkgutil
import re
import subprocess
import sys
import time

import grimp
import pytest

from sdbench.cli import COMMANDS
from sdbench.run import TASKS
from sdbench.run.task import Task
from tests.runs import only_record

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
# diffusers itself brings accelerate, which peft requires and which loads boto3.
OF_DIFFUSERS = {"boto3", "diffusers", "jinja2", "scipy", "torch", "torchvision", "transformers"}
# What a run of the lean engine on synthetic data has no need of.
NEEDLESS = {*HEAVY_PACKAGES - OF_DIFFUSERS, "torchmetrics", "torch._inductor.compile_fx"}


def test_rooms_import_only_those_below_them(repository):
    # The contracts are in pyproject.toml.
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_import_runs_round_or_up_not_even_that_of_a_type(repository):
    graph = grimp.build_graph("sdbench", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # a CycleError names the modules of a circle
    lines = layers(repository)
    height = {room: index for index, line in enumerate(reversed(lines)) for room in line}
    up = [
        (name, other)
        for name, others in imports.items()
        for other in others
        if (pair := [(one + ".").split(".")[1] for one in (name, other)])[0] != pair[1]
        and "" not in pair
        and height[pair[0]] <= height[pair[1]]
    ]
    assert up == []


def layers(repository):
    """The rooms of each line of the layers, the highest first."""
    project = (repository / "pyproject.toml").read_text()
    lines = project.partition("\nlayers = [")[2].partition("\n]")[0].splitlines()
    return [rooms for line in lines if (rooms := re.findall(r"sdbench\.(\w+)", line))]


def loaded_packages(folder, modules):
    """Heavy packages that a fresh interpreter has loaded after it has imported these modules."""
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, check=True, capture_output=True, text=True
    ).stdout
    (line,) = output.splitlines()  # to import runs nothing that prints, or that ends the process
    assert "sdbench" in line.split()
    return HEAVY_PACKAGES & set(line.split())


def test_programs_start_without_heavy_packages(repository):
    # Not data.py, which offers the data set classes: they derive from torch's.
    modules = ["benchmark", "calculate_number_of_parameters", "sdbench.cli"]
    modules += [f"sdbench.{module}" for module, _ in COMMANDS.values()]
    assert loaded_packages(repository, modules) == set()


# Each with the nearest name, which the error tells.
MISTYPED = (
    (["benchmark", "--model_name", "sdx"], "sdxl"),
    (["generate", "--model_name", "tinny", "--prompts", "a", "--folder", "b"], "tiny"),
    (["benchmark", "--engine", "tourch"], "torch"),
    (["memory", "--model_name", "Flux-Schnel"], "flux-schnell"),
    (["doctor", "--model_name", "sd2base"], "sd2-base"),
    (["dreambooth", "a", "--prompt", "b", "--model", "tiny"], "--model_name"),
    (["predict", "--gpu", "H10"], "H100"),
    (["predict", "--gpu", "h200", "--price", "sperhon-h200"], "spheron-h200"),
)


def test_a_mistyped_name_is_told_before_a_heavy_package_is_loaded(repository):
    program = f"""if True:
        import sys
        from sdbench.cli import main
        codes = [main(argv) for argv, _ in {MISTYPED}]
        print(codes, *sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith(str([2] * len(MISTYPED)))
    assert HEAVY_PACKAGES & set(done.stdout.split()) == set()
    for line, (argv, meant) in zip(done.stderr.splitlines(), MISTYPED, strict=True):
        assert re.search(rf"(nearest is|allowed:) {meant}\b", line), (argv, line)


@pytest.mark.slow
def test_a_run_of_the_lean_engine_loads_what_it_needs(repository, tmp_path):
    command = [sys.executable, "-X", "importtime", "benchmark.py", "--engine", "torch"]
    argv = ["--model_name", "tiny", "--use_synth_data", "--results_dir", str(tmp_path)]
    start_s = time.monotonic()
    done = subprocess.run([*command, *argv], cwd=repository, capture_output=True, text=True)
    wall_s = time.monotonic() - start_s
    assert done.returncode == 0, done.stderr[-2000:]
    imported = set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", done.stderr, re.MULTILINE))
    assert {"torch", "diffusers", "transformers"} <= imported
    assert not imported & NEEDLESS
    startup = only_record(tmp_path)["summary"]["startup"]
    assert 0.3 * wall_s < startup["total_s"] < wall_s
    assert re.search(rf"start-up +{startup['total_s']:.2f} s to the first measured", done.stdout)


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


def test_each_row_is_a_task_of_its_kind_and_a_row_of_the_guide(repository):
    guide = (repository / "CONTRIBUTING.md").read_text().partition("<!-- tasks -->")[2]
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", guide.partition("## Rules")[0], re.MULTILINE)
    assert [kind for kind, _ in rows] == list(TASKS)
    for kind, program in rows:
        task = pkgutil.resolve_name(TASKS[kind])
        assert issubclass(task, Task) and not task.__abstractmethods__
        assert (task.kind, task.program) == (kind, program)


def test_the_rooms_of_the_guide_are_the_layers_that_are_checked(repository):
    guide = (repository / "CONTRIBUTING.md").read_text().partition("<!-- rooms -->")[2]
    drawn = [line.split("--")[0].split() for line in re.findall(r"^    (.+ -- .+)$", guide, re.M)]
    assert drawn == [rooms for rooms in layers(repository) if rooms != ["__main__"]]


def test_the_files_that_the_guide_names_are_there(repository):
    guide = (repository / "CONTRIBUTING.md").read_text()
    run = guide.partition("## A run, from")[2].partition("## Rules")[0]
    names = set(re.findall(r"`([a-z_]+/[a-z_/.]*)`", run)) - {"sdbench/"}
    assert len(names) > 10
    assert [name for name in sorted(names) if not (repository / "sdbench" / name).exists()] == []
