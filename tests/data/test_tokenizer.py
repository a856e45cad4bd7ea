"""Do captions become CLIP's ids?

The expected ids come from open_clip's `SimpleTokenizer`, an independent implementation. Not in the
table because transformers' fast class differs there: the special tokens spelt out in a caption
(open_clip splits them into letters), and the ligature U+FB01 (open_clip cleans text with ftfy).
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from sdbench.data.pipeline.tokenizer import CaptionTokenizer

BOS, EOS = 49406, 49407

CAPTIONS = [
    ("a photo of a cat", [320, 1125, 539, 320, 2368]),
    ("A PHOTO OF A CAT", [320, 1125, 539, 320, 2368]),
    ("", []),
    ("  spaces   and\ttabs\n", [9006, 537, 29163]),
    (
        "hello, world! it's 50% off... (really?)",
        [3306, 267, 1002, 256, 585, 568, 276, 271, 260, 1007, 678, 263, 1414, 9626],
    ),
    ("don't you're we'll", [847, 713, 592, 982, 649, 1342]),
    ("1234567890", [272, 273, 274, 275, 276, 277, 278, 279, 280, 271]),
    ("yen banknote: bank", [17960, 49201, 756, 281, 2723]),
    ("a_b-c/d @x #y", [320, 318, 321, 268, 322, 270, 323, 287, 343, 258, 344]),
    ("caf\u00e9 \u00fcber na\u00efve", [15304, 6522, 1516, 1097, 35689, 563]),
    ("e\u0301", [4166]),
    ("\u732b\u306e\u5199\u771f", [163, 234, 104, 21575, 44653, 33440, 509]),
    ("\u043a\u043e\u0448\u043a\u0430", [27152, 13506, 141, 230, 27152, 27080]),
    ("\u0905\u0928\u094d\u0928", [3124, 227, 26090, 19389, 26090]),
    ("\u0e20\u0e32\u0e1e\u0e41\u0e21\u0e27", [1777, 254, 12330, 252, 23916, 94, 30245]),
    ("\u0130stanbul", [328, 16384, 11231]),
    ("\U0001f600 smile", [7334, 3490]),
    ("\U0001f468\u200d\U0001f469\u200d\U0001f467", [25023, 26304, 964, 356]),
    ("word " * 100, [2653] * 75),
]


@pytest.mark.parametrize("from_folder", [False, True])
@pytest.mark.parametrize("pad_token_id", [0, EOS])
def test_captions_become_these_ids(pad_token_id, from_folder, tmp_path):
    if from_folder:
        CaptionTokenizer(pad_token_id=pad_token_id).for_diffusers().save_pretrained(tmp_path)
    folder = tmp_path if from_folder else None
    CaptionTokenizer(folder=folder, pad_token_id=pad_token_id, new_token="cat")  # changes no other
    tokenizer = CaptionTokenizer(folder=folder, pad_token_id=pad_token_id)
    found = pickle.loads(pickle.dumps(tokenizer))([caption for caption, _ in CAPTIONS])
    assert found.dtype == np.int64
    for row, (caption, ids) in zip(found.tolist(), CAPTIONS, strict=True):
        if pad_token_id == 0:  # Stable Diffusion 2 pads with "!", and takes each "!" for padding
            ids = [0 if token == 256 else token for token in ids]
        assert row == [BOS, *ids, EOS] + [pad_token_id] * (75 - len(ids)), caption
