"""Packed collators make the right batches, with which models compute the right outputs.

The outputs for a packed batch are within tolerance of float64 results for each sequence alone.
"""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fastbert import modules
from fastbert.config import BertConfig
from fastbert.data import (
    PackedCollatorForBiEncoder,
    PackedCollatorForMaskedLM,
    PackedCollatorForPreTraining,
    PackedCollatorForSequenceClassification,
    PackedCollatorForTokenClassification,
)
from fastbert.modules import pool
from fastbert.testing.compare import assert_close, compare
from fastbert.testing.yardstick import Yardstick, run_sides

LENGTHS = (7, 1, 12, 4, 9)
BOUNDS = [0, 7, 8, 20, 24, 33]
CLASSES = 3
SIZES: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
    "num_labels": CLASSES,
}
REASON = "roundings early in the backward pass are shared by every gradient after them"


def examples(seed: int = 0) -> list[dict[str, Any]]:
    """Return five random features with token types, and with labels of tokens and of sequences."""
    rng = np.random.default_rng(seed)
    return [
        {
            "input_ids": rng.integers(5, 600, n).tolist(),
            "token_type_ids": rng.integers(0, 2, n).tolist(),
            "tags": np.where(rng.random(n) < 0.7, rng.integers(0, CLASSES, n), -100).tolist(),
            "class": int(rng.integers(0, CLASSES)),
            "next_sentence_label": int(rng.integers(0, 2)),
        }
        for n in LENGTHS
    ]


def labelled(column: str, seed: int = 0) -> list[dict[str, Any]]:
    names = ("input_ids", "token_type_ids")
    return [{k: f[k] for k in names} | {"labels": f[column]} for f in examples(seed)]


def padded(flat: dict[str, Tensor], bounds: list[int]) -> dict[str, Tensor]:
    """Return the columns ``(T,)`` as padded rows, one per sequence, with the attention mask."""
    fill = {"input_ids": 0, "token_type_ids": 0, "labels": -100}
    sizes = np.diff(bounds).tolist()
    batch = {
        name: nn.utils.rnn.pad_sequence(values.split(sizes), True, fill[name])
        for name, values in flat.items()
    }
    longest = torch.arange(max(sizes))
    return batch | {"attention_mask": (longest < torch.tensor(sizes)[:, None]).long()}


def test_our_layout() -> None:
    features = labelled("tags")
    batch = PackedCollatorForTokenClassification()(features)
    assert set(batch) == {"input_ids", "token_type_ids", "labels", "cu_seqlens", "max_seqlen"}
    for name in ("input_ids", "token_type_ids", "labels"):
        assert batch[name].dtype == torch.int64
        assert batch[name].tolist() == [value for f in features for value in f[name]]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"].tolist() == BOUNDS
    assert type(batch["max_seqlen"]) is int
    assert batch["max_seqlen"] == 12


@pytest.mark.parametrize("start", [0, 2])
def test_layout_of_transformers(start) -> None:
    options = {"layout": "transformers", "position_ids_start": start}
    batch = PackedCollatorForTokenClassification(**options)(labelled("tags"))
    ours = PackedCollatorForTokenClassification()(labelled("tags"))
    for name in ("input_ids", "token_type_ids", "labels"):
        assert torch.equal(batch.pop(name), ours[name][None])
    positions = batch.pop("position_ids")
    assert positions.tolist() == [[start + i for n in LENGTHS for i in range(n)]]
    for side in "qk":
        ends = batch.pop(f"cu_seq_lens_{side}")
        assert ends.dtype == torch.int32
        assert ends.tolist() == BOUNDS
        assert batch.pop(f"max_length_{side}") == 12
    assert not batch
    classes = PackedCollatorForSequenceClassification(**options)(labelled("class"))
    assert classes["labels"].shape == (len(LENGTHS),)


@pytest.mark.parametrize(
    ("labels", "dtype", "shape"),
    [
        ([0, 2, 1, 1, 0], torch.int64, (5,)),
        ([np.int32(1), torch.tensor(2), np.array(0), True, 1], torch.int64, (5,)),
        ([0.5, 1, -2.0, 0, 1], torch.float32, (5,)),
        ([torch.tensor(0.5, dtype=torch.bfloat16), 1.0, 2.0, 0.0, 1.5], torch.float32, (5,)),
        ([[0.0, 1.0], np.ones(2), torch.zeros(2), (1.0, 0.0), [0.5, 1]], torch.float32, (5, 2)),
    ],
)
@pytest.mark.parametrize("column", ["labels", "label", "label_ids"])
def test_labels_of_sequences(labels, dtype, shape, column) -> None:
    features = [{"input_ids": [1], column: label} for label in labels]
    got = PackedCollatorForSequenceClassification()(features)["labels"]
    assert got.dtype == dtype
    assert got.shape == shape
    assert got.tolist() == [torch.as_tensor(label).tolist() for label in labels]


