"""`fastbert.quantize` of accelerated models: bits, files, copies, changes and refusals."""

from __future__ import annotations

import copy
import json
import pickle

import _fresh_python
import peft
import pytest
import torch
import transformers
from integrations import stock_families, tiny_models
from torch import nn

import fastbert
from fastbert import BertModel
from fastbert.integrations.accelerate import bound_encoders, obstacles
from fastbert.integrations.quantized_models import Int8Config
from fastbert.modules.quantized_linear import QuantizedLinear


def accelerated(kind="BertModel", **changes):
    return fastbert.accelerate(tiny_models.model(kind, **changes))


def batch():
    return tiny_models.batch()


def run(model, **options):
    with torch.no_grad():
        return tiny_models.values(model, batch(), **options)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.each_value
@pytest.mark.parametrize("family", stock_families.of_each_kind(stock_families.FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_family_has_the_bits_of_a_model_of_fastbert(family, dtype, tmp_path):
    stock = stock_families.in_dtype(stock_families.build(family), dtype)
    stock.save_pretrained(tmp_path)
    native = fastbert.quantize(BertModel.from_pretrained(tmp_path, dtype=dtype).eval())
    quantized = fastbert.quantize(fastbert.accelerate(stock))
    given = stock_families.inputs("right", family)
    with torch.no_grad():
        expected = native(given["input_ids"], attention_mask=given["attention_mask"])
        actual = quantized(**given)
    real = given["attention_mask"].bool()
    assert torch.equal(actual.last_hidden_state[real], expected.last_hidden_state[real])
    assert obstacles(quantized) == {"": None}
    (bound,) = bound_encoders(quantized).values()
    assert not bound.whole
    kinds = {type(leaf.own_place.get()) for leaf in bound.leaves if "encoder.layer" in leaf.path}
    assert QuantizedLinear in kinds
    assert nn.Linear not in kinds


@pytest.mark.parametrize(
    "kind", ["BertForSequenceClassification", "BertForMaskedLM", "RobertaForTokenClassification"]
)
def test_a_saved_model_has_the_same_bits(kind, tmp_path):
    family = "Roberta" if kind.startswith("Roberta") else "Bert"
    model = tiny_models.model(kind, tiny_models.config(family))
    quantized = fastbert.quantize(fastbert.accelerate(model))
    expected = run(quantized)
    quantized.save_pretrained(tmp_path)
    loaded = getattr(transformers, kind).from_pretrained(tmp_path)
    assert not loaded.training
    assert same(run(fastbert.accelerate(loaded)), expected)
    assert loaded.config.quantization_config.modules == [
        "encoder.layer.*.attention.output.dense",
        *(f"encoder.layer.*.attention.self.{name}" for name in ("key", "query", "value")),
        "encoder.layer.*.intermediate.dense",
        "encoder.layer.*.output.dense",
    ]
    # The encoder without the head is in the same files.
    encoder = fastbert.accelerate(transformers.AutoModel.from_pretrained(tmp_path))
    prefix = loaded.base_model_prefix
    with torch.no_grad():
        whole = getattr(quantized, prefix)(**batch()).last_hidden_state
        assert torch.equal(encoder(**batch()).last_hidden_state, whole)
    # A loaded model can be saved again.
    loaded.save_pretrained(tmp_path / "again")
    again = getattr(transformers, kind).from_pretrained(tmp_path / "again")
    assert same(run(fastbert.accelerate(again)), expected)


def test_a_model_is_loaded_in_another_dtype_with_exact_scales(tmp_path):
    quantized = fastbert.quantize(accelerated())
    quantized.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    layers = [m for m in loaded.modules() if isinstance(m, QuantizedLinear)]
    originals = [m for m in quantized.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == len(originals) == 12
    for layer, original in zip(layers, originals, strict=True):
        assert torch.equal(layer.scale, original.scale)
        assert torch.equal(layer.weight, original.weight)
        assert layer.bias.dtype == torch.bfloat16
    fastbert.accelerate(loaded)
    with torch.no_grad():
        output, exact = (model(**batch()).last_hidden_state for model in (loaded, quantized))
    assert output.dtype == torch.bfloat16
    assert (output.float() - exact).abs().max() < 0.5  # bf16 rounds, and so do the activations


def test_transformers_alone_refuses_the_files(tmp_path):
    """Without fastbert, integers must never be read as floating-point weights."""
    fastbert.quantize(accelerated()).save_pretrained(tmp_path)
    code = f"import transformers; transformers.AutoModel.from_pretrained({str(tmp_path)!r})"
    done = _fresh_python.run("-c", code, after="transformers")
    assert done.returncode != 0
    assert "fastbert" in done.stderr
    assert "mismatch" in done.stderr


def test_a_newer_format_is_refused(tmp_path):
    fastbert.quantize(accelerated()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text("utf-8"))
    settings["quantization_config"]["version"] = 2
    path.write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ValueError, match="version: got 2, allowed: 1"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_floating_weights_are_not_quantized_while_loading(tmp_path):
    tiny_models.model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got floating-point weights, allowed: a saved model"):
        transformers.AutoModel.from_pretrained(tmp_path, quantization_config=Int8Config([]))


def test_the_original_stays_as_it_was():
    model = accelerated()
    before, weights = run(model), copy.deepcopy(model.state_dict())
    quantized = fastbert.quantize(model)
    run(quantized)
    assert same(run(model), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not hasattr(model.config, "quantization_config")
    assert not any(parameter.requires_grad for parameter in quantized.parameters())
    in_place = fastbert.quantize(model, inplace=True)
    assert in_place is model
    assert same(run(model), run(quantized))


def test_copies_and_pickles_have_the_same_bits():
    quantized = fastbert.quantize(accelerated())
    expected = run(quantized)
    for other in (copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))):
        assert same(run(other), expected)
        assert obstacles(other) == {"": None}


def test_stock_code_computes_with_the_same_layers():
    quantized = fastbert.quantize(accelerated())
    expected = run(quantized)
    restored = fastbert.restore(quantized)
    assert (
        max((run(restored)[name] - expected[name]).abs().max() for name in expected) < 0.3
    )  # roundings of activations differ
    assert same(run(fastbert.accelerate(restored)), expected)


def changes():
    def query(model):
        return model.encoder.layer[1].attention.self.query

    def write_bias(model):
        query(model).bias.add_(0.5)

    def replace_bias_memory(model):
        query(model).bias.data = torch.ones_like(query(model).bias)

    def replace_bias(model):
        query(model).bias = nn.Parameter(torch.ones(48), requires_grad=False)

    def drop_bias(model):
        query(model).bias = None

    def load_state(model):
        other = fastbert.quantize(
            fastbert.accelerate(
                tiny_models.model(settings=model.config.__class__(**tiny_models.SIZES))
            )
        )
        state = other.state_dict()
        for name in list(state):
            if name.endswith("query.weight"):
                state[name] = -state[name]
        model.load_state_dict(state)

    def write_packed(model):
        query(model).prepacked.neg_()

    def convert(model):
        model.to(torch.bfloat16)

    def replace_layer(model):
        layer = nn.Linear(48, 48)
        model.encoder.layer[1].attention.self.query = layer.requires_grad_(False).eval()

    def add_hook(model):
        query(model).register_forward_hook(lambda module, given, output: 2 * output)

    return [value for name, value in locals().items() if name != "query"]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_a_change_is_seen_as_by_a_new_copy(change):
    """After each change, the model has the bits of a deep copy, whose encoder is bound anew."""
    quantized = fastbert.quantize(accelerated())
    before = run(quantized)
    with torch.no_grad():
        change(quantized)
    after = run(quantized)
    assert not same(after, before)
    assert same(after, run(copy.deepcopy(quantized)))


def test_training_and_gradients_are_refused():
    quantized = fastbert.quantize(accelerated("BertForSequenceClassification"))
    with pytest.raises(RuntimeError, match=r"quantised model got a call in training mode"):
        quantized.train()(**batch())
    quantized.eval()
    assert not quantized(**batch()).logits.requires_grad
    embeddings = quantized.bert.embeddings.word_embeddings(batch()["input_ids"])
    with pytest.raises(RuntimeError, match="got a tensor that requires a gradient, allowed"):
        quantized(
            inputs_embeds=embeddings.requires_grad_(True), attention_mask=batch()["attention_mask"]
        ).logits.sum().backward()


def test_refusals():
    with pytest.raises(
        TypeError, match=r"got BertModel of transformers, allowed: a model of fastb"
    ):
        fastbert.quantize(tiny_models.model())
    with pytest.raises(TypeError, match="got list"):
        fastbert.quantize([])
    with pytest.raises(ValueError, match="got a quantized model"):
        fastbert.quantize(fastbert.quantize(accelerated()))
    with pytest.raises(ValueError, match=r"training mode, allowed: model.eval\(\)"):
        fastbert.quantize(accelerated().train())
    settings = peft.LoraConfig(target_modules=["query"], init_lora_weights=False)
    adapted = fastbert.accelerate(peft.get_peft_model(tiny_models.model(), settings).eval())
    with pytest.raises(TypeError, match=r"query is a peft\..*, allowed: a plain Linear"):
        fastbert.quantize(adapted)
    broken = accelerated()
    with torch.no_grad():
        broken.encoder.layer[0].output.dense.weight[3, 4] = float("inf")
    with pytest.raises(ValueError, match="weights that are not finite"):
        fastbert.quantize(broken)


def test_sentence_transformers_and_cross_encoders(tmp_path):
    """Quantize in two lines, save, and load in a new process that imports the format."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    from fastbert.bench.quantized_accuracy import model_folder

    texts = ["A cat sits on the mat.", "Shares fell.", "The dog ran to the park after the rain."]
    pairs = [(texts[0], other) for other in texts]
    sentences = fastbert.quantize(
        fastbert.accelerate(SentenceTransformer(str(model_folder()), device="cpu"))
    )
    torch.manual_seed(0)
    cross = CrossEncoder(str(model_folder()), num_labels=1, device="cpu")
    ranker = fastbert.quantize(fastbert.accelerate(cross))
    expected = sentences.encode(texts), ranker.predict(pairs)
    sentences.save_pretrained(str(tmp_path / "sentences"))
    ranker.save_pretrained(str(tmp_path / "ranker"))
    code = f"""
import sys, pickle
from sentence_transformers import CrossEncoder, SentenceTransformer
import fastbert, fastbert.integrations.quantized_models
folder, texts, pairs = {str(tmp_path)!r}, {texts!r}, {pairs!r}
sentences = fastbert.accelerate(SentenceTransformer(folder + "/sentences", device="cpu"))
ranker = fastbert.accelerate(CrossEncoder(folder + "/ranker", device="cpu"))
pickle.dump((sentences.encode(texts), ranker.predict(pairs)), open(folder + "/results", "wb"))
"""
    done = _fresh_python.run("-c", code, after="transformers")
    assert done.returncode == 0, done.stderr
    actual = pickle.loads((tmp_path / "results").read_bytes())
    for a, b in zip(actual, expected, strict=True):
        assert (a == b).all()
    stock = SentenceTransformer(str(model_folder()), device="cpu").encode(texts)
    assert abs(expected[0] - stock).max() < 0.02
