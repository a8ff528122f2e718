"""The encoder's layers, which are those of BERT's encoder with fused executors."""

from __future__ import annotations

from fastbert.config import BertConfig
from fastbert.modules.encoder import BertEncoder
from fastbert.modules.layer_norm import LayerNorm


def build_encoder(config: BertConfig, backend: str | None = None) -> BertEncoder:
    """Build the layers of the encoder.

    With ``config.architecture.pre_norm``, the first layer of a `BertEncoder` has no layer norm
    before attention, because BERT's embeddings end in a layer norm. The embeddings of the
    encoder–decoder have none, so the first layer gets its own.

    Args:
        config: Configuration of the encoder's layers.
        backend: Requested backend; see ``OperationModule``. None lets each operation choose.

    Returns:
        The encoder.
    """
    encoder = BertEncoder(config, backend)
    if config.architecture.pre_norm:
        norm = LayerNorm(config.hidden_size, config.layer_norm_eps, backend=backend)
        encoder.layer[0].attention.output.LayerNorm = norm
    return encoder
