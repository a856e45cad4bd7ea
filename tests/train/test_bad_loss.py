"""train.py --on_bad_loss: the caption of one sample makes the loss NaN.

The text encoder has NaN for the embedding of one word, as a damaged or an untrained row has.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from sdbench.engines import ENGINES
from sdbench.record.store import load_record
from sdbench.report.watch import write_page
from sdbench.state.checkpoint import Checkpoint
from sdbench.tasks.train.bad_loss import MAX_IN_A_ROW
from tests.data.datasets import write_folder
from tests.train.in_turn import train_in_turn
from tests.train.tiny_model import write_tiny_model
from tests.train.written import read_events, read_steps, read_tensors, saved_steps

BAD_WORD = "poison"
# In the stored order samples 8 to 11 are the batch of step 3; in its second micro-batch, and on the
# second of two ranks.
BAD_SAMPLE, BAD_STEP = 10, 3
NUM_STEPS = 6
RUN = Path("runs/run")
RECIPE = ("--batch_size", "4", "--device_train_microbatch_size", "2", "--no_shuffle", "--use_ema")
RECIPE += ("--ema_half_life_batches", "3", "--clip_norm", "0.5", "--lr_warmup_batches", "4")

pytestmark = pytest.mark.usefixtures("launched")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The tiny model in a folder, with the damaged embedding."""
    folder = tmp_path_factory.mktemp("model") / "damaged"
    tokenizer = write_tiny_model(folder)
    path = folder / "text_encoder" / "model.safetensors"
    weights = load_file(path)
    (embeddings,) = (weight for name, weight in weights.items() if "token_embedding" in name)
    embeddings[tokenizer([BAD_WORD])[0, 1]] = float("nan")
    save_file(weights, path)
    return folder


def write_samples(*bad: int) -> None:
    """Pictures and captions, the bad ones of those with the bad word."""
    write_folder(Path("data"))
    for index in bad:
        Path(f"data/{index:03d}.txt").write_text(BAD_WORD)


def run(model: Path, action: str, *argv: object, num_steps: int = NUM_STEPS, name="run") -> int:
    """Train in this process, in the working folder, on data/."""
    line = [*RECIPE, "--remote", "data", "--model_name", model, "--on_bad_loss", action]
    line += ["--run_name", name, "--resume", "auto", "--max_duration", f"{num_steps}ba", *argv]
    return train.main([str(word) for word in line])


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


def num_averaged(step: int, name: str) -> int:
    """Steps that the average of a checkpoint knows of."""
    return saved(step, name).facts["state"]["ema_num_steps"]


def trained(step: int, name: str = "run") -> dict[str, object]:
    """What a checkpoint has of the weights: they, the optimizer's state, the average."""
    tensors = read_tensors(saved(step, name))
    assert any(key.startswith("optimizer.step") for key in tensors)
    assert any(key.startswith("ema.") for key in tensors)
    bits = {
        key: tensor.flatten().view(torch.uint8).numpy().tobytes() for key, tensor in tensors.items()
    }
    return bits | {"ema_num_steps": num_averaged(step, name)}


def test_it_stops_and_names_the_samples(model):
    write_samples(BAD_SAMPLE)
    argv = ("--engine", "torch", "--save_every_batches", 2, "--log_every_batches", 1)
    assert run(model, "stop", *argv) == 1
    assert saved_steps(RUN) == [2]
    assert list(losses()) == [1, 2, 3] and losses()[BAD_STEP] == "nan"
    (line,) = bad_batches()
    del line["time_utc"]
    samples = [f"data/{index:03d}.png" for index in (8, 9, 10, 11)]
    facts = {"step": BAD_STEP, "loss": "nan", "gradient_norm": "nan", "action": "stop"}
    assert line == {**facts, "samples_of_ranks": [samples]}
    assert bad_events() == [facts]
    record = load_record(RUN)
    assert record["status"] == "invalid"
    told = ("nan", f"step {BAD_STEP}", "bad_batches.jsonl")
    assert all(word in record["reason"] for word in told)
    drawn = write_page(RUN)
    assert drawn.steps["loss"].isna().tolist() == [False, False, True]
    assert drawn.steps["smooth_loss"].notna().all()
    assert "loss not finite" in (RUN / "watch.html").read_text()


@pytest.mark.slow
def test_it_is_named_however_late_it_is_known(model):
    """Read behind an epoch of 12 steps that a resume has begun in."""
    write_samples(BAD_SAMPLE)
    assert run(model, "stop", num_steps=1) == 0
    assert run(model, "stop", "--log_every_batches", 100, num_steps=14) == 1
    assert saved_steps(RUN) == [1]
    assert list(losses()) == list(range(1, 15))
    (line,) = bad_batches()
    assert line["step"] == BAD_STEP
    assert line["samples_of_ranks"] == [[f"data/{index:03d}.png" for index in (8, 9, 10, 11)]]


