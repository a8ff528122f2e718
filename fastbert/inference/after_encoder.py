"""Turn the rows of the encoder into embeddings of texts, with the modules of a model folder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastbert.io.sentence_transformers_folder import Dense, Pooling, SentenceFolder
from fastbert.modules import pool
from fastbert.modules.dense import Dense as DenseModule


class AfterEncoder(nn.Module):
    """The part of a sentence-transformers model after the encoder: pooling, Dense, normalization.

    The attribute ``width`` is the size of the embeddings.

    Args:
        recipe: The modules of the model folder.
        hidden_size: Size H of the encoder's rows.
        prompt_length: Number of rows at the start of each text that belong to the prompt.

    Raises:
        OSError: If the folder of a Dense module has no weights.
        ValueError: If the input size of a Dense module differs from the output size of the module
            before it, or if its weights are damaged. The message names the folder of the module.
    """

    def __init__(self, recipe: SentenceFolder, hidden_size: int, prompt_length: int) -> None:
        """Build the modules in the order of the recipe."""
        super().__init__()
        pooling, *others = recipe.modules
        assert isinstance(pooling, Pooling)
        self.pooling, self.truncate_dim = pooling, recipe.truncate_dim
        self.skip = 0 if pooling.include_prompt else prompt_length
        self.width = hidden_size * len(pooling.modes)
        self.normalised = False
        self.folders = [module.folder for module in others if isinstance(module, Dense)]
        self.steps = nn.ModuleList()
        for module in others:
            self.normalised = not isinstance(module, Dense)
            if not isinstance(module, Dense):
                self.steps.append(_Normalize())
                continue
            if module.in_features != self.width:
                raise ValueError(
                    f"{module.folder}: in_features: got {module.in_features}, allowed: "
                    f"{self.width}, the size of the vectors before it"
                )
            self.steps.append(DenseModule.from_folder(module))
            self.width = module.out_features
        self.width = min(self.width, self.truncate_dim or self.width)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Compute the embeddings of packed texts.

        Args:
            hidden: Rows of the tokens, floating of shape ``(T, H)``.
            cu_seqlens: Cumulative lengths of the texts from 0, int32 of shape ``(B + 1,)``.

        Returns:
            The embeddings, fp32 of shape ``(B, width)``.
        """
        rows, modes = hidden.float(), self.pooling.modes
        vectors = torch.cat([pool(rows, cu_seqlens, mode, skip=self.skip) for mode in modes], -1)
        for step in self.steps:
            vectors = step(vectors)
        return vectors[:, : self.width]


class _Normalize(nn.Module):
    def forward(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(vectors, dim=-1)