def test_without_labels_or_token_types_there_are_none() -> None:
    features = [{"input_ids": [3, 4], "text": "left out"}, {"input_ids": [5], "labels": None}]
    for collator in (
        PackedCollatorForSequenceClassification(),
        PackedCollatorForTokenClassification(),
    ):
        assert set(collator(features)) == {"input_ids", "cu_seqlens", "max_seqlen"}


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda x: torch.tensor(x).int()])
def test_padding_of_a_feature_is_dropped(kind) -> None:
    features = labelled("tags")
    expected = PackedCollatorForTokenClassification(max_length=12)(features)
    for number, feature in enumerate(features):
        before, behind = [9] * number, [9] * (2 * number)
        exists = [0] * number + [1] * len(feature["input_ids"]) + [0] * (2 * number)
        for name in ("input_ids", "token_type_ids", "labels"):
            feature[name] = kind(before + feature[name] + behind)
        feature["attention_mask"] = kind(exists)
    features[1]["attention_mask"] = torch.tensor([False, True, False, False])
    features[2]["attention_mask"] = torch.as_tensor(features[2]["attention_mask"]).float().numpy()
    actual = PackedCollatorForTokenClassification(max_length=12)(features)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(actual[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("prefixes", [None, ("anchor", "positive", "negative")])
def test_texts_of_a_bi_encoder(prefixes) -> None:
    texts = [[[1, 2], [3], [4, 5, 6]], [[7], [8, 9], [10]]]
    names = prefixes or ("",)
    features = [
        {"input_ids": example, "score": 0.5}
        if prefixes is None
        else {f"{n}_input_ids": ids for n, ids in zip(names, example, strict=True)} | {"score": 0.5}
        for example in texts
    ]
    batch = PackedCollatorForBiEncoder(prefixes=prefixes)(features)
    assert batch["input_ids"].tolist() == [1, 2, 7, 3, 8, 9, 4, 5, 6, 10]
    assert batch["cu_seqlens"].tolist() == [0, 2, 3, 4, 6, 9, 10]
    assert batch["labels"].tolist() == [0.5, 0.5]
    rows = batch["input_ids"][:, None].double()
    parts = pool(rows, batch["cu_seqlens"], "cls").chunk(3)
    assert [part.flatten().tolist() for part in parts] == [[1, 7], [3, 8], [4, 10]]


def test_texts_of_a_bi_encoder_may_be_padded_tensors() -> None:
    ids, mask = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[1, 1], [1, 0]])
    feature = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.ones_like(ids)}
    batch = PackedCollatorForBiEncoder()([feature])
    assert batch["input_ids"].tolist() == [1, 2, 3]
    assert batch["token_type_ids"].tolist() == [1, 1, 1]
    prefixed = {f"a_{name}": values[0] for name, values in feature.items()}
    prefixed |= {f"b_{name}": values[1] for name, values in feature.items()}
    again = PackedCollatorForBiEncoder(prefixes=["a", "b"])([prefixed])
    assert all(torch.equal(torch.as_tensor(again[k]), torch.as_tensor(batch[k])) for k in batch)


def masked_features(tokenizer: Any) -> list[dict[str, Any]]:
    features = examples()
    for feature in features:
        feature["input_ids"] = [
            tokenizer.cls_id,
            *(min(i, tokenizer.vocab_size - 1) for i in feature["input_ids"]),
            tokenizer.sep_id,
        ]
        feature["token_type_ids"] = [0, *feature["token_type_ids"], 1]
    return features


