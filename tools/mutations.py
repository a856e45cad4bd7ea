"""Plants faults in the package, notes the tests that find them, and compares two such notes.

    python tools/mutations.py draw --seed 31 --num 130 > tools/mutations.csv
    python tools/mutations.py run --out before.csv -- -x -n 0 tests/data tests/engines
    python tools/mutations.py table before.csv after.csv

The number of faults of a room is proportional to the square root of its lines, at least three. The
kinds of faults take turns; within a kind every place is equally likely. `equivalent.csv` lists the
numbers of faults that change nothing: the next fault of the same draw replaces each.

`run` clones the checkout, without changes that are not committed. It plants one fault after another
in the clone, and runs pytest there with the arguments after ``--``. These tests have to pass
without a fault. An interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import itertools
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ["id", "room", "file", "function", "line", "change", "result", "tests"]
# Files without faults: no test of `make test` on a machine without a GPU can reach them.
LEFT_OUT_FILES = (
    *("engines/cuda_graph.py", "measure/gpu_monitor.py", "measure/nvml.py", "doctor/gpus.py"),
    # Tests marked ray.
    *("engines/ray.py", "launch/ray_*.py", "ranks/ray_cluster.py", "measuring/ray_feed.py"),
    "encoding/ray_stream.py",
)
LEAST_OF_ROOM = 3
# Annotations and decorators; arguments about the look of something or a check.
LEFT_OUT_FIELDS = {"annotation", "returns", "decorator_list"}
LEFT_OUT_ARGUMENTS = {"help", "metavar", "description", "epilog", "stacklevel", "strict", "flush"}
LOGGING = re.compile(r"(logging|logger|log|warnings)\.")

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}
ARITHMETIC = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
}
EXTREMES = {"min": "max", "max": "min"}
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Mutation(NamedTuple):
    """A row of the list. `original`, whole lines inside of `function`, identifies its place."""

    id: str
    room: str
    file: str
    function: str
    line: int
    original: str
    mutated: str
    kind: str


class Edit(NamedTuple):
    """A replacement of the text between two offsets."""

    start: int
    end: int
    text: str
    kind: str


class Source:
    """A file, its tree, and the positions of the nodes in its text, in bytes."""

    def __init__(self, text: bytes):
        self.text, self.tree = text, ast.parse(text)
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the start and the end of the node."""
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def code(self, node: ast.AST) -> str:
        """Return the text of the node."""
        start, end = self.span(node)
        return self.text[start:end].decode()

    def edits(self) -> Iterator[tuple[str, Edit]]:
        """Yield the mutations of the file with the dotted names of the scopes around them."""
        for node, names in _walk(self.tree, ()):
            yield from ((".".join(names), edit) for edit in self._edits_of(node))

    def row(self, room: str, file: str, function: str, edit: Edit) -> Mutation:
        """Return the edit as whole lines."""
        first = self.text.count(b"\n", 0, edit.start)
        last = self.text.count(b"\n", 0, edit.end)
        start, end = self._starts[first], self._starts[last + 1]
        original = self.text[start:end].decode().rstrip("\n")
        new = self.text[start : edit.start] + edit.text.encode() + self.text[edit.end : end]
        mutated = new.decode().rstrip("\n")
        number = hashlib.sha1("|".join((file, function, original, mutated)).encode())
        name = number.hexdigest()[:8]
        return Mutation(name, room, file, function, first + 1, original, mutated, edit.kind)

    def _edits_of(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                for op, one, other in zip(ops, [left, *others], others, strict=False):
                    yield from self._between(one, other, COMPARISONS[type(op)], "comparison")
            case ast.BoolOp(op=op, values=values):
                names = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                for one, other in itertools.pairwise(values):
                    yield from self._between(one, other, names, "and/or")
            case ast.BinOp(op=op, left=left, right=right) if type(op) in ARITHMETIC:
                if not (_is_text_or_list(left) or _is_text_or_list(right)):
                    yield from self._between(left, right, ARITHMETIC[type(op)], "arithmetic")
            case ast.UnaryOp(op=ast.Not()):
                rest = re.sub(r"^not\b\s*", "", self.code(node))
                yield Edit(*self.span(node), rest, "not")
            case ast.Call(func=ast.Name(id="min" | "max" as name)):
                yield Edit(*self.span(node.func), EXTREMES[name], "min/max")
            case ast.Constant(value=bool() as value):
                yield Edit(*self.span(node), str(not value), "constant")
            case ast.Constant(value=int() as value):
                yield Edit(*self.span(node), repr(value + 1), "constant")
            case ast.Constant(value=float() as value):
                yield Edit(*self.span(node), repr(2 * value or 1.0), "constant")
            case ast.Return(value=value) if value is not None and self.code(value) != "None":
                yield Edit(*self.span(node), "return None", "statement")
            case ast.Expr(value=ast.Call(func=function)) if LOGGING.match(self.code(function)):
                pass
            case (
                ast.Expr(value=ast.Call())
                | ast.Raise()
                | ast.AugAssign()
                | ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_])
            ):
                yield Edit(*self.span(node), "pass", "statement")

    def _between(
        self, one: ast.AST, other: ast.AST, change: tuple[str, str], kind: str
    ) -> Iterator[Edit]:
        """Replace the operator between two nodes."""
        start, end = self.span(one)[1], self.span(other)[0]
        pattern, new = change
        if found := re.search(pattern, self.text[start:end].decode()):
            yield Edit(start + found.start(), start + found.end(), new, kind)


