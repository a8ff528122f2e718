"""Convert the weights of a model to the files of ONNX or OpenVINO.

    python -m benchmarks.cpu.export FOLDER KIND…

FOLDER has config.json and weights.pt; KIND is onnx or openvino. The converter runs in its own
process, so that its memory does not count as memory of an implementation.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cpu.runtimes import ONNX, OPENVINO, WEIGHTS
from fastbert.config import BertConfig
from fastbert.integrations import stock_models

NAMES = ("input_ids", "attention_mask")


class Hidden(nn.Module):
    """The encoder as a function of two tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state


def example(vocabulary: int) -> dict[str, Tensor]:
    """Return a padded batch of shape (2, 16), with which a converter traces the encoder."""
    ids = torch.randint(1, vocabulary, (2, 16))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return dict(zip(NAMES, (ids, mask), strict=True))


def to_onnx(encoder: nn.Module, vocabulary: int, path: Path) -> None:
    """Write the encoder with dynamic shapes to ``path``."""
    torch.onnx.export(
        Hidden(encoder).eval(),
        tuple(example(vocabulary).values()),
        str(path),
        input_names=list(NAMES),
        output_names=["hidden"],
        dynamic_axes={name: {0: "batch", 1: "length"} for name in (*NAMES, "hidden")},
        opset_version=17,
        dynamo=False,
    )


def to_openvino(encoder: nn.Module, vocabulary: int) -> Any:
    """Return the encoder as a model of OpenVINO with dynamic shapes."""
    import openvino

    return openvino.convert_model(Hidden(encoder).eval(), example_input=example(vocabulary))


def main() -> None:
    folder, kinds = Path(sys.argv[1]), sys.argv[2:]
    warnings.filterwarnings("ignore")
    config = BertConfig.from_dict(json.loads((folder / "config.json").read_text("utf-8")))
    weights = torch.load(folder / WEIGHTS, mmap=True, weights_only=True)

    def encoder(path: str) -> nn.Module:
        return stock_models.encoder(config, weights, path, torch.float32, "cpu")

    if "onnx" in kinds:
        # ONNX Runtime can fuse the graph of eager attention.
        to_onnx(encoder("eager"), config.vocab_size, folder / ONNX)
    if "openvino" in kinds:
        import openvino

        model = to_openvino(encoder("sdpa"), config.vocab_size)
        openvino.save_model(model, folder / OPENVINO, compress_to_fp16=False)


if __name__ == "__main__":
    main()
