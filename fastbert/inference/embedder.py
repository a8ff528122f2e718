"""Embeddings of texts, with the model, the tokenizer and the modules of a folder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fastbert.inference.after_encoder import AfterEncoder
from fastbert.inference.layer_states import LayerStates
from fastbert.inference.text_batches import LimitedTokenizer, length_batches, pack
from fastbert.io import checkpoint
from fastbert.io import sentence_transformers_folder as stored
from fastbert.io.sentence_transformers_folder import SentenceFolder
from fastbert.modules import BertModel
from fastbert.modules.class_name import class_name


class Embedder:
    """A model that turns texts into embeddings, on a CUDA device if there is one.

    The attribute ``width`` is the size E of an embedding.

    Args:
        model: Folder or hub id of a checkpoint. A folder of sentence-transformers defines the steps
            after the encoder; for any other folder, the embedding is the mean of the rows.
        pooling: The pooling mode, as in `fastbert.modules.pool`; None keeps the modes of the
            folder.
        layers: Numbers of the hidden states whose rows are pooled; None takes the last state. State
            0 is the embedding output, state N is the output of layer N, and a negative number
            counts from the last state.
        combine: How several states become one row: ``"concat"``, ``"sum"`` or ``"mean"``; None is
            ``"concat"``.
        normalize: Whether the last step scales the embedding to an L2 norm of 1; None keeps the
            steps of the folder.
        max_length: Largest number of tokens of a text; None keeps the limit of the folder.
        tokens_per_batch: Largest number of tokens of a batch, unless a single text is longer.
        backend: Requested backend, as in `fastbert.BertModel`; None lets every operation choose.

    Raises:
        ValueError: If the checkpoint cannot be loaded, if a file of the folder is not supported,
            if `layers` or `combine` is not allowed, or if `max_length` exceeds the model's number
            of positions.

    Examples:
        >>> from fastbert.inference import Embedder
        >>> embedder = Embedder("out/demo/model", normalize=True)  # doctest: +SKIP
        >>> embedder(["a text", "another text"]).shape  # doctest: +SKIP
        torch.Size([2, 128])
    """

    def __init__(
        self,
        model: str,
        *,
        pooling: str | None = None,
        layers: Sequence[int] | None = None,
        combine: str | None = None,
        normalize: bool | None = None,
        max_length: int | None = None,
        tokens_per_batch: int = 8192,
        backend: str | None = None,
    ) -> None:
        """Load the encoder, its tokenizer and the steps after the encoder."""
        folder = checkpoint.find(model)
        recipe = read_recipe(folder, pooling=pooling, normalize=normalize)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with warnings.catch_warnings():
            # A checkpoint without a pooler needs no warning, because the pooler is not used.
            warnings.filterwarnings("ignore", ".*newly initialized: pooler")
            encoder = BertModel.from_pretrained(recipe.encoder, backend=backend)
        self.encoder = encoder.to(self.device).eval()
        self.tokenizer = LimitedTokenizer(recipe, encoder.config.max_length, max_length)
        self.states = LayerStates(layers, combine, len(encoder.encoder.running()) + 1)
        rows_width = self.states.factor * encoder.config.hidden_size
        prompt_length = self.tokenizer.prompt_length()
        self.after = AfterEncoder(recipe, rows_width, prompt_length).to(self.device)
        self.width, self.tokens_per_batch = self.after.width, tokens_per_batch
        self.folders = (folder, recipe.encoder, *self.after.folders)

    def forward(self, batch: dict[str, Tensor | int]) -> Tensor:
        """Compute the embeddings of a packed batch.

        Args:
            batch: The result of `fastbert.inference.text_batches.pack` for B texts.

        Returns:
            The embeddings, fp32 of shape ``(B, E)``.
        """
        output = self.encoder(**batch, output_hidden_states=self.states.numbers)
        return self.after(self.states.rows(output.hidden_states), batch["cu_seqlens"])

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str] | str) -> Tensor:
        """Compute the embeddings of texts, in packed batches of similar lengths.

        Args:
            texts: N texts, or one text.

        Returns:
            The embeddings in the order of the texts, fp32 of shape ``(N, E)``, on the CPU; for one
            text that is not in a list, its embedding of shape ``(E,)``.

        Raises:
            TypeError: If `texts` contains something other than a str.
            ValueError: If a text has no tokens.
        """
        if isinstance(texts, str):
            return self([texts])[0]
        texts = list(texts)
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"texts[{number}]: got {class_name(text)}, allowed: a str")
        lines = [self.tokenizer((text,)) for text in texts]
        rows = torch.empty(len(lines), self.width)
        for batch in length_batches([len(line.ids) for line in lines], self.tokens_per_batch):
            rows[batch] = self.forward(pack([lines[i] for i in batch], self.device)).float().cpu()
        return rows


def read_recipe(
    folder: Path,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
) -> SentenceFolder:
    """Read the steps that turn the rows of an encoder into an embedding.

    A folder of sentence-transformers defines its steps. For any other folder, the embedding is the
    mean of the rows.

    Args:
        folder: Folder of the model.
        pooling: The pooling mode, as in `fastbert.modules.pool`; None keeps the modes of the
            folder.
        normalize: Whether the last step scales the embedding to an L2 norm of 1; None keeps the
            steps of the folder.

    Returns:
        The steps and the settings of the folder.

    Raises:
        ValueError: If a file is damaged or not supported. The message names the file and the
            reason.
    """
    recipe = stored.SentenceFolder(folder, (stored.Pooling(),))
    if stored.is_one(folder):
        recipe = stored.read(folder)
    first, *others = recipe.modules
    if pooling is not None and isinstance(first, stored.Pooling):
        first = replace(first, modes=(pooling,))
    ends_normalised = bool(others) and isinstance(others[-1], stored.Normalize)
    if normalize is True and not ends_normalised:
        others.append(stored.Normalize())
    elif normalize is False and ends_normalised:
        others.pop()
    return replace(recipe, modules=(first, *others))
