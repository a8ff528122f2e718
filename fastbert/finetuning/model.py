"""The model of a run: a pre-trained encoder with the head of the task."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import torch

from fastbert.config import OWN_TYPES, BertConfig
from fastbert.data import model_max_length
from fastbert.data.model_tokenizer import ModelTokenizer
from fastbert.finetuning.task import Task, label_names
from fastbert.io import checkpoint
from fastbert.jobs.batch_job import digest_of_model
from fastbert.modules import BertPreTrainedModel

# These settings of a task are fields of `BertConfig`; ``BertConfig.extra`` stores the others.
FIELDS = ("num_labels", "problem_type")


class Source:
    """The weights and the configuration of a pre-trained model.

    Attributes:
        folder: Folder of the model's files.
        config: Configuration of the model.
    """

    def __init__(self, model: str | os.PathLike[str]) -> None:
        """Read the files.

        Args:
            model: Folder or hub id.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If the checkpoint is damaged, or if its model type is not ``"bert"``.
        """
        self._stored = checkpoint.read(model)
        self.folder: Path = self._stored.folder
        self.config: BertConfig = self._stored.config({})
        if self.config.model_type not in OWN_TYPES:
            raise ValueError(
                f"model: {self.folder} has the model type {self.config.model_type!r}, allowed: "
                f"{', '.join(OWN_TYPES)}; fastbert.accelerate takes models of transformers for "
                "training"
            )

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the files, by which a resumed run recognises its model."""
        return digest_of_model(self.folder)

    def max_length(self) -> int:
        """Return the largest number of tokens that both the tokenizer and the model allow."""
        limit = self.config.max_length
        return min(model_max_length(self.folder) or limit, limit)

    def tokenizer(self, max_length: int | None) -> ModelTokenizer:
        """Load the tokenizer.

        Args:
            max_length: Largest number of tokens of a sequence; None is the limit of the model.

        Returns:
            The tokenizer.

        Raises:
            ValueError: If `max_length` exceeds the positions of the model, or if the vocabulary
                does not fit the configuration.
        """
        positions = self.config.max_length
        limit = positions if max_length is None else max_length
        if limit > positions:
            raise ValueError(
                f"max_length: got {limit}, allowed: at most {positions}, the positions of "
                f"{self.folder}"
            )
        tokenizer = ModelTokenizer(self.folder, limit)
        if tokenizer.size > self.config.vocab_size:
            raise ValueError(
                f"model: the tokenizer of {self.folder} has ids up to {tokenizer.size - 1}, but "
                f"config.json says vocab_size {self.config.vocab_size}; allowed: ids below it"
            )
        return tokenizer

    def classes(self) -> list[str]:
        """Return the names of model classes under ``architectures`` in ``config.json``."""
        return self._stored.architectures()

    def labels(self) -> list[str]:
        """Return the names of the labels, or raise ValueError if ``config.json`` lacks names."""
        with checkpoint.naming_config(self.folder):
            return label_names(self.config)

    def build(self, task: Task, backend: str | None, *, whole: bool = False) -> BertPreTrainedModel:
        """Build the model of a task in fp32, with the weights of the checkpoint.

        The weights of the head are loaded if the checkpoint has the same head with the same labels.
        Otherwise, the head is new, and the seed of torch decides its weights.

        Args:
            task: The task for which the model is built.
            backend: Backend that the model asks for; None lets each operation choose.
            whole: Whether the model is already fine-tuned: the checkpoint must have all weights,
                and its configuration replaces the settings of the task.

        Returns:
            The model.

        Raises:
            ValueError: If the weights do not fit the configuration, or if `whole` is True and a
                weight is missing.
        """
        config, stored = self.config, self._stored
        if not whole:
            settings = task.settings()
            fields = {name: settings.pop(name) for name in FIELDS if name in settings}
            config = config.replace(extra={**config.extra, **settings}, **fields)
        if not whole and not self._same_head(task, config):
            encoder_weights = {
                n: t for n, t in stored.tensors.items() if not n.startswith(task.head)
            }
            stored = checkpoint.Stored(stored.folder, stored.content, encoder_weights)
        with torch.device("meta"):
            tensors = checkpoint.fit(task.kind(config, backend=backend), stored)
        model = task.kind(config, backend=backend)
        missing = [name for name in model.state_dict() if name not in tensors]
        if whole and missing:
            raise ValueError(f"model: {self.folder} lacks {', '.join(missing):.300}")
        checkpoint.load_into(model, tensors, stored.folder)
        return model

    def _same_head(self, task: Task, config: BertConfig) -> bool:
        return (
            self.classes() == [task.kind.__name__]
            and self.labels() == label_names(config)
            and self.config.problem_type in (None, config.problem_type)
        )
