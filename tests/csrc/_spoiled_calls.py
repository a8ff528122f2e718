"""Calls of the C++ operators, each with one invalid or changed argument, in a separate process.

As a program, the file makes the calls from number ``argv[1]`` on. It writes a line of JSON before
and after each call, so that its parent process knows which call a signal ended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from _good_calls import Call, good_calls, operators
from torch import Tensor

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
INT64 = torch.iinfo(torch.int64)
INF, NAN = float("inf"), float("nan")
ABSENT = object()


class Spoiled(NamedTuple):
    operator: str
    form: int
    argument: str
    spoil: str
    call: Call
    same: Call | None  # if `call` returns, the results must equal those of the call `same`


def clone(value: Any) -> Any:
    """Return a copy in which each tensor has its own storage; other values are not copied."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list):
        return [clone(v) for v in value]
    return {k: clone(v) for k, v in value.items()} if isinstance(value, dict) else value


def storage_of(t: Tensor, size: int) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(size)
    return t


def filled(t: Tensor, value: Any, place: int | None = None) -> Tensor:
    t = t.clone()
    (t if place is None else t.flatten()[place : place + 1 or None]).fill_(value)
    return t


def other_tensors(t: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and makers of tensors with another dtype, shape, device, layout or storage."""
    for dtype in DTYPES:
        if dtype != t.dtype:
            yield f"dtype {dtype}", lambda dtype=dtype: t.to(dtype)
    yield "rank + 1", lambda: t.unsqueeze(0)
    yield "rank + 1 behind", lambda: t.unsqueeze(-1)
    if t.dim() > 0:
        yield "rank 0", lambda: t.new_zeros(())
    if t.dim() > 1:
        yield "rank 1", lambda: t.flatten()
    for d in range(t.dim()):
        if t.shape[d] == 0:
            continue
        yield f"size 0 of dimension {d}", lambda d=d: t.narrow(d, 0, 0)
        yield f"size - 1 of dimension {d}", lambda d=d: t.narrow(d, 0, t.shape[d] - 1)
        yield f"size + 1 of dimension {d}", lambda d=d: torch.cat([t, t.narrow(d, 0, 1)], d)
    if t.numel() == 0:
        # An empty tensor represents an absent parameter.
        return
    yield "empty", lambda: t.new_zeros(0)
    yield "meta", lambda: t.to("meta")
    if t.dim():
        yield "sparse", lambda: t.to_sparse()
    yield "freed", lambda: storage_of(t, 0)
    yield "cut", lambda: storage_of(t, t.nbytes - 1)
    if t.dtype == torch.bool:
        return
    extremes = (NAN, INF, -INF, 3e38) if t.is_floating_point() else ()
    if not extremes:
        info = torch.iinfo(t.dtype)
        extremes = (-1, -2, info.max, info.min, info.max // 2, 9)
    for value in extremes:
        yield f"all {value}", lambda value=value: filled(t, value)
        for place in (0, -1) if t.dim() else ():
            yield f"{value} at {place}", lambda v=value, p=place: filled(t, v, p)


def other_layouts(t: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield names and makers of tensors of the shape of `t` in other memory layouts."""
    if t.numel() == 0:
        return
    yield "offset", lambda: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
    yield "inference", lambda: _inference(t)
    if t.is_floating_point():
        yield "wants a gradient", lambda: t.clone().requires_grad_()
        yield "negative bit", lambda: torch._neg_view(-t)
    for d in range(t.dim()):
        yield (
            f"stride 2 of dimension {d}",
            lambda d=d: t.repeat_interleave(2, d).unflatten(d, (t.shape[d], 2)).select(d + 1, 0),
        )
        if d:
            yield f"dimension {d} first", lambda d=d: t.transpose(0, d).contiguous().transpose(0, d)
        yield f"expanded in {d}", lambda d=d: t.narrow(d, 0, 1).expand_as(t)


def _inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


OTHER_TYPES = (("None", None), ("a string", "x"), ("a list", ["x"]), ("absent", ABSENT))


def other_numbers(kind: str, value: Any) -> Iterator[tuple[str, Any]]:
    if kind == "int":
        near = [] if value is None else [value - 1, value + 1]
        for number in (
            *near,
            -2,
            -1,
            0,
            1,
            2**31,
            2**32 + 1,
            2**62,
            INT64.max,
            INT64.min,
            2**64,
            1.5,
        ):
            yield str(number), number
    elif kind == "float":
        for number in (NAN, INF, -INF, -1.0, 0.0, 1.0, 1.5, 1e300, -1e-300):
            yield str(number), number
    elif kind == "str":
        for text in ("", "nothing", "GELU", "none ", "geglu", "relu", "x" * 10000, 3):
            yield repr(text)[:20], text
    elif kind == "bool":
        yield "not", not value
        yield "1.5", 1.5
    elif kind == "dtype":
        for dtype in (*DTYPES, torch.qint8, 99, -1):
            yield str(dtype), dtype
    elif kind == "list":
        for items in ([], [-1], [INT64.max], [INT64.min], [9], [0, 0, 1], [0] * 1000, [1.5], ["x"]):
            yield str(items)[:24], items


KINDS = {"int": "int", "SymInt": "int", "float": "float", "str": "str", "bool": "bool"}


def kind_of(argument: Any) -> str:
    name = str(argument.type).removeprefix("Optional[").removesuffix("]")
    if "Tensor" in name:
        return "tensors" if name.startswith("List") else "tensor"
    if name.startswith("List"):
        return "list"
    return "dtype" if argument.name == "dtype" else KINDS[name]


def spoiled_values(kind: str, value: Any) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Yield each change's name, a maker of the changed value, and a maker of an equal value.

    The last item is None if the result of the changed call is not compared.
    """
    for spoil, other in OTHER_TYPES:
        if other is not value:
            yield spoil, lambda other=other: other, None
    if kind == "tensor" and value is not None:
        yield "a number", lambda: 1.5, None
        for spoil, make in other_tensors(value):
            yield spoil, make, None
        for spoil, make in other_layouts(value):
            # The third item makes a copy of the same elements in torch's default layout.
            yield (
                spoil,
                make,
                lambda make=make: make().detach().clone(memory_format=torch.contiguous_format),
            )
    elif kind == "tensors":
        yield "one tensor more", lambda: [*value, torch.zeros(1)], None
        yield "a number among them", lambda: [*value[1:], 1.5], None
        yield "None among them", lambda: [*value[1:], None], None
        if value:
            yield "no tensor", list, None
            yield "one tensor less", lambda: value[:-1], None
        for i, tensor in enumerate(value):
            spoils = [(s, m, None) for s, m in other_tensors(tensor)]
            spoils += [(s, m, m) for s, m in other_layouts(tensor)]
            for spoil, make, same in spoils:
                yield (
                    f"[{i}]: {spoil}",
                    lambda i=i, m=make: [*value[:i], m(), *value[i + 1 :]],
                    same
                    and (
                        lambda i=i, m=make: [
                            *value[:i],
                            m().detach().contiguous().clone(),
                            *value[i + 1 :],
                        ]
                    ),
                )
    elif kind not in ("tensor", "tensors"):
        for spoil, other in other_numbers(kind, value):
            if other != value or type(other) is not type(value):
                yield spoil, lambda other=other: other, None


def spoiled_calls() -> Iterator[Spoiled]:
    schemas = operators()
    for name, forms in sorted(good_calls().items()):
        for form, call in enumerate(forms):
            yield Spoiled(name, form, "", "nothing", clone(call), None)
            for argument in schemas[name].arguments:
                value = call[argument.name]
                for spoil, make, same in spoiled_values(kind_of(argument), value):
                    yield Spoiled(
                        name, form, argument.name, spoil,
                        clone(call) | {argument.name: make()},
                        clone(call) | {argument.name: same()} if same is not None else None,
                    )  # fmt: skip


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (list, tuple)) else []


def run(operator: str, call: Call) -> list[Tensor]:
    """Return the results of the operator, and the arguments that the operator writes to."""
    arguments = {k: v for k, v in call.items() if v is not ABSENT}
    result = getattr(torch.ops.fastbert_C, operator)(**arguments)
    written = [
        call[a.name]
        for a in operators()[operator].arguments
        if a.alias_info and a.alias_info.is_write
    ]
    numbers = [
        torch.tensor(n)
        for n in (result if isinstance(result, tuple) else (result,))
        if isinstance(n, int)
    ]
    return tensors_in([*tensors_in(result), *written, *numbers])


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x.resolve_neg().nan_to_num(7.0), y.nan_to_num(7.0))
        for x, y in zip(a, b, strict=True)
    )


def outcome(spoiled: Spoiled) -> dict[str, str]:
    try:
        result = run(spoiled.operator, spoiled.call)
    except Exception as error:  # the parent process decides whether the exception is right
        return {"error": type(error).__name__, "message": str(error)[:1000]}
    if spoiled.same is not None:
        try:
            expected = run(spoiled.operator, spoiled.same)
        except Exception as error:
            return {"wrong": f"a contiguous copy raises {error}"}
        if not equal(result, expected):
            return {"wrong": "a contiguous copy gives another result"}
    return {"returned": str([list(t.shape) for t in result])}


if __name__ == "__main__":
    torch.set_num_threads(1)
    from fastbert import _C  # noqa: F401  registers the operators

    for number, spoiled in enumerate(spoiled_calls()):
        if number < int(sys.argv[1]):
            continue
        print(json.dumps([number, *spoiled[:4]]), flush=True)
        print(json.dumps(outcome(spoiled)), flush=True)
    print(json.dumps("done"), flush=True)
