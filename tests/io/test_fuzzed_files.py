"""For a damaged copy of a sound file, a reader raises only ValueError, TypeError or OSError.

The error names the file, and the reader raises it within a time limit.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from fastbert.config import BertConfig
from fastbert.data import (
    load_tokenizer,
    model_max_length,
    read_documents,
    stories,
    train_tokenizer,
)
from fastbert.inference.embedder import read_recipe
from fastbert.io import checkpoint, families, safetensors_file
from fastbert.io import sentence_transformers_folder as stored
from fastbert.jobs.partial_output import PartialOutput
from fastbert.jobs.texts import Texts
from fastbert.modules import BertModel
from fastbert.modules.dense import Dense

COPIES = 24
# The limit of processor time for all copies of a file, in seconds; most files need less than 1 s.
SECONDS = 20
JUNK = (None, True, False, -1, 0, 3, 1.5, 1e400, 10**30, "x", "", [], {}, [[]], [5], {"a": {}})


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one small undamaged file of every kind."""
    folder = tmp_path_factory.mktemp("sound")
    tokenizer = train_tokenizer(stories(30, 0), 200)
    tokenizer.save(folder, max_length=16)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
    )
    BertModel(config).save_pretrained(folder)
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    listing = [
        {"idx": i, "name": str(i), "type": f"sentence_transformers.models.{kind}", "path": path}
        for i, (kind, path) in enumerate(zip(kinds, ("", "pool", "dense", "norm"), strict=True))
    ]
    settings = {"prompts": {"query": "the "}, "default_prompt_name": "query", "truncate_dim": 3}
    for name, content in {
        "modules.json": listing,
        "config_sentence_transformers.json": settings,
        "sentence_bert_config.json": {"max_seq_length": 9, "do_lower_case": True},
        "pool/config.json": {"pooling_mode": ["mean", "cls"], "include_prompt": False},
        "dense/config.json": {
            "in_features": 16,
            "out_features": 4,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
        "state.json": {"fingerprint": {"model": "a"}, "rows": 2, "totals": {"tokens": 5}},
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    projection = torch.nn.Linear(16, 4).state_dict()
    safetensors_file.write(
        folder / "dense/model.safetensors", {f"linear.{n}": t for n, t in projection.items()}
    )
    texts = [" ".join(story) for story in stories(9, 2)]
    (folder / "texts.txt").write_text("\n".join(texts))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    parquet.write_table(pa.table({"id": range(len(texts)), "text": texts}), folder / "t.parquet")
    return folder


def pickled(folder: Path) -> None:
    torch.save(safetensors_file.read(folder / checkpoint.WEIGHTS), folder / checkpoint.PICKLED)
    (folder / checkpoint.WEIGHTS).unlink()


def sharded(folder: Path) -> None:
    names = safetensors_file.read(folder / checkpoint.WEIGHTS)
    (folder / checkpoint.WEIGHTS).rename(folder / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (folder / checkpoint.INDEX).write_text(json.dumps(index))


def read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    model_max_length(folder)
    tokenizer.encode_within(9, "the dog ran to the garden")
    tokenizer.encode_within(9, "the dog", "and the cat went home")


def read_modules(folder: Path) -> None:
    for module in read_recipe(folder).modules:
        if isinstance(module, stored.Dense):
            Dense.from_folder(module)


def read_state(folder: Path) -> None:
    kept = folder / "rows.npy.partial"
    kept.mkdir(exist_ok=True)
    shutil.copy(folder / "state.json", kept)
    (kept / "rows.npy").write_bytes(bytes(1000))
    with PartialOutput(folder / "rows.npy", (4, 3), {"model": "a"}) as partial:
        assert 0 <= partial.done <= 4


# A row has the file, the function that reads the file, and the function that prepares its folder.
READERS: dict[str, tuple[str, Callable[[Path], Any], Callable[[Path], Any] | None]] = {
    "config": ("config.json", BertModel.from_pretrained, None),
    "weights": ("model.safetensors", BertModel.from_pretrained, None),
    "pickle": ("pytorch_model.bin", BertModel.from_pretrained, pickled),
    "index": ("model.safetensors.index.json", BertModel.from_pretrained, sharded),
    "tokenizer": ("tokenizer.json", read_tokenizer, None),
    "tokenizer settings": ("tokenizer_config.json", read_tokenizer, None),
    "vocabulary": (
        "vocab.txt",
        read_tokenizer,
        lambda folder: (folder / "tokenizer.json").unlink(),
    ),
    "modules": ("modules.json", read_modules, None),
    "sentence settings": ("config_sentence_transformers.json", read_modules, None),
    "encoder settings": ("sentence_bert_config.json", read_modules, None),
    "pooling": ("pool/config.json", read_modules, None),
    "dense": ("dense/config.json", read_modules, None),
    "dense weights": ("dense/model.safetensors", read_modules, None),
    "lines": ("texts.txt", lambda folder: list(Texts(folder / "texts.txt", ("text",))), None),
    "objects": ("texts.jsonl", lambda folder: list(Texts(folder / "texts.jsonl", ("text",))), None),
    "rows": ("t.parquet", lambda folder: list(Texts(folder / "t.parquet", ("text",))), None),
    "documents": ("texts.txt", lambda folder: list(read_documents(folder / "texts.txt")), None),
    "records": ("texts.jsonl", lambda folder: list(read_documents(folder / "texts.jsonl")), None),
    "columns": ("t.parquet", lambda folder: list(read_documents(folder / "t.parquet")), None),
    "partial rows": ("state.json", read_state, None),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_an_error_that_names_it(kind: str, sound: Path, tmp_path: Path) -> None:
    name, read, prepare = READERS[kind]
    folder = tmp_path / "copy"
    shutil.copytree(sound, folder)
    if prepare is not None:
        prepare(folder)
    whole = (folder / name).read_bytes()
    start = time.process_time()
    for content in damaged(whole, name, random.Random(kind)):
        (folder / name).write_bytes(content)
        judge(functools.partial(read, folder), folder)
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("family", families.FAMILIES)
def test_settings_of_every_family(family: str, tmp_path: Path) -> None:
    # DeBERTa v1 has no default that can be read, and other families ignore these keys.
    terms = {"relative_attention": True, "pos_att_type": "c2p"}
    content = families.write_config(families.read_config({"model_type": family, **terms}))
    whole = json.dumps(content).encode()
    start = time.process_time()
    for changed in replaced(whole, random.Random(family), 150):
        config = checkpoint.Stored(tmp_path, json.loads(changed), {}).config
        judge(functools.partial(config, {}), tmp_path)
    assert time.process_time() - start < SECONDS


def judge(read: Callable[[], Any], folder: Path) -> None:
    """Check that `read` returns, or raises one of the three errors with the name of the folder."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
    except (ValueError, TypeError, OSError) as error:
        if str(folder) not in str(error):
            pytest.fail(f"the file is not named: {error!r}")


def damaged(whole: bytes, name: str, chance: random.Random) -> Iterator[bytes]:
    for _ in range(COPIES):
        flipped = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            # Binary files have their headers at both ends, so most of the damage is there.
            near = chance.choice((200, 2000, len(whole)))
            place = chance.randrange(min(near, len(whole)))
            flipped[chance.choice((place, -1 - place))] ^= 1 << chance.randrange(8)
        yield bytes(flipped)
    for _ in range(COPIES // 2):
        yield whole[: chance.randrange(len(whole))]
    if name.endswith(".json"):
        yield from replaced(whole, chance, COPIES)


def replaced(whole: bytes, chance: random.Random, copies: int) -> Iterator[bytes]:
    """Yield copies of a JSON file in which one value is replaced or removed."""
    for _ in range(copies):
        content = json.loads(whole)
        holder: Any = {"": content}
        key: Any = ""
        while chance.random() < 0.8 and isinstance(holder[key], (dict, list)) and holder[key]:
            holder = holder[key]
            key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if chance.random() < 0.2 and holder is not content and key != "":
            del holder[key]
        else:
            holder[key] = chance.choice(JUNK)
            content = holder[""] if key == "" else content
        yield json.dumps(content).encode()
