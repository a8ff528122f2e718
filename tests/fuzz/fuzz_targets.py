"""The targets of the fuzzer: functions that make folders of sound files and that read folders.

To add a kind of files, write a function that makes sound files in an empty folder and a function
that reads a folder, and add a `Target` to `TARGETS`. If the mutations of
``fuzz_mutations.any_file`` do not fit the files, give the target its own `mutate`. This function
gets the folder and a generator of random numbers, changes files of the folder, and describes the
changes. If the errors do not name a file, set `named` to a text that every acceptable error
contains; an empty text accepts any message.

The target of PTX texts is an example: it uses the mutations of ``ptxmachine/tests/_mutations.py``,
deletes all but the changed text, and launches the kernels of this text.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import dataclasses
import hashlib
import json
import shutil
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import fuzz_mutations
import pyarrow as pa
import torch
from pyarrow import parquet
from rich.console import Console

import ptxmachine as ptx
from fastbert.config import BertConfig
from fastbert.data import load_tokenizer, model_max_length, read_documents, stories, train_tokenizer
from fastbert.data.pieces import cut, read_piece
from fastbert.data.prepared.batches import PreparedBatches
from fastbert.data.prepared.corpus import PreparedCorpus, is_prepared
from fastbert.data.prepared.examples import PreparedExamples
from fastbert.data.records import read_records
from fastbert.data.squad import read_questions
from fastbert.finetuning.model import Source
from fastbert.finetuning.predict import _task as task_of
from fastbert.inference.embedder import read_recipe
from fastbert.io import checkpoint, families, safetensors_file
from fastbert.io import sentence_transformers_folder as stored
from fastbert.jobs import prepare as preparation
from fastbert.jobs.corpus_summary import read_summary
from fastbert.jobs.partial_output import PartialOutput
from fastbert.jobs.prepare_piece import PieceRecord
from fastbert.jobs.texts import Texts
from fastbert.modules import BertForSequenceClassification, BertModel
from fastbert.modules.dense import Dense
from fastbert.training import checkpoints, pretraining
from fastbert.training.log import read_log, rows_until
from fastbert.training.options import PretrainOptions
from fastbert.training.preparation import fingerprint, prepare
from fastbert.training.pretraining_run import PretrainingRun

sys.path.append(str(Path(__file__).resolve().parents[2] / "ptxmachine" / "tests"))
import _attempts
import _mutations

CONFIG = BertConfig(
    vocab_size=200,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=12,
    max_position_embeddings=16,
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of folder that the fuzzer damages and reads.

    Attributes:
        name: Name of the target, which also decides its random numbers.
        build: Makes sound files in an empty folder.
        read: Reads a folder.
        files: Glob patterns of the files that are changed.
        seal: Recomputes the checksums of a changed folder, which happens in half of the cases.
        special: Share of the changes that replace a file by something that is not a file.
        mutate: Replaces the usual mutations; called with the folder and the generator.
        named: Text that an acceptable error must contain; None means the path of the folder.
    """

    name: str
    build: Callable[[Path], object]
    read: Callable[[Path], object]
    files: tuple[str, ...] = ("**/*",)
    seal: Callable[[Path], object] | None = None
    special: float = 0.05
    mutate: Callable[[Path, Random], str] | None = None
    named: str | None = None

    def damage(self, folder: Path, chance: Random) -> str:
        """Change one file, or sometimes two, and return a description of the changes."""
        if self.mutate is not None:
            return self.mutate(folder, chance)
        done = []
        for _ in range(chance.choice((1, 1, 1, 2))):
            paths = sorted({p for glob in self.files for p in folder.glob(glob) if _is_small(p)})
            if not paths:
                break
            path = chance.choice(paths)
            special = chance.random() < self.special
            how = fuzz_mutations.something_else if special else fuzz_mutations.any_file
            try:
                what = how(path, chance)
            except (ValueError, LookupError, OSError, RecursionError, struct.error):
                # The second change cannot read the file, which the first change has damaged.
                what = "nothing"
            done.append(f"{path.relative_to(folder)}: {what}")
        if self.seal is not None and chance.random() < 0.5:
            try:
                self.seal(folder)
                done.append("sealed")
            except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
                done.append("not sealed")
        return "; ".join(done)


@cache
def tokenizer() -> Any:
    return train_tokenizer(stories(30, 0), CONFIG.vocab_size)


def texts() -> list[str]:
    return [" ".join(story) for story in stories(9, 2)]


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


# Models


