"""Use models for a long time, and check whether the process needs more and more resources.

    python tests/soak/soak.py [--minutes 60]    # or: make soak MINUTES=60

Every round calls the functions that `turns` yields, with new lengths and batch sizes. After each
round, the script reads the resident memory, the open files and the threads from /proc. The first
quarter of the time is for caches, pools and threads that a process keeps. After that, usage must
not grow: the script compares the median of the last quarter with the median of the second quarter.
The exit status is 1 if memory, files or threads grew.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# oneDNN caches its code for each new shape, up to 1,024 products. Stock models in every round would
# fill this cache by 15 KB per round for an hour, so the cache is limited to 32 products.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")

import torch
from torch import Tensor, nn

import fastbert
from fastbert.config import BertConfig
from fastbert.modules import BertForPreTraining, BertModel

LIBC = ctypes.CDLL(None)
# These are the limits for the growth of the resident memory. The memory varies by a few MiB without
# a leak, because the allocator splits blocks differently. A leak of one fp32 hidden state of
# 8 x 128 x 128 per round exceeds the limit in an hour.
ALLOWED_SHARE, ALLOWED_MIB = 0.01, 8.0
# A comparison needs at least this many rounds. A round takes about two seconds on two cores.
FEWEST_ROUNDS = 8
# A function in this table is called only in every n-th round. safetensors 0.8.0 keeps two small
# objects per mapped tensor, which is 4 KB for each model that is read.
ROUNDS = {"save_and_load": 8}
SIZES = {
    "vocab_size": 2000,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
}


class Usage(NamedTuple):
    """The resources that the process uses: resident memory in MiB, open files, and threads."""

    mib: float
    files: int
    threads: int


def usage() -> Usage:
    """Return the usage of this process from /proc, after returning free memory to the system."""
    gc.collect()
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    files, threads = (len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task"))
    return Usage(pages * resource.getpagesize() / 2**20, files, threads)


def growth(seen: list[Usage]) -> list[str]:
    """Return messages for the resources that grew from the second to the last quarter.

    Raises:
        ValueError: If there are too few rounds for a comparison.
    """
    if len(seen) < FEWEST_ROUNDS:
        raise ValueError(f"minutes: {len(seen)} rounds were made, allowed: {FEWEST_ROUNDS} or more")
    quarter = len(seen) // 4
    before, after = (
        Usage(*map(statistics.median, zip(*part, strict=True)))
        for part in (seen[quarter : 2 * quarter], seen[-quarter:])
    )
    grown = []
    if after.mib - before.mib > max(ALLOWED_MIB, ALLOWED_SHARE * before.mib):
        grown.append(f"resident memory grew from {before.mib:.1f} to {after.mib:.1f} MiB")
    for name in ("files", "threads"):
        first, last = getattr(before, name), getattr(after, name)
        if last > first:
            grown.append(f"{name} grew from {first:g} to {last:g}")
    return grown


def batch(draw: random.Random) -> tuple[Tensor, Tensor]:
    """Return random ids and a mask, of random size."""
    rows, length = draw.randint(1, 8), draw.randint(1, 128)
    ids = torch.randint(5, 2000, (rows, length))
    lengths = torch.randint(1, length + 1, (rows, 1))
    return ids, (torch.arange(length) < lengths).long()


def of_transformers() -> nn.Module:
    """Return a small model of transformers."""
    import transformers

    return transformers.BertModel(transformers.BertConfig(**SIZES))


def turns(folder: Path, draw: random.Random) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name and the function of each kind of use, which a round calls."""
    native, accelerated = (
        BertModel(BertConfig(**SIZES)).eval(),
        fastbert.accelerate(of_transformers()),
    )
    trained = BertForPreTraining(BertConfig(**SIZES))
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-4)

    def infer() -> None:
        ids, mask = batch(draw)
        with torch.no_grad():
            for model in (native, accelerated.eval()):
                model(input_ids=ids, attention_mask=mask)
                with torch.autocast("cpu", torch.bfloat16):
                    model(input_ids=ids, attention_mask=mask)

    def train() -> None:
        ids, mask = batch(draw)
        labels = ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)
        next_sentence = torch.randint(0, 2, (len(ids),))
        out = trained(
            input_ids=ids, attention_mask=mask, labels=labels, next_sentence_label=next_sentence
        )
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerated.train()(input_ids=ids, attention_mask=mask)[0].sum().backward()
        accelerated.zero_grad()

    def accelerate_and_restore() -> None:
        model = fastbert.accelerate(of_transformers()).eval()
        ids, mask = batch(draw)
        with torch.inference_mode():
            model(input_ids=ids, attention_mask=mask)
            fastbert.restore(model)(input_ids=ids, attention_mask=mask)

    def save_and_load() -> None:
        trained.save_pretrained(folder / "model")
        loaded = BertModel.from_pretrained(folder / "model").eval()
        ids, mask = batch(draw)
        with torch.no_grad():
            loaded(input_ids=ids, attention_mask=mask)

    for turn in (infer, train, accelerate_and_restore, save_and_load):
        yield turn.__name__, turn


def soak(minutes: float, say: Callable[[str], None]) -> list[Usage]:
    """Call all functions of `turns` for `minutes`, and return the usage after each round."""
    draw = random.Random(0)
    torch.manual_seed(0)
    seen: list[Usage] = []
    start = said = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fastbert-soak-") as folder:
        taken = list(turns(Path(folder), draw))
        while time.monotonic() - start < 60 * minutes:
            for name, turn in taken:
                if len(seen) % ROUNDS.get(name, 1) == 0:
                    turn()
            seen.append(usage())
            if time.monotonic() - said >= 60 or len(seen) == 1:
                said = time.monotonic()
                now = seen[-1]
                say(
                    f"{(said - start) / 60:5.1f} min, round {len(seen)}: {now.mib:.1f} MiB, "
                    f"{now.files} files, {now.threads} threads"
                )
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long turns are taken")
    options = parser.parse_args()
    # The progress bars of loading and saving would fill the screen.
    warnings.simplefilter("ignore")
    seen = soak(options.minutes, lambda text: print(f"fastbert: {text}", flush=True))
    try:
        grown = growth(seen)
    except ValueError as error:
        parser.error(str(error))
    last = seen[-1]
    print(
        f"fastbert: {len(seen)} rounds in {options.minutes:g} minutes; at the end {last.mib:.1f} "
        f"MiB, {last.files} files, {last.threads} threads: {'; '.join(grown) or 'flat'}"
    )
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
