import numpy as np
import pytest

from fastbert.data import Instance, mask_tokens
from fastbert.data.masking import mask_packed


def packed(pairs, epoch=0):
    instances = list(pairs.epoch(epoch))
    ids = np.concatenate([instance.ids for instance in instances])
    bounds = np.cumsum([0] + [len(instance.ids) for instance in instances])
    return ids, bounds


@pytest.mark.parametrize("whole_word", [False, True])
def test_shares(pairs, tokenizer, assert_binomial, whole_word):
    ids, bounds = packed(pairs)
    rng = np.random.default_rng(0)
    counts = np.zeros(5, dtype=np.int64)
    for _ in range(20):
        masked, labels = mask_packed(ids, bounds, rng, tokenizer, whole_word=whole_word)
        picked = labels != -100
        assert not (picked & tokenizer.is_special[ids]).any()
        assert np.array_equal(labels[picked], ids[picked])
        assert np.array_equal(masked[~picked], ids[~picked])
        as_mask = picked & (masked == tokenizer.mask_id)
        kept = picked & (masked == ids)
        replaced = picked & ~as_mask & ~kept
        assert not tokenizer.is_special[masked[replaced]].any()
        maskable = ~tokenizer.is_special[ids]
        counts += [maskable.sum(), picked.sum(), as_mask.sum(), replaced.sum(), kept.sum()]
    maskable, picked, as_mask, replaced, kept = counts.tolist()
    assert_binomial(as_mask, picked, 0.8)
    # In 1 of 595 draws, the random token equals the original token, which then counts as unchanged.
    same = 0.1 / len(tokenizer.ordinary_ids)
    assert_binomial(replaced, picked, 0.1 - same)
    assert_binomial(kept, picked, 0.1 + same)
    if not whole_word:
        # A pair of fewer than 7 tokens has one prediction, which is more than 15 % of its tokens.
        assert 0.15 - 0.002 < picked / maskable < 0.15 + 0.004


def test_expectation_is_exact_for_one_length(tokenizer, assert_binomial):
    ids = np.tile(np.array([tokenizer.cls_id, *range(10, 34), tokenizer.sep_id]), 5000)
    bounds = np.arange(5001) * 26
    _, labels = mask_packed(ids, bounds, np.random.default_rng(1), tokenizer)
    assert_binomial((labels != -100).sum(), 24 * 5000, 0.15)
    # Masking must choose all positions equally often.
    by_position = (labels != -100).reshape(5000, 26).sum(0)[1:-1]
    assert np.all(np.abs(by_position - 750) < 4.9 * np.sqrt(5000 * 0.15 * 0.85))


def test_at_least_one_prediction_where_one_is_possible(tokenizer):
    cls, sep, unk = tokenizer.cls_id, tokenizer.sep_id, tokenizer.unk_id
    ids = np.array([cls, 7, sep, 8, sep, cls, unk, sep, unk, sep, cls, unk, sep, 9, sep])
    rng = np.random.default_rng(0)
    for _ in range(20):
        _, labels = mask_packed(ids, np.array([0, 5, 10, 15]), rng, tokenizer)
        assert [(part != -100).sum() for part in labels.reshape(3, 5)] == [1, 0, 1]


def test_whole_words_are_predicted_together(tokenizer):
    sentence = "scarecrows quietly searched the uncommon lighthouses " * 6
    ids = np.array(tokenizer.encode(sentence))
    instance = Instance(ids, np.zeros_like(ids), False)
    starts = tokenizer.word_starts(ids)
    assert (~starts).sum() > 10
    word = np.cumsum(starts)
    rng = np.random.default_rng(0)
    several = 0
    for _ in range(50):
        _, labels = mask_tokens(instance, rng, tokenizer, whole_word=True)
        for number in np.unique(word[labels != -100]):
            assert (labels[word == number] != -100).all()
            several += (word == number).sum() > 1
    assert several > 20


def test_whole_words_do_not_reach_over_special_tokens_or_sequences(tokenizer):
    piece = next(i for i in tokenizer.ordinary_ids if not tokenizer.word_starts(np.array([i]))[0])
    # Word pieces after [SEP], after [UNK] or at the start of a sequence do not continue a word.
    ids = np.array([10, tokenizer.sep_id, piece, tokenizer.unk_id, piece, piece, piece])
    rng = np.random.default_rng(0)
    picked = set()
    for _ in range(200):
        _, labels = mask_packed(
            ids, np.array([0, 5, 7]), rng, tokenizer, probability=0.3, whole_word=True
        )
        picked.add(tuple(np.flatnonzero(labels != -100).tolist()))
    # The first sequence has three words. The second sequence is one word of two pieces, and always
    # has a prediction.
    assert picked == {(0, 5, 6), (2, 5, 6), (4, 5, 6)}


def test_all_and_nothing(tokenizer):
    ids = np.array([tokenizer.cls_id, 7, 8, tokenizer.sep_id])
    instance = Instance(ids, np.zeros_like(ids), False)
    _, labels = mask_tokens(instance, np.random.default_rng(0), tokenizer, probability=1.0)
    assert labels.tolist() == [-100, 7, 8, -100]
    for probability in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="probability: got"):
            mask_tokens(instance, np.random.default_rng(0), tokenizer, probability=probability)
    empty = np.array([], dtype=np.int64)
    masked, labels = mask_packed(empty, np.array([0]), np.random.default_rng(0), tokenizer)
    assert masked.size == labels.size == 0
