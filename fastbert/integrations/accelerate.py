"""Run the encoder inside a model of transformers without padding, in the kernels of fastbert.

`accelerate` changes the class of an encoder to a subclass with the ``forward`` of fastbert. The
modules, the parameters and the state dict of the encoder do not change. Everything around the
encoder runs as before: heads, the pooler, the loss, the Trainer and pipelines. `restore` gives the
encoder its original class back.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.integrations import query_expansion, sparse_encoder
from fastbert.integrations.bound_encoder import BOUND, BoundEncoder
from fastbert.integrations.bound_xlnet import BoundXLNet
from fastbert.integrations.find_modules import find_modules
from fastbert.integrations.packing import restarts
from fastbert.integrations.query_expansion import COMPUTES_PADDING
from fastbert.integrations.twin_cache import stock_class
from fastbert.integrations.wrapper_class import is_wrapper
from fastbert.io.families import ACCELERATED
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.bert import Encoded
from fastbert.modules.class_name import class_name
from fastbert.modules.inputs import EncoderInput, enter
from fastbert.modules.positions import rotation
from fastbert.ops.varlen import sequence_positions

try:
    from transformers import PreTrainedModel, modeling_outputs
except ImportError as error:
    raise ImportError(
        f"fastbert.accelerate needs transformers >= 5 ({error}): "
        "pip install 'fastbert[transformers]'"
    ) from error

Model = TypeVar("Model")
Bound = BoundEncoder | BoundXLNet

POOLED = "BaseModelOutputWithPooling"
CROSSED = "BaseModelOutputWithPoolingAndCrossAttentions"
CACHED = "BaseModelOutputWithPastAndCrossAttentions"
# The name of an encoder class of transformers → the name of the class of its output.
OUTPUTS = {
    "BertModel": CROSSED,
    "RobertaModel": CROSSED,
    "XLMRobertaModel": CROSSED,
    "CamembertModel": CROSSED,
    "Data2VecTextModel": CROSSED,
    "ErnieModel": CROSSED,
    "RobertaPreLayerNormModel": CROSSED,
    "XLMRobertaXLModel": CROSSED,
    "MegatronBertModel": CROSSED,
    "RoFormerModel": CACHED,
    "ElectraModel": CACHED,
    "AlbertModel": POOLED,
    "MPNetModel": POOLED,
    "NomicBertModel": POOLED,
    "EsmModel": CROSSED,
    "LayoutLMModel": POOLED,
    "GteModel": POOLED,
    "JinaEmbeddingsV3Model": POOLED,
    "DebertaV2Model": "BaseModelOutput",
    "DebertaModel": "BaseModelOutput",
    "DistilBertModel": "BaseModelOutput",
    "ModernBertModel": "BaseModelOutput",
    "EuroBertModel": "BaseModelOutput",
    "T5Stack": CACHED,
    "MarianEncoder": "BaseModelOutput",
}
# Models of transformers that are not a `BertModel` of fastbert → the class that computes them.
OTHERS = {"XLNetModel": BoundXLNet}
# Encoders whose output with return_dict=False contains None for the pooler's output if there is no
# pooler. The output tuple of every other encoder leaves out the fields that are None.
TUPLES_WITH_POOLED = ("MPNetModel", "MegatronBertModel")
# Encoders whose output has no cross-attention. That of every other encoder is an empty tuple.
WITHOUT_CROSS_ATTENTION = ("MegatronBertModel", "RoFormerModel")
# Arguments of the encoders of transformers that no encoder of fastbert supports.
REFUSED = (
    "head_mask",
    "past_key_values",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "use_cache",
)
# Arguments that an accelerated encoder takes in addition to those of the stock encoder.
TAKEN = (
    *REFUSED,
    *("output_attentions", "output_hidden_states", "return_dict"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    # The Trainer passes the number of labels, which only a loss reads.
    "num_items_in_batch",
    # ``generate`` passes it, and no encoder reads it.
    "next_sequence_length",
    *sorted(sparse_encoder.WRITTEN),
)
# The arguments of `BertModel.encode_at_once`, which runs all layers in one call.
AT_ONCE = {"input_ids", "attention_mask", "token_type_ids"}
# The arguments that the embedding of an encoder of transformers may take.
EMBEDDED = (
    *("input_ids", "token_type_ids", "task_type_ids"),
    *("bbox", "position_ids", "inputs_embeds", "attention_mask"),
)
# The lock prevents two threads from accelerating or restoring a model at the same time.
LOCK = threading.RLock()


def accelerate(model: Model, *, strict: bool = True) -> Model:
    """Make fastbert run every encoder inside a model, without padding and in fused kernels.

    The model keeps the names, parameters, arguments and outputs of transformers. `restore` undoes
    the change. Hidden states and attention weights carry gradients, as in transformers. The
    returned attention weights are the weights before dropout. In an encoder–decoder (Marian), the
    encoder is accelerated, and the decoder runs the code of transformers.

    An accelerated encoder differs from transformers in these intended ways:

    - ``last_hidden_state`` is 0 at padding. A loss over padded positions, as in question answering,
      therefore sees only the bias of the head at padding.
    - The pooler reads the first token that is not padding.
    - ``attention_mask`` may have 3 or 4 dimensions, and may then be bool, 0/1 or additive.
    - Packed tokens attend only to their own sequence, and each sequence has a pooler output. A
      caller marks the packed sequences with ``cu_seq_lens_q``, or with ``position_ids`` that start
      again at each sequence. The encoder of an encoder–decoder refuses packed sequences.
    - ``output_attentions`` may be a list of layer numbers.
    - A query whose whole attention window is padding gives 0 instead of NaN.
    - A ``SparseEncoder``, or a route of a ``Router``, whose head is served by
      ``fastbert.integrations.sparse_encoder`` returns no logits under ``"token_embeddings"``.

    A later call of the encoder raises ValueError for an argument of transformers that fastbert does
    not support, such as ``past_key_values``. If fastbert can no longer run the encoder, for example
    because of a new hook, the encoder runs the code of transformers and a warning names the reason.

    Args:
        model: A model of transformers with any head or with none, a ``SentenceTransformer``, a
            ``CrossEncoder``, a ``SparseEncoder``, a ``MultiVectorEncoder``, a module of your own
            around such an encoder, or any object that holds one of these, such as a pipeline or
            ``HuggingFaceEmbeddings`` of langchain-huggingface. `find_modules` says where the
            encoder may be.
        strict: Whether the function raises ValueError if fastbert cannot run the encoder. With
            False, the function warns and returns the model unchanged.

    Returns:
        `model` itself.

    Raises:
        TypeError: If no module is found in `model`.
        ValueError: If `strict` is True and `model` has no encoder, encoders in several attributes,
            an encoder that fastbert cannot run, or a module that reads hidden states at padding
            which fastbert cannot compute; see ``fastbert.integrations.query_expansion``.
            The message names the reason, and `model` stays unchanged.

    Examples:
        ```python
        model = transformers.AutoModelForMaskedLM.from_pretrained("bert-base-uncased").eval()
        fastbert.accelerate(model)
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        ```
    """
    try:
        with LOCK:
            _accelerate(model)
    except ValueError as error:
        if strict:
            raise ValueError(f"accelerate: {error}") from error
        warnings.warn(f"accelerate: left {type(model).__name__} as it is: {error}", stacklevel=2)
    return model


def _unchecked(model: Any) -> None:
    """Accelerate a model without a comparison with the stock model; `probe` calls this function."""
    _accelerate(model, None)


def _accelerate(model: Any, probing: Callable[[nn.Module], Any] | None = _unchecked) -> None:
    modules = _modules(model)
    encoders = [pair for module in modules.values() for pair in _encoders(module)]
    if not encoders:
        raise ValueError(_nothing_found(model, modules))
    for problem in filter(None, map(query_expansion.refusal, modules.values())):
        raise ValueError(problem)
    pairs = [(hf_model, stock) for hf_model, stock in encoders if not _accelerated(hf_model)]
    for hf_model, stock in pairs:
        if "forward" in hf_model.__dict__:
            raise ValueError(
                f"{stock.__name__} has a forward of its own, which accelerate's prepare and its "
                "hooks add: call fastbert.accelerate before them"
            )
    changed: list[tuple[Any, Any]] = []
    try:
        for hf_model, stock in pairs:
            kind: Any = type(hf_model)
            changed.append((hf_model, kind))
            # A BoundEncoder records the class of its HF model, so the class is set first.
            hf_model.__class__ = _fast_class(kind, stock)
            hf_model.__dict__[BOUND] = _bound_class(stock)(hf_model, probing)
    except ValueError:
        for hf_model, kind in changed:
            hf_model.__class__ = kind
            hf_model.__dict__.pop(BOUND, None)
        raise
    for outer in modules.values():
        for module in filter(sparse_encoder.is_splade, outer.modules()):
            kind = type(module)
            module.__class__ = sparse_encoder.fast_class(kind, _encode_tokens)
        for _, transformer in query_expansion.readers_of_padding(outer):
            if not is_wrapper(transformer):
                kind = type(transformer)
                transformer.__class__ = query_expansion.fast_class(kind)


def restore(model: Model) -> Model:
    """Give the encoders in a model the classes that they had before `accelerate`.

    The weights keep their current values. A model that is not accelerated stays unchanged.

    Args:
        model: A module or an object that holds one, as in `accelerate`.

    Returns:
        `model` itself.

    Raises:
        TypeError: If no module is found in `model`.
        ValueError: If encoders are in several attributes of `model`.
    """
    with LOCK:
        for outer in _modules(model).values():
            for module in outer.modules():
                if _accelerated(module):
                    module.__class__ = type(module).fastbert_restores
                    module.__dict__.pop(BOUND, None)
                elif is_wrapper(module):
                    module.__class__ = type(module).fastbert_wrapper_restores
                    module.__dict__.pop(sparse_encoder.PLANS, None)
    return model


def _quantize(model: nn.Module, *, inplace: bool) -> nn.Module:
    """Quantize an accelerated module; see `fastbert.quantize`, which calls this function."""
    from fastbert.integrations.quantized_models import quantize

    with LOCK:
        return quantize(model, bound_encoders(model), inplace=inplace)


def bound_encoders(model: Any) -> dict[str, Bound]:
    """Return the encoders of fastbert that run inside an accelerated model.

    Args:
        model: A module or an object that holds one, as in `accelerate`.

    Returns:
        The bound encoder of each accelerated module, by the path of the module in `model`, such as
        ``"0.auto_model"`` in a ``SentenceTransformer``, or ``"_client.0.auto_model"`` in an object
        whose attribute ``_client`` is a ``SentenceTransformer``. The dict is empty if `model` is
        not accelerated.

    Raises:
        TypeError: If no module is found in `model`.
        ValueError: If encoders are in several attributes of `model`.
    """
    return {path: _bound(module) for path, module in _accelerated_inside(model)}


def obstacles(model: Any) -> dict[str, str | None]:
    """Return the reasons why accelerated encoders in a model run the code of transformers.

    Args:
        model: A module or an object that holds one, as in `accelerate`.

    Returns:
        A dict from the path of each accelerated module, as in `bound_encoders`, to the reason. The
        reason is None if fastbert runs the encoder.

    Raises:
        TypeError: If no module is found in `model`.
        ValueError: If encoders are in several attributes of `model`.
    """
    reasons: dict[str, str | None] = {}
    for path, module in _accelerated_inside(model):
        bound = _served(module)
        reasons[path] = bound if isinstance(bound, str) else None
        if "forward" in module.__dict__:
            reasons[path] = "it has a forward of its own"
    return reasons


def _accelerated_inside(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the accelerated modules in a model with their paths."""
    for path, outer in _modules(model).items():
        for name, module in outer.named_modules():
            if _accelerated(module):
                yield f"{path}.{name}".strip("."), module


