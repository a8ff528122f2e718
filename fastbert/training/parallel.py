"""The work of several processes: copies of a model (DDP), shards (FSDP2), and shared batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from fastbert.training import checkpoints

if TYPE_CHECKING:
    from accelerate import Accelerator

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def check_shards(accelerator: Accelerator) -> None:
    """Raise ValueError if the run has only one process, which cannot divide a model."""
    if accelerator.num_processes == 1:
        raise ValueError(
            "shard: got True with 1 process, allowed: several processes, which torchrun or "
            "accelerate launch starts"
        )


def in_turns(
    batches: Sequence[Batch],
    compute: Callable[[Sequence[Batch]], list[Result]],
    accelerator: Accelerator | None,
) -> list[Result]:
    """Compute a result for each batch; the processes share the batches.

    With P processes, process p computes the batches p, p + P, p + 2P and so on.

    Args:
        batches: The batches, which are the same in all processes.
        compute: Returns the results of some batches.
        accelerator: The processes; each of them must call this function. None means that this
            process computes all batches.

    Returns:
        The results in the order of the batches, in every process.
    """
    processes = 1 if accelerator is None else accelerator.num_processes
    if accelerator is None or processes == 1:
        return compute(batches)
    from accelerate.utils import gather_object

    parts = gather_object([compute(batches[accelerator.process_index :: processes])])
    return [parts[turn % processes][turn // processes] for turn in range(len(batches))]


class Copies:
    """Copies of the model: each process has the whole model, and DDP averages the gradients."""

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        """Move the model to the device of this process; with several processes, wrap it in DDP."""
        self._accelerator = accelerator
        self.model: Any = accelerator.prepare(model)

    def local_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a backward pass exchanges no gradients between processes."""
        return self._accelerator.no_sync(self.model)

    def clip(self, norm: float) -> Tensor:
        """Limit the L2 norm of the gradient to `norm`, and return the norm before clipping."""
        norm_before = self._accelerator.clip_grad_norm_(self.model.parameters(), norm)
        assert norm_before is not None
        return norm_before

    def rest(self) -> None:
        """Do nothing, because the forward pass of a copy gathers no weights."""


class Shards:
    """Shards of the model: each process has a part of each weight, gradient and moment.

    FSDP2 gathers the weights of the whole model for a step. Between the steps, each process holds
    only its own parts (Rajbhandari et al. 2020).
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        """Divide the weights over all processes.

        Args:
            accelerator: accelerate's `Accelerator` of the run.
            model: The model, with the same weights in all processes.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        device = accelerator.device
        mesh = init_device_mesh(device.type, (accelerator.num_processes,))
        self.model: Any = fully_shard(model.to(device), mesh=mesh, reshard_after_forward=False)

    @contextlib.contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Return a context in which a backward pass exchanges no gradients between processes."""
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def clip(self, norm: float) -> Tensor:
        """Limit the L2 norm of the gradient to `norm`, and return the norm before clipping."""
        return checkpoints.whole_here(nn.utils.clip_grad_norm_(self.model.parameters(), norm))

    def rest(self) -> None:
        """Free the gathered weights that stay after a forward pass without a backward pass."""
        self.model.reshard()