@pytest.mark.parametrize("layout", ["fastbert", "transformers"])
def test_masks_of_pre_training(tokenizer, layout) -> None:
    features = masked_features(tokenizer)
    truth = torch.tensor([token for f in features for token in f["input_ids"]])
    collator = PackedCollatorForPreTraining(tokenizer, layout=layout, probability=0.3)
    first, second = collator(features), collator(features)
    assert not torch.equal(first["labels"], second["labels"])
    shape = (len(truth),) if layout == "fastbert" else (1, len(truth))
    assert first["labels"].shape == first["input_ids"].shape == shape
    labels, ids = first["labels"].flatten(), first["input_ids"].flatten()
    picked = labels != -100
    assert torch.equal(labels[picked], truth[picked])
    assert torch.equal(ids[~picked], truth[~picked])
    assert not tokenizer.is_special[truth[picked]].any()
    assert (ids == tokenizer.mask_id).any()
    ends = first["cu_seqlens" if layout == "fastbert" else "cu_seq_lens_q"].tolist()
    assert all(picked[a:b].any() for a, b in pairwise(ends))
    expected = [f["next_sentence_label"] for f in features]
    assert first["next_sentence_label"].tolist() == expected
    assert "next_sentence_label" not in PackedCollatorForMaskedLM(tokenizer)(features)


def test_a_tokenizer_of_transformers_masks_the_same(tokenizer, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)
    batches = [
        PackedCollatorForMaskedLM(side, generator=torch.Generator().manual_seed(4))(
            [expected("the boat sank in the bay ."), expected("why ?")]
        )
        for side in (tokenizer, expected)
    ]
    for name, value in batches[0].items():
        assert torch.equal(torch.as_tensor(batches[1][name]), torch.as_tensor(value))
    with pytest.raises(ValueError, match=r"^whole_word: got True with a \w+, allowed: False, or a"):
        PackedCollatorForMaskedLM(expected, whole_word=True)


def test_whole_words(tokenizer) -> None:
    ids = tokenizer.encode("scarecrows quietly searched the uncommon lighthouses " * 6)
    collator = PackedCollatorForMaskedLM(tokenizer, whole_word=True)
    for _ in range(20):
        picked = (collator([{"input_ids": ids}])["labels"] != -100).numpy()
        word = np.cumsum(tokenizer.word_starts(np.array(ids)))
        assert not np.isin(word, word[picked])[~picked].any()


def loaded(collator: Any, features: list[Any], epochs: int, **options: Any) -> list[list[Any]]:
    """Return the labels of every batch of `epochs` epochs; two workers make the batches."""
    loader = DataLoader(
        features, 2, collate_fn=collator, num_workers=2, multiprocessing_context="fork", **options
    )
    return [[batch["labels"].tolist() for batch in loader] for _ in range(epochs)]


@pytest.mark.parametrize("seeded", [False, True])
def test_workers_draw_reproducible_and_fresh_masks(tokenizer, seeded) -> None:
    # Every batch has the same two texts, so only the masks can differ.
    features = [{"input_ids": tokenizer.encode("the boat sank in the bay . " * 8)}] * 8
    runs = []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(9) if seeded else None
        torch.manual_seed(seed)
        collator = PackedCollatorForMaskedLM(tokenizer, generator=generator)
        runs.append(loaded(collator, features, 2))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    drawn = [tuple(labels) for epoch in runs[0] for labels in epoch]
    assert len(set(drawn)) == len(drawn) == 8


def test_collators_can_be_pickled(tokenizer) -> None:
    options: dict[str, Any] = {"layout": "transformers", "max_length": 20, "position_ids_start": 2}
    generator = torch.Generator().manual_seed(1)
    masked = PackedCollatorForPreTraining(tokenizer, generator=generator, **options)
    texts = PackedCollatorForBiEncoder(prefixes=("a", "b"), **options)
    pairs = [{"a_input_ids": f["input_ids"], "b_input_ids": [1]} for f in examples()]
    for collator, features in ((masked, masked_features(tokenizer)), (texts, pairs)):
        again = pickle.loads(pickle.dumps(collator))(features)
        for name, value in collator(features).items():
            assert torch.equal(torch.as_tensor(again[name]), torch.as_tensor(value)), name


