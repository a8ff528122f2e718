"""Whether a host is known to be equal to the stock model that fastbert implements.

The twin of a host is a fresh model of the same class and the same config, without memory of its
own. A host is served only if its modules are those of the twin, in everything that a ``forward``
reads. What may differ stands in the table `ALLOWED`, with one reason per row. The code that the
classes reach is compared with its files by `stock_code`, because the twin runs the same code.
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

# The attributes of every module. Parameters, buffers, children and hooks are compared on their own.
INTERNAL = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}
# These tables may have more rows or fewer rows than the config says.
TABLES = (
    "embeddings.word_embeddings",
    "embeddings.position_embeddings",
    "embeddings.token_type_embeddings",
    "embeddings.tok_embeddings",
)


class Allowed(NamedTuple):
    """A difference from the twin that does not change what a host computes.

    Attributes:
        name: Name of the attribute.
        where: ``"any"`` module, the ``"root"``, or the modules of a class that is named here.
        why: Why the difference is harmless, or how it is honoured.
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
    Allowed("pooler", "root", "the pooler is called as the host calls it, if there is one"),
    Allowed("pooler_activation", "root", "it is called as the host calls it"),
    Allowed("name_or_path", "root", "no computation reads it"),
    Allowed("warnings_issued", "root", "no computation reads it"),
    Allowed("gradient_checkpointing", "any", "it is honoured per layer"),
    Allowed("_gradient_checkpointing_func", "any", "it is honoured per layer"),
    Allowed("_compiled_call_impl", "any", "the compiled call runs the same forward"),
    Allowed("_fastbert_bound_encoder", "root", "it is the encoder of fastbert itself"),
    Allowed("eps", "LayerNorm", "the value is read from the module"),
    Allowed("p", "Dropout", "the probability is read from the module at every call"),
    Allowed("attention_dropout", "any", "the probability is read from the module at every call"),
    Allowed("layer_idx", "any", "only a cache of keys and values reads it; an encoder has none"),
)
_ANYWHERE = {row.name for row in ALLOWED if row.where == "any"}
_PLACED = {(row.name, row.where) for row in ALLOWED}


class Verdict(NamedTuple):
    """The result of a comparison.

    Attributes:
        reason: Why the host must run its own code, as ``path.attribute: got VALUE, allowed:
            VALUE``, or None if the host can be served.
        called: Paths of modules in the host → the reason why the module must be called as the host
            calls it, instead of using its parameters.
    """

    reason: str | None
    called: dict[str, str]


class _Differs(Exception):
    """A difference that makes the host run its own code."""


def compare(host: nn.Module, accelerate: Callable[[nn.Module], Any] | None = None) -> Verdict:
    """Compare a host with its twin.

    If the host reaches a function of transformers whose semantics are not pinned, a small model of
    its class is run by the stock code and by fastbert, once per class. If both agree, one warning
    names the function.

    Args:
        host: An encoder of transformers, such as a ``BertModel``; also an accelerated one.
        accelerate: A function that makes fastbert run a model without a comparison, for the small
            model. With None, an unknown function is a reason.

    Returns:
        The reason why the host must run its own code, or the modules that must be called.
    """
    comparison = _Comparison(host)
    try:
        comparison.run()
        _check_semantics(host, accelerate)
    except _Differs as difference:
        return Verdict(str(difference), comparison.called)
    return Verdict(None, comparison.called)


# Class and unknown functions → the reason why fastbert does not compute the same, or None.
_probed: dict[tuple[Any, ...], str | None] = {}


def _check_semantics(host: nn.Module, accelerate: Callable[[nn.Module], Any] | None) -> None:
    """Raise _Differs if the host reaches a function that may not compute what fastbert does."""
    twin = twin_of(host)
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
        _probed[key] = probe(host, accelerate)
        if _probed[key] is None:
            warnings.warn(f"fastbert: {text}; a small model agrees with fastbert", stacklevel=3)
    if _probed[key] is not None:
        raise _Differs(f"{text}; a small model differs from fastbert: {_probed[key]}")


