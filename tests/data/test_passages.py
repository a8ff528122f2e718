"""Passages have a document's sentences, and leave out headings, lists, tables and markup."""

import time
from collections import Counter

import pytest

from fastbert.data.markup import PARTS, TAGS
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
        ("<h2>Title</h2>It <b>rains</b>.", ["It rains."], {"headings": 1, TAGS: 4}),
        ("It rains.\n* one\n* two\n  more\n1. three", ["It rains."], {"list items": 3}),
        (
            "<ul><li>One.</li><li>Two.</li></ul>It rains.",
            ["It rains."],
            {"list items": 2, TAGS: 6},
        ),
        ("| a | b |\n|---|---|\n| 1. | 2 |\n\nIt rains.", ["It rains."], {"table rows": 2}),
        ("a\tb\tc\n1\t2\t3\n\nIt rains.", ["It rains."], {"table rows": 2}),
        ("{| class=x\n| One. || b\n\n| c\n|}\nIt rains.", ["It rains."], {PARTS: 1}),
        ("<table><tr><td>One.</td></tr></table>It rains.", ["It rains."], {PARTS: 1}),
        ("```\ncode. More code.\n```\nIt rains.", ["It rains."], {PARTS: 1}),
        ("It {{cite|{{x}}}}rains.<ref>A book.</ref><!-- no. -->", ["It rains."], {PARTS: 4}),
        ("[[Rain|It]] ''rains'' in [Rome](x.html).[12]", ["It rains in Rome."], {}),
        ("> It rains &amp; rains.", ["It rains & rains."], {}),
        ("5 < 6 and 7 > 3. It rains.", ["5 < 6 and 7 > 3.", "It rains."], {}),
        ("no mark at all " * 9, [], {"fragments": 1}),
        # Wrapped text is joined, even if a line has no end mark and the next begins with a capital.
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
    counts = Counter()
    assert passages(text, counts) == kept
    assert counts == dropped


@pytest.mark.parametrize(
    "text",
    [
        "p<q was used, and r>s is false.",
        "A List<String> and a Map<K, V> hold it.",
        "We saw x<y and z>w there.",
        "If a <b and c> d it rains.",
        "The <table was there, and> it was old.",
        "std::vector<std::string> is a type.",
        "She <3 him, and he <grins> too.",
        "Write to <ada@example.org> or <https://example.org/a>.",
        "The <ref was here> and </ref there.",
    ],
)
def test_text_with_the_form_of_a_tag_stays(text):
    counts = Counter()
    assert passages(text, counts) == [text]
    assert not counts


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("It <b>rains</b>.", 2),
        ('It <a href="x.html" title="a > b">rains</a>.', 2),
        ("It <INPUT disabled type=checkbox>rains<wbr/>.", 2),
        ('<span style="color:red">It</span> rains.', 2),
        ("It <nowiki>rains</nowiki>.", 2),
        ("<p>It rains.</p>", 2),
        ('It<ref name="a"/> rains.', 1),
        ("It<ref name=a>A book. Old.</ref> rains.", 0),
    ],
)
def test_tags_of_html_and_mediawiki_are_left_out_and_counted(text, tags):
    counts = Counter()
    assert " ".join(passages(text, counts)).replace(" .", ".") == "It rains."
    assert counts[TAGS] == tags
    assert counts[PARTS] == ("</ref>" in text)


SCRIPTS = {
    "Latin": "It rained. We stayed at home! Did you read? Mr. Smith did.",
    "Cyrillic": "Шёл дождь. Мы остались дома! Он жил в 1990 г. в Москве. Ты читал?",
    "Greek": "Έβρεχε πολύ. Μείναμε σπίτι! Διάβασες το βιβλίο; Ναι, το διάβασα.",
    "Arabic": "كان المطر يهطل. بقينا في البيت! هل قرأت الكتاب؟ نعم قرأته.",
    "Urdu": "بارش ہو رہی تھی۔ ہم گھر پر رہے۔ کیا تم نے کتاب پڑھی؟ ہاں میں نے پڑھی۔",
    "Devanagari": "बारिश हो रही थी। हम घर पर रहे। क्या तुमने किताब पढ़ी? हाँ पढ़ी।",
    "Bengali": "বৃষ্টি হচ্ছিল। আমরা বাড়িতে ছিলাম। তুমি কি বই পড়েছ? হ্যাঁ পড়েছি।",
    "Armenian": "Անձրև էր գալիս։ Մենք տանը մնացինք։ Նա կարդաց գիրքը։ Մենք քնեցինք։",
    "Ethiopic": "ዝናብ ነበር። ቤት ቆየን። መጽሐፉን አነበብክ? አዎ አነበብኩት።",
    "Chinese": "下雨了。我们在家！你读了书吗？读了。",
    "Japanese": "雨が降った。家にいた！本を読んだか？「読んだ。」",
    "Burmese": "မိုးရွာသည်။ အိမ်မှာနေသည်။ စာဖတ်သည်။ အိပ်သည်။",
    "Khmer": "ភ្លៀងធ្លាក់។ យើងនៅផ្ទះ។ អានសៀវភៅ។ យើងគេង។",
    "Tibetan": "ཆར་པ་བབས་སོང་། ང་ཚོ་ཁྱིམ་དུ་བསྡད། དེབ་བཀླགས། གཉིད་ཉལ།",
    "Thai": "เมื่อวานนี้ฝนตกหนักมาก เราจึงอยู่ที่บ้านทั้งวัน เธออ่านหนังสือหรือยัง ฉันอ่านจบแล้ว",
    "Lao": "ມື້ວານນີ້ຝົນຕົກໜັກຫຼາຍ ພວກເຮົາຢູ່ເຮືອນໝົດມື້ ເຈົ້າອ່ານປຶ້ມແລ້ວບໍ່ ຂ້ອຍອ່ານຈົບແລ້ວ",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_four_sentences_in_each_script(script):
    counts = Counter()
    sentences = passages(f"{SCRIPTS[script]}\n\n{SCRIPTS[script]}\n", counts)
    assert len(sentences) == 8, sentences
    assert "".join(sentences[:4]).replace(" ", "") == SCRIPTS[script].replace(" ", "")
    assert not counts


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
        "<b ",
        "<b a",
        '<b "',
        "<b>",
        "<table a>",
        "।",
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

    # An algorithm with quadratic time would take 10 s or more for 300,000 characters.
    assert seconds(300_000) < 3
