"""The model accepts padding on any side, masks of any rank, packed input, and positions."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_pair import BATCH, LENGTH, Judge, Pair, batch, batches, pair

from fastbert.testing.compare import assert_close

RIGHT = torch.arange(LENGTH) < torch.tensor([[LENGTH], [1], [11], [6]])
LEFT = RIGHT.flip(1)
MIDDLE = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.5
FULL = torch.ones(BATCH, LENGTH, dtype=torch.bool)
MASKS = {"right": RIGHT, "left": LEFT, "middle": MIDDLE, "full": FULL}


@pytest.fixture(scope="module")
def models() -> Pair:
    return pair("BertModel")


@pytest.mark.parametrize("side", MASKS)
def test_padding_anywhere(models: Pair, side: str) -> None:
    mask = MASKS[side]
    more = {"output_hidden_states": True, "output_attentions": True}
    judge = Judge(models, batches(attention_mask=mask.long(), **more))
    judge.agree("last_hidden_state", "hidden_states", select=lambda x: x[mask])
    judge.agree("attentions", select=lambda x: x.transpose(1, 2)[mask])
    assert not judge.actual[0].last_hidden_state[~mask].any()
    for weights in judge.actual[0].attentions:
        seen = mask[:, None, :, None] & mask[:, None, None, :]
        assert weights.shape == (BATCH, 3, LENGTH, LENGTH)
        assert not weights.masked_fill(seen, 0.0).any()


@pytest.mark.parametrize("side", MASKS)
def test_the_pooled_token_is_the_first_that_exists(models: Pair, side: str) -> None:
    mask = MASKS[side]
    judge = Judge(models, batches(attention_mask=mask.long()))
    first = mask.int().argmax(dim=1)

    def pooled(model: Any, outs: list[Any]) -> Tensor:
        rows = [out.last_hidden_state[torch.arange(BATCH), first] for out in outs]
        return torch.stack([model.pooler(row.unsqueeze(1)) for row in rows])

    actual = torch.stack([out.pooler_output for out in judge.actual])
    yardstick = judge.yardstick.map(lambda outs: pooled(models.yardstick, outs))
    assert_close("pooler_output", actual, pooled(models.oracle, judge.oracle), yardstick)
    if side in ("right", "full"):
        judge.agree("pooler_output")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_mask_dtypes(models: Pair, dtype: torch.dtype) -> None:
    expected = models.ours(**batch(), attention_mask=RIGHT).last_hidden_state
    got = models.ours(**batch(), attention_mask=RIGHT.to(dtype)).last_hidden_state
    assert torch.equal(got, expected)


def additive(mask: Tensor, lowest: float) -> Tensor:
    return torch.where(mask, 0.0, lowest)


def test_dense_masks_of_every_kind_agree(models: Pair) -> None:
    seen = RIGHT[:, None, :].expand(BATCH, LENGTH, LENGTH)
    kinds = [seen, seen.long(), seen[:, None], seen[:, None].expand(-1, 3, -1, -1)]
    kinds += [RIGHT[:, None, None, :]]
    lowest = torch.finfo(torch.float32).min
    kinds += [additive(seen, low) for low in (-math.inf, -1e4, lowest, lowest / 2)]
    results = [models.ours(**batch(), attention_mask=kind).last_hidden_state for kind in kinds]
    for result in results[1:]:
        assert torch.equal(result, results[0])
    padded = models.ours(**batch(), attention_mask=RIGHT).last_hidden_state
    torch.testing.assert_close(results[0][RIGHT], padded[RIGHT])


def test_a_dense_mask_against_transformers(models: Pair) -> None:
    seen = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    mask = additive(seen, torch.finfo(torch.float32).min)
    judge = Judge(models, batches(attention_mask=mask, output_attentions=True))
    judge.agree("last_hidden_state", "pooler_output", "attentions")


def test_an_additive_mask_is_a_bias(models: Pair) -> None:
    bias = torch.randn(BATCH, 3, LENGTH, LENGTH)
    judge = Judge(models, batches(attention_mask=bias))
    judge.agree("last_hidden_state", "pooler_output")


def test_given_positions_and_embeddings(models: Pair) -> None:
    positions = {"position_ids": torch.randint(0, 40, (BATCH, LENGTH))}
    one_row = {"position_ids": torch.arange(LENGTH).flip(0).unsqueeze(0)}
    embeds = [{"inputs_embeds": torch.randn(BATCH, LENGTH, 48)} for _ in range(4)]
    for draws in (
        batches(**positions),
        batches(**one_row),
        embeds,
        [draw | positions for draw in embeds],
    ):
        judge = Judge(models, [draw | {"attention_mask": RIGHT.long()} for draw in draws])
        judge.agree("last_hidden_state", select=lambda x: x[RIGHT])
        judge.agree("pooler_output")


def packed(mask: Tensor, **padded: Tensor) -> dict[str, Tensor]:
    cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    return {**{name: x[mask] for name, x in padded.items()}, "cu_seqlens": cu_seqlens}


def test_packed_input_equals_padded_input() -> None:
    model = pair("BertForPreTraining").ours
    inputs = batch()
    labels = torch.randint(0, 211, (BATCH, LENGTH))
    options = {
        "next_sentence_label": torch.tensor([0, 1, 1, 0]),
        "output_hidden_states": True,
        "output_attentions": True,
    }
    padded = model(**inputs, attention_mask=RIGHT, labels=labels, **options)
    rows = packed(RIGHT, **inputs, labels=labels)
    for max_seqlen in (LENGTH, None):
        got = model(**rows, max_seqlen=max_seqlen, **options)
        assert got.prediction_logits.shape == (int(RIGHT.sum()), 211)
        assert torch.equal(got.prediction_logits, padded.prediction_logits[RIGHT])
        assert torch.equal(got.seq_relationship_logits, padded.seq_relationship_logits)
        assert torch.equal(got.loss, padded.loss)
        for ours, stock in zip(got.hidden_states, padded.hidden_states, strict=True):
            assert torch.equal(ours, stock[RIGHT])
        for ours, stock in zip(got.attentions, padded.attentions, strict=True):
            assert torch.equal(ours, stock)


def test_packed_gradients_equal_padded_gradients() -> None:
    model = pair("BertForMaskedLM").ours.train()
    labels = torch.randint(0, 211, (BATCH, LENGTH))
    other = copy.deepcopy(model)
    model(**batch(), attention_mask=RIGHT, labels=labels).loss.backward()
    other(**packed(RIGHT, **batch(), labels=labels), max_seqlen=LENGTH).loss.backward()
    for (name, ours), stock in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, stock.grad), name


def test_dropout_is_the_same_packed_and_padded() -> None:
    model = pair("BertModel", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3).ours
    model.train()
    torch.manual_seed(5)
    padded = model(**batch(), attention_mask=RIGHT).last_hidden_state
    torch.manual_seed(5)
    rows = model(**packed(RIGHT, **batch()), max_seqlen=LENGTH).last_hidden_state
    assert torch.equal(rows, padded[RIGHT])


def test_slack_behind_packed_tokens_is_not_seen(models: Pair) -> None:
    rows = packed(RIGHT, **batch())
    expected = models.ours(**rows)
    slack = {name: torch.cat([x, torch.ones(5).long()]) for name, x in rows.items() if x.dim() == 1}
    slack["cu_seqlens"] = rows["cu_seqlens"]
    got = models.ours(**slack)
    assert torch.equal(got.last_hidden_state[:-5], expected.last_hidden_state)
    assert torch.equal(got.pooler_output, expected.pooler_output)


def test_packed_answers(models: Pair) -> None:
    model = pair("BertForQuestionAnswering").ours
    padded = model(**batch(), attention_mask=RIGHT)
    rows = model(**packed(RIGHT, **batch()), max_seqlen=LENGTH)
    assert torch.equal(rows.start_logits, padded.start_logits)


def test_a_sequence_without_tokens(models: Pair) -> None:
    mask = RIGHT.clone()
    mask[[0, 3]] = False
    inputs = {**batch(), "output_attentions": True}
    for emptied in (mask, torch.zeros_like(mask)):
        out = models.ours(**inputs, attention_mask=emptied)
        assert not out.last_hidden_state[~emptied].any()
        empty_bias = torch.tanh(models.ours.pooler.dense.bias)
        torch.testing.assert_close(out.pooler_output[0], empty_bias)
        torch.testing.assert_close(out.pooler_output[3], empty_bias)
    expected = models.ours(**inputs, attention_mask=RIGHT).last_hidden_state
    got = models.ours(**inputs, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(got[1:3], expected[1:3])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_empty_batches(shape: tuple[int, int], masked: bool) -> None:
    model = pair("BertForPreTraining").ours
    ids = torch.zeros(shape, dtype=torch.long)
    out = model(
        ids,
        torch.ones_like(ids) if masked else None,
        labels=ids,
        next_sentence_label=torch.zeros(shape[0], dtype=torch.long),
        output_attentions=True,
        output_hidden_states=True,
    )
    assert out.prediction_logits.shape == (*shape, 211)
    assert out.hidden_states[-1].shape == (*shape, 48)
    assert out.mlm_loss.item() == 0.0
    out.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_poisoned_padding_changes_nothing(models: Pair) -> None:
    inputs = batch()
    expected = models.ours(**inputs, attention_mask=RIGHT)
    embeds = models.ours.get_input_embeddings()(inputs["input_ids"]).detach()
    poisoned = embeds.masked_fill(~RIGHT.unsqueeze(-1), math.nan)
    got = models.ours(
        inputs_embeds=poisoned, token_type_ids=inputs["token_type_ids"], attention_mask=RIGHT
    )
    clean = models.ours(
        inputs_embeds=embeds, token_type_ids=inputs["token_type_ids"], attention_mask=RIGHT
    )
    assert torch.equal(got.last_hidden_state, clean.last_hidden_state)
    torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state)


def test_results_do_not_depend_on_the_padding_around(models: Pair) -> None:
    inputs = batch()
    together = models.ours(**inputs, attention_mask=RIGHT).last_hidden_state
    alone = models.ours(**{name: x[2:3, :11] for name, x in inputs.items()}).last_hidden_state
    torch.testing.assert_close(together[2, :11], alone[0])
