"""Texts as packed batches of similar lengths, with the tokenizer of a model folder."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from fastbert.data import Encoded, JsonTokenizer, WordPieceTokenizer
    from fastbert.io.sentence_transformers_folder import SentenceFolder


class LimitedTokenizer:
    """The tokenizer of a model folder, for texts and pairs, with a limit of tokens.

    The attribute ``limit`` is the largest number of tokens. It is the first of `max_length`,
    ``settings.max_length`` and the maximum in ``tokenizer_config.json`` that is set, but at most
    `positions`. The tokenizer puts ``settings.prompt`` before the first text. A call takes a tuple
    of one or two texts, and returns an ``Encoded``.

    Args:
        settings: The settings of the model folder.
        positions: Number of positions of the model.
        max_length: Largest number of tokens of a text; None takes the limit of the folder.

    Raises:
        ValueError: If `max_length` exceeds `positions`. A call raises a ValueError if a text has no
            tokens or if the tokenizer refuses a text.
    """

    def __init__(
        self, settings: SentenceFolder, positions: int, max_length: int | None = None
    ) -> None:
        """Load the tokenizer; warn if the folder has prompts and none of them is the default."""
        from fastbert.data import load_tokenizer, model_max_length

        if max_length is not None and max_length > positions:
            raise ValueError(
                f"max_length: got {max_length}, allowed: at most {positions}, the positions of "
                f"{settings.encoder}"
            )
        self.folder, self.prompt = settings.encoder, settings.prompt
        if settings.other_prompts:
            names = ", ".join(settings.other_prompts)
            warnings.warn(
                f"MODEL has prompts, but no default prompt ({names}): texts are encoded without a "
                "prompt",
                stacklevel=2,
            )
        self.tokenizer: WordPieceTokenizer | JsonTokenizer = load_tokenizer(self.folder)
        if settings.lowercase:
            self.tokenizer.lowercase()
        limit = max_length or settings.max_length or model_max_length(self.folder) or positions
        self.limit = min(limit, positions)

    def __call__(self, texts: tuple[str, ...]) -> Encoded:
        """Encode a text or a pair after the prompt, and cut the tokens to the limit."""
        first, *second = texts
        try:
            encoded = self.tokenizer.encode_within(self.limit, self.prompt + first, *second)
        except ValueError as error:
            raise ValueError(f"MODEL: {self.folder}: {error}") from error
        if not encoded.ids:
            raise ValueError(
                f"MODEL: its tokenizer makes no tokens of {first!r:.200}, allowed: at least one"
            )
        return encoded

    def prompt_length(self) -> int:
        """Return the number of tokens of the prompt at the start of each text.

        The count is the same as in sentence-transformers: the tokens of the prompt alone, without a
        special token at the end.
        """
        if not self.prompt:
            return 0
        ids = self.tokenizer.encode_within(self.limit, self.prompt).ids
        return len(ids) - self.tokenizer.is_added(ids[-1]) if ids else 0


def length_batches(lengths: list[int], tokens_per_batch: int) -> list[list[int]]:
    """Group texts of similar lengths into batches, the longest first.

    Args:
        lengths: Number of tokens of each text.
        tokens_per_batch: Largest number of tokens of a batch, unless a single text is longer.

    Returns:
        The indices of the texts of each batch.

    Examples:
        >>> from fastbert.inference.text_batches import length_batches
        >>> length_batches([3, 9, 5, 3], tokens_per_batch=8)
        [[1], [2, 0], [3]]
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or room < lengths[index]:
            batches.append([])
            room = tokens_per_batch
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def pack(lines: list[Encoded], device: torch.device) -> dict[str, Any]:
    """Pack encoded texts into the arguments of a model, without padding.

    Args:
        lines: The encoded texts or pairs of texts, at least one.
        device: Device of the tensors.

    Returns:
        ``input_ids``, int64 of shape ``(T,)``; ``cu_seqlens``, int32 of shape ``(B + 1,)``;
        ``max_seqlen``; and ``token_type_ids``, int64 of shape ``(T,)``, if a text has token types.
    """
    import torch

    lengths = torch.tensor([0, *(len(line.ids) for line in lines)], device=device)
    batch = {
        "input_ids": torch.tensor([i for line in lines for i in line.ids], device=device),
        "cu_seqlens": lengths.cumsum(0).int(),
        "max_seqlen": max(len(line.ids) for line in lines),
    }
    if any(line.token_types for line in lines):
        types = [t for line in lines for t in line.token_types or [0] * len(line.ids)]
        batch["token_type_ids"] = torch.tensor(types, device=device)
    return batch
