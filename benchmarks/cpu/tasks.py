"""The tasks of users, each by all implementations in turns: encode, rerank, train, read, translate.

Each implementation does the whole task in its own process (``jobs.py``): with the tokenizer, the
batches and the pooling of sentence-transformers. The results of the first calls are compared with
those of stock fp32, which is the library without fastbert.
"""

from __future__ import annotations

import importlib.util
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.batches import ROTATED
from benchmarks.cpu.contest import (
    CLOSE,
    LEFT_OUT,
    TOO_LONG_S,
    CpuRow,
    Setting,
    compare,
    first_calls,
    judge,
    take_turns,
)
from benchmarks.cpu.encoder import SCALES, export, prepare, slow_bf16
from benchmarks.cpu.exactness import fields
from benchmarks.cpu.remote import Failed, Remote
from benchmarks.cpu.runtimes import (
    BF16,
    BY_NAME,
    CROSS_ENCODER,
    FP32,
    INT8,
    MARIAN,
    VOCABULARY,
    Runtime,
)
from fastbert.bench.contest import line, ratio
from fastbert.bench.encoder import MINILM
from fastbert.bench.limits import INFERENCE, TRAINING, Target, Work
from fastbert.bench.quantized_accuracy import real_sentences, token_ids
from fastbert.flops import flops_of_layers

STOCK = "transformers sdpa fp32"
# The reranker made from the published MiniLM reads at most this number of tokens of a pair.
MOST_OF_PAIR = 512
# The loss multiplies the similarity of two embeddings by this number.
SCALE = 20
# Sizes of ModernBERT-base, of whose layers every third attends to all tokens. A token of the other
# layers attends to at most WINDOW tokens.
LAYERS, GLOBAL, WIDTH, INNER, WINDOW = 22, 8, 768, 1152, 129
# Sizes of the published Marian models.
MARIAN_LAYERS, MARIAN_WIDTH, MARIAN_INNER = 6, 512, 2048
DOCUMENTS = ((1, 128), (8, 128), (8, 512), (1, 2048), (1, 8192))


# The smallest accepted share of targets in fp32 with the tokens of stock fp32.
SAME_TARGETS = 0.8


@dataclass(frozen=True)
class Match:
    """A piece of work.

    Attributes:
        label: Label of the rows.
        work: Arguments of the task's function in ``jobs.py``.
        amount: Amount of work in the unit of the task.
        lengths: Number of tokens of each sequence.
        flops: FLOPs of the matrix products of the layers on real tokens.
    """

    label: str
    work: dict[str, Any]
    amount: int
    lengths: list[int]
    flops: float


def joined(sentences: Sequence[str], words: int, generator: random.Random) -> str:
    """Return a text of this number of words, joined from randomly drawn sentences."""
    found: list[str] = []
    while len(found) < words:
        found += generator.choice(sentences).split()
    return " ".join(found[:words])


def mixed(sentences: Sequence[str], count: int, generator: random.Random) -> list[str]:
    """Return texts of 3 to 183 words, whose lengths have a log-normal distribution."""
    return [
        joined(sentences, int(min(180, generator.lognormvariate(3.3, 0.9)) + 3), generator)
        for _ in range(count)
    ]


def pairs(count: int) -> list[list[str]]:
    """Return pairs of a real sentence and a passage, which begins with the next real sentence."""
    sentences = real_sentences(2 * count)
    passages = mixed(sentences, count, random.Random(0))
    heads = zip(sentences[::2], sentences[1::2], passages, strict=True)
    return [[query, f"{following} {passage}"] for query, following, passage in heads]


def lengths_of(texts: list[str]) -> list[int]:
    return [len(ids) for ids in token_ids(texts)]


