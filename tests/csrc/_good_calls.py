"""Small valid calls of every C++ operator, by the name of its schema."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fastbert.ops.int8_linear import pack

T, H, HEADS, INNER = 6, 8, 2, 12
# The operators of a layer in training support these dtypes for their matrix products.
PRODUCTS = (torch.float32, torch.bfloat16)
SEED = 0x0123456789ABCDEF

Call = dict[str, Any]


@functools.cache
def operators() -> dict[str, Any]:
    """Return the schema of every operator that the extension registered, by name."""
    prefix = "fastbert_C::"
    schemas = torch._C._jit_get_all_schemas()
    return {s.name.removeprefix(prefix): s for s in schemas if s.name.startswith(prefix)}


def good_calls() -> dict[str, list[Call]]:
    """Return the keyword arguments of one valid call for each form of each operator."""
    torch.manual_seed(0)
    ops = torch.ops.fastbert_C
    calls: dict[str, list[Call]] = {"int8_layout": [{}]}
    _rows(ops, calls)
    _products(calls)
    _attention(calls)
    _embedding(ops, calls)
    _cross_entropy(ops, calls)
    _splade(ops, calls)
    _encoder(calls)
    _decoder(calls)
    _layer(ops, calls)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    calls["unpad_indices"] = [{"mask": mask}, {"mask": mask.bool()}]
    calls["any_outside"] = [
        {"index": torch.tensor([[0, 3], [-100, 4]]), "size": 5, "ignored": -100}
    ]
    rising, mixed = torch.tensor([0, 2, 3]), torch.tensor([4, 2, 0])
    calls["scatter_rows"] = [
        {"values": torch.randn(3, H), "indices": i, "rows": 5} for i in (rising, mixed)
    ]
    _relative_attention(calls)
    return calls


def _rows(ops: Any, calls: dict[str, list[Call]]) -> None:
    """Add calls of the operators that compute each row of the result from one row."""
    x, dy, weight, bias = torch.randn(T, H), torch.randn(T, H), torch.randn(H), torch.randn(H)
    norm = {"x": x, "weight": weight}
    extra = {"residual": torch.randn(T, H), "x_bias": torch.randn(H)}
    dropout = {"seed": torch.tensor([SEED]), "dropout_p": 0.25}
    forward = norm | {"bias": bias} | extra | dropout | {"eps": 1e-12}
    _, mean, rstd = ops.layer_norm_forward(**forward)
    plain = forward | {"bias": None, "residual": None, "x_bias": None}
    calls["layer_norm_forward"] = [forward, plain]
    backward = {"dy": dy} | norm | {"mean": mean, "rstd": rstd, **extra, **dropout}
    calls["layer_norm_backward"] = [
        backward | {"has_bias": True},
        backward | {"has_bias": False, "residual": None, "x_bias": None},
    ]
    residual = {"residual": extra["residual"]}
    forward = norm | residual | {"eps": 1e-12}
    _, rstd = ops.rms_norm_forward(**forward)
    calls["rms_norm_forward"] = [forward]
    calls["rms_norm_backward"] = [{"dy": dy} | norm | {"rstd": rstd} | residual]
    wide, wide_bias = torch.randn(T, 2 * H), torch.randn(2 * H)
    plain = {"h": x, "bias": bias, "activation": "gelu"}
    gated = {"h": wide, "bias": wide_bias, "activation": "swiglu"}
    tanh = plain | {"activation": "gelu_tanh"}
    calls["activation_forward"] = [plain, gated, tanh]
    calls["activation_backward"] = [
        {"dy": dy, **call, "sum_rows": True, "recompute": True} for call in (plain, gated)
    ] + [{"dy": dy, **plain, "sum_rows": True, "recompute": False}]
    angles = torch.randn(T, 2)
    calls["rotary"] = [
        {
            "x": torch.randn(T, 3, 4),
            "cos": angles.cos(),
            "sin": angles.sin(),
            "heads": 2,
            "inverse": False,
        }
    ]


def _int8_weight(outputs: int, inputs: int) -> Any:
    lanes, group = torch.ops.fastbert_C.int8_layout()
    values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return pack(values, torch.rand(outputs) / 64, lanes, group)


def _products(calls: dict[str, list[Call]]) -> None:
    x, weight, bias, y = (
        torch.randn(T, H),
        torch.randn(INNER, H),
        torch.randn(INNER),
        torch.randn(T, INNER),
    )
    linear = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "residual": y,
        "activation": "gelu",
        "save": True,
    }
    half = {k: v.bfloat16() if torch.is_tensor(v) else v for k, v in linear.items()}
    calls["linear"] = [linear, half]
    calls["linear_of_parts"] = [
        {
            "x": x,
            "weights": weight.split((8, 4)),
            "biases": bias.split((8, 4)),
            "activation": "gelu",
        }
    ]
    calls["linear_layer_norm"] = [
        {
            "x": x, "weight": weight, "bias": bias, "residual": y,
            "norm_weight": torch.randn(INNER), "norm_bias": torch.randn(INNER), "eps": 1e-12,
        }
    ]  # fmt: skip
    calls["feed_forward_layer_norm"] = [
        {
            "x": x, "inner": torch.randn(32, H), "inner_bias": torch.randn(32),
            "outer": torch.randn(INNER, 32), "outer_bias": bias, "residual": y,
            "norm_weight": torch.randn(INNER), "norm_bias": torch.randn(INNER),
            "activation": "gelu", "eps": 1e-12,
        }
    ]  # fmt: skip
    calls["matmul"] = [{"a": x, "b": torch.randn(H, INNER), "addend": y, "dtype": torch.float32}]
    packed, scale, column_sum, n, _ = _int8_weight(INNER, H)
    calls["int8_linear"] = [
        {
            "x": x, "packed": packed, "scale": scale, "column_sum": column_sum, "n": n,
            "bias": bias, "residual": y, "activation": "none", "dtype": torch.float32,
        }
    ]  # fmt: skip


def _attention(calls: dict[str, list[Call]]) -> None:
    B, L, D = 2, 3, 4
    numbers = {"scale": 0.5, "left": 2, "right": 1}
    dropout = {"seed": torch.tensor([SEED]), "dropout_p": 0.25}
    dense = {name: torch.randn(B, HEADS, L, D) for name in "qkv"} | {
        "mask": torch.rand(B, 1, L, L) < 0.8, "bias": torch.randn(1, HEADS, L, L),
        "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": L, "max_seqlen_k": L,
    }  # fmt: skip
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = {name: torch.randn(T, HEADS, D) for name in "qkv"} | {
        "mask": None, "bias": None,
        "cu_seqlens_q": ends, "cu_seqlens_k": ends.clone(), "max_seqlen_q": L, "max_seqlen_k": L,
    }  # fmt: skip
    calls["attention_forward"] = [call | dropout | numbers for call in (dense, packed)]
    calls["attention_backward"] = [
        {f"d{name}": torch.empty_like(call[name]) for name in "qkv"}
        | {"dbias": None if call["bias"] is None else torch.empty_like(call["bias"])}
        | {"dout": torch.randn_like(call["q"])} | call | dropout | numbers
        for call in (dense, packed)
    ]  # fmt: skip
    chosen = {"heads": [1], "rows": [2, 0]}
    calls["attention_weights"] = [
        {k: v for k, v in call.items() if k != "v"} | chosen | numbers for call in (dense, packed)
    ]


def _relative_attention(calls: dict[str, list[Call]]) -> None:
    """Add calls of dense sequences with all terms, and of packed sequences with one table."""
    B, L, D, P = 2, 3, 4, 5
    dropout = {"seed": torch.tensor([SEED]), "dropout_p": 0.25, "scale": 0.5}
    index = {"index": torch.tensor([4, 0, 1, 1, 2, 3, 0], dtype=torch.int32)}
    dense = {name: torch.randn(B, HEADS, L, D) for name in "qkv"} | index | {
        "position_keys": torch.randn(P, HEADS, D), "position_queries": torch.randn(P, HEADS, D),
        "position_bias": torch.randn(P, HEADS), "q_segments": torch.randint(0, 2, (B, L)),
        "k_segments": torch.randint(0, 2, (B, L), dtype=torch.int32),
        "segment_scores": torch.randn(B, HEADS, L), "mask": torch.rand(B, 1, L, L) < 0.8,
        "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": L, "max_seqlen_k": L,
    }  # fmt: skip
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = {name: torch.randn(T, HEADS, D) for name in "qkv"} | index | {
        "position_keys": torch.randn(P, HEADS, D), "position_queries": None, "position_bias": None,
        "q_segments": torch.randint(0, 2, (T,)), "k_segments": torch.randint(0, 2, (T,)),
        "segment_scores": torch.randn(T, HEADS), "mask": None,
        "cu_seqlens_q": ends, "cu_seqlens_k": ends.clone(), "max_seqlen_q": L, "max_seqlen_k": L,
    }  # fmt: skip
    forms = [call | dropout for call in (dense, packed)]
    calls["relative_attention_forward"] = forms
    calls["relative_attention_weights"] = [
        {k: v for k, v in call.items() if k != "v"} for call in forms
    ]
    calls["relative_attention_backward"] = [
        {"dout": torch.randn_like(call["q"])} | call for call in forms
    ]


def _embedding(ops: Any, calls: dict[str, list[Call]]) -> None:
    indices = {
        "ids": torch.randint(0, 7, (T,)),
        "token_types": torch.randint(0, 2, (T,), dtype=torch.int32),
        "positions": torch.arange(T),
    }
    tables = {
        "word_table": torch.randn(7, H), "type_table": torch.randn(2, H),
        "position_table": torch.randn(T, H), "weight": torch.randn(H),
    }  # fmt: skip
    dropout = {"seed": torch.tensor([SEED]), "dropout_p": 0.25}
    forward = indices | tables | {"bias": torch.randn(H)} | dropout | {"eps": 1e-12}
    _, mean, rstd = ops.embedding_forward(**forward)
    words = {"token_types": None, "type_table": None, "positions": None, "position_table": None}
    calls["embedding_forward"] = [forward, forward | words | {"bias": None}]
    backward = {"dy": torch.randn(T, H)} | indices | tables | {"mean": mean, "rstd": rstd}
    backward |= dropout | {"padding_idx": 0}
    calls["embedding_backward"] = [
        backward | {"has_bias": True},
        backward | words | {"has_bias": False},
    ]


def _cross_entropy(ops: Any, calls: dict[str, list[Call]]) -> None:
    call = {
        "hidden": torch.randn(T, H), "weight": torch.randn(7, H), "bias": torch.randn(7),
        "labels": torch.tensor([3, -100, 0, 6, -100, 2]),
    }  # fmt: skip
    forwards = [call | {"ignore_index": -100, "reduction": r} for r in ("mean", "none")]
    calls["linear_cross_entropy_forward"] = forwards
    calls["linear_cross_entropy_backward"] = []
    for forward in forwards:
        loss, statistics, order = ops.linear_cross_entropy_forward(**forward)
        kept = {"statistics": statistics, "order": order, "reduction": forward["reduction"]}
        calls["linear_cross_entropy_backward"].append(
            {"dloss": torch.ones_like(loss)} | call | kept
        )


def _splade(ops: Any, calls: dict[str, list[Call]]) -> None:
    call = {"hidden": torch.randn(T, H), "weight": torch.randn(7, H), "bias": torch.randn(7)}
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    calls["splade_forward"] = [call | {"cu_seqlens": ends, "save": save} for save in (True, False)]
    _, logits, rows = ops.splade_forward(**calls["splade_forward"][0])
    kept = {"logits": logits, "rows": rows}
    calls["splade_backward"] = [{"dy": torch.randn(2, 7)} | call | kept]


def _encoder(calls: dict[str, list[Call]]) -> None:
    shapes = [(3 * H, H), (H, H), (INNER, H), (H, INNER)]
    floating, parted, integer, scales = [], [], [], []
    for _ in range(2):
        weights = [torch.randn(shape) / 4 for shape in shapes]
        packed = [_int8_weight(*shape) for shape in shapes]
        biases, norms = [torch.randn(shape[0]) for shape in shapes], torch.randn(4, H)
        for into, ws in ((floating, weights), (integer, [p.packed for p in packed])):
            qkv, projection, inner, outer = zip(ws, biases, strict=True)
            rest_of_layer = [*projection, *norms[:2], *inner, *outer, *norms[2:]]
            into += [*qkv, *rest_of_layer]
            if into is floating:
                parted += [part for t in qkv for part in t.split(H)] + rest_of_layer
        scales += [t for p in packed for t in (p.scale, p.column_sum)]
    rest = {
        "heads": HEADS,
        "projections": 1,
        "eps": 1e-12,
        "activation": "gelu",
        "dtype": torch.float32,
        "all_states": True,
    }
    dense = {
        "cu_seqlens": None, "mask": torch.rand(2, 1, 1, 3) < 0.8,
        "bias": torch.randn(1, HEADS, 3, 3), "batch": 2, "max_seqlen": 3,
    }  # fmt: skip
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed_batch = {"cu_seqlens": ends, "mask": None, "bias": None, "batch": 2, "max_seqlen": 3}
    hidden = torch.randn(T, H)
    del rest["all_states"]
    words, positions, types = torch.randn(9, H), torch.randn(4, H), torch.randn(2, H)
    norm = list(torch.randn(2, H))
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    model = rest | {"parameters": floating, "scales": [], "embedding_eps": 1e-12}
    calls["bert"] = [
        model
        | {
            "ids": ids, "mask": torch.tensor([[1, 1, 1], [1, 0, 1]]), "token_types": ids % 2,
            "cu_seqlens": None,
            "embedding": [words, positions, *norm, types],
            "pooler": [torch.randn(H, H), torch.randn(H)], "first_position": None,
        },
        model
        | {
            "ids": ids, "mask": None, "token_types": None, "cu_seqlens": None,
            "embedding": [words, positions, *norm], "parameters": parted, "projections": 3,
            "pooler": [], "first_position": 1,
        },
        model
        | {
            "ids": ids.flatten(), "mask": None, "token_types": ids.flatten() % 2,
            "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32), "parameters": integer,
            "scales": scales,
            "embedding": [words, positions, *norm, types], "pooler": [], "first_position": None,
        },
    ]  # fmt: skip
    calls["same_bytes"] = [{"a": [torch.arange(9.0)], "b": [torch.arange(9.0)]}]
    calls["use_huge_pages"] = [{"weights": [torch.randn(64, 64), torch.randn(8)]}]
    plain = {
        "rotations": [], "windows": [], "positions": [], "scale": None, "inner_projections": 1,
        "pre_norm": False, "rms_norm": False, "key_value_heads": HEADS,
    }  # fmt: skip
    index, tables = torch.tensor([4, 3, 2, 1, 0], dtype=torch.int32), torch.randn(4, 5, H)
    positions = [index, *tables[:2], index, *tables[2:]]
    rest = plain | rest | {"all_states": True}
    # Both heads of queries share a head of keys and a head of values.
    stored = 2 * H
    grouped = [p[:stored] if i % 12 < 2 else p for i, p in enumerate(floating)]
    for place in (5, 11):  # An RMS norm has no bias.
        grouped[place::12] = [torch.empty(0) for _ in grouped[place::12]]
    calls["encoder"] = [
        {"hidden": hidden, "parameters": floating, "scales": [], **dense, **rest},
        {"hidden": hidden, "parameters": integer, "scales": scales, **packed_batch, **rest},
        {"hidden": hidden, "parameters": parted, "scales": [], **dense, **rest, "projections": 3},
        {"hidden": hidden, "scales": [], **packed_batch, **rest, **_rotated_layers(hidden)},
        {
            "hidden": hidden, "parameters": floating, "scales": [], **packed_batch, **rest,
            "positions": positions, "scale": 0.25,
        },
        {
            "hidden": hidden, "parameters": grouped, "scales": [], **packed_batch, **rest,
            "scale": 1.0, "key_value_heads": 1, "pre_norm": True, "rms_norm": True,
        },
    ]  # fmt: skip


def _decoder(calls: dict[str, list[Call]]) -> None:
    """Add steps of two layers with two sources, with norms after and before the blocks."""
    shapes = [(3 * H, H), (H, H), None, (H, H), (H, H), None, (INNER, H), (H, INNER), None]
    parameters = []
    for shape in shapes * 2:
        weight = torch.randn(H) if shape is None else torch.randn(shape) / 4
        parameters += [weight, torch.randn(weight.shape[0])]
    step = {
        "hidden": torch.randn(3, H), "parameters": parameters,
        "cache": torch.randn(2, 2, 4, HEADS, 5, H // HEADS),
        "slots": torch.tensor([[0, 3, 1], [0, 1, 1], [2, 2, 2]], dtype=torch.int32), "position": 3,
        "source_cache": torch.randn(2, 2, HEADS, 7, H // HEADS),
        "cu_seqlens": torch.tensor([0, 4, 7], dtype=torch.int32),
        "sources": torch.tensor([0, 0, 1], dtype=torch.int32), "heads": HEADS, "eps": 1e-5,
    }  # fmt: skip
    calls["decoder_step"] = [
        step | {"pre_norm": False, "activation": "relu"},
        step | {"pre_norm": True, "activation": "gelu"},
    ]


def _layer(ops: Any, calls: dict[str, list[Call]]) -> None:
    """Add to `calls` the forward and the backward of one layer in training.

    The call `dense` has dense sequences. The call `chosen` has packed sequences with chosen
    queries, dropout, and separate weights of q, k and v. The call `before` normalizes before
    attention and feed-forward, but lacks the first norm. It has a rotation, a window and a gate.
    """
    calls["sum_rows"] = [{"x": torch.randn(T, H).to(dtype)} for dtype in PRODUCTS]
    _, _, parted, rotated, *_ = calls["encoder"]
    every = {
        "hidden": torch.randn(T, H), "parameters": calls["encoder"][0]["parameters"][:12],
        "rotation": [], "batch": 2, "max_seqlen_k": 3, "heads": HEADS, "projections": 1,
        "inner_projections": 1, "window": -1, "pre_norm": False, "eps": 1e-12,
        "activation": "gelu",
    }  # fmt: skip
    dense = every | {
        "chosen": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "seeds": [],
        "dropouts": [0.0, 0.0, 0.0], "max_seqlen_q": 3,
    }  # fmt: skip
    chosen = every | {
        "parameters": parted["parameters"][:16], "projections": 3,
        "chosen": torch.tensor([0, 2, 3]),
        "cu_seqlens_q": torch.tensor([0, 1, 3], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 2, 5], dtype=torch.int32),
        "seeds": [torch.tensor([SEED + i]) for i in range(3)], "dropouts": [0.25, 0.5, 0.125],
        "max_seqlen_q": 2,
    }  # fmt: skip
    before = dense | {
        "rotation": rotated["rotations"][:2], "window": 1, "dtype": torch.float32,
        **{name: rotated[name] for name in ("inner_projections", "pre_norm", "activation")},
    }  # fmt: skip
    parameters = list(rotated["parameters"][: len(rotated["parameters"]) // 2])
    # An empty tensor means that the first norm or a bias is absent.
    for i in (1, 4, 5):
        parameters[i] = torch.empty(0)
    calls["layer_forward"] = [
        own | {"dtype": dtype} for dtype in PRODUCTS for own in (dense, chosen)
    ] + [before | {"parameters": parameters}]
    calls["layer_backward"] = []
    for call in calls["layer_forward"]:
        y, *kept = ops.layer_forward(**call)
        calls["layer_backward"].append(call | {"dy": torch.randn_like(y), "kept": kept})


def _rotated_layers(hidden: torch.Tensor) -> Call:
    """Return arguments of two layers like ModernBERT's, whose gate has a weight of its own."""
    shapes = [(3 * H, H), (H, H), (INNER, H), (INNER, H), (H, INNER)]
    weights, norm = [torch.randn(shape) / 4 for shape in shapes], torch.randn(2, H)
    biases = [torch.randn(shape[0]) for shape in shapes]
    layer = [
        weights[0], biases[0], weights[1], biases[1], *norm,
        *weights[2:4], *biases[2:4], weights[4], biases[4], *norm,
    ]  # fmt: skip
    angles = torch.randn(len(hidden), H // HEADS // 2)
    return {
        "parameters": layer * 2,
        "rotations": [angles.cos(), angles.sin()] * 2,
        "windows": [-1, 1],
        "inner_projections": 2,
        "pre_norm": True,
        "activation": "geglu",
    }