def _modules(model: Any) -> dict[str, nn.Module]:
    """Return the modules in `model` that hold encoders, or its other modules if none holds any."""
    return find_modules(model, lambda module: [hf_model for hf_model, _ in _encoders(module)])


def _encoders(outer: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield each encoder in a module with its class in transformers.

    The encoder and the decoder of T5 have the same class, and the decoder is left out.
    """
    names = {family.model for family in ACCELERATED.values()} | OTHERS.keys()
    for module in outer.modules():
        if module.__dict__.get("is_decoder") is True:
            continue
        for kind in type(module).__mro__:
            ours = kind.__name__ in names and kind.__module__.startswith("transformers.models.")
            if ours and "fastbert_restores" not in kind.__dict__:
                yield module, kind
                break


def _nothing_found(model: Any, modules: dict[str, nn.Module]) -> str:
    """Return a message that names the classes in `model`, none of which is a known encoder."""
    got = []
    for path, outer in modules.items():
        kinds = [m for m in outer.modules() if isinstance(m, PreTrainedModel)] or [outer]
        got += [f"{class_name(kind)}{f' in {path}' if path else ''}" for kind in kinds]
    names = ", ".join((*ACCELERATED, "xlnet"))
    words = f"got {', '.join(got)}, allowed: an encoder of transformers: {names}"
    return words if isinstance(model, nn.Module) else f"{words}. Pass the attribute that holds one"


# The class


def _accelerated(module: nn.Module) -> bool:
    return hasattr(type(module), "fastbert_restores")


@functools.cache
def _fast_class(kind: Any, stock: Any) -> Any:
    """Make a subclass of `kind` in which fastbert's forward replaces the forward of `stock`.

    `kind` is `stock` or a subclass of `stock`. If `kind` overrides ``forward``, its own ``forward``
    still runs, and ``super().forward`` in it reaches the forward of fastbert.
    """
    # The first parameter is self and the last is **kwargs.
    names = tuple(inspect.signature(stock.forward).parameters)[1:-1]
    taken = {*names, *TAKEN}

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        everywhere = kwargs.pop(COMPUTES_PADDING, False)
        given = dict(zip(names, args, strict=False)) | kwargs
        # Another library may have stored this method and call it after `restore`.
        if _exporting() or not _accelerated(self):
            return stock.forward(self, *args, **kwargs)
        unknown = [name for name in given.keys() - taken if given[name] is not None]
        bound: Bound | str
        if unknown:
            bound = f"{unknown[0]}: got a {type(given[unknown[0]]).__name__}, allowed: None"
        else:
            bound = _served(self)
        if isinstance(bound, str):
            _warn_once(stock.__name__, bound)
            return stock.forward(self, *args, **kwargs)
        if isinstance(bound, BoundXLNet):
            return bound.run(given)
        mask = given.get("attention_mask")
        if everywhere and mask is not None and mask.dim() == 2:
            # A 4-D mask hides keys only, so all positions are computed.
            given["attention_mask"] = mask[:, None, None]
        return _run(self, bound, stock.__name__, given)

    def reduce(self: Any, protocol: Any) -> Any:
        return _rebuild, (kind, stock), self.__getstate__()

    own = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "fastbert_restores": kind,
        "fastbert_quantizes": staticmethod(_quantize),
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
    """Return an empty object of the class that `_fast_class` makes, for copy and pickle."""
    made = _fast_class(kind, stock)
    return made.__new__(made)


def _bound_class(stock: Any) -> type[BoundEncoder] | type[BoundXLNet]:
    return OTHERS.get(stock.__name__, BoundEncoder)


def _bound(hf_model: Any) -> Bound:
    """Return the encoder that is bound to `hf_model`, and bind one if there is none.

    A copy and a replica of an HF model each bind a separate encoder.
    """
    bound = hf_model.__dict__.get(BOUND)
    if bound is None or bound.hf_model is not hf_model:
        kind = _bound_class(stock_class(type(hf_model)))
        bound = hf_model.__dict__[BOUND] = kind(hf_model, _unchecked)
    return bound


def _served(hf_model: Any) -> Bound | str:
    """Return the encoder of fastbert for `hf_model`, or the reason why stock code must run."""
    if _has_any_global_hook():
        return "there are hooks on all modules"
    if "_is_replica" in hf_model.__dict__:
        return "it is a replica of DataParallel, without parameters of its own"
    try:
        bound = _bound(hf_model)
        problem = bound.bind()
    except ValueError as error:
        return str(error)
    return bound if problem is None else problem


def _exporting() -> bool:
    compiler = torch.compiler
    if compiler.is_compiling():
        return compiler.is_exporting()
    # Tensors of a FakeTensorMode have no values, so no padding can be removed from them.
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return fake or torch.onnx.is_in_onnx_export() or torch.jit.is_tracing()


@functools.cache
def _warn_once(encoder: str, problem: str) -> None:
    warnings.warn(
        f"fastbert: {encoder} runs its own code, padded: {problem}. Remove the cause, or call "
        "fastbert.restore",
        stacklevel=4,
    )


# The call


def _run(hf_model: Any, bound: BoundEncoder, stock: str, given: dict[str, Any]) -> Any:
    for name in REFUSED:
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(f"{name}: got a value, allowed: None in an accelerated encoder")
    if _feeds_a_decoder(hf_model) and given.get("cu_seq_lens_q") is not None:
        allowed = "None, because the decoder would attend to all sequences of a row"
        raise ValueError(f"cu_seq_lens_q: got a value, allowed: {allowed}")
    states = _flag(hf_model, given, "output_hidden_states")
    weights = _flag(hf_model, given, "output_attentions")
    encoded = _encoded(hf_model, bound, given, states, weights)
    values = {
        "last_hidden_state": encoded.last_hidden_state,
        "pooler_output": _pooled(hf_model, encoded, given.get("attention_mask")),
    }
    if encoded.hidden_states is not None:
        values["hidden_states"] = _selected(encoded.hidden_states, states)
    if weights:
        values["attentions"] = encoded.attentions
        values["cross_attentions"] = None if stock in WITHOUT_CROSS_ATTENTION else ()
    fields = getattr(modeling_outputs, OUTPUTS[stock])
    out = fields(**{k: v for k, v in values.items() if k in fields.__dataclass_fields__})
    wanted = given.get("return_dict")
    wanted = getattr(hf_model.config, "return_dict", True) if wanted is None else wanted
    if wanted:
        return out
    last, *others = out.to_tuple()
    absent = stock in TUPLES_WITH_POOLED and out.pooler_output is None
    return (last, None, *others) if absent else (last, *others)


def _encoded(
    hf_model: Any, bound: BoundEncoder, given: dict[str, Any], states: Any, weights: Any
) -> Encoded:
    """Run the bound encoder with the arguments of the HF model.

    `states` and `weights` are the values of output_hidden_states and output_attentions.
    """
    arguments, packed = _arguments(bound, given)
    recompute = bound.checkpoints and hf_model.training and torch.is_grad_enabled()
    bound.model.encoder.gradient_checkpointing = recompute
    encoded = None
    present = {name: value for name, value in arguments.items() if value is not None}
    embeds = bound.must_embed()
    at_once = not (states or weights or embeds or bound.whole)
    if at_once and present.keys() <= AT_ONCE:
        encoded = bound.model.encode_at_once(**present)
    if encoded is None:
        tokens = enter(bound.model.config, **arguments, unpads=not bound.whole)
        if packed is not None:
            layout = dataclasses.replace(tokens.layout, shape=packed)
            tokens = tokens._replace(layout=layout)
        if bound.frequencies:
            turns = {b: rotation(tokens.positions, f) for b, f in bound.frequencies.items()}
            tokens = tokens._replace(layout=dataclasses.replace(tokens.layout, rotations=turns))
        if embeds:
            tokens = tokens._replace(embedded=_embedded(bound, given, tokens))
        encoded = bound.model.encode_rows(
            tokens,
            list(weights) if isinstance(weights, (list, tuple)) else bool(weights),
            bool(states),
        )
    return encoded


def _encode_tokens(hf_model: Any, given: dict[str, Any]) -> Encoded | None:
    """Run an accelerated encoder for a head that reads rows without padding.

    Returns:
        The hidden states of the tokens, or None if the encoder runs the code of transformers or if
        padding is among the rows. The encoder must then be called as usual.
    """
    kind = type(hf_model)
    if _exporting() or not _accelerated(hf_model) or kind.fastbert_restores != stock_class(kind):
        return None
    bound = _served(hf_model)
    if not isinstance(bound, BoundEncoder) or bound.whole:
        return None
    encoded = _encoded(hf_model, bound, given, states=False, weights=False)
    layout = encoded.layout
    return encoded if layout.mask is None and layout.tokens is None else None


def _embedded(bound: BoundEncoder, given: dict[str, Any], tokens: EncoderInput) -> Tensor:
    """Call the HF model's embedding, and return the rows ``(T, H)`` of the T tokens."""
    if bound.family.own_embedding and tokens.layout.packed and tokens.ids is not None:
        return _embedded_by_sequence(bound, tokens)
    arguments = {name: given.get(name) for name in EMBEDDED}
    mask = arguments["attention_mask"]
    if mask is not None and mask.dim() > 2:
        arguments["attention_mask"] = None
    if bound.model.config.architecture.box_positions and arguments["bbox"] is None:
        given_tokens: Any = given.get("input_ids")
        given_tokens = given.get("inputs_embeds") if given_tokens is None else given_tokens
        shape = given_tokens.shape[:2]
        arguments["bbox"] = torch.zeros(
            *shape, 4, dtype=torch.int64, device=tokens.positions.device
        )
    if tokens.layout.shape is not None:
        arguments["position_ids"] = tokens.positions.view(tokens.layout.shape)
    return tokens.layout.rows(bound.embed(arguments))


def _embedded_by_sequence(bound: BoundEncoder, tokens: EncoderInput) -> Tensor:
    """Call the HF model's embedding with packed sequences as a padded batch; return the rows.

    The embedding of ESM divides by the share of a row's tokens that are not masked, so a row must
    hold one sequence.
    """
    layout, ids = tokens.layout, tokens.ids
    assert layout.cu_seqlens is not None
    assert ids is not None
    sequence, position = sequence_positions(layout.cu_seqlens, ids.shape[0])
    used = sequence < layout.batch
    places = (sequence[used], position[used])
    shape, padding = (layout.batch, layout.length), bound.model.config.pad_token_id
    padded = ids.new_full(shape, padding or 0).index_put(places, ids[used])
    exists = torch.zeros_like(padded).index_put(places, torch.ones_like(ids[used]))
    embedded = bound.embed({"input_ids": padded, "attention_mask": exists})
    rows = embedded.new_zeros(ids.shape[0], embedded.shape[-1])
    return rows.index_put((used.nonzero().flatten(),), embedded[places])


def _flag(hf_model: Any, given: dict[str, Any], name: str) -> Any:
    value = given.get(name)
    return getattr(hf_model.config, name, False) if value is None else value


def _arguments(
    bound: BoundEncoder, given: dict[str, Any]
) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """Return the arguments of `enter`, and the shape ``(B, L)`` of packed input.

    For padded input, the second result is None.
    """
    choices = bound.model.config.architecture
    names = ["input_ids", "attention_mask", "position_ids", "inputs_embeds"]
    names += ["token_type_ids"] if choices.type_table else []
    names += ["task_type_ids"] if choices.task_types else []
    names += ["bbox"] if choices.box_positions else []
    arguments = {name: given.get(name) for name in names}
    mask = arguments["attention_mask"]
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask: got a {type(mask).__name__}, allowed: a tensor")
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else None
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or tokens.dim() < 2:
        # `enter` raises the error for these tokens.
        return arguments, None
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
    """Keep the hidden states whose numbers are in `wanted`, and replace the others with None.

    `wanted` is one number or several numbers. If `wanted` is a bool, all states are returned. A
    negative number counts from the end, and a number out of range is ignored.
    """
    if isinstance(wanted, bool):
        return states
    numbers = [wanted] if isinstance(wanted, int) else list(wanted)
    selected = {number % len(states) for number in numbers if -len(states) <= number < len(states)}
    return tuple(state if i in selected else None for i, state in enumerate(states))


def _pooled(hf_model: Any, encoded: Encoded, mask: Tensor | None) -> Tensor | None:
    """Return the output of the HF model's pooler for the first token of each sequence."""
    pooler = getattr(hf_model, "pooler", None)
    if pooler is None:
        # A decoder reads hidden states with the attention mask, so it reads no padding.
        if _feeds_a_decoder(hf_model):
            return None
        _warn_of_left_padding(type(hf_model).__name__, encoded.layout, mask)
        return None
    first = encoded.layout.first(encoded.rows)
    activation = getattr(hf_model, "pooler_activation", None)
    return pooler(first.unsqueeze(1)) if activation is None else activation(pooler(first))


def _feeds_a_decoder(hf_model: Any) -> bool:
    return getattr(hf_model.config, "is_encoder_decoder", False) is True


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
