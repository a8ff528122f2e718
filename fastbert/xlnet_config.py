"""The configuration of XLNet (Yang et al. 2019): a frozen dataclass.

The fields have the names and defaults of ``config.json`` in a checkpoint of ``model_type: xlnet``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields
from typing import Any

from fastbert import activations
from fastbert.config import MAX_LAYERS, check, integer_from, is_integer, is_number

# Keys of options that are not implemented, with the value that is allowed.
FIXED = {"bi_data": False, "same_length": False, "untie_r": True}
DIRECTIONS = ("bi", "uni")


@dataclass(frozen=True)
class XLNetConfig:
    """The configuration of XLNet.

    Args:
        vocab_size: Number of tokens of the vocabulary.
        d_model: Width of the hidden states, a multiple of `n_head`.
        n_layer: Number of layers.
        n_head: Number of attention heads.
        d_inner: Width between the two projections of the feed-forward.
        ff_activation: Activation of the feed-forward.
        attn_type: ``"bi"``, or ``"uni"`` if a token attends only to itself and to earlier tokens.
        initializer_range: Standard deviation of the initial weights.
        layer_norm_eps: Term that is added to the variance in layer norms.
        dropout: Dropout probability of hidden states and attention weights, in [0, 1].
        mem_len: Number of hidden states that the memory of a layer keeps; None keeps all.
        reuse_len: Number of tokens of a segment whose hidden states the memory takes; None takes
            all.
        clamp_len: Largest distance that has its own position; -1 sets no limit.
        use_mems_eval: Whether a call in eval mode returns the memory by default.
        use_mems_train: Whether a call in training mode returns the memory by default.
        pad_token_id: Id of the padding token, or None.
        extra: Keys of a ``config.json`` that are not fields, with their values.

    Raises:
        ValueError: If a value is not allowed. The message names the field.
    """

    vocab_size: int = 32000
    d_model: int = 1024
    n_layer: int = 24
    n_head: int = 16
    d_inner: int = 4096
    ff_activation: str = "gelu"
    attn_type: str = "bi"
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    dropout: float = 0.1
    mem_len: int | None = 512
    reuse_len: int | None = None
    clamp_len: int = -1
    use_mems_eval: bool = True
    use_mems_train: bool = False
    pad_token_id: int | None = 5
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("vocab_size", "d_model", "n_head", "d_inner"):
            value = getattr(self, name)
            check(name, value, integer_from(1), is_integer(value, 1))
        layers = self.n_layer
        allowed = integer_from(1, MAX_LAYERS)
        check("n_layer", layers, allowed, is_integer(layers, 1, MAX_LAYERS))
        allowed = f"a multiple of n_head ({self.n_head})"
        check("d_model", self.d_model, allowed, self.d_model % self.n_head == 0)
        names = activations.of_config(gated=False)
        check("ff_activation", self.ff_activation, ", ".join(names), self.ff_activation in names)
        kind = self.attn_type
        check("attn_type", kind, ", ".join(DIRECTIONS), kind in DIRECTIONS)
        for name in ("initializer_range", "layer_norm_eps"):
            value = getattr(self, name)
            check(name, value, "a finite number >= 0", is_number(value, 0.0))
        check("dropout", self.dropout, "a number in [0, 1]", is_number(self.dropout, 0.0, 1.0))
        for name in ("mem_len", "reuse_len"):
            value = getattr(self, name)
            check(name, value, f"None or {integer_from(0)}", value is None or is_integer(value, 0))
        check("clamp_len", self.clamp_len, integer_from(-1), is_integer(self.clamp_len, -1))
        for name in ("use_mems_eval", "use_mems_train"):
            value = getattr(self, name)
            check(name, value, "True or False", isinstance(value, bool))
        if self.pad_token_id is not None:
            value = self.pad_token_id
            allowed = f"None or 0 <= id < vocab_size ({self.vocab_size})"
            check("pad_token_id", value, allowed, is_integer(value, 0, self.vocab_size - 1))

    @property
    def model_type(self) -> str:
        """Name of the model family."""
        return "xlnet"

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.d_model

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_head

    @property
    def max_length(self) -> int:
        """Largest number of tokens: positions are computed, so there is no limit."""
        return 2**31 - 1

    def replace(self, **changes: Any) -> XLNetConfig:
        """Return a copy with some fields replaced; raise ValueError if a value is not allowed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``config.json``, with the keys in `extra`."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        return {"model_type": "xlnet", **self.extra, **own, "d_head": self.head_dim}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> XLNetConfig:
        """Build a configuration from the content of a ``config.json``.

        Args:
            content: The content. Keys that are not fields are stored in `extra`.

        Returns:
            The configuration.

        Raises:
            ValueError: If the file describes another model, an option that is not implemented, or a
                value that is not allowed. The message names the key.
        """
        kind = content.get("model_type", "xlnet")
        check("model_type", kind, "xlnet", kind == "xlnet")
        for name, allowed in FIXED.items():
            value = content.get(name, allowed)
            check(name, value, repr(allowed), value == allowed)
        names = {f.name for f in fields(cls)} - {"extra"}
        config = cls(
            **{name: value for name, value in content.items() if name in names},
            extra={name: value for name, value in content.items() if name not in names},
        )
        size = content.get("d_head", config.head_dim)
        check("d_head", size, f"{config.head_dim}, d_model / n_head", size == config.head_dim)
        return config
