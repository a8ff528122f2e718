"""``fastbert.accelerate``: the encoder inside a model of transformers, unpadded and in our kernels.

The encoder's class becomes a subclass of it whose ``forward`` is ours; its modules, parameters and
state dict stay. Everything around the encoder, heads, pooler, loss, Trainer, pipelines, runs as it
was. ``restore`` gives the class back.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.integrations.bound_encoder import BoundEncoder
from fastbert.integrations.packing import restarts
from fastbert.io.families import FAMILIES
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.bert import Encoded
from fastbert.modules.inputs import enter
from fastbert.ops import packed_weights

try:
    from transformers import PreTrainedModel, modeling_outputs
except ImportError as error:
    raise ImportError(
        f"fastbert.accelerate needs transformers >= 5 ({error}): "
        "pip install 'fastbert[transformers]'"
    ) from error

Model = TypeVar("Model")

BOUND = "_fastbert_bound_encoder"
POOLED = "BaseModelOutputWithPooling"
CROSSED = "BaseModelOutputWithPoolingAndCrossAttentions"
# What each encoder of transformers returns.
OUTPUTS = {
    "BertModel": CROSSED,
    "RobertaModel": CROSSED,
    "XLMRobertaModel": CROSSED,
    "CamembertModel": CROSSED,
    "ElectraModel": "BaseModelOutputWithPastAndCrossAttentions",
    "AlbertModel": POOLED,
    "MPNetModel": POOLED,
    "NomicBertModel": POOLED,
    "DistilBertModel": "BaseModelOutput",
    "ModernBertModel": "BaseModelOutput",
}
# The encoders whose tuple has a place for the pooler's output without a pooler too, as None. Every
# other encoder leaves out of its tuple what is None.
TUPLES_WITH_POOLED = ("MPNetModel",)
# What a caller may pass and no encoder here computes.
REFUSED = (
    "head_mask",
    "past_key_values",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "use_cache",
)


def accelerate(model: Model, *, strict: bool = True) -> Model:
    """``model`` itself, with every encoder in it run by fastbert: unpadded, in fused kernels.

    A model of transformers with any head or none, a ``SentenceTransformer``, a ``CrossEncoder``, a
    model of your own around such an encoder, or a pipeline. Names, parameters, outputs and
    arguments stay those of transformers; ``restore`` undoes it. Differences, all on purpose:
    ``last_hidden_state`` is 0 at padding (a loss over padded positions, as question answering's,
    sees the head's bias there), the pooler reads the first token that exists, masks of 3
    and 4 dims may be bool, 0/1 or additive, packed sequences (``cu_seq_lens_q``, or
    ``position_ids`` that restart) do not see each other and have a pooler output each, and
    ``output_attentions`` may be a list of layers. Hidden states and attention weights carry
    gradients, as in transformers; the weights are those before dropout.

    Raises TypeError for what is no model, ValueError naming what cannot be served, in which case
    nothing was changed; with ``strict=False`` it warns instead and returns the model untouched. A
    call with an argument that cannot be served raises ValueError.
    """
    try:
        found = list(_encoders(model))
        if not found:
            raise ValueError(_nothing_found(model))
        plain = [(host, stock) for host, stock in found if not _accelerated(host)]
        ready = [(host, stock, BoundEncoder(host)) for host, stock in plain]
    except ValueError as error:
        if strict:
            raise ValueError(f"accelerate: {error}") from error
        warnings.warn(f"accelerate: left {type(model).__name__} as it is: {error}", stacklevel=2)
        return model
    for host, stock, bound in ready:
        kind: Any = type(host)
        host.__class__ = _fast_class(kind, stock)
        host.__dict__[BOUND] = bound
    return model


def restore(model: Model) -> Model:
    """``model`` itself, with the classes that it had before ``accelerate``; weights as they are
    now. A model that is not accelerated stays as it is. Raises TypeError for what is no model."""
    for module in _module(model).modules():
        if _accelerated(module):
            module.__class__ = type(module).fastbert_restores
            module.__dict__.pop(BOUND, None)
    return model


def bound_encoders(model: Any) -> dict[str, BoundEncoder]:
    """Our encoders in ``model`` by the names of the modules that they run; none when ``model`` is
    not accelerated."""
    named = _module(model).named_modules()
    return {name: _bound(module) for name, module in named if _accelerated(module)}


def _module(model: Any) -> nn.Module:
    """The module in ``model``: itself, or a pipeline's."""
    for module in (model, getattr(model, "model", None)):
        if isinstance(module, nn.Module):
            return module
    raise TypeError(f"accelerate: got {type(model).__name__}, allowed: a torch.nn.Module")


def _encoders(model: Any) -> Iterator[tuple[Any, Any]]:
    """The encoders in ``model``, each with the class of transformers that it is."""
    names = {family.model for family in FAMILIES.values()}
    for module in _module(model).modules():
        for kind in type(module).__mro__:
            ours = kind.__name__ in names and kind.__module__.startswith("transformers.models.")
            if ours and "fastbert_restores" not in kind.__dict__:
                yield module, kind
                break


def _nothing_found(model: Any) -> str:
    kinds = [m for m in _module(model).modules() if isinstance(m, PreTrainedModel)]
    got = ", ".join(f"{type(m).__name__} ({m.config.model_type})" for m in kinds)
    return f"got {got or type(model).__name__}, allowed: an encoder of {', '.join(FAMILIES)}"


# The class


def _accelerated(module: nn.Module) -> bool:
    return hasattr(type(module), "fastbert_restores")


@functools.cache
def _fast_class(kind: Any, stock: Any) -> Any:
    """A subclass of ``kind``, which is ``stock`` or a subclass of it, in which ``stock``'s forward
    is ours: what ``kind`` overrides still runs, and finds ours behind it."""
    names = tuple(inspect.signature(stock.forward).parameters)[1:-1]  # self and **kwargs

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if _exporting():
            return stock.forward(self, *args, **kwargs)
        problem: Any = "there are hooks on all modules" if _has_any_global_hook() else None
        if "_is_replica" in self.__dict__:
            problem = "it is a replica of DataParallel, without parameters of its own"
        if problem is None:
            try:
                bound = _bound(self)
                problem = bound.bind()
            except ValueError as error:
                problem = error
        if problem is not None:
            _warn_once(stock.__name__, str(problem))
            return stock.forward(self, *args, **kwargs)
        return _run(self, bound, stock.__name__, given)

    def train(self: Any, mode: bool = True) -> Any:
        if mode != self.training:
            packed_weights.forget()
        return kind.train(self, mode)

    def reduce(self: Any, protocol: Any) -> Any:
        return _rebuild, (kind, stock), self.__dict__

    own = {
        "forward": forward,
        "train": train,
        "__reduce_ex__": reduce,
        "fastbert_restores": kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    if kind is stock:
        return type(kind.__name__, (kind,), own)
    named = {"__module__": stock.__module__, "__qualname__": stock.__qualname__}
    between = type(stock.__name__, (stock,), own | named)
    del own["forward"]
    return type(kind.__name__, (kind, between), own)


def _rebuild(kind: Any, stock: Any) -> Any:
    """An empty object of the class that ``_fast_class`` makes, for copy and pickle."""
    made = _fast_class(kind, stock)
    return made.__new__(made)


def _bound(host: Any) -> BoundEncoder:
    """The encoder bound to ``host``. A copy, a replica and a rebuilt model bind their own."""
    bound = host.__dict__.get(BOUND)
    if bound is None or bound.host is not host or not bound.fits():
        bound = host.__dict__[BOUND] = BoundEncoder(host)
    return bound


def _exporting() -> bool:
    compiler = torch.compiler
    return compiler.is_exporting() or torch.onnx.is_in_onnx_export() or torch.jit.is_tracing()


@functools.cache
def _warn_once(encoder: str, problem: str) -> None:
    warnings.warn(
        f"fastbert: {encoder} runs its own code, padded: {problem}. restore() or remove it",
        stacklevel=4,
    )


# The call


def _run(host: Any, bound: BoundEncoder, stock: str, given: dict[str, Any]) -> Any:
    for name in REFUSED:
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(f"{name}: got a value, allowed: None in an accelerated encoder")
    states = _flag(host, given, "output_hidden_states")
    weights = _flag(host, given, "output_attentions")
    arguments, packed = _arguments(bound, given)
    bound.settle_dropout()
    encoder = bound.model.encoder
    encoder.gradient_checkpointing = _checkpointed(host)
    tokens = enter(bound.model.config, **arguments)
    if packed is not None:
        layout = dataclasses.replace(tokens.layout, shape=packed)
        tokens = tokens._replace(layout=layout)
    encoded = bound.model.encode_rows(
        tokens,
        list(weights) if isinstance(weights, (list, tuple)) else bool(weights),
        bool(states),
    )
    values = {
        "last_hidden_state": encoded.last_hidden_state,
        "pooler_output": _pooled(host, encoded, given.get("attention_mask")),
    }
    if encoded.hidden_states is not None:
        values["hidden_states"] = _selected(encoded.hidden_states, states)
    if weights:
        values["attentions"] = encoded.attentions
        values["cross_attentions"] = ()  # as in transformers, for an encoder has none
    fields = getattr(modeling_outputs, OUTPUTS[stock])
    out = fields(**{k: v for k, v in values.items() if k in fields.__dataclass_fields__})
    wanted = given.get("return_dict")
    wanted = getattr(host.config, "return_dict", True) if wanted is None else wanted
    if wanted:
        return out
    last, *others = out.to_tuple()
    absent = stock in TUPLES_WITH_POOLED and out.pooler_output is None
    return (last, None, *others) if absent else (last, *others)


def _flag(host: Any, given: dict[str, Any], name: str) -> Any:
    value = given.get(name)
    return getattr(host.config, name, False) if value is None else value


def _arguments(
    bound: BoundEncoder, given: dict[str, Any]
) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """The arguments of ``enter``, and the (B, L) of packed input."""
    choices = bound.model.config.architecture
    names = ["input_ids", "attention_mask", "position_ids", "inputs_embeds"]
    names += ["token_type_ids"] if choices.type_table else []
    arguments = {name: given.get(name) for name in names}
    mask = arguments["attention_mask"]
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask: got a {type(mask).__name__}, allowed: a tensor")
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else None
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or tokens.dim() < 2:
        return arguments, None  # enter says what is wrong
    batch, length = tokens.shape[:2]
    ends, positions = given.get("cu_seq_lens_q"), arguments["position_ids"]
    if ends is None and mask is None and positions is not None:
        arguments["attention_mask"], ends = restarts(positions, batch, length)
    if ends is None:
        return arguments, None
    keys = given.get("cu_seq_lens_k")
    if keys is not None and keys is not ends and keys.shape != ends.shape:
        raise ValueError(f"cu_seq_lens_k: got {tuple(keys.shape)}, allowed: cu_seq_lens_q's shape")
    for name, value in arguments.items():
        if value is not None and name != "attention_mask":
            arguments[name] = value.expand(batch, length, *value.shape[2:]).flatten(0, 1)
    return arguments | {
        "cu_seqlens": ends.int(),
        "max_seqlen": given.get("max_length_q"),
    }, (batch, length)


def _selected(states: tuple[Tensor, ...], wanted: Any) -> tuple[Tensor | None, ...]:
    """All of them, or those whose numbers are ``wanted``, from the end when negative."""
    if isinstance(wanted, bool):
        return states
    numbers = [wanted] if isinstance(wanted, int) else list(wanted)
    kept = {number % len(states) for number in numbers if -len(states) <= number < len(states)}
    return tuple(state if i in kept else None for i, state in enumerate(states))


def _pooled(host: Any, encoded: Encoded, mask: Tensor | None) -> Tensor | None:
    """What the host's pooler makes of each sequence's first token."""
    pooler = getattr(host, "pooler", None)
    if pooler is None:
        _warn_of_left_padding(type(host).__name__, encoded.layout, mask)
        return None
    first = encoded.layout.first(encoded.rows)
    activation = getattr(host, "pooler_activation", None)
    return pooler(first.unsqueeze(1)) if activation is None else activation(pooler(first))


def _warn_of_left_padding(encoder: str, layout: BatchLayout, mask: Tensor | None) -> None:
    if layout.indices is None or mask is None or torch.compiler.is_compiling():
        return
    if mask.device.type == "cpu" and not bool(mask[:, 0].all()):
        _warn_once_of_left_padding(encoder)


@functools.cache
def _warn_once_of_left_padding(encoder: str) -> None:
    warnings.warn(
        f"fastbert: {encoder} got sequences that begin with padding, where its hidden state is 0: "
        "a head that reads position 0 reads padding. Pad on the right",
        stacklevel=6,
    )


def _checkpointed(host: Any) -> bool:
    """Whether the host was told to keep less for the backward pass."""
    if not (host.training and torch.is_grad_enabled()):
        return False
    return any(getattr(module, "gradient_checkpointing", False) for module in host.modules())
