"""The base of every BERT model: loading and saving."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
from torch import nn

from fastbert.config import BertConfig
from fastbert.io import checkpoint
from fastbert.modules.model import Model
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.ops.backend import validate

Bert = TypeVar("Bert", bound="BertPreTrainedModel")


class BertPreTrainedModel(Model):
    """The base of all BERT models.

    Args:
        config: Configuration of the model.
        backend: As in ``fastbert.modules.model.Model``.

    Raises:
        ValueError: If `backend` is unknown.
    """

    config: BertConfig
    base_model_prefix = "bert"
    # The state-dict names of the encoder have this prefix in the model.
    body_prefix = ""

    @classmethod
    def from_pretrained(
        cls: type[Bert],
        path_or_hub_id: str | os.PathLike[str],
        *,
        backend: str | None = None,
        dtype: torch.dtype | None = None,
        **config_overrides: Any,
    ) -> Bert:
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

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of word embeddings."""
        return self.get_submodule(self.body_prefix + "embeddings.word_embeddings")
