"""Every example in a docstring passes, and public docstrings begin with one short sentence."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastbert

PUBLIC = (
    "fastbert",
    *(
        f"fastbert.{room}"
        for room in (
            *("analysis", "data", "finetuning", "modules", "modules.transformer", "ops"),
            *("seq2seq", "training"),
        )
    ),
    "fastbert.modules.alignment",
)
PROMPT = ">>> "
# A sentence ends at a mark before a space and a capital letter; "et al. 2019" does not match.
NEXT_SENTENCE = re.compile(r"[.!?] +[A-Z]")
MAX_SUMMARY = 100


def modules_with_examples(folders: list[str], prefix: str) -> Iterator[str]:
    """Yield the names of modules in `folders` whose source has an example; import nothing."""
    for info in pkgutil.iter_modules(folders, prefix):
        spec = info.module_finder.find_spec(info.name, None)
        source = Path(spec.origin)
        if source.suffix == ".py" and PROMPT in source.read_text(encoding="utf-8"):
            yield info.name
        if info.ispkg:
            yield from modules_with_examples(spec.submodule_search_locations, f"{info.name}.")


def examples(name: str) -> list:
    """Return one pytest parameter for each object of the module `name` with an example.

    If an optional dependency of the module is missing or too old, the result is one skipped
    parameter. If the import of the module fails for another reason, the error is raised.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        first = error
        while isinstance(first.__cause__, ImportError):
            first = first.__cause__
        package = (first.name or name).partition(".")[0]
        if package == name.partition(".")[0]:
            raise
        lacks = "" if isinstance(first, ModuleNotFoundError) else f": {first.msg}"
        skip = pytest.mark.skip(reason=f"{name} needs {first.name}{lacks}")
        return [pytest.param(None, id=name, marks=skip)]
    # An example runs without the names of its module, so that a reader can copy the example.
    tests = doctest.DocTestFinder().find(module, name, globs={})
    return [pytest.param(test, id=test.name) for test in tests if test.examples]


def failures(test: doctest.DocTest) -> str:
    """Run an example and return the report of its failures, or an empty text."""
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return "".join(report)


def problem(docstring: str | None) -> str | None:
    """Return the reason why the first line of a docstring is not a summary, or None."""
    first, _, rest = (docstring or "").partition("\n")
    if not first:
        return "it has no first line"
    if len(first) > MAX_SUMMARY:
        return f"it has {len(first)} characters"
    if rest.partition("\n")[0].strip():
        return "it continues on the next line"
    if not first.endswith("."):
        return "it does not end with a period"
    return "it has two sentences" if NEXT_SENTENCE.search(first) else None


def public_names() -> list[str]:
    """Return the qualified names that the public packages export, without dunder names."""
    rooms = ((room, importlib.import_module(room)) for room in PUBLIC)
    names = [f"{room}.{name}" for room, module in rooms for name in module.__all__]
    return [name for name in names if "__" not in name]


@pytest.mark.parametrize(
    "test",
    [
        example
        for name in modules_with_examples(list(fastbert.__path__), "fastbert.")
        for example in examples(name)
    ],
)
def test_examples_of_docstrings_give_the_results_they_show(test):
    assert failures(test) == ""


@pytest.mark.parametrize("name", public_names())
def test_public_names_have_a_summary_of_one_sentence(name):
    room, _, attribute = name.rpartition(".")
    docstring = getattr(importlib.import_module(room), attribute).__doc__
    assert problem(docstring) is None, f"{name}: {(docstring or '').partition(chr(10))[0]!r}"


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Create a package with a right and a wrong example, and modules that fail to import."""
    package = tmp_path / "planted_docstrings"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text(
        "def right():\n    '''\n    >>> 1 + 1\n    2\n    '''\n\n\n"
        "def wrong():\n    '''\n    >>> 1 + 1\n    3\n    '''\n\n\n"
        "def module_name():\n    '''\n    >>> right()\n    '''\n"
    )
    (package / "lacking.py").write_text("import absent_package\n\n'''>>> 1'''\n")
    (package / "older.py").write_text("from json import absent_name\n\n'''>>> 1'''\n")
    (package / "torn.py").write_text("from planted_docstrings import absent_name\n\n'''>>> 1'''\n")
    (package / "wrapped.py").write_text(
        "try:\n    from json import absent_name\nexcept ImportError as error:\n"
        "    raise ImportError('install it') from error\n\n'''>>> 1'''\n"
    )
    (package / "silent.py").write_text("raise AssertionError('a module without an example')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield list(modules_with_examples([str(package)], "planted_docstrings."))
    for name in [name for name in sys.modules if name.startswith("planted_docstrings")]:
        del sys.modules[name]


def test_a_wrong_example_fails_and_a_missing_dependency_is_named(planted):
    names = ("inner", "lacking", "older", "torn", "wrapped")
    assert planted == [f"planted_docstrings.{name}" for name in names]
    by_name = {e.values[0].name.rpartition(".")[2]: e.values[0] for e in examples(planted[0])}
    assert failures(by_name["right"]) == ""
    assert "Expected:\n    3\nGot:\n    2" in failures(by_name["wrong"])
    assert "NameError: name 'right' is not defined" in failures(by_name["module_name"])
    (lacking,) = examples(planted[1])
    (mark,) = lacking.marks
    assert (mark.name, mark.kwargs["reason"]) == (
        "skip",
        "planted_docstrings.lacking needs absent_package",
    )


@pytest.mark.parametrize("module", ["older", "wrapped"])
def test_a_dependency_that_lacks_a_name_is_a_reason_to_skip(planted, module):
    (lacking,) = examples(f"planted_docstrings.{module}")
    (mark,) = lacking.marks
    reason = f"planted_docstrings.{module} needs json: cannot import name 'absent_name' from 'json'"
    assert mark.name == "skip"
    assert mark.kwargs["reason"].startswith(reason)


def test_a_name_that_the_package_itself_lacks_is_an_error(planted):
    with pytest.raises(ImportError, match="cannot import name 'absent_name' from 'planted_doc"):
        examples("planted_docstrings.torn")


@pytest.mark.parametrize(
    ("docstring", "reason"),
    [
        (None, "it has no first line"),
        ("\n    Begins late.", "it has no first line"),
        ("Without a period", "it does not end with a period"),
        ("Begins here\n    and ends here.", "it continues on the next line"),
        ("One. Two.", "it has two sentences"),
        ("x" * 100 + ".", "it has 101 characters"),
        ("Compute the loss of Devlin et al. 2019.\n\n    More.", None),
    ],
)
def test_a_bad_summary_is_found(docstring, reason):
    assert problem(docstring) == reason
