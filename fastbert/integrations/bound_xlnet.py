"""XLNet of transformers, computed by fastbert with the parameters of its own modules.

The modules of ``fastbert.modules.xlnet`` have the names and shapes of transformers' modules.
fastbert therefore computes with the modules of the HF model themselves, and reads their current
parameters in every call. A model that deviates in any module runs the code of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastbert.integrations.bound_encoder import BoundModel, CachedComparison, snapshot
from fastbert.integrations.twin import compare
from fastbert.modules.xlnet import XLNetConfig
from fastbert.modules.xlnet.model import Inputs, XLNetModel, run_model
from fastbert.modules.xlnet.streams import Runner
from fastbert.ops import backend as backends


class BoundXLNet(BoundModel):
    """fastbert's computation of one ``XLNetModel`` of transformers.

    Args:
        hf_model: As in `BoundModel`.
        probing: As in `BoundModel`.

    Attributes:
        model: A model of fastbert with the same configuration, on the meta device. `called` stays
            empty.

    Raises:
        ValueError: If fastbert cannot compute the HF model. The message names the obstacle.
    """

    def __init__(
        self, hf_model: nn.Module, probing: Callable[[nn.Module], Any] | None = None
    ) -> None:
        """Compare the HF model with the stock model."""
        super().__init__(hf_model, probing)
        config: Any = hf_model.config
        with torch.device("meta"):
            self.model = XLNetModel(XLNetConfig.from_dict(config.to_dict()))
        self._runner = Runner(config.ff_activation, config.clamp_len)
        problem = self.bind()
        if problem is not None:
            raise ValueError(problem)

    def bind(self) -> str | None:
        """Return why the HF model must run its own code, or None if fastbert computes it."""
        hf_model = self.hf_model
        assert hf_model is not None
        if torch.compiler.is_compiling():
            return "torch.compile traces the code of transformers for this model"
        if backends.EXTENSION is None:
            return backends.EXTENSION_STATE
        cached = self._comparisons.get(hf_model.training)
        if cached is None or not cached.facts.holds(hf_model):
            problem = self._compare(hf_model)
            cached = CachedComparison(problem, snapshot(hf_model))
            self._comparisons[hf_model.training] = cached
        return cached.problem

    def _compare(self, hf_model: Any) -> str | None:
        try:
            config = XLNetConfig.from_dict(hf_model.config.to_dict())
        except ValueError as error:
            return str(error)
        self._runner.activation, self._runner.clamp_len = config.ff_activation, config.clamp_len
        if self._probing is None:
            return None
        reason, called = compare(hf_model, self._probing)
        return reason or next(iter(called.values()), None)

    def run(self, given: dict[str, Any]) -> Any:
        """Compute a call of the HF model.

        Args:
            given: The arguments by name.

        Returns:
            The output of transformers' class, or a tuple.
        """
        from transformers.models.xlnet.modeling_xlnet import XLNetModelOutput

        hf_model: Any = self.hf_model
        config = hf_model.config

        def asked(name: str, default: Any) -> Any:
            value = given.get(name)
            return default if value is None else value

        by_default = config.use_mems_train if hf_model.training else config.use_mems_eval
        mems = given.get("mems")
        if mems is not None and mems[0] is None:
            mems = None
        output = run_model(
            hf_model,
            config,
            self._runner,
            Inputs(**{name: given.get(name) for name in Inputs._fields} | {"mems": mems}),
            bool(asked("use_mems", by_default)),
            bool(asked("output_attentions", config.output_attentions)),
            bool(asked("output_hidden_states", config.output_hidden_states)),
        )
        fields = {
            name: getattr(output, name)
            for name in ("last_hidden_state", "mems", "hidden_states", "attentions")
        }
        if not asked("return_dict", config.return_dict):
            return tuple(value for value in fields.values() if value is not None)
        return XLNetModelOutput(**fields)
