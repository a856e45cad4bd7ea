"""train.py --on_bad_loss: a loss, a gradient, a weight or an average becomes NaN.

Whatever the run does then, it keeps a checkpoint of finite values, and a resume goes on from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import train
from sdbench.analysis.run_page import make_run_page
from sdbench.engines import load_engine
from sdbench.engines.loop import Training
from sdbench.models import weights
from sdbench.record.store import load_record
from sdbench.report.training_run import read_run
from sdbench.state.checkpoint_files import Checkpoint
from sdbench.training import train_job
from sdbench.training.bad_loss import MAX_IN_A_ROW
from sdbench.training.train_hooks import TrainHooks
from tests.data.datasets import write_folder
from tests.forked import codes_of, log_of
from tests.state.states import make_checkpoints, make_state, names, save
from tests.train.in_turn import train_in_turn
from tests.train.smallest_model import write_model
from tests.train.written import read_events, read_steps, read_tensors, saved_steps

BAD_WORD = "poison"
# In the stored order samples 8 to 11 are the batch of step 3; in its second micro-batch, and on the
# second of two ranks.
BAD_SAMPLE, BAD_STEP = 10, 3
BAD_BATCH = [f"data/{index:03d}.png" for index in (8, 9, 10, 11)]
NUM_STEPS = 6
RUN = Path("runs/run")
RECIPE = ("--batch_size", "4", "--device_train_microbatch_size", "2", "--no_shuffle", "--use_ema")
RECIPE += ("--ema_half_life_batches", "3", "--lr_warmup_batches", "4")
# The norm of the gradients is known where they are clipped.
CLIPPED = ("--clip_norm", 0.5)
POISONED = ("--engine", "torch", "--save_every_batches", 2, "--log_every_batches", 1)
# Weights in bf16, with copies in fp32.
COPIES = ("--precision", "bf16", "--master_weights", "fp32", "--encoder_dtype", "bf16")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The model with NaN for the embedding of a word, as a damaged or an untrained row has."""
    folder = tmp_path_factory.mktemp("model") / "damaged"
    tokenizer = write_model(folder)
    path = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    (embeddings,) = (weight for name, weight in tensors.items() if "token_embedding" in name)
    embeddings[tokenizer([BAD_WORD])[0, 1]] = float("nan")
    save_file(tensors, path)
    return folder


@pytest.fixture(autouse=True)
def damaged_files_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of weights with NaN is refused, so `model` is one that became so in memory."""
    monkeypatch.setattr(weights, "check_content", lambda *_, **__: None)


def write_samples(*bad: int) -> None:
    """Pictures and captions, the bad ones of those with the bad word."""
    write_folder(Path("data"))
    for index in bad:
        Path(f"data/{index:03d}.txt").write_text(BAD_WORD)


def command(
    action: str, *argv: object, model="nano", num_steps: int = NUM_STEPS, name="run"
) -> list[str]:
    """The arguments of train.py for a run on data/."""
    line = [*RECIPE, "--remote", "data", "--model_name", model, "--on_bad_loss", action]
    line += ["--run_name", name, "--resume", "auto", "--max_duration", f"{num_steps}ba", *argv]
    return [str(word) for word in line]


def run(*args: object, **options) -> int:
    """Train in this process, in the working folder."""
    if not Path("data").exists():
        write_folder(Path("data"))
    return train.main(command(*args, **options))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        tensor[(0,) * tensor.dim()] = math.nan
    return tensor


@contextlib.contextmanager
def poisoned(what: str, steps: Collection[int]) -> Iterator[None]:
    """Make a number NaN in these steps of the process, as a fault of the machine may."""
    build, step_ended = train_job.build, TrainHooks.step_ended
    step = 1

    def is_bad(*kinds: str) -> bool:
        return what in kinds and step in steps

    def build_poisoned(*args, **options):
        job = build(*args, **options)
        weight = next(iter(job.trained_weights().values()))
        weight.register_hook(lambda grad: poison(grad.clone()) if is_bad("gradient") else grad)
        factor = {True: math.nan, False: 1.0}
        return dataclasses.replace(
            job, loss=lambda output: job.loss(output) * factor[is_bad("loss")]
        )

    def end_poisoned(hooks, state):
        nonlocal step
        if is_bad("weight", "average"):
            of_state = hooks.job.trained_weights() if what == "weight" else state.averages
            poison(next(iter(of_state.values())))
        step += 1
        step_ended(hooks, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_job, "build", build_poisoned)
        patch.setattr(TrainHooks, "step_ended", end_poisoned)
        yield


def losses(name: str = "run") -> dict[int, str]:
    return {int(row["step"]): row["loss"] for row in read_steps(Path("runs", name))}


def bad_batches(name: str = "run") -> list[dict]:
    text = Path("runs", name, "bad_batches.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def bad_events(name: str = "run") -> list[dict]:
    """The events of bad losses, without their times."""
    events = read_events(Path("runs", name), "bad_loss")
    return [{key: event[key] for key in event.keys() - {"event", "time_utc"}} for event in events]


def saved(step: int, name: str = "run") -> Checkpoint:
    return Checkpoint.open(Path("runs", name, "checkpoints", f"step_{step:08d}"))


def finite_saves() -> list[int]:
    """The steps with a checkpoint, each of which is finite."""
    steps = saved_steps(RUN)
    for step in steps:
        assert all(bool(one.isfinite().all()) for one in read_tensors(saved(step)).values()), step
    return steps


def num_averaged(step: int, name: str) -> int:
    """Steps that the average of a checkpoint knows of."""
    return saved(step, name).facts["state"]["ema_num_steps"]


def trained(step: int, name: str) -> dict[str, object]:
    """What a checkpoint has of the weights: they, the optimizer's state, the average."""
    tensors = read_tensors(saved(step, name))
    assert any(key.startswith("optimizer.step") for key in tensors)
    assert any(key.startswith("ema.") for key in tensors)
    bits = {
        key: tensor.flatten().view(torch.uint8).numpy().tobytes() for key, tensor in tensors.items()
    }
    return bits | {"ema_num_steps": num_averaged(step, name)}


