"""Greedy search and beam search generate the tokens that transformers generates."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")

import transformers
from marian_pair import PAD, batch, in_float64, ours, stock
from quick_cases import long_case

from fastbert.modules.transformer import Transformer, TransformerConfig
from fastbert.modules.transformer.cache import FIRST_SLOTS
from fastbert.testing.in_float64 import InFloat64

MAX_LENGTH = 16
ROWS = 16


def model_of(seed, **overrides):
    """Return a model of transformers whose sequences end after a few tokens, each at its own."""
    model = stock(
        seed,
        scale=0.2,
        scale_embedding=False,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
        **overrides,
    )
    with torch.no_grad():
        model.lm_head.weight[0] *= 2.0
        model.final_logits_bias[:, 0] += 1.0
    return model


class Margins(TorchFunctionMode):
    """Record the pairs of neighbouring scores between which generation decides, for each source.

    argmax decides between the best two scores. In beam search, topk is called with three shapes in
    each step: for the candidates, of which the first K may end; for the K running beams; and for
    the K finished sequences, whose order is that of the result.
    """

    def __init__(self, settings):
        super().__init__()
        self.beams = settings.get("num_beams", 1)
        self.returned = settings.get("num_return_sequences", 1)
        self.eos, self.pairs = settings.get("eos_token_id"), []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.argmax) or args[0].shape[0] != ROWS:
            return result
        beams, width = self.beams, args[0].shape[1]
        scores = args[0].sort(1, descending=True).values.double()
        if function is torch.argmax:
            ranks = [1]
        elif width == 3 * beams:
            ranks = [*range(1, self.returned + 1), beams]
        else:
            ranks = [beams]
            if width != 2 * beams:
                # The order of the candidates counts only if one of the two ends a sequence.
                tokens = result[1][:, beams - 1 : beams + 1] % (width // beams)
                ends = torch.isin(tokens, torch.tensor([-1 if self.eos is None else self.eos]))
                scores = scores.masked_fill(~ends.any(1, keepdim=True), -torch.inf)
        self.pairs += [scores[:, rank - 1 : rank + 1] for rank in ranks]
        return result


@contextlib.contextmanager
def all_in_float64():
    torch.set_default_dtype(torch.float64)
    with InFloat64():
        yield
    torch.set_default_dtype(torch.float32)


def searched(model, inputs, context, settings):
    known = {name: v for name, v in model.generation_config.to_dict().items() if v is not None}
    with Margins(known | settings) as margins, context:
        tokens = model.generate(**inputs, **settings)
    return tokens, margins.pairs


def clear_sources(model, inputs, settings):
    """Return the tokens of transformers, and which sources have no close decision; bool (ROWS,).

    A source is left out if the margin between two scores of transformers is below the tolerance, or
    if its tokens in fp32 differ from those in float64. Impossible candidates have scores of about
    -1e9 or less, and are not compared.
    """
    tokens, pairs = searched(model, inputs, contextlib.nullcontext(), settings)
    exact, oracles = searched(in_float64(model), inputs, all_in_float64(), settings)
    same = torch.zeros(ROWS, dtype=torch.bool)
    if tokens.shape == exact.shape:
        same = (tokens == exact).view(ROWS, -1).all(1)
    clear, error = same.clone(), 0.0
    for pair, oracle in zip(pairs, oracles, strict=False):
        possible = (oracle > -1e8) & same[:, None]
        # The errors grow with the number of tokens.
        error = max(error, float((pair - oracle).abs().masked_fill(~possible, 0.0).max()))
        largest = float(oracle.abs().masked_fill(~possible, 0.0).max())
        # Both scores of fastbert may have twice the error of transformers, and a rounding error.
        tolerance = 2.0 * (2.0 * error + 2.0 * torch.finfo(torch.float32).eps * (largest + 0.3))
        clear &= ~(possible.all(1) & (oracle[:, 0] - oracle[:, 1] < tolerance))
    return tokens, clear


def assert_same_tokens(model, built, inputs, **settings):
    """Compare the tokens of clear sources; return the tokens and the number of other sources."""
    expected, clear = clear_sources(model, inputs, settings)
    got = built.generate(inputs["input_ids"], inputs["attention_mask"], **settings)
    assert got.dtype == torch.int64
    assert got.shape[0] == expected.shape[0]
    if bool(clear.all()):
        assert torch.equal(got, expected)
    # The length of the result depends on all sources.
    clear_rows = clear.repeat_interleave(got.shape[0] // ROWS)
    for row in clear_rows.nonzero().flatten().tolist():
        length = min(got.shape[1], expected.shape[1])
        assert torch.equal(got[row, :length], expected[row, :length])
    return expected, int((~clear).sum())


SETTINGS = [
    {"num_beams": 1},
    {"num_beams": 4},
    {"num_beams": 8},
    {"num_beams": 4, "early_stopping": True, "length_penalty": 0.6, "num_return_sequences": 4},
    {"num_beams": 3, "early_stopping": "never", "length_penalty": 1.4, "num_return_sequences": 2},
    long_case({"num_beams": 5, "early_stopping": "never", "length_penalty": -0.5}),
    long_case({"num_beams": 2, "length_penalty": 0.0}),
]


def compare_prompts(folder, seeds, **settings):
    """Compare ROWS prompts per seed; return the number left out, and the lengths of the targets."""
    left_out, lengths = 0, set()
    for seed in seeds:
        model = model_of(seed)
        built = ours(model, folder / str(seed))
        inputs = batch(ROWS, "right" if seed % 2 else "left", seed)
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        expected, unclear = assert_same_tokens(
            model, built, inputs, max_length=MAX_LENGTH, **settings
        )
        left_out += unclear
        lengths |= set((expected != PAD).sum(1).tolist())
    print(f"{left_out} of {ROWS * len(seeds)} prompts were left out")
    return left_out, lengths


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_of_random_prompts(settings, tmp_path):
    left_out, lengths = compare_prompts(tmp_path, range(3), **settings)
    assert left_out <= 3 * ROWS // 6
    # The targets end at different lengths, and some only at the largest length.
    assert len(lengths) > (4 if settings.keys() == {"num_beams"} else 1)
    assert MAX_LENGTH - 1 in lengths


@pytest.mark.every_case
@pytest.mark.parametrize("num_beams", [1, 4, 8])
def test_tokens_of_a_thousand_prompts(num_beams, tmp_path):
    left_out, _ = compare_prompts(tmp_path, range(63), num_beams=num_beams)
    assert left_out <= 63 * ROWS // 20


@pytest.mark.each_value
@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {"bad_words_ids": [[PAD], [7]]},
        {"bad_words_ids": [[PAD], [7], [0]], "renormalize_logits": True},
        {"forced_eos_token_id": None},
        {"forced_eos_token_id": 3},
        {"eos_token_id": None, "forced_eos_token_id": None},
        {"pad_token_id": 0, "eos_token_id": 2},
        {"decoder_start_token_id": 9},
        {"max_length": None},
        {"max_length": 2, "num_beams": 1},
    ],
    ids=str,
)
def test_settings_of_a_checkpoint(changes, num_beams, tmp_path):
    """The settings are those of generation_config.json, or of an older config.json."""
    model = model_of(5)
    model.generation_config.update(num_beams=num_beams, max_length=MAX_LENGTH)
    for name, value in changes.items():
        setattr(model.generation_config, name, value)
    built = ours(model, tmp_path / "new")
    inputs = batch(ROWS, "right", 8)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    expected, unclear = assert_same_tokens(model, built, inputs)
    assert unclear <= ROWS // 3
    shorter, _ = assert_same_tokens(model, built, inputs, max_new_tokens=3)
    assert shorter.shape[1] <= 4
    built.save_pretrained(tmp_path / "saved")
    again = transformers.MarianMTModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.generate(**inputs), expected)
    if any(value is None for value in changes.values()):
        return  # transformers takes the ids of config.json then.
    path = tmp_path / "saved" / "config.json"
    merged = json.loads(path.read_text()) | built.generation.to_dict()
    (tmp_path / "saved" / "generation_config.json").unlink()
    path.write_text(json.dumps(merged))
    assert Transformer.from_pretrained(tmp_path / "saved").generation == built.generation


@pytest.mark.parametrize("num_beams", [1, 3])
def test_every_source_alone(num_beams, tmp_path):
    built = ours(model_of(1), tmp_path)
    inputs = batch(6, "right", 3)
    together = built.generate(
        inputs["input_ids"], inputs["attention_mask"], max_length=30, num_beams=num_beams
    )
    for row, (ids, mask) in enumerate(
        zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ):
        alone = built.generate(ids[mask.bool()][None], max_length=30, num_beams=num_beams)
        assert torch.equal(alone[0], together[row, : alone.shape[1]])
        assert (together[row, alone.shape[1] :] == PAD).all()


def test_sources_leave_and_the_cache_grows(tmp_path, monkeypatch):
    from fastbert.modules.transformer.cache import Cache

    built, seen = ours(model_of(1), tmp_path), []
    # With a hook, the layers run one by one.
    built.decoder.layer[0].register_forward_hook(lambda *_: None)
    begin = Cache.begin

    def watched(cache, beams):
        begin(cache, beams)
        seen.append((cache.live.shape[0], beams, cache.slots, cache.stored.shape[2]))

    monkeypatch.setattr(Cache, "begin", watched)
    inputs = batch(ROWS, "right", 3)
    built.generate(inputs["input_ids"], inputs["attention_mask"], max_length=20, num_beams=4)
    live, beams, slots, capacity = map(list, zip(*seen, strict=True))
    assert live[0] == ROWS
    assert sorted(live, reverse=True) == live
    assert live[-1] < ROWS
    assert beams == [1] + [4] * (len(beams) - 1)
    assert slots == [1 + 4 * step for step in range(len(slots))]
    assert capacity[0] == FIRST_SLOTS < capacity[-1]


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_the_cache_computes_what_the_decoder_computes(backend, num_beams, tmp_path):
    """In float64, each generated token has the largest logit of the whole decoder."""
    model = in_float64(model_of(2))
    built = ours(model, tmp_path, backend=backend)
    assert built.dtype == torch.float64
    inputs = batch(4, "right", 1)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    got = built.generate(ids, mask, max_length=MAX_LENGTH, num_beams=num_beams)
    assert torch.equal(
        got, model.generate(ids, attention_mask=mask, max_length=MAX_LENGTH, num_beams=num_beams)
    )
    if num_beams > 1:
        return
    logits = built(ids, mask, decoder_input_ids=got[:, :-1]).logits
    tokens = got[:, 1:]
    ended = (tokens == 0).cumsum(1).cumsum(1) > 1
    forced = torch.arange(tokens.shape[1]) == MAX_LENGTH - 2
    assert ((logits.argmax(2) == tokens) | ended | forced).all()


def test_in_bfloat16(tmp_path):
    """Greedy tokens in bf16 differ from those of float64 only where two logits are close."""
    model = model_of(0).to(torch.bfloat16)
    built, exact = ours(model, tmp_path), in_float64(model)
    inputs = batch(ROWS, "right", 1)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    got = built.generate(ids, mask, max_length=MAX_LENGTH, num_beams=1)
    given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": got[:, :-1]}
    with torch.no_grad():
        logits, nearby = exact(**given).logits, model(**given).logits
    tokens = got[:, 1:]
    missing = logits.amax(2) - logits.gather(2, tokens.unsqueeze(2)).squeeze(2)
    counted = ((tokens == 0).cumsum(1).cumsum(1) <= 1) & (
        torch.arange(tokens.shape[1]) < MAX_LENGTH - 2
    )
    assert missing[counted].max() <= 2.0 * 2.0 * (nearby - logits).abs().max()


def small(**changes):
    sizes = {"vocab_size": 20, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    return Transformer(TransformerConfig(**sizes, max_position_embeddings=9, **changes)).eval()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 11}, r"max_length: got 11, allowed: at most max_position_embeddings \+ 1"),
        ({"max_new_tokens": 10}, r"max_new_tokens \+ 1: got 11"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0, allowed: an integer >= 1"),
        ({"max_length": 1}, "max_length: got 1, allowed: None or an integer >= 2"),
        ({"max_length": 5, "max_new_tokens": 4}, "max_new_tokens: got 4 and max_length 5"),
        ({"num_beams": 0}, "num_beams: got 0"),
        ({"num_beams": 11}, "num_beams: got 11, allowed: 1, or at most half"),
        (
            {"num_return_sequences": 2},
            r"num_return_sequences: got 2, allowed: at most num_beams \(1",
        ),
        ({"early_stopping": "often"}, "early_stopping: got 'often', allowed: True, False"),
        ({"length_penalty": "long"}, "length_penalty: got 'long', allowed: a number"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        small().generate(torch.tensor([[3, 4]]), **settings)


@pytest.mark.parametrize(
    ("name", "value"), [("do_sample", True), ("no_repeat_ngram_size", 3), ("min_length", 4)]
)
def test_settings_that_are_not_implemented(name, value):
    model = small(extra={name: value})
    with pytest.raises(ValueError, match=f"{name}: got {value}, allowed: None or .* implemented"):
        model.generate(torch.tensor([[3, 4]]))


def test_other_refusals():
    model = small()
    assert model.generate(torch.tensor([[3, 4]]), max_length=10).shape[0] == 1
    assert model.generate(torch.tensor([[3, 4]])).shape[1] <= 9
    with pytest.raises(ValueError, match="bad_words_ids: got"):
        copy.copy(model.generation).__class__(bad_words_ids=[[1, 2]])
    with pytest.raises(ValueError, match="generate: got a model in training mode"):
        model.train().generate(torch.tensor([[3, 4]]))
