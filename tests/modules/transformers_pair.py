"""A model of transformers in float64 (oracle) and float32 (yardstick), and fastbert's model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from fastbert import modules
from fastbert.config import BertConfig
from fastbert.testing.compare import Comparison, assert_close
from fastbert.testing.yardstick import Yardstick, each

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BATCH, LENGTH = 4, 19


class Pair(NamedTuple):
    oracle: nn.Module
    yardstick: nn.Module
    ours: modules.BertPreTrainedModel


def pair(name: str, *, seed: int = 0, **overrides: Any) -> Pair:
    """Return models of class ``name`` of both libraries with the same random, nonzero weights."""
    torch.manual_seed(seed)
    sizes = {**SIZES, **overrides}
    stock_config = transformers.BertConfig(**sizes, attn_implementation="eager")
    yardstick = getattr(transformers, name)(stock_config).eval()
    with torch.no_grad():
        for parameter in yardstick.parameters():
            center = parameter if parameter.ndim == 1 else torch.zeros_like(parameter)
            parameter.copy_(center + 0.15 * torch.randn_like(parameter))
    ours = getattr(modules, name)(BertConfig.from_dict(stock_config.to_dict())).eval()
    ours.load_state_dict(yardstick.state_dict())
    return Pair(copy.deepcopy(yardstick).double(), yardstick, ours)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients by transformers' names, with the fused qkv projection split in three."""
    named = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        before, fused, kind = name.partition(".qkv.")
        if not fused:
            named[name] = parameter.grad
            continue
        for part, gradient in zip(("query", "key", "value"), parameter.grad.chunk(3), strict=True):
            named[f"{before}.{part}.{kind}"] = gradient
    return named


def as_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


# The errors in a network are not independent: one rounding error in the loss scales a whole
# gradient, so a single input may favour either library. The errors of several inputs are therefore
# compared as one vector.
DRAWS = 8
REASON = "roundings early in the backward pass are shared by every gradient after them"


class Judge:
    """Run the three models on several inputs, and compare each output over all inputs together."""

    def __init__(self, models: Pair, draws: list[dict[str, Any]]) -> None:
        self.models, self.draws = models, draws
        self.seen: list[Comparison] = []
        exact = [{name: as_float64(value) for name, value in draw.items()} for draw in draws]
        self.oracle = [models.oracle(**inputs) for inputs in exact]
        self.yardstick = Yardstick(self._run_yardstick)
        self.actual = [models.ours(**inputs) for inputs in draws]

    def _run_yardstick(self) -> list[Any]:
        return [self.models.yardstick(**inputs) for inputs in self.draws]

    def agree(self, *names: str, select: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Check ``select`` of each output in ``names`` by the tolerance rule."""
        for name in names:
            runs = self.actual, self.oracle, self.yardstick.library
            counts = {len(as_tuple(out[name])) for outs in runs for out in outs}
            assert len(counts) == 1, name
            for i in range(counts.pop()):

                def stacked(outs: list[Any], name: str = name, i: int = i) -> Tensor:
                    return torch.stack([select(as_tuple(out[name])[i]) for out in outs])

                sides = each(stacked, self.actual, self.oracle, self.yardstick)
                self.seen.append(assert_close(f"{name}[{i}]", *sides))

    def gradients_agree(self) -> None:
        """Check the gradients of each parameter name, joined over all layers and all inputs."""
        ours = self._gradients(self.models.ours, self.actual)
        exact = self._gradients(self.models.oracle, self.oracle)
        single = Yardstick(lambda: self._gradients(self.models.yardstick, self._run_yardstick()))
        assert ours.keys() == exact.keys()
        for name, gradient in ours.items():
            others = exact[name], single[name]
            self.seen.append(
                assert_close(f"gradient of {name}", gradient, *others, factor=3.0, reason=REASON)
            )

    @staticmethod
    def _gradients(model: nn.Module, outs: list[Any]) -> dict[str, Tensor]:
        gathered: dict[str, list[Tensor]] = {}
        for out in outs:
            model.zero_grad()
            out["loss"].backward()
            for name, gradient in gradients(model).items():
                kind = re.sub(r"layer\.\d+", "layer", name)
                gathered.setdefault(kind, []).append(gradient.detach().flatten().clone())
        return {kind: torch.cat(parts) for kind, parts in gathered.items()}


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def batches(*, padded: bool = False, **more: Any) -> list[dict[str, Any]]:
    """Return random batches, each with the additional model arguments ``more``."""
    return [{**batch(padded=padded, seed=seed), **more} for seed in range(DRAWS)]


def batch(*, padded: bool = False, seed: int = 1) -> dict[str, Tensor]:
    """Return ids and token types; ``padded`` adds a mask for rows of 19, 1, 11 and 6 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SIZES["vocab_size"], (BATCH, LENGTH), generator=generator)
    types = torch.randint(0, 2, (BATCH, LENGTH), generator=generator)
    inputs = {"input_ids": ids, "token_type_ids": types}
    if padded:
        lengths = torch.tensor([[LENGTH], [1], [11], [6]])
        inputs["attention_mask"] = (torch.arange(LENGTH) < lengths).long()
        inputs["input_ids"] = ids * inputs["attention_mask"]
    return inputs
