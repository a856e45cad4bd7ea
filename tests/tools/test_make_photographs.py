"""Are the photographs for measuring loaders what they are said to be?"""

from __future__ import annotations

import importlib.util
import re

import pytest

from sdbench import data
from sdbench.data.source import SourceConfig
from tools import make_photographs

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, make_photographs.PHOTOGRAPHS)),
    reason="scikit-image and scikit-learn are not installed",
)


@pytest.mark.parametrize("side", [512, 1024])
def test_they_are_of_that_size_and_detail_and_the_same_each_time(side, tmp_path, capsys):
    tars = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for tar in tars:
        argv = [str(tar), "--side", str(side), "--num_pictures", "12"]
        assert make_photographs.main(argv) == 0
    assert tars[0].read_bytes() == tars[1].read_bytes()
    found = re.fullmatch(
        rf"(12 pictures of {side} px, (.*) bits per pixel\n)\1", capsys.readouterr().out
    )
    # The JPEG files of OpenMoji's drawings have 0.7.
    assert 1.5 < float(found[2]) < 3.5
    config = SourceConfig(
        data_format="webdataset",
        remote=str(tars[0]),
        image_size=side,
        device_batch_size=12,
        seed=1,
        shuffle=False,
    )
    (batch,) = data.build(config)
    assert batch["image"].shape == (12, 3, side, side)
    # Six photographs in turn, each crop another one.
    assert len({picture.numpy().tobytes() for picture in batch["image"]}) == 12
