"""The targets of a file are those of single texts, whatever the batch, and survive a stop."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from seq2seq_problems import words

from fastbert.config import BertConfig
from fastbert.jobs import batch_job
from fastbert.jobs.texts import Texts
from fastbert.modules import BertModel
from fastbert.modules.transformer import Transformer
from fastbert.seq2seq import Writer, predict
from fastbert.seq2seq.tokenizer import PieceTokenizer


@pytest.fixture
def lines(tmp_path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("".join(f"{word}\n" for word in ["", "a", *words("abc"), "hgfedcba"]))
    return path


def targets(path: Path) -> list[str]:
    return [json.loads(line)["target"] for line in path.read_text(encoding="utf-8").splitlines()]


def alone(model: Path, text: str) -> str:
    """Return the target of a text by one call of the model, without padding."""
    tokenizer = PieceTokenizer.load(model)
    [source] = tokenizer.encode([text])
    [row] = Transformer.from_pretrained(model).generate(torch.tensor([source])).tolist()
    return tokenizer.decode(row[1:])


def test_targets_do_not_depend_on_the_batch(trained, lines, tmp_path):
    output = tmp_path / "out.jsonl"
    summary = predict(Writer(trained), Texts(lines, ("text",)), output)
    assert summary == {"output": output, "texts": 30, "resumed": 0}
    texts = lines.read_text(encoding="utf-8").split("\n")[:-1]
    assert targets(output) == [alone(trained, text) for text in texts]
    assert targets(output) == Writer(trained)(texts)
    assert len(set(targets(output))) > 1


def test_the_number_of_beams_reaches_the_search(trained, monkeypatch):
    asked = []
    generate = Transformer.generate

    def noting(self, *arguments, **options):
        asked.append(options["num_beams"])
        return generate(self, *arguments, **options)

    monkeypatch.setattr(Transformer, "generate", noting)
    assert Writer(trained, num_beams=3)(["abc"])
    assert asked == [3]


def test_ids_are_written(trained, tmp_path):
    source, output = tmp_path / "words.csv", tmp_path / "out.jsonl"
    source.write_text("number,word\n7,abc\n8,cab\n", encoding="utf-8")
    predict(Writer(trained), Texts(source, ("word",), id_field="number"), output)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in rows] == ["7", "8"]
    assert [row["target"] for row in rows] == Writer(trained)(["abc", "cab"])


def test_a_stopped_prediction_continues_after_the_finished_lines(
    trained, lines, tmp_path, monkeypatch
):
    output, module = tmp_path / "out.jsonl", sys.modules["fastbert.seq2seq.predict"]
    texts = Texts(lines, ("text",))
    predict(Writer(trained), texts, tmp_path / "whole.jsonl")
    # A window of 32 tokens has some of the 30 lines.
    monkeypatch.setattr(module, "TOKENS_PER_BATCH", 16)
    monkeypatch.setattr(batch_job, "WINDOW_BATCHES", 2)
    calls, generate = [], module.generate

    def stopped(*arguments):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return generate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "generate", stopped)
        with pytest.raises(KeyboardInterrupt):
            predict(Writer(trained), texts, output)
    assert not output.exists()
    assert output.with_name("out.jsonl.partial").is_dir()
    # A run with other options does not take these lines over.
    other = predict(Writer(trained, num_beams=1), texts, tmp_path / "other.jsonl")
    assert other["resumed"] == 0
    summary = predict(Writer(trained), texts, output)
    assert 0 < summary["resumed"] < 30
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not output.with_name("out.jsonl.partial").exists()


def test_a_text_with_too_many_pieces_is_named(trained, tmp_path):
    with pytest.raises(
        ValueError, match=r"^texts: text 2 has 9 pieces, allowed: at most 8, the po"
    ):
        Writer(trained)(["abc", "abcdefghi"])
    path = tmp_path / "words.txt"
    path.write_text("abc\nabcdefghi\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=rf"^INPUT: {path}: text 2 has 9 pieces, allowed: at most 8"
    ):
        predict(Writer(trained), Texts(path, ("text",)), tmp_path / "out.jsonl")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["words.txt"]


def test_a_folder_of_another_model_is_refused(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Writer(tmp_path / "nowhere")
    config = BertConfig.preset("tiny", vocab_size=50)
    BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"model_type: got 'bert', allowed: marian"):
        Writer(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"num_beams: got 0, allowed: an integer >= 1"):
        Writer(trained, num_beams=0)
    folder = Path(shutil.copytree(trained, tmp_path / "model"))
    PieceTokenizer.train(["the old mill"] * 9, 9).save(folder)
    with pytest.raises(ValueError, match=r"has 267 ids, allowed: vocab_size \(258\)"):
        Writer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist, allowed: a fol"):
        Writer(folder)
