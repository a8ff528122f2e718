"""Convert the weights of a model to the files of other implementations, in fp32 and in int8.

    python -m benchmarks.cpu.export FOLDER NAME…

FOLDER has config.json, weights.pt and calibration.json; each NAME is a file or folder that a
`Runtime` reads, or `CROSS_ENCODER`, or `MARIAN`. The converter runs in its own process, so that its
memory does not count as memory of an implementation.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cpu.runtimes import (
    CALIBRATION,
    CROSS_ENCODER,
    CTRANSLATE2,
    MARIAN,
    MARIAN_CTRANSLATE2,
    ONNX,
    ONNX_FUSED_INT8,
    ONNX_INT8,
    OPENVINO_INT8,
    VOCABULARY,
    WEIGHTS,
)
from fastbert.bench.quantized_accuracy import model_folder
from fastbert.config import BertConfig
from fastbert.integrations import stock_models

NAMES = ("input_ids", "attention_mask")
FUSED = "model-fused.onnx"


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


def onnx_int8(folder: Path, source: str, target: str) -> None:
    """Quantize an ONNX model: weights per channel in advance, activations in each call."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        folder / source,
        folder / target,
        per_channel=True,
        weight_type=QuantType.QInt8,
        # The inference of shapes does not know the types of fused operations.
        extra_options={"DefaultTensorType": 1},  # onnx.TensorProto.FLOAT
    )


def onnx_fused_int8(folder: Path, config: BertConfig) -> None:
    """Fuse the ONNX model by ONNX Runtime's optimizer for BERT, and quantize the result."""
    from onnxruntime.transformers import optimizer

    fused = optimizer.optimize_model(
        str(folder / ONNX),
        model_type="bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        opt_level=0,
    )
    fused.save_model_to_file(str(folder / FUSED))
    onnx_int8(folder, FUSED, ONNX_FUSED_INT8)


def openvino_int8(model: Any, calibration: Sequence[Sequence[int]]) -> Any:
    """Return a model of OpenVINO that nncf quantized with ranges measured on token ids of texts."""
    import nncf
    import numpy as np

    def batch(ids: Sequence[int]) -> dict[str, Any]:
        arrays = np.asarray([ids], dtype=np.int64), np.ones((1, len(ids)), dtype=np.int64)
        return dict(zip(NAMES, arrays, strict=True))

    return nncf.quantize(
        model,
        nncf.Dataset([batch(ids) for ids in calibration]),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(calibration),
    )


def to_ctranslate2(encoder: nn.Module, folder: Path) -> None:
    """Convert the encoder from a folder of transformers, with a vocabulary of invented words."""
    from ctranslate2.converters import TransformersConverter
    from transformers import BertTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"word{number}" for number in range(encoder.config.vocab_size - len(special))]
    source = folder / "huggingface"
    # The converter asserts this field, which transformers 5 no longer has.
    encoder.config.position_embedding_type = "absolute"
    encoder.save_pretrained(source)
    vocabulary = dict(zip([*special, *words], range(encoder.config.vocab_size), strict=False))
    BertTokenizerFast(vocab=vocabulary).save_pretrained(source)
    TransformersConverter(str(source)).convert(str(folder / CTRANSLATE2))


def to_cross_encoder(folder: Path) -> None:
    """Write the published MiniLM with a random head of one score for sentence-transformers."""
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    model = CrossEncoder(str(model_folder()), num_labels=1, device="cpu")
    model.save_pretrained(str(folder / CROSS_ENCODER))


def to_marian(folder: Path) -> None:
    """Write a Marian of the size of the published ones, with random weights.

    No token ends a target before the largest length, so that every implementation does the same
    number of steps.
    """
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "decoder_vocab_size": VOCABULARY, "d_model": 512}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 6, f"{part}_attention_heads": 8, f"{part}_ffn_dim": 2048}
    padding = VOCABULARY - 1
    config = MarianConfig(
        **sizes, activation_function="swish", scale_embedding=True, pad_token_id=padding,
        eos_token_id=0, forced_eos_token_id=0, decoder_start_token_id=padding,
        max_position_embeddings=512,
    )  # fmt: skip
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        model.final_logits_bias[0, [0, padding]] = -1e4
    model.save_pretrained(folder / MARIAN)
    if importlib.util.find_spec("ctranslate2") is None:
        return
    from ctranslate2.converters.transformers import MarianMTLoader

    # The converter leaves padding out of the vocabularies. It reads the special tokens from a
    # tokenizer, which a model of random weights does not have.
    words = ["</s>", "<unk>", *(f"word{number}" for number in range(2, padding))]
    spec = MarianMTLoader().get_model_spec(model)
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.decoder_start_token = spec.config.eos_token = "</s>"
    spec.config.unk_token = "<unk>"
    spec.validate()
    spec.optimize()
    (folder / MARIAN_CTRANSLATE2).mkdir()
    spec.save(str(folder / MARIAN_CTRANSLATE2))


def convert(folder: Path, name: str) -> None:
    """Write the converted model of this name; a quantized ONNX model needs `ONNX` first."""
    if name == CROSS_ENCODER:
        to_cross_encoder(folder)
        return
    if name == MARIAN:
        to_marian(folder)
        return
    config = BertConfig.from_dict(json.loads((folder / "config.json").read_text("utf-8")))
    weights = torch.load(folder / WEIGHTS, mmap=True, weights_only=True)

    def encoder(path: str) -> nn.Module:
        return stock_models.encoder(config, weights, path, torch.float32, "cpu")

    if name == ONNX:
        # ONNX Runtime can fuse the graph of eager attention.
        to_onnx(encoder("eager"), config.vocab_size, folder / ONNX)
    elif name == ONNX_INT8:
        onnx_int8(folder, ONNX, ONNX_INT8)
    elif name == ONNX_FUSED_INT8:
        onnx_fused_int8(folder, config)
    elif name == CTRANSLATE2:
        to_ctranslate2(encoder("eager"), folder)
    else:
        import openvino

        model = to_openvino(encoder("sdpa"), config.vocab_size)
        if name == OPENVINO_INT8:
            model = openvino_int8(model, json.loads((folder / CALIBRATION).read_text("utf-8")))
        openvino.save_model(model, folder / name, compress_to_fp16=False)


def main() -> int:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    warnings.filterwarnings("ignore")
    failures = 0
    for name in names:
        try:
            convert(folder, name)
        except Exception as error:  # The driver reports the error; other models may be converted.
            said = " ".join(str(error).split())[:200]
            print(f"{name}: {type(error).__name__}: {said}", file=sys.stderr)
            failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
