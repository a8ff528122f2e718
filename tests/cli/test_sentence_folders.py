"""``encode`` and ``classify`` agree with sentence-transformers on that library's folders."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quick_cases import long_case
from torch import nn

from fastbert.data import stories
from fastbert.modules.dense import ACTIVATIONS
from fastbert.modules.pooling import POOLINGS
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

sentence_transformers = pytest.importorskip("sentence_transformers")
models = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

TEXTS = ["the dog ran.", "", "Anna went to the garden and saw a bird in the tree. " * 9, "The cat."]
HIDDEN = 32


@pytest.fixture(scope="module")
def transformer(model_folder):
    """Return a Transformer module of ``model_folder``; saving it does not change that folder."""
    return models.Transformer(str(model_folder), max_seq_length=24)


@pytest.fixture
def save(transformer, tmp_path, monkeypatch):
    """Return a function that saves the Transformer module and additional modules in a folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def make(*modules: Any, name: str = "folder", **options: Any) -> Path:
        made = sentence_transformers.SentenceTransformer(
            modules=[transformer, *modules], device="cpu", **options
        )
        made.save(str(tmp_path / name), create_model_card=False)
        return tmp_path / name

    return make


@pytest.fixture
def encode(run, tmp_path):
    """Return a function that runs ``fastbert encode`` on TEXTS and returns the embeddings."""
    (tmp_path / "texts.txt").write_text("".join(text + "\n" for text in TEXTS))

    def call(folder: Path, *options: object) -> torch.Tensor:
        result = run("encode", folder, tmp_path / "texts.txt", tmp_path / "rows.npy", *options)
        assert result.exit_code == 0, result.output
        return torch.from_numpy(np.load(tmp_path / "rows.npy"))

    return call


@pytest.fixture
def refusal(refused, tmp_path):
    """Return a function that expects ``fastbert encode`` to fail, and returns its message."""
    (tmp_path / "texts.txt").write_text("a text\n")

    def call(folder: Path) -> str:
        message = refused("encode", folder, tmp_path / "texts.txt", tmp_path / "rows.npy")
        assert not (tmp_path / "rows.npy").exists()
        return message

    return call


def agrees(actual: torch.Tensor, folder: Path) -> None:
    stock = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    exact = stock.double().encode(TEXTS, convert_to_tensor=True)
    plain = Yardstick(lambda: stock.float().encode(TEXTS, convert_to_tensor=True))
    assert actual.shape == exact.shape
    assert_close("embeddings", actual, exact, plain)


def change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | values), encoding="utf-8")


def rewrite(folder: Path, index: int, **values: Any) -> None:
    """Change values of the entry `index` of modules.json."""
    content = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    content[index] |= values
    (folder / "modules.json").write_text(json.dumps(content))


# Tests of folders that are accepted


def dense(inputs: int = HIDDEN, outputs: int = 8, **options: Any) -> Any:
    torch.manual_seed(inputs + outputs)
    return models.Dense(inputs, outputs, **options)


@pytest.mark.parametrize(
    "modules",
    [
        [dense()],
        [dense(bias=False, activation_function=nn.Identity()), models.Normalize()],
        [models.Normalize(), dense(activation_function=nn.GELU())],
        [models.Normalize(), dense(), models.Normalize()],
        [dense(outputs=40, activation_function=nn.ReLU()), dense(40, 5), models.Normalize()],
        [dense(use_residual=True), dense(8, 8, use_residual=True)],
    ],
)
def test_dense_and_normalize_run_in_their_order(modules, save, encode):
    folder = save(models.Pooling(HIDDEN), *modules)
    agrees(encode(folder), folder)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_of_a_dense(name, save, encode):
    folder = save(models.Pooling(HIDDEN), dense(activation_function=getattr(nn, name)()))
    agrees(encode(folder), folder)


