"""Run the head of a SPLADE model of sentence-transformers on rows without padding.

A ``SparseEncoder`` of sentence-transformers calls a model of transformers with a masked-LM head,
which computes logits ``(B, L, V)``, and then the module ``SpladePooling``, which takes their
maximum. `fast_class` makes a subclass of ``SparseEncoder`` whose ``forward`` computes the same
result by ``ops.splade``: the head transforms only the tokens, and no logits are stored. If the two
modules are a route of a ``Router``, `fast_class` makes a subclass of ``Router``.

The result is computed in this way only if it is known to be equal. `plan_of` compares the modules,
their hooks, their settings and the code of their classes with the stock model. If anything differs,
the ``forward`` of sentence-transformers runs, and one warning names the reason.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
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

# The attribute of a ``SparseEncoder`` or a ``Router`` that holds its plans.
PLANS = "_fastbert_splade_plans"
SPARSE = "sentence_transformers.sparse_encoder.model.SparseEncoder"
BASE = "sentence_transformers.base.model.BaseModel"
ROUTER = "sentence_transformers.base.modules.router.Router"
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
    f"{ROUTER}.forward": ("456bf8ad27cab231",),
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
# The class of an activation → the argument `approximate` of ``ops.linear_gelu``.
ACTIVATIONS = {GELU: "none", "transformers.activations.NewGELUActivation": "tanh"}


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


def _roberta(module: str, prefix: str, encoder: str = "roberta") -> tuple[str, Head]:
    """Return the class of a model like RoBERTa, and its head."""
    module = f"transformers.models.{module}.modeling_{module}"
    containers = {"lm_head": f"{module}.{prefix}LMHead"}
    paths = (encoder, "lm_head.dense", "", "lm_head.layer_norm", "lm_head.decoder")
    return f"{module}.{prefix}ForMaskedLM", Head(*paths, containers)


def _bert(module: str, prefix: str, encoder: str, head: str | None = None) -> tuple[str, Head]:
    """Return the class of a model like BERT, and its head, whose classes begin with `head`."""
    module, inside = f"transformers.models.{module}.modeling_{module}", "cls.predictions.transform"
    containers = {
        "cls": f"{module}.{head or prefix}OnlyMLMHead",
        "cls.predictions": f"{module}.{head or prefix}LMPredictionHead",
        inside: f"{module}.{head or prefix}PredictionHeadTransform",
    }
    paths = ("dense", "transform_act_fn", "LayerNorm")
    dense, activation, norm = (f"{inside}.{path}" for path in paths)
    head_of_model = Head(encoder, dense, activation, norm, "cls.predictions.decoder", containers)
    return f"{module}.{prefix}ForMaskedLM", head_of_model


_ALBERT = "transformers.models.albert.modeling_albert"
_ELECTRA = "transformers.models.electra.modeling_electra"
_MODERNBERT = "transformers.models.modernbert.modeling_modernbert"
# The class of a model with a masked-LM head → its head.
HEADS = {
    **dict(
        _bert(*names)
        for names in (
            ("bert", "Bert", "bert"),
            ("ernie", "Ernie", "ernie"),
            ("roformer", "RoFormer", "roformer"),
            ("megatron_bert", "MegatronBert", "bert"),
            ("deberta_v2", "DebertaV2", "deberta", "LegacyDebertaV2"),
        )
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
            ("mpnet", "MPNet", "mpnet"),
        )
    ),
    f"{_ALBERT}.AlbertForMaskedLM": Head(
        "albert",
        "predictions.dense",
        "predictions.activation",
        "predictions.LayerNorm",
        "predictions.decoder",
        {"predictions": f"{_ALBERT}.AlbertMLMHead"},
    ),
    f"{_ELECTRA}.ElectraForMaskedLM": Head(
        "electra",
        "generator_predictions.dense",
        "generator_predictions.activation",
        "generator_predictions.LayerNorm",
        "generator_lm_head",
        {"generator_predictions": f"{_ELECTRA}.ElectraGeneratorPredictions"},
    ),
    f"{_MODERNBERT}.ModernBertForMaskedLM": Head(
        "model",
        "head.dense",
        "head.act",
        "head.norm",
        "decoder",
        {"head": f"{_MODERNBERT}.ModernBertPredictionHead"},
    ),
}


class Plan(NamedTuple):
    """The modules that compute the embeddings of a ``SparseEncoder``."""

    encoder: nn.Module
    dense: nn.Linear
    approximate: str
    norm: nn.LayerNorm
    decoder: nn.Linear
    pooling: Any

    def embeddings(self, encoded: Encoded) -> Tensor:
        """Compute the embeddings ``(B, V)`` from the hidden states of the tokens."""
        dense, norm, decoder = self.dense, self.norm, self.decoder
        gelu = self.approximate
        rows = ops.linear_gelu(encoded.rows, dense.weight, dense.bias, approximate=gelu)
        rows = ops.layer_norm(rows, norm.weight, norm.bias, eps=norm.eps)
        ends = encoded.layout.ends(rows.device)
        out = ops.splade(rows, decoder.weight, decoder.bias, cu_seqlens=ends)
        # The second logarithm of the pooling is increasing, too.
        return out.log1p() if self.pooling.activation_function == "log1p_relu" else out


class Stages(NamedTuple):
    """The modules that compute the embeddings one after another, and their path in the model.

    The path is "" in a ``SparseEncoder``, and ends with a point in a ``Router``.
    """

    path: str
    modules: list[Any]


class _Differs(Exception):
    """A difference because of which the code of sentence-transformers must run."""


class _Plans(NotCopied):
    """The plans of one model, by mode (training or inference) and path of the stages."""

    def __init__(self) -> None:
        self.kept: dict[tuple[bool, str], tuple[Plan | str, Snapshot]] = {}


def is_splade(module: nn.Module) -> bool:
    """Return whether a module ends with a ``SpladePooling``: a ``SparseEncoder`` or a ``Router``.

    A ``Router`` may also have routes that end with something else. A subclass with a ``forward`` of
    its own is left out, because nothing is known about it.
    """
    bases = {path_of(kind): kind for kind in type(module).__mro__}
    routes: list[Any] = [module] if SPARSE in bases else []
    if ROUTER in bases:
        routes = list(module.get_submodule("sub_modules").children())
    base = bases.get(ROUTER if ROUTER in bases else BASE)
    return (
        base is not None
        and type(module).forward is base.__dict__.get("forward")
        and "forward" not in module.__dict__
        and any(_ends_with_splade(list(route._modules.values())) for route in routes)
    )


def _ends_with_splade(modules: list[Any]) -> bool:
    return any(path_of(kind) == POOLING for last in modules[-1:] for kind in type(last).__mro__)


# A function that runs an accelerated encoder with the given arguments. It returns the hidden states
# of the tokens, or None if the encoder must run as part of its model.
Encode = Callable[[nn.Module, dict[str, Any]], Encoded | None]


@functools.cache
def fast_class(kind: Any, encode: Encode) -> Any:
    """Return the subclass of `kind` whose ``forward`` computes the head without padding.

    Args:
        kind: ``SparseEncoder``, ``Router`` or a subclass of one, for which `is_splade` is True.
        encode: Function that runs the encoder; see `Encode`.
    """
    stages_of = _route if any(path_of(base) == ROUTER for base in kind.__mro__) else _all_stages

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not is_wrapper(self):
            return kind.forward(self, *args, **kwargs)
        features, stages = stages_of(self, *args, **kwargs)
        if stages is None or not _has_kernel(stages):
            return kind.forward(self, *args, **kwargs)
        plan = _plan(self, stages)
        problem = plan if isinstance(plan, str) else _call_problem(self, plan, features)
        if problem:
            _warn_once(kind.__name__, problem)
        elif not isinstance(plan, str):
            given = {name: features[name] for name in features.keys() & PASSED}
            encoded = encode(plan.encoder, given)
            if encoded is not None and _fits(plan, encoded.rows):
                features["sentence_embedding"] = embeddings = plan.embeddings(encoded)
                # If the features are used twice, the logits of the first call may be among them.
                features.pop("token_embeddings", None)
                if plan.pooling.embedding_dimension is None:
                    plan.pooling.embedding_dimension = embeddings.shape[1]
                return features
        return kind.forward(self, *args, **kwargs)

    return wrapper_class(kind, forward, (fast_class, kind, encode))


# These functions return the features and the stages of a call, or None if the stages of a route do
# not end with SPLADE. Their arguments are those of ``SparseEncoder.forward`` and
# ``Router.forward``.


def _all_stages(model: Any, input: dict[str, Any], **kwargs: Any) -> tuple[dict[str, Any], Stages]:
    return input, Stages("", list(model._modules.values()))


def _route(
    router: Any, features: dict[str, Any], task: Any = None, modality: Any = None, **kwargs: Any
) -> tuple[dict[str, Any], Stages | None]:
    task = features.get("task") if task is None else task
    modality = features.get("modality") if modality is None else modality
    route = router._resolve_route(task=task, modality=modality)
    stages = Stages(f"sub_modules.{route}.", list(router.sub_modules[route]))
    return features, stages if _ends_with_splade(stages.modules) else None


def _has_kernel(stages: Stages) -> bool:
    """Return whether `ops.splade` has a kernel for the device of the parameters."""
    if backends.EXTENSION is None:  # The plans need it as well.
        return False
    parameter = next((p for module in stages.modules for p in module.parameters()), None)
    device = "" if parameter is None else parameter.device.type
    names = [name for name in backends.ORDER.get(device, ()) if name != "reference"]
    known = backends.TABLES["splade"]
    return any(n in known and backends.unavailable(n, device) is None for n in names)


def _fits(plan: Plan, rows: Tensor) -> bool:
    """Return whether the head can compute the rows in the dtypes in which its own code would."""
    dtype = plan.decoder.weight.dtype
    return rows.dtype == dtype or torch.is_autocast_enabled(rows.device.type)


@functools.cache
def _warn_once(name: str, problem: str) -> None:
    warnings.warn(
        f"fastbert: {name} computes the logits of its head with padding: {problem}. Remove the "
        "cause, or call fastbert.restore",
        stacklevel=4,
    )


def _call_problem(model: Any, plan: Plan, input: dict[str, Any]) -> str:
    """Return why one call must run the code of sentence-transformers, or "" if it need not."""
    if _has_any_global_hook():
        return "there are hooks on all modules"
    device = plan.decoder.weight.device.type
    if device != "cpu" and torch.is_autocast_enabled(device):
        # On other devices, autocast computes the norm and the logarithm in fp32.
        return f"autocast: got {torch.get_autocast_dtype(device)}, allowed: autocast on the CPU"
    module_kwargs = getattr(model, "module_kwargs", None) or {}
    if any(module_kwargs.values()):
        return f"module_kwargs: got {shown(module_kwargs)}, allowed: none"
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


def _plan(model: Any, stages: Stages) -> Plan | str:
    """Return the plan of a model, or the reason why there is none, from memory if facts hold."""
    plans = model.__dict__.get(PLANS)
    if plans is None:
        plans = model.__dict__[PLANS] = _Plans()
    key = (model.training, stages.path)
    kept = plans.kept.get(key)
    if kept is not None and kept[1].holds(model):
        return kept[0]
    plan = plan_of(model, stages)
    functions = [f for f in _functions(model, stages).values() if isinstance(f, FunctionType)]
    mlm = stages.modules[0]._modules.get("model")
    others = [] if mlm is None else [vars(getattr(mlm, "config", mlm)), _names_of(mlm)]
    gelu = others[1].get("gelu") if others else None
    if isinstance(gelu, nn.Module):
        others += [vars(gelu), *(value for value in vars(gelu).values() if isinstance(value, dict))]
    plans.kept[key] = plan, Snapshot(model, PLANS, others, (), functions)
    return plan


def plan_of(model: Any, stages: Stages) -> Plan | str:
    """Compare the stages of a model with the stock model.

    Args:
        model: A ``SparseEncoder`` or a ``Router``.
        stages: The modules of the model, or of one route.

    Returns:
        The plan of the stages, or the reason why their own code must run, as ``path.attribute: got
        VALUE, allowed: VALUE``.
    """
    try:
        return _compared(model, stages)
    except _Differs as difference:
        return f"{stages.path}{difference}"


def _compared(model: Any, stages: Stages) -> Plan:
    kinds = [path_of(type(each)) for each in stages.modules]
    if len(kinds) != 2 or kinds[0] not in TRANSFORMERS or kinds[1] != POOLING:
        raise _Differs(f"modules: got {', '.join(kinds)}, allowed: Transformer, SpladePooling")
    transformer, pooling = stages.modules
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
    inside = {path: _module(mlm, path) for path in (head.encoder, *expected)}
    for path, kind in expected.items():
        got = path_of(type(inside[path]))
        _require(got == kind, f"0.model.{path}", f"a {got}", kind.rpartition(".")[2])
    if head.activation:
        path, activation = f"0.model.{head.activation}", _module(mlm, head.activation)
        inside[head.activation] = activation
    else:
        path, activation = f"{type(mlm).__module__}.gelu", _names_of(mlm).get("gelu")
    approximate = _approximation(path, activation)
    every = {"0": transformer, "0.model": mlm, "1": pooling}
    for path, module in (every | {f"0.model.{path}": m for path, m in inside.items()}).items():
        _check_calls(path, module)
    own = [inside[path] for path in inside if path != head.encoder]
    _check_code(model, stages, [type(mlm), *map(type, own)])
    dense, norm, decoder = (inside[path] for path in (head.dense, head.norm, head.decoder))
    for path in (head.dense, head.norm, head.decoder):
        _check_parameters(f"0.model.{path}", inside[path], decoder.weight)
    shape, whole = tuple(norm.normalized_shape), tuple(norm.weight.shape)
    _require(shape == whole, f"0.model.{head.norm}.normalized_shape", shape, str(whole))
    return Plan(inside[head.encoder], dense, approximate, norm, decoder, pooling)


def _check_settings(transformer: Any, pooling: Any, config: Any) -> None:
    text = getattr(transformer, "modality_config", {}).get("text")
    settings = (
        ("0.modality_config['text']", text, {"method": "forward", "method_output_name": "logits"}),
        ("0.module_output_name", transformer.module_output_name, "token_embeddings"),
        ("1.pooling_strategy", pooling.pooling_strategy, "max"),
        ("0.model.config.output_hidden_states", config.output_hidden_states, False),
        ("0.model.config.output_attentions", config.output_attentions, False),
    )
    for path, got, allowed in settings:
        _require(got == allowed, path, shown(got), repr(allowed))
    activation, known = pooling.activation_function, ("relu", "log1p_relu")
    allowed = " or ".join(map(repr, known))
    _require(activation in known, "1.activation_function", shown(activation), allowed)


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


def _approximation(path: str, activation: Any) -> str:
    """Return the argument `approximate` of ``ops.linear_gelu`` for an activation."""
    got = path_of(type(activation))
    names = " or ".join(name.rpartition(".")[2] for name in ACTIVATIONS)
    _require(got in ACTIVATIONS, path, f"a {got}", names)
    _check_calls(path, activation)
    if got == GELU:
        function = vars(activation).get("act")
        builtin = isinstance(function, BuiltinFunctionType) and function.__name__ == "gelu"
        _require(builtin, f"{path}.act", shown(function), "torch's gelu")
    return ACTIVATIONS[got]


def _names_of(mlm: Any) -> dict[str, Any]:
    """Return the names in the Python module of a model."""
    return vars(sys.modules[type(mlm).__module__])


def _check_parameters(path: str, module: Any, like: Tensor) -> None:
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        if name == "bias" and parameter is None:
            continue
        problem = parameter_problem(parameter, like)
        if problem is not None:
            raise _Differs(f"{path}.{name}: {problem}")
        same = parameter.dtype == like.dtype and parameter.device == like.device
        got = f"{parameter.dtype} on {parameter.device}"
        _require(same, f"{path}.{name}", got, f"{like.dtype} on {like.device}")


def _functions(model: Any, stages: Stages) -> dict[str, Any]:
    """Return the functions of sentence-transformers that a call of the model reaches, by name."""
    bases = {path_of(kind): kind for kind in type(model).__mro__}
    root = ROUTER if ROUTER in bases else BASE
    forwards = [getattr(type(each), "forward", None) for each in stages.modules[:2]]
    return {
        f"{root}.forward": bases[root].__dict__.get("forward"),
        **dict(zip((f"{TRANSFORMER}.forward", f"{POOLING}.forward"), forwards, strict=False)),
    }


def _check_code(model: Any, stages: Stages, kinds: list[type]) -> None:
    """Raise _Differs unless all code is that of its file, in a version that was tested."""
    for name, function in _functions(model, stages).items():
        digests = DIGESTS[name]
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
