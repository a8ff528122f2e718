"""A corpus that is generated from a seed: short stories whose sentences are connected.

A story keeps its world, its two characters, its object and its places from the first sentence to
the last, and its plot goes from cause to effect. A model can therefore infer both a masked word and
the label of a next-sentence pair.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from fastbert.data.story_worlds import (
    BOYS,
    FEELINGS,
    GIRLS,
    QUALITIES,
    TIMES,
    WORLDS,
    WORRIES,
)

# A plot is a sequence of beats. A beat is a tuple of wordings, of which a story uses one.
Plot = tuple[tuple[str, ...], ...]

_OPENING = (
    (
        "{time} {hero} the {role} walked to the {place}.",
        "{time} the {role} {hero} came to the {place}.",
        "{time} there was a {role} called {hero} at the {place}.",
    ),
    ("near the {place} {sight}.", "{hero} saw that {sight}.", "around the {role} {sight}."),
    (
        "{hero} {act} with {his} friend {friend}.",
        "{his} friend {friend} was there too, and they {act}.",
        "the {role} and {friend} {act} together.",
    ),
)

_MIDDLES: tuple[Plot, ...] = (
    # Something is lost, looked for, and found.
    (
        ("{hero} carried a {quality} {thing} and a {tool}.", "the {role} had a {quality} {thing}."),
        (
            "then {he} dropped the {thing} near the {other}.",
            "but at the {other} {he} lost the {quality} {thing}.",
        ),
        (
            "{hero} looked for the {thing} and was very {worry}.",
            "without the {thing} the {role} was {worry}.",
        ),
        (
            "{friend} left the {place} to look for the {thing}.",
            "so {friend} offered to search the {other}.",
        ),
        (
            "they searched the {other} with a {tool}.",
            "{friend} took a {tool} and went to the {other}.",
        ),
        (
            "a {animal} was sitting beside the {quality} {thing}.",
            "at the {other} a {animal} was playing with the {thing}.",
        ),
        (
            "the {animal} gave the {thing} back for some {food}.",
            "{friend} gave the {animal} some {food} and took the {thing}.",
        ),
    ),
    # Something breaks and is mended.
    (
        (
            "{friend} showed the {role} a {quality} {thing}.",
            "in the {other} {friend} had a {quality} {thing}.",
        ),
        (
            "suddenly a {animal} ran over the {thing} and broke it.",
            "but a {animal} from the {other} broke the {thing}.",
        ),
        (
            "{friend} was {worry} because of the {thing}.",
            "{friend} chased the {animal} and was {worry}.",
        ),
        (
            "the {role} knew how to mend the {quality} {thing}.",
            "{hero} promised to mend the {thing} with a {tool}.",
        ),
        ("{he} fetched a {tool} from the {other}.", "{he} ran to the {other} for a {tool}."),
        (
            "with the {tool} the {role} mended the {thing}.",
            "{he} used the {tool} until the {thing} was whole.",
        ),
        (
            "{friend} thanked the {role} for the {thing}.",
            "{friend} took the {thing} to the {place} and smiled.",
        ),
    ),
    # An animal is in trouble and is saved.
    (
        ("{hero} heard a {animal} near the {other}.", "from the {other} they heard a {animal}."),
        (
            "the {animal} in the {other} was {worry} and could not move.",
            "the poor {animal} was caught behind a {quality} {thing}.",
        ),
        (
            "{friend} wanted to help the {animal} with a {tool}.",
            "the {role} told {friend} to wait for the {animal}.",
        ),
        (
            "{hero} lifted the {quality} {thing} with a {tool}.",
            "{he} moved the {thing} with a {tool}.",
        ),
        (
            "then {friend} fed the {animal} with {food}.",
            "{friend} brought {food} for the {animal}.",
        ),
        (
            "the {animal} ate the {food} beside the {thing}.",
            "after the {food} the {animal} felt better.",
        ),
        (
            "the {animal} followed the {role} to the {place}.",
            "at last the {animal} ran to the {place}.",
        ),
    ),
    # Someone wins the prize of a contest.
    (
        (
            "the prize of the contest was a {quality} {thing}.",
            "the best {role} would win a {quality} {thing}.",
        ),
        (
            "the {role} wanted the {thing} more than anything.",
            "{hero} and {friend} both wanted the {thing}.",
        ),
        (
            "they had to race from the {place} to the {other}.",
            "the race went from the {place} to the {other}.",
        ),
        (
            "{friend} was faster, but a {animal} stopped {fhim}.",
            "near the {other} a {animal} got in the way of {friend}.",
        ),
        (
            "the {role} chased the {animal} away with a {tool}.",
            "{hero} took a {tool} and helped {friend} past the {animal}.",
        ),
        (
            "they reached the {other} at the same time.",
            "the {role} and {friend} came to the {other} together.",
        ),
        (
            "so they shared the {quality} {thing} between them.",
            "at the {other} {hero} and {friend} won the {thing}.",
        ),
    ),
    # Something is made as a present.
    (
        (
            "{friend} had a birthday, so the {role} planned a surprise.",
            "the {role} wanted to make a present for {friend}.",
        ),
        (
            "{he} found a {quality} {thing} at the {other}.",
            "at the {other} {he} bought a {quality} {thing}.",
        ),
        ("{he} cleaned the {thing} with a {tool}.", "with a {tool} {he} made the {thing} pretty."),
        (
            "a {animal} watched the {role} and wanted the {thing}.",
            "a {animal} came to the {other} and sniffed at the {thing}.",
        ),
        (
            "{hero} hid the {thing} from the {animal}.",
            "{he} gave {food} to the {animal} instead.",
        ),
        (
            "then the {role} took the {thing} to {friend}.",
            "in the {place} {he} handed the {quality} {thing} to {friend}.",
        ),
        (
            "{friend} loved the {quality} {thing}.",
            "in the {place} {friend} smiled at the {thing}.",
        ),
    ),
)

_CLOSING = (
    ("later they {act2}.", "after that the {role} {act2}.", "then {friend} {act2}."),
    (
        "for dinner they had {food} in the {place}.",
        "{hero} and {friend} shared {food} with the {animal}.",
        "{friend} brought {food} to the {place}.",
    ),
    (
        "the {role} was {feeling} about the {thing}.",
        "in the end {hero} and {friend} left the {place} and were {feeling}.",
        "the {thing} made {hero} and {friend} {feeling}.",
    ),
)
# Each beat of the opening and of the closing is missing in this share of the stories, except the
# first beat of the opening, which is in every story.
_SKIPPED = 0.1


def _cast(rng: random.Random) -> dict[str, str]:
    """Draw the words of one story: things of its world, two characters and their pronouns."""
    world = rng.choice(WORLDS)
    place, other = rng.sample(world.places, 2)
    act, act2 = rng.sample(world.actions, 2)
    is_girl, is_girl_too = rng.random() < 0.5, rng.random() < 0.5
    hero = rng.choice(GIRLS if is_girl else BOYS)
    friend = rng.choice([n for n in (GIRLS if is_girl_too else BOYS) if n != hero])
    he, his, him = ("she", "her", "her") if is_girl else ("he", "his", "him")
    fhim = "her" if is_girl_too else "him"
    return {
        "place": place,
        "other": other,
        "act": act,
        "act2": act2,
        "thing": rng.choice(world.things),
        "tool": rng.choice(world.tools),
        "role": rng.choice(world.roles),
        "animal": rng.choice(world.animals),
        "food": rng.choice(world.foods),
        "sight": rng.choice(world.sights),
        "quality": rng.choice(QUALITIES),
        "feeling": rng.choice(FEELINGS),
        "worry": rng.choice(WORRIES),
        "time": rng.choice(TIMES),
        "hero": hero,
        "he": he,
        "his": his,
        "him": him,
        "friend": friend,
        "fhim": fhim,
    }


def _tell(wording: str, cast: dict[str, str]) -> str:
    words = wording.format(**cast).split()
    for i in range(len(words) - 1):
        if words[i] == "a" and words[i + 1][0] in "aeiou":
            words[i] = "an"
    sentence = " ".join(words)
    return sentence[0].upper() + sentence[1:]


def _story(rng: random.Random) -> list[str]:
    cast = _cast(rng)
    opening = (_OPENING[0], *(beat for beat in _OPENING[1:] if rng.random() >= _SKIPPED))
    closing = tuple(beat for beat in _CLOSING if rng.random() >= _SKIPPED)
    beats = (*opening, *rng.choice(_MIDDLES), *closing)
    return [_tell(rng.choice(beat), cast) for beat in beats]


def stories(num_documents: int, seed: int) -> Iterator[list[str]]:
    """Generate short stories of 8 to 13 sentences; a story is a list of sentences.

    Story ``i`` depends only on `seed` and ``i``. A larger `num_documents` therefore only adds
    stories at the end.

    Args:
        num_documents: Number of stories; at least 0.
        seed: Seed of the stories.

    Returns:
        Iterator over the stories.

    Raises:
        ValueError: If `num_documents` is negative.

    Examples:
        >>> from fastbert.data import stories
        >>> story = next(stories(1, seed=0))
        >>> 8 <= len(story) <= 13
        True
    """
    if num_documents < 0:
        raise ValueError(f"num_documents: got {num_documents}, allowed: at least 0")
    # Python hashes a string seed with SHA-512, so the stories are the same on every machine and
    # Python version.
    return (_story(random.Random(f"stories/{seed}/{i}")) for i in range(num_documents))