def test_a_dense_in_a_pickle_is_read_as_weights_only(save, encode):
    folder = save(models.Pooling(HIDDEN), dense())
    weights = folder / "2_Dense" / "model.safetensors"
    expected = encode(folder)
    torch.save(safetensors_of(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    assert torch.equal(encode(folder), expected)
    agrees(expected, folder)


def safetensors_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


MODES = models.Pooling.POOLING_MODES


@pytest.mark.parametrize("mode", [*MODES, ("cls", "max"), ("lasttoken", "mean", "cls"), MODES])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_every_pooling_mode_alone_and_joined(mode, include_prompt, save, encode):
    folder = save(
        models.Pooling(HIDDEN, mode, include_prompt=include_prompt),
        prompts={"query": "the old house: ", "other": "bird"},
        default_prompt_name="query",
    )
    agrees(encode(folder), folder)


def test_every_mode_of_ours_is_one_of_sentence_transformers():
    ours = {{"lasttoken": "last"}.get(mode, mode) for mode in MODES}
    assert ours == set(POOLINGS)


@pytest.mark.parametrize("include_prompt", [True, False])
def test_a_prompt_longer_than_the_limit(include_prompt, save, encode):
    folder = save(
        models.Pooling(HIDDEN, include_prompt=include_prompt),
        prompts={"query": "the dog ran to the house. " * 20},
        default_prompt_name="query",
    )
    agrees(encode(folder), folder)


def test_prompts_without_a_default_are_not_applied_and_named(save, encode, run, tmp_path):
    prompts = {"query": "the query: ", "document": ""}
    folder = save(models.Pooling(HIDDEN), prompts=prompts)
    agrees(encode(folder), folder)
    result = run("encode", folder, tmp_path / "texts.txt", tmp_path / "again.npy")
    assert "MODEL has prompts, but no default prompt (query)" in " ".join(result.output.split())


def test_settings_of_an_older_folder(save, encode):
    folder = save(models.Pooling(HIDDEN, "cls"), models.Normalize())
    flags = {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}
    content = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": False, **flags}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
    settings = {"max_seq_length": 7, "do_lower_case": True}
    (folder / "sentence_bert_config.json").unlink()
    (folder / "sentence_roberta_config.json").write_text(json.dumps(settings))
    (folder / "config_sentence_transformers.json").unlink()
    rewrite(folder, 0, type="sentence_transformers.models.Transformer")
    rewrite(folder, 1, type="sentence_transformers.models.Pooling")
    shutil.rmtree(folder / "2_Normalize")
    actual = encode(folder)
    agrees(actual, folder)
    (folder / "sentence_roberta_config.json").write_text('{"max_seq_length": 24}')
    assert not torch.equal(encode(folder), actual)


@pytest.mark.parametrize("cased", [True, False])
def test_do_lower_case_of_a_cased_vocabulary(cased, save, encode):
    folder = save(models.Pooling(HIDDEN))
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"]["lowercase"] = not cased
    content["normalizer"]["strip_accents"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    change(folder / "tokenizer_config.json", do_lower_case=not cased, strip_accents=False)
    as_it_is = encode(folder)
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    lowered = encode(folder)
    agrees(lowered, folder)
    assert torch.equal(lowered, as_it_is) == (not cased)


def test_the_transformer_in_a_folder_of_its_own(save, encode):
    folder = save(models.Pooling(HIDDEN), dense())
    expected = encode(folder)
    own = folder / "0_Transformer"
    own.mkdir()
    for path in list(folder.iterdir()):
        if path.is_file() and path.name not in (
            "modules.json",
            "config_sentence_transformers.json",
        ):
            path.rename(own / path.name)
    rewrite(folder, 0, path="0_Transformer")
    assert torch.equal(encode(folder), expected)
    agrees(expected, folder)


def test_truncate_dim_and_a_similarity_that_does_not_matter(save, encode):
    folder = save(models.Pooling(HIDDEN), models.Normalize(), truncate_dim=5)
    for name in ("cosine", "euclidean"):
        change(folder / "config_sentence_transformers.json", similarity_fn_name=name)
        actual = encode(folder)
        assert actual.shape == (len(TEXTS), 5)
        agrees(actual, folder)


def test_options_replace_the_folder_s_pooling_and_last_normalize(save, encode):
    folder = save(models.Pooling(HIDDEN), models.Normalize(), dense(), models.Normalize())
    plain = save(models.Pooling(HIDDEN, "cls"), models.Normalize(), dense(), name="plain")
    agrees(encode(folder, "--pooling", "cls", "--no-normalize"), plain)
    joined = torch.nn.functional.normalize(encode(plain), dim=-1)
    assert torch.equal(encode(plain, "--normalize"), joined)


def test_other_weights_of_a_dense_are_not_resumed(save, encode, run, tmp_path, monkeypatch):
    """An interrupted run is resumed only if all modules, Dense included, have the same weights."""
    from fastbert.jobs.batch_job import fingerprint
    from fastbert.jobs.texts import Texts

    folder = save(models.Pooling(HIDDEN), dense())
    encode(folder)
    texts = Texts(tmp_path / "texts.txt", ("text",))
    before = fingerprint((folder,), texts)
    weights = folder / "2_Dense" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert fingerprint((folder,), texts) != before


# Tests of folders that are refused


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (lambda: models.LayerNorm(HIDDEN), "LayerNorm"),
        (lambda: models.Dropout(0.1), "Dropout"),
    ],
)
def test_other_modules_are_refused_by_name(module, name, save, refusal):
    message = refusal(save(models.Pooling(HIDDEN), module()))
    assert "modules.json: got the module 'sentence_transformers." in message
    assert f".{name}', allowed: Transformer, Pooling, Dense, Normalize" in message


@pytest.mark.parametrize(
    ("index", "values", "message"),
    [
        (0, {"type": "custom_st.Transformer"}, "got the module 'custom_st.Transformer'"),
        (1, {"type": "elsewhere.Pooling"}, "got the module 'elsewhere.Pooling'"),
        (1, {"type": 5}, "allowed: a module's type and path"),
        (1, {"path": None}, "allowed: a module's type and path"),
        (1, {"path": "../1_Pooling"}, "got the path '../1_Pooling', allowed: a folder inside"),
        (1, {"path": "a/../../b"}, "got the path 'a/../../b'"),
        (1, {"path": "/etc"}, "got the path '/etc'"),
        (1, {"path": "C:\\x"}, "got the path 'C:"),
        (1, {"path": "a\0b"}, "allowed: a folder inside this one"),
        (1, {"path": "link"}, "got the path 'link', allowed: a folder inside this one"),
        (1, {"name": "2"}, "got the names 0, 2, 2, allowed: different names"),
        (0, {"type": "sentence_transformers.models.Normalize"}, "got Normalize, Pooling, Dense"),
        (1, {"type": "sentence_transformers.models.Transformer"}, "allowed: one Transformer"),
        (
            1,
            {"type": "sentence_transformers.models.Normalize"},
            "got Transformer, Normalize, Dense",
        ),
        (2, {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}, "one Pooling"),
    ],
)
def test_a_list_of_modules_that_is_not_served(index, values, message, save, refusal, tmp_path):
    folder = save(models.Pooling(HIDDEN), dense())
    shutil.copytree(folder / "1_Pooling", tmp_path / "1_Pooling")
    os.symlink(tmp_path / "1_Pooling", folder / "link")
    rewrite(folder, index, **values)
    assert message in refusal(folder)


@pytest.mark.parametrize("content", ["", "{}", "[5]", "[" * 99_999, "[{}]", "[]", "nan", '["a"]'])
def test_a_list_of_modules_that_is_none(content, save, refusal):
    folder = save(models.Pooling(HIDDEN))
    (folder / "modules.json").write_text(content)
    assert f"{folder / 'modules.json'}: " in refusal(folder)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "pooling_mode: got ['median']"),
        ("1_Pooling/config.json", {"pooling_mode": []}, "pooling_mode: got []"),
        ("1_Pooling/config.json", {"pooling_mode": [{}]}, "pooling_mode: got [{}]"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": "no"}, "allowed: true or false"),
        ("1_Pooling/config.json", {"include_prompt": 1}, "include_prompt: got 1, allowed: true"),
        ("1_Pooling/config.json", {"pooling_mode_median": True}, "got pooling_mode_median"),
        ("2_Dense/config.json", {"activation_function": "os.system"}, "got 'os.system', allowed"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.PReLU"}, "got 'PReLU', allowed"),
        ("2_Dense/config.json", {"activation_function": None}, "got None, allowed: the name"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "'token_embeddings'"),
        ("2_Dense/config.json", {"module_output_name": "scores"}, "module_output_name: got 'sco"),
        ("2_Dense/config.json", {"in_features": 31}, "in_features: got 31, allowed: 32, the size"),
        ("2_Dense/config.json", {"in_features": True}, "in_features: got True, allowed: an int"),
        (
            "2_Dense/config.json",
            {"in_features": None},
            "the file lacks in_features or out_features",
        ),
        ("2_Dense/config.json", {"out_features": 2**28}, "linear.weight: got shape (8, 32)"),
        ("2_Dense/config.json", {"bias": False}, "got the weights linear.bias, linear.weight"),
        ("2_Dense/config.json", {"use_residual": True}, "allowed: linear.weight, linear.bias, res"),
        ("2_Dense/config.json", {"gate": 1}, "got gate, allowed: activation_function, bias"),
        ("3_Normalize/config.json", {"module_input_name": "token_embeddings"}, "'token_embedd"),
        ("sentence_bert_config.json", {"max_seq_length": "9"}, "max_seq_length: got '9', allowed"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length: got 0, allowed: an"),
        ("sentence_bert_config.json", {"do_lower_case": "no"}, "do_lower_case: got 'no', allowed"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "got 'fill-mask', allow"),
        ("sentence_bert_config.json", {"query_length": 9}, "got query_length, allowed: do_lower"),
        ("sentence_bert_config.json", {"model_args": {"x": 1}}, "got model_args, allowed: do_low"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}},
            "modality_config: got {'text':",
        ),
        ("sentence_bert_config.json", {"module_output_name": "scores"}, "module_output_name: got"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "model_type: got"),
        ("config_sentence_transformers.json", {"model_type": []}, "model_type: got []"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, "prompts: got ['a'], allowed"),
        ("config_sentence_transformers.json", {"prompts": {"a": 5}}, "prompts: got {'a': 5}"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "_name: got 'q', allo"),
        ("config_sentence_transformers.json", {"truncate_dim": -1}, "truncate_dim: got -1, allow"),
    ],
)
def test_a_setting_that_is_not_served_is_named(file, values, message, save, refusal):
    folder = save(models.Pooling(HIDDEN), dense(), models.Normalize())
    change(folder / file, **values)
    told = refusal(folder)
    assert message in told
    assert str((folder / file).parent) in told