@pytest.mark.slow
def test_it_stops_and_names_the_samples(model):
    write_samples(BAD_SAMPLE)
    assert run("stop", *POISONED, *CLIPPED, model=model) == 1
    assert saved_steps(RUN) == [2]
    assert list(losses()) == [1, 2, 3] and losses()[BAD_STEP] == "nan"
    (line,) = bad_batches()
    del line["time_utc"]
    facts = {"step": BAD_STEP, "loss": "nan", "gradient_norm": "nan", "action": "stop"}
    assert line == {**facts, "samples_of_ranks": [BAD_BATCH]}
    assert bad_events() == [facts]
    record = load_record(RUN)
    assert record["status"] == "invalid"
    told = ("nan", f"step {BAD_STEP}", "bad_batches.jsonl")
    assert all(word in record["reason"] for word in told)
    steps = read_run(RUN, record).steps
    assert steps["loss"].isna().tolist() == [False, False, True]
    assert steps["smooth_loss"].notna().all()
    assert "loss not finite" in make_run_page(RUN)[0]


@pytest.mark.slow
def test_it_stops_when_the_loss_is_shown(model):
    """That of the first step is, whatever the period of the log."""
    write_samples(0)
    assert run("stop", "--log_every_batches", 100, model=model) == 1
    assert losses() == {1: "nan"}
    assert saved_steps(RUN) == []


@pytest.mark.slow
def test_a_skipped_step_changes_nothing_and_a_resume_is_exact(model):
    write_samples(0, BAD_SAMPLE)  # the first step, too: there is no optimizer state yet
    argv = ("--engine", "torch", "--log_every_batches", 1, *CLIPPED, *COPIES)
    every = ("--save_every_batches", 1, "--keep", 9)
    assert run("skip", *argv, *every, name="whole", model=model) == 0
    whole = losses("whole")
    assert [step for step, loss in whole.items() if loss == "nan"] == [1, BAD_STEP]
    assert len(set(whole.values())) == NUM_STEPS - 1
    assert trained(BAD_STEP, "whole") == trained(BAD_STEP - 1, "whole")
    averaged = [num_averaged(step, "whole") for step in range(1, NUM_STEPS + 1)]
    assert averaged == [0, 1, 1, 2, 3, 4]
    assert [event["step"] for event in bad_events("whole")] == [1, BAD_STEP]
    for num_steps in (BAD_STEP, NUM_STEPS):
        assert run("skip", *argv, num_steps=num_steps, name="parts", model=model) == 0
    assert losses("parts") == whole
    assert load_record(Path("runs/whole"))["summary"]["loss_last"] == float(whole[NUM_STEPS])


