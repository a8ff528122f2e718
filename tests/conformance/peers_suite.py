"""Run Liger's tests on fastbert's operations, and PEFT's tests on accelerated encoders.

    python tests/conformance/peers_suite.py [liger] [peft]      # or: make conformance-peers

Liger's tests check fastbert's operations in the place of Liger's kernels
(``liger_on_fastbert.py``). PEFT's tests of adapters run with stock and with accelerated encoders
(``peft_on_fastbert.py``). Both test suites come from source distributions of the package index. The
exit status is 1 if a test of Liger fails, or if a test of PEFT passes with stock encoders only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections import Counter

from recorded import CACHE, compare, report, results
from source_distribution import unpacked

LIGER = "0.8.5"
# Name of Liger's test file → selection of the tests whose operations fastbert offers.
FILES = {
    # In bf16 on a CPU, the weight gradient of torch is twice as far from float64 as fastbert's
    # gradient, and torch's error exceeds the tolerance of the test.
    "layer_norm": "not dtype1",
    # Tests of distributed tensors need several processes and take 35 s each.
    "rms_norm": "not dtensor",
    # The other tests rotate only part of a head, or rotate pairs of neighbours.
    "rope": "(test_correctness or test_functional) and not partial",
    # In the other tests, the modules multiply by constants between the products.
    "swiglu": "llamamlp",
    "fused_linear_cross_entropy": "",
}
# On Triton, only one file runs, because the interpreter is too slow for products of matrices.
BACKENDS = {"reference": tuple(FILES), "cpu": tuple(FILES), "triton": ("layer_norm",)}
# PEFT's tests import these packages, but the tests of encoders do not use the packages.
STUBS = {
    "tests/__init__.py": "",
    "stubs/diffusers/__init__.py": "class StableDiffusionPipeline:\n    pass\n",
    "stubs/datasets/__init__.py": "load_dataset = None\n",
}
# These tests are for the two families of PEFT's tests that fastbert accelerates. Prefix tuning is
# excluded, because an accelerated encoder refuses its past_key_values.
ENCODERS = "(BertModel or RobertaModel) and not (PrefixTuning and ({}))".format(
    "training_prompt_learning_tasks or inference_safetensors or passing_input_embeds"
)


def liger(chosen: str) -> int:
    """Print the outcomes of Liger's tests, and return the number of failures."""
    suite = unpacked("liger-kernel", LIGER, CACHE, ("src/liger_kernel", "test"), {})
    failures = []
    for backend, files in BACKENDS.items():
        for name in files:
            selection = " and ".join(f"({part})" for part in (FILES[name], chosen) if part)
            tests = results(
                f"liger-{name}-{backend}", [suite / f"test/transformers/test_{name}.py"],
                [suite, suite / "src"], ["liger_on_fastbert"], selection,
                {"CONFORMANCE_BACKEND": backend, "TRITON_INTERPRET": "1"},
            )  # fmt: skip
            counts = Counter(test["outcome"] for test in tests.values())
            failed = [t for t, test in tests.items() if test["outcome"] == "failed"]
            failures += [f"liger {name}, {backend}: {test}" for test in failed]
            words = ", ".join(f"{counts[k]} {k}" for k in ("passed", "failed", "skipped"))
            print(f"liger {name}, {backend}: {words}", flush=True)
    print("\n".join(failures))
    return len(failures)


def peft(chosen: str) -> int:
    """Compare PEFT's adapter tests on stock and accelerated encoders; return the exit status."""
    suite = unpacked("peft", importlib.metadata.version("peft"), CACHE, ("tests",), STUBS)
    selection = f"({ENCODERS})" + (f" and ({chosen})" if chosen else "")
    stock, fast = (
        results(
            f"peft-{mode}", [suite / "tests/test_feature_extraction_models.py"],
            [suite, suite / "stubs"], ["peft_on_fastbert"], selection, {"CONFORMANCE_MODE": mode},
        )
        for mode in ("stock", "fast")
    )  # fmt: skip
    return report(compare("peft", stock, fast)[1])


PEERS = {"liger": liger, "peft": peft}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("peers", nargs="*", choices=[*PEERS, []], metavar="PEER")
    parser.add_argument("--tests", default="", help="expression for pytest's -k that selects tests")
    options = parser.parse_args()
    failed = [name for name in options.peers or PEERS if PEERS[name](options.tests)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
