"""The work of each task (``tasks.py``), as the process of an implementation does it.

In a task, every implementation is a model of sentence-transformers or transformers. OpenVINO and
ONNX Runtime replace the forward of its encoder, with dynamic shapes, as ``backend=`` of
sentence-transformers does through optimum. fastbert is ``fastbert.accelerate`` of the stock model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastbert
from benchmarks.cpu.batches import ROTATED, sample
from benchmarks.cpu.runtimes import (
    BF16,
    BY_NAME,
    CROSS_ENCODER,
    FP32,
    INT8,
    MARIAN,
    MARIAN_CTRANSLATE2,
    Runtime,
    build,
)
from fastbert.bench.quantized_accuracy import model_folder

BATCH = 32
# A usual rate for the fine-tuning of an embedder.
LEARNING_RATE = 2e-5
# The losses of this number of training steps are compared.
STEPS = 3


@dataclass
class Job:
    """The work of an implementation.

    Attributes:
        call: Does the work once; the index chooses one of several inputs.
        numbers: Turns the result of a call into numbers that are compared and sent.
        compared: Number of first calls whose results are compared.
        note: Remark about the implementation for the table.
    """

    call: Callable[[int], Tensor]
    numbers: Callable[[Tensor], Any] = lambda result: result.float().tolist()
    compared: int = 1
    note: str | None = None


def begin(task: str, engine: str, folder: Path, threads: int, **work: Any) -> Job:
    """Return the work of an implementation; ``work`` has the arguments of the task's function."""
    torch.set_num_threads(threads)
    jobs = {
        "encode": encode,
        "rerank": rerank,
        "embedder": embedder,
        "documents": documents,
        "translate": translate,
    }
    return jobs[task](engine, folder, threads, **work)


def encode(
    engine: str, folder: Path, threads: int, *, texts: list[str], one_by_one: bool = False
) -> Job:
    """Encode texts in batches of 32 that sentence-transformers sorts by length, or one by one."""
    model, note = _sentence_transformer(engine, folder, threads)

    def call(_: int) -> Tensor:
        if one_by_one:
            return torch.stack([model.encode(text, convert_to_tensor=True) for text in texts])
        return model.encode(texts, batch_size=BATCH, convert_to_tensor=True)

    return Job(call, note=note)


def rerank(engine: str, folder: Path, threads: int, *, pairs: list[list[str]]) -> Job:
    """Score (query, passage) pairs in batches of 32."""
    model = _cross_encoder(engine, folder)
    couples = [(query, passage) for query, passage in pairs]
    return Job(lambda _: model.predict(couples, batch_size=BATCH, convert_to_tensor=True))


