"""Read the numbers of a page from its file as the format specifies, and bound their errors."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from typing import Any

import numpy as np

from fastbert.viewer import quantize

# The code of a weight w with N levels is computed in fp32, whose unit roundoff is u = 2⁻²⁴. The
# root of w, its product with N and the sum with 1/2 have a relative error of u each. A weight is
# therefore rounded at most δ = 3 u (N + 1) off the middle of two codes. This moves the decoded
# weight by at most 2 δ (√w + 1/N) / N < 8 u. The decoded weight is the square of a quotient in
# fp32, with an error of at most 3 u.
ROUNDING = 11 * 2.0**-24


def error_bound(weights: np.ndarray, levels: int) -> np.ndarray:
    """Return the largest error that the codes of a page may cause in each weight.

    A weight w becomes the code c = √w N + d with |d| ≤ 1/2, which stands for c²/N². The error is
    |2 √w d N + d²| / N² ≤ √w / N + 1 / (4 N²). The bound adds the rounding of fp32.
    """
    return np.sqrt(weights.astype(float)) / levels + 1 / (4 * levels**2) + ROUNDING


def data_of(html: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return json.loads(found)


def block_of(html: str, name: str) -> bytes:
    (found,) = re.findall(rf'id="block-{name}">([^<]*)<', html)
    return zlib.decompress(base64.b64decode(found), -15)


def planes_of(html: str, name: str, levels: int) -> np.ndarray:
    """Return the planes of the block `name` as an array (heads, L, L) by head, query and key."""
    codes = np.frombuffer(block_of(html, name), np.uint8)
    length = len(data_of(html)["tokens"])
    return quantize.decode(codes.reshape(-1, length, length), levels).astype(float)


def weights_of(html: str) -> np.ndarray:
    """Return the weights of the page, of shape ``(layers, heads, L, L)``."""
    data = data_of(html)
    return np.stack(
        [planes_of(html, f"weights-{i}", data["levels"]) for i in range(len(data["layers"]))]
    )


def norms_of(html: str, layer: int) -> np.ndarray:
    """Return the norms of a layer, of shape ``(heads, L)``."""
    data = data_of(html)
    codes = np.frombuffer(block_of(html, f"norms-{layer}"), "<u2")
    scale = data["layers"][layer]["normScale"]
    return codes.reshape(data["heads"], -1) * scale / 65535


def vectors_of(html: str, name: str, layer: int) -> np.ndarray:
    """Return the queries or the keys of a layer, of shape ``(heads, L, D)``."""
    data = data_of(html)
    codes = np.frombuffer(block_of(html, f"{name}-{layer}"), np.uint8).astype(float)
    scales = np.array(data["layers"][layer][f"{name}Scales"])[:, None, None]
    shape = (data["heads"], len(data["tokens"]), data["headSize"])
    return (codes.reshape(shape) - data["vectorLevels"]) / data["vectorLevels"] * scales


def relevance_of(html: str, layer: int) -> np.ndarray:
    """Return gradient × attention of a layer, of shape ``(heads, L, L)`` or ``(1, L, L)``."""
    data = data_of(html)
    scale = data["layers"][layer]["relevanceScale"]
    return scale * planes_of(html, f"relevance-{layer}", data["relevanceLevels"])


def half_digit(value: float) -> float:
    """Return half a unit of the last digit that a page prints, plus the rounding of fp32."""
    if value == 0:
        return 0.0
    digits = 1 - math.floor(math.log10(abs(value))) if value < 0.0995 else 2 - (value >= 9.95)
    return 0.5 * 10.0**-digits + 1e-5 * abs(value)
