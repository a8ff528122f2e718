"""The figures of the evaluation agree with their definitions, for packed and padded batches.

The model removes padding before the first layer, so packed and padded batches agree exactly.
"""

import pytest
import torch
import torch.nn.functional as F

from fastbert.modules import BertForPreTraining
from fastbert.training.evaluate import MaskedPredictions, evaluate
from fastbert.training.preparation import prepare


def pack(batch):
    """Return the same pairs of texts without padding, as a packed batch."""
    present = batch["attention_mask"].bool()
    lengths = present.sum(dim=1)
    flat = ("input_ids", "token_type_ids", "labels")
    return {
        **{name: batch[name][present] for name in flat},
        "cu_seqlens": F.pad(lengths.cumsum(0), (1, 0)).int(),
        "max_seqlen": int(lengths.max()),
        "next_sentence_label": batch["next_sentence_label"],
    }


@pytest.fixture(scope="module")
def model_and_batches(documents):
    from fastbert.training.options import PretrainOptions

    options = PretrainOptions(
        output="unused",
        preset="tiny",
        config={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        vocab_size=300,
        max_length=48,
        tokens_per_batch=480,
        held_out=0.2,
        packed=False,
    )
    prepared = prepare(options, documents, lambda text: None)
    torch.manual_seed(0)
    config = options.model_config(prepared.tokenizer.vocab_size, prepared.tokenizer.pad_id)
    # These weights are larger than the initial weights of a run, so the losses depend on every
    # token.
    model = BertForPreTraining(config.replace(initializer_range=0.2))
    return model, prepared.held_out


def test_figures_are_what_they_say(model_and_batches):
    model, batches = model_and_batches
    logits, labels, relations, wanted = [], [], [], []
    model.eval()
    with torch.no_grad():
        for batch in batches:
            output = model(**batch, output_logits=True)
            logits.append(output.prediction_logits.flatten(0, 1))
            labels.append(batch["labels"].flatten())
            relations.append(output.seq_relationship_logits)
            wanted.append(batch["next_sentence_label"])
    logits, labels, relations, wanted = map(torch.cat, (logits, labels, relations, wanted))
    logits, labels = logits[labels != -100], labels[labels != -100]
    expected = {
        "mlm_loss": F.cross_entropy(logits, labels).item(),
        "mlm_accuracy": (logits.argmax(-1) == labels).double().mean().item(),
        "nsp_loss": F.cross_entropy(relations, wanted).item(),
        "nsp_accuracy": (relations.argmax(-1) == wanted).double().mean().item(),
        "mlm_baseline_accuracy": (labels == labels.mode().values).double().mean().item(),
    }
    assert evaluate(model, batches) == pytest.approx(expected, rel=1e-5)


def test_packed_and_padded_batches_agree(model_and_batches):
    model, batches = model_and_batches
    assert evaluate(model, batches) == evaluate(model, map(pack, batches))


def test_packed_and_padded_batches_train_alike(model_and_batches):
    model, batches = model_and_batches
    model.train()
    gradients = []
    for batch in (batches[0], pack(batches[0])):
        model.zero_grad()
        with MaskedPredictions(model) as predictions:
            output = model(**batch)
        assert output.prediction_logits is None
        output.loss.backward()
        hits = predictions.hits(batch["labels"])
        gradients.append((hits, [p.grad.clone() for p in model.parameters()]))
    assert torch.equal(gradients[0][0], gradients[1][0])
    for one, other in zip(gradients[0][1], gradients[1][1], strict=True):
        assert torch.equal(one, other)


def test_the_mode_is_put_back(model_and_batches):
    model, batches = model_and_batches
    for training in (True, False):
        model.train(training)
        evaluate(model, batches[:1])
        assert model.training is training


def test_no_batches_is_an_error(model_and_batches):
    with pytest.raises(ValueError, match="batches: got none, allowed: at least one batch"):
        evaluate(model_and_batches[0], [])
