"""``fastbert.BertModel`` agrees with transformers in float64 for checkpoints of every family."""

from __future__ import annotations

import copy
import json
import warnings
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from stock_families import (
    FAMILIES,
    LENGTH,
    PADDINGS,
    SIZES,
    Outputs,
    assert_gradients_close,
    assert_outputs_close,
    build,
    distinct,
    gradients,
    in_dtype,
    inputs,
    of_each_kind,
    run,
    run_with_gradients,
)

import fastbert
from fastbert import modules
from fastbert.config import BertConfig
from fastbert.io import families
from fastbert.ops import backend as backends
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick, each, run_sides

pytestmark = pytest.mark.each_value

every_family = pytest.mark.parametrize("family", distinct(FAMILIES))
each_kind = pytest.mark.parametrize("family", of_each_kind(FAMILIES))
# These keys of config.json describe the file, not the model.
ABOUT_THE_FILE = {"architectures", "transformers_version", "dtype", "_name_or_path"}


def native(model: Any, folder: Path) -> modules.BertModel:
    """Save a transformers model and load it with fastbert; a missing weight raises an error."""
    model.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return modules.BertModel.from_pretrained(folder)


def stock_gradients(ours: modules.BertModel, like: Any, folder: Path) -> dict[str, Tensor]:
    """Return gradients under transformers' names, by saving the gradients like weights."""
    holder = copy.deepcopy(ours)
    for parameter, held in zip(ours.parameters(), holder.parameters(), strict=True):
        held.data = torch.zeros_like(held) if parameter.grad is None else parameter.grad
    holder.save_pretrained(folder)
    named = dict(type(like).from_pretrained(folder).named_parameters())
    return {name: named[name].data for name in gradients(like)}


# Outputs


@pytest.mark.parametrize(
    ("padding", "mode"),
    [("none", "eval"), ("right", "train"), ("left", "eval"), ("middle", "train")],
)
@every_family
def test_outputs_and_gradients(family, padding, mode, tmp_path) -> None:
    stock = build(family)
    ours = native(stock, tmp_path / "stock").train(mode == "train")
    batch = inputs(padding, family, rows=5)
    sides = (ours, in_dtype(stock, torch.float64), stock)
    runs = run_sides(lambda side: run_with_gradients(side, batch), *sides)
    assert_outputs_close(*each(itemgetter(0), *runs))
    _, *slopes = each(itemgetter(1), *runs)
    assert_gradients_close(stock_gradients(ours, stock, tmp_path / "slopes"), *slopes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_inference(family, rows, dtype, tmp_path) -> None:
    stock = in_dtype(build(family), dtype)
    ours, oracle = native(stock, tmp_path), in_dtype(stock, torch.float64)
    assert ours.dtype == dtype
    with torch.no_grad():
        for padding in PADDINGS:
            batch = inputs(padding, family, rows)
            mask = batch["attention_mask"]
            right = run(oracle, batch, True).existing(mask)
            nearby = Yardstick(
                lambda batch=batch, mask=mask: run(stock, batch, True).existing(mask)
            )
            for weights in (False, True):
                actual = run(ours, batch, weights)
                assert not actual.states[:, ~mask.bool()].any()
                expected = right if weights else right._replace(weights=None)
                assert_outputs_close(actual.existing(mask), expected, nearby)


@each_kind
def test_packed_sequences(family, tmp_path) -> None:
    stock, lengths = build(family), (4, 1, 9, 7)
    ids = inputs("none", family, rows=1)["input_ids"]
    ours = native(stock, tmp_path)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    with torch.no_grad():
        actual = ours(ids[0], cu_seqlens=ends, output_hidden_states=True)
        runs = []
        for side in (in_dtype(stock, torch.float64), stock):
            parts = [run(side, {"input_ids": part}) for part in ids.split(lengths, 1)]
            states, _, pooled = zip(*parts, strict=True)
            pooled = None if pooled[0] is None else torch.cat(pooled)
            runs.append(Outputs(torch.cat(states, 2)[:, 0], None, pooled))
    states = torch.stack(actual.hidden_states)
    assert_outputs_close(Outputs(states, None, actual.pooler_output), *runs)


@every_family
def test_embeddings_instead_of_ids(family, tmp_path) -> None:
    stock, batch = build(family), inputs("right", family)
    ours, mask = native(stock, tmp_path), batch["attention_mask"]
    width = ours.config.architecture.embedding_size or SIZES["hidden_size"]
    embeds = torch.randn(3, LENGTH, width)
    outs = []
    with torch.no_grad():
        for side in (ours, in_dtype(stock, torch.float64), stock):
            given = embeds.to(next(side.parameters()).dtype)
            out = run(side, {"inputs_embeds": given, "attention_mask": mask})
            outs.append(out.existing(mask))
    assert_outputs_close(*outs)


@pytest.mark.skipif(backends.EXTENSION is None, reason=str(backends.EXTENSION_STATE))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_kind
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_packed(family, dtype, tmp_path) -> None:
    ours = native(in_dtype(build(family), dtype), tmp_path)
    lengths = torch.tensor([34, 5, 1, 21, 13])
    ids = inputs("none", family, 5, 34)["input_ids"]
    exists = torch.arange(34) < lengths[:, None]
    ends = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    with torch.inference_mode():
        together = ours(ids, attention_mask=exists.long()).last_hidden_state[exists]
        packed = ours(ids[exists], cu_seqlens=ends).last_hidden_state
        pairs = zip(ids, lengths.tolist(), strict=True)
        alone = [ours(row[None, :length]).last_hidden_state[0] for row, length in pairs]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together, packed)


