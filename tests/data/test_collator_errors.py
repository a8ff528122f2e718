"""The error of a packed collator names the column, the example and the allowed values."""

from __future__ import annotations

import pytest

from fastbert.data import (
    PackedCollatorForBiEncoder,
    PackedCollatorForMaskedLM,
    PackedCollatorForPreTraining,
    PackedCollatorForSequenceClassification,
    PackedCollatorForTokenClassification,
)

GOOD = {"input_ids": [5, 6, 7], "token_type_ids": [0, 0, 1]}
SEQUENCES = PackedCollatorForSequenceClassification
TOKENS = PackedCollatorForTokenClassification


@pytest.mark.parametrize(
    ("collator", "feature", "message"),
    [
        (SEQUENCES, [5, 6], "features: got list as example 1, allowed: a mapping"),
        (
            SEQUENCES,
            {"ids": [5], "token_type_ids": [0]},
            r"input_ids of example 1: got nothing among the columns \(ids, token_type_ids\), allow",
        ),
        (SEQUENCES, {"input_ids": [5]}, "token_type_ids of example 1: got nothing, allowed: a col"),
        (
            SEQUENCES,
            GOOD | {"token_type_ids": [0, 0]},
            "token_type_ids of example 1: got 2 values, allowed: 3, as many as input_ids",
        ),
        (
            SEQUENCES,
            GOOD | {"token_type_ids": [[0], [0, 1]]},
            "token_type_ids of example 1: got lists of different lengths, allowed: numbers",
        ),
        (
            SEQUENCES,
            GOOD | {"input_ids": [[5, 6, 7]]},
            r"input_ids of example 1: got int64 of shape \(1, 3\), allowed: integers of shape \(le",
        ),
        (SEQUENCES, GOOD | {"input_ids": [5.0]}, "input_ids of example 1: got float64 of shape"),
        (SEQUENCES, GOOD | {"input_ids": "abc"}, "input_ids of example 1: got str of <U3, allowed"),
        (SEQUENCES, GOOD | {"input_ids": [5, -6, 7]}, "input_ids of example 1: got -6, allowed: 0"),
        (
            SEQUENCES,
            {"input_ids": [], "token_type_ids": []},
            "input_ids of example 1: got no tokens, allowed: at least one",
        ),
        (
            SEQUENCES,
            GOOD | {"attention_mask": [0, 0, 0]},
            "input_ids of example 1: got no tokens, allowed: at least one",
        ),
        (
            SEQUENCES,
            GOOD | {"attention_mask": [1, 2, 0]},
            "attention_mask of example 1: got a value of 2, allowed: 0 and 1",
        ),
        (
            SEQUENCES,
            GOOD | {"attention_mask": [1, 1]},
            r"attention_mask of example 1: got shape \(2,\), allowed: \(3,\), as input_ids",
        ),
        (
            lambda: SEQUENCES(max_length=3),
            {"input_ids": [1] * 4, "token_type_ids": [0] * 4},
            "input_ids of example 1: got 4 tokens, allowed: at most max_length = 3",
        ),
        (
            TOKENS,
            GOOD,
            "labels of example 1: got nothing, allowed: a column in every example, as e",
        ),
        (
            TOKENS,
            GOOD | {"labels": [1, 2]},
            "labels of example 1: got 2 values, allowed: 3, as many as input_ids",
        ),
        (
            TOKENS,
            GOOD | {"labels": 1},
            r"labels of example 1: got int64 of shape \(\), allowed: in",
        ),
        (
            TOKENS,
            GOOD | {"labels": [1, 1, 1], "label": 1},
            "labels: got the columns labels, label, allowed: one of them",
        ),
    ],
)
def test_a_wrong_feature_is_named(collator, feature, message) -> None:
    first = GOOD | ({"labels": [0, 1, 2]} if collator is TOKENS else {})
    with pytest.raises(ValueError, match=f"^{message}"):
        collator()([first, feature])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, None], "labels of example 1: got nothing, allowed: a column in every example"),
        ([1, "b"], "labels of example 1: got str of <U1, allowed: numbers"),
        ([1, [1.0, 0.0]], r"labels of example 1: got shape \(2,\), allowed: \(\), as example 0"),
        ([[0, 1], [1, 0]], r"labels of example 0: got int64 of shape \(2,\), allowed: an integer,"),
        ([[[0.5]], 1], r"labels of example 0: got float64 of shape \(1, 1\), allowed: an integer"),
    ],
)
def test_a_wrong_label_of_a_sequence_is_named(labels, message) -> None:
    features = [GOOD | {"labels": label} for label in labels]
    with pytest.raises(ValueError, match=f"^{message}"):
        SEQUENCES()(features)


