"""Are the columns of latents found under each of their names, and their values checked?"""

from __future__ import annotations

import numpy as np
import pytest

from sdbench.data.formats.latent_columns import check_array, check_finite, find_columns
from sdbench.data.samples import BadSampleError
from tests.refusals import PLACE_FLAGS, refused


@pytest.mark.parametrize(
    ("latents", "texts", "others"),
    [
        ("latent_moments_256", "text_embedding", ["caption"]),
        ("image_latents_256", "caption_latents", ["image_latents_512"]),  # Anyscale, first guide
        ("image_latents_256", "caption_embeddings", []),  # Anyscale, second guide, text
        ("latents_256_bytes", "caption_latents", ["caption"]),  # Anyscale, second guide, program
        # Moments can be sampled anew, so they are preferred, as is our own spelling.
        ("latent_moments_256", "text_embedding", ["latents_256", "caption_latents"]),
    ],
)
def test_each_spelling_is_found(latents, texts, others):
    found = find_columns([*others, latents, texts], wants_latents=True, resolution="256")
    part = "moments" if "moments" in latents else "latent"
    assert found == {part: latents, "text_embedding": texts}


@pytest.mark.parametrize(
    ("columns", "flag", "value", "allowed"),
    [
        (
            ["latents_512", "latent_moments_768", "text_embedding"],
            "--image_size",
            "256",
            "512, 768",
        ),
        (["latents_256"], PLACE_FLAGS, "columns latents_256", "caption_latents"),
        (["jpg", "caption"], PLACE_FLAGS, "columns caption, jpg", "--latents online"),
    ],
)
def test_what_is_missing_is_named(columns, flag, value, allowed):
    with refused(flag, value=value) as caught:
        find_columns(columns, wants_latents=True, resolution="256")
    assert allowed in caught.value.allowed


def test_every_finite_float16_is_fine_and_one_other_is_enough():
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = values[np.isfinite(values)]
    check_finite("all", finite)
    for value in (np.nan, np.inf, -np.inf, -np.nan):
        with pytest.raises(BadSampleError, match="^a.mds, latent: a value is NaN, infinite"):
            check_finite("a.mds, latent", np.append(finite, np.float16(value)))


def test_type_and_shape():
    check_array("a", np.zeros((4, 8, 8), np.float64), shape=(4, 8, 8))
    with pytest.raises(BadSampleError, match=r"a: shape \(4, 8\), \(4, 8, 8\) is needed"):
        check_array("a", np.zeros((4, 8), np.float16), shape=(4, 8, 8))
    with pytest.raises(BadSampleError, match="a: values of type int16, floating point"):
        check_array("a", np.zeros((4, 8, 8), np.int16), shape=(4, 8, 8))
