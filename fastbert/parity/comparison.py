"""Compare three copies of a model on one batch, in inference and by gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.ops.backend import dtype_name
from fastbert.parity.batches import Batch
from fastbert.parity.gradients import FACTOR, REASON, directions, gradients, joined, kinds
from fastbert.parity.outputs import ZeroedPadding, fields, unchanged
from fastbert.parity.report import LeftOut, Row
from fastbert.parity.subject import Sides, Subject, moved
from fastbert.testing.compare import Comparison, compare_all
from fastbert.testing.in_float64 import InFloat64
from fastbert.testing.yardstick import Yardstick

READS_PADDING = (
    "it reads hidden states at padding, which are 0 in an accelerated encoder on purpose"
)
OPTIONS = {"output_hidden_states": True, "output_attentions": True}


class Exact(NamedTuple):
    """The oracle's fields, and which of their elements are compared."""

    fields: dict[str, Tensor]
    kept: dict[str, Tensor]


class Pass:
    """The comparisons of one batch in one dtype.

    Args:
        subject: The model.
        sides: Its copies.
        encoders: Names of the encoders in the copies.
        batch: The batch.
        dtype: The tested dtype.
    """

    def __init__(
        self,
        subject: Subject,
        sides: Sides,
        encoders: list[str],
        batch: Batch,
        dtype: torch.dtype,
    ) -> None:
        """Convert the batch to the tested dtype and to float64."""
        self.subject, self.sides, self.encoders, self.dtype = subject, sides, encoders, dtype
        self.name = batch.name
        self.values = moved(batch.values, subject.device, dtype)
        self.wide = moved(self.values, subject.device, torch.float64)

    def inference(self, mode: str, options: dict[str, Any]) -> Iterator[Row | LeftOut]:
        """Yield what the copies say of the batch without gradients.

        Args:
            mode: Name of the mode in the rows.
            options: Further keyword arguments of the call.
        """
        with torch.no_grad():
            try:
                exact = self._exact(options)
                yardstick = self._yardstick(lambda: self._stock(options), exact)
            except Exception as error:
                if not options:
                    raise self._not_callable(error) from error
                yield self._left_out(mode, "all", f"the stock model raises {_told(error)}")
                return
            yield from self._unread(mode, exact)
            try:
                fast = self._fast(options)
            except Exception as error:
                yield self._raised(mode, error)
                return
            yield from self._judged(mode, fast, exact, yardstick)

    def gradients(self) -> Iterator[Row | LeftOut]:
        """Yield what the copies say of the gradients of the parameters."""
        mode = "gradients"
        if not any(p.requires_grad for p in self.sides.fast.parameters()):
            yield self._left_out(mode, "all", "no parameter requires a gradient")
            return
        exact = self._exact({})
        drawn = directions(exact.fields, exact.kept)
        drawn = {n: d for n, d in drawn.items() if exact.fields[n].requires_grad and bool(d.any())}
        if not drawn:
            yield self._left_out(mode, "all", "no compared field depends on a trained parameter")
            return
        oracle = gradients(self.sides.oracle, exact.fields, drawn)
        groups = kinds(oracle)
        del exact
        stock = Yardstick(
            lambda: joined(gradients(self.sides.stock, self._stock({}), drawn), groups), keep=False
        )
        try:
            fast = gradients(self.sides.fast, self._fast({}), drawn)
        except Exception as error:
            yield self._raised(mode, error)
            return
        for name in sorted(fast.keys() ^ oracle.keys()):
            which = "the accelerated" if name in fast else "the stock"
            yield self._failed(mode, name, f"only {which} model has a gradient of {name}")
        if fast.keys() >= oracle.keys():
            sides = joined(fast, groups), joined(oracle, groups), stock
            for result in compare_all(*sides, factor=FACTOR, reason=REASON, tested=self.dtype):
                yield self._row(mode, result)

    # Running the sides

    def _exact(self, options: dict[str, Any]) -> Exact:
        side = self.sides.oracle

        def run() -> dict[str, Tensor]:
            with InFloat64():
                return self._run(side, self.wide, options)

        exact = run()
        with torch.no_grad(), ZeroedPadding(side, self.encoders) as zeroed:
            after = run()
        whole = {name: torch.ones_like(x, dtype=torch.bool) for name, x in exact.items()}
        return Exact(exact, unchanged(exact, after) if zeroed.seen else whole)

    def _stock(self, options: dict[str, Any]) -> dict[str, Tensor]:
        return self._run(self.sides.stock, self.values, options)

    def _fast(self, options: dict[str, Any]) -> dict[str, Tensor]:
        return self._run(self.sides.fast, self.values, options)

    def _run(
        self, side: nn.Module, values: Mapping[str, Any], options: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Call a side; all calls of a batch draw the same random numbers."""
        devices = [self.subject.device] if self.subject.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            torch.autocast(self.subject.device.type, enabled=False),
        ):
            torch.manual_seed(0)
            values = {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}
            return fields(self.subject.call(side, values, **options), values)

    def _yardstick(self, run: Callable[[], dict[str, Tensor]], exact: Exact) -> Yardstick:
        def kept() -> dict[str, Tensor]:
            return _kept(run(), exact.kept)

        return Yardstick(kept, keep=False)

    # Rows

    def _judged(
        self, mode: str, fast: dict[str, Tensor], exact: Exact, yardstick: Yardstick
    ) -> Iterator[Row]:
        oracle = {n: x for n, x in _kept(exact.fields, exact.kept).items() if x.numel()}
        for name in sorted(fast.keys() ^ exact.fields.keys()):
            which = "the accelerated" if name in fast else "the stock"
            yield self._failed(mode, name, f"only {which} model returns {name}")
        oracle = {name: x for name, x in oracle.items() if name in fast}
        wrong = [n for n in oracle if fast[n].shape != exact.kept[n].shape]
        for name in wrong:
            shapes = tuple(fast[name].shape), tuple(exact.kept[name].shape)
            yield self._failed(mode, name, f"{name} has {shapes[0]} elements, stock {shapes[1]}")
            del oracle[name]
        actual = {name: fast[name][exact.kept[name]] for name in oracle}
        nearby = yardstick.map(lambda found: {name: found[name] for name in oracle})
        for result in compare_all(actual, oracle, nearby, tested=self.dtype):
            yield self._row(mode, result)

    def _unread(self, mode: str, exact: Exact) -> Iterator[LeftOut]:
        """Yield the fields of which nothing, or not every sequence, is compared."""
        for name, kept in exact.kept.items():
            if not bool(kept.any()):
                yield self._left_out(mode, name, READS_PADDING)

    def _row(self, mode: str, result: Comparison) -> Row:
        return Row(
            self.name, dtype_name(self.dtype), mode, result.name, result.error, result.allowed,
            result.passed, str(result),
        )  # fmt: skip

    def _failed(self, mode: str, field: str, detail: str) -> Row:
        nan = float("nan")
        return Row(self.name, dtype_name(self.dtype), mode, field, nan, nan, False, detail)

    def _raised(self, mode: str, error: Exception) -> Row:
        return self._failed(mode, "call", f"the accelerated model raises {_told(error)}")

    def _left_out(self, mode: str, field: str, reason: str) -> LeftOut:
        return LeftOut(self.name, dtype_name(self.dtype), mode, field, reason)

    def _not_callable(self, error: Exception) -> ValueError:
        names = ", ".join(self.values)
        return ValueError(
            f"batch: the stock {self.subject.name} cannot be called with {names} in "
            f"{dtype_name(self.dtype)}: {_told(error)}"
        )


def _kept(found: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x[kept[name]] for name, x in found.items()}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
