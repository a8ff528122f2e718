"""Model FLOPs utilization: the share of a processor's peak that a model's matrix products reach."""

from __future__ import annotations

import torch

from fastbert import gpus
from fastbert.config import BertConfig
from fastbert.flops import flops_of_layers
from fastbert.training.evaluate import IGNORED, Batch

# The backward pass of a matrix product computes two products of the same size. A step therefore has
# three times the FLOPs of its forward pass.
PASSES = 3


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the FLOP/s of dense products in the datasheet of a device, or None if not known.

    Args:
        device: The device.
        precision: ``"bf16"`` or ``"fp32"``. The peaks of fp32 products are not known.
    """
    if device.type != "cuda" or precision != "bf16":
        return None
    gpu = gpus.BY_CUDA_NAME.get(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.flops


def model_flops(config: BertConfig, batch: Batch) -> float:
    """Return the FLOPs of the matrix products of a batch's forward and backward pass.

    Products that gradient checkpointing computes again are not counted.

    The products are those of the layers on real tokens, of the masked-LM head at labelled
    positions, and of the pooler (Chowdhery et al. 2022, appendix B).

    Args:
        config: The configuration of the model.
        batch: A pre-training batch, on the CPU.
    """
    if "cu_seqlens" in batch:
        lengths = batch["cu_seqlens"].diff().tolist()
    else:
        lengths = batch["attention_mask"].sum(dim=1).tolist()
    layers = flops_of_layers(config, lengths)
    width = config.hidden_size
    labelled = int((batch["labels"] != IGNORED).sum())
    heads = 2 * labelled * width * (width + config.vocab_size) + 2 * len(lengths) * width**2
    return PASSES * (layers + heads)