def test_fresh_models_of_a_family_train(tmp_path) -> None:
    """A new model of each family has dropout and all gradients, and transformers can load it."""
    for family, (name, _) in FAMILIES.items():
        stock = build(family)
        content = stock.config.to_dict()
        key = families.family_of(family).settings.get("hidden_dropout_prob", "hidden_dropout_prob")
        own = {"modernbert": "embedding_dropout", "eurobert": "attention_dropout"}
        content[own.get(family, key)] = 0.3
        ours = modules.BertModel(families.read_config(content)).train()
        batch = inputs("middle", family)
        first, second = (ours(**batch).last_hidden_state for _ in range(2))
        assert not torch.equal(first, second), family
        out = ours(**batch)
        loss = out.last_hidden_state.square().sum()
        (loss if out.pooler_output is None else loss + out.pooler_output.sum()).backward()
        assert all(
            p.grad is not None and p.grad.isfinite().all()
            for p in ours.parameters()
            if p.requires_grad
        )
        ours.eval().save_pretrained(tmp_path / family)
        again = transformers.AutoModel.from_pretrained(tmp_path / family).eval()
        assert type(again).__name__ == name + "Model"
        with torch.no_grad():
            real = batch["attention_mask"].bool()
            states = (side(**batch).last_hidden_state[real] for side in (ours, again))
            torch.testing.assert_close(*states, atol=1e-5, rtol=1e-4)


DROPOUTS = {
    "distilbert": ("dropout", "attention_dropout"),
    "eurobert": ("attention_dropout",),
    "modernbert": ("attention_dropout", "mlp_dropout", "embedding_dropout"),
}


@every_family
def test_dropout_is_where_it_is_in_transformers(family, tmp_path) -> None:
    """Dropout has the same places as in transformers; with probability 1, its result is exact."""
    batch = inputs("middle", family)
    mask = batch["attention_mask"]
    for key in DROPOUTS.get(family, ("hidden_dropout_prob", "attention_probs_dropout_prob")):
        stock = build(family, **{key: 1.0})
        ours = native(stock, tmp_path / key)
        with torch.no_grad():
            sides = (ours, in_dtype(stock, torch.float64), stock)
            states = [run(side.train(), batch).existing(mask).states for side in sides]
        assert_close(key, *states)


# Folders