class Sides:
    """A random model in `dtype`, its copy on the reference backend, and that copy in float64."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        config = BertConfig(**SIZES)
        self.dtype = dtype
        self.ours = getattr(modules, name)(config).to(dtype).eval()
        with torch.no_grad():
            for parameter in self.ours.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        self.yardstick = getattr(modules, name)(config, backend="reference").to(dtype).eval()
        self.yardstick.load_state_dict(self.ours.state_dict())
        self.oracle = copy.deepcopy(self.yardstick).double()

    def check(self, packed: dict[str, Any], per_token: tuple[str, ...]) -> None:
        """Compare loss, logits and gradients of packed and padded batches with single sequences."""
        bounds = packed["cu_seqlens"].tolist()
        exact = alone(self.oracle, packed, bounds)
        single = Yardstick(lambda: alone(self.yardstick, packed, bounds))
        tokens = {k: v for k, v in packed.items() if k in ("input_ids", "token_type_ids", "labels")}
        if "labels" not in per_token:
            labels = {"labels": tokens.pop("labels")}
        else:
            labels = {k: packed[k] for k in ("next_sentence_label",) if k in packed}
        grid = padded(tokens, bounds)
        exists = grid["attention_mask"].bool()
        for form, batch in (("packed", packed), ("padded", grid | labels)):
            self.ours.zero_grad()
            out = self.ours(**batch)
            out["loss"].backward()
            actual = {k: out[k] for k in exact if k in out} | {"gradient": gradient(self.ours)}
            for name, value in actual.items():
                if form == "padded" and name in per_token:
                    value = value[exists]
                factor = {"factor": 3.0, "reason": REASON} if name == "gradient" else {}
                best = single[name].map(lambda x, dtype=value.dtype: x.to(dtype))
                runs = value, exact[name], best
                comparison = compare(f"{form} {name}", *runs, tested=self.dtype, **factor)
                assert comparison.passed, str(comparison)
            assert actual.keys() == exact.keys()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def alone(model: nn.Module, packed: dict[str, Any], bounds: list[int]) -> dict[str, Tensor]:
    """Call the model once per sequence; weight the losses as in one batch of all sequences."""
    logits: dict[str, list[Tensor]] = {}
    total: Any = 0.0
    count = len(bounds) - 1
    labels = packed["labels"]
    for i, (start, end) in enumerate(pairwise(bounds)):
        part = {k: packed[k][start:end][None] for k in ("input_ids", "token_type_ids")}
        by_token = labels.shape == packed["input_ids"].shape
        part["labels"] = labels[start:end][None] if by_token else labels[i : i + 1]
        share = (part["labels"] != -100).sum() / (labels != -100).sum() if by_token else 1 / count
        if "next_sentence_label" in packed:
            part["next_sentence_label"] = packed["next_sentence_label"][i : i + 1]
        out = model(**part)
        if "mlm_loss" in out:
            total = total + out["mlm_loss"] * share + out["nsp_loss"] / count
        else:
            total = total + out["loss"] * share
        for name in filter(lambda name: name.endswith("logits"), out.keys()):
            rows = out[name].flatten(0, 1) if out[name].dim() == 3 else out[name]
            logits.setdefault(name, []).append(rows)
    model.zero_grad()
    total.backward()
    joined = {name: torch.cat(rows) for name, rows in logits.items()}
    return {"loss": total, **joined, "gradient": gradient(model)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "task", ["SequenceClassification", "TokenClassification", "MaskedLM", "PreTraining"]
)
def test_our_models_give_the_same_as_without_packing(tokenizer, task, dtype) -> None:
    if task == "SequenceClassification":
        batch = PackedCollatorForSequenceClassification()(labelled("class"))
        per_token: tuple[str, ...] = ()
    elif task == "TokenClassification":
        batch = PackedCollatorForTokenClassification()(labelled("tags"))
        per_token = ("logits", "labels")
    else:
        kind = PackedCollatorForMaskedLM if task == "MaskedLM" else PackedCollatorForPreTraining
        batch = kind(tokenizer)(masked_features(tokenizer))
        per_token = ("logits", "prediction_logits", "labels")
    Sides(f"BertFor{task}", dtype).check(batch, per_token)


def test_a_bi_encoder_embeds_each_text_as_alone() -> None:
    sides = Sides("BertModel", torch.float32)
    firsts, seconds = ([f["input_ids"] for f in examples(seed)] for seed in (0, 1))
    pairs = [{"input_ids": [a, b[:4]]} for a, b in zip(firsts, seconds, strict=True)]
    batch = PackedCollatorForBiEncoder()(pairs)

    def one_by_one(model: nn.Module, text: int) -> Tensor:
        ids = [torch.tensor(pair["input_ids"][text])[None] for pair in pairs]
        return torch.cat([model(row).last_hidden_state.mean(1) for row in ids])

    with torch.no_grad():
        embeddings = pool(sides.ours(**batch).last_hidden_state, batch["cu_seqlens"])
        for text, actual in enumerate(embeddings.chunk(2)):
            oracle = one_by_one(sides.oracle, text)
            yardstick = Yardstick(lambda text=text: one_by_one(sides.yardstick, text))
            assert_close(f"text {text}", actual, oracle, yardstick)


@pytest.fixture(scope="module")
def transformers() -> Any:
    pytest.importorskip("fastbert.integrations.attention_interface")
    return pytest.importorskip("transformers")


def stock(transformers: Any, family: str, head: str, dtype: torch.dtype) -> list[nn.Module]:
    """Return a model with fastbert's attention, and the eager model in float64 and in `dtype`."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(
        **SIZES | {"max_position_embeddings": 40, "pad_token_id": 1}, attn_implementation="eager"
    )
    model = getattr(transformers, f"{family}{head}")(config).to(dtype).eval()
    ours, oracle = copy.deepcopy(model), copy.deepcopy(model).double()
    ours.set_attn_implementation("fastbert")
    return [ours, oracle, model]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "start"), [("Bert", 0), ("Roberta", 2)])
