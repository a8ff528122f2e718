"""CUDA graphs of the encoder, for low latency with batches of any shape.

The time of a short batch is the time to launch its kernels, several for each layer. A CUDA graph
launches all kernels with one call, but only with the recorded shapes and addresses. A batch is
therefore placed into a bucket (``fastbert.graphs``). The rows of the batch are copied into the
memory of the bucket, the graph of the bucket is replayed, and the rows of the result are copied
out. If a batch has a mask on the GPU, its graph also removes the padding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.graphs.buckets import Bucket, Buckets, PaddedBucket
from fastbert.graphs.cache import Autocast, GraphCache
from fastbert.graphs.recording import Recorder, Recording, Results, cuda_recorder
from fastbert.graphs.static_batch import StaticBatch, StaticPadded, far_bucket, moved
from fastbert.modules import BaseModelOutputWithPooling, BertModel
from fastbert.modules.bert import Encoded
from fastbert.modules.class_name import class_name
from fastbert.modules.inputs import EncoderInput, enter
from fastbert.modules.outputs import as_asked

# The number of times that the function of a bucket runs before a graph records the function.
WARM_UPS = 3


def graphed(
    model: BertModel, *, max_tokens: int = 4096, max_batch: int = 64, max_graphs: int = 64
) -> GraphedModel:
    """Wrap a model for inference at low latency, so that CUDA graphs compute its calls.

    A graph is recorded when its bucket is first used, which takes about as long as a few calls.
    Weights may change in place between calls. The graphs are recorded again after weights were
    moved (``to``, ``half``, assignment), parameters or modules were replaced, or the backend was
    changed.

    On the CPU, the tests use a substitute for CUDA graphs. Three things can be tested only on a
    GPU: whether CUDA can capture every operator, whether the graphs use the shared memory pool one
    after another, and the latency.

    Args:
        model: The model, on a CUDA device. Calls require that it is in eval mode.
        max_tokens: Largest number of tokens of a batch with a graph. A larger batch runs without a
            graph, because its launches do not limit its speed.
        max_batch: Largest number of sequences of a batch with a graph.
        max_graphs: Largest number of graphs. At this number, a new graph replaces the graph whose
            last use is the earliest.

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
            f"graphed: got {class_name(model)}, allowed: BertModel of fastbert (the .bert of a "
            "model with a head)"
        )
    choices = model.config.architecture
    if choices.rotary_bases or choices.measures_distances:
        raise ValueError(
            f"graphed: got a {model.config.model_type}, allowed: an encoder whose attention does "
            "not depend on positions"
        )
    buckets = Buckets(max_tokens, max_batch, model.config.max_length)
    return GraphedModel(model, buckets, max_graphs, lambda device: cuda_recorder(device, "graphed"))


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
        recorder: Function that returns the recorder for a device.
    """

    def __init__(
        self,
        model: BertModel,
        buckets: Buckets,
        max_graphs: int,
        recorder: Callable[[torch.device], Recorder],
    ) -> None:
        """Store the model and the limits; no graph is recorded yet."""
        self.model = model
        self.buckets = buckets
        self._lock = threading.Lock()
        self._cache: GraphCache[_Graph] = GraphCache(max_graphs, recorder, model.device)
        # This list keeps the modules alive, so that no new module gets the id of an old module.
        self._parts = list(model.modules())
        self._recorded_from = self._sources()

    @property
    def recorded(self) -> tuple[Bucket | PaddedBucket, ...]:
        """The buckets that have a graph; the bucket whose last use is the earliest comes first."""
        return tuple(bucket for bucket, _ in self._cache.graphs)

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

        The output has no ``hidden_states`` or ``attentions``. If the inputs are on the CPU, their
        padding is removed on the CPU. If the mask is on the GPU and the padded batch has at most
        ``max_tokens`` positions, the graph removes the padding. A batch without a bucket, or with a
        mask of more than 2 dimensions, runs without a graph.

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
            The last hidden state in the layout of `input_ids`, and the pooler's output of shape
            ``(B, H)``, which is None without a pooler.

        Raises:
            RuntimeError: If the model is in training mode.
            ValueError: As in ``BertModel.forward``.
            TypeError: As in ``BertModel.forward``.
        """
        model = self.model
        if model.training:
            raise RuntimeError("graphed: got a model in training mode, allowed: model.eval()")
        # Memory that is made in inference mode could not be written outside inference mode.
        with torch.inference_mode(False), torch.no_grad(), self._lock:
            if attention_mask is not None and cu_seqlens is None and max_seqlen is None:
                bucket = far_bucket(self.buckets, input_ids, attention_mask)
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

    def _run_padded(
        self, bucket: PaddedBucket, tokens: EncoderInput, mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden state ``(B, L, H)`` and the pooler's output."""
        with self._renewed().turn():
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
            tokens = moved(tokens, self.model.device)
            hidden, pooled = self._compute(tokens)
            return tokens.layout.given(hidden), pooled
        with self._renewed().turn():
            graph = self._graph(bucket)
            assert isinstance(graph.batch, StaticBatch)
            graph.batch.fill(tokens)
            graph.recording.replay()
            hidden, pooled = graph.recording.result
            layout = moved(tokens, self.model.device).layout
            # The next replay overwrites the result, so the result is copied. With padding,
            # `layout.given` makes the copy.
            hidden = hidden[:rows] if layout.indices is not None else hidden[:rows].clone()
            return layout.given(hidden), None if pooled is None else pooled[: layout.batch].clone()

    def _compute(self, tokens: EncoderInput) -> tuple[Tensor, Tensor | None]:
        model, layout = self.model, tokens.layout
        hidden, _, _ = model.encoder(model.embeddings(tokens), layout)
        encoded = Encoded(hidden, layout, None, None)
        return hidden, None if model.pooler is None else model.pool(encoded)

    def _graph(self, bucket: Bucket | PaddedBucket) -> _Graph:
        autocast = Autocast.current(self.model.device)

        def make() -> _Graph:
            batch, compute = self._static(bucket)
            recorder = self._cache.recorder
            with autocast.uncached():
                for _ in range(WARM_UPS):
                    recorder.run(compute)
                return _Graph(batch, recorder.record(compute))

        return self._cache.find(bucket, autocast, make)

    def _static(
        self, bucket: Bucket | PaddedBucket
    ) -> tuple[StaticBatch | StaticPadded, Callable[[], Results]]:
        """Return the memory of a bucket, and the function to record, which reads this memory."""
        if isinstance(bucket, Bucket):
            batch = StaticBatch(bucket, self.model.device)
            return batch, lambda: self._compute(batch.input)
        padded = StaticPadded(bucket, self.model.device)
        return padded, lambda: self._compute_padded(padded)

    def _sources(self) -> tuple[Any, ...]:
        """Return everything on which a recording depends: backend, modules, addresses of weights.

        A replay reads each weight at its recorded address, so a write in place takes effect. A
        replaced module, a new address or a new dtype has no effect on a replay.
        """
        modules = [tuple(map(id, part._modules.values())) for part in self._parts]
        tensors = [t for part in self._parts for t in part._parameters.values() if t is not None]
        return self.model.backend, modules, [(t.data_ptr(), t.dtype) for t in tensors]

    def _renewed(self) -> Recorder:
        """Return the recorder; if the result of `_sources` has changed, free all graphs first."""
        if self._sources() != self._recorded_from:
            self._cache.clear(self.model.device)
            self._parts = list(self.model.modules())
            self._recorded_from = self._sources()
        return self._cache.recorder
