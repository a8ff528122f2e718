"""Run the head of a SPLADE model of sentence-transformers on rows without padding.

A ``SparseEncoder`` of sentence-transformers calls a model of transformers with a masked-LM head,
which computes logits ``(B, L, V)``, and then the module ``SpladePooling``, which takes their
maximum. `fast_class` makes a subclass of ``SparseEncoder`` whose ``forward`` computes the same
result by ``ops.splade``: the head transforms only the tokens, and no logits are stored.

The result is computed in this way only if it is known to be equal. `plan_of` compares the modules,
their hooks, their settings and the code of their classes with the stock model. If anything differs,
the ``forward`` of sentence-transformers runs, and one warning names the reason.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert import ops
from fastbert.integrations import stock_code, stock_digests
from fastbert.integrations.module_rules import hook_problems, parameter_problem, shown
from fastbert.integrations.stock_files import placed
from fastbert.integrations.wrapper_class import is_wrapper, path_of, wrapper_class
from fastbert.modules.bert import Encoded
from fastbert.modules.snapshot import NotCopied, Snapshot
from fastbert.ops import backend as backends

# The attribute of a ``SparseEncoder`` that holds its plans.
PLANS = "_fastbert_splade_plans"
SPARSE = "sentence_transformers.sparse_encoder.model.SparseEncoder"
BASE = "sentence_transformers.base.model.BaseModel"
POOLING = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
TRANSFORMERS = (
    TRANSFORMER,
    "sentence_transformers.sparse_encoder.modules.mlm_transformer.MLMTransformer",
)
# The functions of sentence-transformers whose result `ops.splade` computes → the digests of their
# tested versions (`stock_digests.pin_of`).
DIGESTS: dict[str, tuple[str, ...]] = {
    f"{BASE}.forward": ("58f275a667f894d8",),
    f"{TRANSFORMER}.forward": ("2bc609d48a9904af",),
    f"{POOLING}.forward": ("0e4a3b7e93470022",),
}
# What ``Transformer`` passes to the model of transformers, and what it does not pass.
PASSED = {"input_ids", "attention_mask", "token_type_ids"}
NOT_PASSED = {"modality", "prompt_length", "task", "special_tokens_mask", "offset_mapping"}
# What modules of sentence-transformers write into the features. If the features are used twice, as
# some losses do, ``Transformer`` passes it to the model, and no model of transformers reads it.
WRITTEN = {
    *("token_embeddings", "sentence_embedding", "all_layer_embeddings"),
    *("token_weights_sum", "scores"),
}
GELU = "transformers.activations.GELUActivation"


class Head(NamedTuple):
    """The modules of a masked-LM model of transformers: paths, and the classes of containers.

    If `activation` is "", the head calls the function ``gelu`` of the Python module of its model.
    """

    encoder: str
    dense: str
    activation: str
    norm: str
    decoder: str
    containers: dict[str, str]


def _roberta(module: str, prefix: str) -> tuple[str, Head]:
    """Return the class of a model like RoBERTa, and its head."""
    module = f"transformers.models.{module}.modeling_{module}"
    containers = {"lm_head": f"{module}.{prefix}LMHead"}
    paths = ("roberta", "lm_head.dense", "", "lm_head.layer_norm", "lm_head.decoder")
    return f"{module}.{prefix}ForMaskedLM", Head(*paths, containers)


_TRANSFORM = "cls.predictions.transform"
_BERT = "transformers.models.bert.modeling_bert"
# The class of a model with a masked-LM head → its head.
HEADS = {
    f"{_BERT}.BertForMaskedLM": Head(
        "bert",
        f"{_TRANSFORM}.dense",
        f"{_TRANSFORM}.transform_act_fn",
        f"{_TRANSFORM}.LayerNorm",
        "cls.predictions.decoder",
        {
            "cls": f"{_BERT}.BertOnlyMLMHead",
            "cls.predictions": f"{_BERT}.BertLMPredictionHead",
            _TRANSFORM: f"{_BERT}.BertPredictionHeadTransform",
        },
    ),
    "transformers.models.distilbert.modeling_distilbert.DistilBertForMaskedLM": Head(
        "distilbert", "vocab_transform", "activation", "vocab_layer_norm", "vocab_projector", {}
    ),
    **dict(
        _roberta(*names)
        for names in (
            ("roberta", "Roberta"),
            ("xlm_roberta", "XLMRoberta"),
            ("camembert", "Camembert"),
        )
    ),
}


class Plan(NamedTuple):
    """The modules that compute the embeddings of a ``SparseEncoder``."""

    encoder: nn.Module
    dense: nn.Linear
    norm: nn.LayerNorm
    decoder: nn.Linear
    pooling: Any

    def embeddings(self, encoded: Encoded) -> Tensor:
        """Compute the embeddings ``(B, V)`` from the hidden states of the tokens."""
        dense, norm, decoder = self.dense, self.norm, self.decoder
        rows = ops.linear_gelu(encoded.rows, dense.weight, dense.bias)
        rows = ops.layer_norm(rows, norm.weight, norm.bias, eps=norm.eps)
        ends = encoded.layout.ends(rows.device)
        return ops.splade(rows, decoder.weight, decoder.bias, cu_seqlens=ends)


class _Differs(Exception):
    """A difference because of which the code of sentence-transformers must run."""


class _Plans(NotCopied):
    """The plans of one model: one for training mode, and one for inference."""

    def __init__(self) -> None:
        self.kept: dict[bool, tuple[Plan | str, Snapshot]] = {}


def is_splade(module: nn.Module) -> bool:
    """Return whether a module is a ``SparseEncoder`` that ends with a ``SpladePooling``.

    A subclass with a ``forward`` of its own is left out, because nothing is known about it.
    """
    bases = {path_of(kind): kind for kind in type(module).__mro__}
    if SPARSE not in bases or BASE not in bases:
        return False
    last = list(module._modules.values())[-1:]
    return (
        type(module).forward is bases[BASE].__dict__.get("forward")
        and "forward" not in module.__dict__
        and any(path_of(kind) == POOLING for each in last for kind in type(each).__mro__)
    )


# A function that runs an accelerated encoder with the given arguments. It returns the hidden states
# of the tokens, or None if the encoder must run as part of its model.
Encode = Callable[[nn.Module, dict[str, Any]], Encoded | None]


@functools.cache
def fast_class(kind: Any, encode: Encode) -> Any:
    """Return the subclass of `kind` whose ``forward`` computes the head without padding.

    Args:
        kind: ``SparseEncoder`` or a subclass of it, for which `is_splade` is True.
        encode: Function that runs the encoder; see `Encode`.
    """

    @functools.wraps(kind.forward)
    def forward(self: Any, input: dict[str, Any], **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not is_wrapper(self) or not _has_kernel(self):
            return kind.forward(self, input, **kwargs)
        plan = _plan(self)
        problem = plan if isinstance(plan, str) else _call_problem(self, input)
        if problem:
            _warn_once(kind.__name__, problem)
        elif not isinstance(plan, str):
            given = {name: input[name] for name in input.keys() & PASSED}
            encoded = encode(plan.encoder, given)
            if encoded is not None and encoded.rows.dtype == plan.decoder.weight.dtype:
                input["sentence_embedding"] = embeddings = plan.embeddings(encoded)
                # If the features are used twice, the logits of the first call may be among them.
                input.pop("token_embeddings", None)
                if plan.pooling.embedding_dimension is None:
                    plan.pooling.embedding_dimension = embeddings.shape[1]
                return input
        return kind.forward(self, input, **kwargs)

    return wrapper_class(kind, forward, (fast_class, kind, encode))


def _has_kernel(model: nn.Module) -> bool:
    """Return whether `ops.splade` has a kernel for the model: on the CPU, if it was built."""
    parameter = next(model.parameters(), None)
    here = parameter is not None and parameter.device.type == "cpu"
    return here and backends.EXTENSION is not None


@functools.cache
def _warn_once(name: str, problem: str) -> None:
    warnings.warn(
        f"fastbert: {name} computes the logits of its head with padding: {problem}. Remove the "
        "cause, or call fastbert.restore",
        stacklevel=4,
    )


def _call_problem(model: Any, input: dict[str, Any]) -> str:
    """Return why one call must run the code of sentence-transformers, or "" if it need not."""
    if _has_any_global_hook():
        return "there are hooks on all modules"
    if torch.is_autocast_enabled("cpu"):
        return f"autocast: got {torch.get_autocast_dtype('cpu')}, allowed: no autocast"
    if any((model.module_kwargs or {}).values()):
        return f"module_kwargs: got {shown(model.module_kwargs)}, allowed: none"
    others = input.keys() - PASSED - NOT_PASSED - WRITTEN
    if others:
        return f"features: got {sorted(others)[0]!r}, allowed: {', '.join(sorted(PASSED))}"
    if input.get("modality", "text") != "text":
        return f"modality: got {shown(input['modality'])}, allowed: 'text'"
    for name in ("input_ids", "attention_mask"):
        given = input.get(name)
        if not isinstance(given, Tensor) or given.dim() != 2:
            return f"{name}: got {shown(given)}, allowed: a tensor of shape (B, L)"
    return ""


# The comparison with the stock model


def _plan(model: Any) -> Plan | str:
    """Return the plan of a model, or the reason why there is none, from memory if facts hold."""
    plans = model.__dict__.get(PLANS)
    if plans is None:
        plans = model.__dict__[PLANS] = _Plans()
    kept = plans.kept.get(model.training)
    if kept is not None and kept[1].holds(model):
        return kept[0]
    plan = plan_of(model)
    functions = [function for function in _functions(model) if isinstance(function, FunctionType)]
    mlm = model._modules["0"]._modules.get("model")
    others = [] if mlm is None else [vars(mlm.config), _names_of(mlm)]
    gelu = others[1].get("gelu") if others else None
    if isinstance(gelu, nn.Module):
        others += [vars(gelu), *(value for value in vars(gelu).values() if isinstance(value, dict))]
    plans.kept[model.training] = plan, Snapshot(model, PLANS, others, (), functions)
    return plan


def plan_of(model: Any) -> Plan | str:
    """Compare a ``SparseEncoder`` with the stock model.

    Args:
        model: A ``SparseEncoder``.

    Returns:
        The plan of the model, or the reason why its own code must run, as ``path.attribute: got
        VALUE, allowed: VALUE``.
    """
    try:
        return _compared(model)
    except _Differs as difference:
        return str(difference)


def _compared(model: Any) -> Plan:
    kinds = [path_of(type(each)) for each in model._modules.values()]
    if len(kinds) != 2 or kinds[0] not in TRANSFORMERS or kinds[1] != POOLING:
        raise _Differs(f"modules: got {', '.join(kinds)}, allowed: Transformer, SpladePooling")
    transformer, pooling = model._modules.values()
    mlm: Any = transformer._modules.get("model")
    head = HEADS.get(path_of(type(mlm)))
    if head is None:
        names = ", ".join(name.rpartition(".")[2] for name in HEADS)
        raise _Differs(f"0.model: got a {type(mlm).__name__}, allowed: {names}")
    _check_settings(transformer, pooling, mlm.config)
    expected = head.containers | {
        head.dense: path_of(nn.Linear),
        head.norm: path_of(nn.LayerNorm),
        head.decoder: path_of(nn.Linear),
    }
    expected |= {head.activation: GELU} if head.activation else {}
    inside = {path: _module(mlm, path) for path in (head.encoder, *expected)}
    for path, kind in expected.items():
        got = path_of(type(inside[path]))
        _require(got == kind, f"0.model.{path}", f"a {got}", kind.rpartition(".")[2])
    every = {"0": transformer, "0.model": mlm, "1": pooling}
    for path, module in (every | {f"0.model.{path}": m for path, m in inside.items()}).items():
        _check_calls(path, module)
    _check_code(model, [type(mlm), *(type(inside[path]) for path in expected)])
    dense, norm, decoder = (inside[path] for path in (head.dense, head.norm, head.decoder))
    for path in (head.dense, head.norm, head.decoder):
        _check_parameters(f"0.model.{path}", inside[path], decoder.weight)
    if head.activation:
        _check_gelu(f"0.model.{head.activation}", inside[head.activation])
    else:
        _check_gelu(f"{type(mlm).__module__}.gelu", _names_of(mlm).get("gelu"))
    shape, whole = tuple(norm.normalized_shape), tuple(norm.weight.shape)
    _require(shape == whole, f"0.model.{head.norm}.normalized_shape", shape, str(whole))
    return Plan(inside[head.encoder], dense, norm, decoder, pooling)


def _check_settings(transformer: Any, pooling: Any, config: Any) -> None:
    text = getattr(transformer, "modality_config", {}).get("text")
    settings = (
        ("0.modality_config['text']", text, {"method": "forward", "method_output_name": "logits"}),
        ("0.module_output_name", transformer.module_output_name, "token_embeddings"),
        ("1.pooling_strategy", pooling.pooling_strategy, "max"),
        ("1.activation_function", pooling.activation_function, "relu"),
        ("0.model.config.output_hidden_states", config.output_hidden_states, False),
        ("0.model.config.output_attentions", config.output_attentions, False),
    )
    for path, got, allowed in settings:
        _require(got == allowed, path, shown(got), repr(allowed))


def _require(condition: bool, path: str, got: Any, allowed: str) -> None:
    if not condition:
        raise _Differs(f"{path}: got {got}, allowed: {allowed}")


def _module(root: Any, path: str) -> Any:
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise _Differs(f"0.model.{path}: {error}") from error


def _check_calls(path: str, module: nn.Module) -> None:
    """Raise _Differs if a call of the module does more than the ``forward`` of its class."""
    _require("forward" not in module.__dict__, path, "a forward of its own", "that of its class")
    for name, text in hook_problems("head", module):
        raise _Differs(f"{path}.{name}: {text}")


def _check_gelu(path: str, activation: Any) -> None:
    got = path_of(type(activation))
    _require(got == GELU, path, f"a {got}", GELU.rpartition(".")[2])
    _check_calls(path, activation)
    function = vars(activation).get("act")
    builtin = isinstance(function, BuiltinFunctionType) and function.__name__ == "gelu"
    _require(builtin, f"{path}.act", shown(function), "torch's gelu")


def _names_of(mlm: Any) -> dict[str, Any]:
    """Return the names in the Python module of a model."""
    return vars(sys.modules[type(mlm).__module__])


def _check_parameters(path: str, module: Any, like: Tensor) -> None:
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        problem = parameter_problem(parameter, like)
        if problem is not None:
            raise _Differs(f"{path}.{name}: {problem}")
        same = parameter.dtype == like.dtype and parameter.device == like.device
        got = f"{parameter.dtype} on {parameter.device}"
        _require(same, f"{path}.{name}", got, f"{like.dtype} on {like.device}")


def _functions(model: Any) -> Iterator[Any]:
    """Yield the functions of sentence-transformers that a call of the model reaches."""
    base = next(kind for kind in type(model).__mro__ if path_of(kind) == BASE)
    yield base.__dict__.get("forward")
    yield from (getattr(type(each), "forward", None) for each in model._modules.values())


def _check_code(model: Any, kinds: list[type]) -> None:
    """Raise _Differs unless all code is that of its file, in a version that was tested."""
    for function, (name, digests) in zip(_functions(model), DIGESTS.items(), strict=True):
        module = getattr(function, "__globals__", {}).get("__name__", "")
        ours = isinstance(function, FunctionType) and placed(function.__code__, module) is not None
        _require(ours, name, shown(function), "the function in its file")
        found, digest = stock_digests.pin_of(function)
        known = found == name and digest in digests
        version = getattr(sys.modules.get("sentence_transformers"), "__version__", "?")
        _require(known, name, f"the code of version {version}", "the tested versions")
    stock_code.refresh(kinds)
    for kind in kinds:
        problem = stock_code.code_of(kind).problem
        if problem is not None:
            raise _Differs(problem)
    for name in stock_digests.unknown(kinds):
        raise _Differs(f"{name}: got an untested version, allowed: the tested versions")
