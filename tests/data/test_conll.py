"""Files with one word per line are read in every layout, and damaged files are refused."""

from __future__ import annotations

import warnings

import pytest

from fastbert.data.conll import Columns, read_conll
from fastbert.data.records import DataWarning

WORDS = [["Ada", "sings"], ["Oslo", "is", "old"]]
TAGS = [["B-PER", "O"], ["B-LOC", "O", "O"]]
# The words and tags above, in the layouts of public data sets.
LAYOUTS = {
    "CoNLL 2003": """-DOCSTART- -X- -X- O

Ada NNP I-NP B-PER
sings VBZ I-VP O

Oslo NNP I-NP B-LOC
is VBZ I-VP O
old JJ I-ADJP O
""",
    "GermEval 2014": """#\thttp://de.example.org/Ada\t[2010-03-05]
1\tAda\tB-PER\tO
2\tsings\tO\tO

#\thttp://de.example.org/Oslo\t[2010-03-05]
1\tOslo\tB-LOC\tB-PER
2\tis\tO\tO
3\told\tO\tO
""",
    "MultiCoNER": """# id 0e10ab4a-f2b5 domain=train

# id 5a2b domain=train
Ada _ _ B-PER
sings _ _ O

# id 99bd domain=train
Oslo _ _ B-LOC
is _ _ O
old _ _ O
""",
    "CoNLL-U": """# newdoc id = d1
# sent_id = 1
# text = Ada sings
1-2\tAdasings\t_\t_\t_\t_\t_\t_\t_\t_
1\tAda\tAda\tB-PER\tNNP\t_\t2\tnsubj\t_\t_
2\tsings\tsing\tO\tVBZ\t_\t0\troot\t_\tSpaceAfter=No

# sent_id = 2
1\tOslo\tOslo\tB-LOC\tNNP\t_\t3\tnsubj\t_\t_
1.1\tbeing\tbe\tX\t_\t_\t_\t_\t_\t_
2\tis\tbe\tO\tVBZ\t_\t3\tcop\t_\t_
3\told\told\tO\tJJ\t_\t0\troot\t_\t_
""",
    "blanks after the tags": "Ada B-PER \nsings\tO\t\n\nOslo B-LOC\t\nis O  \r\nold  O\n \nOK",
    "numbers and tags": "1 Ada B-PER\n2 sings O\n\n1 Oslo B-LOC\n2 is O\n3 old O",
    "numbers, parts of speech and tags": (
        "1 Ada NNP B-PER\n2 sings VBZ O\n\n1 Oslo NNP B-LOC\n2 is VBZ O\n3 old JJ O"
    ),
}
LAYOUTS["blanks after the tags"] = LAYOUTS["blanks after the tags"].removesuffix("OK")


def read(path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        records = list(read_conll(path, **options))
    return [record.values[0] for record in records], [record.values[1] for record in records]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_public_data(tmp_path, layout):
    path = tmp_path / "train.conll"
    path.write_text(LAYOUTS[layout], encoding="utf-8")
    assert read(path) == (WORDS, TAGS)
    assert read(path, tagged=False) == (WORDS, [[], []])


@pytest.mark.parametrize(
    ("layout", "note"),
    [
        ("CoNLL 2003", "column 1 of 4 has the words, and column 4 has the tags; the others are"),
        ("GermEval 2014", "column 2 of 4 has the words, and column 3 has the tags; the others are"),
        ("CoNLL-U", "column 2 of 10 has the words, and column 4 has the tags; the others are not"),
        ("blanks after the tags", None),
    ],
)
def test_a_note_says_which_of_several_columns_are_read(tmp_path, layout, note):
    path = tmp_path / "train.conll"
    path.write_text(LAYOUTS[layout], encoding="utf-8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(read_conll(path))
    assert len(caught) == (note is not None)
    if note:
        assert str(caught[0].message).startswith(f"{path}: {note}")


def test_columns_that_the_caller_names(tmp_path):
    path = tmp_path / "train.conll"
    path.write_text(LAYOUTS["CoNLL 2003"], encoding="utf-8")
    assert read(path, columns=Columns(1, 2))[1] == [["NNP", "VBZ"], ["NNP", "VBZ", "JJ"]]
    with pytest.raises(ValueError, match=rf"^{path}, line 3: no column 5, allowed: 1 … 4"):
        read(path, columns=Columns(1, 5))
    with pytest.raises(ValueError, match=r"no column 0, allowed: 1 … 4"):
        read(path, columns=Columns(0, 1), tagged=False)


def test_words_that_begin_with_a_number_sign_are_words(tmp_path):
    path = tmp_path / "train.conll"
    path.write_text("# O\n1 O\n\n#Oslo B-LOC\nis O\n\nrank O\n#1 B-RANK\n", encoding="utf-8")
    assert read(path)[0] == [["#", "1"], ["#Oslo", "is"], ["rank", "#1"]]
    path.write_text("#\n1\n\n#Oslo\nis\n\n# a comment\nrank\n#1\n", encoding="utf-8")
    assert read(path, tagged=False)[0] == [["#", "1"], ["#Oslo", "is"], ["rank", "#1"]]


def test_words_that_are_numbers_are_words(tmp_path):
    path = tmp_path / "train.conll"
    path.write_text("1 CD O\n2 CD O\n\n3 CD O\n", encoding="utf-8")
    assert read(path)[0] == [["1", "2"], ["3"]]
    path.write_text("1 CD O\n\n1 CD O\n", encoding="utf-8")
    assert read(path)[0] == [["1"], ["1"]]


def test_other_white_space_is_a_part_of_a_word(tmp_path):
    path = tmp_path / "train.conll"
    path.write_text("10\u00a0000 O\na\u3000b O\nin side\tO\n", encoding="utf-8")
    assert read(path)[0] == [["10\u00a0000", "a\u3000b", "in side"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a O\nb\n", "line 2: got 1 columns, allowed: 2"),
        ("a\tO\n\tO\n", "line 2: got 1 columns, allowed: 2"),
        ("a\nb\n", "line 1: got 1 column, allowed: a word and its tag"),
        ("\n-DOCSTART- O\n", "the file has no sentence, allowed: at least one"),
        ("# only comments here\n", "the file has no sentence"),
        ("#begin document (a); part 000\na 0 0 I x -\n", "the layout of CoNLL 2012, allowed: a"),
        ("1 a X X O\n2 b X X O\n", "the first of 5 columns counts words, and which one has"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "train.conll"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"^{path}.*{message}"):
        read(path)
