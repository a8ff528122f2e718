"""Check whether an HF model is equal to the stock model that fastbert implements.

The twin of an HF model is a fresh model of the same class and the same config on the meta device.
fastbert runs an HF model only if its modules equal the modules of the twin in everything that a
``forward`` reads. The table `ALLOWED` lists the differences that are allowed, with one reason per
row. The HF model and the twin run the same code, so `stock_code` compares that code with its files.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.integrations import stock_code
from fastbert.integrations.buffer_rules import buffer_problem
from fastbert.integrations.module_rules import (
    LEAVES,
    equal,
    honoured_problems,
    hook_problems,
    is_embedding,
    is_own_forward,
    kind_problem,
    parameter_problem,
    shape_problem,
    shown,
)
from fastbert.integrations.probe import probe
from fastbert.integrations.stock_digests import unknown
from fastbert.integrations.stock_files import MISSING
from fastbert.integrations.twin_cache import Twin, twin_of

# The attributes that nn.Module gives every module. Those with parameters, buffers, children and
# hooks are compared separately.
INTERNAL = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}
# The embedding tables that may have more or fewer rows than the config says.
TABLES = (
    "embeddings.word_embeddings",
    "embeddings.position_embeddings",
    "embeddings.token_type_embeddings",
    "embeddings.tok_embeddings",
    "embed_tokens",
    "embed_positions",
    "word_embedding",
)


class Allowed(NamedTuple):
    """A difference from the twin that does not change what an HF model computes.

    Attributes:
        name: Name of the attribute.
        where: The modules where the difference is allowed: ``"any"``, ``"root"`` for the HF model
            itself, or the name of a class of modules.
        why: Why the difference is harmless, or how fastbert takes it into account.
    """

    name: str
    where: str
    why: str


ALLOWED = (
    Allowed("_is_hf_initialized", "any", "no forward reads it"),
    Allowed("_use_kernels", "root", "it says that no kernels of the hub are used"),
    Allowed("_weight_conversions", "root", "only saving reads it"),
    Allowed("vocab_size", "root", "the word table has the size"),
    Allowed("_is_accelerate_prepared", "root", "only accelerate reads it"),
    Allowed("_is_torch_compile", "root", "no forward reads it"),
    Allowed("_require_grads_hook", "root", "it is the handle of a hook that is compared"),
    Allowed("_require_grads_hooks", "root", "they are the handles of hooks that are compared"),
    Allowed("_output_capturing_hooks_installed", "root", "it says that hooks exist"),
    Allowed("attn_implementation", "root", "AlbertModel keeps a stale copy, which it never reads"),
    Allowed("pooler", "root", "the pooler is called as the HF model calls it, if there is one"),
    Allowed("pooler_activation", "root", "it is called as the HF model calls it"),
    Allowed("name_or_path", "root", "no computation reads it"),
    Allowed("warnings_issued", "root", "no computation reads it"),
    Allowed("quantization_method", "root", "only moving a model reads it; its layers are compared"),
    Allowed("gradient_checkpointing", "any", "it is honoured per layer"),
    Allowed("_gradient_checkpointing_func", "any", "it is honoured per layer"),
    Allowed("_compiled_call_impl", "any", "the compiled call runs the same forward"),
    Allowed("_fastbert_bound_encoder", "root", "it is the encoder of fastbert itself"),
    Allowed("eps", "LayerNorm", "the value is read from the module"),
    Allowed("p", "Dropout", "the probability is read from the module at every call"),
    Allowed("attention_dropout", "any", "the probability is read from the module at every call"),
    Allowed("dropout", "root", "the probability is read from the module at every call"),
    Allowed("dropout", "EsmSelfAttention", "as at the root"),
    Allowed("dropout", "MarianEncoderLayer", "as at the root"),
    Allowed("dropout", "MarianAttention", "as at the root"),
    Allowed("dropout", "T5Attention", "as at the root"),
    Allowed("activation_dropout", "MarianEncoderLayer", "as at the root"),
    Allowed("layer_idx", "any", "only a cache of keys and values reads it; an encoder has none"),
)
_ANYWHERE = {row.name for row in ALLOWED if row.where == "any"}
_PLACED = {(row.name, row.where) for row in ALLOWED}


class ComparisonResult(NamedTuple):
    """The result of a comparison of an HF model with its twin.

    Attributes:
        reason: Why the HF model must run its own code, as ``path.attribute: got VALUE, allowed:
            VALUE``, or None if fastbert can run the HF model.
        called: Path of a module in the HF model → the reason why fastbert must call the module
            instead of using its parameters.
    """

    reason: str | None
    called: dict[str, str]


class _Differs(Exception):
    """A difference because of which the HF model must run its own code."""


def compare(
    hf_model: nn.Module, accelerate: Callable[[nn.Module], Any] | None = None
) -> ComparisonResult:
    """Compare an HF model with its twin.

    The table in `stock_digests` lists the tested versions of the functions of transformers. If the
    HF model reaches a function that is not in the table, the stock code and fastbert both run a
    small model of the same class, once per class. If both agree, one warning names the function.

    Args:
        hf_model: An encoder of transformers, such as a ``BertModel``, which may be accelerated.
        accelerate: A function that makes fastbert run the small model without a comparison. With
            None, a function that is not in the table is a reason to run the HF model's own code.

    Returns:
        The reason why the HF model must run its own code, or the modules that fastbert must call.
    """
    comparison = _Comparison(hf_model)
    try:
        comparison.run()
        _check_semantics(hf_model, accelerate)
    except _Differs as difference:
        return ComparisonResult(str(difference), comparison.called)
    return ComparisonResult(None, comparison.called)


# The class and the names of its unknown functions → the reason why fastbert does not compute the
# same result, or None if it does.
_probed: dict[tuple[Any, ...], str | None] = {}


def _check_semantics(hf_model: nn.Module, accelerate: Callable[[nn.Module], Any] | None) -> None:
    """Raise _Differs if the HF model reaches a function whose result may differ from fastbert's."""
    twin = twin_of(hf_model)
    assert isinstance(twin, Twin), twin
    names = unknown(twin.kinds)
    if not names:
        return
    text = f"{names[0]}: got code that is not among the tested versions of transformers"
    if len(names) > 1:
        text += f" (and {len(names) - 1} others)"
    if accelerate is None:
        raise _Differs(f"{text}, allowed: the pinned functions")
    key = (type(twin.model), *names)
    if key not in _probed:
        _probed[key] = probe(hf_model, accelerate)
        if _probed[key] is None:
            warnings.warn(f"fastbert: {text}; a small model agrees with fastbert", stacklevel=3)
    if _probed[key] is not None:
        raise _Differs(f"{text}; a small model differs from fastbert: {_probed[key]}")


