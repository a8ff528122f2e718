"""``fastbert.accelerate`` and ``restore`` support many models and leave the rest unchanged."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
import transformers
from tiny_models import LENGTHS, agree, batch, config, model, rows_computed, sides, values
from torch import Tensor, nn
from transformers import modeling_outputs

import fastbert
from fastbert.integrations.accelerate import _warn_once_of_left_padding, bound_encoders
from fastbert.testing.yardstick import Yardstick

PAIRS = torch.tensor([0, 1, 1, 0])
TOKENS = batch(seed=2)["input_ids"].masked_fill(batch()["attention_mask"] == 0, -100)
HEADS: dict[str, dict[str, Tensor]] = {
    "BertModel": {},
    "BertForPreTraining": {"labels": TOKENS, "next_sentence_label": PAIRS},
    "BertForMaskedLM": {"labels": TOKENS},
    "BertLMHeadModel": {},
    "BertForNextSentencePrediction": {"labels": PAIRS},
    "BertForSequenceClassification": {"labels": PAIRS},
    "BertForTokenClassification": {"labels": TOKENS.where(TOKENS < 0, TOKENS % 2)},
    "BertForQuestionAnswering": {},
}
# Family → changes of the default settings. DistilBERT's sequence classifier has a dropout of its
# own.
OTHERS: dict[str, dict[str, Any]] = {
    "Roberta": {},
    "Electra": {"embedding_size": 32},
    "Albert": {"embedding_size": 32},
    "DistilBert": {"dropout": 0.0, "attention_dropout": 0.0, "n_layers": 2, "hidden_dim": 80},
}


@pytest.mark.parametrize("head", HEADS)
def test_every_head(head) -> None:
    sides(model(head)).check(batch() | HEADS[head])


def test_the_head_of_multiple_choice() -> None:
    given = {name: x.unflatten(0, (2, 2)) for name, x in batch().items()}
    sides(model("BertForMultipleChoice")).check(given | {"labels": torch.tensor([1, 0])})


def test_question_answering_has_the_stock_loss_where_nothing_is_padded() -> None:
    """Without padding, the loss equals the stock loss, whose softmax includes padded positions."""
    pair = sides(model("BertForQuestionAnswering"))
    pair.check(batch((9, 9, 9, 9)) | {"start_positions": PAIRS, "end_positions": PAIRS + 2})
    logits = pair.fast(**batch()).start_logits[batch()["attention_mask"] == 0]
    assert torch.equal(logits, pair.fast.qa_outputs.bias[0].expand_as(logits))


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_under_an_auto_class(family) -> None:
    settings = config(family, **OTHERS[family])
    made = model(transformers.AutoModelForSequenceClassification.from_config, settings)
    sides(made).check(batch() | {"labels": PAIRS})


def test_the_same_object_and_its_class_is_still_the_stock_one() -> None:
    made = model("BertForMaskedLM")
    before = dict(made.named_modules())
    assert fastbert.accelerate(made) is made
    assert type(made) is transformers.BertForMaskedLM
    assert isinstance(made.bert, transformers.BertModel)
    kind = type(made.bert)
    assert (kind.__name__, kind.__module__) == ("BertModel", transformers.BertModel.__module__)
    after = dict(made.named_modules())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert list(bound_encoders(made)) == ["bert"]
    assert made.config._attn_implementation == "sdpa"


def test_twice_is_once_and_restore_is_exact() -> None:
    made = model()
    state, attributes = made.state_dict(), set(made.__dict__)
    fastbert.accelerate(made)
    kind, bound = type(made), bound_encoders(made)[""]
    assert fastbert.accelerate(made) is made
    assert type(made) is kind
    assert bound_encoders(made)[""] is bound
    made(**batch())
    for _ in range(2):
        assert fastbert.restore(made) is made
        assert type(made) is transformers.BertModel
        assert set(made.__dict__) == attributes
        assert bound_encoders(made) == {}
    assert all(t.data_ptr() == state[n].data_ptr() for n, t in made.state_dict().items())
    with rows_computed() as rows:
        made(**batch())
    assert rows == []


def test_restoring_a_copy_leaves_the_original() -> None:
    pair = sides(model("BertForMaskedLM"))
    plain = fastbert.restore(copy.deepcopy(pair.fast))
    assert type(plain.bert) is transformers.BertModel
    with rows_computed() as rows, torch.no_grad():
        restored = plain(**batch()).logits
    assert rows == []
    assert torch.equal(restored, pair.stock(**batch()).logits)
    pair.check(batch())


def test_two_models_of_one_class_are_apart() -> None:
    first, second = model(), model()
    fastbert.accelerate(first)
    assert type(second) is transformers.BertModel
    fastbert.accelerate(second)
    fastbert.restore(first)
    with rows_computed() as rows:
        first(**batch())
        assert rows == []
        second(**batch())
    assert rows


@pytest.mark.parametrize("grad", [False, True])
def test_padding_is_not_computed(grad) -> None:
    made = fastbert.accelerate(model())
    with torch.set_grad_enabled(grad), rows_computed() as rows:
        out = made(**batch())
    assert set(rows) == {sum(LENGTHS)}
    assert not out.last_hidden_state[batch()["attention_mask"] == 0].any()


# Outputs


@pytest.mark.parametrize("how", ["argument", "config"])
@pytest.mark.parametrize("head", ["BertModel", "BertForMaskedLM"])
def test_hidden_states_and_attentions(head, how) -> None:
    pair = sides(model(head, attn_implementation="eager"))
    wanted = {"output_hidden_states": True, "output_attentions": True}
    if how == "config":
        pair.each(lambda side: side.config.update(wanted))
    pair.check(batch(), **wanted if how == "argument" else {})
    fast, _, stock = (side(**batch(), return_dict=False, **wanted) for side in pair)
    assert list(map(type, fast)) == list(map(type, stock))
    out = pair.fast(**batch(), **wanted if how == "argument" else {})
    assert len(out.hidden_states) == 3
    assert [w.shape for w in out.attentions] == [(4, 3, 19, 19)] * 2
    plain = pair.fast(**batch(), output_hidden_states=False, output_attentions=False)
    assert plain.get("hidden_states") is None
    assert plain.get("attentions") is None


def test_weights_of_chosen_layers() -> None:
    made = fastbert.accelerate(model(attn_implementation="eager"))
    with torch.no_grad():
        every = made(**batch(), output_attentions=True).attentions
        first, last = made(**batch(), output_attentions=[-1]).attentions
    assert first is None
    assert torch.equal(last, every[1])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("BertModel", {}),
        ("ElectraModel", {"embedding_size": 32}),
        ("AlbertModel", {"embedding_size": 32}),
        ("DistilBertModel", OTHERS["DistilBert"]),
    ],
)
def test_outputs_have_the_class_of_the_stock_ones(kind, changes) -> None:
    settings = config(kind.removesuffix("Model"), **changes)
    pair = sides(model(kind, settings))
    fast, _, stock = (side(**batch(), output_hidden_states=True) for side in pair)
    assert type(fast) is type(stock)
    assert list(fast.keys()) == list(stock.keys())
    fast, _, stock = (side(**batch(), return_dict=False) for side in pair)
    assert type(fast) is tuple
    assert [x.shape for x in fast] == [x.shape for x in stock]
    pair.each(lambda side: setattr(side.config, "return_dict", False))
    assert type(pair.fast(**batch())) is type(pair.stock(**batch())) is tuple


def test_a_head_returns_a_tuple() -> None:
    pair = sides(model("BertForSequenceClassification"))
    fast, _, stock = (side(**batch(), labels=PAIRS, return_dict=False) for side in pair)
    assert [x.shape for x in fast] == [x.shape for x in stock] == [(), (4, 2)]


def test_positional_arguments_and_a_model_without_pooler() -> None:
    made = model(
        lambda settings: transformers.BertModel(settings, add_pooling_layer=False), config()
    )
    pair, given = sides(made), batch()
    out = pair.fast(given["input_ids"], given["attention_mask"])
    assert out.pooler_output is None
    assert type(out) is modeling_outputs.BaseModelOutputWithPoolingAndCrossAttentions
    pair.check(given)


def test_embeddings_instead_of_ids() -> None:
    pair, given = sides(model()), batch()
    embeds = torch.randn(*given.pop("input_ids").shape, 48)
    with torch.no_grad(), rows_computed() as rows:
        fast, _, stock = (side(inputs_embeds=embeds.to(side.dtype), **given) for side in pair)
    assert rows
    torch.testing.assert_close(fast.pooler_output, stock.pooler_output)


def test_the_pooler_reads_the_first_token_that_exists() -> None:
    pair, given = sides(model()), batch()
    left = {name: x.flip(1) for name, x in given.items()}
    positions = (left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    right = {name: x.flip(1) for name, x in given.items()}
    for row, length in enumerate(LENGTHS):
        for x in right.values():
            x[row] = x[row].roll(length - 19)
    with torch.no_grad():
        actual = pair.fast(**left, position_ids=positions).pooler_output
        expected = pair.fast(**right).pooler_output
    torch.testing.assert_close(actual, expected)


def test_a_head_that_would_read_padding_is_warned_once() -> None:
    settings = config("Electra", embedding_size=32)
    made = fastbert.accelerate(model("ElectraForSequenceClassification", settings))
    _warn_once_of_left_padding.cache_clear()
    left = {name: x.flip(1) for name, x in batch().items()}
    with pytest.warns(UserWarning, match="begin with padding.*Pad on the right"):
        made(**left)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(**left)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("form", ["cu_seq_lens", "position_ids"])
def test_packed_sequences_are_as_if_alone(form, rows) -> None:
    """Packed sequences have the outputs of separate sequences, in one row or in two rows."""
    lengths = (5, 4, 1, 3, 1, 6)
    pair, given = sides(model()), batch(lengths)
    exist = given["attention_mask"].bool()
    packed = {
        "input_ids": given["input_ids"][exist].view(rows, -1),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).view(rows, -1),
    }
    if form == "cu_seq_lens":
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        packed |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        packed |= {"max_length_q": 6, "max_length_k": 6}
    with torch.no_grad(), rows_computed() as computed:
        out = pair.fast(**packed, output_hidden_states=True)
    assert computed == [20]
    assert out.last_hidden_state.shape == (rows, 20 // rows, 48)
    fast = {
        "last_hidden_state": out.last_hidden_state.flatten(0, 1),
        "pooler_output": out.pooler_output,
        "hidden_states": torch.stack(out.hidden_states).flatten(1, 2),
    }
    with torch.no_grad():
        oracle = values(pair.oracle, given, output_hidden_states=True)
        stock = Yardstick(lambda: values(pair.stock, given, output_hidden_states=True))
        agree(fast, oracle, stock)


# Tests of models that contain an encoder


class HasBert(transformers.BertPreTrainedModel):
    """A model like ColBERT, which scores texts by projected vectors of their tokens."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.bert = transformers.BertModel(settings, add_pooling_layer=False)
        self.linear = nn.Linear(settings.hidden_size, 8, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask):
        states = self.bert(input_ids, attention_mask=attention_mask)[0]
        vectors = nn.functional.normalize(self.linear(states), dim=-1)
        return {"vectors": vectors * attention_mask[..., None]}