@pytest.mark.slow
def test_it_goes_back_and_on_with_other_data(model):
    write_samples(BAD_SAMPLE, BAD_SAMPLE + 4)
    # Known behind step 4, at which a checkpoint is due.
    argv = ("--engine", "torch", "--save_every_batches", 2, "--log_every_batches", 4, "--keep", 9)
    assert run("back", *argv, *CLIPPED, name="whole", model=model) == 0
    (event,) = bad_events("whole")
    facts = {"step": BAD_STEP, "loss": "nan", "gradient_norm": "nan", "action": "back"}
    assert event == {**facts, "lost_steps": [3, 4]}
    assert [line["samples_of_ranks"] for line in bad_batches("whole")] == [[BAD_BATCH]]
    whole = losses("whole")
    assert [step for step, loss in whole.items() if loss == "nan"] == [3, 4]
    assert saved_steps(Path("runs/whole")) == [2, 6]
    # As if the two steps had been left out at once.
    assert run("skip", *argv, *CLIPPED, name="skipped", model=model) == 0
    assert trained(6, "whole") == trained(6, "skipped") != trained(2, "whole")


@pytest.mark.slow
def test_there_is_nothing_to_go_back_to(model):
    write_samples(BAD_SAMPLE)
    assert run("back", "--save_every_batches", 4, model=model) == 1
    assert saved_steps(RUN) == []
    assert [event["action"] for event in bad_events()] == ["stop"]
    assert "--save_every_batches" in load_record(RUN)["reason"]


@pytest.mark.slow
def test_a_run_that_does_not_recover_ends(model):
    """The good step 1 does not count among those in a row, nor do bad ones before a good one."""
    write_samples(0, *range(8, 49))
    period = MAX_IN_A_ROW + 3
    argv = ("--save_every_batches", period)
    assert run("skip", *argv, num_steps=period + 1, model=model) == 1
    actions = [line["action"] for line in bad_batches()]
    assert actions == ["skip"] * (MAX_IN_A_ROW + 1) + ["stop"]
    assert saved_steps(RUN) == []


@pytest.mark.slow
def test_both_ranks_skip_a_step_for_the_loss_of_one(model, tmp_path):
    write_samples(BAD_SAMPLE)
    argv = ("--engine", "ray", "--sharding", "zero1", "--save_every_batches", 1, "--keep", 9)
    argv += ("--device_train_microbatch_size", 1, "--log_every_batches", 1, *CLIPPED)
    line = command("skip", *argv, num_steps=5, name="whole", model=model)
    train_in_turn("ray", tmp_path, line)
    (line,) = bad_batches("whole")
    assert line["samples_of_ranks"] == [BAD_BATCH[:2], BAD_BATCH[2:]]
    assert [step for step, loss in losses("whole").items() if loss == "nan"] == [BAD_STEP]
    assert trained(3, "whole") == trained(2, "whole") != trained(4, "whole")


# A bad save is known at the next but one at the latest: as many steps as go on behind it.
LONG = 8
# The engine, what is poisoned, in which step, what is done then, and how many checkpoints are kept.
CASES = [
    ("torch", "average", LONG, "stop", 1),
    ("torch", "weight", 4, "skip", 2),
    ("composer", "gradient", LONG, "skip", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "what", "step", "action", "keep"), CASES)
def test_what_is_not_finite_costs_no_good_checkpoint(engine, what, step, action, keep):
    """Poison a run, and go on with it when the fault is gone."""
    argv = (action, *POISONED, "--engine", engine, "--keep", keep)
    with poisoned(what, [step]):
        exit_code = run(*argv, num_steps=LONG)
    can_skip = action == "skip" and what == "gradient"
    assert exit_code == (0 if can_skip else 1)
    assert load_record(RUN)["status"] == ("invalid" if exit_code else "ok")
    if exit_code:
        # The newest one is the last before the fault.
        assert finite_saves()[-1] == (step - 1) // 2 * 2
        assert run(*argv, num_steps=LONG) == 0
        assert load_record(RUN)["status"] == "ok"
        assert all(math.isfinite(float(loss)) for loss in losses().values())
    assert finite_saves()[-1] == LONG
    assert list(losses()) == list(range(1, LONG + 1))


