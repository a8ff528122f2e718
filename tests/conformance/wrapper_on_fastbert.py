"""Compare an object of another library around a stock encoder and around an accelerated encoder.

    python tests/conformance/wrapper_on_fastbert.py NAME OUT

The script writes the comparison into the file OUT as JSON. ``wrappers_suite.py`` runs this script
in the virtual environment of the library.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_models import rows_computed
from torch import Tensor, nn
from wrappers import WRAPPERS, folders

import fastbert
from fastbert.integrations.accelerate import bound_encoders

# MiniLM's embeddings and scores are at most a few units large. A hook that cuts a module's output
# changes them by more than 1e-2.
RTOL, ATOL = 1e-4, 1e-5


def numbers(output: Any) -> Tensor:
    """Return all numbers in a result as one tensor."""
    if isinstance(output, (list, tuple)):
        return torch.cat([numbers(each) for each in output])
    return torch.as_tensor(output).detach().double().flatten()


def measured(run: Callable[[Any], Any], made: Any) -> tuple[Tensor, int]:
    """Return the numbers of one run, and how many rows the layers of fastbert computed."""
    with rows_computed() as rows:
        output = numbers(run(made))
    return output, sum(rows)


def cut(module: nn.Module, given: Any, out: Tensor) -> Tensor:
    """Set positions 1 to 3 of each sequence to 0; on packed rows, this hook would zero features."""
    out = out.clone()
    out[:, 1:4] = 0
    return out


def hook(encoder: Any) -> None:
    if hasattr(encoder, "layers"):  # ModernBERT
        encoder.layers[1].mlp.Wo.register_forward_hook(cut)
        return
    encoder.encoder.layer[1].output.dense.register_forward_hook(cut)


def compared(name: str, cache: Path) -> dict[str, Any]:
    """Return a comparison of stock and accelerated results, without and with a hook."""
    wrapper, given = WRAPPERS[name], folders(cache)
    stock, fast = wrapper.build(given), wrapper.build(given)
    expected, rows = measured(wrapper.run, stock)
    assert rows == 0, "fastbert ran in the stock object"
    fastbert.accelerate(fast)
    bound = bound_encoders(fast)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        actual, rows = measured(wrapper.run, fast)
    record: dict[str, Any] = {"paths": list(bound), "rows": rows}
    record["plain"] = difference(actual, expected)
    # The stock object is accelerated for a moment to find its HF model, which gets the same hook.
    hook(next(iter(bound.values())).hf_model)
    fastbert.accelerate(stock)
    hf_model = next(iter(bound_encoders(stock).values())).hf_model
    fastbert.restore(stock)
    assert hf_model not in [one.hf_model for one in bound.values()], (
        "both objects share their encoder"
    )
    hook(hf_model)
    cut_off, _ = measured(wrapper.run, stock)
    record["effect of the hook"] = float((cut_off - expected).abs().max())
    with warnings.catch_warnings(record=True) as more:
        warnings.simplefilter("always")
        record["hooked"] = difference(measured(wrapper.run, fast)[0], cut_off)
    texts = {str(one.message) for one in (*warned, *more)}
    record["fallbacks"] = sorted(text for text in texts if text.startswith("fastbert:"))
    return record


def difference(actual: Tensor, expected: Tensor) -> dict[str, Any]:
    """Return the largest difference, and whether the difference is within the tolerance."""
    if actual.shape != expected.shape:
        return {"largest": float("inf"), "equal": False}
    equal = torch.allclose(actual, expected, rtol=RTOL, atol=ATOL)
    return {"largest": float((actual - expected).abs().max()), "equal": equal}


def main() -> None:
    name, out = sys.argv[1:]
    record = compared(name, Path(out).parent)
    Path(out).write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
