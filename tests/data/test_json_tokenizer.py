"""``load_tokenizer`` returns a WordPiece tokenizer, or the tokenizer of any ``tokenizer.json``."""

from __future__ import annotations

import json
import math

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fastbert.data import JsonTokenizer, WordPieceTokenizer, load_tokenizer, model_max_length

TEXTS = ["Anna the sailor walked to the harbour.", "", "naïve 漢字 <mask> end</s>", "the sea " * 30]


@pytest.fixture(params=["roberta", "template"])
def folder(request, documents, tmp_path):
    """Return the folder of a tokenizer with RoBERTa's format, or with token types for a pair."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((s for document in documents for s in document), trainer)
    if request.param == "roberta":
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B:1 </s>:1",
            special_tokens=[("<s>", 0), ("</s>", 2)],
        )
    # A tokenizer file may turn on padding and truncation. The caller must still decide on both.
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(10)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    configure(tmp_path, model_max_length=512)
    return tmp_path


def configure(folder, **content):
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "cls_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        **content,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("max_length", [None, 8, 33])
@pytest.mark.parametrize("names", [[], ["token_type_ids"]])
def test_ids_and_types_are_those_of_transformers(folder, max_length, names):
    transformers = pytest.importorskip("transformers")
    configure(folder, model_input_names=["input_ids", "attention_mask", *names])
    ours = load_tokenizer(folder)
    assert isinstance(ours, JsonTokenizer)
    stock = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"truncation": max_length is not None, "max_length": max_length}
    for text in TEXTS:
        assert ours.encode(text, max_length=max_length) == stock(text, **options)["input_ids"]
        for second in TEXTS:
            ids, types = ours.encode_pair(text, second, max_length=max_length)
            # A call without a batch would drop an empty second text, so this is a batch of one
            # pair.
            pair = stock([text], [second], **options)
            assert [ids] == pair["input_ids"]
            assert [types] == pair.get("token_type_ids", [[0] * len(ids)])


@pytest.mark.parametrize("max_length", [6, 8, 33, 500])
def test_a_text_is_tokenised_once_however_long_it_is(folder, max_length):
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        cut = tokenizer.encode_within(max_length, text)
        assert cut.ids == tokenizer.encode(text, max_length=max_length)
        assert cut.truncated == (len(tokenizer.encode(text)) > max_length)
        for second in TEXTS:
            cut = tokenizer.encode_within(max_length, text, second)
            ids, types = tokenizer.encode_pair(text, second, max_length=max_length)
            assert cut.ids == ids
            assert cut.token_types == (types if any(types) else [])
            assert cut.truncated == (len(tokenizer.encode_pair(text, second)[0]) > max_length)


def test_no_room_for_the_special_tokens(folder):
    tokenizer = load_tokenizer(folder)
    with pytest.raises(ValueError, match="max_length: got 1, allowed: at least 2"):
        tokenizer.encode("the sea", max_length=1)


@pytest.mark.parametrize("kept", ["vocab.txt", "tokenizer.json"])
def test_word_piece_folders(tmp_path, tokenizer, kept):
    tokenizer.save(tmp_path / "saved")
    (tmp_path / "saved" / kept).rename(tmp_path / kept)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, WordPieceTokenizer)
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def test_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer\.json nor vocab\.txt"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is broken"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("recorded", "length"), [(512, 512), (None, None), (10**30, None)])
def test_model_max_length(tmp_path, recorded, length):
    assert model_max_length(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": recorded}))
    assert model_max_length(tmp_path) == length


@pytest.mark.parametrize(
    "length", ["512", True, -1, 0, math.nan, -math.inf, [512], {}, {"length": 512}]
)
def test_a_model_max_length_that_is_none(tmp_path, length):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
    message = r"tokenizer_config\.json: model_max_length: got .*, allowed: a number >= 1"
    with pytest.raises(ValueError, match=message):
        model_max_length(tmp_path)


def test_names_of_inputs_that_are_none(folder):
    configure(folder, model_input_names=5)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: model_input_names: got 5"):
        load_tokenizer(folder)


def test_a_panic_of_the_library_is_a_value_error(folder):
    """A PanicException of the library, which derives from BaseException, becomes a ValueError."""
    path = folder / "tokenizer.json"
    sound = json.loads(path.read_text(encoding="utf-8"))
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps({**sound, "normalizer": broken}))
    with pytest.raises(ValueError, match=r"tokenizer\.json is broken: Precompiled"):
        load_tokenizer(folder)
    processor = {"type": "TemplateProcessing", "special_tokens": {}}
    pieces = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    processor |= {"single": pieces, "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 0}}]}
    path.write_text(json.dumps({**sound, "post_processor": processor}))
    tokenizer = load_tokenizer(folder)
    for call in (
        lambda: tokenizer.encode("the sea"),
        lambda: tokenizer.encode_pair("the", "sea"),
        lambda: tokenizer.encode_within(20, "the sea"),
    ):
        with pytest.raises(ValueError, match="tokenizer: it fails: no entry found for key"):
            call()
