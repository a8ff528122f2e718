"""The C++ embedding agrees with float64, at every instruction-set level."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fastbert import reference
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-12
NAMES = ("dword", "dtype", "dposition", "dweight", "dbias")


@dataclass
class Problem:
    indices: tuple[Tensor | None, ...]
    tables: tuple[Tensor | None, ...]
    weight: Tensor
    bias: Tensor | None
    dy: Tensor
    dropout_p: float
    seed: Tensor

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        return *self.tables, self.weight, self.bias

    def gradients(self, dtype: torch.dtype, padding: int | None) -> dict[str, Tensor]:
        inputs = [
            None if t is None else t.detach().to(dtype).requires_grad_() for t in self.parameters
        ]
        options = {"dropout_p": self.dropout_p, "dropout_seed": self.seed, "padding_idx": padding}
        y = reference.embedding(*self.indices, *inputs, eps=EPS, **options)
        y.backward(self.dy.to(dtype))
        named = zip(NAMES, inputs, strict=True)
        return {"y": y.detach(), **{name: t.grad for name, t in named if t is not None}}

    def forward(self, operators) -> tuple[Tensor, Tensor, Tensor]:
        arguments = (*self.indices, *self.tables, self.weight, self.bias, self.seed)
        return operators.embedding_forward(*arguments, EPS, self.dropout_p)

    def run(self, operators, padding: int = -1) -> dict[str, Tensor]:
        y, mean, rstd = self.forward(operators)
        given = (self.dy, *self.indices, *self.tables, self.weight, mean, rstd, self.seed)
        has_bias = self.bias is not None
        gradients = operators.embedding_backward(*given, has_bias, self.dropout_p, padding)
        results = {"y": y}
        for name, parameter, gradient in zip(NAMES, self.parameters, gradients, strict=True):
            if parameter is None:
                assert gradient.shape == (0,), name
            else:
                results[name] = gradient
        return results


def problem(
    tokens, columns, dtype, *, dropout_p=0.0, words=40, types=True, positions=True, bias=True
) -> Problem:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    sizes = (words, 2 if types else None, 17 if positions else None)
    return Problem(
        tuple(None if size is None else torch.randint(0, size, (tokens,)) for size in sizes),
        tuple(None if size is None else draw(size, columns) for size in sizes),
        draw(columns),
        draw(columns) if bias else None,
        draw(tokens, columns),
        dropout_p,
        torch.tensor([0x0123456789ABCDEF]),
    )


def check(case: Problem, operators, padding: int | None = None) -> None:
    oracle = case.gradients(torch.float64, padding)
    yardstick = Yardstick(lambda: case.gradients(case.weight.dtype, padding))
    for name, actual in case.run(operators, -1 if padding is None else padding).items():
        assert_close(f"embedding {name}", actual, oracle[name], yardstick[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 59, 111, 768])
def test_agrees_with_float64(isa, operators, columns, dtype):
    check(problem(37, columns, dtype), operators)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_and_padding(isa, operators, dtype):
    case = problem(37, 111, dtype, dropout_p=0.3)
    case.indices[0][::3] = 5
    check(case, operators, padding=5)
    assert not case.run(operators, 5)["dword"][5].any()


OPTIONAL = ("types", "positions", "bias")


# The three flags are one parameter, so that `make test` runs all combinations at every level.
@pytest.mark.parametrize("given", list(itertools.product((False, True), repeat=3)), ids=str)
def test_absent_tables_and_bias(isa, operators, given):
    present = dict(zip(OPTIONAL, given, strict=True))
    for dtype in DTYPES:
        check(problem(37, 111, dtype, dropout_p=0.3, **present), operators, padding=5)


def test_absent_parameters_are_zeros(isa, operators):
    case = problem(37, 111, torch.float32, types=False, positions=False, bias=False)
    actual = case.run(operators)
    zeros, columns = torch.zeros(37, dtype=torch.int64), torch.zeros(1, 111)
    case.indices, case.tables = (case.indices[0], zeros, zeros), (case.tables[0], columns, columns)
    case.bias = columns[0]
    expected = case.run(operators)
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("number", [1, 2])
def test_a_table_without_indices_names_the_argument(operators, number):
    names = [("token_types", "type_table"), ("positions", "position_table")][number - 1]
    case = problem(5, 8, torch.float32)
    for field, absent, present in (("indices", *names), ("tables", *reversed(names))):
        given = list(getattr(case, field))
        given[number] = None
        with pytest.raises(ValueError, match=rf"^{absent}: got None with {present}, allowed: both"):
            replace(case, **{field: tuple(given)}).forward(operators)


def test_many_tokens_of_few_rows(isa, operators):
    check(problem(1500, 59, torch.float32, words=3), operators)


def test_threads_dtypes_of_indices_and_tokens_alone_change_no_bit(isa, operators):
    case = problem(1200, 111, torch.float32)
    expected = case.run(operators)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        short = replace(case, indices=tuple(t.int() for t in case.indices))
        for name, actual in short.run(operators).items():
            assert torch.equal(actual, expected[name]), name
    finally:
        torch.set_num_threads(threads)
    alone = replace(case, indices=tuple(t[7:8] for t in case.indices))
    assert torch.equal(alone.forward(operators)[0], expected["y"][7:8])


def test_row_strides_of_the_tables(isa, operators):
    case = problem(37, 59, torch.bfloat16)
    expected = case.run(operators)
    wide = [torch.full((len(t), 97), torch.nan, dtype=t.dtype) for t in case.tables]
    for memory, table in zip(wide, case.tables, strict=True):
        memory[:, 1:60] = table
    case.tables = tuple(memory[:, 1:60] for memory in wide)
    for name, actual in case.run(operators).items():
        assert torch.equal(actual, expected[name]), name


def test_no_tokens(isa, operators):
    results = problem(0, 111, torch.float32).run(operators)
    assert results["y"].shape == (0, 111)
    assert not any(results[name].any() for name in NAMES)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("number", [-1, "rows", 1000])
def test_an_index_out_of_range_names_the_argument(operators, which, number):
    case = problem(5, 8, torch.float32)
    if number == "rows":
        number = len(case.tables[which])
    case.indices[which][3] = number
    name = ("ids", "token_types", "positions")[which]
    with pytest.raises(IndexError, match=rf"^{name}: got {number}, allowed: 0 to"):
        case.forward(operators)