@pytest.mark.parametrize("file", ["1_Pooling/config.json", "2_Dense/config.json"])
def test_a_module_without_its_settings(file, save, refusal):
    folder = save(models.Pooling(HIDDEN), dense())
    (folder / file).unlink()
    assert str(folder / file) in refusal(folder)


# Cross-encoders


def cross_encoder(model_folder: Path, folder: Path, labels: int, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(model_folder, num_labels=labels)
    torch.manual_seed(labels)
    head = transformers.BertForSequenceClassification(config)
    head.save_pretrained(folder / "bare")
    for path in model_folder.glob("*token*"):
        shutil.copy(path, folder / "bare")
    return sentence_transformers.CrossEncoder(str(folder / "bare"), device="cpu", **options)


@pytest.mark.parametrize("labels", [1, long_case(3)])
@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.Identity(), None])
def test_scores_are_those_of_the_cross_encoder(
    labels, activation, run, model_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    prompts = {"prompts": {"rank": "the dog: "}, "default_prompt_name": "rank"}
    made = cross_encoder(model_folder, tmp_path, labels, activation_fn=activation, max_length=12)
    made.save_pretrained(str(tmp_path / "folder"))
    change(tmp_path / "folder" / "config_sentence_transformers.json", **prompts)
    texts = [text for text in TEXTS if text] + [" ".join(story[:3]) for story in stories(8, 1)]
    pairs = [(first, second) for first in texts for second in texts]
    source, target = tmp_path / "pairs.jsonl", tmp_path / "scores.jsonl"
    source.write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in pairs))
    options = ("--field", "a", "--pair-field", "b")
    result = run("classify", tmp_path / "folder", source, target, *options)
    assert result.exit_code == 0, result.output
    records = [
        json.loads(line)["scores"] for line in target.read_text(encoding="utf-8").splitlines()
    ]
    actual = torch.tensor([list(scores.values()) for scores in records])
    stock = sentence_transformers.CrossEncoder(str(tmp_path / "folder"), device="cpu")
    plain = stock.predict(pairs, convert_to_tensor=True)
    exact = stock.double().predict(pairs, convert_to_tensor=True)
    assert_close("scores", actual, *(side.view(len(pairs), labels) for side in (exact, plain)))


