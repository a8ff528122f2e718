"""One pre-training step of fastbert or transformers, with dropout and fused AdamW, for timing."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastbert.bench import encoder
from fastbert.bench.encoder import STOCK, EncoderShape
from fastbert.bench.limits import LABELLED
from fastbert.config import BertConfig
from fastbert.data.masking import IGNORED
from fastbert.integrations import stock_models
from fastbert.modules import BertForPreTraining


def training_step(
    engine: str,
    shape: EncoderShape,
    seed: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], Tensor]:
    """Return a function that makes one step on the batch of ``seed`` and returns the loss.

    ``engine`` is a name from `fastbert.bench.encoder.engine_names`. Functions that differ only in
    the seed share one model and its optimizer. Weights are fp32, and the step runs under bf16
    autocast if ``dtype`` is bf16.

    Raises:
        ValueError: If the engine fails the parity check `fastbert.bench.encoder.gate`.
    """
    if reason := encoder.refusals(shape.config, dtype, device).get(engine):
        raise ValueError(reason)
    model, optimizer = trainee(engine, shape.config, device)
    batch = training_batch(shape, seed, device)

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


@functools.lru_cache(maxsize=4)
def trainee(
    engine: str, config: BertConfig, device: str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model in train mode and its fused AdamW; weights and optimizer states are fp32."""
    model: nn.Module
    if engine.startswith(STOCK):
        model = stock_models.untrained_pretraining_model(config, engine.removeprefix(STOCK))
    else:
        model = BertForPreTraining(config, backend=encoder.requests(device)[engine])
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5, fused=True, capturable=device == "cuda"
    )
    return model, optimizer


def training_batch(shape: EncoderShape, seed: int, device: str) -> dict[str, Tensor]:
    """Return a batch with NSP and MLM labels.

    The first token of each sequence and about 15 % of the other real tokens have an MLM label.
    """
    batch = encoder.random_batch(shape, seed, "cpu")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(batch["input_ids"].shape, generator=generator) < LABELLED
    labelled = drawn & batch["attention_mask"].bool()
    labelled[:, 0] = True
    labels = batch["input_ids"].masked_fill(~labelled, IGNORED)
    follows = torch.randint(0, 2, (len(shape.lengths),), generator=generator)
    batch |= {"labels": labels, "next_sentence_label": follows}
    return {name: value.to(device) for name, value in batch.items()}
