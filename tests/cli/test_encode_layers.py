"""``fastbert encode --layers`` writes embeddings from the hidden states of chosen layers."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from pyarrow import parquet
from torch import Tensor

from fastbert.cli.encode import COMBINATIONS
from fastbert.data import WordPieceTokenizer
from fastbert.inference import Embedder, layer_states
from fastbert.inference.after_encoder import AfterEncoder
from fastbert.integrations.ray import Embed
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

TEXTS = ["the dog ran.", "", "anna went to the garden and saw a bird in the tree.", "the cat."]
COMBINED = {
    "concat": lambda states: torch.cat(states, -1),
    "sum": lambda states: torch.stack(states).sum(0),
    "mean": lambda states: torch.stack(states).mean(0),
}


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


@pytest.fixture(scope="module")
def stock(model_folder):
    """Return transformers' model of the folder, which computes the states of all layers."""
    model = transformers.BertModel.from_pretrained(
        model_folder, attn_implementation="eager", add_pooling_layer=False
    )
    return model.eval()


def embeddings(model, folder, numbers: list[int], combine: str) -> Tensor:
    """Return the embeddings of TEXTS from transformers, with one text per call."""
    tokenizer = WordPieceTokenizer.load(folder)
    rows = []
    with torch.no_grad():
        for text in TEXTS:
            ids = torch.tensor([tokenizer.encode(text)])
            states = model(ids, output_hidden_states=True).hidden_states
            rows.append(COMBINED[combine]([states[n][0] for n in numbers]).mean(0))
    return torch.stack(rows)


@pytest.mark.parametrize(("layers", "numbers"), [("0,1,2", [0, 1, 2]), ("-2", [1])])
def test_rows_are_those_of_transformers(run, model_folder, stock, lines, tmp_path, layers, numbers):
    exact = copy.deepcopy(stock).double()
    for combine in COMBINATIONS:
        target = tmp_path / f"{combine}.npy"
        options = ("--layers", layers, "--combine", combine, "--json")
        result = run("encode", model_folder, lines, target, *options)
        assert result.exit_code == 0, result.output
        summary = json.loads(result.stdout[result.stdout.index("{") :])
        assert summary["layers"] == numbers
        assert summary["combine"] == (combine if len(numbers) > 1 else None)
        width = 32 * len(numbers) if combine == "concat" else 32
        assert summary["shape"] == [len(TEXTS), width]
        yardstick = Yardstick(lambda c=combine: embeddings(stock, model_folder, numbers, c))
        oracle = embeddings(exact, model_folder, numbers, combine)
        assert_close("embeddings", torch.from_numpy(np.load(target)), oracle, yardstick)


def test_the_defaults_are_the_last_layer_and_concat(run, model_folder, lines, tmp_path):
    def rows(name, *options):
        assert run("encode", model_folder, lines, tmp_path / name, *options).exit_code == 0
        return (tmp_path / name).read_bytes()

    assert rows("a.npy") == rows("b.npy", "--layers", "2") == rows("c.npy", "--layers", "-1")
    both = rows("d.npy", "--layers", "1,2")
    assert both == rows("e.npy", "--layers", "1,2", "--combine", "concat")
    assert both != rows("f.npy", "--layers", "2,1")


def test_parquet_python_and_ray_give_the_same_rows(run, model_folder, lines, tmp_path):
    target = tmp_path / "rows.parquet"
    result = run("encode", model_folder, lines, target, "--layers", "1,2", "--normalize")
    assert result.exit_code == 0, result.output
    assert "(4, 64), mean, layers 1,2, normalised" in result.output
    written = np.array(parquet.read_table(target)["embedding"].to_pylist(), dtype=np.float32)
    options = {"layers": [1, 2], "combine": "concat", "normalize": True}
    embedder = Embedder(str(model_folder), **options)
    assert embedder.width == 64
    assert np.array_equal(embedder(TEXTS), written)
    assert np.array_equal(embedder(TEXTS[1]), written[1])
    with pytest.raises(TypeError, match=r"texts\[1\]: got tuple, allowed: a str"):
        embedder([TEXTS[0], (TEXTS[1], TEXTS[2])])
    ray = Embed(str(model_folder), **options)({"text": TEXTS})
    assert np.array_equal(ray["embedding"], written)


def test_another_choice_does_not_resume(run, model_folder, tmp_path, monkeypatch):
    source, target = tmp_path / "texts.txt", tmp_path / "rows.npy"
    source.write_text("the dog ran.\n" * 60)
    pool, calls = AfterEncoder.forward, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 20:
            raise RuntimeError("stopped")
        return pool(*arguments)

    def encode(path, layers, combine):
        chosen = ("--layers", layers, "--combine", combine, "--tokens-per-batch", 16)
        return run("encode", model_folder, source, path, *chosen).output

    monkeypatch.setattr(AfterEncoder, "forward", failing)
    assert "rows are kept" in encode(target, "1,2", "sum")
    monkeypatch.undo()
    for name, layers, combine in (("a.npy", "1,2", "mean"), ("b.npy", "0,2", "sum")):
        shutil.copytree(f"{target}.partial", tmp_path / f"{name}.partial")
        assert "resuming" not in encode(tmp_path / name, layers, combine)
    assert "resuming after" in encode(target, "1,-1", "sum")
    encode(tmp_path / "whole.npy", "1,2", "sum")
    assert target.read_bytes() == (tmp_path / "whole.npy").read_bytes()


def test_errors(refused, model_folder, lines, tmp_path):
    def message(*options):
        return refused("encode", model_folder, lines, tmp_path / "rows.npy", *options)

    numbers = "allowed: different numbers from -3 to 2, at least one"
    assert f"layers: got 9, 10, {numbers}" in message("--layers", "9,10")
    assert f"layers: got 2, -1, {numbers}" in message("--layers", "2,-1")
    assert "--layers: got '1;2', allowed: numbers of layers" in message("--layers", "1;2")
    assert "--layers: got '', allowed" in message("--layers", "")
    assert "allowed: concat, sum, mean" in message("--layers", "1", "--combine", "max")
    assert "combine: got 'sum' without layers" in message("--combine", "sum")
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]
    with pytest.raises(ValueError, match=f"layers: got none, {numbers}"):
        Embedder(str(model_folder), layers=[])
    with pytest.raises(ValueError, match="combine: got 'max', allowed: concat, sum, mean"):
        Embedder(str(model_folder), layers=[1], combine="max")
    assert layer_states.COMBINATIONS == COMBINATIONS
