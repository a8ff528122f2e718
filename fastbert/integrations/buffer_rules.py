"""Check the buffers of an HF model, a model of transformers, against the values of stock code.

The twin of an HF model is a fresh model of the same class and config on the meta device, so the
buffers of the twin have no values. This module computes the expected values instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbert.modules.positions import frequencies


def buffer_problem(name: str, buffer: Tensor | None, twin: nn.Module, config: Any) -> str | None:
    """Return how a buffer of the HF model differs from stock code, or None if it does not.

    A buffer on the meta device has no values, so only its dtype and shape are compared.

    Args:
        name: Name of the buffer.
        buffer: The HF model's buffer `name`, or None if it is absent.
        twin: The module of the twin. Its buffer `name`, if any, has the right dtype and shape.
        config: The HF model's config.
    """
    expected = twin._buffers.get(name)
    if buffer is None or expected is None:
        got, allowed = (None if b is None else "a buffer" for b in (buffer, expected))
        return None if buffer is expected else f"got {got}, allowed: {allowed}"
    if type(buffer) is not Tensor or buffer.layout is not torch.strided:
        return f"got a {type(buffer).__name__} ({buffer.layout}), allowed: a strided Tensor"
    if name in ("position_ids", "token_type_ids"):
        return _integer_problem(name, buffer)
    if name.endswith("inv_freq"):
        return _frequency_problem(name, buffer, expected, config)
    return "got a buffer, allowed: position_ids, token_type_ids and inverse frequencies"


def _integer_problem(name: str, buffer: Tensor) -> str | None:
    """Compare ``position_ids`` with 0, 1, 2, …, and ``token_type_ids`` with zeros.

    The length may differ from the config, because the table of positions may have been resized.
    """
    shape = tuple(buffer.shape)
    if buffer.dtype != torch.int64 or len(shape) != 2 or shape[0] != 1:
        return f"got {buffer.dtype} of shape {shape}, allowed: torch.int64 of shape (1, L)"
    if buffer.is_meta:
        return None
    expected = torch.zeros_like(buffer)
    if name == "position_ids":
        expected = torch.arange(shape[1], device=buffer.device)[None]
    wrong = (buffer != expected).nonzero()
    if not len(wrong):
        return None
    place = int(wrong[0, 1])
    allowed = int(expected[0, place])
    return f"got {int(buffer[0, place])} at position {place}, allowed: {allowed}"


def _frequency_problem(name: str, buffer: Tensor, expected: Tensor, config: Any) -> str | None:
    """Compare element i with ``base ** (-2 i / dim)``, or with that value rounded to bf16 or fp16.

    A rounded buffer is allowed because fastbert reads its values, as the stock code does.
    """
    if not buffer.is_floating_point() or buffer.shape != expected.shape:
        shapes = f"shape {tuple(buffer.shape)}, allowed: floats of shape {tuple(expected.shape)}"
        return f"got {buffer.dtype} of {shapes}"
    if buffer.is_meta:
        return None
    # The base of ESM is a field of its own.
    rotary = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    kind = name.removesuffix("inv_freq").removesuffix("original_").removesuffix("_")
    base = float((rotary[kind] if kind else rotary)["rope_theta"])
    dim = 2 * len(buffer)
    exact = frequencies(base, dim, torch.device("cpu"))
    actual = buffer.detach().float().cpu()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if torch.allclose(actual, exact.to(dtype).float(), rtol=1e-6, atol=0.0):
            return None
    place = int((actual - exact).abs().argmax())
    return f"got {float(actual[place]):.6g} at {place}, allowed: {float(exact[place]):.6g}"
