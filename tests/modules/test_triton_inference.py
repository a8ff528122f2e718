"""Triton inference gives results within tolerance in one call of all layers and layer by layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quick_cases import long_case
from torch import Tensor

from fastbert import BertConfig, BertModel, ops, quantize, reference
from fastbert.modules.executors import GpuInference
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.plan import Mode, plan
from fastbert.ops import backend as backends
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick, each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    backends.unavailable("triton", DEVICE) is not None, reason="Triton cannot run here"
)
CONFIG = BertConfig.preset(
    "tiny",
    vocab_size=50,
    num_hidden_layers=3,
    hidden_size=64,
    num_attention_heads=2,
    intermediate_size=96,
)


def model(dtype: torch.dtype = torch.float32, **changes: Any) -> BertModel:
    torch.manual_seed(0)
    built = BertModel(CONFIG.replace(**changes), backend="triton").eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return built.to(DEVICE, dtype)


def padded(*lengths: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    exists = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, 50, exists.shape, generator=generator) * exists
    return {"input_ids": ids.to(DEVICE), "attention_mask": exists.long().to(DEVICE)}


def plan_of(built: BertModel, dtype: torch.dtype = torch.float32) -> Any:
    return plan(built.encoder.running(), Mode.now(DEVICE, dtype, gradient=False))


def forms() -> dict[str, dict[str, Tensor]]:
    packed, full = padded(9, 4, 1), padded(7, 7)
    causal = torch.ones(2, 7, 7, device=DEVICE).tril()
    return {
        "packed": packed,
        "full": full,
        "mask": {**full, "attention_mask": causal.bool()},
        "bias": {**full, "attention_mask": (1 - causal) * -3.0},
        "no_token": {**packed, "attention_mask": torch.zeros_like(packed["attention_mask"])},
    }


@pytest.mark.parametrize(
    "form", [form if form == "packed" else long_case(form) for form in forms()]
)
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32"), long_case(torch.float16, id="fp16")]
)
def test_one_call_has_the_bits_of_layer_by_layer(form, dtype, monkeypatch) -> None:
    built, inputs = model(dtype), forms()[form]
    calls = []
    encoder = ops.encoder
    monkeypatch.setattr(ops, "encoder", lambda *a, **k: calls.append(k) or encoder(*a, **k))
    with torch.no_grad():
        got = built(**inputs, output_hidden_states=True)
        alone = built(**inputs)
        assert [call["backend"] for call in calls] == ["triton", "triton"]
        built.encoder.layer[0].register_forward_hook(lambda *_: None)
        assert "has forward hooks" in built.backends()["encoder"].reason
        expected = built(**inputs, output_hidden_states=True)
        assert len(calls) == 2
    for name in ("last_hidden_state", "pooler_output"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
        assert torch.equal(getattr(alone, name), getattr(expected, name)), name
    for got_state, state in zip(got.hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(got_state, state)


def test_the_input_of_the_layers_is_not_written() -> None:
    built = model()
    with torch.no_grad():
        rows = torch.randn(7, 64, device=DEVICE)
        kept, ends = rows.clone(), torch.tensor([0, 7], dtype=torch.int32, device=DEVICE)
        options = {"batch": 1, "heads": 2, "backend": "triton"}
        first = ops.encoder(rows, plan_of(built).run.parameters, ends, 7, **options)[0]
        assert torch.equal(rows, kept)
        copy = first.clone()
        ops.encoder(rows + 1, plan_of(built).run.parameters, ends, 7, **options)
        assert torch.equal(first, copy)


def test_the_public_function_agrees_with_its_reference() -> None:
    with torch.no_grad():
        parameters = [p.detach() for p in plan_of(model()).run.parameters]
    ends = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    options = {"batch": 2, "heads": 2, "eps": 1e-6, "all_states": True, "activation": "relu"}
    hidden = torch.randn(12, 64, device=DEVICE)
    runs = (
        ops.encoder(hidden, parameters, ends, 7, backend="triton", **options),
        reference.encoder(hidden.double(), [p.double() for p in parameters], ends, 7, **options),
        Yardstick(lambda: reference.encoder(hidden, parameters, ends, 7, **options)),
    )
    assert len(runs[0]) == 3
    assert_close("encoder", *each(torch.stack, *runs))


def test_the_reasons() -> None:
    built = model()
    with torch.no_grad():
        assert built.backends()["encoder"] == ("triton", "all layers in one call")
        assert type(plan_of(built).run) is GpuInference
        assert "weights are {torch.float16}" in plan_of(built.half()).reason
        for module in built.float().modules():
            if isinstance(module, LayerNorm):
                module.double()
        assert type(plan_of(built).run) is GpuInference
        built.encoder.layer[2].intermediate.dense.bias.data = torch.zeros(96, device=DEVICE).half()
        assert "parameters of products are not torch.float32" in plan_of(built).reason
        built.encoder.layer[1].output.LayerNorm.set_backend("reference")
        assert "layers differ" in plan_of(built).reason
        with torch.autocast(DEVICE, torch.bfloat16):
            assert "are not torch.bfloat16" in plan_of(model()).reason
        assert "dropout in training" in plan_of(model().train()).reason
        if DEVICE == "cuda":
            assert "int8 or joined" in plan_of(quantize(model())).reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": 1}, "parameters: got 35 tensors, allowed: 12 for each layer"),
        ({"heads": 3}, "heads: got 3, allowed: a divisor of 64"),
        ({"ends": None}, "batch, max_seqlen: got 1 and 5, allowed: a product of 7"),
        ({"dtype": torch.bfloat16}, "dtype: got torch.bfloat16, allowed: torch.float32, as hidden"),
        ({"backend": "cuda"}, "backend: got 'cuda', allowed: None, cpu, triton"),
        ({"scales": 1}, "scales: got 1 tensors, allowed: none on the triton backend"),
        ({"half": 8}, r"parameters\[8\]: got torch.float16, allowed: torch.float32, as hidden"),
        ({"short": 23}, r"parameters\[23\]: got shape \(63,\), allowed: \(64,\)"),
        ({"mask": True}, "mask, bias: got a tensor, allowed: None with cu_seqlens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(change, message) -> None:
    with torch.no_grad():
        parameters = list(plan_of(model()).run.parameters)
    hidden = torch.randn(7, 64, device=DEVICE)
    ends = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"batch": 1, "heads": change.get("heads", 2)}
    options["backend"] = change.get("backend", "triton")
    options["dtype"] = change.get("dtype")
    options["scales"] = [hidden] * change.get("scales", 0)
    if "half" in change:
        parameters[change["half"]] = parameters[change["half"]].half()
    if "short" in change:
        parameters[change["short"]] = parameters[change["short"]][1:]
    if "mask" in change:
        options["mask"] = torch.ones(1, 1, 1, 5, dtype=torch.bool, device=DEVICE)
    parameters = parameters[change.get("drop", 0) :]
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        ops.encoder(hidden, parameters, change.get("ends", ends), 5, **options)


@pytest.mark.every_case
def test_operator() -> None:
    with torch.no_grad():
        parameters = [p.detach() for p in plan_of(model()).run.parameters]
    hidden = torch.randn(12, 64, device=DEVICE)
    ends = torch.tensor([0, 7, 12], dtype=torch.int32, device=DEVICE)
    rest = (1, False, False, 1e-12, "gelu", torch.float32)
    given = (parameters, [], ends, None, None, [], [], [], None, 2, 7, 2, 2, 1, *rest)
    for all_states in (False, True):
        arguments = (hidden, *given, all_states, "triton", "triton", "triton", "triton")
        torch.library.opcheck(torch.ops.fastbert.encoder.default, arguments)
    leaf = hidden.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="has no derivative"):
        ops.encoder(leaf, parameters, ends, 7, batch=2, heads=2, backend="triton")[
            0
        ].sum().backward()
