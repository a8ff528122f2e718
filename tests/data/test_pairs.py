import numpy as np
import pytest

from fastbert.data import NextSentencePairs


def same(first, second):
    return len(first) == len(second) and all(
        np.array_equal(a.ids, b.ids) and a.is_random == b.is_random
        for a, b in zip(first, second, strict=True)
    )


def test_form_of_a_pair(pairs, tokenizer):
    epoch = pairs.epoch(0)
    for instance, length in zip(epoch, epoch.lengths, strict=True):
        ids = instance.ids.tolist()
        assert len(ids) == len(instance.token_types) == length <= 96
        assert ids[0] == tokenizer.cls_id
        assert ids[-1] == tokenizer.sep_id
        assert ids.count(tokenizer.sep_id) == 2
        middle = ids.index(tokenizer.sep_id)
        assert 1 < middle < len(ids) - 2
        assert instance.token_types.tolist() == [0] * (middle + 1) + [1] * (length - middle - 1)


def test_halves_come_from_one_document_or_from_two(pairs, documents, tokenizer):
    texts = [" ".join(document).lower() for document in documents]
    epoch = pairs.epoch(1)
    for instance in epoch[:100]:
        middle = instance.ids.tolist().index(tokenizer.sep_id)
        first = tokenizer.decode(instance.ids[:middle])
        second = tokenizer.decode(instance.ids[middle:])
        homes = {i for i, text in enumerate(texts) if first in text}
        assert homes
        assert any(second in text for text in texts)
        # Short sentences may occur in several stories, so only pairs of true neighbours are
        # checked.
        if not instance.is_random:
            assert any(f"{first} {second}" in texts[i] for i in homes)
        elif len(first) > 80 and len(second) > 80:
            assert not any(second in texts[i] for i in homes)


def test_half_of_the_pairs_are_random(pairs, assert_binomial):
    labels = np.concatenate([pairs.epoch(k).is_random for k in range(30)])
    assert_binomial(labels.sum(), len(labels), 0.5)


def test_shapes_do_not_give_the_label_away(pairs, tokenizer):
    stop = tokenizer.token_to_id(".")
    lengths, whole = {False: [], True: []}, {False: [], True: []}
    for k in range(10):
        for instance in pairs.epoch(k):
            lengths[instance.is_random].append(len(instance.ids))
            whole[instance.is_random].append(instance.ids[-2] == stop)
    assert np.mean(lengths[False]) == pytest.approx(np.mean(lengths[True]), rel=0.05)
    assert np.mean(whole[False]) == pytest.approx(np.mean(whole[True]), abs=0.02)


def test_deterministic_and_fresh(pairs, documents, tokenizer):
    again = NextSentencePairs(iter(documents), tokenizer, max_length=96, seed=5)
    other = NextSentencePairs(documents, tokenizer, max_length=96, seed=6)
    assert same(pairs.epoch(2), again.epoch(2))
    assert not same(pairs.epoch(2), pairs.epoch(3))
    assert not same(pairs.epoch(2), other.epoch(2))


def test_sequences_are_filled_but_for_a_share_of_short_ones(documents, tokenizer):
    long_document = [sentence for document in documents[:40] for sentence in document]
    corpus = [long_document, [s for document in documents[40:80] for s in document]]
    filled = NextSentencePairs(corpus, tokenizer, max_length=96, seed=0, short=0.0)
    true_pairs = [i for i in filled.epoch(0) if not i.is_random]
    assert np.mean([len(i.ids) for i in true_pairs]) > 85
    short = NextSentencePairs(corpus, tokenizer, max_length=96, seed=0, short=1.0)
    assert 20 < short.epoch(0).lengths.mean() < 70


def test_every_sentence_of_a_longer_document_is_used(tokenizer):
    document = [f"the {word} came home ." for word in ("cow", "goat", "hen", "fox", "owl")]
    source = NextSentencePairs([document, ["a b.", "c d."]], tokenizer, max_length=24, seed=0)
    for k in range(20):
        epoch = source.epoch(k)
        assert len(epoch) >= 2
        if epoch.is_random.any():
            continue
        text = " ".join(tokenizer.decode(instance.ids) for instance in epoch)
        assert all(word in text for word in ("cow", "goat", "hen", "fox", "owl"))


def test_single_sentences_serve_as_random_halves_only(tokenizer):
    corpus = [["the boat sank.", "the crew swam."], ["the lonely moon."]]
    source = NextSentencePairs(corpus, tokenizer, max_length=32, seed=0)
    seen = set()
    for k in range(40):
        (instance,) = source.epoch(k)
        seen.add((instance.is_random, tokenizer.decode(instance.ids)))
    assert seen == {
        (False, "the boat sank. the crew swam."),
        (True, "the boat sank. the lonely moon."),
    }


def test_long_sentences_are_cut_where_the_halves_do_not_meet(tokenizer):
    # A single letter is one token in every vocabulary.
    first = " ".join(["a"] * 17 + ["b"])
    second = " ".join(["c"] + ["d"] * 19)
    source = NextSentencePairs([[first, second], ["e.", "f."]], tokenizer, max_length=23, seed=0)
    checked = 0
    for k in range(20):
        instance = source.epoch(k)[0]
        assert len(instance.ids) <= 23
        if not instance.is_random:
            text = tokenizer.decode(instance.ids, skip_special_tokens=False)
            assert " b [SEP] c " in text
            assert len(instance.ids) == 23
            checked += 1
    assert checked


def test_a_sentence_longer_than_the_room_counts_as_several(tokenizer):
    corpus = [[" ".join(["a"] * 101)], ["b b.", "c c."]]
    source = NextSentencePairs(corpus, tokenizer, max_length=23, seed=0, short=0.0)
    for k in range(20):
        *parts, last = source.epoch(k)
        assert not last.is_random or "a a" in tokenizer.decode(last.ids)
        # The sentence has 11 parts of 9 or 10 tokens. The first ten parts make five pairs, and the
        # last two parts make a sixth pair.
        assert len(parts) == 6
        assert all(len(part.ids) in (21, 22, 23) for part in parts if not part.is_random)


def test_smallest_length(documents, tokenizer):
    source = NextSentencePairs(documents[:20], tokenizer, max_length=5, seed=0)
    assert set(source.epoch(0).lengths.tolist()) == {5}
    with pytest.raises(ValueError, match="max_length: got 4, allowed: at least 5"):
        NextSentencePairs(documents, tokenizer, max_length=4, seed=0)


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ([], "documents: got 0 with text, allowed: at least 2"),
        ([["One.", "Two."]], "documents: got 1 with text"),
        ([["One.", "Two."], ["\u200b", ""], []], "documents: got 1 with text"),
        ([["One."], ["Two."], ["Three."]], "each of the 3 is a single sentence"),
    ],
)
def test_hostile_corpora(tokenizer, corpus, message):
    with pytest.raises(ValueError, match=message):
        NextSentencePairs(corpus, tokenizer, max_length=32, seed=0)


def test_bad_share(documents, tokenizer):
    with pytest.raises(ValueError, match=r"short: got 1\.5"):
        NextSentencePairs(documents, tokenizer, max_length=32, seed=0, short=1.5)
