"""``fastbert info``: the machine, the extension, the assembler and the backend of each operation.

On a GPU, the command also shows the times from which operations choose a backend, the calls that
the CUDA C++ kernels do not support, and the matrix products of the feed-forward that cuBLAS
computes. With a model, the command shows the model's configuration and backends instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fastbert.cli.common import DTYPES, new_table, out, print_json
from fastbert.config import OWN_TYPES

if TYPE_CHECKING:
    from fastbert.config import BertConfig
    from fastbert.io.checkpoint import Stored
    from fastbert.transformer_config import TransformerConfig

# The labels in the tables for the keys of the JSON output that need an explanation.
LABELS = {
    "isa": "instruction set",
    "cuda": "CUDA kernels",
    "cuda_archs": "GPU architectures",
    "without_cuda": "why no CUDA kernels",
    "cpu_isas": "instruction sets built",
    "cpu_isas_supported": "supported by this CPU",
    "cpu_isas_slow": "slower here than a lower one",
}

# The call for which the table shows the chosen backends: inference of BERT-base with 32 sequences
# of 512 tokens.
TYPICAL: dict[str, Any] = {"head_dim": 64, "columns": 768, "length": 512, "rows": 16384}
ATTENTION_OPTIONS = ("bias", "window", "scale", "weights")


def info(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder (or hub id) of a checkpoint."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Show versions, the machine, the extension, and the backend of each operation.

    With MODEL, the command shows the configuration of the model, the backends of
    its operations, and whether fastbert.accelerate serves a model of transformers
    with this configuration. The command reads config.json and no weights.
    """
    content = collect() if model is None else collect_model(model)
    if as_json:
        print_json(content)
        return
    for heading in (
        ("versions", "machine", "extension", "compiler") if model is None else ("model",)
    ):
        out.print(_facts(heading, content[heading]))
    out.print(_backends(content["backends"]))
    if model is None and content["tuned"]:
        out.print(_facts("fastbert tune", content["tuned"]))
    if model is None and content["gpu times"]:
        out.print(_gpu_times(content["gpu times"]))
        out.print(_refusals(content["not by cuda"]))
        out.print(_products(content["products of cuda"]))


def collect_model(path_or_hub_id: str) -> dict[str, Any]:
    """Return everything that ``fastbert info MODEL`` shows, as plain data."""
    import torch

    from fastbert.integrations import stock_models
    from fastbert.io import checkpoint, marian

    stored = checkpoint.without_weights(path_or_hub_id)
    is_encoder = stored.content.get("model_type") not in marian.KINDS
    model, facts = (
        _encoder_facts(stored) if is_encoder else _transformer_facts(marian.config_of(stored))
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = ("encoder", "decoder")
    rows = []
    for dtype in DTYPES:
        choices = model.to(getattr(torch, dtype)).backends(device)
        for op, choice in sorted(choices.items(), key=lambda item: item[0] in whole):
            rows.append({"op": op, "device": device, "dtype": dtype, **choice._asdict()})
    why_not = stock_models.why_not_accelerated(stored.folder)
    served = "serves it" if is_encoder else "serves its encoder"
    served = served if why_not is None else f"not served: {why_not}"
    return {"model": {**facts, "fastbert.accelerate": served}, "backends": rows}


def _encoder_facts(stored: Stored) -> tuple[Any, dict[str, Any]]:
    """Return a model without weights for the checkpoint of an encoder, and what is shown of it."""
    import torch

    from fastbert import modules

    config, architectures = stored.config({}), stored.architectures()
    named = [getattr(modules, name, None) for name in architectures]
    heads = [kind for kind in named if kind is not None and config.model_type in OWN_TYPES]
    kind = heads[0] if heads else modules.BertModel
    with torch.device("meta"):
        model = kind(config).eval()
    choices = config.architecture
    windows = [window for window in choices.windows if window >= 0]
    return model, {
        "family": config.model_type,
        "class": kind.__name__,
        "checkpoint of": architectures,
        "parameters": f"{model.num_parameters():,}",
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "heads": f"{config.num_attention_heads} of {config.head_dim}",
        "activation": f"{config.hidden_act}{', gated' if choices.gated else ''}",
        "positions": _positions(config),
        "windows": f"{len(windows)} layers see {windows[0]} tokens on each side"
        if windows
        else None,
    }


def _transformer_facts(config: TransformerConfig) -> tuple[Any, dict[str, Any]]:
    """Return an encoder–decoder without weights, and what is shown of it."""
    import torch

    from fastbert.modules.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(config).eval()
    layers, heads = (
        f"{count} in the encoder, {other} in the decoder"
        for count, other in (
            (config.encoder_layers, config.decoder_layers),
            (config.encoder_attention_heads, config.decoder_attention_heads),
        )
    )
    positions = "sinusoids" if config.static_position_embeddings else "a table"
    return model, {
        "family": "marian",
        "class": "Transformer",
        "parameters": f"{model.num_parameters():,}",
        "layers": layers,
        "hidden size": config.d_model,
        "heads": heads,
        "activation": config.activation_function,
        "positions": f"{positions} for up to {config.max_position_embeddings} tokens",
        "layer norms": "before each block" if config.normalize_before else "after each block",
    }


def _positions(config: BertConfig) -> str:
    choices = config.architecture
    if choices.rotary_bases:
        return f"rotary, base {', '.join(f'{b:g}' for b in sorted(set(choices.rotary_bases)))}"
    relative = choices.relative_positions
    table = f"a table for up to {config.max_length} tokens" if choices.position_table else ""
    other = "a learned bias by distance" if choices.distance_buckets else ""
    other = "a bias that falls with the distance (ALiBi)" if choices.distance_slopes else other
    if relative is not None:
        kinds = f"{'buckets' if relative.farthest else 'a row'} for each distance"
        other = f"relative, {2 * relative.span} rows, {kinds}"
    return ", and ".join(filter(None, (table, other))) or "none"


def collect() -> dict[str, Any]:
    """Return everything that ``fastbert info`` shows, as plain data."""
    import torch

    from fastbert.machine import describe

    machine = describe()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "versions": machine.versions,
        "machine": {
            "cpu": machine.cpu,
            "cores": machine.cores,
            "threads": machine.threads,
            "isa": machine.isa,
            "gpu": machine.gpu,
            "system": machine.system,
        },
        "extension": _extension(),
        "compiler": _compiler(),
        "backends": _choices(device),
        "tuned": _tuned(),
        "gpu times": _times_of_this_gpu(),
        "not by cuda": _calls_without_cuda(),
        "products of cuda": _products_of_cuda(),
    }


