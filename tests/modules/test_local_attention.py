"""Local attention: its windows and Gaussians, one query at a time, and its edges."""

from __future__ import annotations

import math

import pytest
import torch

from fastbert.modules import alignment


def predictive(window: int, size: int = 4) -> alignment.Predictive:
    return alignment.Predictive(size, window, 6).double()


def tensors(rows: int = 6, columns: int = 9, size: int = 4) -> list[torch.Tensor]:
    shapes = ((2, rows, size), (2, columns, size), (2, columns, 5))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_the_centre_the_window_and_the_gaussian_of_each_query() -> None:
    """A loop over queries and keys computes eq. 7, 9 and 10 of Luong et al. 2015."""
    local, lengths = predictive(3), (9, 6)
    query, keys, values = tensors()
    mask = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    output, weights = alignment.Dot(local=local)(query, keys, values, mask)
    w, v = local.projection.weight.detach(), local.v.weight[0].detach()
    sigma, seen = 3 / 2, 0
    for b, length in enumerate(lengths):
        for t in range(6):
            p = length / (1 + math.exp(-float(v @ torch.tanh(w @ query[b, t]))))
            inside = [s for s in range(length) if p - 3 <= s <= p + 3]
            powers = {s: math.exp(float(query[b, t] @ keys[b, s])) for s in inside}
            expected = torch.zeros(9, dtype=torch.float64)
            for s in inside:
                gaussian = math.exp(-((s - p) ** 2) / (2 * sigma**2))
                expected[s] = powers[s] / sum(powers.values()) * gaussian
            seen += len(inside)
            torch.testing.assert_close(weights[b, t], expected, rtol=1e-12, atol=1e-14)
            total = sum(expected[s] * values[b, s] for s in inside)
            torch.testing.assert_close(output[b, t], total, rtol=1e-12, atol=1e-14)
    assert 0 < seen < 6 * sum(lengths)
    assert float(weights.detach().sum(-1).max()) < 1.0


def test_gradients_by_finite_differences() -> None:
    local, lengths = predictive(3), torch.tensor([[9], [6]])
    module = alignment.General(4, 4, local=local).double()
    inputs = [x.requires_grad_() for x in tensors(rows=3)]
    mask = torch.arange(9) < lengths
    assert torch.autograd.gradcheck(lambda *x: module(*x, mask), inputs)
    parameters = [local.projection.weight, local.v.weight]

    def of_prediction(*given):
        names = dict(zip(("local.projection.weight", "local.v.weight"), given, strict=True))
        with torch.no_grad():
            fixed = [x.detach() for x in inputs]
        return torch.func.functional_call(module, names, (*fixed, mask))

    assert torch.autograd.gradcheck(of_prediction, parameters)


@pytest.mark.parametrize("attend", ["soft", "hard"])
def test_a_decoder_may_call_once_for_each_word(attend) -> None:
    module = alignment.ScaledDot(attend=attend, local=alignment.Monotonic(2)).double().eval()
    query, keys, values = tensors()
    output, weights = module(query, keys, values)
    for t in range(6):
        one = module(query[:, t : t + 1], keys, values, first_position=t)
        torch.testing.assert_close(one[0], output[:, t : t + 1], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(one[1], weights[:, t : t + 1], rtol=1e-13, atol=1e-13)


def test_a_window_beyond_the_last_key_gives_zero() -> None:
    query, keys, values = (x.requires_grad_() for x in tensors(rows=6, columns=3))
    output, weights = alignment.Dot(local=alignment.Monotonic(1))(query, keys, values)
    output.sum().backward()
    # Query 3 sees key 2, and the queries after it see no key.
    assert weights[:, 3, 2].eq(1).all()
    for x in (output, weights, query.grad):
        assert not x[:, 4:].any()
        assert x[:, :3].abs().sum() > 0


def test_a_window_of_no_neighbours_takes_the_own_position() -> None:
    query, keys, values = tensors(rows=4)
    output, weights = alignment.Dot(local=alignment.Monotonic(0))(query, keys, values)
    assert torch.equal(weights, torch.eye(4, 9, dtype=torch.float64).expand(2, 4, 9))
    assert torch.equal(output, values[:, :4])


@pytest.mark.parametrize("logit", [-80.0, 80.0])
def test_a_centre_at_either_end_has_keys(logit) -> None:
    """The sigmoid is 0 or 1, so the centre is the first key or one position after the last key."""
    local = predictive(1, size=1)
    with torch.no_grad():
        local.projection.weight.fill_(1.0)
        local.v.weight.fill_(logit / 6)
    query, keys = torch.full((1, 1, 1), 50.0).double(), torch.zeros(1, 5, 1).double()
    _, weights = alignment.Dot(local=local)(query, keys, keys)
    gaussian = math.exp(-2.0)
    first = [0.5, gaussian / 2, 0.0, 0.0, 0.0]
    expected = first if logit < 0 else [0.0, 0.0, 0.0, 0.0, gaussian]
    torch.testing.assert_close(
        weights[0, 0], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-30
    )


def test_hard_attention_draws_from_the_normalized_weights() -> None:
    """The position follows the weights of local attention, divided by their sum."""
    soft = alignment.Dot(local=predictive(3))
    hard = alignment.Dot(local=soft.local, attend="hard")
    inputs = tensors()
    _, weights = soft(*inputs)
    _, chosen, log_probability = hard(*inputs, return_log_probability=True)
    assert torch.equal(chosen.sum(-1), torch.ones(2, 6, dtype=torch.float64))
    expected = ((weights * chosen).sum(-1) / weights.sum(-1)).log()
    torch.testing.assert_close(log_probability, expected, rtol=1e-12, atol=1e-12)
