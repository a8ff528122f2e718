import time

import pytest

from fastbert.data.sentences import split_sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One here. Two there! Three?", ["One here.", "Two there!", "Three?"]),
        (
            "Mr. Smith met Dr. J. R. Jones. They left.",
            ["Mr. Smith met Dr. J. R. Jones.", "They left."],
        ),
        ("It costs 2.50 in v3.1. Buy it.", ["It costs 2.50 in v3.1.", "Buy it."]),
        ("See e.g. Section 2 of it. It ends.", ["See e.g. Section 2 of it.", "It ends."]),
        ('"Stop!" he said. "Why?" She ran.', ['"Stop!" he said.', '"Why?"', "She ran."]),
        ("3. Scope of it. The next.", ["3. Scope of it.", "The next."]),
        ("He came (late). She did not.", ["He came (late).", "She did not."]),
        ("That was I. He knew.", ["That was I.", "He knew."]),
        ("wait... and then go. Done.", ["wait... and then go.", "Done."]),
        ("all lower. no capitals. at all", ["all lower.", "no capitals.", "at all"]),
        ("雨が降る。風も吹く。", ["雨が降る。", "風も吹く。"]),
        ("Title\n  wrapped   line", ["Title wrapped line"]),
        ("No end", ["No end"]),
        ("-----", []),
        (" \n\t ", []),
        ("", []),
        ("... --- !!!", []),
    ],
)
def test_split(text, expected):
    assert split_sentences(text) == expected


@pytest.mark.every_case
@pytest.mark.parametrize(
    "text", ["." * 10**6 + "x", "mr. " * 10**6, "a. (" * 10**6, "A. " * 10**6, ". " + "(" * 10**6]
)
def test_the_time_grows_with_the_length_only(text):
    start = time.process_time()
    split_sentences(text)
    assert time.process_time() - start < 20
