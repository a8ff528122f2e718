"""Pre-training learns, writes its log, is exactly reproducible, and leaves only complete files."""

import io
import json

import pytest
import torch
from rich.console import Console

from fastbert.data import WordPieceTokenizer
from fastbert.modules import BertForPreTraining
from fastbert.training import pretraining_run
from fastbert.training.log import read_log
from fastbert.training.pretraining import pretrain

TIMES = ("tokens_per_second",)


def run(options, documents, **keywords):
    return pretrain(options, documents=documents, console=Console(quiet=True), **keywords)


def rows_without_times(path):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_log(path)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, documents):
    """Return the result of one longer run, which several tests check."""
    from fastbert.training.options import PretrainOptions

    torch.set_num_threads(1)
    options = PretrainOptions(
        output=tmp_path_factory.mktemp("run") / "out",
        preset="tiny",
        config={"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64},
        vocab_size=300,
        max_length=48,
        tokens_per_batch=384,
        steps=60,
        learning_rate=5e-3,
        held_out=0.2,
        log_every=10,
        eval_every=30,
    )
    console = Console(file=io.StringIO(), width=200)
    result = pretrain(options, documents=documents, console=console)
    return result, console.file.getvalue()


def test_the_loss_falls(trained):
    rows = [row for row in read_log(trained[0].log) if row["event"] == "train"]
    assert rows[-1]["mlm_loss"] < rows[0]["mlm_loss"] - 0.25


def test_the_log_is_valid_jsonl_with_both_kinds_of_rows(trained):
    rows = [json.loads(line) for line in trained[0].log.read_text(encoding="utf-8").splitlines()]
    train = [row for row in rows if row["event"] == "train"]
    evaluation = [row for row in rows if row["event"] == "evaluation"]
    assert [row["step"] for row in train] == [10, 20, 30, 40, 50, 60]
    assert [row["step"] for row in evaluation] == [30, 60]
    assert set(train[0]) == {
        "event", "step", "epoch", "loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy",
        "learning_rate", "gradient_norm", "tokens_per_second",
    }  # fmt: skip
    assert {k: v for k, v in evaluation[-1].items() if k not in ("event", "step")} == trained[
        0
    ].evaluation


def test_progress_shows_losses_accuracies_rate_and_speed(trained):
    text = trained[1]
    for word in ("mlm", "nsp", "lr", "tokens/s", "held-out", "most frequent token"):
        assert word in text


def test_the_curves_are_a_png(trained):
    assert trained[0].curves.read_bytes().startswith(b"\x89PNG")


def test_the_checkpoint_reopens_with_its_tokenizer(trained):
    model = BertForPreTraining.from_pretrained(trained[0].checkpoint)
    tokenizer = WordPieceTokenizer.load(trained[0].checkpoint)
    ids = torch.tensor([tokenizer.encode("Anna went home.")])
    assert model(input_ids=ids).prediction_logits.shape == (*ids.shape, tokenizer.vocab_size)
    left = {path.name for path in trained[0].log.parent.iterdir()}
    assert left == {"log.jsonl", "curves.png", "model", "checkpoints"}


def test_the_same_seed_gives_the_same_log(options, documents, tmp_path):
    config = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    results = [
        run(options(output=tmp_path / name, seed=seed, config=config), documents)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    first, again, other = (rows_without_times(result.log) for result in results)
    assert first == again
    assert first != other


def test_bf16_autocast_trains(options, documents):
    result = run(options(precision="bf16"), documents)
    rows = read_log(result.log)
    assert all(torch.isfinite(torch.tensor(row["mlm_loss"])) for row in rows)
    weights = BertForPreTraining.from_pretrained(result.checkpoint).state_dict()
    assert all(w.dtype == torch.float32 for w in weights.values() if w.is_floating_point())


def test_gradient_checkpointing_changes_nothing(options, documents, tmp_path):
    config = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
    logs = [
        rows_without_times(
            run(
                options(output=tmp_path / str(flag), gradient_checkpointing=flag, config=config),
                documents,
            ).log
        )
        for flag in (False, True)
    ]
    assert logs[0] == logs[1]


def test_a_saved_tokenizer_is_taken_as_it_is(trained, options, documents):
    result = run(options(tokenizer=trained[0].checkpoint), documents)
    for name in ("tokenizer.json", "vocab.txt"):
        assert (result.checkpoint / name).read_bytes() == (
            trained[0].checkpoint / name
        ).read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "corpus: no text in"),
        ("One sentence. Another one.", "held_out: got 0.2 of 1 documents"),
    ],
)
def test_an_unusable_corpus_fails_before_anything_is_written(options, tmp_path, text, message):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(text)
    with pytest.raises(ValueError, match=message):
        pretrain(options(corpus=corpus), console=Console(quiet=True))
    assert not (tmp_path / "out").exists()


def test_no_documents_is_an_error(options, tmp_path):
    with pytest.raises(ValueError, match="documents: got none"):
        run(options(), [])
    with pytest.raises(ValueError, match="corpus: got None"):
        pretrain(options(), console=Console(quiet=True))
    assert not (tmp_path / "out").exists()


def break_at(monkeypatch, step, error):
    original = pretraining_run.PretrainingRun.train_step

    def train_step(self, batch):
        if self.step == step:
            raise error
        return original(self, batch)

    monkeypatch.setattr(pretraining_run.PretrainingRun, "train_step", train_step)


@pytest.mark.parametrize(
    ("save_every", "kept"), [(None, "no checkpoint"), (2, "the checkpoint of step 4")]
)
def test_an_interrupt_says_what_was_kept(options, documents, monkeypatch, save_every, kept):
    break_at(monkeypatch, 5, KeyboardInterrupt())
    console = Console(file=io.StringIO(), width=200)
    chosen = options(save_every=save_every)
    with pytest.raises(KeyboardInterrupt):
        pretrain(chosen, documents=documents, console=console)
    assert f"interrupted in step 6 of 8; kept: log.jsonl, curves.png, {kept}" in (
        console.file.getvalue()
    )
    assert [row["step"] for row in read_log(chosen.folder / "log.jsonl")] == [2, 4]
    assert (chosen.folder / "model").exists() == (save_every is not None)
    assert (chosen.folder / "curves.png").exists()


def test_divergence_is_named_and_leaves_no_checkpoint(options, documents):
    chosen = options(learning_rate=1e30, clip_norm=1e30, warmup=0.0)
    with pytest.raises(RuntimeError, match="training diverged; lower learning_rate"):
        run(chosen, documents)
    assert not (chosen.folder / "model").exists()
