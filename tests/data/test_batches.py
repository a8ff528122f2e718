import time

import numpy as np
import pytest
import torch

from fastbert.data import NextSentencePairs, PretrainingBatches

BUDGET = 512


def make(pairs, packed, seed=0, **options):
    return PretrainingBatches(
        pairs, pairs.tokenizer, tokens_per_batch=BUDGET, seed=seed, packed=packed, **options
    )


def originals(batch):
    """Return the rows of a packed or padded batch: (ids before masking, token types, label)."""
    ids = torch.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"])
    types, random = batch["token_type_ids"], batch["next_sentence_label"].tolist()
    if "cu_seqlens" in batch:
        sizes = batch["cu_seqlens"].diff().tolist()
        rows = zip(ids.split(sizes), types.split(sizes), strict=True)
    else:
        keep = batch["attention_mask"].bool()
        rows = ((i[k], t[k]) for i, t, k in zip(ids, types, keep, strict=True))
    return [
        (tuple(i.tolist()), tuple(t.tolist()), r) for (i, t), r in zip(rows, random, strict=True)
    ]


def test_padded_and_packed_hold_each_pair_once(pairs):
    expected = sorted(
        (tuple(i.ids.tolist()), tuple(i.token_types.tolist()), int(i.is_random))
        for i in pairs.epoch(1)
    )
    for packed in (False, True):
        rows = [row for batch in make(pairs, packed).epoch(1) for row in originals(batch)]
        assert sorted(rows) == expected


def test_padded_form(pairs, tokenizer):
    epoch = make(pairs, packed=False).epoch(0)
    tokens = padded = 0
    for batch in epoch:
        shape = batch["input_ids"].shape
        assert shape.numel() <= BUDGET
        assert set(batch) == {
            "input_ids",
            "attention_mask",
            "token_type_ids",
            "labels",
            "next_sentence_label",
        }
        for name in ("input_ids", "attention_mask", "token_type_ids", "labels"):
            assert batch[name].shape == shape
            assert batch[name].dtype == torch.int64
        assert batch["next_sentence_label"].shape == shape[:1]
        absent = batch["attention_mask"] == 0
        assert (batch["input_ids"][absent] == tokenizer.pad_id).all()
        assert (batch["labels"][absent] == -100).all()
        assert (batch["token_type_ids"][absent] == 0).all()
        assert batch["attention_mask"].sum(1).max() == shape[1]
        tokens += int(batch["attention_mask"].sum())
        padded += shape.numel()
    assert tokens / padded > 0.9


def test_packed_form(pairs):
    epoch = make(pairs, packed=True).epoch(0)
    fill = []
    for batch in epoch:
        total = len(batch["input_ids"])
        assert total <= BUDGET
        assert batch["token_type_ids"].shape == batch["labels"].shape == (total,)
        bounds = batch["cu_seqlens"]
        assert bounds.dtype == torch.int32
        assert bounds[0] == 0
        assert bounds[-1] == total
        assert isinstance(batch["max_seqlen"], int)
        assert batch["max_seqlen"] == bounds.diff().max()
        assert batch["next_sentence_label"].shape == (len(bounds) - 1,)
        fill.append(total)
    assert np.mean(fill[:-1]) > 0.85 * BUDGET


@pytest.mark.parametrize("packed", [False, True])
def test_deterministic_resumable_and_fresh(pairs, documents, tokenizer, packed):
    first = make(pairs, packed).epoch(0)
    again = make(NextSentencePairs(documents, tokenizer, max_length=96, seed=5), packed).epoch(0)
    assert len(first) == len(again)
    # The order of access must not matter, because a batch depends only on its index.
    for index in (len(first) - 1, 0, 3):
        for name, value in first[index].items():
            assert (
                torch.equal(value, again[index][name])
                if torch.is_tensor(value)
                else value == again[index][name]
            )
    assert torch.equal(first[-1]["labels"], first[len(first) - 1]["labels"])
    with pytest.raises(IndexError):
        first[-len(first) - 1]
    for other in (make(pairs, packed).epoch(1), make(pairs, packed, seed=1).epoch(0)):
        assert originals(first[0]) != originals(other[0])


def test_masks_are_fresh_for_the_same_text(tokenizer):
    corpus = [["the boat sank in the bay.", "the crew swam home."]] * 2
    pairs = NextSentencePairs(corpus, tokenizer, max_length=64, seed=0, short=0.0)
    source = PretrainingBatches(pairs, tokenizer, tokens_per_batch=64, seed=0)
    seen = {tuple(source.epoch(k)[0]["labels"].tolist()) for k in range(20)}
    assert len(seen) > 10


def test_works_as_a_dataset_of_a_data_loader(pairs):
    epoch = make(pairs, packed=True).epoch(0)
    loader = torch.utils.data.DataLoader(epoch, batch_size=None, shuffle=False)
    for expected, batch in zip(epoch[:3], loader, strict=False):
        assert torch.equal(batch["input_ids"], expected["input_ids"])
        assert batch["max_seqlen"] == expected["max_seqlen"]


def test_whole_word_reaches_the_masks(pairs, tokenizer):
    for batch in make(pairs, packed=True, whole_word=True).epoch(0)[:5]:
        truth = torch.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"]).numpy()
        word = np.cumsum(tokenizer.word_starts(truth))
        picked = batch["labels"].numpy() >= 0
        assert np.isin(word, word[picked])[~picked].sum() == 0


def test_budget_below_one_sequence(pairs, tokenizer):
    message = r"tokens_per_batch: got 95, allowed: at least the pairs' max_length \(96\)"
    with pytest.raises(ValueError, match=message):
        PretrainingBatches(pairs, tokenizer, tokens_per_batch=95, seed=0)
    for batch in PretrainingBatches(pairs, tokenizer, tokens_per_batch=96, seed=0).epoch(0):
        assert len(batch["input_ids"]) <= 96


def test_bad_options(pairs):
    with pytest.raises(ValueError, match="seed: got -1"):
        make(pairs, packed=True, seed=-1)
    with pytest.raises(ValueError, match="probability: got 0"):
        make(pairs, packed=True, probability=0.0)


def test_fast_enough_to_feed_training(pairs):
    epoch = make(pairs, packed=True).epoch(0)
    begin, tokens = time.process_time(), 0
    for batch in epoch:
        tokens += batch["input_ids"].numel()
    # The bound is low: with larger batches, several million tokens per second were measured.
    assert tokens / (time.process_time() - begin) > 200_000