@pytest.mark.slow
def test_two_ranks_go_back_together(tmp_path):
    """Each rank saves a part: the value that is not finite is in the part of one."""
    argv = (*POISONED, "--sharding", "zero1", "--device_train_microbatch_size", 1)
    write_folder(Path("data"))
    with poisoned("average", [4]):
        train_in_turn("torch", tmp_path, command("back", *argv, num_steps=LONG))
    (event,) = bad_events()
    assert (event["step"], event["action"]) == (4, "back") and event["tensor"]
    assert load_record(RUN)["status"] == "ok"
    assert finite_saves()[-1] == LONG


@pytest.mark.slow
def test_a_gradient_that_is_infinite_on_one_rank_alone_is_skipped_on_both(tmp_path):
    """After the ranks have averaged it, as a fault of one GPU makes it."""
    load_engine("torch")
    write_folder(Path("data"))
    gradients_ready = Training.gradients_ready

    def poison_one(training, loss):
        if training.state.num_steps + 1 == BAD_STEP and os.environ["RANK"] == "1":
            gradient = next(iter(training.job.trained_weights().values())).grad
            gradient[(0,) * gradient.dim()] = math.inf
        gradients_ready(training, loss)

    def program() -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Training, "gradients_ready", poison_one)
            argv = (*POISONED, *CLIPPED, "--device_train_microbatch_size", 1)
            return run("skip", *argv, num_steps=BAD_STEP + 1)

    assert codes_of(program, tmp_path, timeout_s=120) == [0, 0], log_of(tmp_path, 0).read_text()
    (event,) = bad_events()
    facts = (event["step"], event["gradient_norm"], event["action"])
    assert facts == (BAD_STEP, "inf", "skip")
    assert finite_saves() == [2, 4]


@pytest.mark.slow
def test_gradients_that_are_clipped_are_judged_in_their_step():
    """Whose samples are named then, and not those of the next step."""
    with poisoned("gradient", [BAD_STEP]):
        assert run("skip", *POISONED, *CLIPPED) == 0
    (event,) = bad_events()
    assert (event["step"], event["gradient_norm"], event["action"]) == (BAD_STEP, "nan", "skip")
    assert math.isfinite(float(event["loss"]))
    assert [line["samples_of_ranks"] for line in bad_batches()] == [[BAD_BATCH]]
    assert finite_saves()


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_told_from_the_loss_that_it_leads_to():
    """No sample is blamed for it."""
    with poisoned("gradient", [4]):
        assert run("stop", *POISONED) == 1
    (event,) = bad_events()
    assert event["step"] == 4 and event["tensor"]
    assert not (RUN / "bad_batches.jsonl").exists()
    assert "step 4" in load_record(RUN)["reason"]


@pytest.mark.slow
def test_a_run_that_comes_back_to_the_same_checkpoint_gives_up():
    with poisoned("loss", range(4, 20)):
        assert run("back", *POISONED, num_steps=20) == 1
    assert [event["action"] for event in bad_events()] == ["back", "stop"]
    assert finite_saves() == [2]


@pytest.mark.parametrize("has_room", [False, True])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, has_room, monkeypatch):
    if not has_room:  # for a copy: the tensors are written where they are
        monkeypatch.setattr("sdbench.state.writer.MAX_SHARE_OF_COPIES", 0.0)
    checkpoints = make_checkpoints(tmp_path, keep=1)
    save(checkpoints, 10)
    for bad, name in (
        (math.nan, "weights.conv"),
        (math.inf, "weights.head"),
        (-math.inf, "optimizer.step"),
    ):
        state = make_state(20)
        state[name][(0,) * state[name].dim()] = bad
        checkpoints.begin_save(20, state, {})
        with pytest.raises(Exception, match=name) as caught:
            checkpoints.finish()
        assert caught.value.status == "invalid"
    assert all(report.not_finite for report in checkpoints.poll()[1:])
    assert names(tmp_path) == ["step_00000010"]
