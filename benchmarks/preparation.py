"""Time and memory of ``fastbert prepare`` and of reading its result, on generated text.

``python -m benchmarks.preparation --megabytes 300 --out FOLDER`` generates text in FOLDER, prepares
it with different numbers of processes, plans an epoch, and reads up to 100 batches. Each part runs
in its own process, whose peak memory is measured. The words of the text are random syllables with
the frequencies of Zipf's law, so that the vocabulary is as large as in real text.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

WORD_TYPES = 200_000
FILES = 8


def generate(folder: Path, megabytes: int) -> None:
    """Write .jsonl and .txt files of documents with some lists and headings."""
    rng = np.random.default_rng(0)
    syllables = np.array([a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "or", "un")])
    counts = rng.integers(1, 5, WORD_TYPES)
    words = np.array(["".join(rng.choice(syllables, count)) for count in counts], dtype=object)
    weights = 1.0 / np.arange(1, WORD_TYPES + 1)
    ends = np.cumsum(weights / weights.sum())
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        suffix = "jsonl" if number % 2 else "txt"
        with (folder / f"{number}.{suffix}").open("w", encoding="utf-8") as file:
            size = 0
            while size < megabytes * 1e6 / FILES:
                size += file.write(_document(rng, words, ends, suffix))


def _document(rng: np.random.Generator, words: np.ndarray, ends: np.ndarray, suffix: str) -> str:
    sentences = int(rng.integers(3, 60))
    sizes = rng.integers(4, 34, sentences)
    drawn = words[np.searchsorted(ends, rng.random(sizes.sum()))]
    parts = np.split(drawn, np.cumsum(sizes)[:-1])
    text = [" ".join(part).capitalize() + "." for part in parts]
    if suffix == "txt":
        return "# Heading\n" + "\n".join(text) + "\n\n"
    return json.dumps({"text": "A title\n\n" + " ".join(text) + "\n\n- one\n- two"}) + "\n"


class Measured(NamedTuple):
    """The time and memory of a Python command.

    Attributes:
        seconds: Duration in seconds.
        cpu: CPU time of all its processes, in seconds.
        memory: Largest memory of all its processes together, in MB. Shared pages count once, and
            pages of mapped files do not count.
        output: The text that the command wrote to stdout.
    """

    seconds: float
    cpu: float
    memory: float
    output: str


def measured(*arguments: object) -> Measured:
    """Run Python with `arguments`; measure the time and the memory of the started processes."""
    begun = time.perf_counter()
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    largest = [0.0]
    used: dict[int, float] = {}

    def watch() -> None:
        while process.poll() is None:
            family = _family(process.pid)
            largest[0] = max(largest[0], sum(map(_memory, family)))
            used.update((pid, max(used.get(pid, 0.0), _cpu(pid))) for pid in family)
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: status {process.returncode}")
    return Measured(time.perf_counter() - begun, sum(used.values()), largest[0], output)


def _family(pid: int) -> list[int]:
    """Return the id of a process and the ids of all its running descendants."""
    members = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text(encoding="utf-8").split()
        except OSError:
            continue
        members += [member for child in children for member in _family(int(child))]
    return members


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    sizes = dict(line.split(":") for line in lines[1:] if ":" in line)
    return sum(int(sizes[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) / 1e3


READ = """
import sys, time
from fastbert.data.prepared.batches import PreparedBatches
from fastbert.data.prepared.corpus import PreparedCorpus
from fastbert.data.prepared.examples import PreparedExamples

begun = time.perf_counter()
corpus = PreparedCorpus(sys.argv[1])
opened = time.perf_counter()
examples = PreparedExamples(corpus, max_length=128, seed=0)
epoch = PreparedBatches(examples, tokens_per_batch=32768).epoch(0)
planned = time.perf_counter()
before = time.process_time()
tokens = sum(epoch[i]["input_ids"].numel() for i in range(min(100, len(epoch))))
used = time.process_time() - before
count = len(epoch._order)
print(f"{corpus.manifest.count('tokens'):,} tokens, {count:,} examples of up to 128 tokens: opened "
      f"in {opened - begun:.2f} s, planned in {planned - opened:.2f} s "
      f"({(planned - opened) / count * 1e6:.2f} us each), batches of "
      f"{tokens / used / 1e6:.2f} million tokens per CPU second")
"""


def main() -> None:
    """Generate text, prepare it and read the result; print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    text = options.out / f"text-{options.megabytes}"
    if not text.exists():
        generate(text, options.megabytes)
    size = sum(path.stat().st_size for path in text.iterdir()) / 1e6
    tokenizer = options.out / "tokenizer"
    base = measured("-c", "import fastbert.jobs.prepare")
    print(f"memory of the imports alone: {base.memory:.0f} MB", flush=True)
    for workers in options.workers:
        corpus = options.out / f"corpus-{workers}"
        shutil.rmtree(corpus, ignore_errors=True)
        given = ("--tokenizer", tokenizer) if tokenizer.exists() else ()
        measurement = measured(
            *("-m", "fastbert", "prepare", text, corpus, "--workers", workers, "--json", *given)
        )
        what = "with a given vocabulary" if given else "with a vocabulary that is trained"
        print(
            f"prepare {what}, {workers} process(es): {size:,.0f} MB in {measurement.seconds:.0f} s"
            f", {measurement.cpu:.0f} CPU seconds ({size / measurement.cpu:.1f} MB per CPU second)"
            f", memory {measurement.memory:.0f} MB",
            flush=True,
        )
        if not given:
            shutil.copytree(corpus / "tokenizer", tokenizer)
    last = options.out / f"corpus-{options.workers[-1]}"
    measurement = measured("-c", READ, last)
    print(f"{measurement.output.strip()}; memory {measurement.memory:.0f} MB", flush=True)
    stored = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
    print(f"size on disk: {stored / 1e6:,.0f} MB in {sum(1 for _ in last.rglob('*'))} files")


if __name__ == "__main__":
    main()
