"""One step of generation: the logits of the next token of every beam."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.transformer.cache import Cache
from fastbert.modules.transformer.decoder import TransformerDecoder
from fastbert.modules.transformer.embeddings import TransformerEmbeddings
from fastbert.modules.transformer.vocabulary_head import VocabularyHead


class DecoderStep:
    """The steps of generation for a batch of sources.

    Args:
        embeddings: The embeddings of the target, in eval mode.
        decoder: The decoder, in eval mode.
        head: The projection to the vocabulary.
        source_rows: The encoder's output, of shape ``(T, H)``.
        source: Division of `source_rows` into sequences.
    """

    def __init__(
        self,
        embeddings: TransformerEmbeddings,
        decoder: TransformerDecoder,
        head: VocabularyHead,
        source_rows: Tensor,
        source: BatchLayout,
    ) -> None:
        """Create the cache."""
        self.embeddings, self.decoder, self.head = embeddings, decoder, head
        self.cache = Cache(decoder, source_rows, source)
        self.position = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the next tokens.

        Args:
            tokens: The last token of each beam, int64 of shape ``(sources, beams)``.

        Returns:
            Logits in fp32 (fp64 for an fp64 model), of shape ``(sources * beams, V)``.
        """
        flat = tokens.flatten()
        positions = torch.full_like(flat, self.position)
        self.position += 1
        rows = self.embeddings(flat, positions)
        logits = self.head(self.rows(rows, tokens.shape[1]))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def rows(self, rows: Tensor, beams: int) -> Tensor:
        """Run all layers for one token of each beam; the only place that does.

        Args:
            rows: Embedded tokens of shape ``(sources * beams, H)``.
            beams: Number of rows of each source.

        Returns:
            Rows after the last layer, of the shape of `rows`.
        """
        self.cache.begin(beams)
        return self.decoder(rows, self.cache).rows
