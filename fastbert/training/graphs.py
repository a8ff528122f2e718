"""The training step as CUDA graphs: forward, loss, backward, clipping and the optimizer's step.

The kernel launches of a small model take longer than the kernels themselves. A CUDA graph launches
all kernels of a step at once, with the same shapes and memory addresses as at its recording. A
batch is therefore placed into a bucket, which is a fixed shape that the batch fits
(``fastbert.graphs``). Each bucket has a graph of its own.

A graph reads weights, gradients, optimizer states, the learning rate and the seeds of dropout from
memory. Each replay therefore updates the weights, follows the schedule of the learning rate, and
draws other dropout masks, because the draw of the seeds from torch's generator is part of the
graph. Python numbers, such as a dropout probability, are part of the recording. If such a number
changes, or if a weight is replaced, the graphs are recorded again.

The first batch of a bucket runs without a graph, which also compiles its kernels. The second batch
is recorded and replayed. Every call therefore makes exactly one update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.graphs.buckets import Bucket, Buckets, PaddedBucket
from fastbert.graphs.cache import Autocast, GraphCache
from fastbert.graphs.recording import Recorder, Recording, Results, cuda_recorder
from fastbert.graphs.static_batch import far_bucket, moved
from fastbert.modules.class_name import class_name
from fastbert.modules.inputs import EncoderInput, enter
from fastbert.modules.models.task_model import TaskModel
from fastbert.training.step_input import LABELS, StepInput

# These are the arguments of a batch other than its labels.
TOKENS = (
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen",
)  # fmt: skip
# These attributes of a module have its hooks, which a replay would not call.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes of a module that have these types (numbers, flags and names) are part of a recording.
CONSTANT_TYPES = (bool, int, float, str, type(None))
Observer = Callable[[Any, dict[str, Any]], None]


def graphed_step(
    model: TaskModel,
    optimizer: torch.optim.Optimizer,
    *,
    clip_norm: float | None = None,
    observe: Observer | None = None,
    max_tokens: int = 16384,
    max_batch: int = 1024,
    max_graphs: int = 16,
) -> GraphedStep:
    """Wrap a model and its optimizer, so that CUDA graphs compute whole training steps.

    The gradients exist only inside a step: ``parameter.grad`` is None before and after it. A step
    therefore cannot accumulate gradients of several batches. There is no gradient scaler either,
    because a scaler reads on the CPU whether a gradient is finite. No scaler is needed for bf16.

    The learning rate must be a tensor, because every replay would repeat the value of a Python
    number. A schedule of torch writes its rates into the tensor. To spare a read from the GPU at
    each step of the schedule, give the parameter group a number as ``initial_lr``.

    On the CPU, the tests replay recordings of a substitute for CUDA graphs. Only a GPU can show
    whether every operator may be captured, whether the graphs use their shared memory pool in
    order, and how fast the steps are.

    Args:
        model: The model, on a CUDA device: a ``BertForPreTraining``, ``BertForMaskedLM``,
            ``BertForNextSentencePrediction``, ``BertForTokenClassification``, or a
            ``BertForSequenceClassification`` with integer labels.
        optimizer: Optimizer of torch with ``capturable=True`` and learning rates that are tensors
            on the device.
        clip_norm: Largest L2 norm of the gradient of all weights; None does not limit it.
        observe: Called inside every step, after the backward pass, with the output of the model and
            the batch in the shape of its bucket. Labels of padding are -100 in this batch. The
            function's operations on the GPU, such as additions to a sum, are recorded with the
            step. Its other effects happen only in calls without a graph, and once at the recording.
        max_tokens: Largest number of tokens of a batch with a graph. A larger batch runs without a
            graph, because its launches do not limit its speed.
        max_batch: Largest number of sequences of a batch with a graph.
        max_graphs: Largest number of graphs. Beyond this number, a new graph replaces the least
            recently used graph. Graphs share the memory of their activations.

    Returns:
        A callable that makes one update with the batch that is passed to it.

    Raises:
        TypeError: If `model` has another type, or `optimizer` is not an optimizer of torch.
        ValueError: If `optimizer` is not capturable, a learning rate is not a tensor on the device,
            or `clip_norm` is not above 0.
        RuntimeError: If `model` is not on a CUDA device.

    Examples:
        ```python
        rate = torch.tensor(1e-4, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
        step = fastbert.training.graphed_step(model.train(), optimizer, clip_norm=1.0)
        for batch in batches:
            with torch.autocast("cuda", torch.bfloat16):
                loss = step(**batch).loss
        ```
    """
    if type(model) not in LABELS:
        allowed = ", ".join(kind.__name__ for kind in LABELS)
        raise TypeError(f"model: got {class_name(model)}, allowed: {allowed} of fastbert")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: got {type(optimizer).__name__}, allowed: a torch.optim.Optimizer"
        )
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm: got {clip_norm}, allowed: None or a number > 0")
    buckets = Buckets(max_tokens, max_batch, model.config.max_length)
    return GraphedStep(
        model,
        optimizer,
        buckets,
        max_graphs,
        lambda device: cuda_recorder(device, "graphed_step"),
        clip_norm=clip_norm,
        observe=observe,
    )


class StepResult(NamedTuple):
    """The figures of one step, which later steps do not overwrite.

    Attributes:
        loss: Loss of the batch before the update, of shape ``()``.
        gradient_norm: L2 norm of the gradient before clipping, of shape ``()``; None without
            clipping.
    """

    loss: Tensor
    gradient_norm: Tensor | None


@dataclass
class _Graph:
    input: StepInput
    # Whether the first batch of the bucket, which runs without a graph, has run.
    ran: bool = False
    recording: Recording | None = None


class GraphedStep:
    """Training steps that run as CUDA graphs, from `graphed_step`.

    Args:
        model: The model.
        optimizer: The optimizer.
        buckets: The limits of a batch with a graph.
        max_graphs: Largest number of graphs.
        recorder: Function that makes the recorder for a device.
        clip_norm: As in `graphed_step`.
        observe: As in `graphed_step`.
    """

    def __init__(
        self,
        model: TaskModel,
        optimizer: torch.optim.Optimizer,
        buckets: Buckets,
        max_graphs: int,
        recorder: Callable[[torch.device], Recorder],
        *,
        clip_norm: float | None = None,
        observe: Observer | None = None,
    ) -> None:
        """Store the model and the limits; no graph is recorded yet."""
        _check_optimizer(optimizer, model.device)
        self.model, self.optimizer = model, optimizer
        self.buckets = buckets
        self.clip_norm, self.observe = clip_norm, observe
        self._labels = LABELS[type(model)]
        self._lock = threading.Lock()
        self._cache: GraphCache[_Graph] = GraphCache(max_graphs, recorder, model.device)
        self._look_at_modules()
        self._recorded_from = self._sources()

    @property
    def recorded(self) -> tuple[Bucket | PaddedBucket, ...]:
        """The buckets that have a graph, in the order of their last use."""
        graphs = self._cache.graphs.items()
        return tuple(bucket for (bucket, _), graph in graphs if graph.recording is not None)

    def __call__(self, **batch: Any) -> StepResult:
        """Make one update.

        The batch may be on the CPU; its padding is then removed on the CPU. If the mask is on the
        GPU and the padded batch fits the limits, the graph itself removes the padding. A step runs
        without a graph if it is the first step of its bucket, or if the batch has no bucket or a
        mask of more than 2 dimensions. It also runs without a graph if the model or the optimizer
        has hooks, which a replay would not call.

        Args:
            **batch: Arguments of the model's forward by name: ``input_ids``, all labels of the
                model, and optionally ``attention_mask``, ``token_type_ids``, ``position_ids``,
                ``cu_seqlens`` and ``max_seqlen``.

        Returns:
            The loss and the norm of the gradient, detached.

        Raises:
            RuntimeError: If the model is in eval mode.
            ValueError: As in the model's forward; or if an argument is unknown or missing, a weight
                has a gradient, the model has gradient checkpointing, autocast is fp16, or the
                optimizer no longer meets the conditions of `graphed_step`.
            TypeError: As in the model's forward.
        """
        self._check(batch)
        given = {name: value for name, value in batch.items() if value is not None}
        # Memory that is made in inference mode could not be written outside inference mode.
        with torch.inference_mode(False), torch.enable_grad(), self._lock:
            labels = {name: given.pop(name) for name in self._labels}
            far = None
            if "cu_seqlens" not in given:
                far = far_bucket(self.buckets, given.get("input_ids"), given.get("attention_mask"))
            mask = None if far is None else given.pop("attention_mask")
            tokens = enter(self.model.config, **given)
            layout = tokens.layout
            for name, kind in self._labels.items():
                labels[name] = kind.check(name, labels[name], layout, self.model.config)
            if far is not None:
                return self._in_bucket(far, tokens, mask, labels)
            longest = layout.max_seqlen or layout.length
            bucket = self.buckets.find(tokens.positions.shape[0], layout.batch, longest)
            if bucket is None or layout.mask is not None:
                return self._without_bucket(given | labels)
            for name, kind in self._labels.items():
                if kind.per_token:
                    labels[name] = layout.rows(labels[name])
            return self._in_bucket(bucket, tokens, None, labels)

    def _check(self, batch: dict[str, Any]) -> None:
        if not self.model.training:
            raise RuntimeError("graphed_step: got a model in eval mode, allowed: model.train()")
        known = (*TOKENS, *self._labels)
        for name in batch:
            if name not in known:
                raise ValueError(f"batch: got {name}, allowed: {', '.join(known)}")
        for name in self._labels:
            if batch.get(name) is None:
                raise ValueError(f"{name}: got None, allowed: the labels, as the step needs a loss")
        if self.model.bert.encoder.gradient_checkpointing:
            raise ValueError(
                "gradient_checkpointing: got True, allowed: False, because a checkpoint reads the "
                "state of torch's generator on the CPU"
            )
        kind = self.model.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise ValueError(
                "autocast: got float16, allowed: bfloat16 or none, because float16 needs a "
                "gradient scaler, which reads on the CPU whether a gradient is finite"
            )
        if any(weight.grad is not None for weight in self._weights()):
            named = self.model.named_parameters()
            name = next(name for name, weight in named if weight.grad is not None)
            raise ValueError(
                f"{name}.grad: got a tensor, allowed: None, because a step does not add to "
                "earlier gradients: optimizer.zero_grad()"
            )

    def _without_bucket(self, batch: dict[str, Any]) -> StepResult:
        device = self.model.device
        there = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        recorder = self._renewed()
        with recorder.turn():
            result = _own(recorder.run(lambda: self._update(there)))
            self._recorded_from = self._sources()
        return result

    def _in_bucket(
        self,
        bucket: Bucket | PaddedBucket,
        tokens: EncoderInput,
        mask: Tensor | None,
        labels: dict[str, Tensor],
    ) -> StepResult:
        device = self.model.device
        tokens = moved(tokens, device, non_blocking=True)
        autocast = Autocast.current(device)
        recorder = self._renewed()
        with recorder.turn():
            graph = self._cache.find(
                bucket, autocast, lambda: _Graph(StepInput(bucket, self._labels, device))
            )
            graph.input.fill(tokens, mask, labels)

            def update() -> Results:
                return self._update(graph.input.arguments())

            with autocast.uncached():
                if not graph.ran or self._has_hooks():
                    result = _own(recorder.run(update))
                    graph.ran = True
                    # The first step of the optimizer creates its states, which `_sources`
                    # includes.
                    self._recorded_from = self._sources()
                    return result
                if graph.recording is None:
                    graph.recording = recorder.record(update)
            graph.recording.replay()
            return _own(graph.recording.result)

    def _update(self, arguments: dict[str, Any]) -> Results:
        """Make one update with a batch on the device; a CUDA graph records this function."""
        weights = [p for p in self.model.parameters() if p.requires_grad]
        try:
            output = self.model(
                **arguments, output_attentions=False, output_hidden_states=False, return_dict=True
            )
            output.loss.backward()
            norm = None
            if self.clip_norm is not None:
                norm = nn.utils.clip_grad_norm_(weights, self.clip_norm)
            if self.observe is not None:
                self.observe(output, arguments)
            self.optimizer.step()
        finally:
            # The memory of the gradients goes back to the pool, for the next graph.
            for weight in weights:
                weight.grad = None
        return output.loss.detach(), norm

    def _sources(self) -> tuple[Any, ...]:
        """Return everything on which a recording depends.

        A replay reads a tensor at its address, so it uses values that were written in place. A
        replay does not notice a replaced tensor, a newly frozen parameter, or a changed number in a
        module or in the optimizer.
        """
        # Every step calls this method, which examines hundreds of objects. It therefore uses list
        # comprehensions, which call no Python function for each object.
        parts = self._parts
        modules = [id(m) for part in parts for m in part._modules.values()]
        numbers = [values.get(name) for values, name in self._numbers]
        tensors = [
            t
            for part in parts
            for named in (part._parameters, part._buffers)
            for t in named.values()
            if t is not None
        ]
        weights = [(t.data_ptr(), t.dtype, t.requires_grad) for t in tensors]
        groups = [
            value.data_ptr() if isinstance(value, Tensor) else value
            for group in self.optimizer.param_groups
            for name, value in group.items()
            if name != "params"
        ]
        states = [
            value.data_ptr()
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return modules, numbers, weights, groups, states

    def _renewed(self) -> Recorder:
        """Return the recorder; discard all graphs if modules, tensors or numbers have changed."""
        if self._sources() != self._recorded_from:
            _check_optimizer(self.optimizer, self.model.device)
            self._cache.clear(self.model.device)
            self._look_at_modules()
            self._recorded_from = self._sources()
        return self._cache.recorder

    def _look_at_modules(self) -> None:
        """Store the modules, and where to find the constants of each module.

        While a module is stored, Python does not give its id to another object.
        """
        self._parts = list(self.model.modules())
        self._numbers = [
            (part.__dict__, name)
            for part in self._parts
            for name, value in part.__dict__.items()
            if isinstance(value, CONSTANT_TYPES)
        ]

    def _has_hooks(self) -> bool:
        """Return whether hooks, which are Python functions of the caller, run inside a step."""
        optimizer = self.optimizer
        return bool(
            nn.modules.module._has_any_global_hook()
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or any(getattr(part, name) for part in self._parts for name in HOOKS)
            or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._weights())
        )

    def _weights(self) -> Iterator[Tensor]:
        for part in self._parts:
            for parameter in part._parameters.values():
                if parameter is not None:
                    yield parameter


def _own(result: Results) -> StepResult:
    """Return a copy of a result, because the next replay overwrites the result's memory."""
    loss, norm = result
    return StepResult(loss.clone(), None if norm is None else norm.clone())


def _check_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raise ValueError if a graph cannot contain a step of the optimizer."""
    for number, group in enumerate(optimizer.param_groups):
        if not group.get("capturable", False):
            raise ValueError(
                f"optimizer: got {type(optimizer).__name__} with a group {number} that is not "
                "capturable, allowed: capturable=True, because other optimizers count their steps "
                "on the CPU"
            )
        rate = group["lr"]
        if not isinstance(rate, Tensor) or rate.device != device:
            raise ValueError(
                f"optimizer: got a learning rate of {rate!r} in group {number}, allowed: a tensor "
                f"on {device}, because a graph would keep a number for ever"
            )
