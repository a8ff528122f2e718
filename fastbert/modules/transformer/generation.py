"""The settings of generation, with the names and defaults of transformers' ``GenerationConfig``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from fastbert.config import check, integer_from, is_integer, is_number
from fastbert.transformer_config import TransformerConfig

# The number of new tokens if no setting limits the length.
NEW_TOKENS = 20
# Settings of transformers that change the generated tokens and are not implemented, with the values
# that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "remove_invalid_values": (False,),
    "forced_bos_token_id": (),
    "exponential_decay_length_penalty": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "constraints": (),
    "force_words_ids": (),
    "max_time": (),
    "stop_strings": (),
    "watermarking_config": (),
    "prompt_lookup_num_tokens": (),
    "dola_layers": (),
}


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of ``Transformer.generate``.

    Args:
        max_length: Largest number of tokens of a result, with the first token; None means 20 new
            tokens.
        num_beams: Number of beams; 1 means greedy search.
        length_penalty: Exponent of the number of new tokens, by which the score of a finished beam
            is divided.
        early_stopping: When beam search ends for a source. True ends it once `num_beams` sequences
            are finished. False ends it once the best running beam, with its present length, cannot
            beat the finished sequences. ``"never"`` assumes the length that is best for the beam.
        num_return_sequences: Number of sequences that are returned for each source.
        bad_words_ids: Tokens that are never generated, each in a list of its own; None means none.
        renormalize_logits: Whether the probabilities without `bad_words_ids` are scaled to a sum
            of 1.
        pad_token_id: Id that fills a result after its end.
        eos_token_id: Id of the token that ends a sequence, or None.
        decoder_start_token_id: Id of the first token.
        forced_eos_token_id: Id that becomes the last token of a sequence of `max_length` tokens, or
            None.
        extra: Other keys of a ``generation_config.json``, with their values.

    Raises:
        ValueError: If a value is not allowed. The message names the setting.
    """

    max_length: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1
    bad_words_ids: list[list[int]] | None = None
    renormalize_logits: bool = False
    pad_token_id: int | None = None
    eos_token_id: int | None = None
    decoder_start_token_id: int | None = None
    forced_eos_token_id: int | None = None
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        length = self.max_length
        check(
            "max_length",
            length,
            f"None or {integer_from(2)}",
            length is None or is_integer(length, 2),
        )
        for name in ("num_beams", "num_return_sequences"):
            value = getattr(self, name)
            check(name, value, integer_from(1), is_integer(value, 1))
        returned, beams = self.num_return_sequences, self.num_beams
        allowed = f"at most num_beams ({beams})"
        check("num_return_sequences", returned, allowed, returned <= beams)
        penalty = self.length_penalty
        check("length_penalty", penalty, "a number", is_number(penalty, -1e3, 1e3))
        stopping = self.early_stopping
        allowed = 'True, False or "never"'
        check(
            "early_stopping", stopping, allowed, isinstance(stopping, bool) or stopping == "never"
        )
        flag = self.renormalize_logits
        check("renormalize_logits", flag, "True or False", isinstance(flag, bool))
        words = self.bad_words_ids
        fits = words is None or (isinstance(words, list) and all(map(_is_token, words)))
        check("bad_words_ids", words, "None or a list of lists with one id each", fits)
        for name in _IDS:
            value = getattr(self, name)
            fits = value is None or is_integer(value, 0)
            check(name, value, f"None or {integer_from(0)}", fits)

    @property
    def banned(self) -> list[int]:
        """The ids of `bad_words_ids`, without the id that ends a sequence."""
        ids = [word[0] for word in self.bad_words_ids or []]
        return [each for each in ids if each != self.eos_token_id]

    @property
    def filling(self) -> int:
        """The id that fills a result of beam search after its end, as in transformers.

        transformers takes the id 0 of padding for no id.
        """
        return self.pad_token_id or self.eos_token_id or 0

    def replace(self, **changes: Any) -> GenerationSettings:
        """Return a copy with the changes that are not None.

        Raises:
            ValueError: If a value is not allowed.
        """
        given = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(self, **given)

    def check_implemented(self) -> None:
        """Raise ValueError if `extra` has a setting that would change the generated tokens."""
        for name, neutral in NEUTRAL.items():
            value = self.extra.get(name)
            allowed = " or ".join(map(repr, (None, *neutral))) + ": it is not implemented"
            check(name, value, allowed, value is None or value in neutral)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``generation_config.json``: all settings that are not None."""
        own = {name: getattr(self, name) for name in _FIELDS}
        return {**self.extra, **{name: value for name, value in own.items() if value is not None}}

    @classmethod
    def of(
        cls, config: TransformerConfig, content: dict[str, Any] | None = None
    ) -> GenerationSettings:
        """Build the settings of a model.

        Args:
            config: Configuration of the model.
            content: Content of ``generation_config.json``. With None, the settings are the ids of
                `config`, and those keys of ``config.json`` that are settings of generation, as in
                older checkpoints.

        Returns:
            The settings.

        Raises:
            ValueError: If a value is not allowed.
        """
        if content is None:
            names = (*_FIELDS, *NEUTRAL)
            content = {name: value for name, value in config.extra.items() if name in names}
            content |= {name: getattr(config, name) for name in _IDS}
        known = {name: value for name, value in content.items() if name in _FIELDS}
        known = {name: value for name, value in known.items() if value is not None}
        known.setdefault("decoder_start_token_id", config.decoder_start_token_id)
        extra = {name: value for name, value in content.items() if name not in _FIELDS}
        return cls(**known, extra=extra)


def largest_length(
    settings: GenerationSettings,
    config: TransformerConfig,
    max_length: int | None,
    max_new_tokens: int | None,
) -> int:
    """Return the largest number of tokens of a target, with the first token.

    Args:
        settings: The settings of the model, with the arguments of the caller.
        config: Configuration of the model.
        max_length: As in ``Transformer.generate``.
        max_new_tokens: As in ``Transformer.generate``.

    Returns:
        The number, which is at least 2.

    Raises:
        ValueError: If both arguments are given, if a value is not allowed, or if the target would
            have more positions than the model, or if there are more beams than tokens.
    """
    if max_length is not None and max_new_tokens is not None:
        raise ValueError(
            f"max_new_tokens: got {max_new_tokens} and max_length {max_length}, allowed: one"
        )
    positions = config.max_position_embeddings
    if max_new_tokens is not None:
        check("max_new_tokens", max_new_tokens, integer_from(1), is_integer(max_new_tokens, 1))
        length = max_new_tokens + 1
    else:
        length = settings.max_length or max(2, min(NEW_TOKENS + 1, positions))
    # The last token is not an input of the decoder.
    name = "max_length" if max_new_tokens is None else "max_new_tokens + 1"
    allowed = f"at most max_position_embeddings + 1 ({positions + 1})"
    check(name, length, allowed, length <= positions + 1)
    most = ((config.decoder_vocab_size or 0) - len(settings.banned)) // 2
    beams = settings.num_beams
    allowed = f"1, or at most half of the tokens of the vocabulary ({most})"
    check("num_beams", beams, allowed, beams == 1 or beams <= most)
    return length


def _is_token(word: Any) -> bool:
    return isinstance(word, list) and len(word) == 1 and is_integer(word[0], 0)


_FIELDS = tuple(f.name for f in dataclasses.fields(GenerationSettings) if f.name != "extra")
_IDS = tuple(name for name in _FIELDS if name.endswith("token_id"))