def _walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    for field, value in ast.iter_fields(node):
        if field in LEFT_OUT_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_left_out(child):
                continue
            inner = (*names, child.name) if isinstance(child, NAMED) else names
            yield child, inner
            yield from _walk(child, inner)


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.If(test=test):
            return bool({"TYPE_CHECKING", "__name__"} & set(re.findall(r"\w+", ast.unparse(test))))
        case ast.keyword(arg=name):
            return name in LEFT_OUT_ARGUMENTS
    return isinstance(node, ast.JoinedStr)  # before Python 3.12 its parts have no place


def _is_text_or_list(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def apply(mutation: Mutation, text: bytes) -> tuple[bytes, range] | None:
    """Return the mutated file and the changed lines; None if the place is not unique."""
    lines = text.decode().splitlines()
    whole = range(len(lines))
    found = [
        range(node.lineno - 1, node.end_lineno)
        for node, names in _walk(ast.parse(text), ())
        if isinstance(node, NAMED) and ".".join(names) == mutation.function
    ]
    wanted = mutation.original.split("\n")
    for places in (found, [whole]):
        starts = {at for place in places for at in place if lines[at : at + len(wanted)] == wanted}
        if len(starts) == 1:
            at = starts.pop()
            lines[at : at + len(wanted)] = mutation.mutated.split("\n")
            return ("\n".join(lines) + "\n").encode(), range(at + 1, at + len(wanted) + 1)
    return None


def draw(package: Path, *, seed: int, num: int, passed_over: set[str]) -> list[Mutation]:
    """Draw about `num` mutations of the files of a package, each of another line."""
    rooms: dict[str, dict[str, Source]] = defaultdict(dict)
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package)
        if not any(PurePath(inner).match(pattern) for pattern in LEFT_OUT_FILES):
            room = inner.parts[0] if len(inner.parts) > 1 else "(root)"
            rooms[room][f"{package.name}/{inner.as_posix()}"] = Source(path.read_bytes())
    roots = {
        room: math.sqrt(sum(source.text.count(b"\n") for source in sources.values()))
        for room, sources in rooms.items()
    }
    drawn: dict[tuple[str, int], Mutation] = {}
    for room, sources in sorted(rooms.items()):
        rows = [
            source.row(room, file, function, edit)
            for file, source in sources.items()
            for function, edit in source.edits()
        ]
        random.Random(f"{seed} {room}").shuffle(rows)
        # The kinds take turns: first one row of each, then the second of each.
        num_before = Counter[str]()
        turns = []
        for row in rows:
            turns.append(num_before[row.kind])
            num_before[row.kind] += 1
        pairs = sorted(zip(turns, rows, strict=True), key=lambda pair: pair[0])
        end = len(drawn) + max(LEAST_OF_ROOM, round(num * roots[room] / sum(roots.values())))
        for _, row in pairs:
            if len(drawn) == end:
                break
            if row.id not in passed_over and _is_valid(row, sources[row.file]):
                drawn.setdefault((row.file, row.line), row)
    return list(drawn.values())


