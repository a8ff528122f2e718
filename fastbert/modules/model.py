"""The base of every model: its configuration, its backends and its tied parameters."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from fastbert.modules.encoder import BertEncoder
from fastbert.modules.operation import OperationModule
from fastbert.modules.positions import RotaryTable
from fastbert.ops.backend import Choice, Request, resolve, validate
from fastbert.ops.gpu_times import MANY_ROWS, length_class


class Configuration(Protocol):
    """The members that every configuration has."""

    @property
    def extra(self) -> dict[str, Any]:
        """Keys of a ``config.json`` that are not fields."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        ...

    @property
    def max_length(self) -> int:
        """Length of the longest sequence, in tokens."""
        ...

    @property
    def initializer_range(self) -> float:
        """Standard deviation of the initial weights."""
        ...


class Model(nn.Module):
    """The base of all models.

    Args:
        config: Configuration of the model.
        backend: Requested backend, ``"reference"``, ``"triton"``, ``"cuda"`` or ``"cpu"``. An
            operation without a full implementation by this backend chooses by device and dtype.
            None lets every operation choose.

    Attributes:
        config: The configuration, which is frozen.
        backend: The requested backend, or None.

    Raises:
        ValueError: If `backend` is unknown.
    """

    config: Any

    def __init__(self, config: Configuration, backend: str | None = None) -> None:
        """Store the configuration and the backend."""
        super().__init__()
        self.config = config
        self.backend = validate(backend)

    # Construction

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        """Initialise every linear layer and embedding table in `module` (Devlin et al. 2019).

        Weights are normal with mean 0 and standard deviation ``config.initializer_range``. Biases
        and the row of each embedding table for the padding index are 0. A weight on the meta device
        and a table of rotary angles are skipped.

        Args:
            module: The module, which is initialised in place.
        """
        for part in module.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                if part.weight.is_meta:
                    continue  # A meta tensor has no values; `normal_` would take 0.3 ms for it.
                if isinstance(part, RotaryTable):
                    continue
                part.weight.normal_(0.0, self.config.initializer_range)
            if isinstance(part, nn.Linear) and part.bias is not None:
                part.bias.zero_()
            if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                part.weight[part.padding_idx].zero_()

    # Switches

    def set_backend(self, backend: str | None) -> None:
        """Set the backend that the operations of the model ask for.

        Args:
            backend: Requested backend, as in the constructor.

        Raises:
            ValueError: If `backend` is unknown.
        """
        validate(backend)
        for module in self.modules():
            if isinstance(module, OperationModule):
                module.set_backend(backend)
            elif isinstance(module, Model):
                module.backend = backend

    def backends(self, device: str | None = None) -> dict[str, Choice]:
        """Return the backend of each operation of this model, and the reason for the choice.

        The entry ``"encoder"`` states whether the layers run as one call in inference. On a GPU,
        the result is the choice for the longest sequences that the model takes, up to 2,048 tokens.
        The choice for shorter sequences may differ.

        Args:
            device: Device type, such as ``"cpu"`` or ``"cuda"``; None means the device of the
                model.

        Returns:
            The `Choice` of each operation, for the dtype of the model.

        Raises:
            ValueError: If the backend that the model asks for cannot serve an operation, as in
                `forward`.

        Examples:
            >>> from fastbert import BertConfig, BertModel
            >>> model = BertModel(BertConfig.preset("tiny"), backend="reference")
            >>> model.backends("cpu")["attention"]
            Choice(backend='reference', reason='asked for')
        """
        weight = next(self.parameters())
        device = device or weight.device.type
        choices = {}
        length = rows = 0
        if device == "cuda":
            length, rows = length_class(self.config.max_length), MANY_ROWS
        for part in self.modules():
            if isinstance(part, OperationModule):
                request = Request(
                    device, weight.dtype, self.config.head_dim, activation=part.activation,
                    columns=self.config.hidden_size, length=length, rows=rows,
                    trained=part.training,
                )  # fmt: skip
                choices[part.operation] = resolve(part.operation, part.backend, request)
        for part in self.modules():
            if isinstance(part, BertEncoder):
                of_attention = choices.get("attention") or choices["relative_attention"]
                layers = of_attention.backend
                choices["encoder"] = part.choice(device, weight.dtype, layers, length)
        return choices

    def gradient_checkpointing_enable(self) -> None:
        """Save memory in training by computing the activations inside each layer twice."""
        self._checkpoint_gradients(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keep the activations inside each layer in training, which is the default."""
        self._checkpoint_gradients(False)

    def _checkpoint_gradients(self, enabled: bool) -> None:
        for part in self.modules():
            if hasattr(part, "gradient_checkpointing"):
                part.gradient_checkpointing = enabled

    # Views

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first parameter."""
        return next(self.parameters()).dtype

    def num_parameters(self) -> int:
        """Return the number of parameters; a tied parameter counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flag(self, name: str, given: bool | None, default: bool = False) -> bool:
        """Return `given`, or the value of the key `name` in ``config.json`` if `given` is None.

        transformers has the same rule for ``return_dict`` and for the ``output_...`` arguments.

        Args:
            name: Name of the argument of ``forward``, and of the key in ``config.json``.
            given: Value of the argument.
            default: Value if ``config.json`` does not have the key.

        Returns:
            The value of the argument or of the key, or `default` if both are absent.
        """
        return bool(self.config.extra.get(name, default)) if given is None else given

    # Tied parameters

    def tied(self) -> dict[str, str]:
        """Map the state-dict names of tied parameters to the names to which they are tied."""
        return {}

    def tie_weights(self) -> None:
        """Make each tied name refer to the parameter to which it is tied."""
        for name, target in self.tied().items():
            module, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(module), attribute, self.get_parameter(target))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A move from the meta device creates a new parameter for each name, so the names are tied
        # again.
        super()._apply(fn, recurse)
        self.tie_weights()
        return self
