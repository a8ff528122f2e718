"""One call computes all layers of families that differ from BERT, such as ModernBERT and DeBERTa.

Their layers have rotary or relative positions, a gated feed-forward, windows, norms before the
blocks, RMS norms, or fewer heads of keys than of queries. The results agree with float64 and with a
call per layer, and do not depend on other sequences of the batch.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastbert import modules, ops, quantize, reference
from fastbert.io import families
from fastbert.modules.plan import Mode, plan
from fastbert.ops import backend as backends
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

if backends.EXTENSION is None:
    pytest.skip(backends.EXTENSION_STATE, allow_module_level=True)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 80,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
# In ModernBERT's second and third layer, a query attends to 4 tokens on each side.
FAMILIES = {
    "modernbert": {"local_attention": 8},
    "modernbert with biases": {
        "local_attention": 8,
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
    },
    "nomic_bert": {},
    # The gate has no bias, and the other products have one.
    "gte": {"type_vocab_size": 2},
    # The first layer has a norm before attention, and the embeddings have none.
    "megatron-bert": {},
    # Two heads of queries share a head of keys, and the heads are narrower than BERT's.
    "eurobert": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    # The encoder has a bias by distance, and the logits have no scale.
    "t5": {
        "d_model": 64,
        "num_layers": 4,
        "num_heads": 2,
        "d_kv": 20,
        "d_ff": 80,
        "dense_act_fn": "gelu_new",
        "is_gated_act": True,
        "is_decoder": False,
        "dropout_rate": 0.0,
        "layer_norm_epsilon": 1e-6,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    },
    "deberta-v2": {
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "deberta-v2 with keys of its own": {
        "relative_attention": True,
        "max_relative_positions": 40,
        "pos_att_type": "c2p",
        "type_vocab_size": 0,
    },
}
LENGTHS = (70, 23, 9, 1)
ONE_CALL = ("cpu", "all layers in one call")
every_family = pytest.mark.parametrize("family", FAMILIES)


def model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> modules.BertModel:
    torch.manual_seed(0)
    content = {"model_type": family.split()[0], **SIZES, **FAMILIES[family], **changes}
    built = modules.BertModel(families.read_config(content)).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return built.to(dtype)


def batch(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    exists = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, SIZES["vocab_size"], exists.shape, generator=generator)
    return {"input_ids": ids * exists, "attention_mask": exists.long()}


def one_call(built: modules.BertModel) -> bool:
    return built.backends()["encoder"] == ONE_CALL


def states(built: modules.BertModel, inputs: dict[str, Tensor]) -> Tensor:
    """Return all hidden states at the real tokens, as one tensor of rows."""
    mask = inputs["attention_mask"].bool()
    with torch.inference_mode():
        result = built(**inputs, output_hidden_states=True)
    assert torch.equal(result.hidden_states[-1], result.last_hidden_state)
    return torch.stack(result.hidden_states)[:, mask]


@pytest.mark.parametrize("lengths", [LENGTHS, (40, 40)], ids=["padded", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_family
def test_agrees_with_float64(isa, family, dtype, lengths) -> None:
    built, inputs = model(family, dtype), batch(lengths)
    assert one_call(built)
    actual = states(built, inputs)
    built.set_backend("reference")
    assert not one_call(built)
    oracle = states(copy.deepcopy(built).double(), inputs)
    assert_close(family, actual, oracle, Yardstick(lambda: states(built, inputs)))


@every_family
def test_the_operation_agrees_with_its_reference(family) -> None:
    built, inputs = model(family), batch()
    seen: list[tuple[Any, Any]] = []
    run = ops.encoder

    def record(*given: Any, **options: Any) -> list[Tensor]:
        seen.append((given, options))
        return run(*given, **options)

    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastbert.modules.executors.ops.encoder", record)
        built(**inputs)
    (given, options) = seen[0]
    for name in ("backend", "attention_backend", "feed_forward_backend", "layer_norm_backend"):
        options.pop(name)
    options["all_states"] = True

    def expected(dtype: torch.dtype) -> Tensor:
        hidden, parameters, *rest = given
        doubled = [p.to(dtype) for p in parameters]
        changed = options | {"dtype": dtype}
        for name in ("rotations", "positions"):
            changed[name] = [t.to(dtype) if t.is_floating_point() else t for t in options[name]]
        return torch.stack(reference.encoder(hidden.to(dtype), doubled, *rest, **changed))

    with torch.inference_mode():
        actual = torch.stack(run(*given, **options))
        yardstick = Yardstick(lambda: expected(torch.float32))
        assert_close(family, actual, expected(torch.float64), yardstick)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_family
def test_a_sequence_has_the_same_bits_alone_in_any_batch_and_on_any_threads(
    isa, threads, family, dtype
) -> None:
    built, inputs = model(family, dtype), batch()
    assert one_call(built)
    with torch.inference_mode():
        threads(1)
        together = built(**inputs).last_hidden_state
        threads(2)
        assert torch.equal(built(**inputs).last_hidden_state, together)
        for row, length in enumerate(LENGTHS):
            alone = built(inputs["input_ids"][row : row + 1, :length]).last_hidden_state
            assert torch.equal(alone[0], together[row, :length]), length


WRITES = {
    "a weight in place": lambda layer: layer.intermediate.dense.weight.mul_(1.5),
    "data of a row": lambda layer: layer.attention.self.qkv.weight.data[3].fill_(0.5),
    "a norm": lambda layer: layer.output.LayerNorm.weight.data.add_(1.0),
}


@pytest.mark.parametrize("write", WRITES)
@every_family
def test_a_write_is_seen(family, write) -> None:
    built, inputs = model(family), batch()
    before = states(built, inputs)
    with torch.no_grad():
        WRITES[write](built.encoder.layer[1])
    actual = states(built, inputs)
    assert one_call(built)
    assert not torch.equal(actual, before)
    built.set_backend("reference")
    oracle = states(copy.deepcopy(built).double(), inputs)
    assert_close(write, actual, oracle, Yardstick(lambda: states(built, inputs)))


@pytest.mark.parametrize("family", ["modernbert", "deberta-v2"])
def test_distances_over_padding_in_the_middle_run_layer_by_layer(family) -> None:
    """Packing would change the distances that a window or relative positions depend on."""
    built, inputs = model(family), batch((40, 40))
    inputs["attention_mask"][0, 10:20] = 0
    actual = states(built, inputs)
    built.set_backend("reference")
    oracle = states(copy.deepcopy(built).double(), inputs)
    assert_close("middle", actual, oracle, Yardstick(lambda: states(built, inputs)))


@every_family
def test_hidden_states_stay_in_fp32_under_autocast(family) -> None:
    built, inputs = model(family), batch()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.inference_mode():
            assert one_call(built)
        actual = states(built, inputs)
        built.set_backend("reference")
        yardstick = Yardstick(lambda: states(built, inputs))
    assert actual.dtype == torch.float32
    oracle = states(model(family).double(), inputs)
    assert_close("autocast", actual, oracle, yardstick)


HOOKED = ("", "attention.self", "attention.self.qkv", "intermediate.dense", "output.LayerNorm")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, name) for family in FAMILIES for name in HOOKED),
        *(
            (family, "attention.self.rotary")
            for family in ("modernbert", "nomic_bert", "gte", "eurobert")
        ),
    ],
)
def test_a_hook_fires(family, name) -> None:
    built, inputs, fired = model(family), batch(), []
    expected = states(built, inputs)
    part = built.encoder.layer[1].get_submodule(name)
    # A layer reads its submodules' parameters directly, but must call a submodule that has a hook.
    with part.register_forward_hook(lambda *_: fired.append(name)):
        assert "layer.1" in built.backends()["encoder"].reason
        torch.testing.assert_close(states(built, inputs), expected, rtol=1e-4, atol=1e-4)
    assert fired
    assert one_call(built)


@pytest.mark.parametrize("name", ["", ".key"])
def test_the_projections_of_positions_are_called(name) -> None:
    """The one call takes their results, so a hook on them or another class does not prevent it."""
    built, inputs, fired = model("deberta-v2 with keys of its own"), batch(), []
    expected = states(built, inputs)
    attention = built.encoder.layer[1].attention.self
    part = attention.get_submodule(f"positions{name}")
    with part.register_forward_hook(lambda *_: fired.append(name)):
        assert one_call(built)
        torch.testing.assert_close(states(built, inputs), expected)
    assert len(fired) == 1
    attention.positions.key = nn.Sequential(attention.positions.key, nn.Tanh())
    assert one_call(built)
    actual = states(built, inputs)
    assert not torch.equal(actual, expected)
    built.set_backend("reference")
    oracle = states(copy.deepcopy(built).double(), inputs)
    assert_close(name, actual, oracle, Yardstick(lambda: states(built, inputs)))


@pytest.mark.parametrize("family", ["deberta-v2", "deberta-v2 with keys of its own"])
def test_a_write_to_the_positions_is_seen(family) -> None:
    built, inputs = model(family), batch()
    before = states(built, inputs)
    with torch.no_grad():
        built.encoder.relative_positions.embeddings.weight[3:9].mul_(3.0)
    actual = states(built, inputs)
    assert one_call(built)
    assert not torch.equal(actual, before)
    built.set_backend("reference")
    oracle = states(copy.deepcopy(built).double(), inputs)
    assert_close(family, actual, oracle, Yardstick(lambda: states(built, inputs)))


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_of_pairs_beside_relative_positions(isa, kind) -> None:
    built, ids = model("deberta-v2"), batch((40, 40))["input_ids"]
    may = (torch.rand(2, 1, 40, 40) < 0.7) | torch.eye(40, dtype=torch.bool)
    with torch.inference_mode():
        if kind == "additive":
            with pytest.raises(ValueError, match=r"^attention_mask: got an additive mask"):
                built(ids, attention_mask=may * 0.5)
        given = may if kind == "bool" else torch.zeros(may.shape).masked_fill(~may, -1e30)
        actual = built(ids, attention_mask=given).last_hidden_state
        built.set_backend("reference")
        oracle = copy.deepcopy(built).double()(ids, attention_mask=may).last_hidden_state
        yardstick = Yardstick(lambda: built(ids, attention_mask=may).last_hidden_state)
        assert_close(kind, actual, oracle, yardstick)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["deberta-v2", "deberta-v2 with keys of its own"])
def test_int8_layers_with_relative_positions(isa, family, dtype) -> None:
    built, inputs = quantize(model(family, dtype)), batch()
    assert one_call(built)
    actual = states(built, inputs)
    with built.encoder.layer[0].register_forward_hook(lambda *_: None):
        assert not one_call(built)
        expected = states(built, inputs)
    assert torch.equal(actual, expected)


def test_layers_that_one_call_cannot_run() -> None:
    def reason(built: modules.BertModel) -> str:
        return built.backends()["encoder"].reason

    built = model("modernbert")
    built.encoder.layer[0].attention.self.rotary = None
    assert "differ in their norms or in rotary" in reason(built)
    built = model("nomic_bert")
    built.encoder.layer[2].attention.output.LayerNorm.bias = None
    assert "a parameter is missing" in reason(built)
    built = model("modernbert")
    built.encoder.layer[0].attention.output.LayerNorm = nn.Dropout()
    assert "layer.0.attention.output.LayerNorm is a torch.nn" in reason(built)
    built = model("deberta-v2")
    built.encoder.layer[1].attention.self.scale = 0.5
    assert "differ in their relative positions" in reason(built)
    for mode in (
        Mode.now("cuda", torch.bfloat16, gradient=False),
        Mode.now("cpu", torch.float32, gradient=True),
    ):
        planned = plan(model("deberta-v2").encoder.running(), mode)
        assert planned.run is None
        assert planned.reason == "layer by layer: attention has relative positions"
    mode = Mode.now("cuda", torch.bfloat16, gradient=False)
    assert plan(model("nomic_bert").encoder.running(), mode).run is None


def bad_calls() -> dict[str, tuple[dict[str, Any], str]]:
    cos, empty = torch.ones(4, 2), torch.empty(0)
    index, table = torch.arange(3, dtype=torch.int32), torch.randn(5, 8)
    return {
        "rotations": ({"rotations": [cos]}, r"^rotations: got 1 tensors, allowed: none, or 2"),
        "windows": ({"windows": [1]}, r"^windows: got 1 numbers, allowed: none, or one"),
        "positions": ({"positions": [cos]}, r"^positions: got 1 tensors, allowed: none, or 3"),
        "positions and windows": (
            {"positions": [cos] * 6, "windows": [1, 1]},
            r"^positions: got tensors with a bias or with windows, allowed: none",
        ),
        "a table": (
            {"positions": [index, table, table[:, :4]] * 2},
            r"^positions\[2\]: got shape \[5, 4\], allowed: \(P, 8\), or no elements",
        ),
        "no table": (
            {"positions": [index, empty, empty] * 2},
            r"^position_keys: got None, allowed: a tensor",
        ),
        "index": ({"positions": [index[1:], table, table] * 2}, r"^index: got shape \[2\]"),
        "heads": (
            {"heads": 5, "key_value_heads": 5},
            r"^heads: got 5 and 5 of keys, allowed: a div",
        ),
        # The sum of these heads of queries, keys and values overflows to 2.
        "many heads": (
            {"heads": (2**64 + 2) // 3, "key_value_heads": (2**64 + 2) // 3},
            r"^heads: got 6148914691236517206 and 6148914691236517206 of keys",
        ),
        "key_value_heads": ({"key_value_heads": 3}, r"^key_value_heads: got 3, allowed: a divisor"),
        "rms_norm": ({"rms_norm": True}, r"^rms_norm: got True without pre_norm, allowed: False"),
        "a bias of an RMS norm": (
            {"pre_norm": True, "rms_norm": True},
            r"^parameters: got a bias of a norm of shape \[8\], allowed: no elements with rms_norm",
        ),
        "inner": ({"inner_projections": 3}, r"^inner_projections: got 3, allowed: 1 or 2"),
        "activation": ({"activation": "glu"}, r"^activation: got 'glu', allowed: gelu"),
        "angles": ({"rotations": [cos[:3]] * 4}, r"^cos: got shape \[3, 2\]"),
    }


@pytest.mark.parametrize("case", bad_calls())
def test_bad_input(case) -> None:
    changes, message = bad_calls()[case]
    one = [torch.randn(*shape) for shape in ((24, 8), (24,), (8, 8), (8,), (8,), (8,))]
    one += [torch.randn(*shape) for shape in ((8, 8), (8,), (8, 8), (8,), (8,), (8,))]
    call = {"batch": 2, "heads": 2} | changes
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        ops.encoder(torch.randn(4, 8), one * 2, None, 2, **call)
    if case in ("rotations", "windows", "inner", "positions"):
        with torch.no_grad(), pytest.raises(ValueError, match=f"^{case}"):
            ops.encoder(torch.randn(4, 8), one * 2, None, 2, backend="triton", **call)
