"""Project rules that a test can check: allowed imports, and the cost of importing fastbert."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import _fresh_python

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fastbert"


def imports(path: Path):
    """Yield each absolute module name that a file imports, also in functions and TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            if base == "fastbert":
                yield from (f"fastbert.{alias.name}" for alias in node.names)
            else:
                yield base


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in ("__init__", "__main__"):
            yield parts[0], path


def host_names(node: ast.AST):
    """Yield the dotted names that a syntax tree uses outside the functions of GPU kernels."""
    for child in ast.iter_child_nodes(node):
        decorators = getattr(child, "decorator_list", [])
        if any("triton.jit" in ast.unparse(decorator) for decorator in decorators):
            continue
        if isinstance(child, ast.Attribute):
            yield ast.unparse(child)
        yield from host_names(child)


def test_launchers_divide_without_triton():
    """No launcher uses ``triton.cdiv``, which takes ten times as long on the CPU."""
    example = "@triton.jit\ndef kernel(): triton.cdiv(1, 2)\ndef launch(): triton.{}(1, 2)"
    assert "triton.cdiv" in host_names(ast.parse(example.format("cdiv")))
    assert "triton.cdiv" not in host_names(ast.parse(example.format("other")))
    for path in sorted((ROOT / "kernels").glob("*.py")):
        names = set(host_names(ast.parse(path.read_text(encoding="utf-8"))))
        assert "triton.cdiv" not in names, path.name


def test_transformers_is_imported_in_one_place():
    restricted = {"transformers", "sentence_transformers"}
    importers = {
        str(path.relative_to(ROOT))
        for _, path in modules()
        for name in imports(path)
        if name.split(".")[0] in restricted
    }
    assert importers == {
        f"fastbert/integrations/{name}.py"
        for name in (
            "accelerate",
            "attention_interface",
            "bound_xlnet",
            "quantized_models",
            "stock_heads",
            "stock_models",
        )
    }


def test_environment_variables_are_read_in_one_place():
    readers = [
        str(path.relative_to(ROOT))
        for _, path in modules()
        if "os.environ" in path.read_text(encoding="utf-8")
    ]
    assert readers == ["fastbert/ops/backend.py"]


def run(code: str, blocked: tuple[str, ...] = (), after: str = "torch") -> str:
    """Return the output of ``code`` in a new Python in which importing ``blocked`` fails."""
    source = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n{code}"
    result = _fresh_python.run("-c", source, after=after)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_package_imports_without_torch_and_help_does_not_load_it():
    code = (
        "import sys, fastbert\n"
        "fastbert.BertConfig()\n"
        "assert 'torch' not in sys.modules\n"
        "from typer.testing import CliRunner\n"
        "from fastbert.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_without_extension_triton_and_transformers_the_model_runs_and_info_says_so():
    blocked = ("fastbert._C", "triton", "transformers", "accelerate", "matplotlib", "pyarrow")
    run(
        "import torch, fastbert\n"
        "config = fastbert.BertConfig.preset('tiny', vocab_size=50)\n"
        "out = fastbert.BertModel(config)(torch.ones(1, 4, dtype=torch.int64))\n"
        "assert out.last_hidden_state.shape == (1, 4, 128)",
        blocked,
    )
    told = run("from fastbert.cli import main; sys.argv = ['fastbert', 'info']; main()", blocked)
    assert "_C is missing" in " ".join(told.split())


def test_accelerate_without_transformers_says_what_to_install():
    told = run(
        "import torch, fastbert\n"
        "from fastbert import BertModel, data, modules, ops\n"
        "for name in ('accelerate', 'restore'):\n"
        "    try:\n"
        "        getattr(fastbert, name)\n"
        "    except ImportError as error:\n"
        "        print(error)\n",
        ("transformers",),
    )
    lines = told.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("fastbert.accelerate needs transformers >= 5 (")
        assert line.endswith("pip install 'fastbert[transformers]'")


def test_accelerate_without_extension_and_triton_serves():
    run(
        "import torch, transformers, fastbert\n"
        "sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)\n"
        "config = transformers.BertConfig(vocab_size=50, intermediate_size=40, **sizes)\n"
        "model = transformers.BertModel(config).eval()\n"
        "ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5)\n"
        "mask[1, 2:] = 0\n"
        "with torch.no_grad():\n"
        "    stock = model(ids, mask).pooler_output\n"
        "    fast = fastbert.accelerate(model)(ids, mask).pooler_output\n"
        "torch.testing.assert_close(fast, stock)",
        ("fastbert._C", "triton", "sentence_transformers", "peft"),
        "transformers",
    )
