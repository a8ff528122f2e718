"""README and the pages have code that runs, commands that exist, and the recorded figures."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _fresh_python
import hooks
import pytest
import torch
import typer
from quick_cases import long_case

from fastbert import BertConfig, BertForPreTraining
from fastbert.cli import app
from fastbert.data import stories, train_tokenizer
from fastbert.inference import Embedder

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / path for path in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
# A block after a comment "not run: REASON" is not run by these tests.
PYTHON = re.compile(r"(<!-- not run: .+ -->\n)?```python\n(.*?)```", re.DOTALL)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS = typer.main.get_command(app).commands


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page that are not marked as not run."""
    matches = PYTHON.findall(page.read_text(encoding="utf-8"))
    return [code for not_run, code in matches if not not_run]


def shell_lines(page: Path) -> list[list[str]]:
    """Return the words of each command line of a page, without a comment at its end."""
    matches = FENCED.findall(page.read_text(encoding="utf-8"))
    text = "\n".join(code for language, code in matches if language in ("", "bash"))
    lines = text.replace("\\\n", " ").splitlines()
    return list(filter(None, (shlex.split(line, comments=True) for line in lines)))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the pages name; the model in the folder is untrained."""
    folder = tmp_path_factory.mktemp("pages")
    model = folder / "out" / "demo" / "model"
    tokenizer = train_tokenizer(stories(30, 0), 300)
    torch.manual_seed(0)
    config = BertConfig.preset("tiny", vocab_size=len(tokenizer), max_position_embeddings=128)
    BertForPreTraining(config).save_pretrained(model)
    tokenizer.save(model, max_length=128)
    text = "\n\n".join("\n".join(sentences) for sentences in stories(60, 1))
    (folder / "corpus.txt").write_text(text, encoding="utf-8")
    return folder


# The other pages run only in `make every-case`, because each page trains or loads a model.
FIRST_PAGES = ("README.md",)


@pytest.mark.parametrize(
    "page",
    [
        (pytest.param if name(page) in FIRST_PAGES else long_case)(page, id=name(page))
        for page in PAGES
        if blocks(page)
    ],
)
def test_the_python_code_of_a_page_runs_from_top_to_bottom(page: Path, folder: Path):
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    result = _fresh_python.run(
        "-c",
        "\n".join(blocks(page)),
        after="transformers",
        # There is one thread, because two threads on a busy core would wait for each other.
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr


def post(port: int, texts: object) -> list[list[float]]:
    """Return the answer of the server in docs/serving.md to `texts`."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/embed",
        json.dumps(texts).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_server_of_a_page_answers_many_clients(folder: Path):
    [program] = [block for block in blocks(ROOT / "docs" / "serving.md") if "FastAPI(" in block]
    (folder / "server.py").write_text(program, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "server:app", "--port", str(port)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, **pipes) as server:
        try:
            lines = iter(server.stderr.readline, "")
            assert any("running on" in line for line in lines)
            texts = [[f"the old mill {n}", "a dog"][: 1 + n % 2] for n in range(40)]
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(lambda given: post(port, given), texts))
            with pytest.raises(urllib.error.HTTPError, match="422"):
                post(port, [1])
            with pytest.raises(urllib.error.HTTPError, match="503"):
                post(port, ["a"] * 257)
        finally:
            server.terminate()
    embedder = Embedder(str(folder / "out" / "demo" / "model"), normalize=True)
    assert found == [embedder(given).tolist() for given in texts]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_and_options_of_a_page_exist(page: Path):
    for words in shell_lines(page):
        if Path(words[0]).name != "fastbert":
            continue
        options = [word.split("=")[0] for word in words[1:] if word.startswith("--")]
        if words[1].startswith("-"):
            assert words[1] in ("--help", "--version"), words
            continue
        assert words[1] in COMMANDS, words
        command = COMMANDS[words[1]]
        if hasattr(command, "commands"):
            assert words[2] in command.commands, words
            command = command.commands[words[2]]
        known = {"--help"}
        for parameter in command.params:
            known |= {*parameter.opts, *parameter.secondary_opts}
        assert set(options) <= known, words


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_make_targets_of_a_page_exist(page: Path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)", text))
    named |= {words[1] for words in shell_lines(page) if words[0] == "make"}
    assert named <= targets


# docs/support.md collects the tests of all families in another process, which takes 7 s.
@pytest.mark.parametrize(
    "page",
    [
        (long_case if page.stem == "support" else pytest.param)(page, id=name(page))
        for page in PAGES
    ],
)
def test_a_page_expands(page: Path):
    assert "{{" not in hooks.expand(page.read_text(encoding="utf-8"))


def test_readme_is_short_and_its_figures_are_those_of_the_records():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert hooks.tasks(hooks.USERS) in text
    assert hooks.summary() in text


def test_the_home_page_shows_code_and_a_result_before_its_links():
    page = ROOT / "docs" / "index.md"
    before, links = page.read_text(encoding="utf-8").split("| If you want to | read |")
    assert blocks(page)
    assert "```python" in before
    assert "`make bench" in before
    assert hooks.headline() in hooks.expand(before)
    assert "```" not in links


def test_the_result_of_the_home_page_is_in_readme():
    """Each result on the home page is in README's row for the same batch shape."""
    rows = [line.strip("| ").split(" | ") for line in hooks.headline().splitlines()[2:]]
    assert len(rows) == 4
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for batch, *cells in rows:
        _, shape = batch.split(", ")
        (line,) = [line for line in readme.splitlines() if f"| BERT-base {shape} |" in line]
        assert " | ".join(cells) in line


def test_the_links_of_readme_lead_to_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).is_file()]


def test_every_operation_has_a_row_in_the_table_of_backends():
    from fastbert.ops.backend import TABLES

    table = hooks.backends()
    assert all(f"| `{op}` |" in table for op in TABLES)
