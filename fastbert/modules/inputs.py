"""The input of a model: checks of the arguments, and removal of padding once per call."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.positions import frequencies, rotation
from fastbert.ops.arguments import check_cu_seqlens, require_shape
from fastbert.ops.varlen import any_outside, longest, sequence_positions, unpad_indices

# An additive mask hides a key where the value of the mask is at most this number. The usual values
# -1e4, ``finfo.min`` of every dtype, and -inf are all at most this number.
HIDDEN = -1e4
# The exclusive upper bound of the positions of a model without a position table. Rotary embeddings
# are computed, so they set no smaller limit.
LAST_POSITION = 2**31 - 1


class EncoderInput(NamedTuple):
    """The tokens of a batch without padding.

    Attributes:
        ids: Token ids, int64 or int32 of shape ``(T,)``, or None.
        embeds: Word embeddings of shape ``(T, E)``, or None. Exactly one of `ids` and `embeds` is
            not None. E is the width of the embedding tables.
        token_types: Token types, int64 or int32 of shape ``(T,)``; None if the model has no table
            of token types.
        positions: Positions, int64 or int32 of shape ``(T,)``.
        layout: Division of the rows into sequences.
        embedded: Rows of shape ``(T, hidden_size)`` before the first layer, if the caller has
            embedded the tokens; otherwise None.
        task_types: Task types, int64 or int32 of shape ``(T,)``; None for the type 0 at every
            token, or without a table of task types.
        boxes: Coordinates of the left, upper, right and lower side of each token's box, int64 or
            int32 of shape ``(T, 4)``; None for zeros, or without tables of boxes.
    """

    ids: Tensor | None
    embeds: Tensor | None
    token_types: Tensor | None
    positions: Tensor
    layout: BatchLayout
    embedded: Tensor | None = None
    task_types: Tensor | None = None
    boxes: Tensor | None = None


def enter(
    config: BertConfig,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    task_type_ids: Tensor | None = None,
    bbox: Tensor | None = None,
    unpads: bool = True,
) -> EncoderInput:
    """Check the arguments of ``BertModel.forward`` and convert the tokens to rows.

    Args:
        config: Configuration of the model.
        input_ids: As in ``BertModel.forward``.
        attention_mask: As in ``BertModel.forward``.
        token_type_ids: As in ``BertModel.forward``.
        position_ids: As in ``BertModel.forward``. If the architecture has a first position, the
            default counts from that position and does not count padding (RoBERTa).
        inputs_embeds: As in ``BertModel.forward``.
        cu_seqlens: As in ``BertModel.encode``.
        max_seqlen: As in ``BertModel.encode``.
        task_type_ids: As in ``BertModel.encode``.
        bbox: As in ``BertModel.encode``.
        unpads: Whether padding is removed. If False, the layers compute padding as transformers
            does, and `BatchLayout.whole` is set.

    Returns:
        The tokens as rows. Padding is removed if `unpads` is True and the mask has at most two
        dimensions, except under ``torch.compile`` if attention depends on distances.

    Raises:
        ValueError: If a shape or a value is not allowed. The message names the argument, its value
            and what is allowed. Values in a tensor are checked on the CPU only, because a check on
            a GPU would make the CPU wait.
        TypeError: If a dtype is not allowed.
    """
    given = _tokens(config, input_ids, inputs_embeds, packed=cu_seqlens is not None)
    if cu_seqlens is not None:
        layout = _packed_layout(given, attention_mask, cu_seqlens, max_seqlen)
    elif max_seqlen is not None:
        raise ValueError(f"max_seqlen: got {max_seqlen} without cu_seqlens, allowed: None")
    else:
        layout = _padded_layout(given, attention_mask, config, unpads)
    if not unpads:
        layout = dataclasses.replace(layout, whole=True)
    choices = config.architecture
    bounded = choices.position_table or choices.rotary_table
    if bounded:
        _check_length("input_ids" if inputs_embeds is None else "inputs_embeds", config, layout)
    shape = given.shape[: 1 if layout.packed else 2]
    if token_type_ids is not None and not choices.type_table:
        allowed = f"None: {config.model_type} has no token types"
        raise ValueError(f"token_type_ids: got a tensor, allowed: {allowed}")
    types = _index("token_type_ids", token_type_ids, shape, config.type_vocab_size)
    if types is not None:
        types = layout.rows(types)
    elif choices.type_table:
        types = _default_types(layout, given)
    if task_type_ids is not None and not choices.task_types:
        allowed = f"None: {config.model_type} has no task types"
        raise ValueError(f"task_type_ids: got a tensor, allowed: {allowed}")
    tasks = _index("task_type_ids", task_type_ids, shape, choices.task_types)
    last = config.max_position_embeddings if bounded else LAST_POSITION
    given_positions = _index("position_ids", position_ids, shape, last)
    if given_positions is not None:
        positions = layout.rows(given_positions)
    elif choices.first_position is not None:
        positions = _counted_positions(layout, given, choices.first_position)
    else:
        positions = layout.positions(given)
    if choices.measures_distances:
        layout = with_places(layout)
    if choices.rotary_bases and not choices.rotary_table:
        bases = sorted(set(choices.rotary_bases))
        turns = {
            base: rotation(positions, frequencies(base, config.head_dim, positions.device))
            for base in bases
        }
        layout = dataclasses.replace(layout, rotations=turns)
    return EncoderInput(
        None if input_ids is None else layout.rows(input_ids),
        None if inputs_embeds is None else layout.rows(inputs_embeds),
        types,
        positions,
        layout,
        task_types=None if tasks is None else layout.rows(tasks),
        boxes=_boxes(config, bbox, shape, layout),
    )


def _boxes(
    config: BertConfig, bbox: Tensor | None, shape: tuple[int, ...], layout: BatchLayout
) -> Tensor | None:
    """Return the boxes of the rows after checks, or None if `bbox` is None."""
    count = config.architecture.box_positions
    if bbox is None:
        return None
    if not count:
        raise ValueError(f"bbox: got a tensor, allowed: None: {config.model_type} has no boxes")
    if bbox.dim() != 3 or tuple(bbox.shape) != (1, *shape[1:], 4):
        require_shape("bbox", bbox, (*shape, 4))
    check_range("bbox", bbox, count)
    return layout.rows(bbox)


def check_range(name: str, index: Tensor, size: int, ignored: int | None = None) -> None:
    """Check the dtype and the values of a tensor of indices.

    Values are checked on the CPU only, and not while ``torch.compile`` traces.

    Args:
        name: Name of the caller's argument with the indices, for messages.
        index: Tensor of indices, of any shape.
        size: Upper bound of the indices, exclusive.
        ignored: A value outside the range that is allowed as well; None if there is none.

    Raises:
        TypeError: If `index` is not int64 or int32.
        ValueError: If an element is not in ``[0, size)`` and is not `ignored`.
    """
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: got {index.dtype}, allowed: int64, int32")
    if index.device.type != "cpu" or torch.compiler.is_compiling() or index.numel() == 0:
        return
    if any_outside(index, size, ignored):
        wrong = (index < 0) | (index >= size)
        if ignored is not None:
            wrong &= index != ignored
        also = "" if ignored is None else f", or {ignored}"
        raise ValueError(f"{name}: got {int(index[wrong][0])}, allowed: 0 <= {name} < {size}{also}")


def _tokens(
    config: BertConfig, input_ids: Tensor | None, inputs_embeds: Tensor | None, packed: bool
) -> Tensor:
    """Return `input_ids` or `inputs_embeds`, whichever is not None, after checks."""
    if (input_ids is None) == (inputs_embeds is None):
        got = "neither" if input_ids is None else "both"
        raise ValueError(f"input_ids, inputs_embeds: got {got}, allowed: exactly one of them")
    leading = "(T,)" if packed else "(B, L)"
    if input_ids is not None:
        if input_ids.dim() != (1 if packed else 2):
            raise ValueError(f"input_ids: got shape {tuple(input_ids.shape)}, allowed: {leading}")
        check_range("input_ids", input_ids, config.vocab_size)
        return input_ids
    assert inputs_embeds is not None
    dims, width = 2 if packed else 3, config.architecture.embedding_size or config.hidden_size
    if inputs_embeds.dim() != dims or inputs_embeds.shape[-1] != width:
        allowed = leading.replace(",)", ")").replace(")", f", {width})")
        raise ValueError(
            f"inputs_embeds: got shape {tuple(inputs_embeds.shape)}, allowed: {allowed}"
        )
    if not inputs_embeds.dtype.is_floating_point:
        raise TypeError(f"inputs_embeds: got {inputs_embeds.dtype}, allowed: a floating dtype")
    return inputs_embeds


def _index(name: str, index: Tensor | None, shape: tuple[int, ...], size: int) -> Tensor | None:
    """Return a tensor of indices after checks, or None if `index` is None.

    In a padded batch, indices of shape ``(L,)`` or ``(1, L)`` apply to all sequences, and indices
    of shape ``(B, 1)`` apply to all tokens of a sequence, as in transformers.
    """
    if index is None:
        return None
    shared = len(shape) == 2 and tuple(index.shape) in (
        (shape[1],), (1, shape[1]), (shape[0], 1),
    )  # fmt: skip
    if not shared:
        require_shape(name, index, shape)
    check_range(name, index, size)
    return index


def _default_types(layout: BatchLayout, given: Tensor) -> Tensor:
    """Return the token type 0 for every row, int64 of shape ``(T,)``."""
    rows = given.shape[0] if layout.packed else None
    if rows is None:
        rows = layout.batch * layout.length if layout.indices is None else layout.indices.shape[0]
    return torch.zeros(rows, dtype=torch.int64, device=given.device)


def _counted_positions(layout: BatchLayout, given: Tensor, first: int) -> Tensor:
    """Return positions counted from `first` over the tokens that are not padding, as in RoBERTa.

    The id of padding is ``first - 1``. If the input has embeddings instead of ids, or is packed,
    all tokens are counted.
    """
    if layout.packed or given.dim() == 3:
        return layout.positions(given) + first
    exists = (given != first - 1).long()
    return layout.rows(exists.cumsum(1) * exists + (first - 1))


def _check_length(name: str, config: BertConfig, layout: BatchLayout) -> None:
    """Raise ValueError if a sequence is longer than the table of positions."""
    first = config.architecture.first_position
    counted = first is not None and layout.cu_seqlens is not None
    if counted and torch.compiler.is_compiling():
        # Under `torch.compile`, the number of tokens that are not padding cannot be checked,
        # because the number depends on the values of the mask.
        return
    length = layout.max_seqlen if counted else layout.length
    if length > config.max_length:
        less = "" if first is None else f" - {first}"
        raise ValueError(
            f"{name}: got a length of {length}, allowed: at most max_position_embeddings{less} = "
            f"{config.max_length}"
        )


def with_places(layout: BatchLayout) -> BatchLayout:
    """Return the layout, with `places` set if a sequence has padding between its tokens."""
    if layout.indices is None or layout.cu_seqlens is None:
        return layout
    sequence, position = sequence_positions(layout.cu_seqlens, layout.indices.shape[0])
    place = layout.indices % max(layout.length, 1)
    if not bool((place - position).diff()[sequence.diff() == 0].any()):
        return layout
    places = place.new_zeros(layout.batch, layout.max_seqlen).index_put((sequence, position), place)
    return dataclasses.replace(layout, places=places)


def _packed_layout(
    given: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor, max_seqlen: int | None
) -> BatchLayout:
    """Return the layout of packed input."""
    if attention_mask is not None:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask: got shape {shape} with cu_seqlens, allowed: None")
    check_cu_seqlens("cu_seqlens", cu_seqlens, "input_ids", given.device, given.shape[0])
    can_look = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    if max_seqlen is None:
        max_seqlen = longest(cu_seqlens)
    elif can_look and max_seqlen < (least := longest(cu_seqlens)):
        raise ValueError(f"max_seqlen: got {max_seqlen}, allowed: at least {least}")
    batch = cu_seqlens.shape[0] - 1
    return BatchLayout(batch, max_seqlen, cu_seqlens, max_seqlen)


def _padded_layout(
    given: Tensor, attention_mask: Tensor | None, config: BertConfig, unpads: bool
) -> BatchLayout:
    """Return the layout of padded input."""
    batch, length = given.shape[:2]
    if attention_mask is None:
        return BatchLayout(batch, length)
    choices = config.architecture
    if attention_mask.dim() <= 2:
        attention_mask = _mask_of_tokens(attention_mask, batch, length)
        # Under `torch.compile`, the code cannot depend on whether a sequence has padding between
        # its tokens, so attention that depends on distances computes the padding.
        measured = choices.measures_distances
        if not unpads or (torch.compiler.is_compiling() and measured):
            exists = attention_mask.bool()
            return BatchLayout(batch, length, mask=exists[:, None, None], tokens=exists)
        return _unpadded_layout(given, attention_mask)
    return _masked_layout(batch, length, attention_mask)


def _mask_of_tokens(attention_mask: Tensor, batch: int, length: int) -> Tensor:
    """Return a mask of tokens with the shape ``(B, L)``, after checks.

    The values of the mask are bool, or 0 and 1; 1 means that the position has a token. A mask of
    shape ``(L,)`` or ``(1, L)`` applies to all sequences.
    """
    if tuple(attention_mask.shape) in ((length,), (1, length)):
        attention_mask = attention_mask.expand(batch, length)
    require_shape("attention_mask", attention_mask, (batch, length))
    if attention_mask.device.type == "cpu" and not torch.compiler.is_compiling():
        if attention_mask.dtype.is_floating_point:
            valid = bool(((attention_mask == 0) | (attention_mask == 1)).all())
        else:
            valid = not any_outside(attention_mask, 2)
        if not valid:
            wrong = (attention_mask != 0) & (attention_mask != 1)
            got = attention_mask[wrong][0].item()
            raise ValueError(
                f"attention_mask: got a value of {got}, allowed in a (B, L) mask: 0 and 1, or bool "
                "(additive masks are (B, L, L) or 4-D)"
            )
    return attention_mask


def _unpadded_layout(given: Tensor, attention_mask: Tensor) -> BatchLayout:
    """Return the layout of a batch with a mask of tokens ``(B, L)``."""
    batch, length = given.shape[:2]
    indices, cu_seqlens, longest = unpad_indices(attention_mask)
    if not torch.compiler.is_compiling() and indices.shape[0] == batch * length:
        return BatchLayout(batch, length)
    return BatchLayout(batch, length, cu_seqlens, longest, indices)


def _masked_layout(batch: int, length: int, attention_mask: Tensor) -> BatchLayout:
    """Return the layout of a batch with a mask ``(B, L, L)`` or ``(B, heads, L, L)``.

    Padding is not removed, and the attention applies the mask. If the mask is bool or integers 0
    and 1, a query attends to a key where the mask is true. A floating mask is added to the scores,
    and a value of -1e4 or less hides the key.
    """
    mask = attention_mask.unsqueeze(1) if attention_mask.dim() == 3 else attention_mask
    sizes = ((1, batch), None, (1, length), (1, length))
    if mask.dim() != 4 or any(
        allowed is not None and got not in allowed
        for got, allowed in zip(mask.shape, sizes, strict=True)
    ):
        raise ValueError(
            f"attention_mask: got shape {tuple(attention_mask.shape)}, allowed: {(batch, length)}, "
            f"{(batch, length, length)}, ({batch}, heads or 1, {length} or 1, {length})"
        )
    look = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if look and mask.dtype != torch.bool and mask.numel():
        binary = bool(((mask == 0) | (mask == 1)).all())
        if mask.dtype.is_floating_point and binary and bool((mask == 1).any()):
            raise ValueError(
                "attention_mask: got a floating mask of zeros and ones with 3 or 4 dims, allowed: "
                "bool (true = attend) or additive (0 = attend, -1e4 or less = hidden)"
            )
        if not mask.dtype.is_floating_point and not binary:
            raise ValueError("attention_mask: got integers other than 0 and 1, allowed: 0, 1")
    if not mask.dtype.is_floating_point:
        return BatchLayout(batch, length, mask=mask.bool())
    hidden = mask <= HIDDEN
    bias = mask.masked_fill(hidden, 0.0)
    if not torch.compiler.is_compiling() and not mask.requires_grad and not bias.any():
        return BatchLayout(batch, length, mask=~hidden)
    return BatchLayout(batch, length, mask=~hidden, bias=bias)
