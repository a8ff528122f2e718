"""Parity of the whole model: a pre-training step with dropout, against the reference model.

The reference model is `fastbert.testing.reference_model`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.modules import BertForPreTraining
from fastbert.ops import backend as backends
from fastbert.ops.arguments import dropout_seeds
from fastbert.testing import reference_model
from fastbert.testing.cases import Case
from fastbert.testing.compare import MAX_FACTOR, compare
from fastbert.testing.parity import DTYPES, ParityRow, devices, not_run, parity_row
from fastbert.testing.yardstick import Yardstick

CASE = Case("bert", "pretraining_step", ())
# The model is small and has every kind of layer. The size of the vocabulary is prime, so that it is
# not a multiple of a tile.
CONFIG = BertConfig(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
    max_position_embeddings=48,
    initializer_range=0.1,
)
# The gradients of each kind of layer are judged as one long vector. In a vector of few elements, a
# lucky rounding would decide whether the tolerance rule holds.
KINDS = ("embeddings", "attention.self", "attention.output", "intermediate", "pooler", "cls")


def check_model(
    backend: str | None = None, dtype: torch.dtype | None = None, seed: int = 0
) -> Iterator[ParityRow]:
    """Check the losses and gradients of BertForPreTraining on every backend that can run here.

    A backend is checked on a device and in a dtype if it can serve the layer norm with them.

    Args:
        backend: The only backend to check; None checks all.
        dtype: The only dtype to check; None checks fp32, fp16 and bf16.
        seed: Seed of the weights, the batch and the dropout.

    Yields:
        A row for each loss and for the gradients of each kind of layer. A step that raises an error
        has one row, as in `parity.check`.
    """
    for name in backends.BACKENDS if backend is None else (backend,):
        for device in devices():
            for kind in DTYPES if dtype is None else (dtype,):
                request = backends.Request(device, kind)
                if backends.refusal("layer_norm", name, request) is None:
                    try:
                        rows = check_step(name, kind, device, seed)
                    except Exception as error:
                        rows = [parity_row(CASE, name, kind, not_run(kind, error), seed)]
                    yield from rows


def check_step(
    backend: str | None,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    *,
    each: bool = False,
    autocast: bool = False,
    factor: float = MAX_FACTOR,
    reason: str | None = None,
) -> list[ParityRow]:
    """Check one training step with seeded dropout.

    Args:
        backend: Backend of the model; None lets each operation choose.
        dtype: Dtype of the parameters, or of autocast.
        device: Device of the model.
        seed: Seed of the weights, the batch and the dropout.
        each: Whether each parameter's gradient has a row. If False, the gradients of each kind of
            layer have one row together.
        autocast: Whether the parameters are fp32 and the step runs under autocast. The yardstick
            then runs under autocast too.
        factor: As in `compare`.
        reason: As in `compare`.

    Returns:
        The rows of ``mlm_loss``, ``nsp_loss`` and the gradients.
    """
    torch.manual_seed(seed)
    parameters = torch.float32 if autocast else dtype
    model = BertForPreTraining(CONFIG, backend=backend).to(device, parameters).train()
    batch = batch_of(seed)
    # The model draws the same seeds, because the generator is set to the same state below.
    torch.manual_seed(seed)
    seeds = torch.cat(dropout_seeds(1 + 3 * CONFIG.num_hidden_layers, model.device)).cpu()
    torch.manual_seed(seed)
    with torch.autocast(device, dtype, enabled=autocast):
        out = model(**{name: t.to(device) for name, t in batch.items()}, output_logits=False)
    (out.mlm_loss + out.nsp_loss).backward()
    actual = {"mlm_loss": out.mlm_loss, "nsp_loss": out.nsp_loss, **_gradients(model)}
    state = {name: t.detach().cpu() for name, t in model.state_dict().items()}
    oracle = _reference_step(state, batch, seeds, torch.float64)

    def reference_step() -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype, enabled=autocast):
            return _reference_step(state, batch, seeds, parameters)

    yardstick = Yardstick(reference_step)
    rows = []
    groups = {name: [name] for name in oracle} if each else _groups(oracle)
    for name, members in groups.items():
        sides = _flat(actual, members), _flat(oracle, members)
        best = yardstick.map(functools.partial(_flat, names=members))
        # A loss is a single number in fp32, computed from 16-bit states. The rule therefore counts
        # the rounding of the 16-bit dtype, with which no step fails. With the rounding of fp32,
        # PyTorch with its operations in another order would fail in 6 of 40 steps, with ratios of
        # its error to the yardstick's error of up to 42.
        result = compare(name, *sides, best, factor=factor, reason=reason, tested=dtype)
        rows.append(parity_row(CASE, backend or "auto", dtype, result, seed))
    return rows


def batch_of(seed: int) -> dict[str, Tensor]:
    """Draw a batch of three sequences of 40, 23 and 9 tokens.

    About 15 % of the tokens have a label.

    Args:
        seed: Seed of the batch.

    Returns:
        ``input_ids``, ``attention_mask``, ``token_type_ids`` and ``labels``, int64 of shape
        ``(3, 40)``, and ``next_sentence_label``, int64 of shape ``(3,)``.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([40, 23, 9])
    shape = (3, 40)
    exists = torch.arange(40) < lengths[:, None]
    ids = torch.randint(1, CONFIG.vocab_size, shape, generator=generator)
    labelled = (torch.rand(shape, generator=generator) < 0.15) & exists
    return {
        "input_ids": ids * exists,
        "attention_mask": exists.long(),
        "token_type_ids": torch.randint(0, 2, shape, generator=generator) * exists,
        "labels": torch.randint(0, CONFIG.vocab_size, shape, generator=generator).masked_fill(
            ~labelled, -100
        ),
        "next_sentence_label": torch.tensor([0, 1, 1]),
    }


def _gradients(model: BertForPreTraining) -> dict[str, Tensor]:
    """Return the gradients of the parameters under the names of Hugging Face.

    The gradients are copied into the parameters of a second model. The state-dict hooks of the
    second model then split the gradients as they split parameters.
    """
    gradients = BertForPreTraining(CONFIG).to(next(model.parameters()).dtype)
    with torch.no_grad():
        for target, source in zip(gradients.parameters(), model.parameters(), strict=True):
            assert source.grad is not None
            target.copy_(source.grad)
    return {f"d{name}": t for name, t in gradients.state_dict().items() if _differentiated(name)}


def _differentiated(name: str) -> bool:
    # The decoder is tied to the word table and to the bias of the predictions, whose gradients
    # include the gradients of the decoder.
    return not name.startswith("cls.predictions.decoder.")


def _reference_step(
    state: dict[str, Tensor], batch: dict[str, Tensor], seeds: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    leaves = {
        name: t.to(dtype).requires_grad_() for name, t in state.items() if _differentiated(name)
    }
    tied = {"cls.predictions.decoder.weight": leaves["bert.embeddings.word_embeddings.weight"]}
    mlm, nsp = reference_model.pretraining_loss({**leaves, **tied}, CONFIG, batch, seeds)
    gradients = torch.autograd.grad(mlm + nsp, list(leaves.values()))
    named = {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {"mlm_loss": mlm, "nsp_loss": nsp, **named}


def _groups(tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in tensors:
        kind = next((k for k in KINDS if f".{k}." in f".{name[1:]}"), "output")
        groups.setdefault(name if name.endswith("_loss") else f"d{kind}", []).append(name)
    return groups


def _flat(tensors: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([tensors[name].detach().cpu().flatten() for name in names])
