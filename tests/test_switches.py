"""Every speed-up trains the miniature to the losses of the plain recipe, within its tolerance.

Data, noise and weights are those of one seed, so that only the arithmetic may differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import benchmark
from sdbench.analysis.ladder import RUNGS
from sdbench.models.blocks import drop_unit_divisions
from sdbench.settings.config import SPEED_UPS
from sdbench.settings.setting import ANY_NUMBER, BF16, CPU, EMA, SAME_FP32, describe_flags
from tests.refusals import printed_refusal
from tests.runs import only_record
from tests.train.written import read_losses

pytestmark = pytest.mark.usefixtures("plain_replay")

# Two micro-batches a step, the second of them smaller.
RUN = (
    *("--model_name", "nano", "--use_synth_data", "--num_workers", "0", "--no_measure_peak"),
    *("--warmup_batches", "0", "--measure_batches", "3", "--profile_batches", "0"),
    *("--batch_size", "3", "--device_train_microbatch_size", "2", "--allow_uneven_batch"),
)
# What losses do not show, a GPU alone has, or several ranks, is tested elsewhere: the average in
# tests/engines/test_conformance.py, the others in tests/launch/test_gpu.py and test_sharding.py.
# A rung of any number is tried with as many as the batch has; a micro-batch is encoded as without.
NUM = 3
SWITCHES = {
    describe_flags(
        {
            name: NUM if value == ANY_NUMBER else value
            for name, value in {**rung.needs, **rung.settings}.items()
        }
    ): rung.loss_tolerance
    for rung in RUNGS
    if rung.loss_tolerance is not None
} | {"--encoder_batch_size 2": 0.0}


def losses_of(folder, *argv):
    assert benchmark.main([*RUN, *argv, "--results_dir", str(folder)]) == 0
    record = only_record(folder)
    assert record["status"] == "ok"
    return [float(loss) for loss in read_losses(folder / record["run_id"])]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses of the recipe without speed-ups, under Composer."""
    losses = losses_of(tmp_path_factory.mktemp("plain"), "--preset", "seed")
    assert len(set(losses)) == len(losses)  # no step is like another
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("switch", "tolerance"), SWITCHES.items())
def test_a_switch_alone_gives_the_same_losses(
    switch, tolerance, plain, tmp_path, without_compiling
):
    losses = losses_of(tmp_path, "--preset", "seed", *switch.split(), "--engine", "torch")
    assert losses == pytest.approx(plain, rel=tolerance, abs=0)


# They see no model, and are tried with one family.
OF_ANY_MODEL = (
    "--optimizer",
    "--image_dtype",
    "--cpu_allocator",
    "--flush_denormals",
    "--num_threads",
)
# Of a U-Net alone. SDXL's is of the same classes as that of the switches above.
REFUSED = {
    "--memory_format channels_last --keep_layout": "--keep_layout",
    "--memory_format channels_last --convolution matmul": "--convolution",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_each_switch_gives_a_family_the_same_losses_or_is_refused_by_name(
    family, tmp_path, without_compiling, capsys
):
    model = ("--model_name", f"tiny-{family}", "--preset", "seed")
    plain = losses_of(tmp_path / "plain", *model)
    assert len(set(plain)) == len(plain)
    for number, (switch, tolerance) in enumerate(SWITCHES.items()):
        if switch.startswith(OF_ANY_MODEL):
            continue
        argv, folder = (*model, *switch.split(), "--engine", "torch"), tmp_path / str(number)
        if switch in REFUSED:
            assert benchmark.main([*RUN, *argv, "--results_dir", str(folder)]) == 2
            assert printed_refusal(capsys.readouterr().err).flag == REFUSED[switch]
            assert not folder.exists()
            continue
        losses = losses_of(folder, *argv)
        assert losses == pytest.approx(plain, rel=tolerance, abs=0), switch


COPIED = "--precision bf16 --master_weights fp32"
# Copies differ by the rounding of fp32, and now and then a bf16 weight by one place.
EARLY = {
    f"{COPIED} --update_in_backward": 0,
    "--optimizer adamw --update_in_backward": SAME_FP32,  # beside the fused one
    "--optimizer adamw_8bit --update_in_backward": BF16,
}


@pytest.mark.slow
@pytest.mark.usefixtures("without_compiling")
@pytest.mark.parametrize(
    ("engine", "switch"),
    [(engine, switch) for switch in EARLY for engine in ("composer", "torch")],
)
def test_weights_that_change_within_the_backward_pass_give_the_same_losses(
    engine, switch, tmp_path, monkeypatch
):
    from sdbench.engines import loop

    calls, original = [], loop.update_in_backward
    monkeypatch.setattr(
        loop, "update_in_backward", lambda optimizer: calls.append(1) or original(optimizer)
    )
    recipe = ("--engine", engine, *(COPIED.split() if COPIED in switch else ()))
    one_microbatch = ("--device_train_microbatch_size", "3")
    expected = losses_of(tmp_path / "plain", *recipe, *one_microbatch)
    assert not calls
    losses = losses_of(tmp_path / "early", *recipe, *switch.split(), *one_microbatch)
    assert len(calls) == 1
    assert losses == pytest.approx(expected, rel=EARLY[switch], abs=0)


def test_gradients_of_two_micro_batches_are_added_up_before_an_update(tmp_path, capsys):
    argv = [*RUN, "--update_in_backward", "--results_dir", str(tmp_path)]
    assert benchmark.main(argv) == 2
    assert printed_refusal(capsys.readouterr().err).flag == "--update_in_backward"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_the_defaults_together_give_a_family_the_same_losses(family, tmp_path):
    model = ("--model_name", f"tiny-{family}")
    plain = losses_of(tmp_path / "plain", *model, "--preset", "seed")
    for engine in ("composer", "torch"):
        losses = losses_of(tmp_path / engine, *model, "--engine", engine)
        assert losses == pytest.approx(plain, rel=BF16)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["composer", "torch"])
