"""data.py through its front door."""

from __future__ import annotations

import re

import pytest

import data


def test_it_prints_the_rate_of_a_source(capsys):
    argv = ["--use_synth_data", "--image_size", "64", "--batch_size", "4", "--num_workers", "0"]
    assert data.main([*argv, "--num_batches", "5"]) == 0
    output = capsys.readouterr().out
    assert re.fullmatch(r"synthetic: [\d.]+ images/s over 5 batches of 4 at 64 px .*\n", output)


def test_it_says_when_it_chose_synthetic_data(capsys):
    assert data.main(["--image_size", "64", "--num_workers", "0", "--num_batches", "1"]) == 0
    assert "No --remote or --local: measuring synthetic data." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--batch_size", "0"],
            "Too small: got 0; allowed: 1 or more; change it with --batch_size",
        ),
        (["--remote", "no/such"], "No such data folder: got 'no/such'"),
    ],
)
def test_bad_input_exits_with_2(capsys, argv, message):
    assert data.main(argv) == 2
    assert message in capsys.readouterr().err


def test_the_data_sets_are_importable_by_name():
    from data import StreamingImageCaptionDataset, SyntheticImageCaptionDataset

    assert StreamingImageCaptionDataset.__name__ == "StreamingImageCaptionDataset"
    assert len(SyntheticImageCaptionDataset.__name__) > 0
    with pytest.raises(AttributeError, match="NoSuchDataset"):
        _ = data.NoSuchDataset
