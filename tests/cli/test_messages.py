"""Messages name what the user typed, and every kind of standard output can receive them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastbert.cli.arguments import name_as_typed, typed_names

# With these settings, Python uses the encoding of the locale C, which is ASCII, instead of UTF-8.
PLAIN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ROOT = str(Path(__file__).resolve().parent.parent.parent)
NAMES = {
    "batch_size": "--batch-size",
    "data": "DATA",
    "labels": "--labels",
    "regression": "--regression",
    "save_every": "--save-every",
    "text_field": "--text-field",
    "warmup": "--warmup",
}


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "reviews.csv"
    path.write_text("\n".join(["text,label", *["the old mill,pos", "a dog ran,neg"] * 8]))
    return path


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("batch_size: got 0, allowed: 1", "--batch-size: got 0, allowed: 1"),
        ("labels and regression: got a and True", "--labels and --regression: got a and True"),
        ("no checkpoint (see save_every)", "no checkpoint (see --save-every)"),
        ("lower x (3) or raise warmup (0.1).", "lower x (3) or raise --warmup (0.1)."),
        ("see save_every.", "see --save-every."),
        ("data: a.csv does not exist", "DATA: a.csv does not exist"),
        # The names of files and of columns do not change, and neither do ordinary words.
        ("/data/batch_size/text_field.csv: no column 'text_field'", None),
        ("a.csv, line 3: the labels and data of warmup", None),
        ("batch_sizes and my_batch_size, batch_size.csv, --batch_size", None),
        ("", None),
    ],
)
def test_names_in_a_message(message, typed):
    assert name_as_typed(message, NAMES) == (message if typed is None else typed)
    assert name_as_typed(message, {}) == message


def test_every_command_has_a_typed_name_for_each_parameter(runner):
    import typer.main

    from fastbert.cli import app

    commands = [*typer.main.get_command(app).commands.values()]
    commands += [c for group in commands for c in getattr(group, "commands", {}).values()]
    for command in commands:
        for parameter in command.params:
            typed = typed_names([parameter])[parameter.name]
            assert typed.startswith("--") or typed.isupper(), (command.name, parameter.name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-size", 0), "error: --batch-size: got 0, allowed: an integer >= 1"),
        (("--held-out", 1), "error: --held-out: got 1.0, allowed: a number in [0, 1)"),
        (("--labels", "pos,,neg"), "error: --labels: got 'pos,,neg', allowed: names separated by"),
        (("--labels", "pos, pos"), "error: --labels: got pos, pos, allowed: at least two differ"),
    ],
)
def test_an_option_is_named_as_it_was_typed(
    refused, model_folder, reviews, tmp_path, arguments, message
):
    command = ("finetune", "classify", model_folder, reviews, "-o", tmp_path / "out")
    assert refused(*command, *arguments).startswith(message)


def test_an_argument_is_named_as_in_the_help(refused, model_folder, reviews, tmp_path):
    message = refused("predict", model_folder, reviews, tmp_path / "said.csv")
    assert message.startswith("error: OUT: got ")
    message = refused("predict", model_folder, tmp_path / "no.csv", tmp_path / "said.jsonl")
    assert message.startswith(f"error: INPUT: {tmp_path / 'no.csv'} does not exist")


def test_names_of_labels_may_have_blanks_around_them(run, model_folder, reviews, tmp_path):
    options = ("--labels", "pos , neg", "--epochs", 1, "--json")
    result = run("finetune", "classify", model_folder, reviews, "-o", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["id2label"] == {"0": "pos", "1": "neg"}


@pytest.mark.parametrize("command", ["predict", "encode", "classify", "finetune"])
def test_the_folder_of_a_run_names_the_folder_of_its_model(
    run, model_folder, reviews, tmp_path, command
):
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    arguments = {
        "predict": ("predict", folder, reviews, tmp_path / "said.jsonl"),
        "encode": ("encode", folder, reviews.with_name("texts.txt"), tmp_path / "rows.npy"),
        "classify": ("classify", folder, "--text", "the dog"),
        "finetune": ("finetune", "classify", folder, reviews, "-o", tmp_path / "out"),
    }
    (tmp_path / "texts.txt").write_text("the dog\n")
    result = run(*arguments[command])
    last = result.output.strip().splitlines()[-1]
    assert (result.exit_code, last) == (
        2,
        f"error: {folder}: there is no config.json in this folder; allowed: {folder / 'model'}, "
        "which has one",
    )


@pytest.mark.parametrize("command", ["finetune", "pretrain"])
def test_a_training_that_diverges_is_one_line(run, model_folder, reviews, tmp_path, command):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("The dog ran home. A bird sang.\n\n" * 60)
    wild = ("--learning-rate", "1e30", "--warmup", 0)
    arguments = {
        "finetune": ("finetune", "classify", model_folder, reviews, "-o", tmp_path / "out"),
        "pretrain": (
            *("pretrain", texts, tmp_path / "out", "--tokenizer", model_folder, "--steps", 40),
            *("--preset", "tiny", "--config", "num_hidden_layers=1", "--tokens-per-batch", 256),
        ),
    }
    result = run(*arguments[command], *wild)
    assert result.exit_code == 2, result.output
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "training diverged" in last
    assert "lower --learning-rate (1e+30) or raise --warmup (0.0)" in last


def call(command: str, utf_8: bool = False, **options) -> subprocess.CompletedProcess:
    """Run a shell command in the locale C; ``$PYTHON`` is the path of this Python."""
    # An editable install has the path of the checkout as a text, which Python cannot encode in this
    # locale. PYTHONPATH has the bytes of the path instead.
    environment = {**os.environ, **PLAIN_C, "PYTHON": sys.executable, "PYTHONPATH": ROOT}
    if utf_8:
        environment["PYTHONUTF8"] = "1"
    return subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, timeout=300, **options
    )


ARROW = """
import sys
from fastbert.cli import app
from fastbert.cli.common import out, print_json, print_json_rows