def test_the_defaults_together_give_the_same_losses(engine, plain, tmp_path):
    losses = losses_of(tmp_path, "--engine", engine)
    assert losses == pytest.approx(plain, rel=BF16)


def test_every_speed_up_has_a_rung_and_one_whose_losses_can_show_it_a_tolerance():
    assert {name for rung in RUNGS for name in rung.settings} == set(SPEED_UPS)
    for rung in RUNGS:
        if rung.loss_tolerance is None and CPU in rung.devices and not rung.needs_ranks:
            (name,) = rung.settings
            assert SPEED_UPS[name].acts_with == EMA or name in "".join(EARLY)


@pytest.mark.full
@pytest.mark.timeout(1800)  # compiling the miniature alone takes minutes on two cores
@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_what_is_compiled_of_a_family_gives_the_same_losses(family, tmp_path):
    model = ("--model_name", f"tiny-{family}", "--preset", "seed")
    plain = losses_of(tmp_path / "plain", *model)
    for unit in ("model", "block"):
        argv = (*model, "--compile", "all", "--compile_unit", unit)
        assert losses_of(tmp_path / unit, *argv) == pytest.approx(plain, rel=1e-5)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "switch",
    [
        "--group_norm fused",
        "--compile unet",
        "--compile encoders",
        "--compile all --compile_unit block",
    ],
)
def test_what_is_compiled_gives_the_same_losses(switch, plain, tmp_path):
    losses = losses_of(tmp_path, "--preset", "seed", *switch.split())
    assert losses == pytest.approx(plain, rel=1e-5)


# Whole micro-batches: each step has the same shapes.
FAST = ("--preset", "fast", "--compile", "all", "--batch_size", "4")
ONE_GRAPH = [
    "",
    "--attention flash --group_norm fused --activation_checkpointing full",
    # All levers of `make benchmark-gpu`.
    "--engine torch --precision bf16 --master_weights fp32 --keep_layout --group_norm fused "
    "--vae_attention eager --convolution torch --attention sdpa",
]


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Forget what was compiled before, and after it what was counted, which flags later runs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.utils.counters.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(
    ("family", "num_parts", "unit"),
    [("sdxl", 4, "model"), ("sd3", 5, "model"), ("sd3", 5, "block"), ("flux", 4, "model")],
)
def test_each_compiled_part_of_a_family_is_one_graph(
    family, num_parts, unit, tmp_path, monkeypatch
):
    """The denoiser, the VAE's encoder and each text encoder; or no break in any block."""
    compile_it = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, *, mode, dynamic: compile_it(module, backend="eager", dynamic=dynamic),
    )
    losses_of(tmp_path, *FAST, "--model_name", f"tiny-{family}", "--compile_unit", unit)
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert num_graphs == num_parts if unit == "model" else num_graphs > num_parts
    assert "graph_breaks" not in only_record(tmp_path)["summary"]["flags"]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(
    ("breaks", "flags"),
    [*((False, flags) for flags in ONE_GRAPH), (True, "")],
)
def test_each_compiled_model_is_one_graph_and_a_broken_one_is_flagged(
    breaks, flags, tmp_path, monkeypatch
):
    compile_it = torch.nn.Module.compile

    def trace(module, *, mode, dynamic):
        if breaks:  # as on the first GPU: its objects in place of divisors cannot be traced
            drop_unit_divisions(module)
        compile_it(module, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(torch.nn.Module, "compile", trace)
    losses_of(tmp_path, *FAST, *flags.split())
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    is_flagged = "graph_breaks" in only_record(tmp_path)["summary"]["flags"]
    assert is_flagged == breaks
    assert breaks or num_graphs == 3  # the U-Net, the VAE's encoder and the text encoder