def build_model(folder: Path) -> None:
    torch.manual_seed(0)
    BertModel(CONFIG).save_pretrained(folder)


def build_pickle(folder: Path) -> None:
    build_model(folder)
    torch.save(safetensors_file.read(folder / checkpoint.WEIGHTS), folder / checkpoint.PICKLED)
    (folder / checkpoint.WEIGHTS).unlink()


def build_sharded(folder: Path) -> None:
    build_model(folder)
    tensors = safetensors_file.read(folder / checkpoint.WEIGHTS)
    names = list(tensors)
    place = {n: f"model-{1 + (i > len(names) // 2)}.safetensors" for i, n in enumerate(names)}
    for shard in set(place.values()):
        part = {name: tensors[name].clone() for name in names if place[name] == shard}
        safetensors_file.write(folder / shard, part)
    (folder / checkpoint.WEIGHTS).unlink()
    write_json(folder / checkpoint.INDEX, {"weight_map": place})


def build_families(folder: Path) -> None:
    for family in families.FAMILIES:
        # DeBERTa v1 has no default that can be read, and other families ignore these keys.
        terms = {"relative_attention": True, "pos_att_type": "c2p"}
        content = families.write_config(families.read_config({"model_type": family, **terms}))
        write_json(folder / family / "config.json", content)


def read_families(folder: Path) -> None:
    for family in families.FAMILIES:
        checkpoint.read_settings(folder / family)


def build_sentences(folder: Path) -> None:
    build_model(folder)
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    listing = [
        {"idx": i, "name": str(i), "type": f"sentence_transformers.models.{kind}", "path": path}
        for i, (kind, path) in enumerate(zip(kinds, ("", "pool", "dense", "norm"), strict=True))
    ]
    settings = {"prompts": {"query": "the "}, "default_prompt_name": "query", "truncate_dim": 3}
    write_json(folder / "modules.json", listing)
    write_json(folder / "config_sentence_transformers.json", settings)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 9, "do_lower_case": True})
    write_json(folder / "pool/config.json", {"pooling_mode": ["mean", "cls"]})
    write_json(folder / "dense/config.json", {"in_features": 16, "out_features": 4, "bias": True})
    torch.manual_seed(1)
    tensors = {f"linear.{name}": t for name, t in torch.nn.Linear(16, 4).state_dict().items()}
    safetensors_file.write(folder / "dense/model.safetensors", tensors)


def read_sentences(folder: Path) -> None:
    for module in read_recipe(folder).modules:
        if isinstance(module, stored.Dense):
            Dense.from_folder(module)


def build_tokenizer(folder: Path) -> None:
    tokenizer().save(folder / "whole", max_length=16)
    shutil.copytree(folder / "whole", folder / "lines")
    (folder / "lines" / "tokenizer.json").unlink()


def read_tokenizers(folder: Path) -> None:
    for name in ("whole", "lines"):
        loaded = load_tokenizer(folder / name)
        model_max_length(folder / name)
        try:
            loaded.encode_within(9, "the dog ran to the garden", "and the cat went home")
        except ValueError as error:
            # The files were accepted, and only a text failed that the tokenizer cannot encode.
            if not str(error).startswith(("tokenizer: it fails", "max_length: got 9")):
                raise


def build_finetuned(folder: Path) -> None:
    torch.manual_seed(0)
    names = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    config = CONFIG.replace(num_labels=2, vocab_size=len(tokenizer()), extra=names)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer().save(folder, max_length=16)


def read_finetuned(folder: Path) -> None:
    source = Source(folder)
    task = task_of(source, "text", None, "tokens", {})
    source.labels()
    source.tokenizer(source.max_length())
    source.build(task, None, whole=True)


def mutate_commit(folder: Path, chance: Random) -> str:
    return fuzz_mutations.commit(folder / "model", folder / "outside", chance)


def build_committed(folder: Path) -> None:
    build_model(folder / "model")
    build_model(folder / "outside")


def read_committed(folder: Path) -> None:
    outside = folder / "outside"
    before = {path: path.read_bytes() for path in outside.iterdir()}
    try:
        BertModel.from_pretrained(folder / "model")
    finally:
        contents = {path: path.read_bytes() for path in outside.iterdir()}
        assert contents == before, "a file outside of the folder was changed"


# Runs


@cache
def run_to_restore() -> PretrainingRun:
    """Return a pre-training run before its first step, which can restore the checkpoint."""
    documents = [list(story) for story in stories(40, 0)]
    options = run_options(Path("unused"))
    accelerator = pretraining.start_processes("pre-training", options.folder)
    prepared = prepare(options, documents, lambda line: None, tokenizer())
    return PretrainingRun(options, prepared, fingerprint(documents), accelerator)


