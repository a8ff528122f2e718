"""``fastbert encode --ray`` works on a Ray cluster of two workers on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import ray
from pyarrow import parquet

from fastbert.data import stories
from fastbert.integrations.ray import Embed
from fastbert.jobs import encode_on_ray
from fastbert.jobs.encode_on_ray import Rows, read_shards
from fastbert.jobs.reporter import Reporter

OPTIONS = ("--normalize", "--layers", "1,-1", "--combine", "sum")


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def sentences(count: int, seed: int) -> list[str]:
    """Return `count` texts of different lengths."""
    story = [s for s in stories(count, seed) for s in s]
    return [" ".join(story[i : i + 1 + i % 3]) for i in range(count)]


def embeddings(path: Path) -> np.ndarray:
    return np.array(parquet.read_table(path)["embedding"].to_pylist(), dtype=np.float32)


@pytest.fixture
def shards(tmp_path):
    """Return a folder with one input file per format, and with one file that is no input."""
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = {name: sentences(count, count) for name, count in (("a", 300), ("b", 7), ("c", 600))}
    texts["a"][5] = ""
    (folder / "a.txt").write_text("\n".join(texts["a"]) + "\n")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts["b"]))
    parquet.write_table(pa.table({"text": texts["c"]}), folder / "c.parquet")
    (folder / "notes.md").write_text("no shard\n")
    return folder


@pytest.mark.every_case
def test_each_shard_becomes_the_file_of_the_plain_command(
    cluster, run, refused, model_folder, shards, tmp_path
):
    out = tmp_path / "out"
    result = run("encode", model_folder, shards, out, "--ray", "auto", *OPTIONS, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout[result.stdout.index("{") :])
    assert (summary["files"], summary["texts"], summary["workers"]) == (3, 907, 2)
    for source in (shards / "a.txt", shards / "b.jsonl", shards / "c.parquet"):
        plain = tmp_path / f"{source.stem}.npy"
        assert run("encode", model_folder, source, plain, *OPTIONS).exit_code == 0
        assert np.array_equal(embeddings(out / f"{source.stem}.parquet"), np.load(plain))
    assert sorted(p.name for p in out.iterdir()) == [
        *("a.parquet", "b.parquet", "c.parquet", "manifest.json")
    ]

    # The same command computes only the missing file.
    before = {name: (out / name).stat().st_mtime_ns for name in ("a.parquet", "c.parquet")}
    missing = embeddings(out / "b.parquet")
    (out / "b.parquet").unlink()
    result = run("encode", model_folder, shards, out, "--ray", "auto", *OPTIONS, "--json")
    assert result.exit_code == 0, result.output
    assert '"resumed": 2' in result.stdout
    assert "2 of 3 files" in result.output
    assert np.array_equal(embeddings(out / "b.parquet"), missing)
    assert before == {name: (out / name).stat().st_mtime_ns for name in before}

    # The continuing command may spell its options differently if their meaning is the same.
    same = ("--normalize", "--layers", "1,2", "--combine", "sum", "--pooling", "mean")
    result = run("encode", model_folder, shards, out, "--ray", "auto", *same, "--json")
    assert result.exit_code == 0, result.output
    assert '"resumed": 3' in result.stdout

    # Other options and other texts are refused, because the output files would not fit together.
    message = refused("encode", model_folder, shards, out, "--ray", "auto", "--pooling", "cls")
    assert "begun with another layers, combine, pooling, normalize, allowed" in message
    others = ("--normalize", "--layers", "0,2", "--combine", "sum")
    message = refused("encode", model_folder, shards, out, "--ray", "auto", *others)
    assert "begun with another layers, allowed" in message
    (shards / "b.jsonl").write_text('{"text": "another"}\n')
    message = refused("encode", model_folder, shards, out, "--ray", "auto", *OPTIONS)
    assert "begun with another texts" in message


@pytest.mark.every_case
def test_ids_are_carried_into_each_file(cluster, run, model_folder, tmp_path):
    source, out = tmp_path / "texts", tmp_path / "out"
    source.mkdir()
    texts = sentences(600, 0)
    rows = "".join(f'{i}x,"{text}"\n' for i, text in enumerate(texts))
    (source / "a.csv").write_text("key,text\n" + rows)
    lines = (json.dumps({"key": i, "text": text}) + "\n" for i, text in enumerate(texts))
    (source / "b.jsonl").write_text("".join(lines))
    result = run("encode", model_folder, source, out, "--ray", "auto", "--id-field", "key")
    assert result.exit_code == 0, result.output
    for name, kind in (("a", lambda i: f"{i}x"), ("b", int)):
        table = parquet.read_table(out / f"{name}.parquet")
        assert table["id"].to_pylist() == [kind(i) for i in range(600)]
        assert table.column_names == ["id", "embedding"]
    assert np.array_equal(embeddings(out / "a.parquet"), embeddings(out / "b.parquet"))
    again = run("encode", model_folder, source, out, "--ray", "auto")
    assert "begun with another --id-field, texts, allowed" in again.output


@pytest.mark.every_case
def test_a_run_on_a_new_cluster_ends_without_a_complaint(model_folder, shards, tmp_path):
    out = tmp_path / "out"
    # The command starts its own cluster, and does not join the cluster of the other tests.
    code = (
        "import ray; from fastbert.cli import app; begin = ray.init\n"
        "ray.init = lambda address=None, **o: begin(num_cpus=2, include_dashboard=False, **o)\n"
        "app()"
    )
    command = [sys.executable, "-c", code, "encode", model_folder, shards, out, "--ray", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "niceness 15" in done.stderr
    for complaint in ("Traceback", "deprecated in Ray", "not initialized"):
        assert complaint not in done.stderr


def test_the_batches_end_before_the_cluster(model_folder, shards, tmp_path, monkeypatch):
    events = []

    class Ray:
        is_initialized = staticmethod(lambda: False)
        cluster_resources = staticmethod(lambda: {"CPU": 4.0})
        init = staticmethod(lambda **_: events.append("init"))
        shutdown = staticmethod(lambda: events.append("shutdown"))

    def embeddings(*_):
        try:
            while True:
                yield np.zeros((100, 32), dtype=np.float32)
        finally:
            events.append("batches end")

    notes = []
    reporter = Reporter()
    monkeypatch.setattr(reporter, "note", notes.append)
    monkeypatch.setattr(encode_on_ray, "_require_ray", lambda: Ray)
    monkeypatch.setattr(encode_on_ray, "_embeddings", embeddings)
    encode_on_ray.run(str(model_folder), shards, tmp_path / "out", reporter=reporter)
    assert events == ["init", "batches end", "shutdown"]
    assert notes[0].startswith("2 workers of Ray with num_cpus=2 load the model; Ray gives them a")


@pytest.mark.parametrize("count", [3000, 25_000])
@pytest.mark.every_case
def test_a_killed_worker_costs_its_batch_only(
    cluster, run, model_folder, tmp_path, monkeypatch, count
):
    """All rows are right, although one worker is killed before it returns a batch."""
    source, out, killed = tmp_path / "texts", tmp_path / "out", tmp_path / "killed"
    source.mkdir()
    for number in range(4):
        lines = sentences(count, number)
        (source / f"{number}.txt").write_text("\n".join(lines) + "\n")

    class Mortal(Embed):  # Workers get a local class by value.
        def __call__(self, batch):
            result = super().__call__(batch)
            self.batches = getattr(self, "batches", 0) + 1
            if self.batches == count // 500 and not killed.exists():
                killed.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return result

    monkeypatch.setattr("fastbert.integrations.ray.Embed", Mortal)
    encode_on_ray.run(str(model_folder), source, out)
    assert killed.exists(), "no worker came to this batch"
    for number in range(4):
        plain = tmp_path / f"{number}.npy"
        assert run("encode", model_folder, source / f"{number}.txt", plain).exit_code == 0
        assert np.array_equal(embeddings(out / f"{number}.parquet"), np.load(plain))


@pytest.mark.every_case
def test_an_error_of_a_worker_names_the_text(cluster, refused, model_folder, shards, tmp_path):
    (shards / "d.txt").write_text("the dog ran.\n")
    folder = tmp_path / "out"
    shard = {
        "path": [str(shards / "d.txt")],
        "fields": [["text"]],
        "field": ["text"],
        "id_field": [None],
    }
    with pytest.raises(ValueError, match=r"d\.txt changed while it was read"):
        list(read_shards({**shard, "digest": ["another"]}))
    with pytest.raises(ValueError, match="field: got 'body', allowed: text"):
        Embed(str(model_folder), "body")({"text": ["a"]})
    with pytest.raises(ValueError, match="text: got None, allowed: texts"):
        Embed(str(model_folder))({"text": ["a", None]})
    data = ray.data.from_items([{"body": 3}])
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        data.map_batches(
            Embed,
            fn_constructor_args=(str(model_folder), "body"),
            compute=ray.data.ActorPoolStrategy(size=1),
        ).take_all()
    assert str(encode_on_ray.own_error(caught.value)) == "body: got np.int64(3), allowed: texts"
    assert not folder.exists()


def test_rows_are_taken_across_batches():
    batches = [np.full((n, 2), n, dtype=np.float32) for n in (3, 1, 4)]
    rows, taken = Rows(iter(batches)), []
    for count in (2, 5, 1):
        parts = list(rows.take(count, taken.append))
        assert sum(len(part) for part in parts) == count
    assert sum(taken) == 8
    with pytest.raises(ValueError, match="1 embeddings are missing"):
        list(rows.take(1, taken.append))


def test_bad_arguments_of_ray(refused, model_folder, shards, tmp_path, monkeypatch):
    out = tmp_path / "out"
    command = ("encode", model_folder)
    assert "allowed with --ray: a folder" in refused(
        *command, shards / "a.txt", out, "--ray", "auto"
    )
    (shards / "a.jsonl").write_text('{"text": "twice"}\n')
    assert "got a.jsonl and a.txt" in refused(*command, shards, out, "--ray", "auto")
    (shards / "a.jsonl").unlink()
    (shards / "e.jsonl").write_text('{"text": "fine"}\n{"txt": "no"}\n')
    assert "e.jsonl, line 2: expected" in refused(*command, shards, out, "--ray", "auto")
    (shards / "e.jsonl").unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no .txt" in refused(*command, empty, out, "--ray", "auto")
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert "a new or empty folder" in refused(*command, shards, out, "--ray", "auto")
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "install fastbert's extra 'ray'" in refused(*command, shards, out, "--ray", "auto")
