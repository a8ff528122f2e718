"""The search for the checkpoint that a run continues, and its comparison with the new run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastbert import folder_lock
from fastbert.training import checkpoints, meeting

if TYPE_CHECKING:
    from accelerate import Accelerator

# The longest wait, in seconds, for the processes of an earlier attempt of the same job to end.
PATIENCE = 60.0


def starts_anew(output: Path, overwrite: bool, accelerator: Accelerator) -> bool:
    """Return whether a run deletes the checkpoints of its folder and starts from the first step.

    After a failure, torchrun starts the same command again. The option `overwrite` applies to the
    first attempt of a job only, so that a later attempt resumes from the checkpoints of the job.

    Args:
        output: Folder of the run.
        overwrite: The option of the run.
        accelerator: accelerate's `Accelerator` of the run, whose processes must all call this
            function.
    """
    anew = overwrite and not (accelerator.is_main_process and meeting.begun_before(output))
    return bool(_of_the_first(int(anew), accelerator))


@contextlib.contextmanager
def alone(output: Path, accelerator: Accelerator) -> Iterator[None]:
    """Let the first process lock the folder of a run during the ``with`` block.

    Args:
        output: Folder of the run, which is created for the block if it does not exist.
        accelerator: accelerate's `Accelerator` of the run.

    Raises:
        ValueError: If another run holds the lock.
    """
    if not accelerator.is_main_process:
        yield
        return
    # The processes of an earlier attempt of this job may still be ending on another machine, so
    # this attempt waits until they release the lock.
    patience = PATIENCE if meeting.begun_before(output) else 0.0
    with folder_lock.locked(output, "output", patience):
        yield


def find(
    output: Path, say: Callable[[str], None], accelerator: Accelerator
) -> checkpoints.Checkpoint | None:
    """Return, in all processes, the newest undamaged checkpoint that the first process reads.

    Args:
        output: Folder of the run, which all processes can read.
        say: Shows a line of text to the user, for each damaged checkpoint.
        accelerator: accelerate's `Accelerator` of the run.

    Raises:
        ValueError: If all checkpoints are damaged.
    """
    checkpoint = checkpoints.newest(output, say) if accelerator.is_main_process else None
    number = _of_the_first(0 if checkpoint is None else checkpoint.content["step"], accelerator)
    if number and checkpoint is None:
        checkpoint = checkpoints.read(checkpoints.folder_of(output, number))
    return checkpoint


def _of_the_first(number: int, accelerator: Accelerator) -> int:
    """Return, in all processes, the `number` of the first process."""
    if accelerator.num_processes == 1:
        return number
    from accelerate.utils import broadcast

    return int(broadcast(torch.tensor([number], device=accelerator.device)))


def refuse_another_run(output: Path, given: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint is of a run with other options or other data.

    Args:
        output: Folder of the run.
        given: The values that identify the new run by name, such as its options.
        earlier: The same values of the run that wrote the checkpoint.
    """
    for name, value in json.loads(json.dumps(given)).items():
        if value != earlier.get(name):
            raise ValueError(
                f"{name}: got {value!r}, but the run in {output} has {earlier.get(name)!r}; "
                "allowed: the same, another folder, or overwrite=True (--overwrite), which starts "
                "anew"
            )
