"""The plans of an encoder, which are reused until a fact on which they depend changes.

To make a plan, the modules of every layer are compared with a table, which takes as long as two
layers of a small encoder. The plan of a call is therefore reused while a snapshot of the modules is
still valid and the parameters have not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.modules.executors import Settings
from fastbert.modules.plan import Mode, Plan, plan
from fastbert.modules.snapshot import NotCopied, Snapshot
from fastbert.ops import backend as backends
from fastbert.ops import gpu_times
from fastbert.ops.int8_linear import layout

# The functions that read the properties of a parameter on which a plan depends, for inference and
# for training.
Read = Callable[[Any], Any]
OF_INFERENCE: tuple[Read, ...] = (type, attrgetter("dtype"))
OF_TRAINING: tuple[Read, ...] = (*OF_INFERENCE, attrgetter("requires_grad"), attrgetter("is_cpu"))


class _Parameters:
    """The properties of parameters that can change in place and that a snapshot does not record.

    ``parameter.data = …`` changes the dtype and the device of a parameter, ``requires_grad_``
    changes whether the parameter is trained, and ``torch.utils.swap_tensors`` changes its class.

    Args:
        parameters: The parameters of all layers.
        recorded: Whether autograd records the call. Otherwise only classes and dtypes are compared.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], recorded: bool) -> None:
        self._parameters = list(parameters)
        self._read = OF_TRAINING if recorded else OF_INFERENCE
        self._facts = self._now()

    def _now(self) -> list[list[Any]]:
        return [list(map(read, self._parameters)) for read in self._read]

    def unchanged(self) -> bool:
        """Return whether all recorded properties are still the same."""
        return self._now() == self._facts


class Facts(NamedTuple):
    """The facts on which the parameters of a plan depend.

    Attributes:
        snapshot: The snapshot of the model or of its encoder.
        int8_layout: The memory layout of int8 weights, which depends on the instruction set in use;
            None for other weights.
    """

    snapshot: Snapshot
    int8_layout: tuple[int, int] | None

    @classmethod
    def of(cls, snapshot: Snapshot, settings: Settings | None) -> Facts:
        """Return the facts of a plan with these settings, whose snapshot was taken before."""
        return cls(snapshot, layout() if settings is not None and settings.scales else None)

    def holds(self, module: nn.Module) -> bool:
        """Return whether the facts of `module` are still the same."""
        if not self.snapshot.holds(module):
            return False
        return self.int8_layout is None or self.int8_layout == layout()


class _Guarded(NamedTuple):
    """A plan and the facts on which it depends."""

    plan: Plan
    facts: Facts
    parameters: _Parameters

    def holds(self, encoder: nn.Module) -> bool:
        """Return whether the plan of `encoder` would be the same now."""
        return self.facts.holds(encoder) and self.parameters.unchanged()


class PlanCache(NotCopied):
    """The plans of one encoder.

    A plan without an executor is not stored, for two reasons. Such a plan is usually made fast,
    because the search stops at the first obstacle. The modules that prevent an executor may change
    an attribute at every call, so that a stored plan would never be valid.
    """

    # The attribute of the encoder that holds this object.
    HOLDER = "_plans"

    def __init__(self) -> None:
        """Start without plans."""
        self._guarded: dict[Any, _Guarded] = {}

    def clear(self) -> None:
        """Delete the plans, so that replaced parameters of the encoder can be freed."""
        self._guarded = {}

    def plan(self, encoder: Any, hidden: Tensor) -> Plan:
        """Return the plan of a call.

        Args:
            encoder: The encoder that holds this object, with a method `running`.
            hidden: Rows of shape ``(T, H)`` before the first layer.

        Returns:
            The plan; see ``fastbert.modules.plan.plan``.

        Raises:
            ValueError: If a backend that a module asks for cannot serve its operation.
        """
        recorded = torch.is_grad_enabled()
        wanted = recorded and hidden.requires_grad
        mode = Mode.now(hidden.device.type, hidden.dtype, wanted, hidden.shape[0])
        key = (mode, recorded, encoder.training)
        guarded = self._guarded.get(key)
        if guarded is not None:
            if guarded.holds(encoder):
                return guarded.plan
            # A fact has changed, and the other plans may depend on the same fact.
            self.clear()
        layers = encoder.running()
        parameters = [p for layer in dict.fromkeys(layers) for p in layer.parameters()]
        if recorded and any(p.requires_grad for p in parameters):
            mode = mode._replace(gradient=True)
        made = plan(layers, mode)
        if made.run is None or backends.EXTENSION is None:
            return made
        snapshot = Snapshot(encoder, self.HOLDER, [vars(gpu_times)])
        held = _Parameters(parameters, recorded)
        # Another thread may have changed a module after the first plan was made. If the change came
        # before the snapshot, this second plan includes it; otherwise `holds` finds it at the next
        # call.
        made = plan(layers, mode)
        self._guarded[key] = _Guarded(made, Facts.of(snapshot, made.settings), held)
        return made