def embedder(
    engine: str, folder: Path, threads: int, *, batches: list[list[list[str]]], dropout: bool
) -> Job:
    """Train on (anchor, positive) pairs: tokenizer, forward, loss, backward and AdamW.

    bf16 is autocast with fp32 weights.
    """
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    torch.manual_seed(0)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = _stock(BY_NAME[engine], FP32, config_kwargs=None if dropout else off).train()
    if BY_NAME[engine].ours:
        fastbert.accelerate(model)
    loss = MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def call(index: int) -> Tensor:
        pairs = batches[index % len(batches)]
        features = [model.preprocess(list(texts)) for texts in zip(*pairs, strict=True)]
        with torch.autocast("cpu", torch.bfloat16, enabled=BY_NAME[engine].form == BF16):
            value = loss(features, torch.arange(len(pairs)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return value.detach()

    return Job(call, compared=STEPS)


def documents(
    engine: str, folder: Path, threads: int, *, batch: int, length: int, layers: int
) -> Job:
    """Run ModernBERT-base with random weights on documents of equal lengths."""
    model = _modernbert(engine, layers)
    drawn = torch.Generator().manual_seed(0)
    shape = (ROTATED, batch, length)
    ids = torch.randint(1, model.config.vocab_size - 1, shape, generator=drawn)
    mask = torch.ones_like(ids[0])

    @torch.inference_mode()
    def call(index: int) -> Tensor:
        return model(input_ids=ids[index % ROTATED], attention_mask=mask).last_hidden_state

    def numbers(hidden: Tensor) -> list[float]:
        return sample(hidden.float().numpy(), {"attention_mask": mask.numpy()})

    return Job(call, numbers)


def translate(
    engine: str, folder: Path, threads: int, *, sources: list[list[int]], steps: int, beams: int
) -> Job:
    """Translate sources of random tokens into targets of `steps` tokens, in one batch."""
    call = _translator(engine, folder, threads)
    return Job(lambda _: call(sources, steps, beams))


@functools.cache
def _translator(name: str, folder: Path, threads: int) -> Callable[..., Tensor]:
    """Return the function of an implementation from sources to the tokens of the targets."""
    engine = BY_NAME[name]
    if engine.kind == "ctranslate2":
        return _ctranslate2_translator(engine, folder, threads)
    dtype = _options(engine, engine.form)["dtype"]
    if engine.ours:
        from fastbert.modules.transformer import Transformer

        model = Transformer.from_pretrained(str(folder / MARIAN)).eval().to(dtype)
    else:
        from transformers import MarianMTModel

        model = MarianMTModel.from_pretrained(str(folder / MARIAN), dtype=dtype).eval()
    padding = model.config.pad_token_id

    def call(sources: list[list[int]], steps: int, beams: int) -> Tensor:
        rows = [torch.tensor(source) for source in sources]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
        tokens = model.generate(
            ids, attention_mask=(ids != padding).long(), max_length=steps + 1, num_beams=beams
        )
        return tokens[:, 1:]

    return call


def _ctranslate2_translator(engine: Runtime, folder: Path, threads: int) -> Callable[..., Tensor]:
    import ctranslate2

    translator = ctranslate2.Translator(
        str(folder / MARIAN_CTRANSLATE2),
        compute_type="int8" if engine.form == INT8 else "float32",
        intra_threads=threads,
        inter_threads=1,
    )
    special = ["</s>", "<unk>"]

    def call(sources: list[list[int]], steps: int, beams: int) -> Tensor:
        words = [[special[i] if i < 2 else f"word{i}" for i in source] for source in sources]
        results = translator.translate_batch(
            words, beam_size=beams, min_decoding_length=steps - 1, max_decoding_length=steps - 1
        )
        ids = [[int(word[4:]) for word in result.hypotheses[0]] + [0] for result in results]
        return torch.tensor(ids)

    return call


def _options(engine: Runtime, form: str) -> dict[str, Any]:
    """Return the arguments of transformers for the dtype and the attention of an implementation."""
    dtype = torch.float32 if form == FP32 else torch.bfloat16
    return {"dtype": dtype, "attn_implementation": "sdpa" if engine.ours else engine.option}


def _stock(engine: Runtime, form: str, **options: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    kwargs = _options(engine, form)
    return SentenceTransformer(str(model_folder()), device="cpu", model_kwargs=kwargs, **options)


def _with_fastbert(model: Any, engine: Runtime) -> Any:
    """Return the model as it is, or after ``accelerate`` and ``quantize`` as a user calls them."""
    if engine.ours:
        model = fastbert.accelerate(model)
    return fastbert.quantize(model) if engine.ours and engine.form == INT8 else model


@functools.cache
def _sentence_transformer(name: str, folder: Path, threads: int) -> tuple[Any, str | None]:
    """Return the published MiniLM with the encoder of an implementation, and a note or None."""
    engine = BY_NAME[name]
    if engine.kind in ("fastbert", "transformers"):
        return _with_fastbert(_stock(engine, engine.form), engine), None
    from transformers.modeling_outputs import BaseModelOutput

    model = _stock(BY_NAME["transformers eager fp32"], FP32)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    built = build(name, config, folder, threads)
    built.prepare(-1, -1)

    def forward(input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        batch = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
        hidden = built.array(built.call(built.inputs(batch)))
        return BaseModelOutput(last_hidden_state=torch.from_numpy(hidden))

    model[0].model.forward = forward
    return model, built.note


@functools.cache
def _cross_encoder(name: str, folder: Path) -> Any:
    from sentence_transformers import CrossEncoder

    engine = BY_NAME[name]
    options = _options(engine, engine.form)
    model = CrossEncoder(str(folder / CROSS_ENCODER), device="cpu", model_kwargs=options)
    return _with_fastbert(model, engine)


@functools.cache
def _modernbert(name: str, layers: int) -> Any:
    """Return ModernBERT-base with random weights, which every process draws alike."""
    from transformers import ModernBertConfig, ModernBertModel
    from transformers.initialization import no_init_weights

    engine = BY_NAME[name]
    config = ModernBertConfig(num_hidden_layers=layers)
    # The initialization of transformers takes tens of seconds.
    with no_init_weights():
        model = ModernBertModel._from_config(config, attn_implementation="sdpa").eval()
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(std=config.initializer_range, generator=drawn)
    return _with_fastbert(model.to(_options(engine, engine.form)["dtype"]), engine)
