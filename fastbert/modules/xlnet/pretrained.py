"""The base of the models of XLNet: loading and saving."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch

from fastbert.io import xlnet as files
from fastbert.modules.model import Model

XLNet = TypeVar("XLNet", bound="XLNetPreTrainedModel")


class XLNetPreTrainedModel(Model):
    """The base of all models of XLNet, whose classes have the names of transformers' classes.

    Args:
        config: Configuration of the model.
        backend: As in ``fastbert.modules.model.Model``.
    """

    config: Any

    @classmethod
    def from_pretrained(
        cls: type[XLNet], path_or_hub_id: str | os.PathLike[str], *, backend: str | None = None
    ) -> XLNet:
        """Load a checkpoint of transformers, in eval mode.

        A model without a head also loads the checkpoints of models with a head.

        Args:
            path_or_hub_id: Folder, or hub id if there is no such folder.
            backend: As in the constructor.

        Returns:
            The model.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If the checkpoint is damaged or describes another model, or if a weight is
                missing, unknown or has another shape. The message names the folder or the file.
        """
        stored, config = files.read(path_or_hub_id)
        with torch.device("meta"):
            model = cls(config, backend=backend)
        tensors = files.fit(stored, model.state_dict(), model.tied())
        model.load_state_dict(tensors, strict=False, assign=True)
        model.tie_weights()
        return model.eval()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Save the model as transformers' class of the same name.

        Args:
            folder: The folder; it is created if it does not exist.

        Raises:
            ValueError: If `folder` is a file.
            OSError: If a file cannot be written.
        """
        state = {n: t for n, t in self.state_dict().items() if n not in self.tied()}
        files.write(folder, self.config, state, type(self).__name__)