def test_it_stops_when_the_loss_is_shown(model):
    """That of the first step is, whatever the period of the log."""
    write_samples(0)
    assert run(model, "stop", "--log_every_batches", 100) == 1
    assert losses() == {1: "nan"}
    assert saved_steps(RUN) == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_skipped_step_changes_nothing_and_a_resume_is_exact(model, engine):
    write_samples(0, BAD_SAMPLE)  # the first step, too: there is no optimizer state yet
    argv = ("--engine", engine, "--log_every_batches", 1)
    assert run(model, "skip", *argv, "--save_every_batches", 1, "--keep", 9, name="whole") == 0
    whole = losses("whole")
    assert [step for step, loss in whole.items() if loss == "nan"] == [1, BAD_STEP]
    assert len(set(whole.values())) == NUM_STEPS - 1
    assert trained(BAD_STEP, "whole") == trained(BAD_STEP - 1, "whole")
    averaged = [num_averaged(step, "whole") for step in range(1, NUM_STEPS + 1)]
    assert averaged == [0, 1, 1, 2, 3, 4]
    assert [event["step"] for event in bad_events("whole")] == [1, BAD_STEP]
    for num_steps in (BAD_STEP, NUM_STEPS):
        assert run(model, "skip", *argv, num_steps=num_steps, name="parts") == 0
    assert losses("parts") == whole
    assert load_record(Path("runs/whole"))["summary"]["loss_last"] == float(whole[NUM_STEPS])


@pytest.mark.slow
def test_fp32_copies_of_bf16_weights_are_skipped_too(model):
    write_samples(BAD_SAMPLE)
    argv = ("--precision", "bf16", "--master_weights", "fp32", "--encoder_dtype", "bf16")
    argv += ("--engine", "torch", "--save_every_batches", 1, "--keep", 9)
    assert run(model, "skip", *argv, num_steps=4) == 0
    assert any(key.startswith("fp32.") for key in trained(2))
    assert trained(3) == trained(2) != trained(4)


def test_it_goes_back_and_on_with_other_data(model):
    write_samples(BAD_SAMPLE, BAD_SAMPLE + 4)
    # Known behind step 4, at which a checkpoint is due.
    argv = ("--engine", "torch", "--save_every_batches", 2, "--log_every_batches", 4, "--keep", 9)
    assert run(model, "back", *argv, name="whole") == 0
    (event,) = bad_events("whole")
    facts = {"step": BAD_STEP, "loss": "nan", "gradient_norm": "nan", "action": "back"}
    assert event == {**facts, "lost_steps": [3, 4]}
    whole = losses("whole")
    assert [step for step, loss in whole.items() if loss == "nan"] == [3, 4]
    assert saved_steps(Path("runs/whole")) == [2, 6]
    # As if the two steps had been left out at once.
    assert run(model, "skip", *argv, name="skipped") == 0
    assert trained(6, "whole") == trained(6, "skipped") != trained(2, "whole")


def test_there_is_nothing_to_go_back_to(model):
    write_samples(BAD_SAMPLE)
    assert run(model, "back", "--save_every_batches", 4) == 1
    assert saved_steps(RUN) == []
    assert [event["action"] for event in bad_events()] == ["stop"]
    assert "--save_every_batches" in load_record(RUN)["reason"]


@pytest.mark.slow
def test_a_run_that_does_not_recover_ends(model):
    """The good step 1 does not count among those in a row, nor do bad ones before a good one."""
    write_samples(0, *range(8, 49))
    period = MAX_IN_A_ROW + 3
    assert run(model, "skip", "--save_every_batches", period, num_steps=period + 1) == 1
    actions = [line["action"] for line in bad_batches()]
    assert actions == ["skip"] * (MAX_IN_A_ROW + 1) + ["stop"]
    assert saved_steps(RUN) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "sharding", "action"),
    [
        ("torch", "none", "skip"),
        ("torch", "full", "back"),
        ("composer", "full", "skip"),
        ("ray", "zero1", "skip"),
    ],
)
def test_both_ranks_act_on_the_loss_of_one(model, tmp_path, engine, sharding, action):
    write_samples(BAD_SAMPLE)
    argv = ("--engine", engine, "--sharding", sharding, "--save_every_batches", 1, "--keep", 9)
    argv += ("--device_train_microbatch_size", 1, "--log_every_batches", 1)
    runs = [
        functools.partial(run, model, action, *argv, num_steps=num_steps, name=name)
        # The whole run between the parts, so that no part begins as the one before has ended.
        for name, num_steps in (("parts", 4), ("whole", 5), ("parts", 5))
    ]
    train_in_turn(engine, tmp_path, *runs)
    (line,) = bad_batches("whole")
    assert line["samples_of_ranks"] == [
        ["data/008.png", "data/009.png"],
        ["data/010.png", "data/011.png"],
    ]
    assert [step for step, loss in losses("whole").items() if loss == "nan"] == [BAD_STEP]
    assert trained(2, "whole") != trained(4, "whole")
    if action == "skip":
        assert trained(3, "whole") == trained(2, "whole")
    else:
        assert saved_steps(Path("runs/whole")) == [1, 2, 4, 5]
    assert losses("parts") == losses("whole")
