"""The configuration of an encoder–decoder (Vaswani et al. 2017): a frozen dataclass.

The fields have the names of ``config.json`` in a checkpoint of ``model_type: marian``, and the
defaults are those of the base model of Vaswani et al. ``fastbert.io.marian`` reads and writes the
file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from fastbert import activations
from fastbert.config import (
    MAX_LAYERS,
    Architecture,
    BertConfig,
    check,
    integer_from,
    is_integer,
    is_number,
)

# The term that is added to the variance in every layer norm; config.json has no key for it.
LAYER_NORM_EPS = 1e-5
_SIZES = (
    "vocab_size", "decoder_vocab_size", "d_model", "encoder_attention_heads",
    "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings",
)  # fmt: skip
_FLAGS = (
    "scale_embedding", "share_encoder_decoder_embeddings", "tie_word_embeddings",
    "static_position_embeddings", "normalize_before",
)  # fmt: skip


@dataclass(frozen=True)
class TransformerConfig:
    """The configuration of an encoder–decoder (Vaswani et al. 2017, section 3).

    Args:
        vocab_size: Number of tokens of the source vocabulary.
        decoder_vocab_size: Number of tokens of the target vocabulary; None means `vocab_size`.
        d_model: Width of the hidden states, a multiple of both numbers of heads.
        encoder_layers: Number of layers of the encoder.
        decoder_layers: Number of layers of the decoder.
        encoder_attention_heads: Number of attention heads in a layer of the encoder.
        decoder_attention_heads: Number of attention heads in a layer of the decoder.
        encoder_ffn_dim: Width between the two projections of the encoder's feed-forward.
        decoder_ffn_dim: Width between the two projections of the decoder's feed-forward.
        activation_function: Activation of the feed-forward.
        dropout: Dropout probability of hidden states, in [0, 1].
        attention_dropout: Dropout probability of attention weights, in [0, 1].
        activation_dropout: Dropout probability between the two projections of the feed-forward, in
            [0, 1].
        max_position_embeddings: Largest number of tokens of a source or of a target.
        static_position_embeddings: Whether positions have the sinusoids of Vaswani et al. False
            means learned embeddings.
        scale_embedding: Whether the word embeddings are multiplied by ``sqrt(d_model)``.
        share_encoder_decoder_embeddings: Whether encoder and decoder share one table of word
            embeddings. The vocabularies are then the same, and `tie_word_embeddings` is True.
        tie_word_embeddings: Whether the projection to the vocabulary uses the word embeddings of
            the decoder as its weight.
        normalize_before: Whether the layer norms are before attention and feed-forward, with
            another layer norm after the last layer (pre-norm). False means layer norms after each
            residual addition (post-norm).
        label_smoothing: Share of the target distribution that is uniform over the vocabulary
            (Szegedy et al. 2016), in [0, 1].
        init_std: Standard deviation of the initial weights.
        pad_token_id: Id of the padding token.
        eos_token_id: Id of the token that ends a sequence, or None.
        decoder_start_token_id: Id of the first input of the decoder.
        forced_eos_token_id: Id that `generate` sets as the last token of a sequence of the largest
            length, or None.
        extra: Keys of a ``config.json`` that are not fields, with their values. A saved checkpoint
            contains these keys again.

    Raises:
        ValueError: If a value is not allowed. The message names the field.

    Examples:
        >>> from fastbert.transformer_config import TransformerConfig
        >>> config = TransformerConfig(vocab_size=8192, encoder_layers=2)
        >>> config.d_model, config.decoder_layers, config.decoder_vocab_size
        (512, 6, 8192)
        >>> TransformerConfig.from_dict(config.to_dict()) == config
        True
    """

    vocab_size: int = 37000
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    activation_function: str = "relu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    max_position_embeddings: int = 512
    static_position_embeddings: bool = True
    scale_embedding: bool = True
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    normalize_before: bool = False
    label_smoothing: float = 0.1
    init_std: float = 0.02
    pad_token_id: int = 0
    eos_token_id: int | None = 1
    decoder_start_token_id: int = 0
    forced_eos_token_id: int | None = None
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Check the fields, and set `decoder_vocab_size` if it is None."""
        if self.decoder_vocab_size is None:
            object.__setattr__(self, "decoder_vocab_size", self.vocab_size)
        self._check_sizes()
        for name in _FLAGS:
            value = getattr(self, name)
            check(name, value, "True or False", isinstance(value, bool))
        for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing"):
            value = getattr(self, name)
            check(name, value, "a number in [0, 1]", is_number(value, 0.0, 1.0))
        check("init_std", self.init_std, "a finite number >= 0", is_number(self.init_std, 0.0))
        names = activations.of_config(gated=False)
        name = self.activation_function
        check("activation_function", name, ", ".join(names), name in names)
        self._check_embeddings()
        self._check_ids()

    def _check_sizes(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            check(name, value, integer_from(1), is_integer(value, 1))
        for name in ("encoder_layers", "decoder_layers"):
            value = getattr(self, name)
            check(name, value, integer_from(1, MAX_LAYERS), is_integer(value, 1, MAX_LAYERS))
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            heads = getattr(self, name)
            allowed = f"a multiple of {name} ({heads})"
            check("d_model", self.d_model, allowed, self.d_model % heads == 0)

    def _check_embeddings(self) -> None:
        if not self.share_encoder_decoder_embeddings:
            return
        # transformers 4 and 5 disagree about the tables of such a model.
        allowed = "True with share_encoder_decoder_embeddings"
        check("tie_word_embeddings", self.tie_word_embeddings, allowed, self.tie_word_embeddings)
        size = self.decoder_vocab_size
        allowed = f"vocab_size ({self.vocab_size}) with share_encoder_decoder_embeddings"
        check("decoder_vocab_size", size, allowed, size == self.vocab_size)

    def _check_ids(self) -> None:
        target = self.decoder_vocab_size or 0
        # Padding is an id of both vocabularies.
        most = min(self.vocab_size, target)
        allowed = f"0 <= id < {most}, the size of the vocabulary"
        value = self.pad_token_id
        check("pad_token_id", value, allowed, is_integer(value, 0, most - 1))
        allowed = f"0 <= id < decoder_vocab_size ({target})"
        value = self.decoder_start_token_id
        check("decoder_start_token_id", value, allowed, is_integer(value, 0, target - 1))
        for name in ("eos_token_id", "forced_eos_token_id"):
            value = getattr(self, name)
            fits = value is None or is_integer(value, 0, target - 1)
            check(name, value, f"None or {allowed}", fits)

    # The sizes that every model of fastbert has

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.d_model

    @property
    def head_dim(self) -> int:
        """Width of one attention head of the decoder."""
        return self.d_model // self.decoder_attention_heads

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a source or of a target."""
        return self.max_position_embeddings

    @property
    def initializer_range(self) -> float:
        """Standard deviation of the initial weights."""
        return self.init_std

    # The configurations of the two stacks of layers

    def encoder(self) -> BertConfig:
        """Return the configuration of the encoder's layers, and of the encoder's input."""
        return self._stack(
            self.vocab_size,
            self.encoder_layers,
            self.encoder_attention_heads,
            self.encoder_ffn_dim,
        )

    def decoder(self) -> BertConfig:
        """Return the configuration of the decoder's modules, and of the decoder's input."""
        return self._stack(
            self.decoder_vocab_size or 0,
            self.decoder_layers,
            self.decoder_attention_heads,
            self.decoder_ffn_dim,
        )

    def _stack(self, vocab_size: int, layers: int, heads: int, inner: int) -> BertConfig:
        return BertConfig(
            vocab_size=vocab_size,
            hidden_size=self.d_model,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=inner,
            hidden_act=self.activation_function,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.attention_dropout,
            max_position_embeddings=self.max_position_embeddings,
            initializer_range=self.init_std,
            layer_norm_eps=LAYER_NORM_EPS,
            pad_token_id=self.pad_token_id,
            architecture=Architecture(
                type_table=False,
                pre_norm=self.normalize_before,
                pooler=False,
                inner_dropout=self.activation_dropout,
            ),
        )

    # Dictionaries

    def replace(self, **changes: Any) -> TransformerConfig:
        """Return a copy with some fields replaced; raise ValueError if a value is not allowed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the keys in `extra` as one dictionary."""
        return {**self.extra, **{name: getattr(self, name) for name in FIELDS}}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> TransformerConfig:
        """Build a configuration from a dictionary; keys that are not fields go to `extra`.

        Args:
            content: Values by the names of fields. An absent field has its default.

        Returns:
            The configuration.

        Raises:
            ValueError: If a value is not allowed. The message names the key.
        """
        values = {key: value for key, value in content.items() if key in FIELDS}
        extra = {key: value for key, value in content.items() if key not in FIELDS}
        return cls(**values, extra=extra)


# The names of the fields that are keys of a config.json.
FIELDS = tuple(f.name for f in dataclasses.fields(TransformerConfig) if f.name != "extra")