def run_options(folder: Path) -> PretrainOptions:
    return PretrainOptions(
        output=folder,
        preset="tiny",
        config={"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32},
        max_length=24,
        tokens_per_batch=96,
        steps=4,
        save_every=2,
        ema=0.9,
        held_out=0.0,
    )


def build_run(folder: Path) -> None:
    documents = [list(story) for story in stories(40, 0)]
    tokenizer().save(folder / "given")
    options = dataclasses.replace(run_options(folder / "out"), tokenizer=folder / "given")
    with torch.random.fork_rng():
        pretraining.pretrain(options, documents=documents, console=Console(quiet=True))
    home = folder / "out" / "checkpoints"
    shutil.move(home / "step-00000002", folder / "checkpoints" / "step-00000002")
    shutil.move(folder / "out" / "log.jsonl", folder)
    for name in ("out", "given"):
        shutil.rmtree(folder / name)
    run_to_restore()


def read_run(folder: Path) -> None:
    rows_until(folder / "log.jsonl", 2)
    read_log(folder / "log.jsonl")
    checkpoint = checkpoints.read(folder / "checkpoints" / "step-00000002")
    checkpoint.tokenizer()
    # This process is forked, so it restores its own copy of the run.
    run_to_restore().restore(checkpoint)


def seal_run(folder: Path) -> None:
    place = folder / "checkpoints" / "step-00000002"
    content = json.loads(_small(place / checkpoints.STATE))
    content.pop("checksum", None)
    for name in content["files"]:
        content["files"][name] = hashlib.sha256(_small(place / name)).hexdigest()
    write_json(
        place / checkpoints.STATE, {**content, "checksum": checkpoints._checksum_of(content)}
    )


def _is_small(path: Path) -> bool:
    # A change may have made the file as large as a terabyte.
    return path.is_file() and path.stat().st_size <= 1 << 24


def _small(path: Path) -> bytes:
    if not _is_small(path):
        raise OSError(f"{path}: too large to be sealed")
    return path.read_bytes()


# Corpora


def build_corpus(folder: Path) -> None:
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts() * 3), encoding="utf-8")
    tokenizer().save(folder / "given")
    # With the usual pieces of 32 MB, the whole corpus would be one piece.
    whole, preparation.PIECE_BYTES = preparation.PIECE_BYTES, 3000
    clean, preparation._Run._clean = preparation._Run._clean, lambda self: None
    try:
        options = {"tokenizer": folder / "given", "workers": 1}
        preparation.prepare(preparation.PrepareOptions(text, folder / "corpus", **options))
    finally:
        preparation.PIECE_BYTES, preparation._Run._clean = whole, clean
    for path in (folder / "given", folder / "text.jsonl", folder / "corpus" / "lengths.png"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_corpus(folder: Path) -> None:
    if not is_prepared(folder / "corpus"):
        return
    corpus = PreparedCorpus(folder / "corpus")
    corpus.verify()
    try:
        examples = PreparedExamples(corpus, max_length=24, seed=0)
        epoch = PreparedBatches(examples, tokens_per_batch=200).epoch(0)
    except ValueError as error:
        # These errors need not name the file: "documents: " means that the documents are too few or
        # too short, and "corpus: " that there are too few examples, or that the corpus is not
        # finished.
        if not str(error).startswith(("documents: ", "corpus: ")):
            raise
        return
    for number in range(min(3, len(epoch))):
        assert int(epoch[number]["input_ids"].max()) < corpus.tokenizer.vocab_size
    len(corpus[len(corpus) - 1])


def seal_corpus(folder: Path) -> None:
    path = folder / "corpus" / "manifest.json"
    content = json.loads(_small(path))
    for shard in content["shards"]:
        for part in shard["sha256"]:
            file = folder / "corpus" / "shards" / f"{shard['name']}.{part}"
            shard["sha256"][part] = hashlib.sha256(_small(file)).hexdigest()
    content["vocabulary"]["sha256"] = hashlib.sha256(
        _small(folder / "corpus" / "tokenizer" / "tokenizer.json")
    ).hexdigest()
    content.pop("fingerprint", None)
    text = json.dumps(content, sort_keys=True)
    write_json(path, {**content, "fingerprint": hashlib.sha256(text.encode()).hexdigest()})


def read_pieces(folder: Path) -> None:
    for path in sorted((folder / "corpus" / "shards").glob("*.json")):
        PieceRecord.load(path)
    read_summary(folder / "corpus" / "summary.json")


# Data


def build_data(folder: Path) -> None:
    rows = [{"text": t, "label": str(i % 2)} for i, t in enumerate(texts())]
    (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    for name, mark in (("b.csv", ","), ("c.tsv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ("text", "label"), delimiter=mark)
            writer.writeheader()
            writer.writerows(rows)
    table = {"text": [r["text"] for r in rows], "label": [r["label"] for r in rows]}
    parquet.write_table(pa.table(table), folder / "d.parquet")
    context = texts()[0]
    answer = {"text": context[4:9], "answer_start": 4}
    questions = [{"id": "1", "question": "Who?", "answers": [answer]}]
    article = {"paragraphs": [{"context": context, "qas": questions}]}
    write_json(folder / "e.json", {"data": [article, copy.deepcopy(article)]})
    (folder / "f.txt").write_text("\n".join(texts()), encoding="utf-8")


def read_data(folder: Path) -> None:
    read = {
        "a.jsonl": (records, documents, pieces, inputs),
        "b.csv": (records,),
        "c.tsv": (records,),
        "d.parquet": (records, documents, pieces, inputs),
        "e.json": (lambda path: list(read_questions(path)),),
        "f.txt": (documents, pieces, inputs),
    }
    for name, functions in read.items():
        for function in functions:
            function(folder / name)


def records(path: Path) -> None:
    list(read_records(path, ("text", "label")))


def documents(path: Path) -> None:
    list(read_documents(path))


def pieces(path: Path) -> None:
    for piece in cut([path], 500):
        list(read_piece(piece))


def inputs(path: Path) -> None:
    list(Texts(path, ("text",)))


def build_partial(folder: Path) -> None:
    home = folder / "rows.npy.partial"
    write_json(home / "state.json", {"fingerprint": {"a": 1}, "rows": 2, "totals": {"tokens": 5}})
    (home / "rows.npy").write_bytes(bytes(1000))


def read_partial(folder: Path) -> None:
    with PartialOutput(folder / "rows.npy", (4, 3), {"a": 1}) as partial:
        assert 0 <= partial.done <= 4


# Texts of PTX


def build_ptx(folder: Path) -> None:
    for name, text in _mutations.SOURCES.items():
        (folder / f"{name}.ptx").write_text(text, encoding="utf-8")


def mutate_ptx(folder: Path, chance: Random) -> str:
    """Change one text, and delete the others, whose launches would take most of the time."""
    chosen = chance.choice(sorted(folder.iterdir()))
    for path in folder.iterdir():
        if path != chosen:
            path.unlink()
    text = _mutations.mutated(chosen.read_text(encoding="utf-8"), chance.random())
    chosen.write_text(text, encoding="utf-8")
    return f"{chosen.name}: changed"


def read_ptx(folder: Path) -> None:
    """Launch the kernels of a PTX text; an error that the PTX machine reports is allowed."""
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(ptx.PtxFault):
            _attempts.launch_kernels(path.read_text(encoding="utf-8"))


TARGETS = {
    target.name: target
    for target in (
        Target("model", build_model, BertModel.from_pretrained),
        Target("pickle", build_pickle, BertModel.from_pretrained),
        Target("shards-of-weights", build_sharded, BertModel.from_pretrained),
        Target("families", build_families, read_families),
        Target("sentence-transformers", build_sentences, read_sentences),
        Target("tokenizer", build_tokenizer, read_tokenizers),
        Target("fine-tuned", build_finetuned, read_finetuned),
        Target("commit", build_committed, read_committed, mutate=mutate_commit),
        Target("checkpoint", build_run, read_run, seal=seal_run),
        Target(
            "corpus",
            build_corpus,
            read_corpus,
            ("corpus/manifest.json", "corpus/shards/*.*", "corpus/tokenizer/*"),
            seal_corpus,
        ),
        Target(
            "pieces", build_corpus, read_pieces, ("corpus/summary.json", "corpus/shards/*.json")
        ),
        # A pipe is a valid file of data, so no file is replaced by something else.
        Target("data", build_data, read_data, special=0.0),
        Target("partial-output", build_partial, read_partial, special=0.0),
        # The PTX machine gets a text instead of a path, so its errors name the line.
        Target("ptx", build_ptx, read_ptx, mutate=mutate_ptx, named="line "),
    )
}
