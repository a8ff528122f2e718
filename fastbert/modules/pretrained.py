"""What every model can do: load, save, switch backend, checkpoint its activations."""

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

Model = TypeVar("Model", bound="BertPreTrainedModel")


class BertPreTrainedModel(nn.Module):
    """The base of all models. ``config`` is frozen; ``backend`` is the request the model was built
    with."""

    base_model_prefix = "bert"
    # Where the encoder's names start inside this model.
    body_prefix = ""

    def __init__(self, config: BertConfig, backend: str | None = None) -> None:
        super().__init__()
        self.config = config
        self.backend = validate(backend)

    # Construction

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        """Normal weights of standard deviation ``initializer_range``, zero biases and padding row
        (Devlin et al. 2019), for every linear layer and table in ``module``."""
        for part in module.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
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
        """The model of a Hugging Face folder, or of a hub id when there is no such folder, in eval
        mode.

        Reads config.json and model.safetensors (or its shards; pytorch_model.bin only with
        ``weights_only``). ``dtype`` defaults to the checkpoint's own. ``config_overrides`` replace
        fields of the configuration. Checkpoints of other heads load: parts of this model that the
        checkpoint lacks are initialised, with one warning that names them.

        Raises FileNotFoundError when there is nothing to load, and ValueError naming file and
        reason when a file is damaged, a shape differs, or weights of the encoder are missing. The
        same holds for weights of the encoder that the configuration has no place for, as when
        num_hidden_layers is smaller than the number of stored layers.
        """
        validate(backend)
        stored = checkpoint.read(path_or_hub_id)
        config = stored.config(config_overrides)
        with torch.device("meta"):  # without memory, however large config.json says the model is
            tensors = checkpoint.fit(cls(config, backend=backend), stored)
        model = cls(config, backend=backend)
        model.to(stored.dtype if dtype is None else dtype)
        checkpoint.load_into(model, tensors, stored.folder)
        return model.eval()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors, which transformers opens, to ``folder``.

        The two files replace those of an earlier save together; other files of ``folder`` stay. If
        the process is killed at any moment, ``from_pretrained`` finds the whole old model or the
        whole new one. Other readers may then find a file missing, but never an old file beside a
        new one.

        Raises ValueError when ``folder`` is a file, or the model is quantised, which transformers
        could not open. Raises OSError when a file cannot be written; ``folder`` stays as it was.
        """
        if any(isinstance(part, QuantizedLinear) for part in self.modules()):
            raise ValueError(
                "save_pretrained: got a quantised model, allowed: one that is not; save its "
                "state_dict(), or save the model before fastbert.quantize"
            )
        checkpoint.write(folder, self)

    # Switches

    def set_backend(self, backend: str | None) -> None:
        """Asks for another backend in every operation of the model. Raises ValueError on an unknown
        name."""
        validate(backend)
        for module in self.modules():
            if isinstance(module, OperationModule):
                module.set_backend(backend)
            elif isinstance(module, BertPreTrainedModel):
                module.backend = backend

    def backends(self, device: str | None = None) -> dict[str, Choice]:
        """Which backend serves each operation of this model on a ``device`` ("cpu", "cuda"; where
        it is now) in its dtype, and why; under "encoder", whether its layers are one call in
        inference.

        Raises ValueError, as ``forward`` would, when the one asked for cannot.
        """
        weight = next(self.parameters())
        device = device or weight.device.type
        choices = {}
        for part in self.modules():
            if isinstance(part, OperationModule):
                request = Request(device, weight.dtype, activation=part.activation)
                choices[part.operation] = resolve(part.operation, part.backend, request)
        for part in self.modules():
            if isinstance(part, BertEncoder):
                layers = choices["attention"].backend
                choices["encoder"] = part.choice(device, weight.dtype, layers)
        return choices

    def gradient_checkpointing_enable(self) -> None:
        """Trades time for memory in training: activations inside a layer are computed twice."""
        self._checkpoint_gradients(True)

    def gradient_checkpointing_disable(self) -> None:
        self._checkpoint_gradients(False)

    def _checkpoint_gradients(self, enabled: bool) -> None:
        for part in self.modules():
            if isinstance(part, BertEncoder):
                part.gradient_checkpointing = enabled

    # Views

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def num_parameters(self) -> int:
        """The number of parameters; a tied one counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def get_input_embeddings(self) -> nn.Module:
        return self.get_submodule(self.body_prefix + "embeddings.word_embeddings")

    def flag(self, name: str, given: bool | None, default: bool = False) -> bool:
        """An argument's value; where it is None that of config.json, as transformers reads it."""
        return bool(self.config.extra.get(name, default)) if given is None else given

    # Tied parameters

    def tied(self) -> dict[str, str]:
        """State-dict names of parameters that are another one → the name of that one."""
        return {}

    def tie_weights(self) -> None:
        """Makes tied parameters one again."""
        for name, target in self.tied().items():
            module, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(module), attribute, self.get_parameter(target))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Leaving the meta device makes new parameters, one for each name.
        super()._apply(fn, recurse)
        self.tie_weights()
        return self
