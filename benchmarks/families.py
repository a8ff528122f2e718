"""Time of the encoders of all model families, beside transformers.

    python -m benchmarks.families --out FOLDER [--threads 2] [--rounds 5] [--families bert gte]

Every model has 12 layers with a hidden size of 768 and random weights, in eval mode. The time is
that of a call of the encoder: stock transformers with its default attention, and the same model
after ``fastbert.accelerate``. The two take turns, and the table has the shortest of their times.
Before a shape is timed, the accelerated model is compared with stock fp32. Most of ALBERT's time is
that of the one layer that it repeats.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

import fastbert
from benchmarks.beside import FORMATS, compare_encoders, parser, write
from fastbert.bench.encoder import half_padded
from fastbert.io.families import ACCELERATED

SHAPES = {
    "1×128": (128,),
    "8×128 full": (128,) * 8,
    "8×128 half padded": half_padded(8, 128),
}
SIZES: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "type_vocab_size": 2,
    "pad_token_id": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_DEBERTA = {
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
# The settings in which a family differs from `SIZES`.
CHANGES: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 128},
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA
    | {"position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "electra": {"embedding_size": 768},
    "ernie": {"use_task_id": True},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 4, "token_dropout": True},
    "t5": {"d_kv": 64, "d_ff": 3072, "use_cache": False},
    "modernbert": {"intermediate_size": 1152, "cls_token_id": 2, "sep_token_id": 3},
}
# The decoder belongs to the time of Marian, which has a benchmark of its own.
MODELS = {name: family for name, family in ACCELERATED.items() if name != "marian"}
HEADER = """| family | format | shape | fastbert, ms | transformers, ms | speed-up |
|---|---|---|---:|---:|---:|"""


def build(family: str, layers: int = 12) -> Any:
    """Return an encoder of transformers with random weights and without dropout, in eval mode.

    Args:
        family: A key of `MODELS`.
        layers: Number of layers.
    """
    import transformers
    from transformers.models.t5.modeling_t5 import T5Stack

    torch.manual_seed(0)
    kind = T5Stack if family == "t5" else getattr(transformers, MODELS[family].model)
    settings = MODELS[family].settings
    wanted = {**SIZES, "num_hidden_layers": layers, **CHANGES.get(family, {})}
    known = kind.config_class().to_dict()
    renamed = {settings.get(name, name): value for name, value in wanted.items()}
    config = kind.config_class(**{name: x for name, x in renamed.items() if name in known})
    return kind(config).eval()


def contest(family: str, form: str, rounds: int, layers: int) -> list[dict[str, Any]]:
    """Return a row for each shape of a family in one format.

    Args:
        family: A key of `MODELS`.
        form: Format of the weights, a key of `FORMATS`.
        rounds: Number of timed calls of each implementation.
        layers: Number of layers.

    Raises:
        RuntimeError: If the accelerated model does not agree with stock fp32.
    """
    exact = build(family, layers)
    sides = {
        "transformers": copy.deepcopy(exact).to(FORMATS[form]),
        "fastbert": fastbert.accelerate(copy.deepcopy(exact)).to(FORMATS[form]),
    }
    rows = []
    for shape, lengths in SHAPES.items():
        name = f"{family} {form} {shape}"
        result = compare_encoders(name, exact, sides, lengths, form, rounds)
        rows.append({"family": family, "format": form, "shape": shape, **result})
        print(row_of(rows[-1]), flush=True)
    return rows


def row_of(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    own, stock = row["fastbert seconds"], row["transformers seconds"]
    return (
        f"| {row['family']} | {row['format']} | {row['shape']} | {1e3 * own:,.1f} | "
        f"{1e3 * stock:,.1f} | {stock / own:.2f} × |"
    )


def main() -> None:
    """Measure the families, and write ``families.json`` and ``families.md``."""
    arguments = parser(__doc__, "families", 5)
    arguments.add_argument("--families", nargs="+", choices=MODELS, default=list(MODELS))
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    print(HEADER)
    rows = [
        row
        for family in options.families
        for form in FORMATS
        for row in contest(family, form, options.rounds, 1 if options.quick else 12)
    ]
    page = "\n".join([HEADER, *map(row_of, rows), ""])
    write(options.out, "families", options.threads, {"rows": rows}, page)


if __name__ == "__main__":
    main()
