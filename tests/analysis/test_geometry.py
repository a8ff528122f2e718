"""The sense classifier, the word map and the structural probe find structures that tests insert."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import pytest
import torch
from torch.testing import assert_close

from fastbert.analysis import (
    ContextEncoder,
    Usage,
    fit_probe,
    grammar,
    nearest_centroids,
    read_usages,
    score,
    sense_accuracy,
    tree_distances,
    word_map,
    write_map,
)
from fastbert.analysis.grammar import sentences
from fastbert.analysis.occurrences import places
from fastbert.analysis.probe import edges, linear_distances
from fastbert.analysis.senses import folds_of
from fastbert.analysis.word_map import html, project


@pytest.fixture(scope="module")
def encoder(folder) -> ContextEncoder:
    return ContextEncoder(folder)


# Senses


def test_the_sentences_of_the_package_are_balanced_and_have_their_word_once():
    usages = read_usages()
    counts = Counter((usage.word, usage.sense) for usage in usages)
    assert set(counts.values()) == {12}
    assert len(counts) == 13
    assert len({usage.text for usage in usages}) == len(usages)
    for word, _, text in usages:
        assert len(re.findall(rf"\b{word}\b", text, re.IGNORECASE)) == 1, text
    assert {Counter(folds_of(usages, 4))[fold] for fold in range(4)} == {39}


def test_planted_clusters_are_found_and_their_mixture_is_not():
    torch.manual_seed(0)
    centres = torch.eye(3, 8)
    labels = [i % 3 for i in range(60)]
    names = [str(i) for i in labels]
    vectors = centres[labels] + 0.1 * torch.randn(60, 8)
    assert nearest_centroids(vectors[:30], names[:30], vectors[30:]) == names[30:]
    mixed = nearest_centroids(vectors[:30], names[:30], vectors[30:][torch.randperm(30)])
    assert mixed != names[30:]


class Planted:
    """An encoder whose second state of a word tells if the next word is ``ran``; the first is 0."""

    states = 2

    def __init__(self, encoder: ContextEncoder) -> None:
        self.split = encoder.split

    def words(self, texts):
        vectors = []
        for pieces in texts:
            rows = torch.zeros(2, len(pieces.words), 2)
            for i, word in enumerate(pieces.words[1:]):
                rows[1, i, int(word == "ran")] = 1.0
            vectors.append(rows)
        return vectors


def test_accuracy_by_layer_and_by_word(encoder, monkeypatch):
    usages = [
        Usage("dog", sense, f"The dog {verb} {place}.")
        for sense, verb in (("fast", "ran"), ("still", "slept"))
        for place in ("here", "there", "home")
    ]
    usages += [Usage("cat", "only", f"A cat ran {place}.") for place in ("out", "in", "up")]
    planted = Planted(encoder)
    monkeypatch.setattr("fastbert.analysis.senses.ContextEncoder", Planted)
    result = sense_accuracy(planted, usages, folds=3)
    assert result.by_word == {"dog": [0.5, 1.0], "cat": [1.0, 1.0]}
    # With the first layer, three of the six sentences with dog are right, and all three with cat.
    assert result.layers == [pytest.approx(2 / 3), 1.0]
    assert result.most_frequent == pytest.approx(2 / 3)
    assert (result.sentences, result.senses, result.folds) == (9, {"dog": 2, "cat": 1}, 3)


def test_a_held_out_sentence_is_not_in_its_centroid(encoder, monkeypatch):
    """All vectors differ, so a centroid that contained its own sentence would always be right."""

    class Alone(Planted):
        def words(self, texts):
            return [torch.eye(4)[i].expand(2, len(p.words), 4) for i, p in enumerate(texts)]

    monkeypatch.setattr("fastbert.analysis.senses.ContextEncoder", Alone)
    usages = [Usage("dog", s, f"The dog ran {i}.") for s in "ab" for i in range(2)]
    assert sense_accuracy(Alone(encoder), usages, folds=2).layers != [1.0, 1.0]


def test_real_vectors_of_a_word_depend_on_the_context_in_later_layers_only(encoder):
    texts = [encoder.split(text) for text in ("The dog ran home.", "The dog saw a bird. Yes")]
    a, b = (rows[:, 1] for rows in encoder.words(texts))
    assert_close(a[0], b[0])
    assert float((a[1:] - b[1:]).abs().amax(-1).min()) > 1e-3
    # A text has the same vectors alone and in a batch. The vector of a word is the mean of its
    # tokens.
    assert_close(encoder.words(texts[:1])[0], encoder.words(texts)[0])
    long = encoder.split("unbelievably")
    assert len(long.of_word(0)) > 1
    ids = torch.tensor([long.ids])
    with torch.no_grad():
        last = encoder.model(ids).last_hidden_state[0]
    assert_close(encoder.words([long])[0][-1, 0], last[long.of_word(0)].mean(0))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"word": "dog", "sense": "", "text": "A dog."}], "allowed: word, sense and text"),
        ([{"word": "dog", "text": "A dog."}], "sense"),
    ],
)
def test_broken_usages_are_refused(rows, message, tmp_path):
    path = tmp_path / "usages.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        read_usages(path)


def test_bad_arguments_of_senses_are_refused(encoder):
    two = [Usage("dog", "a", "The dog ran."), Usage("dog", "a", "A dog.")]
    with pytest.raises(ValueError, match="folds: got 3, allowed: from 2 to 2"):
        sense_accuracy(encoder, two, folds=3)
    with pytest.raises(ValueError, match=r"text: got 'A cat\.', allowed: a text with 'dog'"):
        sense_accuracy(encoder, [two[0], Usage("dog", "a", "A cat.")], folds=2)


# The map of a word


def test_the_projection_is_the_principal_components():
    torch.manual_seed(0)
    plane = torch.linalg.qr(torch.randn(6, 2)).Q
    flat = torch.randn(50, 2) * torch.tensor([5.0, 1.0])
    vectors = (flat.double() @ plane.double().T) + 3.0
    points, explained = project(vectors)
    # The projection preserves distances, and the explained shares are those of the covariance.
    exact = vectors.double()
    exact = exact - exact.mean(0)
    assert_close(points @ points.T, exact @ exact.T)
    values = torch.linalg.eigvalsh(torch.cov(exact.T)).flip(0)
    assert explained == pytest.approx((values[:2] / values.sum()).tolist(), abs=1e-6)
    assert explained[0] > explained[1]
    with pytest.raises(ValueError, match="at least two vectors"):
        project(vectors[:1])


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "one.txt").write_text("The dog ran home. A dogged man sat. The Dog & cat slept.")
    (folder / "inner" / "two.txt").write_text("Tom saw a bird. My dog is <b>good</b>.\n\nNo cat.")
    long = "the " * 50
    (folder / "three.txt").write_text(f"The {long} dog ran.")
    return folder


def test_a_map_has_each_sentence_with_the_word(encoder, texts, tmp_path):
    page_map = word_map(encoder, texts, "dog", layer=-1)
    assert [o.text for o in page_map.occurrences] == [
        "My dog is <b>good</b>.",
        "The dog ran home.",
        "The Dog & cat slept.",
    ]
    assert (page_map.layer, page_map.found, page_map.too_long) == (2, 3, 1)
    states = encoder.words([encoder.split(o.text) for o in page_map.occurrences])
    rows = torch.stack([rows[2, 1] for rows in states])
    points, explained = project(rows)
    assert_close(torch.tensor([(o.x, o.y) for o in page_map.occurrences]).double(), points)
    assert page_map.explained == pytest.approx(explained)
    write_map(page_map, tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text(encoding="utf-8")
    assert page == html(page_map)
    assert "<b>" not in page
    assert page.count("<circle") == 3
    assert page.count('tabindex="0" aria-label') == 1
    assert page.count("My dog is &lt;b&gt;good&lt;/b&gt;.") == 2  # in the label and in the table
    assert "https://" not in page


@pytest.mark.parametrize(
    ("word", "layer", "message"),
    [
        ("", -1, "word: got '', allowed: one word"),
        ("two words", -1, "word: got 'two words', allowed: one word"),
        ("bird", -1, "word: got 'bird', which 1 sentences of .* allowed: a word in at least two"),
        ("dog", 3, "layer: got 3, allowed: from -3 to 2"),
    ],
)
def test_bad_arguments_of_a_map_are_refused(encoder, texts, word, layer, message):
    with pytest.raises(ValueError, match=message):
        word_map(encoder, texts, word, layer=layer)


def test_bad_places_of_a_map_are_refused(encoder, texts, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"texts: .* does not exist"):
        word_map(encoder, tmp_path / "absent", "dog")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"allowed: a \.txt file or a folder of them"):
        word_map(encoder, tmp_path / "empty", "dog")
    with pytest.raises(ValueError, match=r"output: got .*page\.txt', allowed: a \.html file"):
        write_map(word_map(encoder, texts, "dog"), tmp_path / "page.txt")
    (tmp_path / "page.html").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        write_map(word_map(encoder, texts, "dog"), tmp_path / "page.html")


# The structural probe


def test_distances_in_a_tree_by_hand():
    # 0 ← 1 → 2 → 4, and 4 → 3
    assert tree_distances([1, -1, 1, 4, 2]).tolist() == [
        [0, 1, 2, 4, 3],
        [1, 0, 1, 3, 2],
        [2, 1, 0, 2, 1],
        [4, 3, 2, 0, 1],
        [3, 2, 1, 1, 0],
    ]


@pytest.mark.parametrize("heads", [[-1, -1], [1, 0], [-1, 2, 1], [0, -1, 5], [-1, -2], []])
def test_heads_that_are_no_tree_are_refused(heads):
    with pytest.raises(ValueError, match="heads: got"):
        tree_distances(heads)


def test_the_spanning_tree_of_tree_distances_is_the_tree():
    for tree in sentences(30, seed=4):
        wanted = {(min(i, h), max(i, h)) for i, h in enumerate(tree.heads) if h >= 0}
        assert edges(tree_distances(tree.heads)) == wanted


def test_a_planted_metric_is_recovered_among_noise():
    """The probe finds the subspace in which squared distances equal distances in the tree."""
    torch.manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(24, 24)).Q
    vectors, distances = [], []
    for tree in sentences(500, seed=1):
        count = len(tree.words)
        if count > 12:
            continue  # Edges of later words are too rare.
        # Each edge has its own dimension, so a squared distance is the number of edges on the path.
        points = torch.zeros(count, 24)
        for word in range(count):
            node = word
            while tree.heads[node] >= 0:
                points[word, node] = 1.0
                node = tree.heads[node]
        points[:, 12:] = torch.randn(count, 12)
        vectors.append(points @ rotation)
        distances.append(tree_distances(tree.heads))
    assert len(vectors) > 250
    probe = fit_probe(vectors[:200], distances[:200], rank=24, epochs=60, learning_rate=1e-2)
    with torch.no_grad():
        result = score([probe(v) for v in vectors[200:]], distances[200:])
    plain = score([torch.cdist(v, v).square() for v in vectors[200:]], distances[200:])
    linear = score([linear_distances(len(v)) for v in vectors[200:]], distances[200:])
    assert result.uuas > 0.95
    assert result.spearman > 0.95
    assert max(plain.uuas, linear.uuas) < 0.6


def test_scores_of_the_tree_itself_and_of_the_order_of_words():
    chain = [tree_distances([-1, 0, 1, 2, 3, 4])]
    assert score(chain, chain).uuas == 1.0
    assert score(chain, chain).spearman == pytest.approx(1.0)
    assert score([linear_distances(6)], chain).uuas == 1.0
    # In the star, all words depend on the first word. Only one of its five edges joins neighbouring
    # words.
    star = [tree_distances([-1, 0, 0, 0, 0, 0])]
    assert score([linear_distances(6)], star).uuas == pytest.approx(0.2)
    short = [tree_distances([-1, 0])]
    assert math.isnan(score(short, short).spearman)


def test_probe_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"allowed: \(n, H\) and \(n, n\)"):
        fit_probe([torch.zeros(3, 4)], [torch.zeros(2, 2)])


def test_generated_sentences_are_projective_and_repeat_by_their_seed():
    trees = sentences(200, seed=7)
    assert trees == sentences(200, seed=7)
    assert trees[:5] != sentences(5, seed=8)
    assert len({tuple(tree.words) for tree in trees}) == 200
    for words, heads in trees:
        assert 4 <= len(words) <= 30
        arcs = [(min(i, h), max(i, h)) for i, h in enumerate(heads) if h >= 0]
        assert not [(a, b) for a in arcs for b in arcs if a[0] < b[0] < a[1] < b[1]]


def test_the_trees_of_generated_sentences_follow_the_grammar():
    verbs = {*grammar.TRANSITIVE, *grammar.INTRANSITIVE, *grammar.SPEECH}
    nouns = {*grammar.NOUNS, *grammar.EVENTS}
    seen = set()
    for words, heads in sentences(300, seed=2):
        for i, (word, head) in enumerate(zip(words, heads, strict=True)):
            seen.add(word)
            if head < 0:
                assert word in verbs
            elif word in nouns:
                # A noun depends on a verb, or on another noun if it has a preposition such as "of".
                is_of_noun = words[head] in nouns
                cases = [words[k] for k in range(i) if heads[k] == i]
                assert is_of_noun == bool(set(cases) & set(grammar.OF_NOUN))
                assert is_of_noun or words[head] in verbs
                assert (word in grammar.EVENTS) == bool(set(cases) & set(grammar.OF_VERB))
            elif word in (*grammar.DETERMINERS, *grammar.ADJECTIVES):
                assert words[head] in nouns
                assert all(w in grammar.ADJECTIVES for w in words[i + 1 : head])
            elif word in (*grammar.OF_NOUN, *grammar.OF_VERB):
                assert head > i
                assert words[head] in nouns
            elif word in ("who", "that", *grammar.ADVERBS):
                assert head > i
                assert words[head] in verbs
            else:
                # The verb of a relative clause depends on a noun. A reported verb depends on a
                # verb.
                marks = {words[k] for k in range(i) if heads[k] == i}
                assert words[head] in (nouns if "who" in marks else grammar.SPEECH)
    assert {"who", "that", "of", "during"} <= seen


def test_a_word_is_found_in_upper_and_lower_case_as_a_whole_word(encoder):
    pieces = encoder.split("Dog and dogs and DOG")
    assert places(pieces, "dog") == [0, 4]
