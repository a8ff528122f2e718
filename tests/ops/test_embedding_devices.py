"""``embedding`` refuses tensors on different devices."""

from __future__ import annotations

import pytest
import torch

from fastbert import ops

NAMES = (
    "ids", "token_types", "positions", "type_table", "position_table", "weight", "bias",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_on_another_device_is_an_error_that_names_it(name):
    ids = torch.zeros(4, dtype=torch.int64)
    arguments = dict.fromkeys(("ids", "token_types", "positions"), ids)
    arguments |= dict.fromkeys(("word_table", "type_table", "position_table"), torch.zeros(3, 8))
    arguments |= dict.fromkeys(("weight", "bias"), torch.zeros(8))
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"^{name}: got device meta, allowed: cpu, as word_table"):
        ops.embedding(**arguments)
