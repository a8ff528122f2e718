"""The user's model: how it is copied, called and fed with texts."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.integrations import sparse_encoder
from fastbert.integrations.accelerate import accelerate, restore
from fastbert.integrations.wrapper_class import path_of

# These implementations of attention compute the same function, so the eager implementation replaces
# them in stock copies. A function that the user registered under another name is not replaced.
SAME_ATTENTION = (
    *("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "fastbert"),
)
ACCEPTED = (
    "a model of transformers, a SentenceTransformer, a CrossEncoder, a SparseEncoder, a pipeline, "
    "or a module"
)
# The field of a ``SparseEncoder`` that holds the logits of all tokens.
LOGITS = "token_embeddings"


class Subject(NamedTuple):
    """The user's model.

    Attributes:
        name: Name of the model's class.
        module: The module that is copied and called.
        takes_features: Whether the module takes the whole batch as one dict, as a module of
            sentence-transformers does.
        tokenizer: Function that makes a batch from a list of texts; None if there is no tokenizer.
    """

    name: str
    module: nn.Module
    takes_features: bool
    tokenizer: Any

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None) -> Subject:
        """Find the module and the tokenizer of a model.

        Args:
            model: As in `verify`.
            tokenizer: As in `verify`.

        Raises:
            TypeError: If `model` has no module.
            ValueError: If the parameters of the model are not floating-point numbers.
        """
        module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
        if not isinstance(module, nn.Module):
            raise TypeError(f"model: got {type(model).__name__}, allowed: {ACCEPTED} around them")
        is_sentence_model = type(module).__module__.startswith("sentence_transformers.")
        features = is_sentence_model and isinstance(module, nn.Sequential)
        if is_sentence_model and not features:  # A CrossEncoder before sentence-transformers 6.
            module = module.model
        for name, parameter in module.named_parameters():
            if not parameter.is_floating_point():
                raise ValueError(
                    f"model: got a parameter {name} of {parameter.dtype}, allowed: floating-point"
                )
        if tokenizer is None:
            tokenizer = (
                getattr(model, "preprocess", None) or model.tokenize
                if features
                else getattr(model, "tokenizer", None)
            )
        return cls(type(model).__name__, module, features, tokenizer)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def has_options(self) -> bool:
        """Whether the module can be asked for hidden states and attention weights."""
        return not self.takes_features and hasattr(self.module, "set_attn_implementation")

    def takes(self, name: str) -> bool:
        """Return whether the ``forward`` of the module takes the argument `name`."""
        if self.takes_features:
            return True
        parameters = inspect.signature(self.module.forward).parameters
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(self, side: nn.Module, batch: Mapping[str, Any], **options: Any) -> Any:
        """Call a copy of the module with a batch."""
        return side(dict(batch)) if self.takes_features else side(**batch, **options)

    def read(self, texts: Sequence[Any], limit: int) -> dict[str, Any]:
        """Make a batch from texts, or from pairs of texts.

        Args:
            texts: The texts.
            limit: Largest number of tokens of a text; a model of sentence-transformers applies its
                own limit instead.

        Returns:
            The batch.

        Raises:
            ValueError: If the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"texts: got texts for a {self.name}, which has no tokenizer, allowed: texts with "
                "tokenizer=, or a model with a tokenizer"
            )
        if self.takes_features:
            return dict(self.tokenizer(list(texts)))
        columns = (
            [list(texts)] if isinstance(texts[0], str) else map(list, zip(*texts, strict=True))
        )
        limit = min(limit, getattr(self.tokenizer, "model_max_length", limit))
        options = {"padding": True, "truncation": True, "max_length": limit}
        return dict(self.tokenizer(*columns, **options, return_tensors="pt"))


class Sides(NamedTuple):
    """Three copies of a module, in eval mode.

    A ``SpladePooling`` is in training mode, because in eval mode it changes tensors in place that
    its gradient needs. Its results are the same in both modes.

    Attributes:
        fast: The accelerated copy in the tested dtype.
        oracle: The stock copy in float64, with the same values of parameters as `stock`.
        stock: The stock copy in the tested dtype.
    """

    fast: nn.Module
    oracle: nn.Module
    stock: nn.Module

    @property
    def has_splade(self) -> bool:
        """Whether a ``SparseEncoder`` is among the modules that may compute no logits."""
        return any(map(sparse_encoder.is_splade, self.stock.modules()))


def sides_of(module: nn.Module, dtype: torch.dtype) -> Sides:
    """Copy a module three times, without changing the module.

    Args:
        module: The module, accelerated or not.
        dtype: The tested dtype.

    Returns:
        The copies.

    Raises:
        ValueError: If the module cannot be copied or accelerated. The message names the reason.
    """
    try:
        fast = in_dtype(copy.deepcopy(module), dtype).eval()
    except Exception as error:
        raise ValueError(f"model: {type(module).__name__} cannot be copied: {error}") from error
    for part in fast.modules():
        if path_of(type(part)) == sparse_encoder.POOLING:
            part.train()
    stock = restore(copy.deepcopy(fast))
    for part in stock.modules():
        if hasattr(type(part), "set_attn_implementation"):
            hf_model: Any = part
            if getattr(hf_model.config, "_attn_implementation", None) in SAME_ATTENTION:
                hf_model.set_attn_implementation("eager")
    oracle = in_dtype(copy.deepcopy(stock), torch.float64)
    return Sides(accelerate(fast), oracle, stock)


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the parameters and buffers of a module in place, as ``from_pretrained`` does.

    A buffer that is not in the state dict, such as the frequencies of rotary positions, is not
    converted, except to float64.

    Args:
        module: The module.
        dtype: The new dtype.

    Returns:
        `module` itself.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            keeps_dtype = name in part._non_persistent_buffers_set and dtype != torch.float64
            if buffer is not None and buffer.is_floating_point() and not keeps_dtype:
                part._buffers[name] = buffer.to(dtype)
    return module


def moved(batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return a batch on `device`, with its floating-point tensors in `dtype`."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    return {name: move(value) for name, value in batch.items()}