def _extension() -> dict[str, Any]:
    from fastbert.ops import backend

    if backend.EXTENSION is None:
        return {"built": False, "reason": backend.EXTENSION_STATE}
    facts = backend.EXTENSION.build_info()
    if facts["cuda"]:
        del facts["without_cuda"]
    return {"built": True, **facts, "isa": backend.EXTENSION.cpu_isa()}


def _compiler() -> dict[str, Any]:
    """Return the assembler that Triton uses for this machine's GPU, or for sm_90 without a GPU."""
    import torch

    from fastbert.ops.backend import HAS_TRITON

    if not HAS_TRITON:
        return {"ptxas": None, "warning": None}
    from fastbert.kernels.assembler import assembler

    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    arch = 10 * major + minor
    path = assembler(arch)
    return {
        "GPU architecture": f"sm_{arch}",
        "ptxas": f"{path.version}, {path.path}",
        "warning": path.warning(arch),
    }


def _choices(device: str) -> list[dict[str, str]]:
    """Return the backend that each operation chooses in each dtype by default, and the reason.

    The last rows, with the operation "encoder", are for all layers of an encoder in inference.
    """
    import torch

    from fastbert.ops import backend
    from fastbert.ops.encoder import choose

    rows = []
    for op in (*sorted(backend.TABLES), "encoder"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = backend.dtype_name(dtype)
            try:
                request = backend.Request(device, dtype, **TYPICAL)
                if op == "encoder":
                    choice, reason, _ = choose(request, {})
                else:
                    choice, reason = backend.resolve(op, None, request)
            except ValueError as error:
                choice, reason = "none", str(error)
            rows.append(
                {"op": op, "device": device, "dtype": name, "backend": choice, "reason": reason}
            )
    return rows


def _tuned() -> dict[str, Any]:
    """Return the file of the table of ``fastbert tune``, and what it decides."""
    from fastbert.ops import backend

    if backend.capability() is None:
        return {}
    file, table = backend.tuned_file(), backend.tuned_table()
    if not file.exists():
        return {"table": None, "reason": "fastbert tune has not run with this GPU and versions"}
    return {"table": str(file), "times": len(table.points), "choices": list(table.choices)}


def _times_of_this_gpu() -> list[dict[str, Any]]:
    """Return the times of ``ops.gpu_times`` that apply to this machine's GPU, as table rows."""
    from fastbert.ops import backend, gpu_times

    arch = backend.capability()
    if arch is None:
        return []
    known = (*backend.tuned_table().points, *gpu_times.POINTS)
    points = [point for point in known if gpu_times.is_code_for(point, arch)]
    return gpu_times.rows(points, backend.ORDER["cuda"])


def _calls_without_cuda() -> list[dict[str, str]]:
    """Return for several kinds of calls the reason why the backend "cuda" refuses them, if any."""
    import torch

    from fastbert.ops import backend

    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    calls: list[tuple[str, str, dict[str, Any]]] = [
        *(("attention", name, {"options": (name,)}) for name in ATTENTION_OPTIONS),
        ("attention", "head dim 80", {"head_dim": 80}),
        ("attention", "float32", {"dtype": dtype["float32"]}),
        ("layer_norm", "8192 columns", {"columns": 8192}),
        ("feed_forward", "ReLU", {"activation": "relu"}),
    ]
    rows = []
    for op, call, change in calls:
        request = backend.Request("cuda", dtype["bfloat16"], **TYPICAL)._replace(**change)
        reason = backend.refusal(op, "cuda", request)
        rows.append({"op": op, "call": call, "reason": reason or "served"})
    return rows


def _products_of_cuda() -> list[dict[str, str]]:
    """Return which matrix products of the feed-forward cuBLAS computes on the backend "cuda".

    Each row is for one product with one kind of operands, and has the reason. The reasons come from
    the functions that choose between cuBLAS and CUDA C++ in every call.
    """
    import torch

    from fastbert.ops.fused_products import PRODUCTS, library_reason

    def operand(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    x, weight, single = operand(512, 768), operand(3072, 768), torch.float32
    kinds = {
        "bf16 or fp16": (x, weight, None),
        "fp32": (operand(512, 768, single), operand(3072, 768, single), None),
        "a width of 770": (operand(512, 770), operand(3072, 770), None),
        "a weight by columns": (x, operand(768, 3072).t(), None),
    }
    with_bias = {"a bias of every second element": (x, weight, operand(3072, 2)[:, 0])}
    products: list[tuple[str, str, str | None]] = []
    for product, always in PRODUCTS.items():
        if always is not None:
            products.append((product, "all", always))
            continue
        of_product = kinds | with_bias if "b1" in product else kinds
        products += [(product, name, library_reason(*given)) for name, given in of_product.items()]
    fused = "the epilogue saves a pass over the pre-activation"
    return [
        {
            "product": product,
            "operands": operands,
            "by": "library" if reason else "CUDA C++",
            "reason": reason or fused,
        }
        for product, operands, reason in products
    ]


def _gpu_times(rows: list[dict[str, Any]]) -> Table:
    table = new_table(
        "times on this GPU in µs, of which only measured ones decide; * = the first choice"
    )
    for heading in ("operation", "shape", "dtype", "pass", "kind"):
        table.add_column(heading, no_wrap=True)
    table.add_column("backends", overflow="fold")
    for row in rows:
        times = ", ".join(
            f"{name}{'*' if name == row['first'] else ''} {time:g}"
            for name, time in row["microseconds"].items()
        )
        table.add_row(row["op"], row["shape"], row["dtype"], row["pass"], row["kind"], times)
    return table


def _refusals(rows: list[dict[str, str]]) -> Table:
    table = new_table("calls that CUDA C++ does not serve")
    for heading in ("operation", "call"):
        table.add_column(heading, no_wrap=True)
    table.add_column("reason", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def _products(rows: list[dict[str, str]]) -> Table:
    table = new_table("products of the feed-forward of CUDA C++")
    for heading in ("product", "operands", "by"):
        table.add_column(heading, no_wrap=True)
    table.add_column("reason", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def _facts(title: str, facts: dict[str, Any]) -> Table:
    table = new_table(title)
    table.show_header = False
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(LABELS.get(name, name), _words(value))
    return table


def _words(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _backends(rows: list[dict[str, str]]) -> Table:
    """Make the table of backends; dtypes with the same backend and reason share a row."""
    merged: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        merged.setdefault((row["op"], row["backend"], row["reason"]), []).append(row["dtype"])
    title = f"backends on {rows[0]['device'] if rows else 'this machine'}"
    table = new_table(title)
    for heading in ("operation", "dtype", "backend"):
        table.add_column(heading, no_wrap=True)
    table.add_column("reason", overflow="fold")
    for (op, choice, reason), dtypes in merged.items():
        table.add_row(op, ", ".join(dtypes), choice, reason)
    return table
