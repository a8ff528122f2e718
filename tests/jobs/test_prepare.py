"""Preparing a corpus gives the same bytes after interruptions, and loses no text."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from quick_cases import long_case

from fastbert.data import stories
from fastbert.data.prepared.corpus import PreparedCorpus, is_prepared
from fastbert.data.prepared.shards import ShardWriter
from fastbert.jobs import prepare as job
from fastbert.jobs.prepare import PrepareOptions, prepare
from fastbert.jobs.prepare_piece import EDGES
from fastbert.jobs.reporter import Reporter

ROOT = Path(__file__).resolve().parents[2]


class Notes(Reporter):
    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


@pytest.fixture
def documents():
    return list(stories(240, 1))


@pytest.fixture
def text(tmp_path, documents):
    """Return a folder with an empty file and three files of 80 stories, each with a heading."""
    home = tmp_path / "text"
    (home / "inner").mkdir(parents=True)
    parts = documents[:80], documents[80:160], documents[160:]
    (home / "a.txt").write_text("".join("# Story\n" + "\n".join(d) + "\n\n" for d in parts[0]))
    lines = [json.dumps({"text": "Story\n\n" + " ".join(d), "id": 1}) for d in parts[1]]
    (home / "b.jsonl").write_text("\n".join(lines))
    (home / "empty.txt").touch()
    table = pa.table({"text": ["Story\n\n" + " ".join(d) for d in parts[2]]})
    pq.write_table(table, home / "inner" / "c.parquet", row_group_size=30)
    return home


@pytest.fixture(autouse=True)
def small_pieces(quick_pictures, monkeypatch):
    """Cut the texts into small pieces, and draw only in tests that request the fixture `drawn`."""
    monkeypatch.setattr(job, "PIECE_BYTES", 8000)


@pytest.fixture
def options(text, tmp_path):
    def make(output="out", **changes):
        fields = {"vocab_size": 300, "workers": 1, **changes}
        return PrepareOptions(fields.pop("text", text), tmp_path / output, **fields)

    return make


def content(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# Each row has a paragraph in one of eight scripts, and the number of its sentences, counted by
# hand.
SCRIPTS = (
    ("It rained. We stayed at home! Did you read? Mr. Smith did.", 4),
    ("Шёл дождь. Он жил в 1990 г. в Москве.", 2),
    ("بارش ہو رہی تھی۔ کیا تم نے کتاب پڑھی؟ ہاں میں نے پڑھی۔", 3),
    ("बारिश हो रही थी। हम घर पर रहे। क्या तुमने किताब पढ़ी?", 3),
    ("下雨了。我们在家！你读了书吗？", 3),
    ("Անձրև էր գալիս։ Մենք տանը մնացինք։", 2),
    ("ዝናብ ነበር። ቤት ቆየን። አዎ አነበብኩት።", 3),
    ("เมื่อวานนี้ฝนตกหนักมาก เราจึงอยู่ที่บ้านทั้งวัน เธออ่านหนังสือหรือยัง", 3),
)


def test_a_corpus_of_eight_scripts_loses_no_language(tmp_path):
    """No sentence is lost in any script; paragraphs are repeated to train a vocabulary."""
    text = tmp_path / "text"
    text.mkdir()
    for number, (paragraph, _) in enumerate(SCRIPTS):
        (text / f"{number}.txt").write_text(f"{paragraph}\n\n" * 20, encoding="utf-8")
    summary = prepare(PrepareOptions(text, tmp_path / "out", vocab_size=600, workers=1))
    assert summary["sentences"] == 20 * sum(count for _, count in SCRIPTS) == 460
    assert summary["documents"] == 20 * len(SCRIPTS)
    assert summary["documents_without_passage"] == 0
    assert summary["lines_left_out"] == {}
    assert summary["markup_left_out"] == {"tags": 0, "parts of markup": 0}


def test_markup_is_counted_and_text_with_its_form_is_kept(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("It <b>rains</b>.<ref>Old.</ref> A List<String> is p<q was, and r>s.\n\n" * 40)
    summary = prepare(PrepareOptions(text, tmp_path / "out", vocab_size=300, workers=1))
    assert summary["sentences"] == 80
    assert summary["markup_left_out"] == {"tags": 80, "parts of markup": 40}
    corpus = PreparedCorpus(tmp_path / "out")
    sentence = "A List<String> is p<q was, and r>s."
    assert [s.tolist() for s in corpus[0]][1:] == corpus.tokenizer.encode_sentences([sentence])


@pytest.mark.parametrize("end", [".gz", ".xz"])
def test_compressed_files_give_the_same_corpus(options, text, tmp_path, end):
    prepare(options())
    for path in (text / "a.txt", text / "b.jsonl"):
        pack = gzip.compress if end == ".gz" else lzma.compress
        path.with_name(path.name + end).write_bytes(pack(path.read_text().encode("utf-16")))
        path.unlink()
    prepare(options("packed"))
    plain, packed = PreparedCorpus(options().output), PreparedCorpus(options("packed").output)
    assert len(plain) == len(packed) == 240
    for number in range(240):
        first, second = plain[number], packed[number]
        assert [s.tolist() for s in first] == [s.tolist() for s in second]


def test_the_corpus_has_the_sentences_of_all_files(drawn, options, documents):
    summary = prepare(options())
    corpus = PreparedCorpus(options().output)
    corpus.verify()
    assert len(corpus) == summary["documents"] == 240
    assert len(corpus.shards) == summary["shards"] > 5
    for number, document in enumerate(documents):
        assert [s.tolist() for s in corpus[number]] == corpus.tokenizer.encode_sentences(document)
    assert summary["sentences"] == sum(map(len, documents))
    assert summary["tokens"] == sum(len(s) for n in range(240) for s in corpus[n])
    assert summary["lines_left_out"] == {"headings": 240}
    assert summary["documents_without_passage"] == 0
    for part in ("sentences", "documents"):
        assert sum(summary["lengths"][part].values()) == summary[part]
    assert json.loads((corpus.folder / "summary.json").read_text(encoding="utf-8")) == summary
    assert (corpus.folder / "lengths.png").read_bytes()[1:4] == b"PNG"
    names = {path.name for path in corpus.folder.iterdir()}
    assert names == {"manifest.json", "summary.json", "lengths.png", "shards", "tokenizer"}


def test_several_processes_give_the_same_bytes(options):
    prepare(options())
    prepare(options("two", workers=2))
    assert content(options("two").output) == content(options().output)


KILLED = """
import sys
from pathlib import Path
from fastbert.jobs import prepare as job