@every_family
def test_a_folder_is_written_as_transformers_wrote_it(family, tmp_path) -> None:
    stock = build(family)
    native(stock, tmp_path / "stock").save_pretrained(tmp_path / "ours")
    reopened, information = type(stock).from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not any(information[kind] for kind in ("missing_keys", "unexpected_keys"))
    before, after = stock.state_dict(), reopened.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert _settings(stock.config.to_dict()) == _settings(reopened.config.to_dict())
    expected, ours = (
        _settings(json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8")))
        for name in ("stock", "ours")
    )
    assert {key: ours[key] for key in expected} == expected
    again = modules.BertModel.from_pretrained(tmp_path / "ours").state_dict()
    first = modules.BertModel.from_pretrained(tmp_path / "stock").state_dict()
    assert list(again) == list(first)
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


def _settings(content: dict[str, Any]) -> dict[str, Any]:
    # NomicBERT's configuration has tie_word_embeddings, but does not save this key.
    return {k: v for k, v in content.items() if k not in ABOUT_THE_FILE | {"tie_word_embeddings"}}


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
@every_family
def test_the_folder_of_a_model_with_a_head_is_read(family, head, tmp_path) -> None:
    stock, batch = build(family, head), inputs("right", family)
    stock.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The model with this head has no pooler.
        ours = modules.BertModel.from_pretrained(tmp_path)
    mask = batch["attention_mask"]
    with torch.no_grad():
        base = stock.base_model
        states = (
            run(side, batch).existing(mask).states
            for side in (ours, in_dtype(base, torch.float64), base)
        )
        assert_close(head, *states)


def test_a_missing_weight_is_named(tmp_path) -> None:

    for family, name, ours in (
        ("modernbert", "layers.1.attn.Wqkv.weight", "encoder.layer.1.attention.self.query.weight"),
        ("distilbert", "transformer.layer.0.ffn.lin1.bias", "encoder.layer.0.intermediate"),
        ("mpnet", "encoder.relative_attention_bias.weight", "encoder.relative_attention_bias"),
    ):
        folder = tmp_path / family
        build(family).save_pretrained(folder)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        del tensors[name]
        save_file(tensors, file)
        with pytest.raises(ValueError, match=f"of the encoder are missing: .*{ours}"):
            modules.BertModel.from_pretrained(folder)


def test_the_prefix_of_older_checkpoints_of_gte(tmp_path) -> None:
    """Before GTE was in transformers, the names in checkpoints with a head had another prefix."""
    expected = native(build("gte"), tmp_path).state_dict()
    file = tmp_path / "model.safetensors"
    tensors = {f"new.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {"classifier.weight": torch.ones(2, 2)}, file)
    actual = modules.BertModel.from_pretrained(tmp_path).state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


# Configurations


def config(family: str, **changes: Any) -> BertConfig:
    return families.read_config(build(family).config.to_dict() | changes)


SCALED = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("nomic_bert", {"rope_parameters": SCALED}, r"^rope_parameters: got rope_type 'linear'"),
    ("nomic_bert", {"rope_scaling": {"type": "yarn"}}, r"^rope_parameters: got rope_type"),
    (
        "nomic_bert",
        {"rope_parameters": {"rope_theta": 10.0, "partial_rotary_factor": 0.5}},
        r"^partial_rotary_factor: got a part",
    ),
    ("nomic_bert", {"head_dim": 7}, r"^head_dim: got 7"),
    ("gte", {"rope_parameters": SCALED}, r"^rope_parameters: got rope_type 'linear'"),
    ("gte", {"head_dim": 7}, r"^head_dim: got 7, allowed: None or hidden_size / num_"),
    ("gte", {"hidden_act": "relu"}, r"^hidden_act: got 'relu', allowed: gelu, gelu_new"),
    ("jina_embeddings_v3", {"rope_parameters": SCALED}, r"^rope_parameters: got rope_type 'linear"),
    ("jina_embeddings_v3", {"head_dim": 7}, r"^head_dim: got 7, allowed: None or hidden_size"),
    ("ernie", {"use_task_id": 1}, r"^use_task_id: got 1, allowed: True or False"),
    ("ernie", {"task_type_vocab_size": -1}, r"^task_types: got -1, allowed: an integer >= 0"),
    ("megatron-bert", {"is_decoder": True}, r"^is_decoder: got True"),
    ("nomic_bert", {"hidden_act": "relu"}, r"^hidden_act: got 'relu', allowed: gelu, gelu_new"),
    (
        "modernbert",
        {"rope_parameters": {"full_attention": {}, "sliding_attention": SCALED}},
        r"^rope_parameters: got rope_type 'linear'",
    ),
    ("modernbert", {"layer_types": ["full_attention"]}, r"^layer_types: got .* allowed: 3 of"),
    ("modernbert", {"layer_types": ["full_attention"] * 2 + ["chunked"]}, r"^layer_types: got "),
    ("mpnet", {"relative_attention_num_buckets": 16}, r"^relative_attention_num_buckets: got 16"),
    (
        "bert",
        {"model_type": "convbert"},
        r"^model_type: got 'convbert', allowed: bert, roberta",
    ),
    ("roberta", {"is_decoder": True}, r"^is_decoder: got True"),
    ("electra", {"position_embedding_type": "relative_key"}, r"^position_embedding_type: got"),
    ("deberta-v2", {"conv_kernel_size": 3}, r"^conv_kernel_size: got 3, allowed: 0 or None"),
    ("deberta-v2", {"embedding_size": 32}, r"^embedding_size: got 32, allowed: None or 144"),
    ("deberta-v2", {"attention_head_size": 32}, r"^attention_head_size: got 32, allowed: None"),
    ("deberta-v2", {"pos_att_type": "c2c"}, r"^pos_att_type: got 'c2c', allowed: c2p, p2c"),
    ("deberta-v2", {"relative_attention": False}, r"^relative_attention: got False, allowed: True"),
    ("deberta-v2", {"max_relative_positions": 5}, r"^farthest: got 5, allowed: None or an integer"),
    ("deberta", {"talking_head": True}, r"^talking_head: got True, allowed: False"),
    ("deberta", {"relative_attention": False}, r"^relative_attention: got False, allowed: True"),
    ("deberta", {"pos_att_type": None}, r"^pos_att_type: got no terms, allowed: c2p, p2c"),
    ("distilbert", {"n_heads": 5}, r"^hidden_size: got 144, allowed: a multiple of"),
]


@pytest.mark.parametrize(("family", "changes", "message"), WRONG)
def test_a_config_that_cannot_be_computed_is_refused(family, changes, message, tmp_path) -> None:
    content = build(family).config.to_dict() | changes
    with pytest.raises(ValueError, match=message):
        families.read_config(content)
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match=rf"config\.json: {message[1:]}"):
        modules.BertModel.from_pretrained(tmp_path)


