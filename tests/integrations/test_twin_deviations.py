"""If an HF model differs from its twin, a new model of its class, the message says where."""

from __future__ import annotations

from types import MethodType
from typing import Any
from unittest import mock

import pytest
import stock_families as families
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import activations, masking_utils, modeling_layers, modeling_utils
from transformers.models.bert import modeling_bert
from transformers.models.modernbert import modeling_modernbert
from transformers.utils import generic

from fastbert.integrations.twin import compare

LAYER = "encoder.layer.1."


class Doubled(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


class Tripled(nn.Module):
    def forward(self, weight):
        return 3.0 * weight


class Shifted(modeling_bert.BertSelfOutput):
    def forward(self, hidden_states, input_tensor):
        return super().forward(hidden_states, input_tensor) + 1.0


class Chunked(modeling_bert.BertLayer):
    def feed_forward_chunk(self, attention_output):
        return super().feed_forward_chunk(attention_output) + 1.0


class Called(modeling_bert.BertIntermediate):
    def __call__(self, x):
        return super().__call__(x) + 1.0


class Mine(dict):
    pass


def put(path: str, name: str, value: Any) -> Any:
    """Return a function that sets a module's attribute to `value`, or to ``value(module)``."""

    def change(hf_model: nn.Module) -> None:
        module = hf_model.get_submodule(path)
        setattr(module, name, value(module) if callable(value) else value)

    return change


def hook(path: str, kind: str = "forward") -> Any:
    return lambda hf_model: getattr(hf_model.get_submodule(path), f"register_{kind}_hook")(
        lambda *given: None
    )


def become(path: str, kind: type) -> Any:
    return lambda hf_model: setattr(hf_model.get_submodule(path), "__class__", kind)


def fill(path: str, name: str, change: Any) -> Any:
    def run(hf_model: nn.Module) -> None:
        with torch.no_grad():
            change(getattr(hf_model.get_submodule(path), name))

    return run


def own_forward(path: str) -> Any:
    return put(path, "forward", lambda module: lambda *args, **kwargs: None)


def parameter(path: str, name: str, change: Any) -> Any:
    """Return a function that replaces a parameter by a new one with changed data."""

    def run(hf_model: nn.Module) -> None:
        module = hf_model.get_submodule(path)
        module._parameters[name] = nn.Parameter(change(module._parameters[name].data))

    return run


def subclass_parameter(hf_model: nn.Module) -> None:
    class Own(nn.Parameter):
        pass

    norm = hf_model.get_submodule(LAYER + "output.LayerNorm")
    norm._parameters["weight"] = Own(norm.weight.data)


def fewer_heads(hf_model: nn.Module) -> None:
    attention = hf_model.get_submodule(LAYER + "attention.self")
    attention.num_attention_heads, attention.attention_head_size = 1, 144


def shared_layers(hf_model: nn.Module) -> None:
    hf_model.encoder.layer[1] = hf_model.encoder.layer[0]


SELF = LAYER + "attention.self"
STOCK: dict[str, tuple[Any, str]] = {
    "scaling": (put(SELF, "scaling", 1.0), f"{SELF}.scaling: got 1.0, allowed: 0.14"),
    "is_causal": (put(SELF, "is_causal", True), f"{SELF}.is_causal: got True, allowed: False"),
    "groups": (put(SELF, "num_key_value_groups", 3), f"{SELF}.num_key_value_groups: got 3"),
    "head size": (put(SELF, "attention_head_size", 24), f"{SELF}.attention_head_size: got 24"),
    "fewer heads": (fewer_heads, f"{SELF}.attention_head_size: got 144, allowed: 48"),
    "activation": (
        put(LAYER + "intermediate", "intermediate_act_fn", lambda m: nn.SiLU()),
        "intermediate_act_fn: got a torch.nn.modules.activation.SiLU, allowed: GELUActivation",
    ),
    "activation's function": (
        put(LAYER + "intermediate.intermediate_act_fn", "act", lambda m: torch.relu),
        "intermediate_act_fn.act: got _VariableFunctionsClass.relu, allowed: gelu",
    ),
    "norm's class": (
        put(LAYER + "output", "LayerNorm", lambda m: nn.RMSNorm(144)),
        "output.LayerNorm: got a torch.nn.modules.normalization.RMSNorm, allowed: LayerNorm",
    ),
    "norm without weight": (
        parameter(LAYER + "output.LayerNorm", "weight", lambda w: w[:0]),
        "output.LayerNorm.weight: got shape (0,), allowed: (144,)",
    ),
    "norm without affine": (
        put(LAYER + "output", "LayerNorm", lambda m: nn.LayerNorm(144, 1e-12, False)),
        "LayerNorm.weight: got None, allowed: a Parameter of shape (144,)",
    ),
    "norm of a sub-class": (subclass_parameter, "LayerNorm.weight: got a Own, allowed: a Param"),
    "norm's hook": (hook(LAYER + "output.LayerNorm"), "output.LayerNorm.forward_hooks: got"),
    "norm's forward": (own_forward(LAYER + "output.LayerNorm"), "LayerNorm.forward: got own_"),
    "dropout's class": (
        put(LAYER + "output", "dropout", lambda m: nn.AlphaDropout(0.5)),
        "output.dropout: got a torch.nn.modules.dropout.AlphaDropout, allowed: Dropout",
    ),
    "dropout's p": (put(LAYER + "output.dropout", "p", "half"), "dropout.p: got 'half', allowed:"),
    "layer's hook": (hook("encoder.layer.1"), "encoder.layer.1.forward_hooks: got hook."),
    "encoder's pre-hook": (hook("encoder", "forward_pre"), "encoder.forward_pre_hooks: got hook."),
    "backward hook": (hook(SELF, "full_backward"), f"{SELF}.backward_hooks: got hook."),
    "backward pre-hook": (hook(SELF, "full_backward_pre"), f"{SELF}.backward_pre_hooks: got hook."),
    "layer's forward": (own_forward("encoder.layer.1"), "encoder.layer.1.forward: got own_forward"),
    "forward of another": (
        put("encoder.layer.1", "forward", lambda m: MethodType(modeling_bert.BertLayer.forward, 3)),
        "encoder.layer.1.forward: got BertLayer.forward",
    ),
    "chunk": (
        put("encoder.layer.1", "feed_forward_chunk", lambda m: lambda x: x),
        "encoder.layer.1.feed_forward_chunk: got <lambda>",
    ),
    "call": (
        put("encoder.layer.1", "_call_impl", lambda m: lambda *a, **k: a[0]),
        "_call_impl: got",
    ),
    "masks": (
        put("", "_create_attention_masks", lambda m: lambda **k: (None, None)),
        "_create_attention_masks: got <lambda>",
    ),
    "subclass of a block": (
        become(LAYER + "attention.output", Shifted),
        "Shifted with its own for",
    ),
    "subclass of a layer": (
        become("encoder.layer.1", Chunked),
        "Chunked with its own feed_forward",
    ),
    "subclass's call": (become(LAYER + "intermediate", Called), "Called with its own __call__"),
    "ModuleList's class": (
        lambda hf_model: setattr(hf_model.encoder, "layer", nn.Sequential(*hf_model.encoder.layer)),
        "encoder.layer: got a torch.nn.modules.container.Sequential, allowed: ModuleList",
    ),
    "one layer's class": (
        lambda hf_model: hf_model.encoder.layer.__setitem__(1, nn.Identity()),
        "encoder.layer.1: got a torch.nn.modules.linear.Identity, allowed: BertLayer",
    ),
    "no attention": (
        lambda hf_model: setattr(hf_model.encoder.layer[1], "attention", None),
        "encoder.layer.1.attention: got None, allowed: BertAttention",
    ),
    "shared layers": (shared_layers, "encoder.layer.1: got the module at 'encoder.layer.0' again"),
    "child that is read": (
        put("encoder.layer.1", "crossattention", lambda m: nn.Identity()),
        "encoder.layer.1.crossattention: got Identity, allowed: no module",
    ),
    "pruned heads": (
        parameter(SELF + ".query", "weight", lambda w: w[:96].clone()),
        f"{SELF}.query.weight: got shape (96, 144), allowed: (144, 144)",
    ),
    "a replaced linear of another size": (
        put(SELF, "query", lambda m: Doubled(144, 96)),
        f"{SELF}.query.out_features: got 96, allowed: 144",
    ),
    "decoder's layer": (put("encoder.layer.1", "is_decoder", True), "is_decoder: got True"),
    "chunk size": (put("encoder.layer.1", "chunk_size_feed_forward", 2), "chunk_size_feed_forward"),
    "own config": (
        put(SELF, "config", lambda m: families.build("bert").config.__class__()),
        f"{SELF}.config: got _attn_implementation=None, allowed: 'eager'",
    ),
    "config's heads": (
        lambda hf_model: setattr(hf_model.config, "num_attention_heads", 2),
        "encoder.layer.0.attention.self.attention_head_size: got 48, allowed: 72",
    ),
    "config's width": (
        lambda hf_model: setattr(hf_model.config, "intermediate_size", 65),
        "encoder.layer.0.intermediate.dense.weight: got shape (64, 144), allowed: (65, 144)",
    ),
    "config's activation": (
        lambda hf_model: setattr(hf_model.config, "hidden_act", "relu"),
        "intermediate_act_fn: got a transformers.activations.GELUActivation, allowed: ReLU",
    ),
    "function for an activation": (
        lambda hf_model: vars(hf_model.config).__setitem__("hidden_act", torch.relu),
        "config.hidden_act: got <built-in method relu",
    ),
    "config that does not build": (
        lambda hf_model: setattr(hf_model.config, "num_attention_heads", 5),
        "config: got ValueError (The hidden size (144) is not a multiple",
    ),
    "config's is_causal": (
        lambda hf_model: setattr(hf_model.config, "is_causal", True),
        "config.is_causal: got True, allowed: False",
    ),
    "flex": (
        lambda hf_model: setattr(hf_model.config, "_attn_implementation", "flex_attention"),
        "config._attn_implementation: got 'flex_attention', allowed: eager, sdpa",
    ),
    "registered attention": (
        lambda hf_model: setattr(hf_model.config, "_attn_implementation_internal", "mine"),
        "config._attn_implementation: got 'mine', allowed: eager, sdpa",
    ),
    "mixed dtypes": (
        lambda hf_model: hf_model.encoder.layer[1].output.bfloat16(),
        "encoder.layer.1.output.dense.weight: got torch.bfloat16, allowed: torch.float32",
    ),
    "two devices": (
        lambda hf_model: hf_model.encoder.layer[1].output.to("meta"),
        "encoder.layer.1.output.dense.weight: got device meta, allowed: cpu",
    ),
    "checkpointing of one's own": (
        put("encoder.layer.1", "_gradient_checkpointing_func", lambda m: lambda f, *a: f(*a)),
        "_gradient_checkpointing_func: got",
    ),
}
QUERY = LAYER + "attention.self.query"
TABLE = "embeddings.word_embeddings"
CALLED: dict[str, tuple[Any, str, str]] = {
    "hook": (hook(QUERY), QUERY, "query.forward_hooks: got hook."),
    "pre-hook": (hook(QUERY, "forward_pre"), QUERY, "forward_pre_hooks: got hook."),
    "backward hook": (hook(QUERY, "full_backward"), QUERY, "backward_hooks: got hook."),
    "forward": (own_forward(QUERY), QUERY, "query.forward: got own_forward"),
    "class": (become(QUERY, Doubled), QUERY, "Doubled, allowed: Linear"),
    "another module": (
        put(LAYER + "output", "dense", lambda m: nn.Identity()),
        LAYER + "output.dense",
        "got a torch.nn.modules.linear.Identity, allowed: Linear",
    ),
    "no bias": (put(QUERY, "bias", None), QUERY, "bias: got None, allowed: a Parameter"),
    "stride": (
        parameter(QUERY, "weight", lambda w: w.t()),
        QUERY,
        "weight: got stride (1, 144), allowed: a contiguous parameter",
    ),
    "expanded": (
        parameter(QUERY, "bias", lambda b: b[:1].expand(144)),
        QUERY,
        "bias: got stride (0,), allowed: a contiguous parameter",
    ),
    "integers": (
        lambda hf_model: hf_model.get_submodule(QUERY)._parameters.__setitem__(
            "bias", nn.Parameter(torch.zeros(144, dtype=torch.int64), requires_grad=False)
        ),
        QUERY,
        "bias: got torch.int64 and torch.strided, allowed: float32, float16, bfloat16, float64",
    ),
    "plain tensor": (
        lambda hf_model: hf_model.get_submodule(QUERY)._parameters.__setitem__(
            "bias", torch.zeros(144)
        ),
        QUERY,
        "bias: got a Tensor, allowed: a Parameter",
    ),
    "pruning": (
        lambda hf_model: prune.random_unstructured(
            hf_model.get_submodule(QUERY), "weight", amount=0.2
        ),
        QUERY,
        "query.forward_pre_hooks: got RandomUnstructured",
    ),
    "parametrization": (
        lambda hf_model: parametrize.register_parametrization(
            hf_model.get_submodule(QUERY), "weight", Tripled()
        ),
        QUERY,
        "ParametrizedLinear, allowed: Linear",
    ),
    "weight norm": (
        lambda hf_model: parametrizations.weight_norm(hf_model.get_submodule(QUERY)),
        QUERY,
        "ParametrizedLinear, allowed: Linear",
    ),
    "int8": (
        lambda hf_model: torch.ao.quantization.quantize_dynamic(
            hf_model, {nn.Linear}, inplace=True
        ),
        QUERY,
        "got a torch.ao.nn.quantized.dynamic.modules.linear.Linear, allowed: Linear",
    ),
    "shared linear": (
        lambda hf_model: setattr(
            hf_model.get_submodule(SELF), "key", hf_model.get_submodule(QUERY)
        ),
        LAYER + "attention.self.key",
        f"got the module at '{QUERY}' again",
    ),
    "max_norm": (put(TABLE, "max_norm", 1.0), TABLE, "max_norm: got 1.0, allowed: None"),
    "padding_idx": (put(TABLE, "padding_idx", 5), TABLE, "padding_idx: got 5, allowed: 0"),
    "scale_grad": (put(TABLE, "scale_grad_by_freq", True), TABLE, "scale_grad_by_freq: got True"),
    "sparse": (put(TABLE, "sparse", True), TABLE, "sparse: got True, allowed: False"),
    "table's hook": (hook(TABLE), TABLE, "word_embeddings.forward_hooks: got hook."),
    "table's class": (
        put("embeddings", "word_embeddings", lambda m: nn.EmbeddingBag(97, 144)),
        TABLE,
        "EmbeddingBag, allowed: Embedding",
    ),
    "embeddings' hook": (hook("embeddings"), "embeddings", "embeddings.forward_hooks: got hook."),
    "embeddings' forward": (
        own_forward("embeddings"),
        "embeddings",
        "embeddings.forward: got own_",
    ),
    "embeddings' class": (
        put("", "embeddings", lambda m: nn.Embedding(97, 144)),
        "embeddings",
        "got a torch.nn.modules.sparse.Embedding, allowed: BertEmbeddings",
    ),
    "embeddings' norm": (
        hook("embeddings.LayerNorm"),
        "embeddings.LayerNorm",
        "embeddings.LayerNorm.forward_hooks: got hook.",
    ),
    "embeddings' dropout": (
        hook("embeddings.dropout"),
        "embeddings.dropout",
        "embeddings.dropout.forward_hooks: got hook.",
    ),
    "positions": (
        fill("embeddings", "position_ids", lambda b: b.add_(1)),
        "embeddings",
        "embeddings.position_ids: got 1 at position 0, allowed: 0",
    ),
    "position dtype": (
        put("embeddings", "position_ids", lambda m: m.position_ids.int()),
        "embeddings",
        "position_ids: got torch.int32 of shape (1, 48), allowed: torch.int64",
    ),
    "token types": (
        fill("embeddings", "token_type_ids", lambda b: b[:, 7].fill_(1)),
        "embeddings",
        "embeddings.token_type_ids: got 1 at position 7, allowed: 0",
    ),
    "no token types": (
        lambda hf_model: delattr(hf_model.embeddings, "token_type_ids"),
        "embeddings",
        "token_type_ids: got None, allowed: a buffer",
    ),
}


@pytest.mark.parametrize("case", STOCK)
def test_a_host_that_runs_its_own_code(case) -> None:
    hf_model = families.build("bert")
    change, words = STOCK[case]
    change(hf_model)
    reason = compare(hf_model).reason
    assert reason is not None
    assert words in reason
    assert "allowed: " in reason


@pytest.mark.parametrize("case", CALLED)
def test_a_module_that_is_called(case) -> None:
    hf_model = families.build("bert")
    change, path, words = CALLED[case]
    change(hf_model)
    reason, called = compare(hf_model)
    assert reason is None
    assert path in called
    assert words in called[path]
    if case != "int8":
        assert list(called) == [path]


def test_rotary_tables_and_windows_of_ones_own() -> None:
    for name, value, words in (
        ("full_attention_inv_freq", 2.0, "rotary_emb.full_attention_inv_freq: got 2 at 0"),
        ("full_attention_attention_scaling", 2.0, "full_attention_attention_scaling: got 2.0"),
    ):
        hf_model = families.build("modernbert")
        current = getattr(hf_model.rotary_emb, name)
        changed = current * value if isinstance(current, torch.Tensor) else value
        setattr(hf_model.rotary_emb, name, changed)
        assert words in str(compare(hf_model).reason)
    hf_model = families.build("modernbert")
    hf_model.layers[1].attn.sliding_window = 9
    assert "layers.1.attn.sliding_window: got 9, allowed: 5" in str(compare(hf_model).reason)
    hf_model = families.build("modernbert")
    hf_model.layers[0], hf_model.layers[1] = hf_model.layers[1], hf_model.layers[0]
    assert compare(hf_model).reason is not None
    hf_model = families.build("mpnet")
    hf_model.encoder.relative_attention_bias.padding_idx = 3
    assert "relative_attention_bias.padding_idx: got 3" in str(compare(hf_model).reason)
    hf_model = families.build("albert")
    hf_model.config.num_hidden_layers = 2
    assert compare(hf_model).reason is None, "the config decides how often a group runs"


def other(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("never called")


F = nn.functional
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a layer's forward": (modeling_bert.BertLayer, "forward", other),
    "a chunk": (modeling_bert.BertLayer, "feed_forward_chunk", other),
    "a block's forward": (modeling_bert.BertOutput, "forward", modeling_bert.BertPooler.forward),
    "the model's forward": (modeling_bert.BertModel, "forward", other),
    "a forward without gradient": (
        modeling_bert.BertEncoder,
        "forward",
        torch.no_grad()(modeling_bert.BertEncoder.forward),
    ),
    "the masks": (modeling_bert.BertModel, "_create_attention_masks", other),
    "a constructor": (modeling_bert.BertSelfAttention, "__init__", other),
    "a descriptor": (modeling_bert.BertSelfAttention, "scaling", property(lambda self: 1.0)),
    "checkpointing": (modeling_layers.GradientCheckpointingLayer, "gradient_checkpointing", True),
    "eager attention": (modeling_bert, "eager_attention_forward", other),
    "another family's attention": (
        modeling_bert,
        "eager_attention_forward",
        modeling_modernbert.eager_attention_forward,
    ),
    "the mask's function": (modeling_bert, "create_bidirectional_mask", other),
    "another mask": (
        modeling_bert,
        "create_bidirectional_mask",
        masking_utils.create_bidirectional_sliding_window_mask,
    ),
    "chunking": (modeling_bert, "apply_chunking_to_forward", other),
    "a table's lookup": (modeling_utils.AttentionInterface, "get_interface", other),
    "one table's lookup": (modeling_utils.ALL_ATTENTION_FUNCTIONS, "get_interface", other),
    "a mask table's lookup": (masking_utils.AttentionMaskInterface, "__getitem__", other),
    "every table's lookup": (generic.GeneralInterface, "__getitem__", other),
    "a mask helper": (masking_utils, "bidirectional_mask_function", other),
    "linear": (F, "linear", other),
    "attention": (F, "scaled_dot_product_attention", other),
    "softmax": (F, "softmax", other),
    "embedding": (torch, "embedding", other),
    "matmul": (torch, "matmul", torch.add),
    "dropout": (F, "dropout", F.alpha_dropout),
    "call": (nn.Module, "__call__", other),
    "a linear's forward": (nn.Linear, "forward", other),
    "a norm's forward": (nn.LayerNorm, "forward", other),
    "a list's iterator": (nn.ModuleList, "__iter__", other),
    "an activation's forward": (activations.GELUActivation, "forward", other),
}


@pytest.mark.parametrize("case", PATCHES)
def test_a_patch_of_a_class_or_of_a_name_is_seen_and_so_is_its_end(case) -> None:
    place, name, value = PATCHES[case]
    for first in (families.build("bert"), None):
        with mock.patch.object(place, name, value, create=True):
            hf_model = first or build_somehow(place)
            reason, called = compare(hf_model)
            assert reason is not None or called, "served"
            told = reason or "".join(called.values())
            assert "allowed: " in told
        if hf_model is first:
            assert compare(hf_model) == (None, {})


def build_somehow(place: Any) -> nn.Module:
    """Build an HF model while `place` is patched, or return `HF_MODEL` if the build fails."""
    try:
        return families.build("bert")
    except (AssertionError, AttributeError):
        return HF_MODEL


HF_MODEL = families.build("bert")


def test_the_code_of_a_function_and_its_defaults_are_compared() -> None:
    function = modeling_bert.eager_attention_forward
    code = function.__code__
    try:
        function.__code__ = code.replace(co_consts=(*code.co_consts, 7))
        assert "eager_attention_forward: got other code" in str(compare(HF_MODEL).reason)
    finally:
        function.__code__ = code
    defaults = function.__defaults__
    try:
        function.__defaults__ = (0.5, 0.0)
        assert "got the default 0.5" in str(compare(HF_MODEL).reason)
    finally:
        function.__defaults__ = defaults
    assert compare(HF_MODEL) == (None, {})


@pytest.mark.parametrize("key", ["eager", "sdpa"])
@pytest.mark.parametrize("table", ["AttentionInterface", "AttentionMaskInterface"])
def test_an_entry_of_ones_own_is_seen(table, key) -> None:
    place = modeling_utils if table == "AttentionInterface" else masking_utils
    kind = getattr(place, table)
    with mock.patch.dict(kind._global_mapping, {key: other}):
        assert f'{table}["{key}"]: got <function other' in str(compare(HF_MODEL).reason)
    instance = {
        "AttentionInterface": modeling_utils.ALL_ATTENTION_FUNCTIONS,
        "AttentionMaskInterface": masking_utils.ALL_MASK_ATTENTION_FUNCTIONS,
    }[table]
    with mock.patch.dict(instance._local_mapping, {key: other}):
        assert f'{table}["{key}"]: got <function other' in str(compare(HF_MODEL).reason)
    with mock.patch.dict(kind._global_mapping, {"mine": other}):
        assert compare(HF_MODEL) == (None, {})


def test_an_activation_replaced_in_the_table_before_the_host_was_built() -> None:
    table = activations.ACT2FN
    before = dict.__getitem__(table, "gelu")
    table["gelu"] = nn.ReLU
    try:
        # No other test uses this width, so the twin is not in the cache and must be built here.
        reason = str(compare(families.build("bert", intermediate_size=72)).reason)
    finally:
        table["gelu"] = before
    words = "intermediate_act_fn: got a torch.nn.modules.activation.ReLU, allowed: transformers.act"
    assert words in reason


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_patch_of_every_class_of_a_family_is_seen(family) -> None:
    hf_model = families.build(family)
    kinds = {type(module) for module in hf_model.modules()}
    kinds = {kind for kind in kinds if kind.__module__.startswith("transformers.models.")}
    kinds = {kind for kind in kinds if "Pooler" not in kind.__name__}
    assert len(kinds) >= 5
    for kind in kinds:
        with mock.patch.object(kind, "forward", other):
            assert compare(hf_model) != (None, {}), kind
    assert compare(hf_model) == (None, {})
