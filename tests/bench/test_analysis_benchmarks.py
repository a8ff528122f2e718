"""The benchmarks of attention, alignment and embeddings run at the smallest sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for imports from benchmarks/

from benchmarks import alignment, attention_tests, geometry
from fastbert import BertConfig, BertModel
from fastbert.data import stories, train_tokenizer


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = train_tokenizer(stories(30, 0), 300)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def packages(tmp_path, monkeypatch) -> list[str]:
    """Create two packages of eight modules each, one about birds and one about fish."""
    names = {
        "birdwords_": "The birds sing in the old tree",
        "fishwords_": "The fish swim in a lake",
    }
    for package, words in names.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        for module in range(8):
            text = "\n\n".join(
                f"{words} number {module} of {n}, and nobody has seen a better place than that."
                for n in range(4)
            )
            (tmp_path / package / f"module_{module}.py").write_text(f'"""{text}"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    return list(names)


def run(module, monkeypatch, *arguments: object) -> None:
    options = [str(argument) for argument in arguments]
    monkeypatch.setattr(sys, "argv", [module.__name__, *options, "--threads", "1"])
    module.main()


def test_attention_tests_write_a_table_and_a_plot(encoder, packages, tmp_path, monkeypatch, capsys):
    small = ["--count", 16, "--epochs", 1, "--adversary-epochs", 1, "--seeds", 1]
    small += ["--strengths", 0, 1, "--packages", *packages]
    run(attention_tests, monkeypatch, "--out", tmp_path / "out", "--model", encoder, *small)
    content = json.loads((tmp_path / "out" / "attention_tests.json").read_text(encoding="utf-8"))
    assert content["base"]["tvd"] == content["base"]["jsd_every"] == 0.0
    assert len(content["uniform"]) == 4
    assert len(content["seeds"]) == 1
    chosen = [(row["scope"], row["strength"]) for row in content["adversaries"]]
    assert chosen == [("read", 0.0), ("read", 1.0), ("every", 1.0)]
    assert len(content["frozen"]) == 6
    assert content["machine"]["versions"]["torch"] == torch.__version__
    text = (tmp_path / "out" / "attention_tests.md").read_text(encoding="utf-8")
    assert text.count("| uniform") == 5
    assert "adversary, every, λ = 1" in text
    assert (tmp_path / "out" / "attention_tests.png").stat().st_size > 10_000
    assert "base: epoch 1 of 1, loss" in capsys.readouterr().out


def test_the_page_has_the_figures_of_the_record():
    root = Path(__file__).resolve().parents[2]
    record = root / "benchmarks" / "results" / "2026-11-23-analysis" / "attention_tests.json"
    content = json.loads(record.read_text(encoding="utf-8"))
    adversaries = {
        (row["scope"], row["strength"]): row["distance"] for row in content["adversaries"]
    }
    read, every = adversaries["read", 2.0], adversaries["every", 2.0]
    seeds, trained = content["seeds"], [r for r in content["uniform"] if "trained" in r["name"]]
    frozen = {row["weights"]: row["accuracy"] for row in content["frozen"]}
    shares = [row["accuracy"] for row in [content["base"], *trained, read]]
    shares += [frozen["attention of the model"], frozen["uniform"]]
    shares.append(frozen["attention of the adversary, read"])
    distances = [read["jsd_read"], read["tvd"], every["jsd_every"], every["tvd"]]
    distances.append(adversaries["read", 0.0]["tvd"])
    distances += [edge(row["tvd"] for row in seeds) for edge in (min, max)]
    distances += [edge(row["jsd_read"] for row in seeds) for edge in (min, max)]
    page = (root / "docs" / "analysis.md").read_text(encoding="utf-8")
    expected = [f"{100 * share:.1f} %" for share in shares]
    expected += [f"{distance:.3f}" for distance in distances]
    assert not [figure for figure in expected if figure not in page]


def test_geometry_writes_a_table_and_a_plot(encoder, tmp_path, monkeypatch, capsys):
    small = ["--train", 20, "--test", 10, "--rank", 4, "--epochs", 2]
    run(geometry, monkeypatch, "--out", tmp_path, "--model", encoder, *small)
    content = json.loads((tmp_path / "geometry.json").read_text(encoding="utf-8"))
    assert len(content["senses"]["layers"]) == len(content["probe"]["layers"]) == 3
    assert content["senses"]["sentences"] == 156
    assert 0 < content["probe"]["linear"]["uuas"] < 1
    text = (tmp_path / "geometry.md").read_text(encoding="utf-8")
    assert "probe, layer 2" in capsys.readouterr().out
    assert [line.split(" |")[0] for line in text.splitlines()[2:6]] == [
        "| baseline",
        "| 0, embedding output",
        "| 1",
        "| 2",
    ]
    assert (tmp_path / "geometry.png").stat().st_size > 10_000


def test_each_alignment_learns_and_is_drawn(tmp_path, monkeypatch, capsys):
    small = ["--steps", 3, "--train", 60, "--test", 5]
    run(alignment, monkeypatch, "--out", tmp_path, *small)
    content = json.loads((tmp_path / "alignment.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in content["rows"]] == list(alignment.CONTENDERS)
    for row in content["rows"]:
        weights = torch.tensor(row["weights"])
        # The weights of local attention may have a sum below 1.
        assert weights.shape == (10, 10)
        assert 0.1 < float(weights.sum(-1).max()) < 1.01
    hard = torch.tensor(content["rows"][-1]["weights"])
    assert torch.equal(hard.sum(-1), torch.ones(10))
    text = (tmp_path / "alignment.md").read_text(encoding="utf-8")
    assert text.startswith("| score | right words |")
    assert text.splitlines()[2] in capsys.readouterr().out
    assert (tmp_path / "alignment.png").stat().st_size > 10_000


def test_the_toy_translation_moves_adjectives_and_adverbs():
    words = "the fast black dog often sees a cat ."
    pair = alignment.translate(words.split(" "))
    assert " ".join(pair.target) == "le chien noir rapide voit souvent un chat ."
    assert pair.places == [0, 3, 2, 1, 5, 4, 6, 7, 8]
    pairs, held_out = alignment.sentences(300, 50, seed=1)
    every = [tuple(pair.source) for pair in (*pairs, *held_out)]
    assert len(set(every)) == 350
    assert " ".join(held_out[0].source) == alignment.SHOWN
    for pair in pairs:
        assert sorted(pair.places) == list(range(len(pair.source)))
        assert pair.target == [alignment.DICTIONARY[pair.source[n]] for n in pair.places]
        # The page says that no word moves by more than two positions.
        assert max(abs(n - place) for n, place in enumerate(pair.places)) <= 2


def test_the_page_of_alignments_has_the_figures_of_the_record():
    root = Path(__file__).resolve().parents[2]
    record = root / "benchmarks" / "results" / "2026-11-28-alignment" / "alignment.json"
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    share = {row["name"]: f"{100 * row['weight_on_right_word']:.1f} %" for row in rows}
    page = (root / "docs" / "alignment.md").read_text(encoding="utf-8")
    assert f"the right word has {share['content-based, β = 1']} on average" in page
    assert f"With β = 8, it has {share['content-based, β = 8']}." in page
    local = share["general, local monotonic, D = 2"]
    assert f"with *D* = 2 the right word\n  has {local} of the weight" in page
    # General scores take the sixth French word from the seventh English word.
    for row in rows:
        if row["name"] in ("general", "general, hard"):
            assert row["weights"][5][6] > 0.99
            assert row["right_words"] > 0.999
