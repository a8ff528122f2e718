"""The implementations of the contest, and how each is built in its own process (``worker.py``).

Each builder imports only the packages of its implementation, because the memory of the process is
measured. All implementations read the same weights from the folder of the run: a state dict, or the
files of ONNX or OpenVINO (``export.py``).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS, CALIBRATION = "weights.pt", "calibration.json"
BF16, FP32, INT8 = "bf16", "fp32", "int8"
# The files and the folder into which export.py converts the model.
ONNX, ONNX_INT8, ONNX_FUSED_INT8 = "model.onnx", "model-int8.onnx", "model-fused-int8.onnx"
OPENVINO, OPENVINO_INT8 = "openvino.xml", "openvino-int8.xml"
CTRANSLATE2 = "ctranslate2"
# The folder of the published MiniLM with a random head, which all implementations of a task read.
CROSS_ENCODER = "cross-encoder"
# The folders of the encoder–decoder of the task `translate`: for transformers and fastbert, and for
# CTranslate2.
MARIAN, MARIAN_CTRANSLATE2 = "marian", "marian-ctranslate2"
# The size of its vocabulary. The last token is padding, and token 0 ends a sequence.
VOCABULARY = 58101
# A folder of packages that only one implementation may import. transformers imports torchao
# wherever it is installed, which takes seconds and prints messages.
APART = Path(sys.prefix) / "peers"


@dataclass(frozen=True)
class Runtime:
    """An implementation of the contest.

    Attributes:
        kind: Key of the builder in `build`.
        form: Number format of the matrix products.
        option: Attention implementation of transformers, or variant of fastbert.
        needs: Packages without which the implementation is reported as not installed.
        reads: The converted model that the implementation reads, or "" if it reads `WEIGHTS`.
    """

    name: str
    kind: str
    form: str
    option: str = ""
    needs: tuple[str, ...] = ()
    reads: str = ""

    @property
    def ours(self) -> bool:
        return self.kind == "fastbert"

    def missing(self) -> str | None:
        absent = [
            name
            for name in self.needs
            if importlib.util.find_spec(name) is None and not (APART / name).exists()
        ]
        return f"not installed: {', '.join(absent)}" if absent else None


STOCK = ("transformers",)
ONNX_PACKAGES = ("onnxruntime", "onnx")
RUNTIMES = (
    Runtime("fastbert bf16", "fastbert", BF16),
    Runtime("fastbert bf16 autocast", "fastbert", BF16, "autocast"),
    Runtime("fastbert fp32", "fastbert", FP32),
    Runtime("fastbert int8", "fastbert", INT8),
    Runtime("transformers eager fp32", "transformers", FP32, "eager", STOCK),
    Runtime("transformers sdpa fp32", "transformers", FP32, "sdpa", STOCK),
    Runtime("transformers eager bf16", "transformers", BF16, "eager", STOCK),
    Runtime("transformers sdpa bf16", "transformers", BF16, "sdpa", STOCK),
    Runtime("torch.compile frozen fp32", "compiled", FP32, "sdpa", STOCK),
    Runtime("torch.compile frozen bf16", "compiled", BF16, "sdpa", STOCK),
    Runtime("torch.compile torchao int8", "compiled", INT8, "sdpa", (*STOCK, "torchao")),
    Runtime("OpenVINO fp32", "openvino", FP32, "", ("openvino",), OPENVINO),
    Runtime("OpenVINO bf16", "openvino", BF16, "", ("openvino",), OPENVINO),
    Runtime("OpenVINO int8", "openvino", INT8, "", ("openvino", "nncf"), OPENVINO_INT8),
    Runtime("ONNX Runtime fp32", "onnxruntime", FP32, "", ONNX_PACKAGES, ONNX),
    Runtime("ONNX Runtime int8", "onnxruntime", INT8, "", ONNX_PACKAGES, ONNX_INT8),
    Runtime("ONNX Runtime fused int8", "onnxruntime", INT8, "", ONNX_PACKAGES, ONNX_FUSED_INT8),
    Runtime("CTranslate2 fp32", "ctranslate2", FP32, "", ("ctranslate2",), CTRANSLATE2),
    Runtime("CTranslate2 int8", "ctranslate2", INT8, "", ("ctranslate2",), CTRANSLATE2),
)
BY_NAME = {engine.name: engine for engine in RUNTIMES}


@dataclass
class Built:
    """An implementation as the functions that a worker calls.

    Attributes:
        call: Runs the implementation on its inputs.
        inputs: Turns a batch into the inputs of the implementation.
        array: Turns the result into a numpy array.
        prepare: Called with the shape (B, L) before the first batch of that shape, or with
            (-1, -1) before batches of any shape.
        note: Remark about this implementation for the table.
        compiles: Whether the first call at a shape compiles; such a call is not timed.
    """

    call: Callable[[Any], Any]
    inputs: Callable[[dict[str, np.ndarray]], Any]
    array: Callable[[Any], np.ndarray]
    prepare: Callable[[int, int], None] = lambda batch, length: None
    note: str | None = None
    model: Any = None
    compiles: bool = False


def build(name: str, config: dict[str, Any], folder: Path, threads: int) -> Built:
    """Build an implementation; the worker reports an error of the builder as a refusal."""
    engine = BY_NAME[name]
    builders = {
        "fastbert": _fastbert,
        "transformers": _transformers,
        "compiled": _compiled,
        "openvino": _openvino,
        "onnxruntime": _onnxruntime,
        "ctranslate2": _ctranslate2,
    }
    return builders[engine.kind](engine, config, folder, threads)


def refusal(name: str, config: dict[str, Any]) -> str | None:
    """Return the reason why an implementation of fastbert breaks the tolerance rule, or None.

    The tolerance rule does not cover int8; the section ``int8`` reports the errors of int8.
    """
    import torch

    from fastbert.bench.encoder import refusals
    from fastbert.config import BertConfig

    engine = BY_NAME[name]
    if engine.form == INT8:
        return None
    autocast = engine.option == "autocast"
    dtype = torch.bfloat16 if engine.form == BF16 and not autocast else torch.float32
    return refusals(BertConfig.from_dict(config), dtype, "cpu", autocast).get("fastbert auto")


def _of_torch(model, threads: int, *, autocast: bool = False, freezing: bool = False) -> Built:
    import torch

    torch.set_num_threads(threads)

    def inputs(batch):
        return {name: torch.from_numpy(value) for name, value in batch.items()}

    def call(batch):
        # Freezing the weights requires no_grad; other implementations can use inference_mode.
        with (
            torch.no_grad() if freezing else torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            return model(**batch).last_hidden_state

    return Built(call, inputs, lambda out: out.float().numpy(), model=model)


def _loaded(folder: Path):
    import torch

    return torch.load(folder / WEIGHTS, mmap=True, weights_only=True)


def _fastbert(engine: Runtime, config, folder: Path, threads: int) -> Built:
    import torch

    import fastbert
    from fastbert.config import BertConfig
    from fastbert.modules import BertModel

    model = BertModel(BertConfig.from_dict(config))
    model.load_state_dict(_loaded(folder))
    model.eval()
    if engine.form == BF16 and engine.option != "autocast":
        model.to(torch.bfloat16)
    if engine.form == INT8:
        model = fastbert.quantize(model.to(torch.bfloat16))
    return _of_torch(model, threads, autocast=engine.option == "autocast")


def _transformers(engine: Runtime, config, folder: Path, threads: int) -> Built:
    import torch

    from fastbert.config import BertConfig
    from fastbert.integrations import stock_models

    dtype = torch.bfloat16 if engine.form == BF16 else torch.float32
    model = stock_models.encoder(
        BertConfig.from_dict(config), _loaded(folder), engine.option, dtype, "cpu"
    )
    return _of_torch(model, threads)


def _compiled(engine: Runtime, config, folder: Path, threads: int) -> Built:
    """Build transformers under torch.compile with frozen weights and dynamic shapes.

    The model is compiled twice, for one sequence and for batches. A compilation for each shape
    would take most of the time of a run.
    """
    import torch
    import torch._inductor.config as inductor

    inductor.freezing = True
    model = _transformers(engine, config, folder, threads).model
    if engine.form == INT8:
        sys.path.append(str(APART))
        import torchao.quantization as quantization

        quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    built = _of_torch(torch.compile(model, dynamic=True), threads, freezing=True)
    built.compiles = True
    return built


def openvino_options(form: str, threads: int) -> dict[str, Any]:
    return {
        # The operations of an int8 model that are not in int8 run in fp32 without a bf16 unit.
        "INFERENCE_PRECISION_HINT": "f32" if form == FP32 else "bf16",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }


def _openvino(engine: Runtime, config, folder: Path, threads: int) -> Built:
    import openvino

    core = openvino.Core()
    source = core.read_model(folder / engine.reads)
    options = openvino_options(engine.form, threads)
    compiled = {}

    def prepare(batch: int, length: int) -> None:
        # OpenVINO optimizes static shapes further than dynamic shapes, whose sizes are -1.
        model = source.clone()
        model.reshape({port.any_name: [batch, length] for port in model.inputs})
        compiled["request"] = core.compile_model(model, "CPU", options).create_infer_request()

    def call(inputs):
        result = compiled["request"].infer(inputs, share_inputs=True, share_outputs=True)
        return next(iter(result.values()))

    built = Built(call, lambda batch: batch, lambda out: np.array(out, dtype=np.float32), prepare)
    probe = core.compile_model(source, "CPU", options).get_property("INFERENCE_PRECISION_HINT")
    if engine.form == BF16 and "bfloat16" not in str(probe):
        built.note = "computes in fp32 here, because this processor has no bf16 unit"
    return built


def _onnxruntime(engine: Runtime, config, folder: Path, threads: int) -> Built:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    path = str(folder / engine.reads)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Built(lambda batch: session.run(None, batch)[0], lambda batch: batch, np.asarray)


def _ctranslate2(engine: Runtime, config, folder: Path, threads: int) -> Built:
    """Build an encoder of CTranslate2, which gets the lengths of the sequences."""
    import ctranslate2

    encoder = ctranslate2.Encoder(
        str(folder / engine.reads),
        compute_type="int8" if engine.form == INT8 else "float32",
        intra_threads=threads,
        inter_threads=1,
    )

    def inputs(batch):
        arrays = batch["input_ids"], batch["attention_mask"].sum(1)
        views = [np.ascontiguousarray(array, dtype=np.int32) for array in arrays]
        return [ctranslate2.StorageView.from_array(view) for view in views]

    def call(views):
        return encoder.forward_batch(*views).last_hidden_state

    return Built(call, inputs, np.array)
