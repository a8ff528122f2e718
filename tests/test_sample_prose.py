"""sample_prose.py finds comments and docstrings, and a seed determines the sample."""

from __future__ import annotations

import subprocess

import pytest
from sample_prose import lines_of, main, sample

PYTHON = '''"""A summary of the module.

    >>> import torch
"""
# fmt: off
x = "# no comment at all here"  # One comment beside code.
def f():
    """Return the number one."""
    # Two words
    return """a string that is no docstring"""
'''
CPP = """// A header of one line.
const char* url = "https://no.comment.at/all";  // Its address on the web.
int n = 1;
}  // namespace of::the::example
// clang-format on
"""


@pytest.mark.parametrize(
    ("path", "text", "numbers"), [("a.py", PYTHON, [1, 6, 8]), ("a.cu", CPP, [1, 2])]
)
def test_comments_and_docstrings_are_prose(path, text, numbers):
    assert [line.number for line in lines_of(path, text)] == numbers


def test_a_line_is_shown_between_its_neighbours():
    line = lines_of("a.cu", CPP)[1]
    first, second, third, *_ = CPP.splitlines()
    assert str(line).splitlines() == ["a.cu:2", f"   | {first}", f"-> | {second}", f"   | {third}"]


def test_the_seed_decides_and_only_tracked_files_count(tmp_path):
    (tmp_path / "a.py").write_text("".join(f"# This is line {n}.\n" for n in range(100)))
    (tmp_path / "other.py").write_text("# Nobody added this file.\n")
    for command in (["init", "-q"], ["add", "a.py"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    first = sample(tmp_path, [], seed=1, count=42)
    assert len(first) == len(set(map(str, first))) == 42
    assert first == sample(tmp_path, [], seed=1, count=42)
    assert first != sample(tmp_path, [], seed=2, count=42)
    assert {line.path for line in sample(tmp_path, [], seed=1, count=1000)} == {"a.py"}


def test_the_command_prints_lines_of_this_repository(capsys):
    main(["--seed", "7", "--count", "2", "--paths", "fastbert/version.py", "csrc/cpu/isa"])
    places = [block.split(":")[0] for block in capsys.readouterr().out.split("\n\n")]
    assert len(places) == 2
    assert all(place.startswith(("fastbert/", "csrc/")) for place in places)
