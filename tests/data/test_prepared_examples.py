"""Examples and batches of a prepared corpus depend only on the seed, the epoch and their number."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastbert.data.prepared.batches import PreparedBatches
from fastbert.data.prepared.corpus import PreparedCorpus
from fastbert.data.prepared.examples import OBJECTIVES, PreparedExamples
from fastbert.data.tokenizer import truncate_pair

LENGTH = 64


@pytest.fixture(scope="session")
def make(corpus):
    def examples(**options):
        return PreparedExamples(corpus, **{"max_length": LENGTH, "seed": 5, **options})

    return examples


def segments(tokenizer, instance):
    """Return the ids between the special tokens, as one segment or as two."""
    ids = instance.ids.tolist()
    assert ids[0] == tokenizer.cls_id
    assert ids[-1] == tokenizer.sep_id
    if not instance.token_types.any():
        return [ids[1:-1]]
    middle = ids.index(tokenizer.sep_id)
    assert instance.token_types.tolist() == [0] * (middle + 1) + [1] * (len(ids) - middle - 1)
    return [ids[1:middle], ids[middle + 1 : -1]]


def place(flat, part):
    """Return whether the ids `part` are a contiguous part of the ids `flat`."""
    return f",{','.join(map(str, part))}," in f",{','.join(map(str, flat))},"


@pytest.fixture(scope="session")
def flat_documents(corpus):
    return [np.concatenate(corpus[i]).tolist() for i in range(len(corpus))]


def homes(flat_documents, part):
    return {i for i, document in enumerate(flat_documents) if place(document, part)}


def test_next_sentence_pairs_are_from_one_document_or_from_two(
    make, flat_documents, corpus, assert_binomial
):
    epoch = make().epoch(0)
    assert_binomial(int(epoch.label.sum()), len(epoch), 0.5)
    for instance in epoch[:80]:
        a, b = segments(corpus.tokenizer, instance)
        assert len(instance.ids) <= LENGTH
        assert homes(flat_documents, a)
        assert homes(flat_documents, b)
        if not instance.is_random:
            assert any(place(document, a + b) for document in flat_documents)


def test_a_shard_with_one_document_takes_random_segments_from_another(make, flat_documents, corpus):
    assert corpus.shards[-1].record.documents == 1
    epoch = make(documents=np.arange(len(corpus) - 3, len(corpus))).epoch(0)
    chosen = [
        i
        for i in range(len(epoch))
        if place(flat_documents[-1], segments(corpus.tokenizer, epoch[i])[0])
    ]
    assert len(chosen) > 20
    random = [segments(corpus.tokenizer, epoch[i])[1] for i in chosen if epoch.label[i]]
    assert len(random) > 5
    long = [part for part in random if len(part) > 20]
    assert not any(place(flat_documents[-1], part) for part in long)


def test_sentence_order_pairs_are_consecutive_in_one_of_two_orders(
    make, flat_documents, corpus, assert_binomial
):
    epoch = make(objective="sop").epoch(0)
    assert_binomial(int(epoch.label.sum()), len(epoch), 0.5)
    for instance in epoch[:80]:
        a, b = segments(corpus.tokenizer, instance)
        joined = b + a if instance.is_random else a + b
        assert any(place(document, joined) for document in flat_documents)


def test_single_segments_cover_every_token_once(make, flat_documents, corpus):
    epoch = make(objective="none").epoch(3)
    parts = [segments(corpus.tokenizer, instance) for instance in epoch]
    assert all(len(part) == 1 for part in parts)
    assert [i for (part,) in parts for i in part] == [i for flat in flat_documents for i in flat]
    assert not epoch.label.any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_examples_depend_on_seed_epoch_and_number_alone(make, corpus, objective):
    epoch = make(objective=objective).epoch(1)
    again = PreparedExamples(
        PreparedCorpus(corpus.folder), max_length=LENGTH, seed=5, objective=objective
    ).epoch(1)
    for number in reversed(range(0, len(epoch), 7)):
        assert np.array_equal(epoch[number].ids, again[number].ids)
        assert len(epoch[number].ids) == epoch.lengths[number]
    other = [make(objective=objective).epoch(2), make(objective=objective, seed=6).epoch(1)]
    for changed in other:
        same = [np.array_equal(a.ids, b.ids) for a, b in zip(epoch, changed, strict=False)]
        assert np.mean(same) < 0.5


@pytest.mark.parametrize("max_length", [5, 6, 9, 16, 300])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_examples_of_any_length_fit(make, objective, max_length):
    epoch = make(objective=objective, max_length=max_length, short=0.5).epoch(0)
    least = 5 if objective != "none" else 3
    assert epoch.lengths.min() >= least
    assert epoch.lengths.max() <= max_length
    for instance in epoch[:50]:
        assert least <= len(instance.ids) <= max_length


def test_pairs_are_cut_as_by_truncate_pair():
    from fastbert.data.prepared.plan import _cut

    a, b = (x.ravel() for x in np.meshgrid(np.arange(1, 30), np.arange(1, 30)))
    for room in (2, 3, 10, 11, 40):
        spans = _cut(100 - a, np.full_like(a, 100), np.full_like(b, 200), 200 + b, room).astype(int)
        expected = [truncate_pair(int(i), int(j), room) for i, j in zip(a, b, strict=True)]
        cuts = zip(100 - spans[:, 0], spans[:, 3] - 200, strict=True)
        assert [tuple(map(int, pair)) for pair in cuts] == expected
        assert (spans[:, 1] == 100).all()
        assert (spans[:, 2] == 200).all()


def contents(epoch, indices, workers=0):
    """Return ids, types and labels of the examples in the batches `indices`, by example number."""
    results = {}
    loader = DataLoader(epoch, batch_size=None, sampler=indices, num_workers=workers)
    for index, batch in zip(indices, loader, strict=True):
        bounds = batch["cu_seqlens"].tolist()
        for row, example in enumerate(epoch.chosen(index).tolist()):
            assert example not in results
            part = slice(bounds[row], bounds[row + 1])
            results[example] = tuple(
                tuple(batch[name][part].tolist())
                for name in ("input_ids", "token_type_ids", "labels")
            )
    return results


def test_ranks_and_workers_together_make_one_epoch_with_the_same_masks(make):
    examples = make()
    whole = None
    for ranks in (1, 2, 3, 7):
        results = {}
        for rank in range(ranks):
            # Every rank has its own objects, as if it ran in its own process.
            epoch = PreparedBatches(make(), tokens_per_batch=512, batches_per_step=ranks).epoch(4)
            assert len(epoch) % ranks == 0
            workers = 2 if (ranks, rank) == (2, 1) else 0
            own = contents(epoch, range(rank, len(epoch), ranks), workers)
            assert not own.keys() & results.keys()
            results |= own
        assert sorted(results) == list(range(len(examples.epoch(4))))
        whole = whole or results
        assert results == whole


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_keep_the_budget_and_are_balanced_between_ranks(make, ranks, packed):
    batches = PreparedBatches(make(), tokens_per_batch=500, batches_per_step=ranks, packed=packed)
    epoch = batches.epoch(0)
    sizes = [batch["input_ids"].numel() for batch in epoch]
    assert max(sizes) <= 500
    if packed:
        steps = np.array(sizes).reshape(-1, ranks)
        assert (np.ptp(steps[:-1], axis=1) < LENGTH).all()
        assert steps[:-1].min() > 500 - LENGTH
    else:
        assert all(batch["attention_mask"].any(1).all() for batch in epoch)


def test_masks_follow_the_examples_and_change_with_the_epoch(make, corpus):
    epochs = [PreparedBatches(make(), tokens_per_batch=500).epoch(i) for i in (0, 1)]
    share = []
    for batch in epochs[0]:
        predicted = batch["labels"] != -100
        assert not corpus.tokenizer.is_special[batch["labels"][predicted].numpy()].any()
        share.append(predicted.float().mean().item())
    assert 0.12 < np.mean(share) < 0.15
    assert not torch.equal(epochs[0][0]["input_ids"], epochs[1][0]["input_ids"])


def test_whole_words_are_predicted_together(make, corpus):
    epoch = PreparedBatches(make(), tokens_per_batch=500, whole_word=True).epoch(0)
    pieces = 0
    for batch in epoch[:20]:
        labels = batch["labels"].numpy()
        original = np.where(labels == -100, batch["input_ids"].numpy(), labels)
        continues = ~corpus.tokenizer.word_starts(original)
        pieces += continues.sum()
        inside = np.flatnonzero(continues[1:])
        predicted = labels != -100
        assert (predicted[inside] == predicted[inside + 1]).all()
    assert pieces > 50


def test_batches_without_pairs_have_no_label(make):
    batch = PreparedBatches(make(objective="none"), tokens_per_batch=500).epoch(0)[0]
    assert "next_sentence_label" not in batch
    assert not batch["token_type_ids"].any()


def test_fewer_examples_than_batches_of_a_step_are_refused(make, corpus):
    examples = make(documents=np.array([0, 1]), max_length=300)
    epoch = PreparedBatches(examples, tokens_per_batch=600, batches_per_step=2).epoch(0)
    assert len(epoch) == 2
    with pytest.raises(
        ValueError, match="corpus: 2 examples for 3 batches per step, allowed: at least"
    ):
        PreparedBatches(examples, tokens_per_batch=600, batches_per_step=3).epoch(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 4}, "max_length: got 4"),
        ({"seed": -1}, "seed: got -1"),
        ({"objective": "mlm"}, "objective: got 'mlm', allowed: nsp, sop, none"),
        ({"short": 2}, "short: got 2"),
        ({"documents": np.array([3])}, "documents: got 1, allowed: at least 2"),
        ({"documents": np.array([]), "objective": "none"}, "documents: got 0"),
    ],
)
def test_bad_options_are_named(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