if __name__ == "__main__":
    job.PIECE_BYTES = 8000
    options = dict(vocab_size=300, workers=int(sys.argv[3]))
    job.prepare(job.PrepareOptions(Path(sys.argv[1]), Path(sys.argv[2]), **options))
"""


@pytest.mark.parametrize("workers", [long_case(1), 2])
def test_a_killed_run_resumes_to_the_same_bytes(options, text, tmp_path, workers):
    script = tmp_path / "run.py"
    script.write_text(KILLED)
    output = options("cut").output
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.Popen(
        [sys.executable, script, text, output, str(workers)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while len(list(output.glob("shards/[0-9]*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    run.kill()
    assert run.wait() == -signal.SIGKILL
    done = sorted(output.glob("shards/[0-9]*.json"))
    assert len(done) >= 2
    with pytest.raises(ValueError, match="is not finished, allowed: a corpus after the same"):
        is_prepared(output)
    times = {path: path.with_suffix(".tokens").stat().st_mtime_ns for path in done}
    notes = Notes()
    prepare(options("cut"), notes)
    assert any(line.startswith("resuming after ") for line in notes.lines)
    assert {path: path.with_suffix(".tokens").stat().st_mtime_ns for path in done} == times
    prepare(options())
    assert content(output) == content(options().output)


def test_a_finished_corpus_is_verified_and_not_prepared_again(options):
    first = prepare(options())
    before = content(options().output)
    notes = Notes()
    assert prepare(options(), notes) == first
    assert "is complete already; its checksums are compared" in notes.lines[-1]
    path = options().output / "shards" / "00001.tokens"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=rf"{path}: its SHA-256 is not the one in the manifest"):
        prepare(options())
    prepare(options(overwrite=True))
    assert content(options().output) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 310}, "vocab_size: got 310, but the corpus in .* has 300; allowed"),
        ({"lowercase": False}, "lowercase: got False, but"),
        ({"seed": 3}, "seed: got 3, but"),
    ],
)
def test_other_options_are_refused_by_name(options, changes, message):
    prepare(options())
    with pytest.raises(ValueError, match=message):
        prepare(options(**changes))


def test_other_text_is_refused_once_the_corpus_is_finished(options, text):
    prepare(options())
    (text / "d.txt").write_text("It rains. We stay in.")
    with pytest.raises(ValueError, match=r"files: got 5, but the corpus in .* has 4"):
        prepare(options())


def test_a_given_tokenizer_is_taken_and_another_is_refused(options, tmp_path):
    prepare(options("first"))
    folder = options("first").output / "tokenizer"
    prepare(options(tokenizer=folder))
    actual, expected = content(options().output), content(options("first").output)
    shards = {path for path in expected if path.parts[0] in ("shards", "tokenizer")}
    assert {path: actual[path] for path in shards} == {path: expected[path] for path in shards}
    with pytest.raises(ValueError, match=r"tokenizer: got None, but the corpus in .* has '"):
        prepare(options())


def test_a_broken_line_keeps_the_finished_pieces_and_is_read_again_when_it_is_repaired(
    options, text, monkeypatch
):
    path = text / "b.jsonl"
    sound = path.read_bytes()
    broken = bytearray(sound)
    place = broken.rindex(b'{"text"')
    broken[place : place + 1] = b"!"
    path.write_bytes(broken)
    # The sample from which the vocabulary is trained ends before the broken line.
    monkeypatch.setattr(job, "SAMPLE_BYTES", 5000)
    with pytest.raises(ValueError, match=rf"{path}, line 80: not valid JSON"):
        prepare(options())
    done = sorted(p.name for p in options().output.glob("shards/[0-9]*.json"))
    assert len(done) > 2
    assert not list(options().output.glob("shards/.*"))
    path.write_bytes(sound)
    notes = Notes()
    prepare(options(), notes)
    assert any(line.startswith("resuming after ") for line in notes.lines)
    prepare(options("whole"))
    assert content(options().output) == content(options("whole").output)


def test_an_error_in_a_process_of_the_pool_is_the_same(options, text, tmp_path):
    prepare(options("first"))
    (text / "b.jsonl").write_bytes(b'{"text": "It rains."}\n{"text": \xff}\n')
    tokenizer = options("first").output / "tokenizer"
    with pytest.raises(ValueError, match=r"b.jsonl, line 2: not UTF-8"):
        prepare(options(tokenizer=tokenizer, workers=2))


def test_a_full_disk_names_the_file_and_the_same_command_continues(options, monkeypatch):
    prepare(options("whole"))
    write = ShardWriter.add
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def add(self, documents):
        # From the third shard on, the limit for a file is 100 bytes.
        limit = 100 if self._name >= "00002" else before[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            write(self, documents)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", add)
        with pytest.raises(OSError, match=r"File too large: .*/shards/00002.tokens"):
            prepare(options())
    assert sorted(path.name for path in options().output.glob("shards/[0-9]*.json")) == [
        "00000.json",
        "00001.json",
    ]
    assert not list(options().output.glob("shards/.*"))
    prepare(options())
    assert content(options().output) == content(options("whole").output)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 63}, "vocab_size: got 63, allowed: an integer >= 64"),
        ({"workers": 0}, "workers: got 0, allowed: an integer >= 1"),
        ({"output": "text"}, "OUT: .*text lies in the text, allowed: a folder elsewhere"),
        ({"output": "text/out"}, "OUT: .*out lies in the text"),
    ],
)
def test_bad_options_are_refused_and_write_nothing(options, text, change, message):
    before = content(text.parent)
    with pytest.raises(ValueError, match=message):
        prepare(options(**change))
    assert content(text.parent) == before


def test_a_folder_with_other_files_is_refused(options):
    options().output.mkdir()
    (options().output / "thesis.tex").touch()
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"OUT: .* has files of something else"):
            prepare(options(overwrite=overwrite))


WRONG = ("[]", "{}", "{", "null", '{"key": 5}', "[" * 5000)


def test_a_damaged_summary_is_named(options):
    chosen = options()
    prepare(chosen)
    for content in WRONG:
        (chosen.output / "summary.json").write_text(content)
        with pytest.raises(ValueError, match=rf"^{chosen.output}/summary\.json: "):
            prepare(chosen)


def test_a_damaged_record_of_a_piece_is_named(tmp_path):
    edges = [0] * len(EDGES)
    shard = {"name": "00000", "tokens": 3, "sentences": 2, "documents": 1}
    shard["sha256"] = dict.fromkeys(("tokens", "sentences", "documents"), "0")
    sound = {"key": "a", "shard": shard, "read": 1, "dropped": {"heading": 2}}
    sound["lengths"] = {"sentences": edges, "documents": edges}
    path = tmp_path / "00000.json"
    path.write_text(json.dumps(sound))
    assert job.PieceRecord.load(path).read == 1
    changes = [
        *({"shard": value} for value in (None, {}, [], {**shard, "tokens": 10**30})),
        *({name: value} for name in ("read", "dropped") for value in (None, "1", -1, [1])),
        *({"lengths": value} for value in (None, {}, {"sentences": edges}, {"sentences": 5})),
        {"lengths": {"sentences": [*edges, 0], "documents": edges}},
        {"lengths": {"sentences": [1.5, *edges[1:]], "documents": edges}},
        {"key": 5},
        {"more": 1},
    ]
    for text in (*WRONG, *(json.dumps({**sound, **change}) for change in changes)):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"^{path}: "):
            job.PieceRecord.load(path)


@pytest.mark.parametrize("name", ["shards", "tokenizer"])
def test_a_link_in_the_place_of_a_folder_is_refused_and_not_followed(options, tmp_path, name):
    chosen = options()
    prepare(chosen)
    outside = tmp_path / "outside"
    outside.mkdir()
    for file in ("mine.json", ".mine", "mine.txt"):
        (outside / file).write_text("mine")
    before = content(outside)
    (chosen.output / name).rename(tmp_path / "moved")
    (chosen.output / name).symlink_to(outside)
    for unfinished in (False, True):
        if unfinished:
            (chosen.output / "manifest.json").rename(chosen.output / "run.json")
        with pytest.raises(ValueError, match=rf"out/{name} is a link, allowed: a folder"):
            prepare(chosen)
        assert content(outside) == before
    prepare(options(overwrite=True))
    assert not (chosen.output / name).is_symlink()
    assert content(outside) == before


def test_text_without_a_passage_is_refused(options, tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("- one\n- two\n")
    with pytest.raises(ValueError, match=r"list.txt has no passage, allowed: files with sentences"):
        prepare(options(text=path))