@pytest.mark.parametrize(
    ("prefixes", "feature", "message"),
    [
        (None, {"input_ids": None}, "input_ids of example 1: got nothing, allowed: a list of the"),
        (None, {"input_ids": 5}, "input_ids of example 1: got 5, allowed: a list of the ids of ea"),
        (None, {"input_ids": [[5]]}, "input_ids of example 1: got 1 texts, allowed: 2 texts, as e"),
        (None, {"input_ids": [5, 6]}, "input_ids of example 1, text 0: got int64 of shape"),
        (
            None,
            {"input_ids": [[5], [6, 7]], "attention_mask": [[1], [1, 3]]},
            "attention_mask of example 1, text 1: got a value of 3",
        ),
        (
            None,
            {"input_ids": [[5], [6]], "attention_mask": 1},
            "attention_mask of example 1: got 1, allowed: 2 texts",
        ),
        (("a", "b"), {"a_input_ids": [5]}, "b_input_ids of example 1: got nothing among the colum"),
        (
            ("a", "b"),
            {"a_input_ids": [5], "b_input_ids": [6], "b_attention_mask": [1, 1]},
            r"b_attention_mask of example 1: got shape \(2,\), allowed: \(1,\), as b_input_ids",
        ),
    ],
)
def test_a_wrong_text_of_a_bi_encoder_is_named(prefixes, feature, message) -> None:
    first = {"input_ids": [[1], [2]], "a_input_ids": [1], "b_input_ids": [2]}
    with pytest.raises(ValueError, match=f"^{message}"):
        PackedCollatorForBiEncoder(prefixes=prefixes)([first, feature])


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, r"next_sentence_label of example 1: got nothing among the columns \(input_ids, tok"),
        (2, "next_sentence_label of example 1: got 2, allowed: 0, 1 or -100"),
        ([0], r"next_sentence_label of example 1: got int64 of shape \(1,\), allowed: an integer"),
    ],
)
def test_a_wrong_next_sentence_label_is_named(tokenizer, label, message) -> None:
    features = [GOOD | {"next_sentence_label": 1}, GOOD | {"next_sentence_label": label}]
    with pytest.raises(ValueError, match=f"^{message}"):
        PackedCollatorForPreTraining(tokenizer)(features)


def test_ids_beyond_the_vocabulary_are_named(tokenizer) -> None:
    size = tokenizer.vocab_size
    features = [{"input_ids": [7]}, {"input_ids": [8, size]}]
    message = f"input_ids of example 1: got {size}, allowed: less than {size}, the size"
    with pytest.raises(ValueError, match=f"^{message}"):
        PackedCollatorForMaskedLM(tokenizer)(features)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SEQUENCES, {"layout": "padded"}, "layout: got 'padded', allowed: fastbert, transformers"),
        (SEQUENCES, {"max_length": 0}, "max_length: got 0, allowed: at least 1, or None"),
        (SEQUENCES, {"position_ids_start": 2}, "position_ids_start: got 2 with layout='fastbert',"),
        (
            SEQUENCES,
            {"position_ids_start": -1, "layout": "transformers"},
            "position_ids_start: got -1 with layout='transformers', allowed: 0, or more",
        ),
        (PackedCollatorForBiEncoder, {"prefixes": "ab"}, "prefixes: got 'ab', allowed: a sequence"),
        (PackedCollatorForBiEncoder, {"prefixes": []}, r"prefixes: got \[\], allowed: a sequence"),
        (
            PackedCollatorForMaskedLM,
            {"tokenizer": 3},
            "tokenizer: got int without a mask token, al",
        ),
    ],
)
def test_wrong_options_are_named(kind, options, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(**options)


@pytest.mark.parametrize("probability", [0.0, 1.5, float("nan")])
def test_a_wrong_probability_is_named(tokenizer, probability) -> None:
    with pytest.raises(ValueError, match=f"^probability: got {probability}, allowed: a number in"):
        PackedCollatorForMaskedLM(tokenizer, probability=probability)


@pytest.mark.parametrize("kind", [SEQUENCES, TOKENS, PackedCollatorForBiEncoder])
def test_an_empty_batch_is_refused(kind) -> None:
    with pytest.raises(ValueError, match=r"^features: got an empty batch, allowed: at least one"):
        kind()([])