class Facts(NamedTuple):
    """The objects on whose state a comparison of classes and tables depends.

    Attributes:
        dicts: Dictionaries. The comparison is repeated if a value is replaced by another object.
        classes: Classes. The comparison is repeated if an attribute of a class changes.
        functions: Functions. The comparison is repeated if their code or defaults change.
    """

    dicts: list[dict[str, Any]]
    classes: list[type]
    functions: list[FunctionType]


def facts(hf_model: nn.Module) -> Facts:
    """Return the objects outside the modules of `hf_model` on which its comparison depends.

    Args:
        hf_model: An encoder of transformers.
    """
    twin = twin_of(hf_model)
    return Facts(*stock_code.facts(twin.kinds)) if isinstance(twin, Twin) else Facts([], [], [])


class _Comparison:
    def __init__(self, hf_model: nn.Module) -> None:
        self.hf_model = hf_model
        self.called: dict[str, str] = {}
        self.seen: dict[int, str] = {}
        self.device: tuple[str, torch.device] | None = None
        self.dtype: tuple[str, torch.dtype] | None = None
        self.config: Any = getattr(hf_model, "config", None)
        self.alike = False
        self.fields: dict[tuple[int, type], str | None] = {}

    def run(self) -> None:
        """Compare all properties; raise _Differs if the HF model must run its own code."""
        twin = twin_of(self.hf_model)
        if isinstance(twin, str):
            raise _Differs(twin)
        stock_code.refresh(twin.kinds)
        if twin.problem is not None:
            raise _Differs(twin.problem)
        if getattr(self.config, "is_causal", None):
            raise _Differs(f"config.is_causal: got {self.config.is_causal}, allowed: False")
        self.alike = twin.alike
        self.walk("", self.hf_model, twin.model)

    def report(self, path: str, name: str, text: str, twin: nn.Module) -> None:
        """Record that fastbert must call the module at `path`, or raise _Differs.

        Only linear layers and modules of the embedding can be called.
        """
        words = ".".join(part for part in (path, name) if part) or type(twin).__name__
        if not is_embedding(path) and type(twin) is not nn.Linear:
            raise _Differs(f"{words}: {text}")
        self.called.setdefault(path, f"{words}: {text}")

    def walk(self, path: str, hf_model: nn.Module | None, twin: nn.Module) -> None:
        """Compare a module and the modules inside it."""
        if hf_model is None:
            self.report(path, "", f"got None, allowed: {type(twin).__name__}", twin)
            return
        if id(hf_model) in self.seen:
            text = f"got the module at {self.seen[id(hf_model)]!r} again, allowed: one of its own"
            self.report(path, "", text, twin)
            return
        self.seen[id(hf_model)] = path
        code = stock_code.code_of(type(twin))
        for name, text in self.differences(path, hf_model, twin, code):
            self.report(path, name, text, twin)
        if path not in self.called and type(twin) not in LEAVES:
            self.children(path, hf_model, twin, code)

    def differences(
        self, path: str, hf_model: nn.Module, twin: nn.Module, code: stock_code.Code
    ) -> Iterator[tuple[str, str]]:
        """Yield each difference of one module as the name of an attribute and a description.

        An empty name means that the class of the module or the code of the class differs.
        """
        problem = kind_problem(type(hf_model), type(twin), code, root=not path)
        if problem is not None:
            for name in ("in_features", "out_features"):
                got, allowed = getattr(hf_model, name, None), getattr(twin, name, None)
                if type(twin) is nn.Linear and got is not None and got != allowed:
                    raise _Differs(f"{path}.{name}: got {got}, allowed: {allowed}")
            yield "", problem
            # If the class differs, no other property of the module can be compared.
            return
        if code.problem is not None:
            yield "", code.problem
        if path:
            yield from hook_problems(path, hf_model)
        yield from self.attributes(path, hf_model, twin, code)
        yield from self.parameters(path, hf_model, twin, code)
        for name in _either(hf_model._buffers, twin._buffers):
            if name in twin._buffers or read(name, code):
                text = buffer_problem(name, hf_model._buffers.get(name), twin, self.config)
                if text is not None:
                    yield name, text
                elif (buffer := hf_model._buffers[name]) is not None:
                    self.one_device(f"{path}.{name}", buffer)

    def attributes(
        self, path: str, hf_model: nn.Module, twin: nn.Module, code: stock_code.Code
    ) -> Iterator[tuple[str, str]]:
        """Yield the differences of the attributes that the code of the class reads."""
        actual, expected = vars(hf_model), vars(twin)
        where = type(twin).__name__ if path else "root"
        for name in _either(actual, expected):
            allowed_here = name in INTERNAL or name in _ANYWHERE or (name, where) in _PLACED
            if allowed_here or not read(name, code):
                continue
            got, allowed = actual.get(name, MISSING), expected.get(name, MISSING)
            # The forward of the HF model itself is allowed, because it has already reached this
            # comparison.
            if name == "forward" and (not path or is_own_forward(hf_model, got)):
                continue
            if name == "config":
                problem = self.config_problem(got, code, type(twin))
                if problem is not None:
                    yield name, problem
            elif not equal(got, allowed):
                yield name, f"got {shown(got)}, allowed: {shown(allowed)}"
        yield from honoured_problems(hf_model, twin)

    def config_problem(self, config: Any, code: stock_code.Code, kind: type) -> str | None:
        """Return how a module's config differs from the HF model's, or None if it does not.

        Only the fields that the code of the module reads are compared.
        """
        if config is self.config:
            return None
        key = (id(config), kind)
        if key not in self.fields:
            self.fields[key] = None
            actual, expected = getattr(config, "__dict__", {}), vars(self.config)
            read_here = sorted((actual.keys() | expected.keys()) & code.names)
            for name in ("_attn_implementation", *read_here):
                got, allowed = (getattr(c, name, MISSING) for c in (config, self.config))
                if not equal(got, allowed):
                    text = f"got {name}={shown(got)}, allowed: {shown(allowed)}"
                    self.fields[key] = text
        return self.fields[key]

    def parameters(
        self, path: str, hf_model: nn.Module, twin: nn.Module, code: stock_code.Code
    ) -> Iterator[tuple[str, str]]:
        """Yield the differences of the parameters; the values of the parameters may differ."""
        for name, parameter in hf_model._parameters.items():
            if name not in twin._parameters and read(name, code):
                yield name, f"got {shown(parameter)}, allowed: no such parameter"
        for name, expected in twin._parameters.items():
            parameter = hf_model._parameters.get(name)
            problem = parameter_problem(parameter, expected)
            shape = shape_problem(parameter, expected, path in TABLES)
            if shape is not None and not is_embedding(path):
                # A module of another shape, such as one with fewer heads, cannot be called either.
                raise _Differs(f"{path}.{name}: {shape}")
            if problem is not None or shape is not None:
                yield name, problem or str(shape)
            elif parameter is not None:
                self.one_device(f"{path}.{name}", parameter)
                self.one_dtype(f"{path}.{name}", parameter)

    def one_device(self, name: str, tensor: Tensor) -> None:
        """Raise _Differs if a tensor is on another device than the first compared tensor."""
        self.device = self.device or (name, tensor.device)
        first, device = self.device
        if tensor.device != device:
            text = f"got device {tensor.device}, allowed: {device}, the device of {first}"
            raise _Differs(f"{name}: {text}")

    def one_dtype(self, name: str, tensor: Tensor) -> None:
        """Raise _Differs if a parameter has another dtype than the first compared parameter."""
        self.dtype = self.dtype or (name, tensor.dtype)
        first, dtype = self.dtype
        if tensor.dtype != dtype:
            text = f"got {tensor.dtype}, allowed: {dtype}, the dtype of {first}"
            raise _Differs(f"{name}: {text}")

    def children(
        self, path: str, hf_model: nn.Module, twin: nn.Module, code: stock_code.Code
    ) -> None:
        """Compare the modules inside a module. The pooler is called, so it may be anything."""
        every = isinstance(twin, nn.ModuleList)
        for name in _either(hf_model._modules, twin._modules):
            if not path and name.startswith("pooler"):
                continue
            inner = f"{path}.{name}" if path else name
            expected = twin._modules.get(name)
            if self.alike and isinstance(twin, nn.ModuleList):
                expected = twin._modules["0"]
            if expected is not None:
                self.walk(inner, hf_model._modules.get(name), expected)
            elif hf_model._modules[name] is not None and (every or read(name, code)):
                kind = type(hf_model._modules[name]).__name__
                self.report(path, name, f"got {kind}, allowed: no module", twin)


def _either(first: dict[str, Any], second: dict[str, Any]) -> dict[str, None]:
    """Return the names that are in at least one of two dictionaries, in order."""
    return dict.fromkeys((*first, *second))


def read(name: str, code: stock_code.Code) -> bool:
    """Return whether the code of a class can read an attribute of this name.

    Code that builds a name, as ``f"{layer_type}_inv_freq"`` does, contains only the end of the
    name, so a name with the same end counts as well.
    """
    return name in code.names or name.endswith(_ends(code.names))


@functools.cache
def _ends(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name[0] == "_" and name[1:2].isalpha())