class IsBert(transformers.BertModel):
    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.linear = nn.Linear(settings.hidden_size, 8, bias=False)
        self.squash = nn.Tanh()
        self.post_init()

    def forward(self, input_ids, attention_mask, *, scale=1.0, **options):
        states = super().forward(input_ids, attention_mask=attention_mask, **options)
        return {"vectors": scale * self.squash(self.linear(states.last_hidden_state))}


class BiEncoder(nn.Module):
    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.query, self.document = (transformers.BertModel(settings) for _ in range(2))

    def forward(self, input_ids, attention_mask):
        both = [side(input_ids, attention_mask) for side in (self.query, self.document)]
        return {"scores": both[0].pooler_output @ both[1].pooler_output.T}


@pytest.mark.parametrize("kind", [HasBert, IsBert, BiEncoder])
def test_models_of_ones_own(kind) -> None:
    pair = sides(model(kind, config()))
    pair.check(batch())
    if kind is IsBert:
        assert type(pair.fast) is not kind
        assert isinstance(pair.fast, kind)
        again = copy.deepcopy(pair.fast)
        assert isinstance(again, kind)
        pair._replace(fast=again).check(batch(), scale=2.0)
    fastbert.restore(pair.fast)
    assert {type(m) for m in pair.fast.modules()} == {type(m) for m in pair.stock.modules()}


def test_an_encoder_that_hangs_in_two_places() -> None:
    first = model(BiEncoder, config())
    first.document = first.query
    pair = sides(first)
    assert pair.fast.document is pair.fast.query
    pair.check(batch())


def test_two_threads_call_one_model() -> None:
    made = fastbert.accelerate(model())
    batches = [batch(), batch((5, 9), 3)]
    with torch.no_grad():
        expected = [made(**given).last_hidden_state for given in batches]
    wrong: list[Any] = []

    def call(number: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(30):
                    actual = made(**batches[number]).last_hidden_state
                    assert torch.equal(actual, expected[number])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
