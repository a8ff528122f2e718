"""The base of every model: loading, saving, backends and activation checkpointing."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
from torch import nn

from fastbert.config import BertConfig
from fastbert.io import checkpoint
from fastbert.modules.encoder import BertEncoder
from fastbert.modules.operation import OperationModule
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.ops.backend import Choice, Request, resolve, validate
from fastbert.ops.gpu_times import MANY_ROWS, length_class

Model = TypeVar("Model", bound="BertPreTrainedModel")


class BertPreTrainedModel(nn.Module):
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

    base_model_prefix = "bert"
    # The state-dict names of the encoder have this prefix in the model.
    body_prefix = ""

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
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
        is skipped.

        Args:
            module: The module, which is initialised in place.
        """
        for part in module.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                if part.weight.is_meta:
                    continue  # A meta tensor has no values; `normal_` would take 0.3 ms for it.
                part.weight.normal_(0.0, self.config.initializer_range)
            if isinstance(part, nn.Linear) and part.bias is not None:
                part.bias.zero_()
            if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                part.weight[part.padding_idx].zero_()

    @classmethod
    def from_pretrained(
        cls: type[Model],
        path_or_hub_id: str | os.PathLike[str],
        *,
        backend: str | None = None,
        dtype: torch.dtype | None = None,
        **config_overrides: Any,
    ) -> Model:
        """Load a model from a Hugging Face folder, or from a hub id if there is no such folder.

        The files are ``config.json`` and ``model.safetensors`` or its shards. ``pytorch_model.bin``
        is read with ``weights_only=True``. A checkpoint of a model with another head can be loaded:
        parts of this model that the checkpoint lacks are initialised, and one warning names these
        parts.

        Args:
            path_or_hub_id: Folder or hub id of the checkpoint.
            backend: Requested backend, as in the constructor.
            dtype: Dtype of the parameters; None means the dtype of the checkpoint.
            **config_overrides: Fields of the configuration that replace the values in
                ``config.json``.

        Returns:
            The model in eval mode.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If a file is damaged, a shape differs, or weights of the encoder are
                missing. The same error is raised if the configuration has no parameter for stored
                weights of the encoder, for example because `num_hidden_layers` is below the stored
                number. The message names the file and the reason.
            OSError: If a save into the folder was interrupted and this call cannot finish the save,
                or if other processes keep saving into the folder.

        Examples:
            >>> import tempfile
            >>> from fastbert import BertConfig, BertModel
            >>> model = BertModel(BertConfig.preset("tiny", vocab_size=8192))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     model.save_pretrained(folder)
            ...     loaded = BertModel.from_pretrained(folder)
            >>> loaded.config == model.config
            True
        """
        validate(backend)
        stored = checkpoint.read(path_or_hub_id)
        config = stored.config(config_overrides)
        # On the meta device, the model takes no memory, so the shapes of the checkpoint are checked
        # before memory is allocated.
        with torch.device("meta"):
            tensors = checkpoint.fit(cls(config, backend=backend), stored)
        model = cls(config, backend=backend)
        model.to(stored.dtype if dtype is None else dtype)
        checkpoint.load_into(model, tensors, stored.folder)
        return model.eval()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors``, which transformers opens, to a folder.

        Both files replace the files of an earlier save together. Other files of the folder stay.
        If the process is killed at any moment, ``from_pretrained`` loads the complete old model or
        the complete new model. Another program may then find that a file is
        missing, but it never finds an old file beside a new file.

        Args:
            folder: Folder, which is created if it does not exist.

        Raises:
            ValueError: If `folder` is a file, or if the model is quantised, because transformers
                could not open it.
            OSError: If a file cannot be written; the folder is then unchanged. The same error is
                raised if a written file cannot be moved into the folder; the next call of
                ``from_pretrained`` then finishes the save.
        """
        if any(isinstance(part, QuantizedLinear) for part in self.modules()):
            raise ValueError(
                "save_pretrained: got a quantised model, allowed: a model that is not quantised; "
                "save its state_dict(), or save the model before fastbert.quantize"
            )
        checkpoint.write(folder, self)

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
            elif isinstance(module, BertPreTrainedModel):
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
                layers = choices["attention"].backend
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
            if isinstance(part, BertEncoder):
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

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of word embeddings."""
        return self.get_submodule(self.body_prefix + "embeddings.word_embeddings")

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
