"""The parity gate of fastbert's engines: two layers of the timed model under the tolerance rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cpu.batches import batches
from benchmarks.cpu.runtimes import BF16, BY_NAME, INT8, WEIGHTS
from fastbert.bench.encoder import GATE_LAYERS
from fastbert.config import BertConfig
from fastbert.modules import BertModel
from fastbert.testing.compare import compare
from fastbert.testing.yardstick import Yardstick

LENGTHS = (64, 37)


def refusal(engine: str, config: dict[str, Any], folder: Path) -> str | None:
    """Return the reason why ``engine`` breaks the tolerance rule, or None if it does not.

    The oracle is the reference backend in float64 on weights that are rounded to the dtype of the
    engine. The yardstick is the reference backend in that dtype, or under the same autocast. int8
    has no yardstick; the section ``int8`` shows its errors.
    """
    spec = BY_NAME[engine]
    if spec.form == INT8:
        return None
    whole = BertConfig.from_dict(config)
    small = whole.replace(num_hidden_layers=min(GATE_LAYERS, whole.num_hidden_layers))
    autocast = spec.option == "autocast"
    dtype = torch.bfloat16 if spec.form == BF16 and not autocast else torch.float32
    made = batches(small.vocab_size, LENGTHS)[0]
    inputs = {name: torch.from_numpy(value) for name, value in made.items()}
    real = inputs["attention_mask"].bool()

    def hidden(backend: str | None, as_dtype: torch.dtype, under_autocast: bool = False) -> Tensor:
        model = BertModel(small, backend=backend)
        names = model.state_dict().keys()
        loaded = torch.load(folder / WEIGHTS, mmap=True, weights_only=True)
        model.load_state_dict({name: loaded[name].to(dtype) for name in names})
        model.to(as_dtype).eval()
        with (
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16, enabled=under_autocast),
        ):
            return model(**inputs).last_hidden_state[real]

    actual, oracle = hidden(None, dtype, autocast), hidden("reference", torch.float64)
    yardstick = Yardstick(lambda: hidden("reference", dtype, autocast))
    verdict = compare(engine, actual, oracle, yardstick)
    return None if verdict.passed else f"parity is red: {verdict}"
