"""Write a page: one HTML file with a program, the data of a text, and compressed weights."""

from __future__ import annotations

import functools
import json
import math
from importlib import resources
from typing import Any

import numpy as np
from torch import Tensor

from fastbert.viewer import quantize
from fastbert.viewer.collect import Collected, Layer
from fastbert.viewer.measures import MEASURES, measure
from fastbert.viewer.text import Tokens

# Largest number of characters of a page. A browser opens a file of this size in about a second.
BUDGET = 14_700_000
# Largest number of characters for the queries and keys of the neuron view. At 512 tokens, the page
# leaves out the queries and keys of some layers.
NEURON_BUDGET = 2_000_000
THUMBNAIL = 48
# Largest number of characters for gradient × attention of all heads together. If the heads need
# more characters, the page has only the mean over the heads of each layer.
RELEVANCE_BUDGET = 2_000_000
RELEVANCE_LEVELS = 31
# The largest size of a file, as the messages of the page state it: BUDGET, rounded up.
LIMIT = "15 MB"
TEMPLATE = "page.html"
DATA, BLOCKS = "<!-- fastbert:data -->", "<!-- fastbert:blocks -->"


@functools.cache
def template() -> str:
    """Return the page without data, which ``make viewer`` builds."""
    return resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")


def build(collected: Collected, tokens: Tokens, title: str) -> str:
    """Write the page of a text.

    Args:
        collected: The result of `collect` for the text.
        tokens: The tokens of the text.
        title: Title of the page.

    Returns:
        A complete HTML document of at most `BUDGET` characters, which loads no other file.

    Raises:
        ValueError: If the weights of the chosen layers do not fit, because the text is very long.
    """
    layers = collected.layers
    weights = [layer.weights.clamp(0, 1).numpy() for layer in layers]
    blocks, entries = {}, [_entry(layer, tokens) for layer in layers]
    size = min(len(tokens.ids), THUMBNAIL)
    # For a short text, the page itself computes the thumbnails from the weights.
    if size < len(tokens.ids):
        small = np.stack([quantize.thumbnail(layer, size) for layer in weights])
        blocks["thumbnails"] = quantize.compress(small.tobytes())
    for number in _with_neurons(layers):
        _add_neurons(blocks, entries, layers, number)
    for number, layer in enumerate(layers):
        _add_norms(blocks, entries, layer, number)
    by_head = _add_relevance(blocks, entries, layers)
    levels = quantize.finest(weights, BUDGET - sum(map(len, blocks.values())) - len(template()))
    for number, layer in enumerate(weights):
        codes = quantize.encode(layer, levels)
        blocks[f"weights-{number}"] = quantize.compress(codes.tobytes())
    data = _data(collected, tokens, title) | {
        "layers": entries,
        "thumbnail": size,
        "levels": levels,
        "vectorLevels": quantize.VECTOR_LEVELS,
        "relevanceLevels": RELEVANCE_LEVELS,
        "relevanceByHead": by_head,
        "limit": LIMIT,
        "largestError": quantize.largest_error(levels),
    }
    return fill(data, blocks)


def fill(data: dict[str, Any], blocks: dict[str, str]) -> str:
    """Put data and blocks into the page.

    ``<``, ``>`` and ``&`` in the data are written as JSON escapes, so that a browser does not read
    the text of a user as markup.

    Args:
        data: The data, which must be serializable as JSON.
        blocks: Compressed arrays as base64 text, by the name of the array.

    Returns:
        The HTML document.
    """
    # JSON cannot represent NaN, so json.dumps raises ValueError if the data contains NaN.
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    escaped = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    scripts = "\n".join(
        f'<script type="text/plain" id="block-{name}">{block}</script>'
        for name, block in blocks.items()
    )
    before, rest = template().split(DATA)
    between, after = rest.split(BLOCKS)
    element = f'<script type="application/json" id="data">{escaped}</script>'
    return "".join((before, element, between, scripts, after))


def _data(collected: Collected, tokens: Tokens, title: str) -> dict[str, Any]:
    config, prediction = collected.config, collected.prediction
    shown = None
    if prediction is not None:
        chosen = prediction.chosen
        shown = {"kind": prediction.kind, "rows": prediction.rows, "chosen": chosen}
    return {
        "title": title,
        "model": collected.name,
        "layerCount": len(config.architecture.order(config.num_hidden_layers)),
        "heads": config.num_attention_heads,
        "headSize": config.head_dim,
        "texts": tokens.texts,
        "tokens": tokens.pieces,
        "sentences": tokens.sentences,
        "words": tokens.words,
        "surfaces": tokens.surfaces,
        "measures": [each._asdict() for each in MEASURES],
        "prediction": shown,
        "note": collected.note,
        "biased": collected.biased,
    }


def _entry(layer: Layer, tokens: Tokens) -> dict[str, Any]:
    return {
        "number": layer.number,
        "window": layer.window,
        "measures": measure(layer.weights, tokens),
        "scores": None if layer.scores is None else layer.scores.tolist(),
        "neurons": False,
    }


def _with_neurons(layers: list[Layer]) -> list[int]:
    """Choose the layers whose queries and keys the page contains.

    These are all layers if they fit into `NEURON_BUDGET`, otherwise evenly spaced layers that
    include the last layer.
    """
    each = layers[0].queries.numel() * 2
    # The code of an element of a Gaussian vector takes about 6.1 bits, and base64 adds a third.
    most = max(1, int(NEURON_BUDGET / (each * 6.1 / 8 * 4 / 3)))
    count = len(layers)
    if most >= count:
        return list(range(count))
    return sorted({math.ceil(count * (step + 1) / most) - 1 for step in range(most)})


def _add_neurons(
    blocks: dict[str, str], entries: list[dict[str, Any]], layers: list[Layer], number: int
) -> None:
    layer = layers[number]
    vectors = {"queries": layer.queries, "keys": layer.keys}
    entries[number]["neurons"] = True
    for name, tensor in vectors.items():
        encoded = quantize.encode_vectors(tensor.numpy())
        entries[number][f"{name}Scales"] = encoded.scales
        blocks[f"{name}-{number}"] = quantize.compress(encoded.codes.tobytes())


def _add_relevance(
    blocks: dict[str, str], entries: list[dict[str, Any]], layers: list[Layer]
) -> bool | None:
    """Add gradient × attention of each head if it fits, otherwise the mean over the heads.

    Returns:
        Whether the heads are stored separately; None if there is no gradient.
    """
    planes = [layer.relevance.numpy() for layer in layers if layer.relevance is not None]
    if not planes:
        return None
    scaled = [plane / (plane.max() or 1) for plane in planes]
    by_head = quantize.estimate(scaled, RELEVANCE_LEVELS) <= RELEVANCE_BUDGET
    if not by_head:
        planes = [plane.mean(0, keepdims=True) for plane in planes]
    for number, plane in enumerate(planes):
        scale = float(plane.max()) or 1.0
        entries[number]["relevanceScale"] = scale
        codes = quantize.encode(plane / np.float32(scale), RELEVANCE_LEVELS)
        blocks[f"relevance-{number}"] = quantize.compress(codes.tobytes())
    return by_head


def _add_norms(
    blocks: dict[str, str], entries: list[dict[str, Any]], layer: Layer, number: int
) -> None:
    norms: Tensor = layer.norms
    scale = float(norms.max()) or 1.0
    codes = np.rint(norms.numpy() / scale * 65535).astype("<u2")
    entries[number]["normScale"] = scale
    blocks[f"norms-{number}"] = quantize.compress(codes.tobytes())
