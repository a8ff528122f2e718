"""Passages keep the sentences of a document and leave out headings, lists, tables and markup."""

import time
from collections import Counter

import pytest

from fastbert.data.passages import passages


@pytest.mark.parametrize(
    ("text", "kept", "dropped"),
    [
        ("Title\n\nIt rains. We stay.", ["It rains.", "We stay."], {"headings": 1}),
        ("# Title\nIt rains.", ["It rains."], {"headings": 1}),
        ("== Title ==\nIt rains.", ["It rains."], {"headings": 1}),
        ("Title\n=====\nIt rains.", ["It rains."], {"headings": 1}),
        ("It rains.\nEarly life\nHe was born.", ["It rains.", "He was born."], {"headings": 1}),
        ("It rains.\nSee also", ["It rains."], {"headings": 1}),
        ("<h2>Title</h2>It <b>rains</b>.", ["It rains."], {"headings": 1}),
        ("It rains.\n* one\n* two\n  more\n1. three", ["It rains."], {"list items": 3}),
        ("<ul><li>One.</li><li>Two.</li></ul>It rains.", ["It rains."], {"list items": 2}),
        ("| a | b |\n|---|---|\n| 1. | 2 |\n\nIt rains.", ["It rains."], {"table rows": 2}),
        ("a\tb\tc\n1\t2\t3\n\nIt rains.", ["It rains."], {"table rows": 2}),
        ("{| class=x\n| One. || b\n\n| c\n|}\nIt rains.", ["It rains."], {}),
        ("<table><tr><td>One.</td></tr></table>It rains.", ["It rains."], {}),
        ("```\ncode. More code.\n```\nIt rains.", ["It rains."], {}),
        ("It {{cite|{{x}}}}rains.<ref>A book.</ref><!-- no. -->", ["It rains."], {}),
        ("[[Rain|It]] ''rains'' in [Rome](x.html).[12]", ["It rains in Rome."], {}),
        ("> It rains &amp; rains.", ["It rains & rains."], {}),
        ("5 < 6 and 7 > 3. It rains.", ["5 < 6 and 7 > 3.", "It rains."], {}),
        ("no mark at all " * 9, [], {"fragments": 1}),
        # Wrapped text is joined, even if a line has no mark and the next begins with a capital.
        (
            "She was the keeper of the lighthouse on the island of New\nYork and lived there.",
            ["She was the keeper of the lighthouse on the island of New York and lived there."],
            {},
        ),
        ("We went\nto the sea. it was\ncold.", ["We went to the sea. it was cold."], {}),
        ("\n\n", [], {}),
    ],
)
def test_passages_and_what_is_left_out(text, kept, dropped):
    found = Counter()
    assert passages(text, found) == kept
    assert found == dropped


@pytest.mark.parametrize(
    "text",
    [
        "<table>",
        "<!--",
        "{{",
        "{|\n",
        "```\n",
        "[[",
        "[a](",
        "<b",
        "''",
        "a [1]",
        "> ",
        "<ref></",
        "<pre></",
    ],
)
def test_the_time_is_linear_in_a_text_of_open_marks(text):
    def seconds(size):
        content = (text * size)[:size] + " It rains."
        begun = time.process_time()
        passages(content, Counter())
        return time.process_time() - begun

    # A quadratic rule takes minutes for a million characters.
    assert seconds(1_000_000) < 10