def texts_to_encode(quick: bool) -> list[Match]:
    count = 24 if quick else 1000
    sentences, generator = real_sentences(count), random.Random(0)
    some = sentences[:: max(1, count // 50)][:50]
    spreads = {
        f"{count} sentences": sentences,
        f"{count // 2} texts of 3 to 183 words": mixed(sentences, count // 2, generator),
        f"{len(some)} sentences one by one": some,
    }
    return [
        Match(
            label,
            {"texts": texts, "one_by_one": "one by one" in label},
            len(texts),
            lengths := lengths_of(texts),
            flops_of_layers(MINILM, lengths),
        )
        for label, texts in spreads.items()
    ]


def pairs_to_score(quick: bool) -> list[Match]:
    matches = []
    for count in (4,) if quick else (32, 128):
        drawn = pairs(count)
        queries, passages = (lengths_of(list(texts)) for texts in zip(*drawn, strict=True))
        # A pair has one [CLS], and a [SEP] after the query and after the passage.
        lengths = [
            min(MOST_OF_PAIR, query + passage - 1)
            for query, passage in zip(queries, passages, strict=True)
        ]
        flops = flops_of_layers(MINILM, lengths)
        matches.append(Match(f"{count} pairs", {"pairs": drawn}, count, lengths, flops))
    return matches


def pairs_to_learn(quick: bool) -> list[Match]:
    count = 4 if quick else 32
    drawn = pairs(count * ROTATED)
    batches = [drawn[start : start + count] for start in range(0, len(drawn), count)]
    lengths = lengths_of([text for pair in batches[0] for text in pair])
    return [
        Match(
            f"{count} pairs {'with' if dropout else 'without'} dropout",
            {"batches": batches, "dropout": dropout},
            count,
            lengths,
            3 * flops_of_layers(MINILM, lengths),
        )
        for dropout in (False, True)
    ]


def documents_to_read(quick: bool) -> list[Match]:
    layers = 2 if quick else LAYERS
    return [
        Match(
            f"ModernBERT-base {batch}×{length}",
            {"batch": batch, "length": length, "layers": layers},
            batch * length,
            [length] * batch,
            flops_of_modernbert(batch * length, length) * layers / LAYERS,
        )
        for batch, length in (((1, 24), (2, 16)) if quick else DOCUMENTS)
    ]


def flops_of_modernbert(tokens: int, length: int) -> float:
    """Return the FLOPs of the products of ModernBERT-base; its feed-forward has three of them."""
    linear = LAYERS * 2 * tokens * (4 * WIDTH**2 + 3 * WIDTH * INNER)
    attended = GLOBAL * length + (LAYERS - GLOBAL) * min(length, WINDOW)
    return float(linear + 4 * WIDTH * tokens * attended)


def sources_to_translate(quick: bool) -> list[Match]:
    """Return batches of 1 and 16 sources of 8 to 40 tokens, for greedy search and four beams."""
    generator, matches = random.Random(0), []
    steps = 3 if quick else 32
    for count in (1, 16):
        lengths = [generator.randint(7, 39) + 1 for _ in range(count)]
        sources = [
            [generator.randrange(2, VOCABULARY - 1) for _ in range(length - 1)] + [0]
            for length in lengths
        ]
        for beams in (1, 4):
            rows = count * beams
            searched = "greedy" if beams == 1 else f"{beams} beams"
            matches.append(
                Match(
                    f"Marian, {count} source{'s' * (count > 1)}, {searched}",
                    {"sources": sources, "steps": steps, "beams": beams},
                    count * steps,
                    lengths,
                    flops_of_marian(sum(lengths), rows * steps),
                )
            )
    return matches


def flops_of_marian(source: int, target: int) -> float:
    """Return the FLOPs of the linear layers of Marian for numbers of tokens of both sides."""
    # Cross-attention projects queries and outputs on one side, and keys and values on the other.
    layer = 6 * MARIAN_WIDTH**2 + 2 * MARIAN_WIDTH * MARIAN_INNER
    layers = MARIAN_LAYERS * layer * (source + target)
    return float(2 * (layers + target * MARIAN_WIDTH * VOCABULARY))


@dataclass(frozen=True)
class Task:
    """A task: the unit of its rate, its implementations, its model's layers, and its matches."""

    unit: str
    engines: tuple[str, ...]
    layers: int
    matches: Callable[[bool], list[Match]]
    needs: str = "sentence_transformers"


STOCKS = ("transformers sdpa fp32", "transformers sdpa bf16")
OURS = ("fastbert bf16", "fastbert fp32")
TASKS = {
    "encode": Task(
        "texts/s",
        (*OURS, "fastbert int8", *STOCKS, "OpenVINO fp32", "OpenVINO bf16", "OpenVINO int8",
         "ONNX Runtime fp32", "ONNX Runtime int8"),
        MINILM.num_hidden_layers,
        texts_to_encode,
    ),
    "rerank": Task(
        "pairs/s", (*OURS, "fastbert int8", *STOCKS), MINILM.num_hidden_layers, pairs_to_score
    ),
    "embedder": Task(
        "pairs/s",
        ("fastbert bf16 autocast", "fastbert fp32", *STOCKS),
        MINILM.num_hidden_layers,
        pairs_to_learn,
    ),
    "documents": Task("tokens/s", (*OURS, *STOCKS), LAYERS, documents_to_read, "transformers"),
    "translate": Task(
        "tokens/s",
        (*OURS, *STOCKS, "CTranslate2 fp32", "CTranslate2 int8"),
        2 * MARIAN_LAYERS,
        sources_to_translate,
        "transformers",
    ),
}  # fmt: skip


def left_out(engine: Runtime, setting: Setting) -> str | None:
    """Return the reason why a task leaves an implementation out, or None."""
    needed = TASKS[setting.section].needs
    if importlib.util.find_spec(needed) is None:
        return f"{LEFT_OUT}not installed: {needed}"
    if engine.kind == "transformers" and engine.form == BF16:
        return slow_bf16(setting.ceilings)
    return None


def run(
    setting: Setting, threads: int, names: Sequence[str] = (), *, quick: bool = False
) -> list[CpuRow]:
    """Run the task with the name of the section; an empty ``names`` means every implementation."""
    section = setting.section
    task = TASKS[section]
    wanted = [BY_NAME[name] for name in task.engines if not names or name in names]
    rows: list[CpuRow] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        refused = prepare(Path(folder), SCALES["minilm"], wanted, setting, left_out)
        made = {"rerank": CROSS_ENCODER, "translate": MARIAN}.get(section)
        if made and (reason := export(Path(folder), [made])):
            refused |= {e.name: reason for e in wanted if e.name not in refused}
        workers = {
            engine.name: stack.enter_context(Remote(engine.name, Path(folder), threads))
            for engine in wanted
            if engine.name not in refused
        }
        small = task.matches(True)[0]
        # Nothing is timed yet, so imports and builds may share the cores.
        with ThreadPoolExecutor(threads) as pool:
            starts = {
                name: pool.submit(worker.ask, "task", task=section, **small.work)
                for name, worker in workers.items()
            }
        for name, start in starts.items():
            try:
                start.result()
            except Failed as failure:
                refused[name] = str(failure)
                workers.pop(name).close()
        for name, reason in refused.items():
            setting.notify(f"  {name}: {reason}")
        for match in task.matches(quick):
            setting.notify(f"[{section}] {match.label}")
            results = play(task, match, workers, refused, setting)
            rows += results
            for row in results:
                setting.notify(f"  {line(row)}")
    return rows


def play(
    task: Task,
    match: Match,
    workers: Mapping[str, Remote],
    refused: Mapping[str, str],
    setting: Setting,
) -> list[CpuRow]:
    """Return a row for each key of ``workers`` and ``refused``, in the order of the task."""
    section, rows = setting.section, {}
    learns = section == "embedder"
    direction = TRAINING if learns else INFERENCE
    for name in task.engines:
        if name in workers or name in refused:
            engine = BY_NAME[name]
            rows[name] = CpuRow(
                section, section, match.label, section, engine.form, direction, name, engine.ours,
                unit=task.unit, tokens=sum(match.lengths), refused=refused.get(name),
            )  # fmt: skip

    def first_call(name: str) -> dict[str, Any]:
        expected = setting.rates.get(name, 0.0) * match.flops
        if expected > TOO_LONG_S:
            raise Failed(f"{LEFT_OUT}about {expected:.0f} s a call, by its last shape")
        return workers[name].ask("task", task=section, **match.work)

    answers = first_calls(workers, rows, first_call, setting.notify)
    is_random = match.work.get("dropout", False)
    # The errors of losses and the tokens of targets are judged below.
    elsewhere = learns or section == "translate"
    compare(answers, rows, lambda r: math.inf if elsewhere else tolerance(r.dtype, task.layers))
    if not is_random:
        set_exactness(section, answers, rows)
    first = {name: answers[name]["seconds"] for name in answers if not rows[name].refused}
    take_turns(first, workers, rows, setting.seconds, always=(STOCK,))
    for name, row in rows.items():
        if name in answers:
            row.add_note(answers[name].get("note"))
        row.set_rates(match.amount, Work(match.flops), setting.ceilings.limits(row.dtype))
        if row.seconds is not None:
            setting.rates[name] = row.seconds / match.flops
            row.stock_ratio = ratio(row, rows.get(STOCK))
    judge(list(rows.values()), lambda row: Target())
    return list(rows.values())


def set_same_targets(row: CpuRow, same: np.ndarray) -> None:
    """Note how many targets have the tokens of stock fp32; refuse fp32 that differs in many.

    The weights are random, so that the best two tokens are often close, and a rounding error
    changes a target from such a token on.
    """
    equal = float(same.all(axis=1).mean())
    row.add_note(f"{equal:.0%} of the targets have all tokens of stock fp32")
    if row.dtype == FP32 and row.ours and equal < SAME_TARGETS:
        row.refused = f"{equal:.0%} of the targets are those of stock fp32"


def rounding(form: str, layers: int) -> float:
    """Return the expected RMS of the rounding errors of a result, relative to the result's RMS.

    Every layer rounds about eight times to the format, and the errors have random signs.
    """
    return math.sqrt(8 * layers) * {FP32: 2.0**-24, BF16: 2.0**-9}[form]


def tolerance(form: str, layers: int) -> float:
    """Return the largest accepted `CpuRow.difference`.

    It is four times `rounding`. In int8, the errors depend on the outliers of the activations, so
    that the only bound is `CLOSE`.
    """
    return CLOSE if form == INT8 else 4 * rounding(form, layers)


def loss_tolerance(form: str, layers: int) -> float:
    """Return the largest accepted error of a loss of the training of MiniLM.

    A loss is the mean of differences of logits, and a logit is `SCALE` times the product of two
    embeddings of length 1. The error of an embedding has the length `rounding` and a random
    direction, so it changes a product by `rounding` over the square root of the hidden size. Two
    embeddings together contribute the square root of 2 times as much. Six times this expected error
    is accepted, because the errors of the pairs of a batch depend on each other.
    """
    return 6 * SCALE * math.sqrt(2 / MINILM.hidden_size) * rounding(form, layers)


def set_exactness(
    section: str, answers: Mapping[str, dict[str, Any]], rows: Mapping[str, CpuRow]
) -> None:
    """Set the errors against stock fp32; refuse a training whose losses are not those of stock."""
    if STOCK not in answers:
        return
    right = answers[STOCK]["sample"]
    for name, answer in answers.items():
        row = rows[name]
        if row.refused:
            continue
        largest = float(np.abs(np.subtract(answer["sample"], right)).max())
        if section == "encode":
            for key, value in fields(answer["sample"][0], right[0]).items():
                setattr(row, key, value)
        elif section == "rerank":
            row.score_error = largest
        elif section == "translate":
            set_same_targets(row, np.equal(answer["sample"][0], right[0]))
        elif section == "embedder":
            row.loss_error = largest
            allowed = loss_tolerance(row.dtype, MINILM.num_hidden_layers)
            if largest > allowed:
                row.refused = (
                    f"a loss differs by {largest:.2g} from stock fp32, allowed: {allowed:.2g}"
                )
