"""Run transformers' own tests with stock and with accelerated encoders, and compare the outcomes.

The source distribution of transformers contains ``test_modeling_common.py``, the tests that every
model of transformers must pass. This script downloads the distribution of the installed version,
unpacks its tests into ``build/conformance``, and runs them for the families that
``fastbert.accelerate`` supports. Each family runs in two processes, with stock and with accelerated
encoders. The script prints a table of the passed tests. The exit status is 1 if a test passes with
stock encoders only.

    python tests/conformance/transformers_suite.py                  # all families
    python tests/conformance/transformers_suite.py bert mpnet       # two of them

The script needs pytest, parameterized and, once, the package index. It is not part of the test
suite, which needs no network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

from recorded import CACHE, HERE, compare, line, report, results
from source_distribution import unpacked

FAMILIES = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "data2vec-text",
    "ernie",
    "layoutlm",
    "roberta-prelayernorm",
    "xlm-roberta-xl",
    "megatron-bert",
    "gte",
    "jina_embeddings_v3",
    "distilbert",
    "albert",
    "electra",
    "mpnet",
    "modernbert",
    "nomic_bert",
    "deberta-v2",
    "deberta",
    "esm",
    "roformer",
    "eurobert",
    "t5",
    "marian",
    "xlnet",
)
# The distribution lacks these two modules, which test_modeling_common.py imports. The modules test
# export and text generation, which these runs do not need.
STUBS = {
    "tests/__init__.py": "",
    "tests/exporters/__init__.py": "",
    "tests/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "tests/generation/__init__.py": "",
    "tests/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], metavar="FAMILY")
    parser.add_argument("--tests", default="", help="expression for pytest's -k that selects tests")
    chosen = parser.parse_args()
    version = importlib.metadata.version("transformers")
    suite = unpacked("transformers", version, CACHE, ("tests",), STUBS)
    rows, missing = [], []
    for family in chosen.families or FAMILIES:
        stock, fast = (
            results(
                f"{family}-{mode}", [HERE / "transformers_families.py"], [suite], [], chosen.tests,
                {"CONFORMANCE_FAMILY": family, "CONFORMANCE_MODE": mode},
            )
            for mode in ("stock", "fast")
        )  # fmt: skip
        counts, lost = compare(family, stock, fast)
        rows.append(counts)
        missing += lost
    print(line("all", *map(sum, zip(*rows, strict=True))))
    return report(missing)


if __name__ == "__main__":
    sys.exit(main())
