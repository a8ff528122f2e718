"""The rules by which one module of an HF model is compared with the same module of its twin.

An HF model is a model of transformers. Its twin is a fresh model of the same class and config on
the meta device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.integrations import stock_code
from fastbert.integrations.stock_files import MISSING, placed

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# The attributes of modules with a dropout probability, which is read at every call.
PROBABILITIES = ("p", "attention_dropout", "dropout", "activation_dropout")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
LEAVES = (nn.Linear, nn.LayerNorm, nn.Embedding)
# The modules of an encoder that embed the tokens. If any part of them deviates, fastbert calls them
# as the encoder does.
EMBEDDINGS = ("embeddings", "embed_tokens", "embed_positions")


def is_embedding(path: str) -> bool:
    """Return whether the path names the embeddings or a module inside the embeddings."""
    return path.partition(".")[0] in EMBEDDINGS


def kind_problem(
    kind: type, expected: type, code: stock_code.Code, *, root: bool = False
) -> str | None:
    """Return why the class `kind` must not replace the class `expected`, or None if it may.

    A subclass of `expected` is allowed if it overrides nothing that the code of `expected` uses.

    Args:
        kind: Class of the HF model's module.
        expected: Class of the twin's module.
        code: The code of `expected`.
        root: Whether the module is the HF model itself, which may have a ``forward`` of its own.
            Such a ``forward`` runs, and reaches fastbert through ``super().forward``.
    """
    dropouts = (nn.Dropout, nn.Identity)
    if kind is expected or (kind in dropouts and expected in dropouts):
        return None
    title = f"{kind.__module__}.{kind.__qualname__}"
    if not issubclass(kind, expected) or expected in (nn.ModuleList, *LEAVES):
        return f"got a {title}, allowed: {expected.__name__}"
    names = (code.own | stock_code.IMPLICIT) - {"__init__", "__module__", "__doc__"}
    names -= {"forward"} if root else set()
    for base in kind.__mro__:
        if base in expected.__mro__ or "fastbert_restores" in vars(base):
            continue
        for name in sorted(names & vars(base).keys()):
            if not (name == "forward" and _only_checkpoints(base, expected)):
                return f"got a {title} with its own {name}, allowed: {expected.__name__}"
    return None


def _only_checkpoints(kind: type, expected: Any) -> bool:
    """Return whether the forward of `kind` wraps that of `expected` for gradient checkpointing."""
    forward = vars(kind)["forward"]
    cells = getattr(forward, "__closure__", None) or ()
    if not any(cell.cell_contents is expected.forward for cell in cells):
        return False
    place = placed(forward.__code__, forward.__globals__["__name__"])
    return place is not None and place.outermost == "GradientCheckpointingLayer"


def is_own_forward(hf_model: nn.Module, value: Any) -> bool:
    """Return whether the value is the forward of the HF model's class, bound to the HF model."""
    kind: Any = type(hf_model)
    bound = isinstance(value, MethodType) and value.__self__ is hf_model
    return bound and value.__func__ is kind.forward


def honoured_problems(hf_model: nn.Module, twin: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and a description of each honoured attribute with an unsupported value.

    fastbert honours the dropout probabilities and the function for gradient checkpointing.
    """
    for name in PROBABILITIES:
        value = vars(hf_model).get(name, 0.0)
        if name in vars(twin) and (type(value) not in (int, float) or not 0.0 <= value <= 1.0):
            yield name, f"got {value!r}, allowed: a number from 0 to 1"
    function = vars(hf_model).get("_gradient_checkpointing_func")
    inner = getattr(function, "func", function)
    if inner is not None:
        title = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__name__', inner)}"
        if title != "torch.utils.checkpoint.checkpoint":
            yield "_gradient_checkpointing_func", f"got {title}, allowed: torch's checkpoint"


def hook_problems(path: str, hf_model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the kind and a description of each hook that transformers did not register."""
    for name in HOOKS:
        for hook in vars(hf_model).get(name, {}).values():
            if not _is_known_hook(path, hook):
                yield name.strip("_"), f"got {shown(hook)}, allowed: no hook"


def _is_known_hook(path: str, hook: Any) -> bool:
    """Return whether a hook collects outputs or makes the embeddings' output require gradients."""
    if not isinstance(hook, FunctionType):
        return False
    module = hook.__globals__.get("__name__", "")
    place = placed(hook.__code__, module)
    known = {"transformers.utils.output_capturing": "install_output_capuring_hook"}
    if is_embedding(path):
        known["transformers.modeling_utils"] = "PreTrainedModel"
    return place is not None and known.get(module) == place.outermost


def parameter_problem(parameter: Any, expected: Any) -> str | None:
    """Return why a parameter cannot replace the twin's parameter, or None if it can.

    Presence, type, dtype, layout and strides are checked, but not the shape.

    Args:
        parameter: The HF model's parameter, or None if it is absent.
        expected: The twin's parameter, or None if it is absent.
    """
    if parameter is None or expected is None:
        same = parameter is expected
        return None if same else f"got {shown(parameter)}, allowed: {shown(expected)}"
    if type(parameter) is not nn.Parameter:
        return f"got a {type(parameter).__name__}, allowed: a Parameter"
    if parameter.dtype not in DTYPES or parameter.layout is not torch.strided:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"got {parameter.dtype} and {parameter.layout}, allowed: {allowed}, strided"
    if not parameter.is_contiguous():
        return f"got stride {parameter.stride()}, allowed: a contiguous parameter"
    return None


def shape_problem(parameter: Any, expected: Any, is_table: bool) -> str | None:
    """Return how the shape of a parameter differs from the twin's, or None if it does not.

    Args:
        parameter: The HF model's parameter, or None if it is absent.
        expected: The twin's parameter, or None if it is absent.
        is_table: Whether the parameter is an embedding table, whose number of rows may differ.
    """
    if parameter is None or expected is None:
        return None
    shape, allowed = tuple(parameter.shape), tuple(expected.shape)
    same = len(shape) == len(allowed) and shape[is_table:] == allowed[is_table:]
    return None if same else f"got shape {shape}, allowed: {allowed}"


def equal(a: Any, b: Any) -> bool:
    """Return whether two values of an attribute have equal types and equal contents."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, functools.partial):
        return equal((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    comparable = (int, float, str, bytes, frozenset, set, torch.dtype, torch.device)
    return isinstance(a, comparable) and bool(a == b)


def shown(value: Any) -> str:
    """Return a description of a value, in at most about 60 characters."""
    if value is MISSING:
        return "nothing"
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