def _is_valid(row: Mutation, source: Source) -> bool:
    if (applied := apply(row, source.text)) is None:
        return False
    try:
        return ast.dump(ast.parse(applied[0])) != ast.dump(source.tree)
    except SyntaxError:
        return False


def read(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file with a header."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]) -> str:
    """Make a table of drawn and found faults by room, and a list of the faults not found."""
    first, second = ({row["id"]: row for row in rows} for rows in (before, after))
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("drawn", "before", "after")}
    lines = []
    for name, row in (first | second).items():
        results = [rows[name]["result"] if name in rows else "not run" for rows in (first, second)]
        is_found = [result in ("found", "timeout") for result in results]
        for column, counted in zip(counts, (True, *is_found), strict=True):
            counts[column].update({row["room"]: counted, "all": counted})
        if not all(is_found):
            place = f"{row['file']}:{row['line']}"
            lines.append(f"  {name} {place} ({', '.join(results)}): {row['change']}")
    heads = [f"{'room':<12}" + "".join(f"{column:>8}" for column in counts)]
    for room in sorted(counts["drawn"], key=lambda room: (room == "all", room)):
        heads.append(f"{room:<12}" + "".join(f"{count[room]:>8}" for count in counts.values()))
    return "\n".join([*heads, "", "Not found before or after:", *(lines or ["  none"])])


def run(rows: Sequence[Mutation], *, out: Path, pytest: Sequence[str], limit_s: float) -> None:
    """Append a line to `out` for each mutation that has none there."""
    if not out.exists():
        out.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    done = {row["id"] for row in read(out)}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "-q", "--shared", ROOT, clone], check=True)
        if (without := _judge(clone, pytest, limit_s))["result"] != "survived":
            sys.exit(f"These tests fail without a fault: {without}")
        for row in rows:
            if row.id in done:
                continue
            path = clone / row.file
            clean = path.read_bytes() if path.exists() else b""
            line = {**row._asdict(), "result": "does not apply"}
            line["change"] = f"{row.original.strip()} -> {row.mutated.strip()}".replace("\n", " ")
            if applied := apply(row, clean):
                mutated, places = applied
                path.write_bytes(mutated)
                # Records name changed files: they must not show the fault.
                hide = ["git", "update-index", "--assume-unchanged", row.file]
                subprocess.run(hide, cwd=clone, check=True)
                line |= {"line": places.start, **_judge(clone, pytest, limit_s)}
                path.write_bytes(clean)
            with out.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(
                    file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n"
                )
                writer.writerow(line)
            print(row.id, row.file, line["line"], line["result"], flush=True)


def _judge(clone: Path, arguments: Sequence[str], limit_s: float) -> dict[str, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *arguments]
    # A cached file of the same size and second would count as the compilation of the next fault.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command,
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return {"result": "timeout"}
    if process.returncode == 0:
        return {"result": "survived"}
    # Exit codes above 1 are of pytest: a file that cannot be imported, or no tests.
    tests = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, flags=re.MULTILINE)
    return {"result": "found", "tests": " ".join(tests) or output.strip().rpartition("\n")[2]}


def main(argv: Sequence[str] | None = None) -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("draw")
    one.add_argument("--package", type=Path, default=ROOT / "sdbench")
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--num", type=int, default=130)
    one = commands.add_parser("run")
    one.add_argument("--list", type=Path, default=ROOT / "tools/mutations.csv")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--only", nargs="+", help="numbers of mutations")
    one.add_argument("--limit_s", type=float, default=600, help="of the tests of a fault")
    one.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    one = commands.add_parser("table")
    one.add_argument("before", type=Path)
    one.add_argument("after", type=Path)
    args = parser.parse_args(argv)
    if args.command == "draw":
        passed_over = {row["id"] for row in read(ROOT / "tools/equivalent.csv")}
        rows = draw(args.package, seed=args.seed, num=args.num, passed_over=passed_over)
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([Mutation._fields, *rows])
    elif args.command == "table":
        print(table(read(args.before), read(args.after)))
    else:
        rows = [Mutation(**{**row, "line": int(row["line"])}) for row in read(args.list)]
        rows = [row for row in rows if not args.only or row.id in args.only]
        run(rows, out=args.out, pytest=args.pytest, limit_s=args.limit_s)


if __name__ == "__main__":
    main()
