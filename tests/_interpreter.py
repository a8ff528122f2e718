"""Remove repeated work from Triton's interpreter, which took more than half of its time.

The interpreter computes with NumPy, but spends most of its time on other work. At each call of a
device function, it replaces the functions of ``triton.language``. For every value, it describes the
type again. It tests every integer sum for overflow, although only debug mode reports overflows. It
broadcasts operands of the same shape, casts to the same type, and calls each function of the
language through three others. With the changes in this file, the interpreter replaces functions
once per launch, describes each type once, tests for overflow only in debug mode, broadcasts and
casts only if something changes, and calls functions directly.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

NAME = "binary_op_sanitize_overflow_impl"
BROADCAST = "broadcast_impl_value"
UNWRAP = "_unwrap_if_constexpr"


def save_repeated_work() -> None:
    """Change the interpreter; if a Triton release lacks a changed function, change nothing."""
    try:
        from triton.language import core, semantic
        from triton.runtime import interpreter

        changes = [
            (interpreter, "_patch_lang", _replacing_once_a_launch(core, interpreter._patch_lang)),
            (interpreter, "_get_np_dtype", _once_a_name(interpreter._get_np_dtype)),
            (core.dtype, "__eq__", _equal_if_same(core.dtype.__eq__)),
            (core.block_type, "__init__", _described_once(core)),
            (core.tensor, "__init__", _of_a_described_type(core)),
            (semantic.TritonSemantic, NAME, _only_in_debug_mode(semantic.TritonSemantic)),
            (semantic.TritonSemantic, BROADCAST, _unless_alike(semantic.TritonSemantic)),
            (semantic.TritonSemantic, "cast", _unless_equal(core, semantic.TritonSemantic.cast)),
            (core, UNWRAP, _unwrapped_at_once(core)),
            (interpreter, "_patch_attr", _called_directly(interpreter)),
        ]
    except (ImportError, AttributeError):
        return
    for owner, name, function in changes:
        setattr(owner, name, function)


def _replacing_once_a_launch(core: ModuleType, replace: Any) -> Any:
    """Wrap `replace` so that it replaces the functions of each module only once per launch."""
    from triton import language

    done: set[str] = set()

    @functools.cache
    def wanted_by(kernel: Any) -> set[str]:
        return {
            module.__name__
            for module in kernel.__globals__.values()
            if module is language or module is core
        }

    def replace_once(kernel: Any) -> Any:
        wanted = wanted_by(kernel)
        if wanted and wanted <= done:
            # An outer call has replaced these functions, so this call has nothing to restore.
            return None
        scope = replace(kernel)
        if not done:
            restore = scope.restore

            def restore_all() -> None:
                done.clear()
                restore()

            scope.restore = restore_all
        done.update(wanted)
        return scope

    return replace_once


def _once_a_name(of_type: Any) -> Any:
    """Wrap `of_type` to cache the NumPy dtype by the name of the element type."""
    known: dict[str, Any] = {}

    def kept(type: Any) -> Any:
        name = type.scalar.name
        if name not in known:
            known[name] = of_type(type)
        return known[name]

    return kept


def _equal_if_same(equal: Any) -> Any:
    """Wrap `equal` to compare two types by name only if they are not the same object."""
    return lambda self, other: self is other or equal(self, other)


def _described_once(core: ModuleType) -> Any:
    """Cache the attributes of block types by their shape and the name of their element type."""
    describe = core.block_type.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (size.value if type(size) is core.constexpr else size for size in shape)
        key = (element_ty.name, *sizes)
        if key not in known:
            describe(self, element_ty, shape)
            known[key] = self.__dict__.copy()
        self.__dict__.update(known[key])
        # Two pointer types with the same name may differ, so each keeps its own element type.
        self.element_ty = element_ty

    return init


def _of_a_described_type(core: ModuleType) -> Any:
    """Make tensors of the same shape share one description of the shape."""
    describe = core.tensor.__init__

    @functools.cache
    def described(*sizes: int) -> tuple[Any, Any]:
        probe = core.tensor.__new__(core.tensor)
        describe(probe, None, core.block_type(core.int32, list(sizes)) if sizes else core.int32)
        return probe.shape, probe.numel

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = described(*(type.shape if type.is_block() else ()))

    return init


def _only_in_debug_mode(semantic: Any) -> Any:
    """Test for an overflow only in debug mode, because only debug mode reports overflows."""
    test = getattr(semantic, NAME)

    def overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if self.builder.options.debug:
            test(self, lhs, rhs, operation)

    return overflow


def _unless_alike(semantic: Any) -> Any:
    """Broadcast only operands that do not share a description of their shape."""
    broadcast = getattr(semantic, BROADCAST)

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return broadcast_others


def _unless_equal(core: ModuleType, cast: Any) -> Any:
    """Cast a value to another element type only; the type of the result is not made for others."""

    def cast_others(self: Any, value: Any, type: Any, rounding: Any = None) -> Any:
        same = rounding is None and isinstance(type, core.dtype) and value.dtype is type.scalar
        if same and (value.type.is_block() or not type.is_block()):
            return value
        return cast(self, value, type, rounding)

    return cast_others


def _unwrapped_at_once(core: ModuleType) -> Any:
    """Return a value of the usual types without a test for tuples."""
    unwrap = getattr(core, UNWRAP)
    constant, usual = core.constexpr, {core.tensor, core.dtype, int, float, bool, str, type(None)}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is constant:
            return value.value
        return value if kind in usual else unwrap(value)

    return unwrapped


def _called_directly(interpreter: ModuleType) -> Any:
    """Replace a function of the language by the function inside its checks of the compiler."""

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    return patch
