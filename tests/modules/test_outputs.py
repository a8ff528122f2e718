"""The values of an output object are readable as attributes, by key, and by index."""

from __future__ import annotations

import pytest
import torch
from transformers_pair import batch, pair

from fastbert.modules import BertForPreTraining, BertForPreTrainingOutput, MaskedLMOutput

LOSS, LOGITS = torch.tensor(1.0), torch.zeros(2)


def test_the_views_skip_what_is_none() -> None:
    output = MaskedLMOutput(loss=LOSS, logits=LOGITS)
    assert output.keys() == ("loss", "logits")
    assert output.to_tuple() == (LOSS, LOGITS)
    assert output[0] is LOSS
    assert output[-1] is LOGITS
    assert output[:1] == (LOSS,)
    assert output["logits"] is output.logits is LOGITS
    loss, logits = output
    assert loss is LOSS
    assert logits is LOGITS
    assert len(output) == 2
    assert "loss" in output
    assert "attentions" not in output
    assert {**output} == dict(output.items()) == {"loss": LOSS, "logits": LOGITS}
    assert MaskedLMOutput(logits=LOGITS)[0] is LOGITS


def test_absent_keys() -> None:
    output = MaskedLMOutput(logits=LOGITS)
    assert output.attentions is None
    with pytest.raises(KeyError, match=r"attentions.*logits"):
        output["attentions"]
    with pytest.raises(IndexError):
        output[1]


def test_the_pre_training_losses_do_not_shift_the_tuple() -> None:
    output = BertForPreTrainingOutput(loss=LOSS, prediction_logits=LOGITS, mlm_loss=LOSS)
    assert output.to_tuple()[:2] == (LOSS, LOGITS)


def test_return_dict() -> None:
    model: BertForPreTraining = pair("BertForPreTraining").ours
    expected = model(**batch(), output_hidden_states=True)
    got = model(**batch(), output_hidden_states=True, return_dict=False)
    assert type(got) is tuple
    assert len(got) == len(expected)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[2][-1], expected.hidden_states[-1])


def test_config_json_may_ask_for_more() -> None:
    models = pair("BertModel", output_hidden_states=True)
    out = models.ours(**batch())
    assert len(out.hidden_states) == len(models.yardstick(**batch()).hidden_states) == 3
    assert models.ours(**batch(), output_hidden_states=False).hidden_states is None
