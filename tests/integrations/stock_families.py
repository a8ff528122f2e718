"""Small random transformers models, one per family, and functions that compare their outputs.

"Stock" means the code of transformers. In comparisons, the stock model with eager attention in
float64 has the exact results, and its errors in the tested dtype set the tolerance.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import transformers
from quick_cases import long_case
from torch import Tensor, nn
from transformers.models.marian.modeling_marian import MarianEncoder
from transformers.models.t5.modeling_t5 import T5Stack

from fastbert.parity.gradients import FACTOR, REASON, kinds
from fastbert.testing.compare import assert_close
from fastbert.testing.in_float64 import InFloat64
from fastbert.testing.yardstick import Yardstick, each

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 64,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ROBERTA = {"pad_token_id": 1, "type_vocab_size": 2}


class Stock(NamedTuple):
    """A family: the prefix of its class names in transformers, and its differences from `SIZES`."""

    name: str
    changes: dict[str, Any]


FAMILIES: dict[str, Stock] = {
    "bert": Stock("Bert", {}),
    "roberta": Stock("Roberta", ROBERTA),
    "xlm-roberta": Stock("XLMRoberta", ROBERTA),
    "camembert": Stock("Camembert", ROBERTA),
    "data2vec-text": Stock("Data2VecText", ROBERTA),
    "ernie": Stock("Ernie", {"use_task_id": True}),
    "layoutlm": Stock("LayoutLM", {"max_2d_position_embeddings": 60}),
    "roberta-prelayernorm": Stock("RobertaPreLayerNorm", ROBERTA),
    "xlm-roberta-xl": Stock("XLMRobertaXL", ROBERTA),
    "megatron-bert": Stock("MegatronBert", {}),
    "gte": Stock("Gte", {"pad_token_id": 1}),
    "jina_embeddings_v3": Stock("JinaEmbeddingsV3", {"pad_token_id": 1}),
    "roformer": Stock("RoFormer", {"embedding_size": 32, "rotary_value": True}),
    "electra": Stock("Electra", {"embedding_size": 32}),
    # This ALBERT runs its four stored layers in the order 0, 1, 0, 1, 2, 3.
    "albert": Stock(
        "Albert",
        {
            "embedding_size": 32,
            "num_hidden_layers": 3,
            "num_hidden_groups": 2,
            "inner_group_num": 2,
            "classifier_dropout_prob": 0.0,
        },
    ),
    "distilbert": Stock(
        "DistilBert",
        {
            "dim": 144,
            "n_layers": 2,
            "n_heads": 3,
            "hidden_dim": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
        },
    ),
    "mpnet": Stock("MPNet", {"pad_token_id": 1}),
    "nomic_bert": Stock("NomicBert", {}),
    # Distances of more than 4 tokens share rows of the table of positions.
    "deberta-v2": Stock(
        "DebertaV2",
        {
            "relative_attention": True,
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": "p2c|c2p",
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    # Distances of more than 9 tokens share rows of the table of positions.
    "deberta": Stock(
        "Deberta",
        {
            "relative_attention": True,
            "max_relative_positions": 10,
            "pos_att_type": "p2c|c2p",
            "position_biased_input": True,
            "type_vocab_size": 2,
        },
    ),
    # Two heads of queries share a head of keys and values. The heads are narrower than BERT's.
    "eurobert": Stock(
        "EuroBert",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20, "mask_token_id": 4},
    ),
    # The first and last layers attend to all tokens. The second attends to 4 tokens on each side.
    "modernbert": Stock(
        "ModernBert",
        {
            "num_hidden_layers": 3,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "cls_token_id": None,
            "sep_token_id": None,
        },
    ),
}
# The families that fastbert.accelerate serves. The head "Model" of Marian and T5 is the encoder.
ACCELERATED: dict[str, Stock] = {
    **FAMILIES,
    "esm": Stock(
        "Esm",
        {
            "pad_token_id": 1,
            "mask_token_id": 0,
            "position_embedding_type": "rotary",
            "emb_layer_norm_before": False,
            "token_dropout": True,
        },
    ),
    "t5": Stock(
        "T5",
        {
            "d_model": 144,
            "num_layers": 2,
            "num_heads": 3,
            "d_kv": 40,
            "d_ff": 64,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
            "use_cache": False,
            "tie_word_embeddings": True,
        },
    ),
    "marian": Stock(
        "Marian",
        {
            "d_model": 144,
            **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 3 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
            "activation_function": "swish",
            "scale_embedding": True,
            "dropout": 0.0,
            "decoder_start_token_id": 0,
            "eos_token_id": 1,
            "forced_eos_token_id": None,
        },
    ),
}
# These families differ from RoBERTa in the names of their classes and weights. `make test` runs
# them in one test of accelerated models and in one of native models.
LIKE_ROBERTA = ("xlm-roberta", "camembert", "data2vec-text")
# These families differ from another family in the embeddings or in names, and not in the layers.
# `make test` runs them in the tests of outputs, gradients, heads, embeddings, dropout and files.
ALIKE = (
    *LIKE_ROBERTA,
    *("ernie", "layoutlm", "electra"),  # the layers of BERT
    *("megatron-bert", "roberta-prelayernorm"),  # the layers of XLM-RoBERTa-XL
    "jina_embeddings_v3",  # the layers of Nomic BERT
)
PADDINGS = ("none", "right", "left", "middle")
LENGTH = 21


def distinct(names: Iterable[str]) -> list[Any]:
    """Return names of families for a test that `make test` need not run for `LIKE_ROBERTA`."""
    return [long_case(name) if name in LIKE_ROBERTA else name for name in names]


def of_each_kind(names: Iterable[str]) -> list[Any]:
    """Return names of families for a test that `make test` need not run for `ALIKE`."""
    return [long_case(name) if name in ALIKE else name for name in names]


# Arguments of `build` → the model, and the state of torch's random numbers after its construction.
BUILT: dict[str, tuple[nn.Module, Tensor]] = {}


def build(family: str, head: str = "Model", seed: int = 0, **changes: Any) -> Any:
    """Return a model with random nonzero weights, in eval mode; sinusoids stay as they are.

    Each model is a copy of the first model of the same arguments, because a copy takes a third of
    the time of a construction.
    """
    key = repr((family, head, seed, changes))
    if key not in BUILT:
        BUILT[key] = _construct(family, head, seed, changes), torch.get_rng_state()
    model, state = BUILT[key]
    torch.set_rng_state(state)
    return copy.deepcopy(model)


def _construct(family: str, head: str, seed: int, changes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(seed)
    name, own = ACCELERATED[family]
    kind = getattr(transformers, f"{name}Config")
    known = kind().to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    config = kind(**sizes | own | changes, attn_implementation="eager")
    encoder = {"marian": MarianEncoder, "t5": T5Stack}.get(family) if head == "Model" else None
    made = encoder or getattr(transformers, name + head)
    model = made(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
            # T5 does not scale its logits.
            if family == "t5" and name.endswith("Attention.q.weight"):
                parameter.mul_(0.15)
    return model


def inputs(
    padding: str, family: str = "bert", rows: int = 3, length: int = LENGTH, seed: int = 1
) -> dict[str, Tensor]:
    """Return random ids and a mask, both of shape ``(rows, length)``.

    If there are several rows, the first row has no padding. The padding "middle" hides at most
    three tokens, but never the first token.
    """
    generator = torch.Generator().manual_seed(seed)
    pad = (SIZES | ACCELERATED[family].changes)["pad_token_id"]
    ids = torch.randint(2, SIZES["vocab_size"], (rows, length), generator=generator)
    kept = torch.randint(1, length, (rows, 1), generator=generator)
    if rows > 1:
        kept[0] = length
    places = torch.arange(length)
    exists = torch.ones(rows, length, dtype=torch.bool)
    if padding == "right":
        exists = places < kept
    if padding == "left":
        exists = places >= length - kept
    if padding == "middle":
        at = torch.randint(1, length - 4, (rows, 1), generator=generator)
        exists = (places < at) | (places >= at + 1 + torch.arange(rows)[:, None] % 3)
        exists[0] |= rows > 1
    return {"input_ids": ids.where(exists, pad), "attention_mask": exists.long()}


# Running


class Outputs(NamedTuple):
    """The outputs of a model.

    Attributes:
        states: Hidden states of shape ``(layers + 1, B, L, H)``.
        weights: Attention weights by query, of shape ``(layers, B, L, heads, L)``, or None.
        pooled: Pooler output of shape ``(B, H)``, or None.
    """

    states: Tensor
    weights: Tensor | None
    pooled: Tensor | None

    def existing(self, mask: Tensor) -> Outputs:
        """Return the outputs at real tokens, and the pooled rows whose first token is real."""
        real = mask.bool()
        weights = None if self.weights is None else self.weights[:, real]
        pooled = None if self.pooled is None else self.pooled[real[:, 0]]
        return Outputs(self.states[:, real], weights, pooled)

    def detached(self) -> Outputs:
        return Outputs(*(None if part is None else part.detach() for part in self))


def total(outs: Outputs) -> Tensor:
    """Return a random weighted sum of all states and pooled rows, for use as a loss."""
    torch.manual_seed(2)
    parts = [part for part in (outs.states, outs.pooled) if part is not None]
    return torch.stack([(part * torch.randn_like(part.float())).sum() for part in parts]).sum()


def in_dtype(model: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy of `model` in ``dtype``; buffers stay in fp32, as in transformers."""
    changed = copy.deepcopy(model)
    for parameter in changed.parameters():
        parameter.data = parameter.data.to(dtype)
    return changed


