"""One step of generation: the logits of the next token of every beam."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.summed_embeddings import SummedEmbeddings
from fastbert.modules.transformer.cache import Cache
from fastbert.modules.transformer.decoder import TransformerDecoder
from fastbert.modules.transformer.one_call import one_call
from fastbert.modules.transformer.slots import SlotCache
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
        embeddings: SummedEmbeddings,
        decoder: TransformerDecoder,
        head: VocabularyHead,
        source_rows: Tensor,
        source: BatchLayout,
    ) -> None:
        """Create the cache."""
        self.embeddings, self.head = embeddings, head
        call = one_call(decoder, source_rows.device.type, source_rows.dtype)
        self.cache: Cache | SlotCache
        if isinstance(call, str):
            self.cache = Cache(decoder, source_rows, source)
        else:
            tables = [p for p in (*call.parameters, head.decoder.weight) if p.dim() == 2]
            torch.ops.fastbert_C.use_huge_pages(tables)
            self.cache = SlotCache(decoder, call, source_rows, source)
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
        rows = self.embeddings.placed(self.embeddings.words(flat), positions)
        logits = self.head(self.cache.advance(rows, tokens.shape[1]))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
