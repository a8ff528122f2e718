"""Commands give right results for a RoBERTa with byte-level BPE, and ``info`` for other models.

``encode``, ``classify`` and ``fill-mask`` agree with transformers in float64.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import fastbert
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

transformers = pytest.importorskip("transformers")
modeling_bert = pytest.importorskip("transformers.models.bert.modeling_bert")

TEXTS = ["the dog ran to the garden", "", "anna likes the cat on the tree and a bird", "birds"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a model for each head; all folders have the same tokenizer."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 9, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=60,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in names.items()},
    )
    config = transformers.RobertaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=80,
        max_position_embeddings=66,
        pad_token_id=1,
        initializer_range=0.3,
        id2label={0: "bad", 1: "good", 2: "other"},
        label2id={"bad": 0, "good": 1, "other": 2},
    )
    made = {}
    torch.manual_seed(0)
    for head in ("SequenceClassification", "MaskedLM"):
        made[head] = tmp_path_factory.mktemp(head)
        getattr(transformers, f"RobertaFor{head}")(config).save_pretrained(made[head])
        tokenizer.save_pretrained(made[head])
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


def stock(kind: str, folder: Path, dtype: torch.dtype):
    """Return the output of the transformers class `kind` for each text, one text per call."""
    model = getattr(transformers, kind).from_pretrained(folder).to(dtype).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")) for text in TEXTS]


def test_encode(run, folders, source, tmp_path) -> None:
    folder, target = folders["MaskedLM"], tmp_path / "out.npy"
    assert run("encode", folder, source, target, "--pooling", "mean").exit_code == 0

    def embeddings(dtype: torch.dtype) -> torch.Tensor:
        return torch.cat(
            [out.last_hidden_state.mean(1) for out in stock("AutoModel", folder, dtype)]
        )

    sides = embeddings(torch.float64), Yardstick(lambda: embeddings(torch.float32))
    assert_close("embeddings", torch.from_numpy(np.load(target)), *sides)


def test_classify(run, refused, folders, source, tmp_path) -> None:
    folder, target = folders["SequenceClassification"], tmp_path / "out.jsonl"
    assert run("classify", folder, source, target).exit_code == 0
    lines = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    kind, names = "AutoModelForSequenceClassification", ("bad", "good", "other")

    def scores(dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([out.logits.softmax(-1) for out in stock(kind, folder, dtype)])

    sides = scores(torch.float64), Yardstick(lambda: scores(torch.float32))
    actual = torch.tensor([[line["scores"][name] for name in names] for line in lines])
    assert_close("scores", actual, *sides)
    assert [line["label"] for line in lines] == [names[i] for i in sides[0].argmax(-1)]
    assert "allowed: none for a head of roberta" in refused(
        "classify", folder, "--text", "a dog", "--backend", "cpu"
    )
    assert "the head is incomplete" in refused("classify", folders["MaskedLM"], "--text", "a dog")


def test_fill_mask(run, refused, folders) -> None:
    folder = folders["MaskedLM"]
    result = run("fill-mask", folder, "the <mask> ran to the <mask>", "--json", "--top-k", "3")
    masks = json.loads(result.stdout)["masks"]
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer("the <mask> ran to the <mask>", return_tensors="pt")
    double = copy.deepcopy(model).double()
    with torch.no_grad():
        yardstick = Yardstick(lambda: model(**batch).logits[0].softmax(-1))
        expected = double(**batch).logits[0].softmax(-1)
    assert len(masks) == 2
    for mask in masks:
        best = expected[mask["position"]].topk(3)
        assert [candidate["id"] for candidate in mask["candidates"]] == best.indices.tolist()
        actual = torch.tensor([candidate["probability"] for candidate in mask["candidates"]])
        near = yardstick[mask["position"]][best.indices]
        with torch.no_grad():
            assert_close("probabilities", actual, best.values, near)
        for candidate in mask["candidates"]:
            assert candidate["sentence"].count("<mask>") == 1
            assert "<s>" not in candidate["sentence"]
    assert "allowed: text with at least one <mask>" in refused("fill-mask", folder, "the dog")


def test_info(run, folders) -> None:
    content = json.loads(run("info", folders["MaskedLM"], "--json").stdout)
    assert content["model"]["family"] == "roberta"
    assert "up to 64 tokens" in content["model"]["positions"]
    encoder = [row for row in content["backends"] if row["op"] == "encoder"]
    assert len(encoder) == 3
    assert all(row["reason"] for row in content["backends"])
    table = run("info", folders["MaskedLM"]).stdout
    assert "feed_forward" in table
    assert "roberta" in table
    assert content["model"]["fastbert.accelerate"] == "serves it"


def test_info_of_a_model_says_why(run, refused, tmp_path) -> None:
    transformers.ModernBertConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    content = json.loads(run("info", tmp_path, "--json").stdout)
    assert "rotary, base 10000, 160000" in content["model"]["positions"]
    assert content["model"]["windows"] == "2 layers see 64 tokens on each side"
    rows = [row for row in content["backends"] if row["op"] == "encoder"]
    assert {row["reason"] for row in rows} == {"all layers in one call"}
    assert sum(row["op"] == "rotary" for row in content["backends"]) == 3
    assert content["model"]["fastbert.accelerate"] == "serves it"
    assert "there is no config.json" in refused("info", tmp_path.parent)


def test_info_of_a_model_names_what_accelerate_does_not_serve(run, monkeypatch, tmp_path) -> None:
    transformers.BertConfig(num_hidden_layers=2).save_pretrained(tmp_path)

    class Scaled(modeling_bert.BertSelfOutput):
        def forward(self, *given):
            return 2 * super().forward(*given)

    monkeypatch.setattr(modeling_bert, "BertSelfOutput", Scaled)
    told = json.loads(run("info", tmp_path, "--json").stdout)["model"]["fastbert.accelerate"]
    assert told.startswith("not served: ")
    assert "Scaled.forward" in told
    # The message of the command has the same reason as the error of `fastbert.accelerate`.
    model = transformers.BertModel(transformers.BertConfig.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match=r"Scaled\.forward"):
        fastbert.accelerate(model)
