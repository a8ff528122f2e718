"""Compare three copies of a model on one batch, in inference and by gradients."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.ops.backend import dtype_name
from fastbert.parity.batches import Batch
from fastbert.parity.gradients import (
    FACTOR,
    REASON,
    directions,
    gradients,
    joined,
    kinds,
    without_jumps,
)
from fastbert.parity.outputs import ChangedPadding, fields, random_parameters, unchanged
from fastbert.parity.report import LeftOut, Row
from fastbert.parity.subject import LOGITS, Sides, Subject, moved
from fastbert.testing.compare import MAX_FACTOR, Comparison, compare_all
from fastbert.testing.in_float64 import InFloat64
from fastbert.testing.yardstick import Yardstick

READS_PADDING = (
    "which read hidden states at padding, and these are 0 in an accelerated encoder on purpose"
)
NO_LOGITS = "the accelerated SparseEncoder computes its embeddings without the logits on purpose"
INFERENCE, ALL_OUTPUTS, GRADIENTS = "inference", "all outputs", "gradients"
OPTIONS = {"output_hidden_states": True, "output_attentions": True}

Tensors = Mapping[str, Tensor]


class Measured(NamedTuple):
    """The results of the three copies for a batch, by field or by kind of parameter.

    Attributes:
        fast: The results of the accelerated copy.
        oracle: The results of the copy in float64.
        stock: Computes the results of the stock copy.
        rows: A failed row for each field that one of the copies lacks or gives in another size, and
            an entry for each field that is left out.
    """

    fast: Tensors
    oracle: Tensors
    stock: Callable[[], Tensors]
    rows: list[Row | LeftOut]


class Pass:
    """The comparisons of one batch in one dtype.

    Args:
        subject: The model.
        sides: The three copies of the model.
        encoders: Names of the encoders in the copies.
        batch: The batch.
        dtype: The tested dtype.
    """

    def __init__(
        self,
        subject: Subject,
        sides: Sides,
        encoders: Iterable[str],
        batch: Batch,
        dtype: torch.dtype,
    ) -> None:
        """Convert the batch to the tested dtype and to float64."""
        self.subject, self.sides, self.encoders = subject, sides, list(encoders)
        self.name, self.dtype = batch.name, dtype
        # The keys say whether all outputs are requested. The values are masks by field, which are
        # True at the elements that are compared.
        self.comparable: dict[bool, Tensors] = {}
        self.values = moved(batch.values, subject.device, dtype)
        self.wide = moved(self.values, subject.device, torch.float64)

    def findings(self, mode: str, others: Callable[[], list[Pass]]) -> list[Row | LeftOut]:
        """Compare the copies in one mode.

        In a small batch, the stock copy, whose error sets the limit, can be exact by luck. A result
        that fails narrowly is therefore judged again by the same rule, jointly with the results of
        other batches, as `fastbert.testing.parity.check_case` does.

        Args:
            mode: ``INFERENCE``, ``ALL_OUTPUTS`` or ``GRADIENTS``.
            others: Returns passes of other batches of the same kind.

        Returns:
            A row for each result, and an entry for each result that is left out.

        Raises:
            ValueError: If the stock model cannot be called with the batch.
        """
        measured = self._measured(mode)
        if not isinstance(measured, Measured):
            return [measured]
        results = self._judged(mode, [measured])
        again = [r.name for r in results if not r.passed and r.problem is None and r.is_close]
        more = [other._measured(mode) for other in others()] if again else []
        joint = [measured, *(each for each in more if isinstance(each, Measured))]
        if len(joint) > 1:
            names = [name for name in again if all(name in each.oracle for each in joint)]
            parts = [_only(each, names) for each in joint]
            judged = {result.name: result for result in self._judged(mode, parts)}
            results = [judged.get(result.name, result) for result in results]
        return [*measured.rows, *(self._row(mode, result) for result in results)]

    def _judged(self, mode: str, parts: list[Measured]) -> list[Comparison]:
        """Judge the joint results of several batches."""
        factor, reason = (FACTOR, REASON) if mode == GRADIENTS else (MAX_FACTOR, None)
        with torch.set_grad_enabled(mode == GRADIENTS):
            stock = Yardstick(lambda: _together([each.stock() for each in parts]), keep=False)
            fast = _together([each.fast for each in parts])
            oracle = _together([each.oracle for each in parts])
            return compare_all(fast, oracle, stock, factor=factor, reason=reason, tested=self.dtype)

    def _measured(self, mode: str) -> Measured | Row | LeftOut:
        """Run the copies, and return their results or the reason why there are none."""
        if mode == GRADIENTS:
            return self._gradients()
        options = OPTIONS if mode == ALL_OUTPUTS else {}
        with torch.no_grad():
            try:
                exact, comparable = self._exact(options)
                self._stock(options)
            except Exception as error:
                told = _told(error)
                if mode == ALL_OUTPUTS:
                    return self._left_out(mode, "all", f"the stock model raises {told}")
                names, dtype = ", ".join(self.values), dtype_name(self.dtype)
                raise ValueError(
                    f"batch: the stock {self.subject.name} cannot be called with {names} in "
                    f"{dtype}: {told}"
                ) from error
            try:
                fast = self._fast(options)
            except Exception as error:
                return self._failed(mode, "call", f"the accelerated model raises {_told(error)}")
        rows = list(self._differences(mode, fast, exact))
        shown = {n: elements for n, elements in comparable.items() if n in fast}
        rows += self._reading_padding(mode, shown)
        shared = [
            name
            for name, x in exact.items()
            if name in fast and fast[name].shape == x.shape and bool(comparable[name].any())
        ]
        chosen = functools.partial(_chosen, comparable={name: comparable[name] for name in shared})
        return Measured(chosen(fast), chosen(exact), lambda: chosen(self._stock(options)), rows)

    def _gradients(self) -> Measured | Row | LeftOut:
        if not any(p.requires_grad for p in self.sides.fast.parameters()):
            return self._left_out(GRADIENTS, "all", "no parameter requires a gradient")
        exact, comparable = self._exact({})
        try:
            out = self._fast({})
        except Exception as error:
            return self._failed(GRADIENTS, "call", f"the accelerated model raises {_told(error)}")
        compared = {n: x for n, x in exact.items() if n in out or not self._may_lack(n)}
        drawn = directions(compared, comparable)
        if self.sides.has_splade:
            alike = {n: d for n, d in drawn.items() if n in out and out[n].shape == d.shape}
            with torch.no_grad():
                drawn |= without_jumps(alike, exact, out, self._stock({}))
        drawn = {n: d for n, d in drawn.items() if exact[n].requires_grad and bool(d.any())}
        if not drawn:
            return self._left_out(GRADIENTS, "all", "no compared field depends on a parameter")
        oracle = gradients(self.sides.oracle, exact, drawn)
        try:
            fast = gradients(self.sides.fast, out, drawn)
        except Exception as error:
            return self._failed(GRADIENTS, "call", f"the accelerated model raises {_told(error)}")
        rows = list(self._differences(GRADIENTS, fast, oracle))
        groups = kinds(name for name in oracle if name in fast)

        def stock() -> Tensors:
            return joined(gradients(self.sides.stock, self._stock({}), drawn), groups)

        return Measured(joined(fast, groups), joined(oracle, groups), stock, rows)

    def _may_lack(self, field: str) -> bool:
        """Return whether the accelerated copy may lack a field on purpose: SPLADE's logits."""
        return field.rpartition(".")[2] == LOGITS and self.sides.has_splade

    def _differences(self, mode: str, fast: Tensors, oracle: Tensors) -> Iterator[Row | LeftOut]:
        """Yield a failed row for each result that one copy lacks, or whose sizes differ.

        A result that the accelerated copy lacks on purpose is left out.
        """
        for name in sorted(fast.keys() | oracle.keys()):
            if name not in fast and self._may_lack(name):
                yield self._left_out(mode, name, NO_LOGITS)
            elif name not in oracle or name not in fast:
                which = "the accelerated" if name in fast else "the stock"
                yield self._failed(mode, name, f"{name}: only {which} model has it")
            elif fast[name].shape != oracle[name].shape:
                sizes = f"{fast[name].numel()} elements, and stock {oracle[name].numel()}"
                yield self._failed(mode, name, f"{name}: the accelerated model gives {sizes}")

    def _reading_padding(self, mode: str, comparable: Tensors) -> Iterator[LeftOut]:
        """Yield an entry for each field of which some elements at real tokens are not compared.

        A field gets no entry if all its elements are compared, or all except those at padding,
        which have no meaning.
        """
        mask = self.values.get("attention_mask")
        real, positions = (1, 1) if mask is None else (int(mask.bool().sum()), mask.numel())
        for name, elements in comparable.items():
            count, compared = elements.numel(), int(elements.sum())
            if compared * positions not in (count * positions, count * real):
                told = f"{count - compared} of {count} elements, {READS_PADDING}"
                yield self._left_out(mode, name, told)

    # Running the copies

    def _exact(self, options: dict[str, Any]) -> tuple[Tensors, Tensors]:
        """Return the fields of the float64 copy, and masks of the elements that read no padding."""
        side = self.sides.oracle

        def run() -> dict[str, Tensor]:
            with InFloat64():
                return self._run(side, self.wide, options)

        exact, asked = run(), bool(options)
        if asked not in self.comparable:
            with torch.no_grad(), self._same_numbers():
                self.comparable[asked] = self._not_reading_padding(exact, run)
        return exact, self.comparable[asked]

    def _not_reading_padding(self, exact: Tensors, run: Callable[[], Tensors]) -> Tensors:
        """Return masks by field that are False at the elements that read padding.

        An element reads padding if zeros at padding change it, or if random numbers at padding
        change it in a model with random parameters; see `fastbert.parity.outputs`.
        """
        with ChangedPadding(self.sides.oracle, self.encoders, torch.zeros_like) as changed:
            zeroed = run()
        if not changed.seen:
            return {name: torch.ones_like(x, dtype=torch.bool) for name, x in exact.items()}
        with random_parameters(self.sides.oracle):
            drawn = run()
            with ChangedPadding(self.sides.oracle, self.encoders, torch.randn_like):
                disturbed = run()
        now, ever = unchanged(exact, zeroed), unchanged(drawn, disturbed)
        return {name: now[name] & ever[name] for name in exact}

    def _stock(self, options: dict[str, Any]) -> dict[str, Tensor]:
        return self._run(self.sides.stock, self.values, options)

    def _fast(self, options: dict[str, Any]) -> dict[str, Tensor]:
        return self._run(self.sides.fast, self.values, options)

    def _run(
        self, side: nn.Module, values: Mapping[str, Any], options: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Call a copy; all calls of a batch draw the same random numbers."""
        with self._same_numbers(), torch.autocast(self.subject.device.type, enabled=False):
            values = {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}
            return fields(self.subject.call(side, values, **options), values)

    @contextlib.contextmanager
    def _same_numbers(self) -> Iterator[None]:
        """Let every block draw the same random numbers; the state outside does not change."""
        device = self.subject.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            yield

    # Findings

    def _row(self, mode: str, result: Comparison) -> Row:
        return Row(
            self.name, dtype_name(self.dtype), mode, result.name, result.error, result.allowed,
            result.passed, str(result),
        )  # fmt: skip

    def _failed(self, mode: str, field: str, detail: str) -> Row:
        return Row(
            self.name, dtype_name(self.dtype), mode, field, math.nan, math.nan, False, detail
        )

    def _left_out(self, mode: str, field: str, reason: str) -> LeftOut:
        return LeftOut(self.name, dtype_name(self.dtype), mode, field, reason)


def _chosen(tensors: Tensors, comparable: Tensors) -> Tensors:
    return {name: tensors[name][elements] for name, elements in comparable.items()}


def _only(measured: Measured, names: list[str]) -> Measured:
    """Return only the results whose names are in `names`."""

    def few(tensors: Tensors) -> Tensors:
        return {name: tensors[name] for name in names}

    return Measured(
        few(measured.fast), few(measured.oracle), lambda: few(measured.stock()), measured.rows
    )


def _together(parts: list[Tensors]) -> Tensors:
    """Concatenate the results of several batches by name."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
