"""Every command of the guides that needs no GPU: what is quick is run, the rest is planned.

A command on the full model is planned here (`--print_config` goes through every check that comes
before the weights are built) and run to its end by the tests marked slow, which also train and draw
with the commands for a model of one's own.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from sdbench.cli import COMMANDS
from sdbench.record.store import load_record
from sdbench.report.terminal import format_summary
from tests.documents import GUIDES, ON_RAY, ROOT, blocks, commands, launched
from tests.ports import free_port
from tests.runs import only_record
from tests.waiting import wait_for

CLUSTER_GUIDE = "multi-node/README.md"
DOCUMENTS = (
    *GUIDES,
    CLUSTER_GUIDE,
    "single-node/README.md",
    "CONTRIBUTING.md",
    "docs/faults.md",
    "results/README.md",
)
BIN = Path(sys.executable).parent
SMALL = ("--model_name", "tiny")
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
DATA_TOOLS = ("convert", "verify-data", "precompute")


def run(
    command: str, *, folder: Path, timeout_s: float = 280, env: Mapping[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess:
    options = {"capture_output": True, "text": True, "timeout": timeout_s}
    return subprocess.run(shlex.split(command), cwd=folder, env=env, **options)


def run_here(arguments: list[str], monkeypatch) -> int:
    """Do what `python` does with these arguments, and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        if arguments[0] == "-m":
            monkeypatch.setattr(sys, "argv", arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            monkeypatch.setattr(sys, "argv", arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    return ended.value.code or 0


@pytest.fixture
def workplace(tmp_path, picture_folder) -> Path:
    """A folder that looks like the checkout, with a few images of a user's in it."""
    scripts = ("benchmark.py", "data.py", "calculate_number_of_parameters.py")
    scripts += ("train.py", "generate.py")
    for name in (*scripts, "sdbench", "results", "sweeps", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def is_tool(command: str) -> bool:
    """Whether it is a step from a folder of images to latents, which needs the one before."""
    return any(f"-m sdbench {name} " in command for name in DATA_TOOLS)


def is_of_subject(command: str) -> bool:
    return "unqtkn" in command


def is_of_training(command: str) -> bool:
    """Whether it is a step from pictures to a drawing, which needs the one before."""
    starts = ("python train.py", "python generate.py", "python -m sdbench export")
    return command.startswith(starts) and not is_of_subject(command)


def is_quick(command: str) -> bool:
    return "--model_name tiny" in command or "benchmark.py" not in command or "--help" in command


def marked(command: str):
    # Two ranks by a launcher, and a step replayed or counted operation by operation, take longest.
    is_slow = re.match("composer |.* -m sdbench (profile|predict) ", command)
    return pytest.param(command, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        marked(command)
        for command in launched()
        if is_quick(command)
        and not (is_tool(command) or is_of_training(command) or is_of_subject(command))
    ],
)
def test_a_quick_command_runs_as_it_stands(command, workplace, capsys, monkeypatch):
    if " runs " in command:
        published = min((ROOT / "results" / "runs").glob("*-fast"))
        shutil.copytree(published, workplace / "runs" / published.name)
    if command.split()[0] == "python":
        # Here, since a process of its own would do nothing else than import torch once more.
        monkeypatch.chdir(workplace)
        assert run_here(shlex.split(command)[1:], monkeypatch) == 0, capsys.readouterr()
    else:
        completed = run(command, folder=workplace)
        assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.mark.slow
def test_from_pictures_to_a_picture_drawn(workplace, capsys, monkeypatch):
    monkeypatch.chdir(workplace)
    training = [command for command in launched() if is_of_training(command)]
    assert len(training) == 6
    for command in training:
        assert run_here(shlex.split(command)[1:], monkeypatch) == 0, capsys.readouterr()
    for folder in ("circle", "square"):
        drawn = list((workplace / folder / "pictures").iterdir())
        assert [path.name for path in drawn] == ["00000.png"]


@pytest.mark.slow
def test_from_pictures_of_a_subject_to_a_drawing(workplace, capsys, monkeypatch):
    import generate
    from sdbench.cli import main as sdbench
    from tests.launch.steps_here import run_steps_here
    from tests.train.smallest_model import write_model

    run_steps_here(monkeypatch)
    monkeypatch.chdir(workplace)
    Path("my-images").rename("my-dog")
    for caption in Path("my-dog").glob("*.txt"):
        caption.unlink()
    write_model(Path("stable-diffusion-2-base"))
    few = "--num_class_images 2 --num_samples 1 --sample_prompts unqtkn --engine torch"
    few += " --generate_flags '--num_steps 2' -- --max_duration 1ba --batch_size 2"
    of_subject = [command for command in launched() if is_of_subject(command)]
    assert len(of_subject) == 4
    for command in of_subject:
        if command.startswith("python generate.py "):
            code = generate.main([*shlex.split(command)[2:], "--num_steps", "2"])
        else:
            code = sdbench(shlex.split(f"{command} {few}")[3:])
        assert code == 0, capsys.readouterr()
    for folder in ("asleep", "asleep-lora"):
        assert [path.name for path in Path(folder, "pictures").iterdir()] == ["00000.png"]
    assert len(list(Path("runs").glob("my-dog*/after/grid.png"))) == 2


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "command",
    [
        command
        for command in commands()
        # tests/ray/test_launch.py runs that of benchmark.py
        if ON_RAY in command and not command.startswith("python benchmark.py ")
    ],
)
def test_a_command_on_ray_runs_as_it_stands(command, workplace):
    completed = run(command, folder=workplace, timeout_s=580)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    record = only_record(workplace / "runs")
    ranks = re.search(r"--num_ray_workers (\d+)", command)
    assert (record["status"], record["config"]["engine"]) == ("ok", "ray")
    assert record["ranks"]["world_size"] == (int(ranks[1]) if ranks else 1)


@pytest.fixture
def ray_head(tmp_path) -> Iterator[tuple[int, int, dict[str, str]]]:
    """The head of a Ray cluster: its port, that of its dashboard, and an environment for both."""
    environment = {**ENVIRONMENT, "RAY_AUTH_MODE": "token", "HOME": str(tmp_path / "home")}
    (tmp_path / "home").mkdir()
    completed = run("ray get-auth-token --generate", folder=tmp_path, env=environment)
    assert completed.returncode == 0, completed.stderr
    names = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port")
    ports = {name: free_port() for name in names}
    # By its own folder nobody else finds it; the names of sockets have to be short.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    options = [f"--temp-dir={folder}", *(f"--{name}={port}" for name, port in ports.items())]
    # All that it starts ends with it: `ray stop` would end the clusters of others as well.
    head = subprocess.Popen(
        [BIN / "ray", "start", "--head", "--block", "--num-cpus=4", *options],
        env=environment,
        stdout=(tmp_path / "head.log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        yield ports["port"], ports["dashboard-port"], environment
    finally:
        # By SIGTERM it would take half a minute.
        for process in (*psutil.Process(head.pid).children(recursive=True), head):
            process.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)  # agents of the head may still write there


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_cluster_is_joined_and_given_a_job(ray_head, workplace):
    port, dashboard_port, environment = ray_head
    (block,) = (block for block in blocks("text") if block.startswith("export RAY_AUTH_MODE"))
    export, token, start, joining, job, stop = block.splitlines()
    assert (export, token) == ("export RAY_AUTH_MODE=token", "ray get-auth-token --generate")
    assert (start, stop) == ("ray start --head", "ray stop")
    wait_for(lambda: has_dashboard(dashboard_port), what="the start of the dashboard")
    joining = joining.replace("--ray_address auto", f"--ray_address 127.0.0.1:{port}")
    job = job.replace("8265", str(dashboard_port)).replace("$PWD", str(workplace))
    for number, command in enumerate((joining, job), start=1):
        completed = run(command, folder=workplace, env=environment)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        assert "images/s" in completed.stdout
        records = [load_record(path) for path in (workplace / "runs").glob("*/record.json")]
        assert [record["status"] for record in records] == ["ok"] * number


def has_dashboard(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/api/version").close()
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)  # it asks for a token
    return True


@pytest.mark.slow
def test_long_commands_are_valid_plans_on_the_data_that_the_tools_make(
    workplace, capsys, monkeypatch
):
    from sdbench.cli import main

    monkeypatch.chdir(workplace)
    tools = [shlex.split(command)[3:] for command in launched() if is_tool(command)]
    assert tuple(tool[0] for tool in tools) == DATA_TOOLS
    for tool in tools:
        assert main([*tool, *(SMALL if tool[0] == "precompute" else ())]) == 0
    for command in launched():
        if not (is_quick(command) or is_tool(command) or is_of_training(command)):
            is_small = "--latents" in command
            assert plan(command, *(SMALL if is_small else ())) == 0, capsys.readouterr().err


def plan(command: str, *more: str) -> int:
    """Check a run as far as a machine with more memory would; returns the exit code."""
    import benchmark

    words = [word for word in shlex.split(command) if word != "--print_config"]
    argv = words[words.index("benchmark.py") + 1 :]
    return benchmark.main([*argv, *more, "--no_check_memory", "--print_config"])


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "command",
    [command for command in launched() if command.startswith("composer benchmark.py --use")],
)
def test_a_long_command_runs_to_its_end(command, workplace):
    completed = run(command, folder=workplace, timeout_s=1100)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "images/s" in completed.stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_and_command_that_a_document_names_is_there(document):
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    if document == CLUSTER_GUIDE:
        links += re.findall(r"`([\w.-]+\.(?:sh|sbatch))`", text)
    named = re.findall(r"`((?:sdbench|tests|single-node|multi-node|results)/[\w./-]*)`", text)
    for name in links:
        assert "://" in name or (ROOT / document).parent.joinpath(name).exists(), name
    named += re.findall(r"-f (\S+Dockerfile)", text)
    for name in named:
        assert (ROOT / name).exists(), name
    assert {*re.findall(r"python -m sdbench ([\w-]+)", text)} <= COMMANDS.keys()


def test_the_output_that_the_readme_shows_is_what_its_record_prints_today():
    text = (ROOT / "README.md").read_text()
    run = ROOT / re.search(r"\[the record\]\((\S+)/record.json\)", text)[1]
    shown = text.partition("```text\n")[2].partition("```")[0].splitlines()
    record = load_record(run)
    # The record may be older than a figure.
    record["summary"] = defaultdict(lambda: None, record["summary"])
    printed = dict(map(_name_and_value, format_summary(record).splitlines()))
    for name, value in map(_name_and_value, shown[: shown.index("")]):
        first, _, last = value.partition("...")
        assert printed[name].startswith(first) and printed[name].endswith(last), (name, value)
    assert "python -m sdbench compare" in "\n".join(shown[shown.index("Next:") :])
    # The picture of the page is within the first two screens.
    assert "results/plots/page.png" in "".join(text.splitlines()[:80])


def _name_and_value(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip(), maxsplit=1)


def test_every_test_that_the_table_of_faults_names_is_there():
    rows = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if line[:2] == "| "]
    faults = [row for row in rows if row != "| fault | what happens | test |"]
    assert len(faults) > 100
    for row in faults:
        *_, tests = row.strip("|").split(" | ")
        assert row.count(" | ") == 2, row
        named = re.findall(r"`([^`]+)::([^`]+)`", tests)
        assert named or tests.strip().startswith("none: "), row
        for path, name in named:
            module = ast.parse((ROOT / path).read_text())
            defined = {one.name for one in module.body if isinstance(one, ast.FunctionDef)}
            assert name in defined and name.startswith("test_"), f"{path}::{name}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        command
        for command in commands((CLUSTER_GUIDE,))
        if command.startswith(("composer ", "torchrun ")) and " benchmark.py" in command
    ],
)
def test_a_launcher_of_the_cluster_guide_starts_a_valid_run(command):
    assert plan(command) == 0
