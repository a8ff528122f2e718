"""When the CPU's copies of weights are put out of date.

The extension keeps a copy of each weight in the layout of its products, and ``JoinedLinear`` one
joined copy of query, key and value. Each copy is judged by a fingerprint in every call
(``csrc/cpu/gemm/fingerprint.h``). The events below leave nothing to judge: after them every weight
is copied again. An optimizer's step and a backward pass also mark the process as one that trains,
in which every call reads the whole of each weight before it takes a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastbert.ops import backend as backends

_last_backward = -1


def forget() -> None:
    """Put every copy out of date: weights may have changed."""
    if backends.EXTENSION is not None:
        backends.EXTENSION.expire_packed()


def note_training() -> None:
    """Put every copy out of date, and mark this process as one that trains."""
    if backends.EXTENSION is not None:
        backends.EXTENSION.expect_writes(True)
        backends.EXTENSION.expire_packed()


def note_backward() -> None:
    """``note_training``, once for each backward pass. Called by every gradient of ours."""
    global _last_backward
    number = torch._C._current_graph_task_id()
    if number != _last_backward:
        _last_backward = number
        note_training()


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        note_training()


register_optimizer_step_post_hook(_after_step)
