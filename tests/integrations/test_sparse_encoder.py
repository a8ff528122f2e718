"""An accelerated ``SparseEncoder`` computes its SPLADE head without padding, and agrees with stock.

``_computes_without_padding`` tells whether the fast head ran: the stock modules also return the
logits of all tokens.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_sentence_models as tiny
import torch
import transformers
from quick_cases import long_case
from tiny_sentence_models import TEXTS, WORDS
from torch import Tensor, nn

import fastbert
from fastbert import ops
from fastbert.integrations import sparse_encoder as splade
from fastbert.ops import backend as backends
from fastbert.parity.gradients import FACTOR, REASON, joined, kinds
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import run_sides

sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6")
from sentence_transformers import SparseEncoder  # noqa: E402
from sentence_transformers.base.modules import Transformer  # noqa: E402
from sentence_transformers.sparse_encoder.modules import SpladePooling  # noqa: E402

FAMILIES = (
    *("DistilBert", "Bert", "Roberta", "ModernBert", "MPNet", "Albert", "Electra"),
    *map(long_case, ("XLMRoberta", "Camembert", "DebertaV2", "Ernie", "RoFormer", "MegatronBert")),
)


LOOSER = {"factor": FACTOR, "reason": REASON}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that returns the folder of a family's checkpoint with random weights."""
    made: dict[tuple[str, str], Path] = {}

    def folder(family: str, side: str = "right") -> Path:
        if (family, side) not in made:
            path = made[family, side] = tmp_path_factory.mktemp(f"{family}-{side}")
            tiny.save(path, f"{family}ForMaskedLM", tiny.config(family), side)
        return made[family, side]

    return folder


@pytest.fixture(autouse=True)
def forgotten_warnings():
    splade._warn_once.cache_clear()


def build(
    folder: Path, dtype: torch.dtype = torch.float32, pooling: Any = None, **options: Any
) -> Any:
    given = {"dtype": dtype, "attn_implementation": "eager"}
    transformer = Transformer(str(folder), transformer_task="fill-mask", model_kwargs=given)
    return SparseEncoder(
        modules=[transformer, pooling or SpladePooling()], device="cpu", **options
    ).eval()


def dense(model: Any, texts: list[str] = TEXTS, **options: Any) -> Tensor:
    return model.encode(texts, convert_to_sparse_tensor=False, **options)


def call(model: Any, texts: list[str] = TEXTS) -> dict[str, Any]:
    return model(model.preprocess(texts))


def _computes_without_padding(model: Any) -> bool:
    with torch.no_grad():
        return "token_embeddings" not in call(model)


