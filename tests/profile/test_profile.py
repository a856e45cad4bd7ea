"""The profile of the tiny model through its command, and the parts that it is reckoned from."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch

from sdbench.base.shape import Shape
from sdbench.cli import main
from sdbench.measure import ceilings
from sdbench.measure.ceilings import Ceiling
from sdbench.measure.phases import PHASES
from sdbench.models.architecture import resolve_architecture
from sdbench.models.components import count_parameters
from sdbench.models.replay import Step, count_flops
from sdbench.profile.printout import add_figures
from sdbench.profile.roofline import Ceilings, Operator, Profile, Timing, Work, join
from sdbench.profile.steps import PhaseMarks, StepEvents
from sdbench.profile.work import WorkCounter
from tests.refusals import printed_refusal

TINY = ("--model_name", "tiny", "--use_synth_data", "--engine", "torch")
CEILINGS = Ceilings(
    arithmetic={"float32": Ceiling("product", 1.0), "bfloat16": Ceiling("convolution", 4.0)},
    memory=Ceiling("copy", 10.0),
)
# Views and copies.
NO_ARITHMETIC = {"aten::reshape", "aten::dropout", "aten::to", "aten::slice"}
SHORT = ("--warmup_batches", "1", "--measure_batches", "1", "--profile_batches", "1")


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch, plain_replay):
    """The ceilings themselves are measured in tests/measure."""
    monkeypatch.setitem(ceilings.ARRAY_BYTES, "cpu", 1 << 24)
    monkeypatch.setattr(ceilings, "CONVOLUTION_CHANNELS", 16)
    monkeypatch.setitem(ceilings.MATRIX_SIZE, "cpu", 256)


def profile_tiny(folder, *argv):
    assert main(["profile", *TINY, *SHORT, "--folder", str(folder), *argv]) == 0
    content = json.loads((folder / "profile.json").read_text())
    with (folder / "operators.csv").open() as file:
        return content, list(csv.DictReader(file))


def attention_flop_done_twice(operators):
    """What the backward pass of fused attention computes again: Q K^T, one of its five products."""
    total = 0.0
    for row in operators:
        if "flash_attention_for_cpu_backward" in row["operator"]:
            _, query, key, *_ = (
                [int(size) for size in shape.split("x")] for shape in row["shapes"].split()
            )
            images, heads, num_queries, width = query
            product = 2 * images * heads * num_queries * key[2] * width * float(row["calls"])
            assert float(row["gflop"]) == pytest.approx(5 * product / 1e9)
            total += product
    assert total > 0
    return total


@pytest.mark.slow
def test_the_counted_step_does_the_arithmetic_of_the_model_and_all_of_its_time_is_told(
    tmp_path, capsys
):
    recipe = ("--preset", "seed", "--use_ema", "--optimizer", "adamw_fused")
    two_microbatches = ("--batch_size", "4", "--device_train_microbatch_size", "2")
    content, operators = profile_tiny(tmp_path / "out", *recipe, *two_microbatches, "--top", "5")
    step, phases = content["step"], content["phases"]
    architecture = resolve_architecture("tiny")
    model_gflop = 4 * count_flops(Step(architecture=architecture, shape=Shape.square(64))) / 1e9
    counted_gflop = model_gflop + attention_flop_done_twice(operators) / 1e9
    assert step["model_gflop"] == pytest.approx(model_gflop, rel=1e-12)
    assert step["counted_gflop"] == pytest.approx(counted_gflop, rel=1e-12)
    gflops = [float(row["gflop"] or 0) for row in operators]
    assert sum(gflops) == pytest.approx(counted_gflop, rel=1e-9)

    assert list(phases) == [*(phase for phase in PHASES if phase in phases), "no operator"]
    assert phases["optimizer"]["gflop"] == 0 and phases["optimizer"]["gb"] > 0
    assert phases["ema"]["time_ms"] > 0
    assert sum(phase["step_percent"] for phase in phases.values()) == pytest.approx(100)
    explained_ms = step["explained_percent"] / 100 * step["profiled_step_ms"]
    unmatched_ms = sum(content["unmatched"].values())
    assert explained_ms + unmatched_ms + step["outside_operators_ms"] == pytest.approx(
        step["profiled_step_ms"]
    )
    # All that the counted step did ran in the profiled ones, and as often. Beyond it there is what
    # does no arithmetic, which takes a busy machine long enough for a warning.
    for warning in content["warnings"]:
        _, found, names = warning.partition("so that their work is not known: ")
        assert found and set(names.split(", ")) <= NO_ARITHMETIC
    assert all(row["time_ms"] for row in operators if float(row["gb"] or 0) > 0)

    floors_ms = sum(float(row["floor_ms"] or 0) for row in operators)
    assert step["floor_ms"] == pytest.approx(floors_ms)
    assert step["images_per_second_at_floor"] == pytest.approx(4e3 / floors_ms)
    peak_tflops = content["ceilings"]["tflops"]["float32"]
    assert step["ideal_floor_ms"] == pytest.approx(model_gflop / peak_tflops)
    # Read: a gradient of 2 bytes, a weight and two moments of 4; written: these, and 2 bytes.
    num_trained = count_parameters(architecture)["unet"]
    update_ms = 28 * num_trained / content["ceilings"]["gb_per_s"] / 1e6
    assert step["needed_floor_ms"] == pytest.approx(step["ideal_floor_ms"] + update_ms)

    assert content["command"][:4] == ["python", "-m", "sdbench", "profile"]
    assert content["config"]["use_ema"] and content["versions"]["torch"]
    output = capsys.readouterr().out
    assert "The 5 operators of the longest time" in output
    assert f"computes {counted_gflop / model_gflop:.3f} times the model's FLOPs" in output
    assert (tmp_path / "out" / "stdout.log").read_text() == output


def make(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


BF16 = torch.bfloat16
THREE_ROWS = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("operator", "arguments", "flop", "num_bytes"),
    [
        (torch.mm, (make(8, 16), make(16, 4)), 2 * 8 * 16 * 4, 4 * (128 + 64 + 32)),
        (torch.mm, (make(8, 16, dtype=BF16), make(16, 4, dtype=BF16)), 1024, 2 * (128 + 64 + 32)),
        (torch.add, (make(10), make(10)), 0, 4 * 30),
        (lambda a: a * a, (make(10),), 0, 4 * 20),
        (torch.Tensor.add_, (make(10), make(10)), 0, 4 * 30),
        (torch.Tensor.copy_, (make(10), make(10)), 0, 4 * 20),
        (lambda a, b: torch.sqrt(a, out=b), (make(10), make(10)), 0, 4 * 20),
        (torch.Tensor.float, (make(10, dtype=torch.uint8),), 0, 10 + 40),
        (torch.add, (make(4, 5), make(5).expand(4, 5)), 0, 4 * (20 + 5 + 20)),
        (torch.zeros, (10,), 0, 4 * 10),
        (torch.cat, ([make(10), make(6)],), 0, 4 * 32),
        # Of a table of 100 rows three are read, and their numbers of 8 bytes.
        (torch.nn.functional.embedding, (THREE_ROWS, make(100, 4)), 0, 3 * 8 + 2 * 4 * 12),
        # a += (b - a) / 2: both are read, one is written.
        (torch._foreach_lerp_, ([make(3), make(4)], [make(3), make(4)], 0.5), 0, 4 * 21),
        # A view, a new name and a place for numbers.
        (lambda a: a.t()[1:].detach(), (make(4, 5),), 0, 0),
        (torch.Tensor.t_, (make(4, 5),), 0, 0),
        (torch.empty_like, (make(10),), 0, 0),
    ],
)
def test_work_is_that_reckoned_by_hand(operator, arguments, flop, num_bytes):
    with WorkCounter(phase=lambda: "other", device_type="cpu") as counter:
        operator(*arguments)
    works = counter.work.values()
    assert works
    assert sum(work.flop for work in works) == flop
    assert sum(work.num_bytes for work in works) == num_bytes


def test_fused_adamw_moves_28_bytes_a_weight():
    weight = make(1000).requires_grad_()
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = make(1000)
    optimizer.step()
    with WorkCounter(phase=lambda: "optimizer", device_type="cpu") as counter:
        optimizer.step()
    works = {operator.name: work for (operator, _), work in counter.work.items()}
    # It reads weight, gradient and two moments and writes all but the gradient; and one step count.
    assert works["aten::_fused_adamw_"].num_bytes == 28 * 1000 + 4


def test_operators_that_were_not_counted_are_told_with_their_time_and_phase():
    phases, left = PhaseMarks(), make(64, 64)
    mm = Operator("unet_forward", "aten::mm", ((64, 64), (64, 64)))
    events = StepEvents({mm}, device_type="cpu")
    for _ in range(2):
        session = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        )
        with session as profiler, phases.tell_profiler():
            with phases.phase("unet_forward"):
                torch.mm(left, left)
                torch.mm(left, left)
            torch.sin(left)
        events.add(profiler.events())
    sin = Operator("other", "aten::sin", ((64, 64),))
    calls = {operator: timing.calls for operator, timing in events.operators.items()}
    assert calls == {mm: 2, sin: 1}
    assert 0 < sum(timing.time_s for timing in events.operators.values()) < events.step_s


def test_floors_and_shares_of_planted_work_are_exact():
    product = Operator("backward", "aten::mm", ((2, 3), (3, 4)))
    addition = Operator("optimizer", "aten::add", ((5,),))
    view, strange = Operator("backward", "aten::t", ()), Operator("backward", "my::op", ())
    counted = {
        # 2 s in fp32 and 0.5 s in bf16 by arithmetic; 0.5 s and 1.5 s by bytes.
        (product, "float32"): Work(calls=4, flop=2 * 10**12, num_bytes=5 * 10**9),
        (product, "bfloat16"): Work(calls=1, flop=2 * 10**12, num_bytes=15 * 10**9),
        (addition, "float32"): Work(calls=2, flop=0, num_bytes=20 * 10**9),
        (view, "float32"): Work(calls=7),
    }
    timed = {
        product: Timing(calls=5, time_s=5.0),
        addition: Timing(calls=3, time_s=4.0),
        view: Timing(calls=6, time_s=0.25),
        strange: Timing(calls=1, time_s=0.5),
    }
    rows = join(counted, timed, ceilings=CEILINGS)
    profile = Profile(
        rows=rows,
        kernels={},
        ceilings=CEILINGS,
        step_s=8.0,
        profiled_step_s=10.0,
        num_images=11,
        model_flop=2e12,
        num_trained=10**9,
    )
    figures = add_figures(rows, profile).set_index("operator")
    # Longest first.
    assert list(figures.index) == ["aten::mm", "aten::add", "my::op", "aten::t"]
    names = ["floor_ms", "bound", "tflop_per_s", "arithmetic_percent", "gb_per_s", "memory_percent"]
    assert figures[names].values.tolist() == [
        [2000.0 + 1500.0, "arithmetic", 0.8, 50.0, 4.0, 40.0],
        [2000.0, "memory", 0.0, None, 5.0, 50.0],
        [None] * 6,
        [0.0, None, 0.0, None, 0.0, None],
    ]
    assert figures.types["aten::mm"] == "bfloat16 float32"
    assert figures.shapes["aten::mm"] == "2x3 3x4"
    assert list(rows.operator[rows.calls_differ]) == ["aten::add"]  # a view is no work

    assert profile.floor_s == 5.5 and profile.counted_flop == 4 * 10**12
    # 2 TFLOP at 4 TFLOP/s, and 28 GB at 10 GB/s.
    assert profile.needed_floor_s == pytest.approx(0.5 + 2.8)
    assert (profile.explained_percent, profile.outside_s) == (92.5, 0.25)
    assert list(profile.unmatched.operator) == ["my::op"]
    phases = profile.by_phase.set_index("phase")
    assert list(phases.index) == ["backward", "optimizer", "no operator"]
    assert phases.time_s.tolist() == [5.75, 4.0, 0.25]
    assert phases.floor_s["backward"] == 3.5
    shares = add_figures(profile.by_phase, profile).step_percent
    assert math.isclose(sum(shares), 100)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_the_ideal_floor_is_that_of_the_type_that_does_most_of_the_arithmetic():
    counted = {
        (Operator("backward", "aten::mm", ((2, 3),)), "float32"): Work(1, 10**12, 1),
        (Operator("backward", "aten::mm", ((2, 4),)), "bfloat16"): Work(1, 3 * 10**12, 1),
    }
    rows = join(counted, {}, ceilings=CEILINGS)
    profile = Profile(rows, {}, CEILINGS, 8.0, 10.0, num_images=1, model_flop=6e12, num_trained=1)
    assert (profile.main_dtype, profile.ideal_floor_s) == ("bfloat16", 1.5)


@pytest.mark.parametrize(
    ("argv", "flag", "value"),
    [
        (("--profile_batches", "0"), "--profile_batches", 0),
        (
            ("--batch_size", "66", "--device_train_microbatch_size", "2"),
            *("--batch_size or --device_train_microbatch_size", 66),
        ),
        (("--max_duration", "9ba"), "--max_duration", "9ba"),
        (("--top", "none"), "--top", "none"),
    ],
)
def test_what_cannot_be_profiled_is_refused_by_name(tmp_path, capsys, argv, flag, value):
    assert main(["profile", *TINY, "--folder", str(tmp_path / "out"), *argv]) == 2
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == (flag, value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path, capsys):
    folder = tmp_path / "taken"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    assert main(["profile", *TINY, "--folder", str(folder)]) == 2
    assert printed_refusal(capsys.readouterr().err).flag == "--folder"
    assert [path.name for path in folder.iterdir()] == ["mine"]
