"""Print, for each model family, the claims that a test of this repository shows, as JSON.

    python tests/collected_families.py

A claim is shown by a test function whose cases have the family and the values of the claim among
their parameters. The tests are collected and not run.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

HERE = Path(__file__).resolve().parent


class Claim(NamedTuple):
    """A claim about a family, and the test that shows it.

    Attributes:
        file: File of the test in tests/.
        test: Name of the test function.
        values: Values of parameters that a case must have.
    """

    file: str
    test: str
    values: dict[str, Any]


_NATIVE, _FAST = "integrations/test_native_families.py", "integrations/test_accelerated_families.py"
_INT8, _XLNET = "integrations/test_quantized_models.py", "integrations/test_xlnet.py"
CLAIMS = {
    "native fp32": Claim(_NATIVE, "test_inference", {"dtype": torch.float32}),
    "native bf16": Claim(_NATIVE, "test_inference", {"dtype": torch.bfloat16}),
    "native gradients": Claim(_NATIVE, "test_outputs_and_gradients", {}),
    "accelerated fp32": Claim(_FAST, "test_inference", {"dtype": torch.float32}),
    "accelerated bf16": Claim(_FAST, "test_inference", {"dtype": torch.bfloat16}),
    "accelerated gradients": Claim(_FAST, "test_outputs_and_gradients", {"mode": "train"}),
    "loss of a head": Claim(_FAST, "test_a_head_with_a_loss", {}),
    "packed": Claim(_FAST, "test_packed_sequences_do_not_see_each_other", {}),
    "same bits in any batch": Claim(
        _FAST, "test_a_sequence_has_the_same_bits_alone_and_in_any_batch", {}
    ),
    "int8": Claim(_INT8, "test_every_family_has_the_bits_of_a_model_of_fastbert", {}),
}
# XLNet is no `BertModel`, so it has tests of its own, without a parameter for the family.
XLNET = {
    "native fp32": Claim(_XLNET, "test_every_call", {"side": "native"}),
    "native gradients": Claim(_XLNET, "test_every_call", {"side": "native"}),
    "accelerated fp32": Claim(_XLNET, "test_every_call", {"side": "accelerated"}),
    "accelerated bf16": Claim(_XLNET, "test_16_bits", {"dtype": torch.bfloat16}),
    "accelerated gradients": Claim(_XLNET, "test_every_call", {"side": "accelerated"}),
    "loss of a head": Claim(_XLNET, "test_the_heads_of_transformers", {}),
}


class Collected:
    """A plugin of pytest that stores the collected cases."""

    cases: list[pytest.Function]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Store the cases."""
        self.cases = [item for item in session.items if isinstance(item, pytest.Function)]


def collected() -> list[pytest.Function]:
    """Return all cases of the tests that the claims name, including those of every-case."""
    plugin = Collected()
    files = sorted({str(HERE / claim.file) for claim in (*CLAIMS.values(), *XLNET.values())})
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = pytest.main(
            [*files, "--collect-only", "--every-case", "-q", "-p", "no:cacheprovider"], [plugin]
        )
    if status != 0:
        raise RuntimeError(f"pytest: got the exit status {status}, allowed: 0\n{output.getvalue()}")
    return plugin.cases


def shown(families: list[str]) -> dict[str, dict[str, str]]:
    """Return the claims of each family that a collected case shows.

    Args:
        families: Values of ``model_type``.

    Returns:
        For each family a dict from a claim to the file and the name of the test.

    Raises:
        RuntimeError: If a claim names a test that does not exist.
    """
    cases = collected()
    found: dict[str, dict[str, str]] = {family: {} for family in (*families, "xlnet")}
    for family, claims in found.items():
        for name, (file, test, values) in (XLNET if family == "xlnet" else CLAIMS).items():
            of_test = [
                case for case in cases if case.originalname == test and case.path == HERE / file
            ]
            if not of_test:
                raise RuntimeError(f"{name}: got no test {file}::{test}, allowed: a test")
            wanted = values if family == "xlnet" else values | {"family": family}
            for case in of_test:
                params = case.callspec.params
                if all(params.get(key) == value for key, value in wanted.items()):
                    claims[name] = f"{file}::{test}"
    return found


def main() -> None:
    """Print the claims as JSON."""
    sys.path.insert(0, str(HERE.parent))
    from fastbert.io.families import ACCELERATED

    json.dump(shown(list(ACCELERATED)), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
