"""Every text survives the pieces, and transformers reads the tokenizer and gives the same ids."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fastbert.seq2seq.tokenizer import PieceTokenizer

TEXTS = [
    "three hundred and four thousand and twelve",
    "304012",
    "This para-\nmeter  is\tignored. ",
    " leading",
    "",
    "</s> and <pad> are text",
    "naïve Ωmega 日本語 👩‍🚀 e\u0301",
    "it's don't 1,000.50",
]


@pytest.fixture(params=[0, 50])
def tokenizer(request) -> PieceTokenizer:
    return PieceTokenizer.train(TEXTS * 20, request.param)


def test_a_text_is_decoded_to_itself(tokenizer):
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(TEXTS)] == TEXTS


def test_a_text_ends_with_one_end_and_has_no_padding(tokenizer):
    for ids in tokenizer.encode(TEXTS):
        assert ids.count(tokenizer.end) == 1
        assert ids[-1] == tokenizer.end
        assert tokenizer.padding not in ids


def test_what_follows_the_end_is_not_decoded(tokenizer):
    [first, second] = tokenizer.encode(["one", "two"])
    padding = [tokenizer.padding] * 3
    assert tokenizer.decode([*first, *second, *padding]) == "one"


def test_without_merges_each_byte_is_a_piece():
    tokenizer = PieceTokenizer.train(TEXTS, 0)
    assert tokenizer.size == 258
    lengths = [len(ids) - 1 for ids in tokenizer.encode(TEXTS)]
    assert lengths == [len(text.encode()) for text in TEXTS]


def test_merges_shorten_words_but_not_numbers():
    tokenizer = PieceTokenizer.train(["hundred thousand 304012"] * 20, 50)
    words, number = tokenizer.encode(["hundred thousand", "304012"])
    assert len(words) == 3
    assert len(number) == 7


def test_transformers_gives_the_same_ids(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path, max_length=65)
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [text for text in TEXTS if "</s>" not in text]
    assert stock(texts).input_ids == tokenizer.encode(texts)
    assert stock.model_max_length == 65
    assert (stock.pad_token_id, stock.eos_token_id) == (tokenizer.padding, tokenizer.end)
    decoded = stock.batch_decode(tokenizer.encode(texts), skip_special_tokens=True)
    assert decoded == texts


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert PieceTokenizer.load(tmp_path).encode(TEXTS) == tokenizer.encode(TEXTS)


def test_another_process_finds_the_same_pieces(tmp_path):
    """The other process has another seed of hashes, which the order of a set depends on."""
    code = (
        "import sys\n"
        "from fastbert.seq2seq.tokenizer import PieceTokenizer\n"
        "text = 'the old mill ran and the dog ran to the mill and the barn'\n"
        "PieceTokenizer.train([text, text[::-1]] * 9, 40).save(sys.argv[1])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "other")]
    subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "random"}, check=True, timeout=300)
    text = "the old mill ran and the dog ran to the mill and the barn"
    PieceTokenizer.train([text, text[::-1]] * 9, 40).save(tmp_path / "this")
    this, other = ((tmp_path / n / "tokenizer.json").read_bytes() for n in ("this", "other"))
    assert this == other


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist, allowed: a fold"):
        PieceTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer: .*tokenizer\.json is broken"):
        PieceTokenizer.load(tmp_path)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ValueError, match=r"tokenizer\.json: got no <pad> or no </s>, allowed: both"
    ):
        PieceTokenizer.load(tmp_path)
