"""The files of a prepared corpus have the right content, and errors name damaged files."""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from fastbert.data.prepared import shards
from fastbert.data.prepared.corpus import PreparedCorpus, is_prepared
from fastbert.data.prepared.examples import PreparedExamples
from fastbert.data.prepared.shards import PARTS, Shard, ShardWriter


@pytest.fixture
def copy(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "copy")


def test_documents_are_the_ids_of_their_sentences(corpus, documents):
    assert len(corpus) == len(documents) + 1
    for number in (0, 17, len(documents) - 1):
        expected = corpus.tokenizer.encode_sentences(documents[number])
        assert [sentence.tolist() for sentence in corpus[number]] == expected
    assert [s.tolist() for s in corpus[-1]] == [s.tolist() for s in corpus[len(documents)]]
    with pytest.raises(IndexError):
        corpus[len(corpus)]
    assert {shard.tokens.dtype.name for shard in corpus.shards} == {"uint16"}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists them")
def test_the_shards_keep_no_file_open(prepared):
    """No shard keeps a file open; a corpus may have more shards than a process may open files."""
    before = set(os.listdir("/proc/self/fd"))
    corpus = PreparedCorpus(prepared)
    corpus.verify()
    assert len(corpus.shards) > 1
    assert corpus[len(corpus) - 1]
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_prepared_folder_is_recognised_by_its_manifest(prepared, tmp_path):
    assert is_prepared(prepared)
    assert not is_prepared(tmp_path)
    assert not is_prepared(prepared / "manifest.json")


@pytest.mark.parametrize("part", ["tokens", "sentences", "documents"])
def test_a_truncated_file_is_named_at_opening(copy, part):
    path = copy / "shards" / f"00001.{part}"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=rf"{path}: has [\d,]+ bytes, allowed: [\d,]+, as in the"):
        PreparedCorpus(copy)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=str(path)):
        PreparedCorpus(copy)


@pytest.mark.parametrize("part", ["tokens", "sentences", "documents"])
def test_a_flipped_bit_is_named_by_verify(copy, part):
    PreparedCorpus(copy).verify()
    path = copy / "shards" / f"00002.{part}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path}: its SHA-256 is not the one in the manifest"):
        PreparedCorpus(copy).verify()


def test_offsets_of_another_shard_are_named_at_opening(copy):
    path = copy / "shards" / "00001.sentences"
    values = np.fromfile(path, "<u4")
    values[-1] += 1
    values.tofile(path)
    with pytest.raises(ValueError, match=rf"{path}: counts from 0 to .*, allowed: from 0 to"):
        PreparedCorpus(copy)


def test_another_vocabulary_is_named_at_opening(copy):
    path = copy / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8") + "\n")
    with pytest.raises(ValueError, match=rf"{path}: its SHA-256 is not the one in the manifest"):
        PreparedCorpus(copy)


def test_a_vocabulary_of_a_terabyte_is_refused_before_its_checksum(copy):
    path = copy / "tokenizer" / "tokenizer.json"
    os.truncate(path, 1 << 40)
    with pytest.raises(ValueError, match=rf"{path}: it has 1,099,511,627,776 bytes, allowed: at m"):
        PreparedCorpus(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "zip"}, "got the format 'zip'"),
        ({"version": 2}, "got the version 2, allowed: 1"),
        ({"options": {"a": 1}}, "its content has another fingerprint than it says"),
        ({"dtype": "<u4"}, "not a whole manifest: dtype: got '<u4', allowed: '<u2'"),
        ({"dtype": "O"}, "not a whole manifest: dtype: got 'O'"),
        ({"shards": [{"name": "00000"}]}, "not a whole manifest: shard: got"),
        ({"shards": 5}, "not a whole manifest: shards: got a int, allowed: a list"),
        ({"vocabulary": []}, "not a whole manifest: vocabulary: got a list"),
        ({"vocabulary": {}}, "not a whole manifest: vocabulary: size: got None"),
        ({"vocabulary": {"size": 10**30}}, "not a whole manifest: vocabulary: size: got 1000"),
        ({"source": None}, "not a whole manifest: source"),
    ],
)
def test_a_damaged_manifest_is_named(copy, change, message):
    path = copy / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **change}))
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        PreparedCorpus(copy)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("name", value) for value in ("../../00001", "/etc/passwd", "", None, "1", "0" * 300)),
        *((p, v) for p in PARTS for v in (-1, 1.0, True, None, 1 << 32, 10**30, "5")),
        ("documents", 1 << 31),
        *(("sha256", value) for value in (None, {}, {"tokens": "a"}, [1], "x")),
    ],
)
def test_no_shard_asks_for_more_than_files_can_have(copy, name, value):
    """A wrong entry of a shard raises an error, even if the fingerprint matches the manifest."""
    path = copy / "manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["shards"][1][name] = value
    del content["fingerprint"]
    text = json.dumps(content, sort_keys=True)
    content["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{path}: not a whole manifest: .*{name}"):
        PreparedCorpus(copy)


