"""The speed of the whole encoder: the backends of fastbert and the paths of transformers.

A path of transformers is one of its attention implementations. An ``engine`` is the name of a
backend or of a path, such as ``"fastbert cpu"`` or ``"transformers sdpa"``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastbert.bench.timing import alternate
from fastbert.config import BertConfig
from fastbert.flops import flops_of_layers
from fastbert.integrations import stock_models
from fastbert.ops import backend as backends
from fastbert.ops.backend import dtype_name
from fastbert.testing.compare import compare
from fastbert.testing.yardstick import Yardstick

# The sizes of all-MiniLM-L6-v2 (Wang et al. 2020).
MINILM = BertConfig(
    hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
)
BASE = BertConfig.preset("base")
SMALL = BertConfig.preset("tiny", vocab_size=4096)
# The parity check (`gate`) uses this number of layers, which have every operation of the encoder.
GATE_LAYERS = 2
ROTATED_BATCHES = 8
STOCK = "transformers "
TRANSFORMERS_PATHS = ("eager", "sdpa")

Batch = dict[str, Tensor]
Notify = Callable[[str], None]


@dataclass(frozen=True)
class EncoderShape:
    """A padded batch of sequences with ``lengths`` real tokens, and the encoder that reads it."""

    name: str
    config: BertConfig
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def flops(self) -> float:
        """FLOPs of the matrix products of the layers on real tokens."""
        return flops_of_layers(self.config, self.lengths)


@dataclass(frozen=True)
class EncoderRow:
    """The speed of one ``engine`` on one shape.

    ``seconds`` is the time of a forward pass, and ``tokens`` counts real tokens. ``speedup`` is the
    time of the fastest transformers path divided by ``seconds``. It is None if transformers is not
    installed or if the engine was not timed. ``refused`` is the reason why the engine was not
    timed.
    """

    shape: str
    dtype: str
    device: str
    engine: str
    batch: int
    longest: int
    tokens: int
    seconds: float | None = None
    p10: float | None = None
    p90: float | None = None
    tokens_per_second: float | None = None
    tflops: float | None = None
    speedup: float | None = None
    refused: str | None = None


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtypes(device: str) -> tuple[torch.dtype, ...]:
    """Return the usual dtypes of a device: fp16 and bf16 on a GPU, fp32 and bf16 on a CPU."""
    other = torch.float16 if device == "cuda" else torch.float32
    return (other, torch.bfloat16)


def half_padded(batch: int, longest: int) -> tuple[int, ...]:
    """Return lengths spread evenly from ``longest`` to 1; half of the padded batch is padding."""
    step = (longest - 1) / max(1, batch - 1)
    return tuple(round(longest - step * i) for i in range(batch))


def encoder_shapes(*, quick: bool = False) -> list[EncoderShape]:
    """Return the shapes of ``fastbert bench``: full, half padded, and a single sequence."""
    if quick:
        return [
            EncoderShape("tiny 8×64 full", SMALL, (64,) * 8),
            EncoderShape("tiny 8×64 half padded", SMALL, half_padded(8, 64)),
        ]
    return [
        EncoderShape("BERT-base 8×128 full", BASE, (128,) * 8),
        EncoderShape("BERT-base 8×128 half padded", BASE, half_padded(8, 128)),
        EncoderShape("BERT-base 1×128", BASE, (128,)),
        EncoderShape("MiniLM-L6 8×128 full", MINILM, (128,) * 8),
        EncoderShape("MiniLM-L6 8×128 half padded", MINILM, half_padded(8, 128)),
        EncoderShape("MiniLM-L6 1×128", MINILM, (128,)),
    ]


def random_batch(shape: EncoderShape, seed: int, device: str) -> Batch:
    """Return a batch of random ids: padded ``input_ids`` and ``attention_mask``; padding is 0."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(shape.lengths)
    ids = torch.randint(
        1, shape.config.vocab_size, (len(shape.lengths), longest), generator=generator
    )
    mask = torch.arange(longest) < torch.tensor(shape.lengths)[:, None]
    return {
        "input_ids": (ids * mask).to(device),
        "attention_mask": mask.long().to(device),
    }


def requests(device: str) -> dict[str, str | None]:
    """Return the ``backend`` argument of each engine of fastbert by the engine's name.

    A request that resolves to the same backends as an earlier request is left out. Triton's
    interpreter is left out too, because it is too slow to run a model.
    """
    seen: list[object] = []
    refusals: dict[str, str | None] = {}
    for request in (None, *backends.BACKENDS):
        usable = request is None or backends.unavailable(request, device) is None
        if not usable or (request == "triton" and device == "cpu"):
            continue
        choices = _choices(request, device)
        if choices not in seen:
            seen.append(choices)
            refusals[f"fastbert {request or 'auto'}"] = request
    return refusals


def _choices(request: str | None, device: str) -> object:
    wanted = backends.Request(device, torch.float32, head_dim=64)
    return [
        (op, backends.resolve(op, backends.prefer(op, request), wanted).backend)
        for op in sorted(backends.TABLES)
    ]


