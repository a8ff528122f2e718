"""Permutation language modelling: the order of prediction, and a model that learns from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastbert.data.permutation import permute
from fastbert.modules.xlnet import XLNetConfig, XLNetLMHeadModel

MASK = 4


def batch(length=24, seed=0, **options):
    rng = np.random.default_rng(seed)
    ids = rng.integers(10, 90, (5, length))
    may = np.ones(ids.shape, dtype=bool)
    may[:, 0] = may[3, 15:] = False
    return ids, may, permute(ids, may, rng, MASK, **options)


def test_the_arguments_belong_together():
    ids, may, made = batch()
    for row in range(len(ids)):
        places = (made.input_ids[row] != ids[row]).nonzero()[0]
        assert may[row, places].all()
        assert (made.input_ids[row, places] == MASK).all()
        assert (made.labels[row, : len(places)] == ids[row, places]).all()
        assert (made.labels[row, len(places) :] == -100).all()
        assert (made.target_mapping[row].argmax(1)[: len(places)] == places).all()
        assert made.target_mapping[row].sum() == len(places)
        hidden = made.perm_mask[row] > 0
        # Everybody sees the tokens that are not predicted, and those see no predicted token.
        others = np.setdiff1d(np.arange(ids.shape[1]), places)
        assert not hidden[:, others].any()
        assert hidden[np.ix_(others, places)].all()
        # The predicted tokens have an order: each sees exactly the ones before it.
        seen = (~hidden[np.ix_(places, places)]).sum(1)
        assert sorted(seen) == list(range(len(places)))


def test_the_share_and_the_spans():
    counts, longest = [], 0
    for seed in range(40):
        ids, _, made = batch(seed=seed, length=120, probability=0.25, longest_span=3)
        predicted = made.input_ids != ids
        counts.append(predicted[:3].mean())
        for row in predicted:
            runs = np.diff(np.flatnonzero(np.diff(np.r_[0, row.astype(int), 0])))[::2]
            longest = max(longest, *runs, 0)
    assert 0.2 < np.mean(counts) < 0.3
    assert 3 <= longest <= 6  # The spans of two contexts may touch.


def test_bad_arguments_and_no_predictions():
    ids = np.zeros((2, 6), dtype=np.int64)
    rng = np.random.default_rng(0)
    made = permute(ids, np.zeros(ids.shape, dtype=bool), rng, MASK)
    assert (made.labels == -100).all()
    assert not made.perm_mask.any()
    for name, given in (
        ("may_predict", (ids, np.ones((2, 5), dtype=bool), {})),
        ("probability", (ids, ids == 0, {"probability": 0.0})),
        ("longest_span", (ids, ids == 0, {"longest_span": 0})),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: got .*allowed"):
            permute(given[0], given[1], rng, MASK, **given[2])


def test_a_model_learns_to_predict():
    torch.manual_seed(0)
    config = XLNetConfig(
        vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64, dropout=0.0, mem_len=None
    )
    model = XLNetLMHeadModel(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rng, losses = np.random.default_rng(1), []
    for _ in range(60):
        # Token i + 1 follows token i, so that each token tells its neighbours.
        ids = (rng.integers(10, 40, (8, 1)) + np.arange(16)) % 90 + 5
        made = permute(ids, np.ones(ids.shape, dtype=bool), rng, MASK)
        given = {name: torch.from_numpy(value) for name, value in made._asdict().items()}
        loss = model(**given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:5]), losses
