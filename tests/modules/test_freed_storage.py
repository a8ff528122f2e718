"""A model works if its weights lose their memory between two uses, as in sharded training."""

from __future__ import annotations

import pytest
import torch

from fastbert import modules
from fastbert.config import BertConfig
from fastbert.ops import backend as backends

if backends.EXTENSION is None:
    pytest.skip(backends.EXTENSION_STATE, allow_module_level=True)

CONFIG = BertConfig(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
)
IDS = torch.arange(10).view(2, 5)


def model() -> modules.BertModel:
    return modules.BertModel(CONFIG).eval()


NAMES = [name for name, _ in modules.BertModel(CONFIG).named_parameters()]


@pytest.mark.parametrize("name", [name for name in NAMES if "pooler" not in name])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_weight_without_memory_is_an_error_that_says_so(name, grad) -> None:
    encoder = model()
    weight = encoder.get_parameter(name)
    weight.untyped_storage().resize_(0)
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="got a storage of 0 bytes"):
        encoder(IDS)


def test_a_weight_that_got_its_memory_back_is_read_again() -> None:
    encoder = model()
    with torch.no_grad():
        expected = encoder(IDS).last_hidden_state
        weight = encoder.get_parameter("encoder.layer.0.intermediate.dense.weight")
        content = weight.detach().clone()
        size = weight.untyped_storage().nbytes()
        weight.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="got a storage of 0 bytes"):
            encoder(IDS)
        weight.untyped_storage().resize_(size)
        weight.copy_(content)
        assert torch.equal(encoder(IDS).last_hidden_state, expected)
