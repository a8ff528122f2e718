"""Convert the weights of a model to the files of ONNX or OpenVINO.

    python -m benchmarks.cpu.export FOLDER KIND…

FOLDER has config.json and weights.pt; KIND is onnx or openvino. The converter has its own process,
so that it does not count as memory of an engine.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

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


def main() -> None:
    folder, kinds = Path(sys.argv[1]), sys.argv[2:]
    warnings.filterwarnings("ignore")
    config = BertConfig.from_dict(json.loads((folder / "config.json").read_text("utf-8")))
    weights = torch.load(folder / WEIGHTS, mmap=True, weights_only=True)
    ids = torch.randint(1, config.vocab_size, (2, 16))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0

    def wrapped(path: str) -> nn.Module:
        return Hidden(stock_models.encoder(config, weights, path, torch.float32, "cpu")).eval()

    if "onnx" in kinds:
        # ONNX Runtime can fuse the graph of eager attention.
        torch.onnx.export(
            wrapped("eager"),
            (ids, mask),
            str(folder / ONNX),
            input_names=list(NAMES),
            output_names=["hidden"],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in (*NAMES, "hidden")},
            opset_version=17,
            dynamo=False,
        )
    if "openvino" in kinds:
        import openvino

        model = openvino.convert_model(
            wrapped("sdpa"), example_input=dict(zip(NAMES, (ids, mask), strict=True))
        )
        openvino.save_model(model, folder / OPENVINO, compress_to_fp16=False)


if __name__ == "__main__":
    main()