@app.command()
def arrow(json: bool = False):
    if json:
        print_json({"é→": "漢😀"})
        print_json_rows("é", ["→"], lambda rows: {"ü": len(rows)})
    else:
        out.print("a → b")

sys.argv[0] = "fastbert"
app()
"""


def test_an_arrow_is_no_error_in_the_locale_c():
    done = call('"$PYTHON" - arrow', input=ARROW.encode())
    assert (done.returncode, done.stdout) == (0, rb"a \u2192 b" + b"\n"), done.stderr
    done = call('"$PYTHON" - arrow --json', input=ARROW.encode())
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.decode("ascii").replace("}\n{", "}\0{").split("\0")
    assert json.loads(first) == {"é→": "漢😀"}
    assert json.loads(second) == {"é": ["→"], "ü": 1}


def test_a_text_in_the_locale_c_is_utf_8(model_folder):
    """Arguments are read as UTF-8, although Python decodes arguments as ASCII in this locale."""
    command = f'"$PYTHON" -m fastbert fill-mask {model_folder} "$(cat)" --json'
    # Libraries in Rust cannot open a path with characters beyond ASCII without Python's UTF-8 mode.
    utf_8 = not ROOT.isascii()
    done = call(command, utf_8, input="die Mühle [MASK] → 漢".encode())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == "die Mühle [MASK] → 漢"
    done = call(command, utf_8, input=b"die M\xfchle [MASK]")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert done.stderr.startswith(
        rb"error: TEXT: got 'die M\udcfchle [MASK]', allowed: text in UTF-8"
    )


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_output_is_no_error_and_no_file_becomes_it(tmp_path, closed):
    """No later file gets the closed descriptor 1, since libraries would print into this file."""
    opens = "import os; os.write(1, b'printed'); file = open(sys.argv[0]); sys.exit(file.fileno())"
    script = tmp_path / "arrow.py"
    script.write_text(
        ARROW.replace('sys.argv[0] = "fastbert"\n', "").replace(
            'out.print("a → b")', f'out.print("a → b"); {opens}'
        ),
        encoding="utf-8",
    )
    done = call(f'"$PYTHON" {script} arrow {closed}; exit $?')
    assert done.returncode >= 3, done.stderr
    assert b"Traceback" not in done.stderr
    done = call(f'"$PYTHON" -m fastbert --version {closed}')
    assert done.returncode == 0, done.stderr