class Facts(NamedTuple):
    """The objects on whose state a verdict about classes and tables depends.

    Attributes:
        dicts: Dictionaries that guard the verdict by the identity of their values.
        classes: Classes that guard the verdict by their version.
        functions: Functions that guard the verdict by their code and defaults.
    """

    dicts: list[dict[str, Any]]
    classes: list[type]
    functions: list[FunctionType]


def facts(host: nn.Module) -> Facts:
    """Return what guards a verdict about `host` outside the modules of `host`.

    Args:
        host: An encoder.
    """
    twin = twin_of(host)
    return Facts(*stock_code.facts(twin.kinds)) if isinstance(twin, Twin) else Facts([], [], [])


class _Comparison:
    def __init__(self, host: nn.Module) -> None:
        self.host = host
        self.called: dict[str, str] = {}
        self.seen: dict[int, str] = {}
        self.device: tuple[str, torch.device] | None = None
        self.dtype: tuple[str, torch.dtype] | None = None
        self.config: Any = getattr(host, "config", None)
        self.alike = False
        self.fields: dict[tuple[int, type], str | None] = {}

    def run(self) -> None:
        """Compare everything, and raise _Differs at the first reason."""
        twin = twin_of(self.host)
        if isinstance(twin, str):
            raise _Differs(twin)
        stock_code.refresh(twin.kinds)
        if twin.problem is not None:
            raise _Differs(twin.problem)
        if getattr(self.config, "is_causal", None):
            raise _Differs(f"config.is_causal: got {self.config.is_causal}, allowed: False")
        self.alike = twin.alike
        self.walk("", self.host, twin.model)

    def report(self, path: str, name: str, text: str, twin: nn.Module) -> None:
        """Note that a module must be called, or raise if that would not help."""
        words = ".".join(part for part in (path, name) if part) or type(twin).__name__
        if not is_embedding(path) and type(twin) is not nn.Linear:
            raise _Differs(f"{words}: {text}")
        self.called.setdefault(path, f"{words}: {text}")

    def walk(self, path: str, host: nn.Module | None, twin: nn.Module) -> None:
        """Compare a module and the modules inside it."""
        if host is None:
            self.report(path, "", f"got None, allowed: {type(twin).__name__}", twin)
            return
        if id(host) in self.seen:
            text = f"got the module at {self.seen[id(host)]!r} again, allowed: one of its own"
            self.report(path, "", text, twin)
            return
        self.seen[id(host)] = path
        code = stock_code.code_of(type(twin))
        for name, text in self.differences(path, host, twin, code):
            self.report(path, name, text, twin)
        if path not in self.called and type(twin) not in LEAVES:
            self.children(path, host, twin, code)

    def differences(
        self, path: str, host: nn.Module, twin: nn.Module, code: stock_code.Code
    ) -> Iterator[tuple[str, str]]:
        """Yield the differences of one module: the attribute and the words about it."""
        problem = kind_problem(type(host), type(twin), code, root=not path)
        if problem is not None:
            for name in ("in_features", "out_features"):
                got, allowed = getattr(host, name, None), getattr(twin, name, None)
                if type(twin) is nn.Linear and got is not None and got != allowed:
                    raise _Differs(f"{path}.{name}: got {got}, allowed: {allowed}")
            yield "", problem
            # Nothing else of a module of another class can be compared.
            return
        if code.problem is not None:
            yield "", code.problem
        if path:
            yield from hook_problems(path, host)
        yield from self.attributes(path, host, twin, code)
        yield from self.parameters(path, host, twin, code)
        for name in _either(host._buffers, twin._buffers):
            if name in twin._buffers or read(name, code):
                text = buffer_problem(name, host._buffers.get(name), twin, self.config)
                if text is not None:
                    yield name, text
                elif (buffer := host._buffers[name]) is not None:
                    self.one_device(f"{path}.{name}", buffer)

    def attributes(
        self, path: str, host: nn.Module, twin: nn.Module, code: stock_code.Code
    ) -> Iterator[tuple[str, str]]:
        """Yield the differences of the attributes that the code of the class reads."""
        ours, theirs = vars(host), vars(twin)
        where = type(twin).__name__ if path else "root"
        for name in _either(ours, theirs):
            allowed_here = name in INTERNAL or name in _ANYWHERE or (name, where) in _PLACED
            if allowed_here or not read(name, code):
                continue
            got, allowed = ours.get(name, MISSING), theirs.get(name, MISSING)
            # The forward of the host itself is running, or calls the method that is running.
            if name == "forward" and (not path or is_own_forward(host, got)):
                continue
            if name == "config":
                problem = self.config_problem(got, code, type(twin))
                if problem is not None:
                    yield name, problem
            elif not equal(got, allowed):
                yield name, f"got {shown(got)}, allowed: {shown(allowed)}"
        yield from honoured_problems(host, twin)

    def config_problem(self, config: Any, code: stock_code.Code, kind: type) -> str | None:
        """Return how a module's own copy of the config differs in the fields that it reads."""
        if config is self.config:
            return None
        key = (id(config), kind)
        if key not in self.fields:
            self.fields[key] = None
            ours, theirs = getattr(config, "__dict__", {}), vars(self.config)
            read_here = sorted((ours.keys() | theirs.keys()) & code.names)
            for name in ("_attn_implementation", *read_here):
                got, allowed = (getattr(c, name, MISSING) for c in (config, self.config))
                if not equal(got, allowed):
                    text = f"got {name}={shown(got)}, allowed: {shown(allowed)}"
                    self.fields[key] = text
        return self.fields[key]

    def parameters(
        self, path: str, host: nn.Module, twin: nn.Module, code: stock_code.Code
    ) -> Iterator[tuple[str, str]]:
        """Yield the differences of the parameters in everything but their values."""
        for name, parameter in host._parameters.items():
            if name not in twin._parameters and read(name, code):
                yield name, f"got {shown(parameter)}, allowed: no such parameter"
        for name, expected in twin._parameters.items():
            parameter = host._parameters.get(name)
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
        """Raise if a tensor is on another device than the first tensor."""
        self.device = self.device or (name, tensor.device)
        first, device = self.device
        if tensor.device != device:
            text = f"got device {tensor.device}, allowed: {device}, the device of {first}"
            raise _Differs(f"{name}: {text}")

    def one_dtype(self, name: str, tensor: Tensor) -> None:
        """Raise if a parameter has another dtype than the first parameter."""
        self.dtype = self.dtype or (name, tensor.dtype)
        first, dtype = self.dtype
        if tensor.dtype != dtype:
            text = f"got {tensor.dtype}, allowed: {dtype}, the dtype of {first}"
            raise _Differs(f"{name}: {text}")

    def children(self, path: str, host: nn.Module, twin: nn.Module, code: stock_code.Code) -> None:
        """Compare the modules inside a module. The pooler is called, so it may be anything."""
        every = isinstance(twin, nn.ModuleList)
        for name in _either(host._modules, twin._modules):
            if not path and name.startswith("pooler"):
                continue
            inner = f"{path}.{name}" if path else name
            expected = twin._modules.get(name)
            if self.alike and isinstance(twin, nn.ModuleList):
                expected = twin._modules["0"]
            if expected is not None:
                self.walk(inner, host._modules.get(name), expected)
            elif host._modules[name] is not None and (every or read(name, code)):
                kind = type(host._modules[name]).__name__
                self.report(path, name, f"got {kind}, allowed: no module", twin)


def _either(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, None]:
    """Return the names in one of two dictionaries, in order."""
    return dict.fromkeys((*ours, *theirs))


def read(name: str, code: stock_code.Code) -> bool:
    """Return whether the code of a class can read an attribute of this name.

    Code that makes a name, such as ``f"{layer_type}_inv_freq"``, contains the end of the name.
    """
    return name in code.names or name.endswith(_ends(code.names))


@functools.cache
def _ends(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name[0] == "_" and name[1:2].isalpha())