def call(side: nn.Module, batch: dict[str, Any], **options: Any) -> Any:
    """Return ``side(**batch)``; for a float64 model, torch computes everything in float64."""
    if next(side.parameters()).dtype != torch.float64:
        return side(**batch, **options)
    with InFloat64():
        return side(**batch, **options)


def run(side: nn.Module, batch: dict[str, Tensor], weights: bool = False) -> Outputs:
    """Return the outputs of a stock, accelerated or native model for a batch."""
    out = call(side, batch, output_hidden_states=True, output_attentions=weights)
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    stacked = torch.stack(out.attentions).transpose(2, 3) if weights else None
    return Outputs(torch.stack(out.hidden_states), stacked, getattr(out, "pooler_output", None))


def run_with_gradients(
    side: nn.Module, batch: dict[str, Tensor]
) -> tuple[Outputs, dict[str, Tensor]]:
    """Return the outputs at real tokens, and the gradients of their ``total``."""
    side.zero_grad()
    out = run(side, batch).existing(batch["attention_mask"])
    total(out).backward()
    return out.detached(), gradients(side)


# Comparing


def assert_outputs_close(actual: Outputs, oracle: Outputs, yardstick: Outputs | Yardstick) -> None:
    """Compare all outputs; an output must be None exactly where the oracle's output is None."""
    for name in Outputs._fields:
        parts = each(operator.attrgetter(name), actual, oracle, yardstick)
        if parts[1] is None:
            assert parts[0] is None, name
        else:
            assert_close(name, *parts)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_close(
    actual: dict[str, Tensor], oracle: dict[str, Tensor], yardstick: dict[str, Tensor] | Yardstick
) -> None:
    """Compare the gradients; for each parameter name, the gradients of all layers are joined."""
    nearby = yardstick.library if isinstance(yardstick, Yardstick) else yardstick
    assert actual.keys() == oracle.keys() == nearby.keys()
    for kind, names in kinds(oracle).items():

        def joined(side: dict[str, Tensor], names: list[str] = names) -> Tensor:
            return torch.cat([side[name].flatten() for name in names])

        sides = each(joined, actual, oracle, yardstick)
        assert_close(f"gradient of {kind}", *sides, factor=FACTOR, reason=REASON)
