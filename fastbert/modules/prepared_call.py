"""One C++ call that computes hidden states from token ids, for inference on the CPU.

The path through the modules chooses the backend of every operation again at each call, and crosses
from Python to C++ several times. Both together take a quarter of the time of a small encoder with
one sequence. A prepared call keeps the choice together with a snapshot of all facts on which the
choice depends. When one of these facts changes, the call is prepared again.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.embeddings import BertEmbeddings
from fastbert.modules.executors import CpuInference
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.linear import Linear
from fastbert.modules.plain import deviation
from fastbert.modules.plan import Mode, plan
from fastbert.modules.plan_cache import Facts, PlanCache
from fastbert.modules.snapshot import NotCopied, Snapshot
from fastbert.ops import backend as backends
from fastbert.ops.register import is_watched

# The functions of ``fastbert.ops`` that a prepared call replaces. The file that defines a function
# has the same name as the function.
FUNCTIONS = ("encoder", "embedding", "linear", "int8_linear")


class PreparedResult(NamedTuple):
    """The result of a prepared call.

    Attributes:
        rows: Hidden states after the last layer, of shape ``(T, H)``.
        layout: Division of the rows into sequences.
        pooled: Pooled first tokens of shape ``(B, H)``, or None without a pooler.
    """

    rows: Tensor
    layout: BatchLayout
    pooled: Tensor | None


class _Prepared(NamedTuple):
    """A prepared call and the facts on which it depends.

    Attributes:
        facts: The facts on which the call depends.
        arguments: The arguments of ``fastbert_C::bert`` after the inputs, or None if the operator
            cannot compute the model.
    """

    facts: Facts
    arguments: tuple[Any, ...] | None


class PreparedCall(NotCopied):
    """The prepared call of a `BertModel`, which is prepared again after a fact has changed."""

    # The attribute of the model that holds this object.
    HOLDER = "_prepared"

    def __init__(self) -> None:
        """Start without a prepared call."""
        self._prepared: _Prepared | None = None

    def clear(self) -> None:
        """Delete the prepared call, so that replaced parameters of the model can be freed."""
        self._prepared = None

    def run(
        self,
        model: Any,
        ids: Any,
        mask: Any,
        token_types: Any,
        cu_seqlens: Any = None,
        max_seqlen: int | None = None,
    ) -> PreparedResult | None:
        """Run embeddings, layers and pooler as one C++ call, if the model and arguments allow it.

        Args:
            model: The model that holds this object.
            ids: Token ids of shape ``(B, L)``; ``(T,)`` if packed.
            mask: Mask of shape ``(B, L)``, 1 at tokens and 0 at padding; None if all are tokens.
            token_types: Token types of the shape of `ids`; None means 0.
            cu_seqlens: Cumulative lengths of packed sequences; None if the input is padded.
            max_seqlen: As in ``BertModel.encode``.

        Returns:
            The result, or None if the modules must run one by one. If an argument is not allowed,
            the result is None too, and the modules then raise the error.
        """
        if type(ids) is not Tensor or ids.device.type != "cpu" or not _is_plain_inference():
            return None
        tensors = (mask, token_types, cu_seqlens)
        if not all(given is None or type(given) is Tensor for given in tensors):
            return None
        prepared = self._prepared
        if prepared is None or not prepared.facts.holds(model):
            prepared = self._prepared = _prepare(model)
        if prepared is None or prepared.arguments is None:
            return None
        outputs, longest = torch.ops.fastbert_C.bert(ids, *tensors, *prepared.arguments)
        if not outputs:
            # The dtype of a parameter may have changed in place, which a snapshot does not record.
            self._prepared = None
            return None
        pooled = outputs[1] if model.pooler is not None else None
        if cu_seqlens is not None:
            bound = longest if max_seqlen is None else max_seqlen
            if not longest <= bound <= model.config.max_length:
                return None
            division = BatchLayout(cu_seqlens.shape[0] - 1, bound, cu_seqlens, bound)
            return PreparedResult(outputs[0], division, pooled)
        batch, length = ids.shape
        division = BatchLayout(batch, length)
        if len(outputs) > 2:
            division = BatchLayout(batch, length, outputs[-1], longest, outputs[-2])
        return PreparedResult(outputs[0], division, pooled)


def forget_prepared_calls(model: nn.Module) -> None:
    """Delete the prepared calls and plans in a model, so that replaced parameters can be freed.

    Args:
        model: A model whose parameters are about to be replaced one by one.
    """
    for module in model.modules():
        for holder in (PreparedCall.HOLDER, PlanCache.HOLDER):
            held = vars(module).get(holder)
            if held is not None:
                held.clear()


def _is_plain_inference() -> bool:
    # `is_watched` comes first, because torch.compile does not trace the other functions.
    watched = is_watched() or torch.is_grad_enabled()
    return not (watched or torch._C._is_any_autocast_enabled())


def _prepare(model: Any) -> _Prepared | None:
    """Prepare the call of a model; return None without the extension."""
    if backends.EXTENSION is None:
        return None
    snapshot, run = Snapshot(model, PreparedCall.HOLDER, [vars(ops)]), _executor(model)
    arguments = None if run is None else _arguments(model, run)
    if run is not None and arguments is not None:
        torch.ops.fastbert_C.use_huge_pages([p for p in run.parameters if p.dim() > 1])
    return _Prepared(Facts.of(snapshot, run.settings if run else None), arguments)


def _executor(model: Any) -> CpuInference | None:
    """Return the executor of the layers of a model, or None if a module must be called."""
    config, encoder = model.config, model.encoder
    choices = config.architecture
    if model.training or not choices.position_table:
        return None
    if not all(_defined_in(getattr(ops, name), f"fastbert.ops.{name}") for name in FUNCTIONS):
        return None
    shared = (encoder.relative_attention_bias, encoder.relative_positions)
    if encoder.final_norm is not None or any(x is not None for x in shared):
        return None
    if any(map(_is_called, (model.embeddings, encoder))):
        return None
    dtype = model.embeddings.word_embeddings.weight.dtype
    run = plan(encoder.running(), Mode("cpu", dtype, None, gradient=False)).run
    if type(run) is not CpuInference:
        return None
    settings = run.settings
    # The operator has neither a scale nor shared heads.
    plain = settings.scale is None and settings.key_value_heads == settings.heads
    return run if plain else None


def _arguments(model: Any, run: CpuInference) -> tuple[Any, ...] | None:
    """Return the arguments of ``fastbert_C::bert`` after the inputs.

    The result is None if the operator cannot compute the embeddings or the pooler of the model.
    """
    embedding, pooler = _embedding(model), _pooler(model.pooler)
    if embedding is None or pooler is None:
        return None
    return (
        embedding,
        run.parameters,
        run.settings.scales,
        pooler,
        model.config.architecture.first_position,
        run.settings.heads,
        run.projections,
        model.embeddings.LayerNorm.eps,
        run.settings.eps,
        run.settings.activation,
        run.settings.dtype,
    )


def _is_called(module: nn.Module) -> bool:
    """Return whether a module must be called, because the module or its class was changed."""
    kind = type(module)
    return not _defined_in(kind.forward, kind.__module__) or deviation(module, kind) is not None


def _defined_in(function: Any, name: str) -> bool:
    """Return whether a function is defined in the file of the Python module `name`.

    The result is False if the function was replaced by a function from another file.
    """
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == sys.modules[name].__file__


def _embedding(model: Any) -> list[Tensor] | None:
    """Return the tensors of the embeddings, or None if the CPU kernel cannot compute them."""
    config, embeddings = model.config, model.embeddings
    if type(embeddings) is not BertEmbeddings or embeddings.projection is not None:
        return None
    words, positions = embeddings.word_embeddings, embeddings.position_embeddings
    types, norm = embeddings.token_type_embeddings, embeddings.LayerNorm
    tables = [table for table in (words, positions, types) if table is not None]
    if any(deviation(table, nn.Embedding) is not None for table in tables):
        return None
    if embeddings.training and embeddings.dropout_p > 0.0:
        return None
    if norm is None or config.architecture.task_types or config.architecture.box_positions:
        return None
    if deviation(norm, LayerNorm) is not None or norm.bias is None or positions is None:
        return None
    sizes = (config.vocab_size, config.max_position_embeddings, config.type_vocab_size)
    if any(table.weight.shape[0] != size for table, size in zip(tables, sizes, strict=False)):
        return None
    parameters = [words.weight, positions.weight, norm.weight, norm.bias]
    parameters += [] if types is None else [types.weight]
    if {type(tensor) for tensor in parameters} != {
        nn.Parameter
    } or words.weight.device.type != "cpu":
        return None
    request = backends.Request("cpu", words.weight.dtype, columns=words.weight.shape[1])
    choice = backends.resolve("embedding", embeddings.backend, request)
    return parameters if choice.backend == "cpu" else None


def _pooler(pooler: Any) -> list[Tensor] | None:
    """Return the weight and bias of the pooler; [] without a pooler; None if it must be called."""
    if pooler is None:
        return []
    dense = pooler.dense
    if _is_called(pooler) or deviation(dense, Linear) is not None:
        return None
    parameters = [dense.weight, dense.bias]
    if {type(tensor) for tensor in parameters} != {nn.Parameter}:
        return None
    request = backends.Request("cpu", dense.weight.dtype)
    choice = backends.resolve("linear", dense.backend, request)
    return parameters if choice.backend == "cpu" else None
