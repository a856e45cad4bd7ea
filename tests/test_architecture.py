"""Do the modules import only what the plan of the house allows, and do scripts wait to be run?"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Who may import whom: a room is a module or a package of sdbench, or a top-level script. A module
# may import its own room, and otherwise what begins with one of these names.
ALLOWED: dict[str, tuple[str, ...]] = {
    "sdbench": (),
    "sdbench.errors": (),
    "sdbench.presets": (),
    "sdbench.parts": (),
    "sdbench.distributed": ("sdbench.errors",),
    "sdbench.heartbeat": ("sdbench.distributed",),
    "sdbench.nccl_log": ("sdbench.distributed",),
    "sdbench.signals": (),
    "sdbench.host_memory": (),
    "sdbench.shared_memory": (),
    "sdbench.statistics": ("sdbench.errors",),
    "sdbench.figures": ("sdbench.errors",),
    "sdbench.config": ("sdbench.errors", "sdbench.presets"),
    "sdbench.cache": ("sdbench.errors",),
    "sdbench.models": ("sdbench.errors", "sdbench.cache"),
    "sdbench.sources": ("sdbench.errors", "sdbench.cache", "sdbench.shared_memory"),
    "sdbench.measure": ("sdbench.errors", "sdbench.statistics"),
    "sdbench.progress": ("sdbench.measure",),
    "sdbench.wandb_log": ("sdbench.errors",),
    "sdbench.speedups": (
        "sdbench.errors",
        "sdbench.config",
        "sdbench.presets",
        "sdbench.distributed",
        "sdbench.host_memory",
        "sdbench.measure.hardware",
    ),
    "sdbench.resolve": (
        "sdbench.errors",
        "sdbench.config",
        "sdbench.distributed",
        "sdbench.speedups",
        "sdbench.models",
        "sdbench.sources",
        "sdbench.measure",
    ),
    "sdbench.describe": (
        "sdbench.config",
        "sdbench.distributed",
        "sdbench.resolve",
        "sdbench.measure",
    ),
    "sdbench.outcome": (
        "sdbench.errors",
        "sdbench.distributed",
        "sdbench.heartbeat",
        "sdbench.signals",
        "sdbench.measure",
    ),
    "sdbench.workloads": (
        "sdbench.errors",
        "sdbench.cache",
        "sdbench.parts",
        "sdbench.resolve",
        "sdbench.host_memory",
        "sdbench.models",
        "sdbench.sources",
    ),
    "sdbench.engines": (
        "sdbench.errors",
        "sdbench.parts",
        "sdbench.signals",
        "sdbench.distributed",
        "sdbench.measure",
    ),
    "sdbench.report": (
        "sdbench.errors",
        "sdbench.statistics",
        "sdbench.figures",
        "sdbench.config",
        "sdbench.presets",
        "sdbench.measure.record",
        "sdbench.measure.secrets",
    ),
    "sdbench.scaling": (
        "sdbench.errors",
        "sdbench.statistics",
        "sdbench.figures",
        "sdbench.measure.record",
        # How figures are shown: the same tables, cells and escapes as in a report.
        "sdbench.report.escape",
        "sdbench.report.row",
        "sdbench.report.tables",
        "sdbench.report.terminal",
        "sdbench.report.text_table",
    ),
    "sdbench.launch": (
        "sdbench.errors",
        "sdbench.shared_memory",
        "sdbench.statistics",
        "sdbench.presets",
        "sdbench.config",
        "sdbench.measure.record",
        "sdbench.measure.provenance",
        "sdbench.measure.secrets",
        "sdbench.signals",
        "sdbench.report.escape",
        "sdbench.report.row",
        "sdbench.report.tables",
        "sdbench.report.terminal",
        "sdbench.report.text_table",
    ),
    # From flags to tables, on the plan, the parts and the engines of benchmark.py.
    "sdbench.profile": (
        "sdbench.errors",
        "sdbench.config",
        "sdbench.resolve",
        "sdbench.describe",
        "sdbench.outcome",
        "sdbench.distributed",
        "sdbench.progress",
        "sdbench.signals",
        "sdbench.workloads",
        "sdbench.engines",
        "sdbench.measure",
        "sdbench.report.escape",
        "sdbench.report.tables",
        "sdbench.report.terminal",
        "sdbench.report.text_table",
    ),
    # Looks at what all the others need.
    "sdbench.doctor": (
        "sdbench.errors",
        "sdbench.cache",
        "sdbench.config",
        "sdbench.resolve",
        "sdbench.distributed",
        "sdbench.nccl_log",
        "sdbench.shared_memory",
        "sdbench.models",
        "sdbench.sources",
        "sdbench.measure",
        "sdbench.report.escape",
    ),
    # A command that runs from flags to record, as benchmark.py does.
    "sdbench.precompute": ("sdbench",),
    "sdbench.cli": ("sdbench",),
    "sdbench.__main__": ("sdbench.cli",),
    "benchmark": (
        "sdbench.errors",
        "sdbench.config",
        "sdbench.resolve",
        "sdbench.describe",
        "sdbench.outcome",
        "sdbench.distributed",
        "sdbench.heartbeat",
        "sdbench.nccl_log",
        "sdbench.parts",
        "sdbench.progress",
        "sdbench.signals",
        "sdbench.wandb_log",
        "sdbench.workloads",
        "sdbench.engines",
        "sdbench.measure",
        "sdbench.report",
    ),
    "data": (
        "sdbench.errors",
        "sdbench.config",
        "sdbench.outcome",
        "sdbench.signals",
        "sdbench.sources",
        "sdbench.measure",
        "sdbench.report",
    ),
    "calculate_number_of_parameters": ("sdbench.errors", "sdbench.models"),
}

# Packages that cost seconds or are not on every machine, and who may import them at module level.
# Anyone else imports them inside the function that needs them.
HEAVY_OWNERS: dict[str, tuple[str, ...]] = {
    "torch": (
        "sdbench.models",
        "sdbench.sources",
        "sdbench.workloads",
        "sdbench.engines",
        "sdbench.profile",
    ),
    "torchvision": ("sdbench.sources",),
    "diffusers": ("sdbench.models",),
    "transformers": ("sdbench.models", "sdbench.sources"),
    "composer": ("sdbench.engines.composer",),
    "ray": ("sdbench.engines.ray",),
    "lightning": ("sdbench.engines.ray",),
    "streaming": ("sdbench.sources",),
    "webdataset": ("sdbench.sources",),
    "pyarrow": ("sdbench.sources",),
    "boto3": (),
    "PIL": ("sdbench.sources",),
    "wandb": (),
    "scipy": (),
    "pandas": (),
    "matplotlib": (),
    "jinja2": (),
}

# A laptop makes the tables and starts the runs: these never reach torch.
TORCH_FREE = ("sdbench.report", "sdbench.scaling", "sdbench.launch")

SCRIPTS = ("benchmark", "data", "calculate_number_of_parameters")

# The text files that are data of other people, as they gave it.
NOT_ASCII: tuple[str, ...] = ()


def begins_with(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which room they come from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_when_loaded(tree: ast.AST) -> Iterator[str]:
    """The same without what is inside functions or `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        else:
            yield from imports_when_loaded(node)


def find_import_violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Everything that this module imports and must not."""
    tree = ast.parse(source)
    room = room_of(module)
    if room not in ALLOWED:
        return [f"{module}: room {room} is not in the table ALLOWED"]
    violations = [
        f"{module} imports {name}"
        for name in imports(tree)
        if begins_with(name, ("sdbench",)) and not is_allowed(name, room)
    ]
    for name in imports_when_loaded(tree):
        package = name.split(".")[0]
        if package in HEAVY_OWNERS and (
            is_package or not begins_with(module, HEAVY_OWNERS[package])
        ):
            violations.append(f"{module} imports {package} when it is loaded")
    if begins_with(module, TORCH_FREE):
        violations += [
            f"{module} imports {name}, and {room} does without torch"
            for name in imports(tree)
            if begins_with(name, ("torch",))
        ]
    return violations


def is_allowed(name: str, room: str) -> bool:
    if room != "sdbench" and begins_with(name, (room,)):
        return True
    return begins_with(name, ALLOWED[room])


def find_statements_that_run(source: str) -> list[str]:
    """What a script does when it is imported: anything but definitions, constants and the guard."""
    quiet = (
        ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    )
    return [
        f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}"
        for node in ast.parse(source).body
        if not isinstance(node, quiet)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (
            isinstance(node, ast.If)
            and ast.unparse(node.test) in ("__name__ == '__main__'", "TYPE_CHECKING")
        )
    ]


def find_text_violations(text: str) -> list[str]:
    violations = [f"not ASCII: {line!r}" for line in text.splitlines() if not line.isascii()]
    violations += re.findall(r"/(?:home|root|Users)/\w+", text)
    return violations


def module_files() -> dict[str, Path]:
    files = {name: ROOT / f"{name}.py" for name in SCRIPTS if (ROOT / f"{name}.py").exists()}
    for path in sorted((ROOT / "sdbench").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


MODULES = module_files()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    path = MODULES[module]
    is_package = path.name == "__init__.py"
    assert find_import_violations(module, path.read_text(), is_package=is_package) == []


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name in MODULES])
def test_importing_a_script_runs_nothing(script: str) -> None:
    assert find_statements_that_run(MODULES[script].read_text()) == []


def loaded_heavy_packages(modules: list[str]) -> list[str]:
    """Which heavy packages a fresh interpreter has after it imported these modules."""
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return sorted(HEAVY_OWNERS.keys() & set(output.split()))


def test_tables_and_launchers_do_not_reach_torch() -> None:
    modules = [name for name in MODULES if begins_with(name, TORCH_FREE)]
    assert "torch" not in loaded_heavy_packages(modules)


@pytest.mark.parametrize(
    "module", [name for name in (*SCRIPTS, "sdbench.cli") if name in MODULES and name != "data"]
)
def test_a_program_answers_help_without_heavy_packages(module: str) -> None:
    # data.py is not here: it offers the data set classes, which are built on torch's.
    assert loaded_heavy_packages([module]) == []


def test_every_text_file_is_ascii_and_names_no_home() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nobody knows which files belong to it")
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    violations = {}
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if name in NOT_ASCII or not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" not in content and (found := find_text_violations(content.decode("utf-8"))):
            violations[name] = found
    assert violations == {}


# The checkers themselves, on sources that break the rules.


@pytest.mark.parametrize(
    ("module", "source", "violation"),
    [
        (
            "sdbench.models.unet",
            "from sdbench.sources.mds import open_mds",
            "sdbench.models.unet imports sdbench.sources.mds.open_mds",
        ),
        (
            "sdbench.measure.timer",
            "def read():\n    from sdbench import engines",
            "sdbench.measure.timer imports sdbench.engines",
        ),
        (
            "sdbench.report.tables",
            "from sdbench.measure.timer import StepTimer",
            "sdbench.report.tables imports sdbench.measure.timer.StepTimer",
        ),
        (
            "sdbench.config",
            "import torch",
            "sdbench.config imports torch when it is loaded",
        ),
        (
            "sdbench.engines.lean",
            "try:\n    import composer.core\nexcept ImportError:\n    pass",
            "sdbench.engines.lean imports composer when it is loaded",
        ),
        (
            "sdbench.scaling.days",
            "def days():\n    import torch",
            "sdbench.scaling.days imports torch, and sdbench.scaling does without torch",
        ),
        (
            "sdbench.newroom.thing",
            "",
            "sdbench.newroom.thing: room sdbench.newroom is not in the table ALLOWED",
        ),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str, violation: str) -> None:
    assert find_import_violations(module, source) == [violation]


def test_a_package_loads_nothing_heavy_even_if_its_modules_may() -> None:
    assert find_import_violations("sdbench.models", "import torch", is_package=True) == [
        "sdbench.models imports torch when it is loaded"
    ]


def test_allowed_imports_are_no_violation() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "from sdbench.errors import ConfigError\n"
        "from sdbench.measure.timer import Step\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def read():\n    import torch\n"
    )
    assert find_import_violations("sdbench.measure.record", source) == []


def test_a_script_that_runs_on_import_is_found() -> None:
    source = '"""Doc."""\nimport os\nSIZE = 1\nmain()\nif __name__ == "__main__":\n    main()\n'
    assert find_statements_that_run(source) == ["line 4: main()"]


def test_text_of_another_machine_is_found() -> None:
    home = "/" + "home/somebody"
    assert find_text_violations(f"fine\nsee {home}/file\n") == [home]
    assert find_text_violations("caf\u00e9\n") == ["not ASCII: 'caf\u00e9'"]