def _sides(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    fast = fastbert.accelerate(build(folder, dtype, **options))
    return fast, build(folder, torch.float64, **options), build(folder, dtype, **options)


# Agreement


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("batch_size", [1, 16])
def test_embeddings_agree_with_stock(folders, family, dtype, side, batch_size):
    sides = _sides(folders(family, side), dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = run_sides(lambda model: dense(model, batch_size=batch_size), *sides)
    assert_close("embeddings", *results)
    assert results[0].dtype == dtype
    assert _computes_without_padding(sides[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_every_parameter_agrees_with_stock(folders, family):
    dy = torch.randn(len(TEXTS), len(WORDS))

    def gradients(model: Any) -> dict[str, Tensor]:
        model.train()
        out = call(model)["sentence_embedding"]
        (out * dy.to(out.dtype)).sum().backward()
        named = model.named_parameters()
        return {"out": out.detach(), **{n: p.grad for n, p in named if p.grad is not None}}

    fast, oracle, stock = _sides(folders(family))
    actual, expected, yardstick = run_sides(gradients, fast, oracle, stock)
    assert actual.keys() == expected.keys()
    assert len(actual) >= 18
    for name in expected:
        assert_close(name, actual[name], expected[name], yardstick[name])
    assert _computes_without_padding(fast)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_embeddings_under_autocast_agree_with_stock(folders, family, cast):
    def embeddings(model: Any) -> Tensor:
        with torch.autocast("cpu", cast), torch.no_grad():
            return call(model)["sentence_embedding"]

    fast, oracle, stock = _sides(folders(family))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = run_sides(embeddings, fast, oracle, stock)
    assert results[0].dtype == embeddings(stock).dtype == cast
    assert_close("embeddings", *results)
    with torch.autocast("cpu", cast):
        assert _computes_without_padding(fast)


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert"])
def test_gradients_under_autocast_agree_with_stock(folders, family):
    fast, oracle, stock = sides = _sides(folders(family))

    def embeddings(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(model.train())["sentence_embedding"]

    # The derivative of relu jumps at 0, so that a rounding decides whether the gradient is 0.
    with torch.no_grad():
        positive = sum((embeddings(each) > 0).int() for each in sides) % 3 == 0
    dy = torch.randn(len(TEXTS), len(WORDS)).bfloat16() * positive

    def gradients(model: Any) -> dict[str, Tensor]:
        out = embeddings(model)
        (out * dy.to(out.dtype)).sum().backward()
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return joined(named, kinds(named))

    actual, expected, yardstick = run_sides(gradients, fast, oracle, stock)
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_close(name, actual[name], expected[name], yardstick[name], **LOOSER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_logarithm_agrees_with_stock(folders, dtype):
    pooling = {"pooling": SpladePooling("max", activation_function="log1p_relu")}
    sides = _sides(folders("Bert"), dtype, **copy.deepcopy(pooling))
    assert_close("embeddings", *run_sides(dense, *sides))
    assert _computes_without_padding(sides[0])
    once = dense(fastbert.accelerate(build(folders("Bert"), dtype)))
    assert dense(sides[0]).sum() < once.sum()


@pytest.mark.parametrize("path", ["vocab_transform", "vocab_layer_norm", "vocab_projector"])
def test_a_head_without_a_bias_agrees_with_stock(folders, path):
    sides = _sides(folders("DistilBert"))
    for side in sides:
        side[0].model.get_submodule(path).bias = None
    assert_close("embeddings", *run_sides(dense, *sides))
    assert _computes_without_padding(sides[0])


def test_a_gelu_by_tanh_agrees_with_stock(folders):
    from transformers.activations import NewGELUActivation

    sides = _sides(folders("DistilBert"))
    for side in sides:
        side[0].model.activation = NewGELUActivation()
    assert_close("embeddings", *run_sides(dense, *sides))
    assert _computes_without_padding(sides[0])


def test_prompts(folders):
    options = {"prompts": {"query": "w1 w2"}, "default_prompt_name": "query"}
    sides = _sides(folders("DistilBert"), **options)
    assert_close("prompt", *run_sides(dense, *sides))
    assert not torch.equal(dense(sides[0]), dense(sides[0], prompt="w9"))


def test_an_embedding_has_the_same_bits_alone_and_in_any_batch(folders):
    model = fastbert.accelerate(build(folders("Bert")))
    together = dense(model)
    assert torch.equal(together, dense(model, TEXTS[::-1], batch_size=5).flip(0))
    assert torch.equal(together, torch.stack([dense(model, [text])[0] for text in TEXTS]))


def test_sparse_output_and_active_dims(folders):
    fast, _, stock = _sides(folders("DistilBert"))
    given, expected = fast.encode(TEXTS), stock.encode(TEXTS)
    assert given.is_sparse
    assert given.shape == expected.shape
    few = fast.encode(TEXTS, max_active_dims=5)
    assert torch.equal(few.to_dense(), _largest(dense(fast), 5))
    assert (few.to_dense() > 0).sum(dim=1).max() <= 5
    assert fast.encode(TEXTS[0]).shape == (len(WORDS),)
    assert fast.get_embedding_dimension() == stock.get_embedding_dimension() == len(WORDS)
    assert [p[0] for p in fast.decode(given[2])] == [p[0] for p in stock.decode(expected[2])]


def _largest(embeddings: Tensor, count: int) -> Tensor:
    values, places = embeddings.topk(count, dim=1)
    return torch.zeros_like(embeddings).scatter(1, places, values)


def test_features_that_are_used_twice(folders):
    """The second call gets what the first call has written into the features."""
    model, stock = fastbert.accelerate(build(folders("Bert"))), build(folders("Bert"))
    features = stock(stock.preprocess(TEXTS))
    assert {"token_embeddings", "sentence_embedding"} <= features.keys()
    expected = features["sentence_embedding"]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            features = model(features)
            assert "token_embeddings" not in features
            torch.testing.assert_close(features["sentence_embedding"], expected)


def test_no_logits_are_computed(folders, monkeypatch):
    given = []
    real = ops.splade
    monkeypatch.setattr(ops, "splade", lambda h, *a, **k: given.append(len(h)) or real(h, *a, **k))
    model = fastbert.accelerate(build(folders("Bert")))
    features = model.preprocess(TEXTS)
    tokens = int(features["attention_mask"].sum())
    model(features)
    assert given == [tokens]


def test_a_text_of_padding_alone_is_zero(folders):
    fast, _, stock = _sides(folders("DistilBert"))
    features = stock.preprocess(TEXTS)
    features["attention_mask"][1] = 0
    out = fast(dict(features))["sentence_embedding"]
    assert not out[1].any()
    torch.testing.assert_close(out[2:], stock(dict(features))["sentence_embedding"][2:])


# Copies, files and restore


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_accelerated(folders, copied):
    model = fastbert.accelerate(build(folders("DistilBert")))
    expected = dense(model)
    made = copied(model)
    assert torch.equal(dense(made), expected)
    assert _computes_without_padding(made)


def test_an_int8_copy_computes_its_head_without_padding(folders):
    model = fastbert.accelerate(build(folders("Bert")))
    small = fastbert.quantize(model)
    assert _computes_without_padding(small)
    expected = dense(model)
    assert (dense(small) - expected).abs().max() < 0.1 * expected.max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(folders, dtype):
    model = fastbert.accelerate(build(folders("DistilBert"), dtype))
    assert _computes_without_padding(model)
    exact = dense(build(folders("DistilBert"), torch.float64))
    error = (dense(model) - exact).abs().max()
    assert error < (1e-2 if dtype == torch.float16 else 1e-12)


def test_saved_and_opened_again(folders, tmp_path):
    model = fastbert.accelerate(build(folders("Bert")))
    model.save_pretrained(str(tmp_path))
    stock = SparseEncoder(str(tmp_path), device="cpu")
    assert type(stock) is SparseEncoder
    assert [type(module) for module in stock] == [Transformer, SpladePooling]
    torch.testing.assert_close(dense(stock), dense(model))
    assert torch.equal(dense(fastbert.accelerate(stock)), dense(model))


def test_restore_gives_the_stock_classes_back(folders):
    model, stock = build(folders("Bert")), build(folders("Bert"))
    fastbert.restore(fastbert.accelerate(fastbert.accelerate(model)))
    assert type(model) is SparseEncoder
    assert splade.PLANS not in vars(model)
    assert not _computes_without_padding(model)
    assert torch.equal(dense(model), dense(stock))


def test_other_sentence_transformers_keep_their_class(folders):
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer = Transformer(str(folders("Bert")))
    dimension = transformer.get_embedding_dimension()
    modules = [transformer, Pooling(dimension)]
    model = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
    fastbert.accelerate(model)
    assert type(model) is sentence_transformers.SentenceTransformer


def test_a_subclass_with_its_own_forward_is_called(folders):
    class Own(SparseEncoder):
        def forward(self, input, **kwargs):
            return super().forward(input, **kwargs) | {"own": True}

    model = fastbert.accelerate(Own(modules=list(build(folders("Bert")).children()), device="cpu"))
    assert type(model) is Own
    assert call(model)["own"]


def test_weights_that_change_are_read(folders):
    model, stock = fastbert.accelerate(build(folders("Bert"))), build(folders("Bert"))
    dense(model)
    for side in (model, stock):
        side[0].model.cls.predictions.decoder.weight.data.mul_(2)
        side[0].model.cls.predictions.transform.LayerNorm.eps = 0.5
    torch.testing.assert_close(dense(model), dense(stock))
    assert _computes_without_padding(model)


# What runs as in sentence-transformers


HOOKED = ("0", "0.model", "0.model.{encoder}", "1")
HEAD_OF = {
    "Bert": (
        *("cls", "cls.predictions", "cls.predictions.transform"),
        "cls.predictions.transform.dense", "cls.predictions.transform.transform_act_fn",
        "cls.predictions.transform.LayerNorm", "cls.predictions.decoder",
    ),
    "DistilBert": ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),
    "Roberta": ("lm_head", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
}  # fmt: skip
# The same for families whose cases are long.
LONG_HEAD_OF = {
    "ModernBert": ("head", "head.dense", "head.act", "head.norm", "decoder"),
    "Albert": (
        "predictions", "predictions.dense", "predictions.activation", "predictions.LayerNorm",
        "predictions.decoder",
    ),
    "Electra": (
        "generator_predictions", "generator_predictions.dense", "generator_predictions.activation",
        "generator_predictions.LayerNorm", "generator_lm_head",
    ),
    "MPNet": ("lm_head", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
}  # fmt: skip


def _paths(family: str, inside: tuple[str, ...]) -> list[tuple[str, str]]:
    encoder = "model" if family == "ModernBert" else family.lower()
    paths = (*HOOKED, *(f"0.model.{each}" for each in inside))
    return [(family, path.format(encoder=encoder)) for path in paths]


PATHS = [
    *(pair for family, inside in HEAD_OF.items() for pair in _paths(family, inside)),
    *(
        long_case(*pair)
        for family, inside in LONG_HEAD_OF.items()
        for pair in _paths(family, inside)
    ),
]


def _add_hook(module: nn.Module, calls: list[Any]) -> None:
    module.register_forward_hook(lambda *_: calls.append("hook"))


def _add_pre_hook(module: nn.Module, calls: list[Any]) -> None:
    module.register_forward_pre_hook(lambda *_: calls.append("hook"))


def _set_forward(module: Any, calls: list[Any]) -> None:
    real = module.forward
    module.forward = lambda *a, **k: calls.append("forward") or real(*a, **k)


def _stock_runs(model: Any, stock: Any, reason: str) -> None:
    """Check that the stock head runs, with one warning that matches `reason`."""
    with pytest.warns(UserWarning, match=f"SparseEncoder computes the logits .*{reason}") as told:
        out = dense(model)
    assert sum("computes the logits" in str(each.message) for each in told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _computes_without_padding(model)
    torch.testing.assert_close(out, dense(stock))


@pytest.mark.each_value
@pytest.mark.parametrize("watch", [_add_hook, _add_pre_hook, _set_forward])
@pytest.mark.parametrize(("family", "path"), PATHS)
def test_a_watched_module_is_called(folders, family, path, watch):
    model, stock = fastbert.accelerate(build(folders(family))), build(folders(family))
    assert _computes_without_padding(model)
    calls: list[Any] = []
    watch(model.get_submodule(path), calls)
    _stock_runs(model, stock, path.replace(".", r"\."))
    # ``Transformer`` calls the forward of this model, and not its hooks.
    assert calls or (path == "0.model" and watch is not _set_forward)


class OtherLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def _other_decoder(model: Any) -> None:
    old = model[0].model.vocab_projector
    new = OtherLinear(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict())
    model[0].model.vocab_projector = new


def _relu(model: Any) -> None:
    model[0].model.activation = nn.ReLU()


def _other_pooling(model: Any) -> None:
    class Own(SpladePooling):
        def forward(self, features):
            features = super().forward(features)
            features["sentence_embedding"] = features["sentence_embedding"] * 2
            return features

    model._modules["1"] = Own()


def _another_module(model: Any) -> None:
    class Doubled(nn.Module):
        def forward(self, features):
            features["sentence_embedding"] = features["sentence_embedding"] * 2
            return features

    model.append(Doubled())


def _no_scale(model: Any) -> None:
    model[0].model.vocab_layer_norm.weight = None


CHANGES = {
    "sum": (lambda m: setattr(m[1], "pooling_strategy", "sum"), "1.pooling_strategy: got 'sum'"),
    "activation of the pooling": (
        lambda m: setattr(m[1], "activation_function", "log1p"),
        "1.activation_function: got 'log1p', allowed: 'relu' or 'log1p_relu'",
    ),
    "decoder": (_other_decoder, "0.model.vocab_projector: got a .*OtherLinear, allowed: Linear"),
    "activation": (_relu, "0.model.activation: got a .*ReLU, allowed: GELUActivation"),
    "tanh": (
        lambda m: setattr(m[0].model.activation, "act", torch.tanh),
        "0.model.activation.act: got .*, allowed: torch's gelu",
    ),
    "pooling": (_other_pooling, "modules: got .*Own, allowed: Transformer, SpladePooling"),
    "module": (_another_module, "modules: got .*Doubled, allowed"),
    "no scale": (_no_scale, "0.model.vocab_layer_norm.weight: got None"),
    "hidden states": (
        lambda m: setattr(m[0].model.config, "output_hidden_states", True),
        "0.model.config.output_hidden_states: got True, allowed: False",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("early", [False, True])
def test_a_changed_model_runs_the_stock_head(folders, change, early):
    model, stock = build(folders("DistilBert")), build(folders("DistilBert"))
    changed, reason = CHANGES[change]
    if early:
        changed(model)
    # A module around the pooling leaves nothing that `accelerate` could recognise.
    fastbert.accelerate(model)
    if not early:
        assert _computes_without_padding(model)
        changed(model)
    changed(stock)
    if early and change == "module":
        assert type(model) is SparseEncoder
        torch.testing.assert_close(dense(model), dense(stock))
        return
    _stock_runs(model, stock, reason)


def test_a_patched_class_runs_the_stock_head(folders, monkeypatch):
    model, stock = fastbert.accelerate(build(folders("Bert"))), build(folders("Bert"))
    assert _computes_without_padding(model)
    real = SpladePooling.forward

    def forward(self, features):
        features = real(self, features)
        features["sentence_embedding"] = features["sentence_embedding"] + 1
        return features

    monkeypatch.setattr(SpladePooling, "forward", forward)
    _stock_runs(model, stock, "SpladePooling.forward: got .*, allowed: the function in its file")


def test_a_patched_gelu_runs_the_stock_head(folders, monkeypatch):
    from transformers.models.roberta import modeling_roberta

    model, stock = fastbert.accelerate(build(folders("Roberta"))), build(folders("Roberta"))
    assert _computes_without_padding(model)
    monkeypatch.setattr(modeling_roberta, "gelu", torch.tanh)
    _stock_runs(model, stock, "gelu")
    monkeypatch.undo()
    assert _computes_without_padding(model)
    monkeypatch.setattr(modeling_roberta.gelu, "act", torch.tanh)
    _stock_runs(model, stock, "gelu.act: got .*tanh, allowed: torch's gelu")
    monkeypatch.undo()
    assert _computes_without_padding(model)
    hook = modeling_roberta.gelu.register_forward_hook(lambda *_: None)
    _stock_runs(model, stock, "gelu.forward_hooks")
    hook.remove()


def test_an_untested_version_runs_the_stock_head(folders, monkeypatch):
    monkeypatch.setitem(splade.DIGESTS, f"{splade.POOLING}.forward", ("0" * 16,))
    model, stock = fastbert.accelerate(build(folders("Bert"))), build(folders("Bert"))
    _stock_runs(
        model, stock, "SpladePooling.forward: got the code of version .*the tested versions"
    )


def test_other_families_run_the_stock_head(folders, tmp_path):
    family = "RobertaPreLayerNorm"
    tiny.save(tmp_path, f"{family}ForMaskedLM", tiny.config(family))
    model, stock = fastbert.accelerate(build(tmp_path)), build(tmp_path)
    _stock_runs(model, stock, f"0.model: got a {family}ForMaskedLM, allowed: BertForMaskedLM")


def _on(device: str) -> Any:
    """Return what stands for stages and a plan whose parameters are on a device."""
    parameter = SimpleNamespace(device=torch.device(device))
    module = SimpleNamespace(parameters=lambda: iter([parameter]), weight=parameter)
    return SimpleNamespace(modules=[module], decoder=module)


def test_the_devices_with_a_kernel(monkeypatch):
    assert splade._has_kernel(_on("cpu"))
    assert not splade._has_kernel(_on("mps"))
    monkeypatch.setattr(backends, "capability", lambda: (9, 0))
    assert splade._has_kernel(_on("cuda")) == backends.HAS_TRITON
    monkeypatch.setattr(backends, "capability", lambda: (7, 5))
    assert not splade._has_kernel(_on("cuda"))
    monkeypatch.setattr(backends, "EXTENSION", None)
    assert not splade._has_kernel(_on("cpu"))


def test_autocast_on_a_gpu_runs_the_stock_head(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    problem = splade._call_problem(SimpleNamespace(), _on("cuda"), {})
    assert problem == "autocast: got torch.bfloat16, allowed: autocast on the CPU"


def test_a_module_inside_the_encoder_that_is_called_runs_the_stock_head(folders):
    """The linear layer gets ``(B, L, H)``, so padding is among the rows of the encoder."""
    model, stock = build(folders("DistilBert")), build(folders("DistilBert"))
    for side in (model, stock):
        linear = side[0].model.distilbert.transformer.layer[0].ffn.lin1
        linear.register_forward_hook(lambda *given: given[2] * 1.5)
    fastbert.accelerate(model)
    torch.testing.assert_close(dense(model), dense(stock), rtol=1e-4, atol=1e-5)
    assert not _computes_without_padding(model)


def test_a_subclass_of_the_encoder_is_called(folders):
    class Own(transformers.DistilBertModel):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.last_hidden_state = out.last_hidden_state * 2
            return out

    model, stock = build(folders("DistilBert")), build(folders("DistilBert"))
    for side in (model, stock):
        side[0].model.distilbert.__class__ = Own
    fastbert.accelerate(model)
    torch.testing.assert_close(dense(model), dense(stock), rtol=1e-4, atol=1e-5)
    assert not _computes_without_padding(model)


def test_compiled_models_agree(folders):
    model, stock = fastbert.accelerate(build(folders("DistilBert"))), build(folders("DistilBert"))
    model.compile(backend="eager")
    # Another batch shape would be compiled again.
    results = [dense(each, TEXTS[2:4]) for each in (model, stock)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
