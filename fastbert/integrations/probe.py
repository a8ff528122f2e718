"""Compare a small stock model with fastbert if the code of its class is not a tested version."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.integrations.twin_cache import IMPLEMENTATIONS, stock_class
from fastbert.testing.compare import compare
from fastbert.testing.yardstick import Yardstick

LAYERS = 2
# The sizes of the small model.
WIDTHS = {
    "num_attention_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "embedding_size": 32,
    "head_dim": 32,
    "d_head": 32,
    "d_kv": 32,
    "d_ff": 96,
}
WORDS = 200
LENGTHS = (11, 4, 1, 7)
# Stock attention gives NaN where a whole attention window is padding, so models with windows get
# these lengths, with less padding.
LENGTHS_WITH_WINDOWS = (11, 8, 9, 10)
SEED = 20260

Results = dict[str, Tensor]


def probe(hf_model: nn.Module, accelerate: Callable[[nn.Module], Any]) -> str | None:
    """Compare hidden states and gradients of the HF model's stock code with fastbert.

    The stock code and fastbert run the same small model on one padded batch, on the CPU in fp32.
    The model has random weights, no dropout, and otherwise the config of the HF model. Both errors
    are measured against stock code in float64. The states of torch's random generators do not
    change.

    Args:
        hf_model: An encoder of transformers. Only its class and its config are used.
        accelerate: A function that makes fastbert run a model without asking for a comparison.

    Returns:
        The reason why fastbert does not compute the same result, or None if the results agree.
    """
    stock = stock_class(type(hf_model))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        try:
            model = _model(stock, hf_model)
        except Exception as error:
            return f"got {type(error).__name__} ({error}), allowed: a model of {LAYERS} layers"
        batch = _batch(model.config)
        fast, exact = copy.deepcopy(model), copy.deepcopy(model).double()
        try:
            accelerate(fast)
            actual = _results(fast, batch)
        except Exception as error:
            return f"got {type(error).__name__} ({error}), allowed: a call that fastbert serves"
        oracle = _results(exact, batch)
        yardstick: Any = Yardstick(lambda: _results(model, batch))
        return _problem(actual, oracle, yardstick)


def _problem(actual: Results, oracle: Results, yardstick: Any) -> str | None:
    if actual.keys() != oracle.keys():
        names = sorted(actual.keys() ^ oracle.keys())
        return f"got results for {sorted(actual)}, allowed: also or not {names}"
    for name, value in actual.items():
        judged = compare(name, value, oracle[name], yardstick[name])
        if not judged.passed:
            return f"got {judged}, allowed: an error within the limits"
    return None


def _model(stock: Any, hf_model: Any) -> Any:
    config = copy.deepcopy(hf_model.config)
    layers = min(LAYERS, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[:layers]
    config.num_hidden_layers = layers
    groups = getattr(config, "num_key_value_heads", None)
    if groups is not None:
        shared = groups < config.num_attention_heads
        config.num_key_value_heads = 1 if shared else WIDTHS["num_attention_heads"]
    for name, width in WIDTHS.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, width)
    config.vocab_size = min(config.vocab_size, max(WORDS, (config.pad_token_id or 0) + 1))
    if config._attn_implementation not in IMPLEMENTATIONS:
        config._attn_implementation = IMPLEMENTATIONS[0]
    options = {}
    if "add_pooling_layer" in inspect.signature(stock.__init__).parameters:
        options["add_pooling_layer"] = False
    model = stock(config, **options).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _batch(config: Any) -> dict[str, Tensor]:
    lengths = LENGTHS_WITH_WINDOWS if getattr(config, "layer_types", None) else LENGTHS
    exists = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    pad = config.pad_token_id or 0
    ids = torch.randint(0, config.vocab_size - 1, exists.shape)
    ids += ids >= pad
    return {"input_ids": ids.where(exists, pad), "attention_mask": exists.long()}


def _results(model: nn.Module, batch: dict[str, Tensor]) -> Results:
    """Return the hidden states of real tokens, and the gradients of their randomly weighted sum.

    The bias of the key projection shifts all attention logits of a query equally, which does not
    change a softmax. Its gradient is therefore 0 except for rounding, and is left out.
    """
    model.zero_grad()
    real = batch["attention_mask"].bool()
    states = model(**batch).last_hidden_state[real]
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(SEED))
    (states * weights).sum().backward()
    results: Results = {"last_hidden_state": states.detach()}
    for name, parameter in model.named_parameters():
        is_key = name.endswith(("key.bias", "k_lin.bias", "attn.k.bias", "k_proj.bias"))
        if parameter.grad is not None and not is_key:
            results[name] = parameter.grad
    return results
