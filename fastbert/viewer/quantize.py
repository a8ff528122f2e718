"""Quantize attention weights to few bits, compress them, and write them as text.

A weight w between 0 and 1 becomes the code ``round(√w · N)``, where N is the number of levels above
0. The square root makes small weights more precise: the error of a weight is at most
``√w / N + 1 / (4 N²)``. A head is stored by columns, because the weights on one key are alike. The
compression is Huffman coding with run lengths, which browsers read with ``DecompressionStream``.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The numbers of levels that `finest` chooses from, in descending order.
LEVELS = (255, 191, 127, 95, 79, 63, 47, 31, 23, 15, 11)
# One in SAMPLE heads of every layer is compressed to choose the number of levels.
SAMPLE = 8
# Largest share of its budget that `finest` lets the estimated size of the layers take.
RESERVE = 0.95
# Queries and keys have this many levels on either side of 0.
VECTOR_LEVELS = 63

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]


def compress(data: bytes) -> str:
    """Return `data` compressed by raw deflate, as base64 text."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    return base64.b64encode(packer.compress(data) + packer.flush()).decode("ascii")


def decompress(text: str) -> bytes:
    """Return the bytes from which `compress` made the text."""
    return zlib.decompress(base64.b64decode(text), -15)


def encode(weights: Floats, levels: int) -> Codes:
    """Quantize weights.

    Args:
        weights: Weights of shape ``(..., L, L)`` between 0 and 1.
        levels: Number N of levels above 0, at most 255.

    Returns:
        Codes of shape ``(..., L, L)``, with the dimension of the keys before that of the queries.
    """
    codes = np.sqrt(weights)
    codes *= levels
    codes += np.float32(0.5)
    return np.ascontiguousarray(codes.astype(np.uint8).swapaxes(-1, -2))


def decode(codes: Codes, levels: int) -> Floats:
    """Return the weights of shape ``(..., L, L)`` that codes stand for, queries before keys."""
    table = (np.arange(256, dtype=np.float32) / levels) ** 2
    return table[codes.swapaxes(-1, -2)]


def largest_error(levels: int) -> float:
    """Return the largest error of a quantized weight, which occurs between the last two codes."""
    return 1 / levels - 1 / (4 * levels**2)


def finest(layers: list[Floats], budget: int) -> int:
    """Choose the largest number of levels with which all layers fit into a budget.

    The function compresses one in `SAMPLE` heads of each layer. It leaves a part of the budget
    unused, because the other heads may take more characters.

    Args:
        layers: The weights of each layer, of shape ``(heads, L, L)``.
        budget: Largest number of characters of base64 text for all layers.

    Returns:
        One of `LEVELS`.

    Raises:
        ValueError: If the layers do not fit even with the smallest number of levels.
    """
    total = sum(layer.size for layer in layers)
    if total * 8 * 4 / 3 <= 8 * budget:
        return LEVELS[0]
    for levels in LEVELS:
        size = estimate(layers, levels)
        if size <= RESERVE * budget:
            return levels
    raise ValueError(
        f"text: its {total:,} attention weights need {size / 1e6:.1f} MB, allowed: "
        f"{RESERVE * budget / 1e6:.1f} MB; choose fewer layers"
    )


def estimate(layers: list[Floats], levels: int) -> float:
    """Estimate from one in `SAMPLE` heads of each layer how many characters the layers take.

    Args:
        layers: Planes of shape ``(heads, L, L)`` between 0 and 1, one array for each layer.
        levels: Number of levels above 0.

    Returns:
        The estimated number of characters of base64 text.
    """
    sampled = [layer[number % SAMPLE :: SAMPLE] for number, layer in enumerate(layers)]
    size = sum(len(compress(encode(layer, levels).tobytes())) for layer in sampled)
    return size * sum(layer.size for layer in layers) / sum(layer.size for layer in sampled)


@dataclass
class Vectors:
    """Quantized vectors, with one scale for each head.

    Attributes:
        codes: ``round(x / scale · N) + N`` as uint8, where N is `VECTOR_LEVELS`.
        scales: The largest absolute value of each head.
    """

    codes: Codes
    scales: list[float]


def encode_vectors(vectors: Floats) -> Vectors:
    """Quantize vectors of shape ``(heads, L, D)``.

    The error of an element is at most ``scale / (2 N)``, where N is `VECTOR_LEVELS`.
    """
    scales = np.abs(vectors).max((1, 2), keepdims=True)
    scales[scales == 0] = 1
    codes = np.rint(vectors / scales * VECTOR_LEVELS) + VECTOR_LEVELS
    return Vectors(codes.astype(np.uint8), scales.ravel().tolist())


def thumbnail(weights: Floats, size: int) -> Codes:
    """Shrink heads to pictures: each cell is the largest weight of its rectangle.

    Args:
        weights: Weights of shape ``(heads, L, L)``.
        size: Number of cells on a side, at most L.

    Returns:
        Codes of shape ``(heads, size, size)`` with 255 levels, queries before keys.
    """
    edges = np.arange(size) * weights.shape[-1] // size
    small = np.maximum.reduceat(np.maximum.reduceat(weights, edges, 1), edges, 2)
    return np.rint(np.sqrt(small) * 255).astype(np.uint8)