def test_models_of_transformers_give_the_same_states(transformers, family, start, dtype) -> None:
    models = stock(transformers, family, "Model", dtype)
    features = examples()
    for feature in features:
        feature.pop("token_type_ids")
    options: dict[str, Any] = {"layout": "transformers", "position_ids_start": start}
    batch = PackedCollatorForSequenceClassification(**options)(features)
    upstream = torch.randn(BOUNDS[-1], SIZES["hidden_size"])

    def run(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        model.zero_grad()
        if model is models[0]:
            states = model(**batch).last_hidden_state[0]
        else:
            parts = [model(torch.tensor([f["input_ids"]])).last_hidden_state[0] for f in features]
            states = torch.cat(parts)
        (states * upstream.to(states.dtype)).sum().backward()
        pooled = pool(states, batch["cu_seq_lens_q"], "cls")
        return states, gradient(model), pooled

    runs = run_sides(run, *models)
    for name, *values in zip(("states", "gradient", "pooled"), *runs, strict=True):
        factor = {"factor": 3.0, "reason": REASON} if name == "gradient" else {}
        assert_close(name, *values, **factor)


@pytest.mark.parametrize("head", ["ForTokenClassification", "ForMaskedLM"])
def test_heads_of_transformers_give_the_same_loss(transformers, tokenizer, head) -> None:
    models = stock(transformers, "Bert", head, torch.float32)
    if head == "ForMaskedLM":
        collator = PackedCollatorForMaskedLM(tokenizer, layout="transformers")
        batch = collator(masked_features(tokenizer))
    else:
        batch = PackedCollatorForTokenClassification(layout="transformers")(labelled("tags"))
    bounds = batch["cu_seq_lens_q"].tolist()
    names = ("input_ids", "token_type_ids", "labels")
    grid = padded({name: batch[name][0] for name in names}, bounds)
    exists = grid["attention_mask"].bool()

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        out = model(**(batch if model is models[0] else grid))
        return out.loss, out.logits[0] if model is models[0] else out.logits[exists]

    losses, logits = zip(*run_sides(run, *models), strict=True)
    assert_close("loss", *losses)
    assert_close("logits", *logits)


def test_a_trainer_trains_as_with_padding(transformers, tmp_path) -> None:
    features = [f for seed in range(3) for f in labelled("tags", seed)[:4]]
    collator = PackedCollatorForTokenClassification(layout="transformers", max_length=12)

    def pad(given: list[Any]) -> dict[str, Tensor]:
        packed = PackedCollatorForTokenClassification()(given)
        bounds = packed.pop("cu_seqlens").tolist()
        return padded({k: v for k, v in packed.items() if k != "max_seqlen"}, bounds)

    trained = []
    for model in stock(transformers, "Bert", "ForTokenClassification", torch.float32):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=4,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            optim="sgd",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        ours = model.config._attn_implementation == "fastbert"
        trainer = transformers.Trainer(
            model, arguments, collator if ours else pad, train_dataset=features
        )
        before = copy.deepcopy(model.state_dict())
        trainer.train()
        moved = [(p - before[n]).flatten() for n, p in model.named_parameters()]
        trained.append(torch.cat(moved).detach())
        assert trainer.state.global_step == 3
    assert_close("movement in 3 steps", *trained, factor=3.0, reason=REASON)
    assert trained[1].abs().max() > 1e-3
