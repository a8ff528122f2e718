"""The worlds of the built-in stories, with their places, things, people and actions.

A story is set in one world. Two parts of a story therefore share words that stories of other worlds
lack.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The words of one world.

    Actions are phrases in the past tense, and sights are whole clauses. All other words are nouns
    without an article.
    """

    places: tuple[str, ...]
    things: tuple[str, ...]
    tools: tuple[str, ...]
    roles: tuple[str, ...]
    animals: tuple[str, ...]
    foods: tuple[str, ...]
    sights: tuple[str, ...]
    actions: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _world(
    places: str,
    things: str,
    tools: str,
    roles: str,
    animals: str,
    foods: str,
    sights: str,
    acts: str,
) -> World:
    fields = (places, things, tools, roles, animals, foods, sights, acts)
    return World(*map(_words, fields))


WORLDS = (
    _world(
        "harbour, beach, lighthouse",
        "shell, anchor, compass, pearl",
        "net, oar",
        "sailor, fisher",
        "seal, gull",
        "fish soup, salted shrimp",
        "the waves rolled over the rocks, the tide filled the bay",
        "rowed the boat across the bay, dived under the waves, sailed around the island",
    ),
    _world(
        "barn, meadow, orchard",
        "bucket, saddle, scarecrow, plough",
        "rake, pitchfork",
        "farmer, shepherd",
        "cow, goat",
        "fresh milk, apple pie",
        "the wheat was golden in the fields, the sheep grazed behind the fence",
        "fed the hens in the yard, picked apples from the trees, carried hay to the horses",
    ),
    _world(
        "kitchen, bakery, pantry",
        "kettle, spoon, recipe, jar",
        "knife, ladle",
        "cook, baker",
        "mouse, parrot",
        "warm bread, onion stew",
        "the pots steamed on the stove, the flour covered the dough",
        "stirred the sugar and butter, chopped carrots for the stew, kneaded the dough",
    ),
    _world(
        "classroom, library, playground",
        "notebook, pencil, map, medal",
        "ruler, chalk",
        "teacher, pupil",
        "hamster, turtle",
        "cheese sandwiches, cold lemonade",
        "the bell rang for the lesson, the blackboard was full of numbers",
        "read a poem to the class, solved the hardest sum, studied for the spelling test",
    ),
    _world(
        "forest, clearing, cave",
        "acorn, feather, lantern, mushroom",
        "axe, torch",
        "hunter, ranger",
        "fox, owl",
        "wild berries, roasted chestnuts",
        "the moss was soft under the oaks, the leaves rustled in the branches",
        "followed the tracks between the oaks, gathered wood for the fire, "
        "jumped over the fallen branches",
    ),
    _world(
        "spaceship, moon, crater",
        "helmet, crystal, radio, rocket",
        "laser, wrench",
        "pilot, astronaut",
        "robot, alien",
        "dried noodles, orange paste",
        "the stars glittered around the planet, the comet left a silver trail",
        "floated above the control desk, steered past the comet, counted the planets and stars",
    ),
    _world(
        "mountain, slope, cabin",
        "sledge, scarf, mitten, trophy",
        "ski, pickaxe",
        "skier, climber",
        "husky, reindeer",
        "hot chocolate, cinnamon rolls",
        "the snow sparkled on the peaks, the icicles hung in the frost",
        "skied down the icy hill, skated across the frozen lake, built a wall of snow",
    ),
    _world(
        "castle, tower, dungeon",
        "crown, sword, scroll, shield",
        "spear, hammer",
        "knight, wizard",
        "dragon, unicorn",
        "roast goose, royal pudding",
        "the banners flew over the gate, the guards marched along the moat",
        "rode through the gate, guarded the bridge all night, bowed before the king",
    ),
)

GIRLS = _words(
    "Anna, Bella, Clara, Daisy, Emma, Fiona, Grace, Hannah, "
    "Ivy, Julia, Lily, Maria, Nora, Olive, Polly, Rosa"
)
BOYS = _words(
    "Adam, Ben, Carl, David, Eric, Frank, George, Henry, "
    "Ivan, Jack, Leo, Martin, Noah, Oscar, Peter, Tom"
)
QUALITIES = _words(
    "red, blue, green, yellow, white, black, old, new, small, large, heavy, shiny, broken"
)
FEELINGS = _words("happy, proud, glad, pleased, cheerful")
WORRIES = _words("sad, worried, angry, nervous, upset")
TIMES = _words(
    "one morning, one evening, last Monday, last Sunday, in the spring, in the autumn, long ago, "
    "early on Friday"
)
