"""Compare checkpoints that other people trained, in fastbert and in transformers.

    python tests/checkpoints/checkpoints.py [NAME ...]    # or: make checkpoints PACKAGES='rxnfp'

``packages.py`` lists packages of the package index that contain checkpoints. For each checkpoint,
each class of transformers that has a head of the checkpoint, and fp32 and bf16, the script runs

- the stock model with eager attention, in float64 and in the tested dtype,
- a copy of it after ``fastbert.accelerate``, and again after ``fastbert.restore``,
- the class of fastbert that reads the same checkpoint natively,

on padded batches. The tolerance rule judges all outputs at real tokens. The outputs of an encoder
include the hidden states and attention weights of every layer. The model of fastbert is also saved,
and reopened by fastbert and by transformers. The weights must be equal bit for bit, and the outputs
must be within the rule. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# A model is read from a folder only.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from packages import PACKAGES, Package, encoded, unpacked
from torch import Tensor, nn

import fastbert
from fastbert import modules
from fastbert.integrations.accelerate import bound_encoders
from fastbert.io import checkpoint
from fastbert.testing.compare import compare_all
from fastbert.testing.in_float64 import InFloat64
from fastbert.testing.yardstick import Yardstick

CACHE = Path(__file__).parents[2] / "build" / "checkpoints"
DTYPES = (torch.float32, torch.bfloat16)
PADDINGS = ("right", "left", "middle")
# These warnings say that stock code runs in an accelerated model, or that a checkpoint and a model
# have different weights.
WRONG = ".*(runs its own code|not in the checkpoint|in the checkpoint, but unknown)"
# The longest row of a batch, in tokens. Its length is no multiple of the size of a kernel's tiles.
LENGTH = 109

EVERYTHING = {"output_hidden_states": True, "output_attentions": True}

Batch = dict[str, Tensor]


class Row(NamedTuple):
    """The result for one class of a checkpoint in one dtype.

    Attributes:
        words: Package, model, head and dtype.
        ratios: The largest error divided by the yardstick's, of the accelerated and of the native
            model; None for a model that was not compared.
        failures: A message for each failed check.
    """

    words: tuple[str, str, str, str]
    ratios: tuple[float | None, float | None]
    failures: list[str]

    def __str__(self) -> str:
        ratios = ("–" if ratio is None else f"{ratio:.2f}" for ratio in self.ratios)
        return line(*self.words, *ratios, "FAILED" if self.failures else "ok")


def line(*words: str) -> str:
    """Return a line of the table."""
    widths = (20, 20, 30, 9, 12, 7, 7)
    return " ".join(f"{word:{width}}" for word, width in zip(words, widths, strict=True)).rstrip()


HEADING = line("package", "model", "head", "dtype", "accelerated", "native", "result")


# Batches and outputs


def batches(rows: list[list[int]]) -> list[Batch]:
    """Return a sequence without padding, and a batch for each place of the padding.

    The batches have different rows, and each has a row of `LENGTH` tokens from several texts. The
    second half of every row has token type 1.
    """
    found = [_batch([_joined(rows)], "right")]
    for number, padding in enumerate(PADDINGS, 1):
        own = rows[number - 1 :: len(PADDINGS)]
        found.append(_batch([*own, _joined(rows[number:] + rows[:number])], padding))
    return found


def _joined(rows: list[list[int]]) -> list[int]:
    return [token for row in rows for token in row][:LENGTH]


def _batch(rows: list[list[int]], padding: str) -> Batch:
    width = max(map(len, rows))
    ids, mask, types = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for number, row in enumerate(rows):
        row = row[:width]
        start = width - len(row) if padding == "left" else 0
        end = start + len(row)
        ids[number, start:end] = torch.tensor(row)
        types[number, start + len(row) // 2 : end] = 1
        mask[number, start:end] = 1
        if padding == "middle":
            # One to three tokens of the row are hidden, but never the first or the last one.
            at = max(1, len(row) // 3)
            mask[number, at : min(at + 1 + number % 3, end - 1)] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def outputs(model: nn.Module, batch: Batch, **options: bool) -> dict[str, Tensor]:
    """Return the outputs of a model at real tokens, by name.

    A pooled output counts only for rows that begin with a real token: in other rows, the stock
    pooler reads padding.
    """
    real, found = batch["attention_mask"].bool(), {}
    for name, value in model(**batch, **options).items():
        parts = {name: value}
        if isinstance(value, tuple):
            parts = {f"{name}[{number}]": part for number, part in enumerate(value)}
        found |= {key: _at_real_tokens(part, real) for key, part in parts.items()}
    return found


def _at_real_tokens(x: Tensor, real: Tensor) -> Tensor:
    if x.dim() == 2:  # [B, N]
        return x[real[:, 0]]
    return (x.transpose(1, 2) if x.dim() == 4 else x)[real]  # [B, H, L, L] or [B, L, N]


def run(model: nn.Module, given: list[Batch], **options: bool) -> dict[str, Tensor]:
    """Return the outputs of all batches, flattened and joined by name."""
    with torch.inference_mode():
        parts = [outputs(model, batch, **options) for batch in given]
    return {name: torch.cat([part[name].flatten() for part in parts]) for name in parts[0]}


# Checks


class Checked:
    """The checks of one class of a checkpoint in one dtype.

    Args:
        folder: Folder of the checkpoint.
        stock_class: Name of the class in transformers.
        native_class: Name of the class in fastbert, or None.
        dtype: The tested dtype.
        given: The batches.
    """

    def __init__(
        self,
        folder: Path,
        stock_class: str,
        native_class: str | None,
        dtype: torch.dtype,
        given: list[Batch],
    ) -> None:
        self.folder, self.dtype, self.given = folder, dtype, given
        self.native_class = native_class
        self.stock_class = getattr(transformers, stock_class)
        # The reader of fastbert refuses a pickle with code. It comes first.
        checkpoint.read(folder)
        self.stock = self._opened(folder)
        oracle = copy.deepcopy(self.stock).double()
        # Only the encoder of a model returns hidden states and attention weights here; they would
        # be the same in each head.
        self.options = EVERYTHING if "last_hidden_state" in outputs(self.stock, given[0]) else {}
        with InFloat64():
            self.oracle = run(oracle, given, **self.options)
        self.yardstick = Yardstick(lambda: run(self.stock, given, **self.options))
        self.failures: list[str] = []

    def _opened(self, folder: Path) -> nn.Module:
        """Open a folder with transformers; raise ValueError if it lacks a weight of the model."""
        model, report = self.stock_class.from_pretrained(
            folder, dtype=self.dtype, attn_implementation="eager", output_loading_info=True
        )
        if report["missing_keys"] or report["mismatched_keys"]:
            raise ValueError(f"{folder}: transformers misses {report['missing_keys']}")
        return model.eval()

    def ratios(self) -> Iterator[float | None]:
        """Yield the worst ratio of the accelerated and of the native model."""
        for side, check in (("accelerated", self._accelerated), ("native", self._native)):
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", WRONG)
                    # The outputs of such sequences are left out where they read padding.
                    warnings.filterwarnings("ignore", ".*begin with padding")
                    yield check()
            except Exception as error:
                self.failures.append(f"{side}: {type(error).__name__}: {error}")
                yield None

    def _accelerated(self) -> float:
        model = fastbert.accelerate(copy.deepcopy(self.stock))
        worst = self._judged("accelerated", model)
        fastbert.restore(model)
        if bound_encoders(model):
            self.failures.append("the model is still accelerated after restore")
        self._judged("restored", model)
        self._equal("weights after restore", model.state_dict(), self.stock.state_dict())
        return worst

    def _native(self) -> float | None:
        if self.native_class is None:
            return None
        kind = getattr(modules, self.native_class)
        model = kind.from_pretrained(self.folder, dtype=self.dtype)
        worst = self._judged("native", model)
        with tempfile.TemporaryDirectory() as name:
            model.save_pretrained(name)
            again = kind.from_pretrained(name)
            self._equal("weights saved and reopened", again.state_dict(), model.state_dict())
            if again.config != model.config:
                self.failures.append("the configuration changed in the saved folder")
            stock = self._opened(Path(name))
        self._equal("weights in transformers", stock.state_dict(), self.stock.state_dict())
        self._judged("saved, reopened by transformers", stock)
        return worst

    def _judged(self, side: str, model: nn.Module) -> float:
        """Judge the outputs of a model by the tolerance rule, and return the worst ratio.

        A call that returns hidden states and attention weights runs other kernels than a call
        without them, so that both are judged.
        """
        worst = 0.0
        for options in (self.options, {}) if self.options else ({},):
            actual = run(model, self.given, **options)
            names = sorted(actual.keys() & self.oracle.keys())
            if options == self.options and len(names) < len(self.oracle):
                lost = sorted(self.oracle.keys() - actual.keys())
                self.failures.append(f"{side}: outputs are missing: {', '.join(lost)}")
            chosen = functools.partial(_chosen, names=names)
            yardstick = self.yardstick.map(chosen)
            compared = compare_all(chosen(actual), chosen(self.oracle), yardstick)
            self.failures += [f"{side}: {each}" for each in compared if not each.passed]
            worst = max(worst, *(each.ratio for each in compared))
        return worst

    def _equal(self, what: str, actual: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
        """Check that tensors are equal bit for bit."""
        different = sorted(actual.keys() ^ right.keys()) or [
            name
            for name, x in right.items()
            if actual[name].dtype != x.dtype or not torch.equal(actual[name], x)
        ]
        if different:
            more = f" and {len(different) - 3} more" if len(different) > 3 else ""
            self.failures.append(f"{what} differ: {', '.join(different[:3])}{more}")


def _chosen(tensors: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names}


def rows_of(name: str, package: Package, cache: Path) -> Iterator[Row]:
    """Check all checkpoints of a package, and yield a row for each class and dtype."""
    folder = unpacked(name, package, cache)
    given = batches(encoded(package, folder))
    for label, model in package.models.items():
        for stock_class, native_class in model.heads.items():
            for dtype in DTYPES:
                words = name, label, stock_class, str(dtype).removeprefix("torch.")
                place = folder / model.folder
                try:
                    checked = Checked(place, stock_class, native_class, dtype, given)
                except Exception as error:
                    yield Row(words, (None, None), [f"stock: {type(error).__name__}: {error}"])
                    continue
                fast, native = checked.ratios()
                yield Row(words, (fast, native), checked.failures)


def main(
    arguments: list[str] | None = None,
    packages: Mapping[str, Package] = PACKAGES,
    cache: Path = CACHE,
) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*packages, []], metavar="NAME")
    options = parser.parse_args(arguments)
    # transformers lists the weights of the heads that a class lacks, and shows a progress bar.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(HEADING, flush=True)
    failed = 0
    for name in options.names or packages:
        for row in rows_of(name, packages[name], cache):
            print(row, *(f"    {failure}" for failure in row.failures), sep="\n", flush=True)
            failed += bool(row.failures)
    print(f"fastbert: {failed} rows FAILED" if failed else "fastbert: all rows passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
