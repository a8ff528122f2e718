"""The files of a prepared corpus: what they hold, and how damage is found and named."""

import json
import shutil

import numpy as np
import pytest

from fastbert.data.prepared.corpus import PreparedCorpus, is_prepared
from fastbert.data.prepared.shards import Shard, ShardWriter


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "zip"}, "got the format 'zip'"),
        ({"version": 2}, "got the version 2, allowed: 1"),
        ({"dtype": "<u4"}, "its content has another fingerprint than it says"),
        ({"shards": [{"name": "00000"}]}, "not a whole manifest"),
    ],
)
def test_a_damaged_manifest_is_named(copy, change, message):
    path = copy / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **change}))
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        PreparedCorpus(copy)


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
