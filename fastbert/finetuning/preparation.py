"""The examples and token sequences of a run, read from the files of the data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastbert.data.model_tokenizer import ModelTokenizer
from fastbert.finetuning.options import FinetuneOptions
from fastbert.finetuning.splits import find_parts, hold_out
from fastbert.finetuning.task import Example, Feature, Task

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Part:
    """A part of the data.

    Attributes:
        examples: The examples of the part.
        features: Sequences of the examples; the entry ``"example"`` is the index of the example.
    """

    examples: list[Example]
    features: list[Feature]


def read_parts(
    task: Task, options: FinetuneOptions, say: Callable[[str], None]
) -> dict[str, list[Example]]:
    """Read the examples of all parts, and hold out a validation part if there is none.

    Args:
        task: The task, which learns from the training part.
        options: The options of the run.
        say: Function that shows a line of text to the user.

    Returns:
        The examples by the name of the part, in the order of ``PARTS``.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If the data are not usable. The message names the file and the line.
    """
    paths = find_parts(Path(options.data), options.parts(), task.formats, folders=task.folders)
    parts: dict[str, list[Example]] = {}
    for name in (name for name in PARTS if name in paths):
        reason = task.unlabelled(paths[name][0]) if name == "test" else None
        if reason is not None:
            say(f"test part: it is not judged, because it has no labels: {reason}")
            continue
        parts[name] = [example for path in paths[name] for example in task.read(path)]
        if name == "train":
            task.learn(parts["train"])
    if "validation" not in parts:
        parts["train"], held = hold_out(parts["train"], options.held_out, options.seed, task.group)
        if held:
            parts = {"train": parts["train"], "validation": held, **parts}
    weights = task.weigh(parts["train"])
    counts = ", ".join(f"{len(examples):,} {name}" for name, examples in parts.items())
    say(f"examples: {counts}")
    if weights is not None:
        say(weights)
    return parts


def encode(task: Task, examples: Sequence[Example], tokenizer: ModelTokenizer) -> list[Feature]:
    """Encode examples as sequences.

    Args:
        task: The task, which encodes each example.
        examples: The examples, as the method `read` of the task returns them.
        tokenizer: The tokenizer of the model.

    Returns:
        The sequences in the order of the examples.

    Raises:
        ValueError: If a label is unknown. The message names the file and the line.
    """
    return [
        {**feature, "example": index}
        for index, example in enumerate(examples)
        for feature in task.features(example, tokenizer)
    ]


def fingerprint(parts: Mapping[str, Sequence[Example]]) -> str:
    """Return the SHA-256 of all examples, without the file and line of each example."""
    digest = hashlib.sha256()
    for name, examples in parts.items():
        digest.update(f"{name} {len(examples)}\n".encode())
        for example in examples:
            digest.update(json.dumps(example[1:]).encode() + b"\n")
    return digest.hexdigest()
