"""Dynamic batching: calls of several threads or coroutines become batches of one model."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fastbert.inference.text_batches import LimitedTokenizer, pack
from fastbert.modules.class_name import class_name

if TYPE_CHECKING:
    from types import TracebackType

    from fastbert.data import Encoded

Text = str | tuple[str, str]


class TextModel(Protocol):
    """A model of texts, such as `Embedder`, that computes one row for each text of a batch."""

    tokenizer: LimitedTokenizer
    device: torch.device

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the rows of a packed batch of B texts, of shape ``(B, width)``."""
        ...


class OverloadedError(RuntimeError):
    """Error of a call that is refused because too many texts wait or run."""


class _Call:
    """A call that waits or runs: its encoded texts (lines), its rows so far, and its future."""

    def __init__(self, lines: list[Encoded], single: bool) -> None:
        self.lines, self.single = lines, single
        self.future: Future[Tensor] = Future()
        self.taken = 0  # number of lines that were put into batches
        self.rows: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Store the next rows, and complete the future with the last row."""
        self.rows.append(rows)
        if sum(map(len, self.rows)) == len(self.lines):
            # `torch.cat` copies the rows, so that the memory of the whole batch can be freed.
            result = torch.cat(self.rows)
            self.future.set_result(result[0] if self.single else result)


_BATCHERS: weakref.WeakSet[DynamicBatcher] = weakref.WeakSet()


class DynamicBatcher:
    """A thread-safe wrapper of a model that merges waiting calls into batches.

    One batch is computed at a time. While it runs, further calls wait. The next batch has the
    waiting texts in the order of arrival, up to `tokens_per_batch` tokens, and the batcher's own
    thread computes it. If no other call waits or runs, a call without a timeout that fits into one
    batch is computed at once by the calling thread. The bits of a caller's rows do not depend on
    the other calls in the batch. If a batch fails, its calls are computed one by one, so that a
    caller gets only the error of its own call.

    In a forked process, the batcher starts without waiting calls and has a new thread. The
    batcher's thread does not see ``torch.autocast`` and other settings of the callers' threads.

    Args:
        model: An `Embedder`, or another model with a tokenizer that computes rows of texts.
        tokens_per_batch: Largest number of tokens of a batch, unless a single text is longer.
        max_waiting: Largest number of texts that wait or run. A call that would exceed this number
            raises `OverloadedError`.

    Raises:
        ValueError: If `tokens_per_batch` or `max_waiting` is less than 1.

    Examples:
        >>> from fastbert.inference import DynamicBatcher, Embedder
        >>> batcher = DynamicBatcher(Embedder("out/demo/model"))  # doctest: +SKIP
        >>> batcher("a text").shape  # in any thread  # doctest: +SKIP
        torch.Size([128])
        >>> rows = await batcher.acall(["a text"])  # in a coroutine  # doctest: +SKIP
    """

    def __init__(
        self, model: TextModel, *, tokens_per_batch: int = 2048, max_waiting: int = 1024
    ) -> None:
        """Store the model; the thread starts with the first call."""
        for name, value in (("tokens_per_batch", tokens_per_batch), ("max_waiting", max_waiting)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, allowed: at least 1")
        self.model, self.tokens_per_batch, self.max_waiting = model, tokens_per_batch, max_waiting
        self._closed = False
        self._start()
        _BATCHERS.add(self)

    def _start(self) -> None:
        """Make new locks, an empty queue and a thread; a forked process calls this method again."""
        self._lock, self._computing = threading.Lock(), threading.Lock()
        # A tokenizer of Hugging Face changes its limit of tokens while it encodes, so only one
        # thread may encode at a time.
        self._tokenizing = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._waiting = 0
        # The number of threads that torch uses is a setting of the thread that calls torch, so the
        # batcher's thread copies the setting of the current thread.
        self._thread = ThreadPoolExecutor(
            1, "fastbert-batcher", torch.set_num_threads, (torch.get_num_threads(),)
        )

    def __call__(self, texts: Sequence[Text] | Text, *, timeout: float | None = None) -> Tensor:
        """Compute the rows of texts, and wait for them.

        Args:
            texts: N texts, or one text. A model of pairs takes tuples of two texts.
            timeout: Longest time to wait, in seconds; None waits without a limit. A call that has
                not begun after this time is cancelled.

        Returns:
            The rows, fp32 of shape ``(N, width)``, on the CPU; for one text that is not in a
            sequence, its row of shape ``(width,)``.

        Raises:
            TypeError: If an element of `texts` is neither a str nor a tuple of one or two strs.
            ValueError: If the tokenizer refuses a text.
            OverloadedError: If more than `max_waiting` texts would wait or run.
            TimeoutError: If the rows are not computed within `timeout` seconds.
            RuntimeError: If the batcher is closed.
        """
        call = self._call(texts)
        if timeout is None and self._begin_here(call):
            return self._finish_here(call)
        future = self._enqueue(call)
        try:
            return future.result(timeout)
        finally:
            future.cancel()

    async def acall(self, texts: Sequence[Text] | Text) -> Tensor:
        """Compute the rows of texts without blocking the event loop.

        A coroutine that is cancelled cancels its call, unless the call has begun.

        Args:
            texts: As in `__call__`.

        Returns:
            The rows, as in `__call__`.

        Raises:
            Exception: As in `__call__`, except TimeoutError. The caller can set a limit with
                ``asyncio.timeout``.
        """
        return await asyncio.wrap_future(self.submit(texts))

    def submit(self, texts: Sequence[Text] | Text) -> Future[Tensor]:
        """Encode texts, and put the call into the queue.

        Args:
            texts: As in `__call__`.

        Returns:
            The future of the rows. ``cancel()`` withdraws a call that has not begun.

        Raises:
            Exception: As in `__call__`, except TimeoutError.
        """
        return self._enqueue(self._call(texts))

    def close(self) -> None:
        """Compute the waiting calls, and end the thread. Later calls raise RuntimeError."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=True)

    def __enter__(self) -> DynamicBatcher:
        """Return the batcher, which is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the batcher."""
        self.close()

    def _call(self, texts: Sequence[Text] | Text) -> _Call:
        single = isinstance(texts, (str, tuple))
        return _Call(self._encode([texts] if single else texts), single)  # type: ignore[list-item]

    def _enqueue(self, call: _Call) -> Future[Tensor]:
        """Put a call into the queue, and return its future."""
        if not call.lines:
            call.future.set_result(self._no_rows())
            return call.future
        with self._lock:
            self._enter(call)
            self._calls.append(call)
            self._thread.submit(self._run)
        return call.future

    def _enter(self, call: _Call) -> None:
        """Count the lines of a call as waiting, or raise the error that refuses the call."""
        if self._closed:
            raise RuntimeError("the DynamicBatcher is closed")
        if self._waiting + len(call.lines) > self.max_waiting:
            raise OverloadedError(
                f"texts: got {len(call.lines)} while {self._waiting} wait or run, allowed: "
                f"max_waiting={self.max_waiting} together"
            )
        self._waiting += len(call.lines)

    def _begin_here(self, call: _Call) -> bool:
        """Return whether the calling thread may compute a call; if so, reserve the model for it."""
        tokens = sum(len(line.ids) for line in call.lines)
        if not call.lines or (len(call.lines) > 1 and tokens > self.tokens_per_batch):
            return False
        with self._lock:
            if self._waiting or not self._computing.acquire(blocking=False):
                return False
            try:
                self._enter(call)
            except RuntimeError:
                self._computing.release()
                raise
        return True

    def _finish_here(self, call: _Call) -> Tensor:
        try:
            rows = self._compute(call.lines)
        finally:
            self._computing.release()
            with self._lock:
                self._waiting -= len(call.lines)
        call.add(rows)
        return call.future.result()

    def _encode(self, texts: Sequence[Text]) -> list[Encoded]:
        lines = []
        for number, text in enumerate(texts):
            pair = text if isinstance(text, tuple) else (text,)
            if not 1 <= len(pair) <= 2 or not all(isinstance(part, str) for part in pair):
                got = class_name(text) if not isinstance(text, tuple) else repr(text)
                raise TypeError(
                    f"texts[{number}]: got {got:.200}, allowed: a str or two in a tuple"
                )
            with self._tokenizing:
                lines.append(self.model.tokenizer(pair))
        return lines

    def _no_rows(self) -> Tensor:
        """Return an empty tensor of shape ``(0, width)``; a call of the model gives the width."""
        return self._compute(self._encode(["a"]))[:0]

    def _run(self) -> None:
        """Compute batches until no call waits."""
        while True:
            with self._computing:
                # The batch is taken as late as possible, so that it has all calls that wait.
                batch = self._take()
                results = self._rows_of(batch)
            if not batch:
                return
            for (call, _, _), rows in zip(batch, results, strict=True):
                self._fail(call, rows) if isinstance(rows, Exception) else self._finish(call, rows)

    def _rows_of(self, batch: list[tuple[_Call, int, int]]) -> Sequence[Tensor | Exception]:
        """Return the rows of each call of a batch, or the error of the call."""
        if not batch:
            return []
        lines = [call.lines[first + n] for call, first, count in batch for n in range(count)]
        try:
            return self._compute(lines).split([count for _, _, count in batch])
        except Exception as error:
            return [error] if len(batch) == 1 else [self._rows_of([part])[0] for part in batch]

    def _fail(self, call: _Call, error: Exception) -> None:
        """Set the error of a call, and remove the lines of the call that still wait."""
        with self._lock:
            if self._calls and self._calls[0] is call:
                self._calls.popleft()
            self._waiting -= len(call.lines) - sum(map(len, call.rows))
        call.future.set_exception(error)

    def _take(self) -> list[tuple[_Call, int, int]]:
        """Return the next batch: calls, each with the index of its first line and a line count."""
        batch: list[tuple[_Call, int, int]] = []
        room = self.tokens_per_batch
        with self._lock:
            while self._calls:
                call = self._calls[0]
                first = call.taken
                while call.taken < len(call.lines):
                    tokens = len(call.lines[call.taken].ids)
                    if tokens > room and (batch or call.taken > first):
                        break
                    if call.taken == 0 and not call.future.set_running_or_notify_cancel():
                        self._waiting -= len(call.lines)
                        first = call.taken = len(call.lines)
                        break
                    room -= tokens
                    call.taken += 1
                if call.taken > first:
                    batch.append((call, first, call.taken - first))
                if call.taken < len(call.lines):
                    break
                self._calls.popleft()
        return batch

    def _compute(self, lines: list[Encoded]) -> Tensor:
        with torch.inference_mode():
            return self.model.forward(pack(lines, self.model.device)).float().cpu()

    def _finish(self, call: _Call, rows: Tensor) -> None:
        with self._lock:
            self._waiting -= len(rows)
        call.add(rows)


def _start_again() -> None:
    for batcher in _BATCHERS:
        batcher._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_again)