@every_family
def test_missing_keys_mean_what_they_mean_in_transformers(family) -> None:
    # A DeBERTa v1 without relative positions is refused.
    given = {"relative_attention": True, "pos_att_type": "p2c"} if family == "deberta" else {}
    stock = getattr(transformers, f"{FAMILIES[family].name}Config")(**given)
    right = families.read_config(stock.to_dict())
    actual = families.read_config({"model_type": family, **given})
    assert actual.architecture == right.architecture
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                 "intermediate_size", "hidden_act", "hidden_dropout_prob", "layer_norm_eps",
                 "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size",
                 "pad_token_id"):  # fmt: skip
        assert getattr(actual, name) == getattr(right, name), name


def test_keys_of_other_families_mean_nothing(tmp_path) -> None:
    """A configuration ignores the keys of other families, as in transformers."""
    foreign = {"hidden_dropout_prob": 0.7, "layer_norm_eps": 0.5, "intermediate_size": 7}
    assert config("distilbert", **foreign) == config("distilbert")
    assert config("mpnet", type_vocab_size=7) == config("mpnet")
    assert config("modernbert", layer_norm_eps=0.5) == config("modernbert")
    foreign = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    given = {"relative_attention": True, "pos_att_type": "p2c"}
    assert config("deberta", **given, **foreign) == config("deberta", **given)
    for family in ("modernbert", "nomic_bert"):  # These families have no table of positions.
        assert config(family, position_embedding_type="sans_pos") == config(family)


OLDER = {
    "global_attn_every_n_layers": 2,
    "global_rope_theta": 50.0,
    "local_rope_theta": 3.0,
}


