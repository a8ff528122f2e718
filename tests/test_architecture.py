"""Each subpackage of fastbert (room) imports only lower rooms, and no modules form a cycle.

Every import counts, including an import inside a function, under TYPE_CHECKING, or by
``importlib.import_module`` with a literal name.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fastbert", "benchmarks")
EXTENSION = "fastbert._C"

# Room → the lower rooms that the room may import; each room may also import from itself.
BELOW: dict[str, set[str]] = {
    "version": set(),
    "atomic_file": set(),
    "file_size": set(),
    "picture": {"atomic_file"},
    "text_file": {"file_size"},
    "checksum": {"file_size"},
    "folder_lock": set(),
    "json_file": {"atomic_file", "file_size"},
    "config": {"json_file", "activations"},
    "transformer_config": {"config", "activations"},
    "xlnet_config": {"config", "activations"},
    "activations": set(),
    "reference": {"activations"},
    "kernels": {"activations"},
    "ops": {"kernels", "reference", "activations", "version"},
    "io": {"config", "transformer_config", "xlnet_config", "json_file", "file_size"},
    "data": {"json_file", "atomic_file", "checksum", "file_size", "text_file"},
    "modules": {"ops", "config", "transformer_config", "xlnet_config", "io", "activations"},
    "graphs": {"modules", "ops"},
    "inference": {"graphs", "modules", "data", "io"},
    "integrations": {
        *("inference", "modules", "io", "config", "json_file", "ops", "reference", "testing"),
    },
    "testing": {
        *("modules", "ops", "kernels", "config", "reference", "activations"),
    },
    "parity": {"integrations", "testing", "io", "config", "ops", "json_file"},
    "machine": {"ops", "version"},
    "gpus": set(),
    "flops": {"config"},
    "bench": {
        *("testing", "inference", "integrations", "data", "modules", "ops", "config", "machine"),
        *("gpus", "flops", "picture", "json_file", "kernels"),
    },
    "training": {
        *("graphs", "data", "modules", "io", "ops", "config", "gpus", "flops"),
        *("json_file", "atomic_file", "checksum", "folder_lock", "file_size", "picture"),
    },
    "jobs": {
        *("integrations", "inference", "data", "modules", "io", "config", "json_file", "machine"),
        *("atomic_file", "checksum", "folder_lock", "version", "picture", "text_file"),
    },
    "demo": {
        *("training", "bench", "testing", "integrations", "data", "modules", "machine"),
    },
    "viewer": {"integrations", "data", "modules", "io", "config", "atomic_file"},
    "finetuning": {
        *("training", "jobs", "inference", "data", "modules", "io", "config", "json_file"),
        *("picture", "text_file"),
    },
    "seq2seq": {
        *("finetuning", "training", "jobs", "inference", "data", "modules", "io"),
        *("config", "transformer_config", "json_file", "text_file"),
    },
    "analysis": {
        *("jobs", "data", "modules", "io", "atomic_file", "text_file"),
    },
    "cli": {
        *(
            "viewer",
            "parity",
            "analysis",
            "finetuning",
            "seq2seq",
            "training",
            "jobs",
            "demo",
            "bench",
            "testing",
            "integrations",
            "modules",
        ),
        *("io", "ops", "kernels", "config", "transformer_config", "json_file", "atomic_file"),
        *("version", "machine"),
    },
}


def storeys(below: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the rooms by level, from the top; a room is above all rooms that it imports."""
    level: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in level:
            level[name] = 1 + max(map(of, below[name]), default=0)
        return level[name]

    highest = max(map(of, below))
    return [sorted(r for r in level if level[r] == n) for n in range(highest, 0, -1)]


def drawn() -> str:
    """Return the Markdown table of rooms and their allowed imports, as in ``docs/design.md``."""
    rows = ["| room | may import |", "|---|---|"]
    for rooms in storeys(BELOW):
        for name in rooms:
            rows.append(f"| `{name}` | {', '.join(f'`{r}`' for r in sorted(BELOW[name]))} |")
    return "\n".join(rows) + "\n"


def sources(root: Path) -> dict[str, Path]:
    """Map each module name of the packages to its file, including modules in fastbert/kernels."""
    modules = {}
    for package in PACKAGES:
        files = sorted((root / package).rglob("*.py"))
        # Only some Python versions follow links in rglob, so the link is handled separately.
        files = [f for f in files if "kernels" not in f.relative_to(root).parts]
        files += sorted((root / package / "kernels").glob("*.py"))
        for file in files:
            parts = file.relative_to(root).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules


def imported(file: Path) -> Iterator[str]:
    """Yield the absolute names that `file` imports; ``from a import b`` imports ``a.b``."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def imports(root: Path) -> dict[str, set[str]]:
    """Map each module of the packages to the modules of the packages that it imports."""
    files = sources(root)

    def module_of(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    graph = {}
    for module, file in files.items():
        names = (name for name in imported(file) if not name.startswith(EXTENSION))
        graph[module] = {module_of(name) for name in names} - {"", module}
    return graph


@functools.cache
def imports_here() -> dict[str, set[str]]:
    """Return the imports of this repository, whose files are parsed once for all tests."""
    return imports(ROOT)


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return groups of modules that import each other, directly or indirectly (Tarjan 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in index:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], index[other])
        if lowest[module] == index[module]:
            position = stack.index(module)
            if len(stack) - position > 1 or module in graph.get(module, ()):
                components.append(sorted(stack[position:]))
            del stack[position:]

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return components


def room(module: str) -> str | None:
    """Return the first name after ``fastbert``, or None for fastbert itself and other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "fastbert" and len(parts) > 1 else None


def upward(graph: Mapping[str, set[str]]) -> list[str]:
    """Return a line for each import inside ``fastbert`` that ``BELOW`` does not allow.

    ``fastbert`` itself and ``fastbert.__main__`` may import all rooms.
    """
    wrong = []
    for module, others in graph.items():
        here = room(module)
        if here is None or here == "__main__":
            continue
        for other in sorted(others):
            if room(other) not in (here, *BELOW[here]):
                wrong.append(f"{module} imports {other}")
    return wrong


def test_no_module_imports_itself_through_others():
    assert cycles(imports_here()) == []


def test_no_room_imports_a_room_above_it():
    assert upward(imports_here()) == []


def test_the_rooms_stand_one_above_the_other():
    assert cycles(BELOW) == []
    assert {name for below in BELOW.values() for name in below} <= set(BELOW)


def test_the_page_draws_every_room_and_arrow():
    assert drawn() in (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def test_no_arrow_is_allowed_that_no_import_takes():
    taken = {
        (room(module), room(other)) for module, others in imports_here().items() for other in others
    }
    allowed = {(name, other) for name, below in BELOW.items() for other in below}
    assert sorted(allowed - taken) == []


def test_every_room_is_known():
    rooms = {room(module) for module in sources(ROOT)} - {None, "__main__"}
    assert rooms <= set(BELOW)


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [["a", "b", "c"]]),
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}}, [["c", "d"], ["a", "b"]]),
        ({"a": {"a"}}, [["a"]]),
    ],
)
def test_cycles_of_a_small_graph_are_found(graph, expected):
    assert cycles(graph) == expected


def plant(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "backward",
    [
        "from fastbert.ops import linear\n",
        "import fastbert.ops.linear\n",
        "def later():\n    from fastbert.ops.linear import gelu\n",
        "if TYPE_CHECKING:\n    from fastbert.ops.linear import gelu\n",
        "import importlib\nimportlib.import_module('fastbert.ops.linear')\n",
    ],
)
def test_a_planted_cycle_is_found(tmp_path, backward):
    plant(tmp_path, {"fastbert/ops/linear.py": "from fastbert.ops.product import project\n"})
    plant(tmp_path, {"fastbert/ops/product.py": backward, "fastbert/ops/__init__.py": ""})
    assert cycles(imports(tmp_path)) == [["fastbert.ops.linear", "fastbert.ops.product"]]
    assert upward(imports(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "line", "target"),
    [
        ("config.py", "from fastbert import ops\n", "fastbert.ops"),
        ("ops/linear.py", "def f():\n    import fastbert.modules\n", "fastbert.modules"),
        ("jobs/encode.py", "from fastbert.cli import main\n", "fastbert.cli"),
        ("data/pairs.py", "from fastbert import BertModel\n", "fastbert"),
        ("bench/timing.py", "from benchmarks.cpu import report\n", "benchmarks.cpu.report"),
    ],
)
def test_a_planted_upward_arrow_is_found(tmp_path, name, line, target):
    packages = ("fastbert", "fastbert/ops", "fastbert/modules", "fastbert/cli")
    plant(tmp_path, {f"{package}/__init__.py": "" for package in packages})
    plant(tmp_path, {"benchmarks/cpu/report.py": "", f"fastbert/{name}": line})
    module = name.removesuffix(".py").replace("/", ".")
    assert upward(imports(tmp_path)) == [f"fastbert.{module} imports {target}"]
