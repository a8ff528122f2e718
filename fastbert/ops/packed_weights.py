"""The events after which the CPU's copies of weights are out of date.

The extension keeps a prepacked copy of each weight, and ``JoinedLinear`` keeps a joined copy of
query, key and value. Every call checks the fingerprint of a copy
(``csrc/cpu/gemm/fingerprint.h``). After the events below, every weight is copied again without this
check. An optimizer's step and a backward pass also mark the process as a training process. In such
a process, every call reads a whole weight before it uses the copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastbert.ops import backend as backends

_last_backward = -1


def forget() -> None:
    """Mark every copy as out of date, because weights may have changed."""
    if backends.EXTENSION is not None:
        backends.EXTENSION.expire_packed()


def note_training() -> None:
    """Mark every copy as out of date, and this process as a training process."""
    if backends.EXTENSION is not None:
        backends.EXTENSION.expect_writes(True)
        backends.EXTENSION.expire_packed()


def note_backward() -> None:
    """Call `note_training` once for each backward pass; every gradient of fastbert calls this."""
    global _last_backward
    number = torch._C._current_graph_task_id()
    if number != _last_backward:
        _last_backward = number
        note_training()


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        note_training()


register_optimizer_step_post_hook(_after_step)