@pytest.mark.parametrize("base", [{}, {"local_rope_theta": None}], ids=["both", "no local"])
def test_older_modernbert_configs(base, tmp_path) -> None:
    """Configurations that transformers wrote before version 5 load like newer configurations.

    The older files have an interval of global layers and two rotary bases instead of
    ``layer_types`` and ``rope_parameters``.
    """
    older = {name: value for name, value in (OLDER | base).items() if value is not None}
    stock, batch = build("modernbert", num_hidden_layers=4, **older), inputs("middle")
    stock.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    del content["layer_types"], content["rope_parameters"]
    content = {k: v for k, v in content.items() if k not in OLDER} | older
    file.write_text(json.dumps(content))
    ours = modules.BertModel.from_pretrained(tmp_path)
    local = older.get("local_rope_theta", 10_000.0)
    assert ours.config.architecture.rotary_bases == (50.0, local) * 2
    assert ours.config.architecture.windows == (-1, 4) * 2
    with torch.no_grad():
        sides = (ours, in_dtype(stock, torch.float64), stock)
        outs = [run(side, batch).existing(batch["attention_mask"]) for side in sides]
    assert_outputs_close(*outs)


def test_every_third_layer_of_modernbert_sees_all_by_default() -> None:
    choices = families.read_config({"model_type": "modernbert"}).architecture
    assert choices.windows == tuple(-1 if i % 3 == 0 else 64 for i in range(22))
    assert choices.rotary_bases == tuple(160_000.0 if i % 3 == 0 else 10_000.0 for i in range(22))


HEADS = [name for name in dir(modules) if name.startswith("BertFor") and "Output" not in name]


@pytest.mark.parametrize("head", HEADS)
def test_heads_are_of_bert_alone(head, tmp_path) -> None:
    build("roberta").save_pretrained(tmp_path)
    kind = getattr(modules, head)
    message = r"^model_type: got 'roberta', allowed: bert, bert-alibi; .*fastbert\.accelerate"
    with pytest.raises(ValueError, match=message):
        kind.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        kind(config("roberta"))


# Lengths


@every_family
def test_lengths_end_where_the_positions_do(family, tmp_path) -> None:
    ours = native(build(family), tmp_path)
    choices = ours.config.architecture
    longest = 48 - (choices.first_position or 0)
    assert ours.config.max_length == longest
    ids = inputs("none", family, 2, 50)["input_ids"]
    with torch.no_grad():
        assert ours(ids[:, :longest]).last_hidden_state.isfinite().all()
        if not (choices.position_table or choices.rotary_table):
            assert ours(ids).last_hidden_state.isfinite().all()
            ours(ids[:, :4], position_ids=torch.tensor([[0, 1, 2, 10_000]]))
            return
        less = "" if choices.first_position is None else f" - {choices.first_position}"
        message = f"^input_ids: got a length of {longest + 1}, allowed: at most "
        message += f"max_position_embeddings{less} = {longest}$"
        with pytest.raises(ValueError, match=message):
            ours(ids[:, : longest + 1])
        ends = torch.tensor([0, longest + 1], dtype=torch.int32)
        with pytest.raises(ValueError, match=message):
            ours(ids[0, : longest + 1], cu_seqlens=ends)
        with pytest.raises(
            ValueError, match=r"^position_ids: got 48, allowed: 0 <= position_ids < 48"
        ):
            ours(ids[:, :1], position_ids=torch.tensor([[48]]))
        embeds = torch.randn(1, longest + 1, choices.embedding_size or SIZES["hidden_size"])
        with pytest.raises(ValueError, match=message.replace("input_ids", "inputs_embeds")):
            ours(inputs_embeds=embeds)


@pytest.mark.parametrize("family", ["roberta", "mpnet"])
def test_padding_does_not_count_where_positions_are_counted(family, tmp_path) -> None:
    """A padded row of length 50 with 46 real tokens fits a table of 48 positions."""
    stock = build(family)
    ours = native(stock, tmp_path)
    batch = inputs("none", family, 2, 50)
    batch["attention_mask"][:, 46:] = 0
    batch["input_ids"][:, 46:] = 1
    with torch.no_grad():
        sides = (ours, in_dtype(stock, torch.float64), stock)
        outs = [run(side, batch).existing(batch["attention_mask"]) for side in sides]
    assert_outputs_close(*outs)


def test_token_types_are_refused_where_there_are_none(tmp_path) -> None:
    for family in ("distilbert", "mpnet", "modernbert"):
        ours = native(build(family), tmp_path / family)
        with pytest.raises(ValueError, match=rf"^token_type_ids: .*{family} has no token types"):
            ours(torch.ones(1, 3).long(), token_type_ids=torch.zeros(1, 3).long())


def test_the_public_name_is_the_class() -> None:
    assert fastbert.BertModel is modules.BertModel