def flip(path, place=0.5, bit=1):
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= bit
    path.write_bytes(content)


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_is_named_when_the_shard_is_first_used(copy, part):
    corpus = PreparedCorpus(copy)
    flip(copy / "shards" / f"00001.{part}")
    message = f"00001.{part}: its SHA-256 is not the one in the manifest"
    assert corpus[0]
    first = corpus.shards[0].record.documents
    with pytest.raises(ValueError, match=message):
        corpus[first]
    with pytest.raises(ValueError, match=message):
        PreparedExamples(corpus, max_length=64, seed=0).epoch(0)
    assert [shard.verified for shard in corpus.shards[:2]] == [True, False]


@pytest.mark.parametrize("share", [(0, 3), (1, 3), (2, 3), (0, 1)])
def test_the_shards_are_verified_once_in_shares(copy, monkeypatch, share):
    corpus, read, sizes = PreparedCorpus(copy), [], []
    monkeypatch.setattr(shards, "checksum", lambda path, advance: read.append(path) or "0")
    with pytest.raises(ValueError, match="its SHA-256 is not the one in the manifest"):
        corpus.verify(share=share)
    assert not any(shard.verified for shard in corpus.shards)
    monkeypatch.undo()
    corpus.verify(sizes.append, share)
    own = corpus.shards[share[0] :: share[1]]
    assert sum(sizes) == sum(shard.bytes() for shard in own)
    assert all(shard.verified for shard in corpus.shards)
    (copy / "shards" / "00000.tokens").unlink()
    assert corpus[0]


@pytest.mark.parametrize(
    ("documents", "change", "message"),
    [
        ([[[1, 2], [3]]], ("sentences", [0, 9, 3]), "a number is smaller than the one before it"),
        ([[[1]], [[2]]], ("documents", [0, 7, 2]), "a number is smaller than the one before it"),
        ([[[1, 8]]], None, "got the id 8, allowed: ids below 8, the size of the vocabulary"),
    ],
)
def test_files_with_the_right_checksum_and_wrong_numbers_are_named(
    tmp_path, documents, change, message
):
    with ShardWriter(tmp_path, "00000", "<u2") as writer:
        writer.add(documents)
        record = writer.finish()
    if change is not None:
        part, values = change
        path = tmp_path / f"00000.{part}"
        np.array(values, "<u4").tofile(path)
        sums = {**record.sha256, part: hashlib.sha256(path.read_bytes()).hexdigest()}
        record = dataclasses.replace(record, sha256=sums)
    with pytest.raises(ValueError, match=message):
        Shard(tmp_path, record, "<u2", 8).verify()


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_a_shard_without_a_document_and_one_with_large_ids_are_read(tmp_path, dtype):
    with ShardWriter(tmp_path, "00000", dtype) as writer:
        empty = Shard(tmp_path, writer.finish(), dtype)
    assert (len(empty.tokens), empty.sentences.tolist(), empty.documents.tolist()) == (0, [0], [0])
    largest = np.iinfo(dtype).max
    with ShardWriter(tmp_path, "00001", dtype) as writer:
        writer.add([[[1, int(largest)], [3]]])
        writer.add([[[4]]])
        shard = Shard(tmp_path, writer.finish(), dtype)
    shard.verify()
    assert shard.tokens.tolist() == [1, largest, 3, 4]
    assert shard.sentences.tolist() == [0, 2, 3, 4]
    assert shard.documents.tolist() == [0, 2, 3]


def test_a_shard_that_is_not_finished_leaves_no_file(tmp_path):
    with ShardWriter(tmp_path, "00000", "<u2") as writer:
        writer.add([[[1]]])
    assert not list(tmp_path.iterdir())