def test_a_cross_encoder_that_is_not_served(refused, model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cross_encoder(model_folder, tmp_path, 1).save_pretrained(str(tmp_path / "folder"))
    settings = tmp_path / "folder" / "config_sentence_transformers.json"
    command = ("classify", tmp_path / "folder", "--text", "a")
    change(settings, activation_fn="torch.nn.modules.activation.Tanh")
    assert "is 'Tanh', allowed: Sigmoid, Identity" in refused(*command)
    change(settings, activation_fn="torch.nn.modules.activation.Sigmoid")
    more = {"idx": 1, "name": "1", "path": "1_X", "type": "sentence_transformers.models.Dense"}
    listing = tmp_path / "folder" / "modules.json"
    listing.write_text(json.dumps([*json.loads(listing.read_text(encoding="utf-8")), more]))
    assert "got a Dense after the Transformer of a cross-encoder" in refused(*command)
    (tmp_path / "a.txt").write_text("a\n")
    command = ("encode", tmp_path / "folder", tmp_path / "a.txt", tmp_path / "a.npy")
    assert "model_type: got 'CrossEncoder', allowed: 'SentenceTransformer'" in refused(*command)


def test_the_activation_of_an_older_cross_encoder(run, model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cross_encoder(model_folder, tmp_path, 1)
    folder, identity = tmp_path / "bare", "torch.nn.modules.linear.Identity"
    scores = []
    for values in (
        {},
        {"sentence_transformers": {"activation_fn": identity}},
        {"sbert_ce_default_activation_function": identity, "sentence_transformers": None},
    ):
        change(folder / "config.json", **values)
        result = run("classify", folder, "--text", "the dog", "--json")
        scores.append(json.loads(result.stdout)["score"])
    assert scores[1] == scores[2]
    assert scores[0] == pytest.approx(1 / (1 + math.exp(-scores[1])))
