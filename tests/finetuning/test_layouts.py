"""Training and prediction accept data in the layouts of public data sets."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pytest
from finetuning_problems import reviews, run, write_rows
from pyarrow import parquet

from fastbert.finetuning import predict
from fastbert.finetuning.splits import find_parts

ROWS = reviews(40, 0)
SENTENCES = [
    (["fox", "saw", "the", "mill"], ["B-ANI", "O", "O", "B-LOC"]),
    (["old", "Dog", "Xyzzy", "ran"], ["O", "B-ANI", "I-ANI", "O"]),
    (["the", "river", "and", "hen"], ["O", "B-LOC", "O", "B-ANI"]),
]


def said(model, data, tmp_path, **options):
    """Return the objects that `predict` writes for the file `data`."""
    output = tmp_path / "said.jsonl"
    predict(model, data, output, **options)
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def lines_of(path, lines, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(encoding))
    return path


def test_glue_with_quotation_marks_and_a_test_part_without_labels(classify, tmp_path):
    """Quotation marks in a GLUE file are literal; a test part without labels is not evaluated."""
    data = tmp_path / "glue"
    rows = [[f'"{row["text"]}', str(int(row["label"] == "place"))] for row in ROWS]
    lines_of(data / "train.tsv", ["sentence\tlabel", *map("\t".join, rows)])
    lines_of(data / "dev.tsv", ["sentence\tlabel", *map("\t".join, rows[:10])], "utf-8-sig")
    lines_of(data / "test.tsv", ["index\tsentence", '0\t"A fox', "1\tmill"])
    options = classify(data, text_field="sentence", labels=("animal", "place"))
    result, shown = run(options)
    assert "40 train, 10 validation" in shown
    assert "test part: it is not judged, because it has no labels" in shown
    assert f"{data / 'test.tsv'}, line 1: no column 'label'" in shown
    assert set(result.figures) == {"train", "validation"}
    assert len(said(result.model, data / "test.tsv", tmp_path, text_field="sentence")) == 2


def test_cola_without_names_of_columns(classify, tmp_path):
    lines = [f"gj04\t{int(row['label'] == 'place')}\t\t{row['text']}" for row in ROWS]
    data = lines_of(tmp_path / "cola" / "train.tsv", lines)
    result, shown = run(classify(data, text_field="4", label_field="2", epochs=1))
    assert "36 train, 4 validation" in shown
    assert len(said(result.model, data, tmp_path, text_field="4")) == 40


@pytest.mark.parametrize("label", [-1, "", None])
def test_a_test_part_whose_labels_its_publisher_keeps(classify, tmp_path, label):
    """A test part in which no row has a label is not evaluated; GLUE on the hub has -1 there."""
    data = tmp_path / "data"
    write_rows(data / "train.jsonl", [{**row, "label": i % 2} for i, row in enumerate(ROWS)])
    write_rows(data / "test.jsonl", [{**row, "label": label} for row in ROWS[:3]])
    result, shown = run(classify(data, epochs=1))
    assert f"no labels: {data / 'test.jsonl'}: label is {label} everywhere" in shown
    assert "test" not in result.figures
    # If one row has a label, each row without a label is an error.
    rows = [{**row, "label": label} for row in ROWS[:3]] + [{**ROWS[3], "label": 1}]
    write_rows(data / "test.jsonl", rows)
    with pytest.raises(ValueError, match=rf"{data / 'test.jsonl'}, line 1: got the label"):
        run(classify(data, epochs=1, overwrite=True))


def test_a_label_named_minus_one_is_a_label(classify, tmp_path):
    data = tmp_path / "data"
    rows = [{**row, "label": ("-1", "1")[i % 2]} for i, row in enumerate(ROWS)]
    write_rows(data / "train.csv", rows)
    write_rows(data / "test.csv", rows[:1])
    assert "test" in run(classify(data, epochs=1))[0].figures


def test_blanks_around_labels_and_names_of_columns(classify, tmp_path):
    lines = ["text, label", *(f"{row['text']}, {row['label']}" for row in ROWS)]
    lines += [f"{row['text']},{row['label']}  " for row in ROWS]
    result, _ = run(classify(lines_of(tmp_path / "train.csv", lines), epochs=1))
    config = json.loads((result.model / "config.json").read_text())
    assert list(config["id2label"].values()) == ["animal", "place"]


def test_a_spreadsheet_with_semicolons_in_utf_16(classify, tmp_path):
    lines = ["id;text;label", *(f'{i};"{r["text"]}; or";{r["label"]}' for i, r in enumerate(ROWS))]
    data = lines_of(tmp_path / "train.csv", lines, "utf-16")
    result, shown = run(classify(data, epochs=1))
    assert "36 train, 4 validation" in shown
    assert said(result.model, data, tmp_path) == said(
        result.model, lines_of(tmp_path / "utf-8.csv", lines), tmp_path
    )


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl.gz", ".csv"])
def test_shards_are_one_part_and_a_missing_one_is_named(classify, tmp_path, suffix):
    data = tmp_path / "data"
    for number in range(3):
        plain = data / f"train-{number:05}-of-00003{suffix.removesuffix('.gz')}"
        write_rows(plain, ROWS[number * 10 :][:10])
        if suffix.endswith(".gz"):
            plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
            plain.unlink()
    write_rows(data / "test-00000-of-00001.parquet", ROWS)
    parts = find_parts(data, {}, (".csv", ".jsonl", ".parquet"), folders=True)
    assert [path.name[:20] for path in parts["train"]] == [
        f"train-{number:05}-of-00003" for number in range(3)
    ]
    result, shown = run(classify(data, epochs=1, held_out=0.0))
    assert "30 train, 40 test" in shown
    assert result.figures["train"]["examples"] == 30
    whole = run(
        classify(
            write_rows(tmp_path / "train.jsonl", ROWS[:30]),
            epochs=1,
            held_out=0.0,
            output=tmp_path / "other",
        )
    )[0]
    assert whole.figures["train"] == result.figures["train"]
    (data / f"train-00001-of-00003{suffix}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"train-00001-of-00003{suffix} is missing"):
        find_parts(data, {}, (".csv", ".jsonl", ".parquet"), folders=True)


def column_lines(layout: str) -> list[str]:
    """Return the lines of the sentences in `layout`, a layout with one word per line."""
    lines = {"CoNLL-2003": ["-DOCSTART- -X- -X- O", ""]}.get(layout, [])
    for words, tags in SENTENCES * 12:
        if layout == "GermEval":
            lines.append("#\thttp://example.org\t[2010-03-05]")
        elif layout == "MultiCoNER":
            lines.append("# id 0e10ab4a domain=train")
        elif layout == "CoNLL-U":
            lines += ["# sent_id = 1", f"# text = {' '.join(words)}"]
            lines.append("1-2\t" + " ".join(words[:2]) + "\t_" * 8)
        for number, (word, tag) in enumerate(zip(words, tags, strict=True), start=1):
            lines.append(
                {
                    "CoNLL-2003": f"{word} NN I-NP {tag}",
                    "GermEval": f"{number}\t{word}\t{tag}\tO",
                    "MultiCoNER": f"{word} _ _ {tag} ",
                    "CoNLL-U": f"{number}\t{word}\t_\t{tag}\tNN\t_\t0\troot\t_\t_",
                }[layout]
            )
        lines.append("")
    return lines


@pytest.mark.filterwarnings("ignore:.*has the words")
@pytest.mark.parametrize(
    ("layout", "train", "dev"),
    [
        ("CoNLL-2003", "eng.train", "eng.testa"),
        ("GermEval", "NER-de-train.tsv", "NER-de-dev.tsv"),
        ("MultiCoNER", "en_train.conll", "en_dev.conll"),
        ("CoNLL-U", "en_ewt-ud-train.conllu", "en_ewt-ud-dev.conllu"),
    ],
)
def test_layouts_of_columns(tag, tmp_path, layout, train, dev):
    data = tmp_path / layout
    lines_of(data / train, column_lines(layout))
    lines_of(data / dev, column_lines(layout)[: len(column_lines(layout)) // 2])
    result, shown = run(tag(data, epochs=8))
    assert "36 train, 18 validation" in shown
    assert result.figures["validation"]["f1"] == 1.0
    predictions = said(result.model, data / dev, tmp_path)
    assert [(row["words"], row["tags"]) for row in predictions] == SENTENCES * 6


@pytest.fixture
def tagger(tag, tmp_path):
    data = lines_of(tmp_path / "tagged" / "train.conll", column_lines("MultiCoNER"))
    return run(tag(data, epochs=8))[0].model


@pytest.mark.filterwarnings("ignore:.*has the words")
def test_plain_sentences_are_tagged(tagger, tmp_path):
    sentences = [" ".join(words) for words, _ in SENTENCES]
    plain = lines_of(tmp_path / "sentences.txt", sentences)
    predictions = said(tagger, plain, tmp_path)
    assert [(row["words"], row["tags"]) for row in predictions] == SENTENCES
    assert [row["entities"] for row in predictions[1:2]] == [
        [
            {
                "type": "ANI",
                "words": ["Dog", "Xyzzy"],
                "first": 1,
                "text": "Dog Xyzzy",
                "start": 4,
                "end": 13,
            }
        ]
    ]
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in sentences])
    assert said(tagger, rows, tmp_path, words_field="text") == predictions
    # Punctuation marks are separate words, as in the training data.
    dotted = lines_of(tmp_path / "dotted.txt", [f"“{text}.”" for text in sentences])
    assert said(tagger, dotted, tmp_path)[0]["words"] == ["“", *SENTENCES[0][0], ".", "”"]


@pytest.mark.filterwarnings("ignore:.*has the words")
def test_a_txt_of_columns_is_read_as_columns(tagger, tmp_path):
    columns = lines_of(tmp_path / "columns.txt", column_lines("MultiCoNER")[2:])
    lines = [line for line in column_lines("MultiCoNER") if not line.startswith("#")]
    lines_of(columns, lines)
    assert [row["words"] for row in said(tagger, columns, tmp_path)] == [
        words for words, _ in SENTENCES * 12
    ]
    words = lines_of(tmp_path / "words.txt", [line.split(" ")[0] for line in lines])
    assert len(said(tagger, words, tmp_path)) == 36
    mixed = lines_of(tmp_path / "mixed.txt", ["Fox B-ANI", "ran away"])
    with pytest.raises(ValueError, match=r"1 of 2 lines end with a tag of the model, allowed: all"):
        said(tagger, mixed, tmp_path)


def test_a_field_and_a_column_do_not_mix(tag, tmp_path):
    with pytest.raises(
        ValueError, match=r"words_field and tags_field: got \('2', 'tags'\), allowed"
    ):
        tag(tmp_path, words_field="2")


@pytest.mark.filterwarnings("ignore:.*has the words")
def test_bare_tags_have_figures_of_entities(tag, tmp_path):
    bare = [(words, [tag[:1] for tag in tags]) for words, tags in SENTENCES * 12]
    lines = ["\n".join(map("\t".join, zip(*each, strict=True))) + "\n" for each in bare]
    result, _ = run(tag(lines_of(tmp_path / "train.bio", lines), epochs=8))
    assert result.figures["validation"]["f1"] == 1.0
    assert set(result.figures["validation"]["entities"]) == {"entity"}


def squad(version: str) -> dict:
    """Return questions in the layout of a SQuAD version, with integers as in GermanQuAD."""
    paragraphs = []
    for number in range(12):
        context = f"the fox saw the mill and the hen ran {number}"
        asked = {"id": number, "question": "the fox ?", "answers": []}
        asked["answers"] = [{"text": "mill", "answer_start": context.index("mill"), "answer_id": 1}]
        none = {"id": number + 100, "question": "an owl ?", "answers": [], "is_impossible": True}
        none["plausible_answers"] = asked["answers"]
        questions = [asked, none] if version == "2.0" else [asked]
        paragraphs.append({"context": context, "qas": questions, "document_id": number})
    return {"version": version, "data": [{"title": "t", "paragraphs": paragraphs}]}


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_squad_with_integers_as_identifiers(answer, tmp_path, version):
    data = tmp_path / "squad"
    content = json.dumps(squad(version))
    lines_of(data / f"train-v{version}.json", [content])
    lines_of(data / f"dev-v{version}.json", [content], "utf-8-sig")
    result, _ = run(answer(data, epochs=1))
    predictions = said(result.model, data / f"dev-v{version}.json", tmp_path)
    numbers = [range(12), (n for i in range(12) for n in (i, i + 100))][version == "2.0"]
    assert [row["id"] for row in predictions] == list(numbers)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_question_that_is_impossible_has_no_answer_in_every_format(answer, tmp_path, suffix):
    """The answers of an impossible question, which are only plausible, are dropped."""
    task = answer(tmp_path / "any").task()
    rows = [
        {
            "id": 7,
            "question": "the fox ?",
            "context": "the fox saw the mill",
            "answers": {"text": ["mill"], "answer_start": [16]},
            "is_impossible": impossible,
        }
        for impossible in (True, False)
    ]
    path = write_rows(tmp_path / f"rows{suffix}", rows)
    assert [len(question.answers) for question in task.read(path)] == [0, 1]
    rows[0]["is_impossible"] = "yes"
    path = write_rows(tmp_path / "wrong.jsonl", rows)
    with pytest.raises(ValueError, match=r"line 1: is_impossible: got 'yes', allowed: true or f"):
        task.read(path)


def test_a_test_part_without_answers_is_not_judged(answer, tmp_path):
    data = tmp_path / "squad"
    content = squad("1.1")
    lines_of(data / "train.json", [json.dumps(content)])
    for paragraph in content["data"][0]["paragraphs"]:
        for question in paragraph["qas"]:
            question["answers"] = []
    lines_of(data / "test.json", [json.dumps(content)])
    assert "no labels: " in run(answer(data, epochs=1))[1]
    for paragraph in content["data"][0]["paragraphs"]:
        for question in paragraph["qas"]:
            del question["answers"]
    lines_of(data / "test.json", [json.dumps(content)])
    assert "answers: got nothing" in run(answer(data, epochs=1, overwrite=True))[1]


def test_files_of_more_than_64_mib_and_very_long_fields(classify, answer, tmp_path):
    task = classify(tmp_path / "any").task()
    long = "a fox " * 12_000_000
    table = pa.table({"text": [long, "b"], "label": ["x", "y"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    lines_of(tmp_path / "rows.csv", ["text,label", f'"{long}",x', "b,y"])
    lines_of(tmp_path / "rows.tsv", ["text\tlabel", f"{long}\tx", "b\ty"])
    lines_of(
        tmp_path / "rows.jsonl",
        [json.dumps({"text": t, "label": n}) for t, n in ((long, "x"), ("b", "y"))],
    )
    for suffix in ("parquet", "csv", "tsv", "jsonl"):
        first, second = task.read(tmp_path / f"rows.{suffix}")
        assert (first.texts[0], first.label) == (long, "x")
        assert (second.texts[0], second.label) == ("b", "y")
    content = squad("1.1")
    content["data"][0]["paragraphs"][0]["context"] += long
    lines_of(tmp_path / "long.json", [json.dumps(content)])
    assert len(answer(tmp_path / "any").task().read(tmp_path / "long.json")) == 12


def test_half_of_a_surrogate_pair_is_named_before_the_training(classify, tmp_path):
    lines = [json.dumps(row) for row in ROWS]
    data = lines_of(tmp_path / "train.jsonl", [*lines, '{"text": "a \\ud83d", "label": "place"}'])
    with pytest.raises(ValueError, match=rf"^{data}, line 41: not valid JSON: a string has .ud83d"):
        run(classify(data))
    assert not (tmp_path / "out" / "checkpoints").exists()