def bench_encoder(
    shapes: Sequence[EncoderShape] | None = None,
    *,
    quick: bool = False,
    dtypes: Sequence[torch.dtype] | None = None,
    device: str | None = None,
    seconds: float | None = None,
    notify: Notify = lambda text: None,
) -> list[EncoderRow]:
    """Time the forward pass of every engine, from padded ids to padded hidden states.

    The parity check `gate` runs first. A backend whose hidden states are outside the tolerances is
    not timed. ``seconds`` limits the timing of one shape in one dtype. No gradients are computed.
    """
    device = device or default_device()
    shapes = encoder_shapes(quick=quick) if shapes is None else shapes
    dtypes = dtypes or default_dtypes(device)
    seconds = seconds or (2.0 if quick else 15.0)
    rows: list[EncoderRow] = []
    for shape in shapes:
        for dtype in dtypes:
            notify(f"{shape.name}, {dtype_name(dtype)}")
            with torch.inference_mode():
                rows += _bench_shape(shape, dtype, device, seconds)
    return rows


def _bench_shape(
    shape: EncoderShape, dtype: torch.dtype, device: str, seconds: float
) -> list[EncoderRow]:
    refused = gate(shape, dtype, device)
    weights = random_weights(shape.config)
    engines = {
        name: build(name, shape, weights, dtype, device)
        for name in engine_names(device)
        if name not in refused
    }
    timings = alternate(engines, device=device, seconds=seconds)
    stock = [t.median for name, t in timings.items() if name.startswith(STOCK)]
    place = (shape.name, dtype_name(dtype), device)
    common = (len(shape.lengths), max(shape.lengths), shape.tokens)
    rows = []
    for name, timing in timings.items():
        rows.append(
            EncoderRow(
                *place,
                name,
                *common,
                seconds=timing.median,
                p10=timing.p10,
                p90=timing.p90,
                tokens_per_second=shape.tokens / timing.median,
                tflops=shape.flops / timing.median / 1e12,
                speedup=min(stock) / timing.median if stock else None,
            )
        )
    for name, reason in refused.items():
        rows.append(EncoderRow(*place, name, *common, refused=reason))
    return rows


def engine_names(device: str) -> list[str]:
    """Return the names of the engines: the names in `requests`, and the paths of transformers."""
    stock = TRANSFORMERS_PATHS if stock_models.installed() else ()
    return [*requests(device), *(f"{STOCK}{path}" for path in stock)]


def build(
    engine: str,
    shape: EncoderShape,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: str,
) -> Callable[[int], Tensor]:
    """Return a function of an index, which runs ``engine`` on one of several random batches."""
    model = encoder_of(engine, shape.config, weights, dtype, device)
    batches = [random_batch(shape, seed, device) for seed in range(ROTATED_BATCHES)]
    return lambda index: model(**batches[index % len(batches)]).last_hidden_state


def random_weights(config: BertConfig) -> dict[str, Tensor]:
    """Return random weights with the names of Hugging Face; every call returns the same weights.

    Biases and layer norms are random too, so that a backend that omits one of them fails `gate`.
    """
    from fastbert.modules import BertModel

    torch.manual_seed(0)
    weights = BertModel(config, backend="reference").state_dict()
    return {name: w + config.initializer_range * torch.randn_like(w) for name, w in weights.items()}


def encoder_of(
    engine: str,
    config: BertConfig,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: str,
) -> nn.Module:
    """Return the encoder of ``engine`` in eval mode."""
    if engine.startswith(STOCK):
        return stock_models.encoder(config, weights, engine.removeprefix(STOCK), dtype, device)
    return fastbert_encoder(config, weights, requests(device)[engine], dtype, device)


def fastbert_encoder(
    config: BertConfig,
    weights: Mapping[str, Tensor],
    request: str | None,
    dtype: torch.dtype,
    device: str,
) -> nn.Module:
    from fastbert.modules import BertModel

    model = BertModel(config, backend=request)
    model.load_state_dict(dict(weights))
    return model.to(device=device, dtype=dtype).eval()


def gate(
    shape: EncoderShape, dtype: torch.dtype, device: str, *, autocast: bool = False
) -> dict[str, str]:
    """Return the backends whose results are outside the tolerances, each with the reason.

    The tolerances are those of `fastbert.testing.compare`. Only hidden states at real tokens are
    compared. The exact result (the oracle) is that of the reference backend in float64. The result
    with the usual rounding errors (the yardstick) is that of the reference backend in ``dtype``.
    All backends run two layers of the encoder on weights that are rounded to ``dtype``. With
    ``autocast``, all but the oracle run under bf16 autocast.
    """
    layers = min(GATE_LAYERS, shape.config.num_hidden_layers)
    config = shape.config.replace(num_hidden_layers=layers)
    weights = {k: v.to(dtype) for k, v in random_weights(config).items()}
    batch = random_batch(shape, 0, device)
    real = batch["attention_mask"].bool()

    def hidden(request: str | None, as_dtype: torch.dtype = dtype, cast: bool = autocast) -> Tensor:
        model = fastbert_encoder(config, weights, request, as_dtype, device)
        with torch.autocast(device, torch.bfloat16, enabled=cast):
            return model(**batch).last_hidden_state[real]

    oracle = hidden("reference", torch.float64, cast=False)
    yardstick = Yardstick(lambda: hidden("reference"))
    refused = {}
    for name, request in requests(device).items():
        comparison = compare(name, hidden(request), oracle, yardstick)
        if not comparison.passed:
            refused[name] = f"parity is red: {comparison}"
    return refused


@functools.lru_cache(maxsize=4)
def refusals(
    config: BertConfig, dtype: torch.dtype, device: str, autocast: bool = False
) -> dict[str, str]:
    """Return the result of `gate` for two layers of ``config`` and a batch of two sequences."""
    with torch.inference_mode():
        return gate(EncoderShape("gate", config, (64, 37)), dtype, device, autocast=autocast)
