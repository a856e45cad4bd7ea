"""The loader of pairs: which pictures a batch has, on any number of ranks, and after a stop."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from PIL import Image

from sdbench.data import subject
from sdbench.data.batches import pairs
from tests.data.datasets import make_source
from tests.refusals import refused


@pytest.fixture
def pictures(tmp_path):
    """Writes folders of pictures without captions, and describes them."""

    def write(num_instances, num_class, *, batch_size=4):
        sources = []
        for name, count in (("subject", num_instances), ("class", num_class)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            for number in range(count):
                Image.new("RGB", (20, 24), (10 * number, 0, 0)).save(folder / f"{number}.png")
            options = {"caption": f"a {name}", "device_batch_size": batch_size}
            sources.append(make_source("folder", folder, **options) if count else None)
        return sources

    return write


def epochs(loader, num_epochs):
    """The picture numbers of each batch of each epoch."""
    return [[batch["index"].tolist() for batch in loader] for _ in range(num_epochs)]


def build(sources, **options):
    return pairs.build(*sources, **{"prior_loss_weight": 0.25, **options})


@pytest.mark.parametrize(
    ("num_instances", "num_class", "batch_size", "num_batches"),
    [(3, 8, 4, 4), (8, 3, 4, 4), (5, 5, 4, 3), (2, 3, 16, 1), (5, 0, 4, 2), (1, 0, 4, 1)],
)
def test_every_picture_comes_in_each_epoch_in_whole_batches(
    pictures, num_instances, num_class, batch_size, num_batches
):
    sources = pictures(num_instances, num_class, batch_size=batch_size)
    first, second = epochs(build(sources), 2)
    for epoch in (first, second):
        assert [len(batch) for batch in epoch] == [batch_size] * num_batches
        numbers = Counter(itertools.chain.from_iterable(epoch))
        assert set(numbers) == set(range(num_instances + num_class))
        # Each kind is repeated evenly: no picture twice more often than another.
        for kind in (range(num_instances), range(num_instances, num_instances + num_class)):
            counts = [numbers[number] for number in kind]
            assert not counts or max(counts) - min(counts) <= 1
        if num_class:
            for batch in epoch:
                is_class = [number >= num_instances for number in batch]
                assert is_class == [False, True] * (batch_size // 2)
    assert first != second or num_instances == 1
    assert epochs(build(sources), 2) == [first, second]


def test_the_mean_over_any_part_of_a_batch_is_its_share_of_the_loss(pictures):
    (batch,) = list(build(pictures(2, 2), prior_loss_weight=0.25))
    assert batch["loss_weight"].tolist() == [2.0, 0.5, 2.0, 0.5]
    assert batch["loss_weight"].dtype == torch.float32
    (batch,) = list(build(pictures(4, 0)))
    assert batch["loss_weight"].tolist() == [1.0] * 4


def test_each_visit_of_a_picture_is_mirrored_or_without_its_caption_by_chance(pictures):
    chances = {"horizontal_flip_probability": 0.5, "caption_drop_probability": 0.25}
    sources = [dataclasses.replace(source, **chances) for source in pictures(3, 60)]
    loader = build(sources)
    batches = list(loader)
    numbers, captions = (
        torch.cat([batch[name] for batch in batches]).tolist() for name in ("index", "caption")
    )
    assert {number % 63 for number in numbers} == set(range(63))
    visits = set(zip(numbers, captions, strict=True))
    assert all(caption in (number % 63, -1) for number, caption in visits)
    # A picture of the subject comes 20 times an epoch, and not always in the same way.
    for picture in range(3):
        ways = {(number >= 63, caption) for number, caption in visits if number % 63 == picture}
        assert ways == set(itertools.product((False, True), (picture, -1)))
    assert 40 < sum(number >= 63 for number in numbers) < 80  # of 120
    assert 18 < captions.count(-1) < 45
    weights = torch.cat([batch["loss_weight"] for batch in batches])
    assert weights.tolist() == [2.0, 0.5] * 60
    names = loader.names_before(loader.state_dict(), num_back=0)
    in_order = [*("0", "1", "2"), *sorted(map(str, range(60)))]
    expected = [f"{in_order[number % 63]}.png" for number in numbers[-4:]]
    assert [name.split("/")[-1] for name in names] == expected


def test_it_goes_on_in_the_middle_of_an_epoch_and_names_its_pictures(pictures):
    sources = pictures(3, 8)
    whole = build(sources)
    loader = build(sources)
    first, second = epochs(whole, 2)
    iterator = iter(loader)
    seen = [next(iterator)["index"].tolist() for _ in range(3)]
    resumed = build(sources)
    resumed.load_state_dict(loader.state_dict())
    (rest,) = epochs(resumed, 1)
    assert seen + rest == first
    assert epochs(resumed, 1) == [second]
    names = loader.names_before(loader.state_dict(), num_back=0)
    assert [name.split("/")[-2] for name in names] == ["subject", "class"] * 2
    numbers = [int(name.split("/")[-1].removesuffix(".png")) for name in names]
    assert numbers == [number - 3 * (number >= 3) for number in seen[-1]]


def test_what_is_wrong_is_told_by_the_flag_of_its_kind(pictures, tmp_path):
    sources = pictures(3, 4, batch_size=3)
    with refused("--batch_size", value=3):
        subject.check(*sources)
    source, class_source = pictures(3, 4)
    own_captions = dataclasses.replace(source, caption=None)
    with refused("--remote or --instance_prompt", value=str(tmp_path / "subject")):
        subject.check(own_captions, class_source)
    missing = dataclasses.replace(class_source, remote=str(tmp_path / "missing"))
    with refused("--class_remote", value=str(tmp_path / "missing")):
        subject.check(source, missing)
