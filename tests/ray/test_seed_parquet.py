"""Parquet with the tensors of Ray Data, which tells Arrow of their type where it is imported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from sdbench import data
from sdbench.base.conditions import Condition, ModelInputs
from tests.data.datasets import make_source
from tests.data.seed_parquet import NUM_ROWS, TEXT_WIDTH, make_latents, make_texts


def test_tensors_of_ray_data_are_read(tmp_path: Path):
    from ray.data.extensions import ArrowTensorArray

    latents, texts = make_latents(256), make_texts()
    columns = {"latents_256_bytes": latents, "caption_latents": texts}
    table = {name: ArrowTensorArray.from_numpy(values) for name, values in columns.items()}
    file = tmp_path / "part.parquet"
    pyarrow.parquet.write_table(pyarrow.table(table), file)
    assert isinstance(pyarrow.parquet.read_schema(file)[0].type, pyarrow.ExtensionType)
    whole = {"image_size": 256, "device_batch_size": NUM_ROWS, "shuffle": False}
    config = make_source(
        "parquet latents",
        file,
        inputs=ModelInputs(conditions=(Condition(shape=(77, TEXT_WIDTH)),)),
        **whole,
    )
    (batch,) = data.build(config)
    assert np.array_equal(batch["latent"].numpy(), latents.astype(np.float16))
    assert np.array_equal(batch["text_embedding"].numpy(), texts.astype(np.float16))
