"""XLNet with the arguments and outputs of transformers' ``XLNetModel``, and its LM head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.heads import IGNORED
from fastbert.modules.inputs import check_range, with_places
from fastbert.modules.outputs import ModelOutput, as_asked
from fastbert.modules.xlnet.layer import XLNetLayer
from fastbert.modules.xlnet.pretrained import XLNetPreTrainedModel
from fastbert.modules.xlnet.streams import Batch, Runner, with_segments
from fastbert.ops.arguments import require, require_shape
from fastbert.ops.dropout import dropout
from fastbert.ops.varlen import unpad_indices
from fastbert.xlnet_config import XLNetConfig

States = tuple[Any, ...]


@dataclass
class XLNetOutput(ModelOutput):
    """The output of `XLNetModel`.

    Attributes:
        last_hidden_state: Rows of the query stream ``(B, N, H)`` with `target_mapping`, otherwise
            of the content stream ``(B, L, H)``, which are 0 at padding unless the memory is
            returned.
        mems: The memory of each layer, of shape ``(M, B, H)``, or None.
        hidden_states: The states before the first layer and after every layer, or None; with a
            query stream, the states of both streams alternate.
        attentions: The attention weights of each layer ``(B, heads, L, M + L)``, or None; with a
            query stream, a pair for each layer.
    """

    last_hidden_state: Tensor
    mems: States | None = None
    hidden_states: States | None = None
    attentions: States | None = None


@dataclass
class XLNetLMOutput(ModelOutput):
    """The output of `XLNetLMHeadModel`.

    Attributes:
        loss: Mean cross entropy of the labelled tokens, or None without labels.
        logits: Logits of shape ``(B, N, V)``.
        mems: As in `XLNetOutput`.
        hidden_states: As in `XLNetOutput`.
        attentions: As in `XLNetOutput`.
    """

    loss: Tensor | None
    logits: Tensor
    mems: States | None = None
    hidden_states: States | None = None
    attentions: States | None = None


class Inputs(NamedTuple):
    """The arguments of `XLNetModel.forward` that have tensors; see there."""

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    mems: Any = None
    perm_mask: Tensor | None = None
    target_mapping: Tensor | None = None
    token_type_ids: Tensor | None = None
    input_mask: Tensor | None = None
    inputs_embeds: Tensor | None = None


def run_model(
    model: Any,
    config: Any,
    runner: Runner,
    inputs: Inputs,
    use_mems: bool,
    want_weights: bool,
    want_states: bool,
) -> XLNetOutput:
    """Run a model with the names of transformers' modules.

    Padding is removed if nothing reads padded rows: without memory, permutations and a query
    stream.

    Args:
        model: `XLNetModel`, or the model of transformers.
        config: Its configuration.
        runner: Runs the layers.
        inputs: The arguments of `XLNetModel.forward`.
        use_mems: Whether the memory is returned.
        want_weights: Whether the attention weights are returned.
        want_states: Whether the hidden states are returned.

    Returns:
        The output.

    Raises:
        ValueError: If a shape or a value is not allowed. The message names the argument.
        TypeError: If a dtype is not allowed.
    """
    embeds = _embeds(model, inputs)
    width = embeds.shape[-1]
    batch, layout = _batch(config, inputs, embeds, use_mems)
    types = inputs.token_type_ids
    if types is not None:
        require_shape("token_type_ids", types, embeds.shape[:2])
        types = types if layout is None else layout.rows(types)
    batch = with_segments(batch, types)
    hidden = embeds.flatten(0, 1) if layout is None else layout.rows(embeds)
    p = model.dropout.p if model.training else 0.0
    hidden = dropout(hidden, p, backend=runner.backend)
    queries = None
    if inputs.target_mapping is not None:
        count = inputs.target_mapping.shape[1]
        queries = model.mask_emb.expand(batch.batch, count, -1).flatten(0, 1).to(hidden.dtype)
        queries = dropout(queries, p, backend=runner.backend)
    table, index = runner.positions(batch, width, hidden)
    # transformers draws another mask for each sequence; here the sequences share one mask.
    positions = (dropout(table, p, backend=runner.backend), index)

    def given(rows: Tensor) -> Tensor:
        return rows.view(batch.batch, -1, width) if layout is None else layout.given(rows)

    states: list[Any] = []
    memories: list[Tensor] = []
    weights: list[Any] = []

    def keep() -> None:
        if want_states:
            states.extend(given(x) for x in (hidden, queries) if x is not None)

    for number, layer in enumerate(model.layer):
        keep()
        before = None if inputs.mems is None else inputs.mems[number]
        if use_mems:
            memories.append(_memory(config, given(hidden), before))
        rows = None if before is None else before.transpose(0, 1).to(hidden.dtype).flatten(0, 1)
        hidden, queries, found = runner.layer(
            number, layer, hidden, queries, rows, batch, positions, inputs.target_mapping,
            want_weights,
        )  # fmt: skip
        if want_weights:
            found = [w if layout is None else layout.weights(w) for w in found]
            weights.append(found[0] if len(found) == 1 else tuple(found))
    keep()
    last = dropout(hidden if queries is None else queries, p, backend=runner.backend)
    return XLNetOutput(
        last_hidden_state=last.view(batch.batch, -1, width) if queries is not None else given(last),
        mems=tuple(memories) if use_mems else None,
        hidden_states=tuple(states) if want_states else None,
        attentions=tuple(weights) if want_weights else None,
    )


def _embeds(model: Any, inputs: Inputs) -> Tensor:
    """Return the word embeddings ``(B, L, H)``."""
    ids, embeds = inputs.input_ids, inputs.inputs_embeds
    if (ids is None) == (embeds is None):
        got = "neither" if ids is None else "both"
        raise ValueError(f"input_ids, inputs_embeds: got {got}, allowed: exactly one of them")
    if embeds is not None:
        fits = embeds.dim() == 3
        require(fits, "inputs_embeds", f"shape {tuple(embeds.shape)}", "(B, L, H)")
        return embeds
    assert ids is not None
    require(ids.dim() == 2, "input_ids", f"shape {tuple(ids.shape)}", "(B, L)")
    check_range("input_ids", ids, model.word_embedding.weight.shape[0])
    table = model.word_embedding
    return F.embedding(ids, table.weight, table.padding_idx)


def _batch(
    config: Any, inputs: Inputs, embeds: Tensor, use_mems: bool
) -> tuple[Batch, BatchLayout | None]:
    """Return the division of the rows into sequences, and the layout if padding is removed."""
    size, length = embeds.shape[:2]
    masked, device = _padding(inputs, size, length), embeds.device
    first = None if inputs.mems is None else inputs.mems[0]
    memory = 0 if first is None else first.shape[0]
    causal = config.attn_type == "uni"
    perm_mask = inputs.perm_mask
    if perm_mask is not None:
        require_shape("perm_mask", perm_mask, (size, length, length))
    if inputs.target_mapping is not None:
        shape = tuple(inputs.target_mapping.shape)
        fits = len(shape) == 3 and (shape[0], shape[2]) == (size, length)
        require(fits, "target_mapping", f"shape {shape}", f"({size}, N, {length})")
    dense = memory or causal or perm_mask is not None or inputs.target_mapping is not None
    if masked is None and not (causal or perm_mask is not None):
        return Batch(size, length, memory), None
    if not (dense or use_mems or torch.compiler.is_compiling()):
        assert masked is not None
        indices, ends, longest = unpad_indices(~masked)
        layout = with_places(BatchLayout(size, length, ends, longest, indices))
        if layout.places is None:
            return Batch(size, longest, cu_seqlens=ends), layout
    hidden = torch.zeros(1, 1, length, device=device, dtype=torch.bool)
    if masked is not None:
        hidden = hidden | masked.unsqueeze(1)
    if perm_mask is not None:
        hidden = hidden | (perm_mask > 0)
    if causal:
        hidden = hidden | torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    # The query stream does not see its own token. The content stream does, also at padding.
    hidden = hidden.expand(hidden.shape[0], length, length)
    own = torch.eye(length, dtype=torch.bool, device=device)

    def allowed(hidden: Tensor) -> Tensor:
        return F.pad(~hidden, (memory, 0), value=True).unsqueeze(1)

    return Batch(size, length, memory, None, allowed(hidden & ~own), allowed(hidden)), None


def _padding(inputs: Inputs, size: int, length: int) -> Tensor | None:
    """Return the mask of padding, bool of shape ``(B, L)``, or None if there is no mask."""
    if inputs.attention_mask is not None and inputs.input_mask is not None:
        raise ValueError("input_mask: got a tensor with attention_mask, allowed: one of them")
    name = "input_mask" if inputs.input_mask is not None else "attention_mask"
    mask = inputs.attention_mask if inputs.input_mask is None else inputs.input_mask
    if mask is None:
        return None
    require_shape(name, mask, (size, length))
    masked = mask > 0 if name == "input_mask" else 1.0 - mask.float() > 0
    if not torch.compiler.is_compiling() and masked.device.type == "cpu" and not masked.any():
        return None
    return masked


def _memory(config: Any, hidden: Tensor, before: Tensor | None) -> Tensor:
    """Return the memory ``(M, B, H)`` after a segment with the rows `hidden` ``(B, L, H)``."""
    rows = hidden.transpose(0, 1)
    if config.reuse_len:
        rows = rows[: config.reuse_len]
    if before is not None:
        rows = torch.cat([before, rows])
    return rows[-config.mem_len :].detach() if config.mem_len else rows.detach()


class XLNetModel(XLNetPreTrainedModel):
    """XLNet without a head, with the state-dict names and outputs of transformers' ``XLNetModel``.

    Args:
        config: Configuration of the model.
        backend: Requested backend; None lets every operation choose.

    Raises:
        ValueError: If `backend` is unknown.

    Examples:
        >>> import torch
        >>> from fastbert.modules.xlnet import XLNetConfig, XLNetModel
        >>> config = XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64)
        >>> model = XLNetModel(config).eval()
        >>> ids = torch.randint(6, 100, (2, 12))
        >>> first = model(ids)
        >>> second = model(ids, mems=first.mems)  # attends to the first segment too
        >>> second.last_hidden_state.shape, second.mems[0].shape
        (torch.Size([2, 12, 32]), torch.Size([24, 2, 32]))
    """

    def __init__(self, config: XLNetConfig, *, backend: str | None = None) -> None:
        """Create the modules and initialise their parameters."""
        super().__init__(config, backend)
        self.word_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.mask_emb = nn.Parameter(torch.empty(1, 1, config.d_model))
        self.layer = nn.ModuleList(XLNetLayer(config) for _ in range(config.n_layer))
        self.dropout = nn.Dropout(config.dropout)
        self._runner = Runner(config.ff_activation, config.clamp_len, backend)
        self.initialise(self)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                own = ".rel_attn." in name and "layer_norm" not in name
                if (own or name == "mask_emb") and not parameter.is_meta:
                    parameter.normal_(0.0, config.initializer_range)

    def set_backend(self, backend: str | None) -> None:
        """Set the backend that the operations of the model ask for; see ``Model.set_backend``."""
        super().set_backend(backend)
        self.backend = self._runner.backend = backend

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Any = None,
        perm_mask: Tensor | None = None,
        target_mapping: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        input_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        use_mems: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> XLNetOutput | tuple[Any, ...]:
        """Compute the hidden states of a batch.

        Args:
            input_ids: Token ids, int64 or int32 of shape ``(B, L)``.
            attention_mask: Mask of shape ``(B, L)``, 1 at tokens and 0 at padding.
            mems: The memory of each layer, of shape ``(M, B, H)``, which a call has returned.
            perm_mask: Mask of shape ``(B, L, L)``; 1 where query i must not attend to key j.
            target_mapping: Places of N predictions, of shape ``(B, N, L)``; 1 where prediction i is
                at token j. With it, the query stream predicts these tokens.
            token_type_ids: Segments of the tokens, integers of shape ``(B, L)``; None without
                segments.
            input_mask: Mask of shape ``(B, L)``, 1 at padding, instead of `attention_mask`.
            inputs_embeds: Word embeddings of shape ``(B, L, H)`` instead of `input_ids`.
            use_mems: Whether the memory is returned; None takes the value of the configuration for
                the mode of the model.
            output_attentions: Whether the attention weights before dropout are returned; None takes
                the value of the configuration.
            output_hidden_states: Whether the hidden states are returned; None takes the value of
                the configuration.
            return_dict: Whether the result is an output object; False returns a tuple instead.

        Returns:
            An `XLNetOutput`, or a tuple of its fields that are not None.

        Raises:
            ValueError: If a shape or a value is not allowed. The message names the argument.
            TypeError: If a dtype is not allowed.
        """
        config = self.config
        by_default = config.use_mems_train if self.training else config.use_mems_eval
        output = run_model(
            self,
            config,
            self._runner,
            Inputs(
                input_ids, attention_mask, mems, perm_mask, target_mapping, token_type_ids,
                input_mask, inputs_embeds,
            ),
            by_default if use_mems is None else use_mems,
            self.flag("output_attentions", output_attentions),
            self.flag("output_hidden_states", output_hidden_states),
        )  # fmt: skip
        return as_asked(output, self.flag("return_dict", return_dict, True))


class XLNetLMHeadModel(XLNetPreTrainedModel):
    """XLNet with the head of permutation language modelling, as transformers' class of this name.

    The weight of the head is that of the word embeddings.

    Args:
        config: Configuration of the model.
        backend: Requested backend; None lets every operation choose.
    """

    def __init__(self, config: XLNetConfig, *, backend: str | None = None) -> None:
        """Create the model and the bias of the head."""
        super().__init__(config, backend)
        self.transformer = XLNetModel(config, backend=backend)
        self.lm_loss = nn.Linear(config.d_model, config.vocab_size)
        nn.init.zeros_(self.lm_loss.bias)
        self.tie_weights()

    def tied(self) -> dict[str, str]:
        """Return the tied parameters of the head; see ``Model.tied``."""
        return {"lm_loss.weight": "transformer.word_embedding.weight"}

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> XLNetLMOutput | tuple[Any, ...]:
        """Compute logits, and the loss if there are labels.

        Args:
            input_ids: As in `XLNetModel.forward`.
            labels: Ids of shape ``(B, N)``, where N is the number of predictions with
                `target_mapping`, and otherwise L; -100 at tokens that do not count.
            return_dict: As in `XLNetModel.forward`.
            **options: The other arguments of `XLNetModel.forward`.

        Returns:
            An `XLNetLMOutput`, or a tuple of its fields that are not None.

        Raises:
            ValueError: As in `XLNetModel.forward`.
            TypeError: As in `XLNetModel.forward`.
        """
        output = self.transformer(input_ids, **options)
        weight, bias = self.lm_loss.weight, self.lm_loss.bias
        hidden = output.last_hidden_state
        loss = None
        if labels is not None:
            require_shape("labels", labels, hidden.shape[:2])
            check_range("labels", labels, weight.shape[0], ignored=IGNORED)
            loss = ops.linear_cross_entropy(
                hidden.flatten(0, 1), weight, bias, labels.flatten(), ignore_index=IGNORED,
                backend=self.backend,
            )  # fmt: skip
        logits = ops.linear(hidden, weight, bias, backend=self.backend)
        assert isinstance(logits, Tensor)
        result = XLNetLMOutput(loss, logits, output.mems, output.hidden_states, output.attentions)
        return as_asked(result, self.flag("return_dict", return_dict, True))
