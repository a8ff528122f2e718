"""Generated English sentences with known dependency trees, for the structural probe.

The trees follow from the rules that make the sentences, so no parser and no treebank is needed.
Each preposition attaches either to nouns or to verbs, so that the words of a sentence decide its
tree. Real text is more complex, so results on these sentences say less than results on real text.
"""

from __future__ import annotations

import random
from typing import NamedTuple

DETERMINERS = ("the", "a", "this", "every", "her", "our")
ADJECTIVES = ("old", "young", "quiet", "famous", "small", "clever", "angry", "honest", "tall")
NOUNS = """
    teacher doctor farmer painter lawyer student pilot singer soldier writer baker nurse judge
    child neighbour driver dancer guard king friend cousin poet tailor sailor
""".split()  # noqa: SIM905
TRANSITIVE = """
    saw helped followed praised called visited met admired blamed trusted warned greeted invited
    thanked watched heard
""".split()  # noqa: SIM905
INTRANSITIVE = ("slept", "laughed", "arrived", "waited", "smiled", "worked", "vanished", "sang")
SPEECH = ("said", "thought", "believed", "claimed", "knew", "feared")
ADVERBS = ("often", "quickly", "quietly", "rarely", "gladly", "suddenly")
# A phrase with a preposition of OF_NOUN depends on the preceding noun, and a phrase with a
# preposition of OF_VERB depends on the verb.
OF_NOUN = ("of", "from")
OF_VERB = ("during", "after", "before", "despite")
EVENTS = ("war", "lesson", "storm", "dinner", "trial", "party", "winter", "concert", "election")
DEEPEST = 2


class Tree(NamedTuple):
    """A sentence with its dependency tree.

    Attributes:
        words: The words of the sentence.
        heads: Index of the head of each word; -1 for the root.
    """

    words: list[str]
    heads: list[int]


def sentences(count: int, *, seed: int) -> list[Tree]:
    """Generate sentences of 4 to 30 words, of which no two are equal.

    Args:
        count: Number of sentences.
        seed: Seed of the sentences.

    Returns:
        The sentences with their trees.

    Examples:
        >>> from fastbert.analysis.grammar import sentences
        >>> tree = sentences(1, seed=0)[0]
        >>> len(tree.words) == len(tree.heads), tree.heads.count(-1)
        (True, 1)
    """
    rng = random.Random(seed)
    trees: dict[tuple[str, ...], Tree] = {}
    while len(trees) < count:
        writer = _Writer(rng)
        writer.clause(0)
        if 4 <= len(writer.words) <= 30:
            trees[tuple(writer.words)] = Tree(writer.words, writer.heads)
    return list(trees.values())


class _Writer:
    """A writer of one sentence from left to right.

    Each method that writes a word or a phrase returns the index of its head in the sentence.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.words: list[str] = []
        self.heads: list[int] = []

    def word(self, choices: tuple[str, ...] | list[str]) -> int:
        self.words.append(self.rng.choice(choices))
        self.heads.append(-1)
        return len(self.words) - 1

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def clause(self, depth: int) -> int:
        """Write a subject, sometimes an adverb, and a predicate; return the index of the verb."""
        subject = self.noun_phrase(depth)
        adverb = self.word(ADVERBS) if self.chance(0.25) else None
        verb = self.predicate(depth)
        for part in (subject, adverb):
            if part is not None:
                self.heads[part] = verb
        return verb

    def predicate(self, depth: int) -> int:
        kind = self.rng.random()
        if kind < 0.25 and depth < DEEPEST:
            verb = self.word(SPEECH)
            mark = self.word(("that",))
            inner = self.clause(depth + 1)
            self.heads[mark], self.heads[inner] = inner, verb
            return verb
        if kind < 0.75:
            verb = self.word(TRANSITIVE)
            self.heads[self.noun_phrase(depth)] = verb
        else:
            verb = self.word(INTRANSITIVE)
        if self.chance(0.35):
            case = self.word(OF_VERB)
            event = self.simple(EVENTS)
            self.heads[case], self.heads[event] = event, verb
        return verb

    def simple(self, nouns: tuple[str, ...] | list[str]) -> int:
        """Write a determiner, adjectives and a noun; return the index of the noun."""
        before = [self.word(DETERMINERS)]
        while len(before) < 3 and self.chance(0.3):
            before.append(self.word(ADJECTIVES))
        noun = self.word(nouns)
        for part in before:
            self.heads[part] = noun
        return noun

    def noun_phrase(self, depth: int) -> int:
        noun = self.simple(NOUNS)
        if depth >= DEEPEST:
            return noun
        kind = self.rng.random()
        if kind < 0.2:
            case = self.word(OF_NOUN)
            inner = self.noun_phrase(depth + 1)
            self.heads[case], self.heads[inner] = inner, noun
        elif kind < 0.4:
            mark = self.word(("who",))
            verb = self.word(TRANSITIVE)
            self.heads[self.noun_phrase(depth + 1)] = verb
            self.heads[mark], self.heads[verb] = verb, noun
        return noun
