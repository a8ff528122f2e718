"""CUDA graphs of the encoder, for low latency with batches of any shape.

The time of a short batch is the time to launch its kernels, several for each layer. A CUDA graph
launches all kernels at once, but always with the recorded shapes in the recorded memory. A batch is
therefore placed into a bucket of the same or a larger size. The rows of the batch are copied into
the buffers of the bucket, the graph of the bucket is replayed, and the rows of the result are
copied out.

The remaining rows of a bucket come after ``cu_seqlens[-1]``. Attention never reads these rows, and
every other operation computes each row on its own. The remaining sequences have no token.

A mask on the GPU would have to be read before its padding could be removed, and the CPU would wait.
The graph of such a batch removes the padding itself. Its rows are all places of the padded batch:
the tokens first, then the padding. So the GEMMs compute the padding too, but the CPU never waits.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.modules import BaseModelOutputWithPooling, BertModel
from fastbert.modules.batch_layout import BatchLayout
from fastbert.modules.bert import Encoded
from fastbert.modules.inputs import EncoderInput, enter
from fastbert.modules.outputs import as_asked

WARM_UPS = 3
SMALLEST = 16


def graphed(
    model: BertModel, *, max_tokens: int = 4096, max_batch: int = 64, max_graphs: int = 64
) -> GraphedModel:
    """Wrap a model for inference at low latency, so that CUDA graphs compute its calls.

    A graph is recorded when its bucket is first used, which takes about as long as a few calls.
    Weights may change in place between calls. The graphs are recorded again after weights were
    moved (``to``, ``half``, assignment), parameters or modules were replaced, or the backend was
    changed.

    The tests replay recordings of a substitute on the CPU. Only a GPU can show that a capture is
    allowed for every operator, that the shared memory pool is used in order, and the latency.

    Args:
        model: The model, on a CUDA device. Calls require that it is in eval mode.
        max_tokens: Largest number of tokens of a batch with a graph. A larger batch runs without a
            graph, because its launches do not limit its speed.
        max_batch: Largest number of sequences of a batch with a graph.
        max_graphs: Largest number of graphs. A new graph then replaces the graph whose last use is
            the earliest.

    Returns:
        An object that is called like the model and computes no gradients.

    Raises:
        TypeError: If `model` is not a ``BertModel``.
        ValueError: If the attention of `model` depends on the positions of tokens: rotary
            embeddings, windows or relative distances.
        RuntimeError: If `model` is not on a CUDA device.

    Examples:
        ```python
        model = fastbert.graphed(BertModel.from_pretrained(folder).to("cuda").eval())
        hidden = model(input_ids, attention_mask).last_hidden_state
        ```
    """
    if not isinstance(model, BertModel):
        raise TypeError(
            f"graphed: got {type(model).__name__}, allowed: BertModel (the .bert of a model with "
            "a head)"
        )
    choices = model.config.architecture
    if choices.rotary_bases or choices.windows or choices.distance_buckets:
        raise ValueError(
            f"graphed: got a {model.config.model_type}, allowed: an encoder whose attention does "
            "not depend on positions"
        )
    buckets = Buckets(max_tokens, max_batch, model.config.max_length)
    return GraphedModel(model, buckets, max_graphs, _cuda_recorder)


# Buckets


class Bucket(NamedTuple):
    """The shape of one graph: numbers of rows and sequences, and the longest sequence that fits."""

    tokens: int
    batch: int
    max_seqlen: int


class PaddedBucket(NamedTuple):
    """The shape of one graph that removes the padding: number of sequences and their length."""

    batch: int
    length: int


class Buckets(NamedTuple):
    """The limits of a batch with a bucket: numbers of tokens and sequences, and sequence length."""

    max_tokens: int
    max_batch: int
    max_seqlen: int

    def find_padded(self, batch: int, length: int) -> PaddedBucket | None:
        """Return the smallest bucket that holds a padded batch, whose places are all rows.

        Args:
            batch: Number of sequences.
            length: Length of the padded batch.

        Returns:
            The bucket, or None if the batch exceeds a limit or has no place.

        Examples:
            >>> from fastbert.inference.graphs import Buckets
            >>> Buckets(max_tokens=4096, max_batch=64, max_seqlen=512).find_padded(3, 20)
            PaddedBucket(batch=4, length=24)
        """
        if batch * length == 0 or batch > self.max_batch or length > self.max_seqlen:
            return None
        sequences = min(_power_of_two(batch), self.max_batch)
        places = min(_step(length), self.max_seqlen)
        fits = sequences * places <= self.max_tokens
        return PaddedBucket(sequences, places) if fits else None

    def find(self, tokens: int, batch: int, max_seqlen: int) -> Bucket | None:
        """Return the smallest bucket that holds a batch.

        The numbers of tokens are the powers of two and the numbers halfway between them: 16, 24,
        32, 48, …. Therefore less than a third of the rows is unused. The numbers of sequences and
        their lengths are powers of two, because they cost next to nothing without tokens.

        Args:
            tokens: Number of tokens of the batch.
            batch: Number of sequences.
            max_seqlen: Length of the longest sequence.

        Returns:
            The bucket, or None if the batch exceeds a limit or has no token.

        Examples:
            >>> from fastbert.inference.graphs import Buckets
            >>> Buckets(max_tokens=4096, max_batch=64, max_seqlen=512).find(20, 3, 9)
            Bucket(tokens=24, batch=4, max_seqlen=16)
        """
        limits = (self.max_tokens, self.max_batch, self.max_seqlen)
        asked = (tokens, batch, max_seqlen)
        if tokens == 0 or any(n > most for n, most in zip(asked, limits, strict=True)):
            return None
        rows = min(_step(tokens), self.max_tokens)
        longest = min(_power_of_two(max(max_seqlen, SMALLEST)), rows, self.max_seqlen)
        return Bucket(rows, min(_power_of_two(batch), self.max_batch), longest)


def _step(number: int) -> int:
    """Return the smallest of 16, 24, 32, 48, … that is at least `number`."""
    power = _power_of_two(max(number, SMALLEST))
    halfway = power // 4 * 3
    return halfway if SMALLEST <= halfway >= number else power


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


# Memory that keeps its address


class StaticBatch:
    """The memory that a recorded function reads: a packed batch in the shape of its bucket.

    Args:
        bucket: The shape of the batch.
        device: The device of the memory.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        """Allocate the memory, which holds a batch without tokens."""
        self.ids, self.token_types, self.positions = (
            torch.zeros(bucket.tokens, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.cu_seqlens = torch.zeros(bucket.batch + 1, dtype=torch.int32, device=device)
        layout = BatchLayout(bucket.batch, bucket.max_seqlen, self.cu_seqlens, bucket.max_seqlen)
        self.input = EncoderInput(self.ids, None, self.token_types, self.positions, layout)

    def fill(self, tokens: EncoderInput) -> None:
        """Copy a batch into the memory.

        The rows after the batch keep the ids of an earlier batch, or 0; all of them are valid ids.
        """
        assert tokens.ids is not None
        rows, batch = tokens.ids.shape[0], tokens.layout.batch
        self.ids[:rows].copy_(tokens.ids)
        if tokens.token_types is not None:
            self.token_types[:rows].copy_(tokens.token_types)
        self.positions[:rows].copy_(tokens.positions)
        ends = _ends(tokens.layout, tokens.ids.device)
        self.cu_seqlens[: batch + 1].copy_(ends)
        # The remaining sequences have no token.
        self.cu_seqlens[batch + 1 :].copy_(ends[-1:].expand(self.cu_seqlens.shape[0] - batch - 1))


class StaticPadded:
    """The memory that a recorded function reads: a padded batch in the shape of its bucket.

    Args:
        bucket: The shape of the batch.
        device: The device of the memory.
    """

    def __init__(self, bucket: PaddedBucket, device: torch.device) -> None:
        """Allocate the memory, which holds a batch without tokens."""
        self.bucket = bucket
        self.ids, self.token_types, self.positions = (
            torch.zeros(bucket, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.exists = torch.zeros(bucket, dtype=torch.bool, device=device)

    def fill(self, tokens: EncoderInput, mask: Tensor) -> None:
        """Copy a batch into the memory.

        Args:
            tokens: The batch in a uniform layout, padding included.
            mask: Mask of shape ``(B, L)``; a token exists where it is not 0.
        """
        assert tokens.ids is not None
        shape = mask.shape
        corner = (slice(shape[0]), slice(shape[1]))
        self.ids[corner].copy_(tokens.ids.view(shape))
        if tokens.token_types is not None:
            self.token_types[corner].copy_(tokens.token_types.view(shape))
        self.positions[corner].copy_(tokens.positions.view(shape))
        self.exists.zero_()
        self.exists[corner].copy_(mask)

    def unpadded(self) -> tuple[EncoderInput, Tensor]:
        """Remove the padding without a read from the device; this is recorded.

        Returns:
            The rows, first those of the tokens, then those of the padding, which belong to no
            sequence; and the row of each place in the padded batch, int64 of shape ``(B · L,)``.
        """
        exists = self.exists.flatten()
        lengths = self.exists.sum(1, dtype=torch.int32)
        cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        padding = ~exists
        rows = torch.where(exists, exists.cumsum(0), exists.sum() + padding.cumsum(0)) - 1
        places = torch.arange(rows.shape[0], device=rows.device)
        indices = torch.empty_like(rows).scatter_(0, rows, places)
        batch, length = self.bucket
        layout = BatchLayout(batch, length, cu_seqlens, length, indices)
        ids, types, positions = (
            x.flatten().index_select(0, indices)
            for x in (self.ids, self.token_types, self.positions)
        )
        return EncoderInput(ids, None, types, positions, layout), rows


def _ends(layout: BatchLayout, device: torch.device) -> Tensor:
    """Return the ``cu_seqlens`` of any layout."""
    if layout.cu_seqlens is not None:
        return layout.cu_seqlens
    last = layout.batch * layout.length
    return torch.arange(0, last + 1, layout.length, dtype=torch.int32, device=device)


# Recording


class Recording(NamedTuple):
    """A recorded function, whose ``replay()`` computes ``result`` again in the same memory."""

    replay: Callable[[], None]
    result: tuple[Tensor, Tensor | None]


class Recorder(Protocol):
    """An object that records functions which read and write the same memory in every call."""

    def record(self, function: Callable[[], tuple[Tensor, Tensor | None]]) -> Recording:
        """Record a function."""
        ...

    def turn(self) -> AbstractContextManager[None]:
        """Return a block that runs its replays and copies after all earlier blocks."""
        ...

    def finish(self) -> None:
        """Wait for the last turn, after which the memory of recordings may be freed."""
        ...


class CudaRecorder:
    """A recorder of CUDA graphs that share one memory pool, and so one set of intermediate results.

    The sharing is safe because turns run one after another on all streams, and because a result is
    copied in the turn that replays its graph.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        """Create the memory pool."""
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.last: torch.cuda.Event | None = None

    def record(self, function: Callable[[], tuple[Tensor, Tensor | None]]) -> Recording:
        """Record a function as a CUDA graph, after `WARM_UPS` calls outside the graph."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # These calls compile kernels and open libraries, which a capture cannot contain.
                for _ in range(WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device.
            with torch.cuda.graph(
                graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"
            ):
                result = function()
        return Recording(graph.replay, result)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the current stream wait for the last turn, and mark the end of this turn."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if self.last is not None:
                stream.wait_event(self.last)
            yield
            self.last = stream.record_event()

    def finish(self) -> None:
        """Wait for the last turn."""
        if self.last is not None:
            self.last.synchronize()


def _cuda_recorder(device: torch.device) -> CudaRecorder:
    if device.type != "cuda":
        lacking = "move it there" if torch.cuda.is_available() else "this machine has none"
        raise RuntimeError(
            f"graphed: got a model on {device}, allowed: a CUDA device, for CUDA graphs ({lacking})"
        )
    return CudaRecorder(device)


# The model


class _Graph(NamedTuple):
    batch: StaticBatch | StaticPadded
    recording: Recording


class GraphedModel:
    """A model whose calls run as CUDA graphs; `graphed` makes it.

    Threads and streams may share a graphed model, because its calls take turns.

    Args:
        model: The model.
        buckets: The limits of a batch with a graph.
        max_graphs: Largest number of graphs.
        recorder: Makes the recorder for a device.
    """

    def __init__(
        self,
        model: BertModel,
        buckets: Buckets,
        max_graphs: int,
        recorder: Callable[[torch.device], Recorder],
    ) -> None:
        """Keep the model and the limits; no graph is recorded yet."""
        self.model = model
        self.buckets = buckets
        self.max_graphs = max_graphs
        self._lock = threading.Lock()
        self._new_recorder = recorder
        self._recorder = recorder(model.device)
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        # They are kept, so that no other module gets their ids.
        self._parts = list(model.modules())
        self._recorded_from = self._sources()

    @property
    def recorded(self) -> tuple[Bucket | PaddedBucket, ...]:
        """The buckets that have a graph, in the order of their last use."""
        return tuple(bucket for bucket, *_ in self._graphs)

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPooling | tuple[Any, ...]:
        """Compute ``BertModel.forward`` without gradients.

        There are no ``hidden_states`` or ``attentions``. The inputs may be on the CPU; their
        padding is then removed there. The graph of a mask on the GPU removes the padding itself, if
        all places of the padded batch fit ``max_tokens``. A batch without a bucket, or with a mask
        of more than 2 dimensions, runs without a graph.

        Args:
            input_ids: Token ids, integer of shape ``(B, L)``, or packed, of shape ``(T,)``.
            attention_mask: As in ``BertModel.forward``.
            token_type_ids: Token types in the shape of `input_ids`.
            position_ids: Positions, as in ``BertModel.forward``.
            cu_seqlens: Cumulative lengths of packed sequences, int32 of shape ``(B + 1,)``.
            max_seqlen: Length of the longest packed sequence.
            return_dict: Whether the result is an output object instead of a tuple; None takes the
                value of the configuration.

        Returns:
            The last hidden state in the layout of the caller, and the pooler's output of shape
            ``(B, H)`` or None.

        Raises:
            RuntimeError: If the model is in training mode.
            ValueError: As ``BertModel.forward``.
            TypeError: As ``BertModel.forward``.
        """
        model = self.model
        if model.training:
            raise RuntimeError("graphed: got a model in training mode, allowed: model.eval()")
        # Memory that is made in inference mode could not be written outside inference mode.
        with torch.inference_mode(False), torch.no_grad(), self._lock:
            if attention_mask is not None and cu_seqlens is None and max_seqlen is None:
                bucket = self._padded_bucket(input_ids, attention_mask)
                if bucket is not None:
                    given = (input_ids, None, token_type_ids, position_ids)
                    tokens = enter(model.config, *given)
                    output = BaseModelOutputWithPooling(
                        *self._run_padded(bucket, tokens, attention_mask)
                    )
                    return as_asked(output, model.flag("return_dict", return_dict, True))
            tokens = enter(
                model.config,
                input_ids,
                attention_mask,
                token_type_ids,
                position_ids,
                None,
                cu_seqlens,
                max_seqlen,
            )
            output = BaseModelOutputWithPooling(*self._run(tokens))
        return as_asked(output, model.flag("return_dict", return_dict, True))

    def _padded_bucket(self, ids: Tensor, mask: Tensor) -> PaddedBucket | None:
        """Return the bucket of a padded batch whose mask the CPU should not read, or None."""
        if not _is_far(mask) or mask.dim() != 2 or mask.shape != ids.shape:
            return None
        return self.buckets.find_padded(*mask.shape)

    def _run_padded(
        self, bucket: PaddedBucket, tokens: EncoderInput, mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden state ``(B, L, H)`` and the pooler's output."""
        self._renew()
        with self._recorder.turn():
            graph = self._graph(bucket)
            assert isinstance(graph.batch, StaticPadded)
            graph.batch.fill(tokens, mask)
            graph.recording.replay()
            hidden, pooled = graph.recording.result
            batch, length = mask.shape
            own = hidden[:batch, :length].clone()
            return own, None if pooled is None else pooled[:batch].clone()

    def _compute_padded(self, batch: StaticPadded) -> tuple[Tensor, Tensor | None]:
        tokens, rows = batch.unpadded()
        hidden, pooled = self._compute(tokens)
        padded = hidden.index_select(0, rows).view(*batch.bucket, -1)
        return padded.masked_fill(~batch.exists.unsqueeze(-1), 0.0), pooled

    def _run(self, tokens: EncoderInput) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden state in the caller's layout, and the pooler's output."""
        assert tokens.ids is not None
        layout, rows = tokens.layout, tokens.ids.shape[0]
        bucket = self.buckets.find(rows, layout.batch, layout.max_seqlen or layout.length)
        if bucket is None or layout.mask is not None:
            tokens = _to(tokens, self.model.device)
            hidden, pooled = self._compute(tokens)
            return tokens.layout.given(hidden), pooled
        self._renew()
        with self._recorder.turn():
            graph = self._graph(bucket)
            assert isinstance(graph.batch, StaticBatch)
            graph.batch.fill(tokens)
            graph.recording.replay()
            hidden, pooled = graph.recording.result
            layout = _to(tokens, self.model.device).layout
            # The next replay overwrites the result, so it is copied. With padding,
            # `layout.given` makes the copy.
            hidden = hidden[:rows] if layout.indices is not None else hidden[:rows].clone()
            return layout.given(hidden), None if pooled is None else pooled[: layout.batch].clone()

    def _compute(self, tokens: EncoderInput) -> tuple[Tensor, Tensor | None]:
        model, layout = self.model, tokens.layout
        hidden, _, _ = model.encoder(model.embeddings(tokens), layout)
        encoded = Encoded(hidden, layout, None, None)
        return hidden, None if model.pooler is None else model.pool(encoded)

    def _graph(self, bucket: Bucket | PaddedBucket) -> _Graph:
        device = self.model.device
        mixed = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type)
        key = (bucket, mixed, dtype)
        if key not in self._graphs:
            while len(self._graphs) >= self.max_graphs:
                self._recorder.finish()
                self._graphs.popitem(last=False)
            batch, compute = self._static(bucket)
            # A graph must not read weights from autocast's cache, which ends with its block.
            with torch.autocast(device.type, dtype, enabled=mixed, cache_enabled=False):
                recording = self._recorder.record(compute)
            self._graphs[key] = _Graph(batch, recording)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _static(
        self, bucket: Bucket | PaddedBucket
    ) -> tuple[StaticBatch | StaticPadded, Callable[[], tuple[Tensor, Tensor | None]]]:
        """Return the memory of a bucket and the function that is recorded on it."""
        if isinstance(bucket, Bucket):
            batch = StaticBatch(bucket, self.model.device)
            return batch, lambda: self._compute(batch.input)
        padded = StaticPadded(bucket, self.model.device)
        return padded, lambda: self._compute_padded(padded)

    def _sources(self) -> tuple[Any, ...]:
        """Return everything on which a recording depends: backend, modules, addresses of weights.

        A replay reads a weight at its address, so it sees a write in place. It does not see another
        module, address or dtype.
        """
        modules = [tuple(map(id, part._modules.values())) for part in self._parts]
        tensors = [t for part in self._parts for t in part._parameters.values() if t is not None]
        return self.model.backend, modules, [(t.data_ptr(), t.dtype) for t in tensors]

    def _renew(self) -> None:
        """Forget all graphs if they were recorded from other modules or tensors."""
        if self._sources() != self._recorded_from:
            self._recorder.finish()
            self._graphs.clear()
            self._recorder = self._new_recorder(self.model.device)
            self._parts = list(self.model.modules())
            self._recorded_from = self._sources()


def _is_far(mask: Tensor) -> bool:
    """Tell whether a read of `mask` lets the CPU wait for a GPU."""
    return mask.device.type != "cpu"


def _to(tokens: EncoderInput, device: torch.device) -> EncoderInput:
    """Move `tokens` to `device`, because the padding may have been removed on the CPU."""
    if tokens.positions.device == device:
        return tokens
    layout = tokens.layout
    tensors = {
        name: getattr(layout, name).to(device)
        for name in ("cu_seqlens", "indices", "mask", "bias")
        if getattr(layout, name) is not None
    }
    assert tokens.ids is not None
    types = None if tokens.token_types is None else tokens.token_types.to(device)
    rows = (tokens.ids.to(device), None, types, tokens.positions.to(device))
    return EncoderInput(*rows, dataclasses.replace(layout, **tensors))
