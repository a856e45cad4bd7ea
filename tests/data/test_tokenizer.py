"""Do captions become CLIP's ids?

The expected ids come from open_clip's `SimpleTokenizer`, an independent implementation. Not in the
table because transformers' fast class differs there: the special tokens spelt out in a caption
(open_clip splits them into letters), and the ligature U+FB01 (open_clip cleans text with ftfy).
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from transformers import T5TokenizerFast

from sdbench.base.conditions import CLIP, T5, Captions
from sdbench.data.batches.tokenizer import CaptionTokenizer, CaptionTokenizers
from sdbench.data.checks import check_tokenizer_folder
from tests.refusals import refused

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


T5_EOS = 1


@pytest.mark.parametrize("from_folder", [False, True])
def test_captions_of_t5_become_bytes_without_a_vocabulary(from_folder, tmp_path):
    """ByT5's ids are those of the bytes of UTF-8, after three special tokens."""
    options = {"kind": T5, "pad_token_id": 0, "num_tokens": 6}
    if from_folder:
        CaptionTokenizer(**options).for_diffusers().save_pretrained(tmp_path)
    tokenizer = CaptionTokenizer(folder=tmp_path if from_folder else None, **options)
    found = pickle.loads(pickle.dumps(tokenizer))(["cat", "", "caf\u00e9", "a longer caption"])
    assert found.dtype == np.int64
    assert found.tolist() == [
        [102, 100, 119, T5_EOS, 0, 0],
        [T5_EOS, 0, 0, 0, 0, 0],
        [102, 100, 105, 198, 172, T5_EOS],  # e with an acute accent is C3 A9
        [100, 35, 111, 114, 113, T5_EOS],
    ]
    assert tokenizer.for_diffusers().model_max_length == 6


def write_unigrams(folder: Path) -> None:
    """The tokenizer of a T5 with a vocabulary of four words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = ["<pad>", "</s>", "<unk>", "\u2581a", "\u2581photo", "\u2581of", "\u2581cat"]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=2))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], special_tokens=[("</s>", T5_EOS)]
    )
    T5TokenizerFast(tokenizer_object=made, extra_ids=0).save_pretrained(folder)


@pytest.mark.parametrize("vocabulary_size", [None, 7])
def test_a_sound_tokenizer_is_accepted(vocabulary_size, tmp_path):
    write_unigrams(tmp_path)
    check_tokenizer_folder(Captions(kind=T5, folder=tmp_path, vocabulary_size=vocabulary_size))


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        (T5, {"tokenizer.json": ""}),
        (CLIP, {"tokenizer.json": "{}"}),
        (CLIP, {"vocab.json": "[]", "merges.txt": ""}),
        (CLIP, {"vocab.json": '{"a": "b"}', "merges.txt": ""}),
        (CLIP, {"vocab.json": "{}", "merges.txt": ""}),
    ],
)
def test_a_damaged_tokenizer_is_named_before_the_run_and_as_it_is_loaded(kind, files, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with refused("--model_name", value=str(tmp_path)):
        check_tokenizer_folder(Captions(kind=kind, folder=tmp_path))
    if "tokenizer.json" in files:
        with refused("--model_name", value=str(tmp_path)):
            CaptionTokenizer(folder=tmp_path, kind=kind, pad_token_id=0)


def test_ids_that_the_text_encoder_does_not_know_are_refused(tmp_path):
    write_unigrams(tmp_path)
    with refused("--model_name", value=str(tmp_path)):
        check_tokenizer_folder(Captions(kind=T5, folder=tmp_path, vocabulary_size=6))


@pytest.mark.parametrize("sets_prefix", [False, True])
def test_captions_of_t5_by_the_vocabulary_of_a_folder(sets_prefix, tmp_path):
    """No package for sentencepiece's own file is needed, whatever the folder says."""
    write_unigrams(tmp_path)
    if sets_prefix:
        path = tmp_path / "tokenizer_config.json"
        config = {**json.loads(path.read_text()), "add_prefix_space": True, "legacy": True}
        path.write_text(json.dumps({**config, "tokenizer_class": "T5Tokenizer"}))
        (tmp_path / "spiece.model").write_bytes(b"not read")
    tokenizer = CaptionTokenizer(folder=tmp_path, kind=T5, pad_token_id=0, num_tokens=5)
    captions = ["a photo", "a photo of a cat", ""]
    expected = [[3, 4, 1, 0, 0], [3, 4, 5, 3, 1], [1, 0, 0, 0, 0]]
    assert tokenizer(captions).tolist() == expected
    for_diffusers = tokenizer.for_diffusers()
    assert for_diffusers.model_max_length == 5
    padded = for_diffusers(captions, padding="max_length", truncation=True)["input_ids"]
    assert padded == expected


def test_code_in_a_folder_is_not_run(tmp_path):
    write_unigrams(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    path.write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('run')\n")
    tokenizer = CaptionTokenizer(folder=tmp_path, kind=T5, pad_token_id=0, num_tokens=3)
    assert tokenizer(["a cat"]).tolist() == [[3, 6, 1]]


def test_each_text_encoder_has_its_own_ids():
    captions = (
        Captions(),
        Captions(name="input_ids_2", pad_token_id=EOS),
        Captions(name="input_ids_3", kind=T5, num_tokens=5),
    )
    tokenize = CaptionTokenizers(captions, new_token="<dog>")
    found = tokenize(["cat", "<dog>"])
    assert {name: ids.shape for name, ids in found.items()} == {
        "input_ids": (2, 77),
        "input_ids_2": (2, 77),
        "input_ids_3": (2, 5),
    }
    for name, pad in (("input_ids", 0), ("input_ids_2", EOS)):
        assert found[name].tolist() == [
            [BOS, 2368, EOS] + [pad] * 74,
            [BOS, 49408, EOS] + [pad] * 74,  # the first id after the vocabulary
        ]
    assert found["input_ids_3"].tolist() == [[102, 100, 119, 1, 0], [63, 103, 114, 106, 1]]
