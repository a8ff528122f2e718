"""Hard attention: its draws, and the gradient of the expected reward by REINFORCE."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fastbert.modules import alignment
from fastbert.modules.alignment import hard

SAMPLES = 100_000
# The probability that a right estimator exceeds its bound, over all elements that a test compares.
RISK = 1e-6


def bernstein(variance: Tensor, largest: Tensor, samples: int, elements: int) -> Tensor:
    """Return a bound of the error of a mean, which holds for all elements but for ``RISK``.

    Bernstein's inequality: the mean of n independent terms with the variance V that differ from
    their mean by at most M differs from it by t or more with a probability of at most
    ``2 exp(-n t² / (2 V + 2 M t / 3))``. The bound is the t for which this is ``RISK / elements``.
    """
    power = math.log(2 * elements / RISK)
    half = power * largest / (3 * samples)
    return half + (half.square() + 2 * power * variance / samples).sqrt()


def module_of(name: str) -> alignment.Alignment:
    options = {"attend": "hard"}
    if name == "predictive":
        options["local"] = alignment.Predictive(3, 2, 3)
    return alignment.General(3, 3, **options).double()


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Return two queries, four keys of which the last is padding, and a mask."""
    query, keys = (torch.randn(1, n, 3, dtype=torch.float64) for n in (2, 4))
    return query.requires_grad_(), keys.requires_grad_(), torch.tensor([[True, True, True, False]])


def probabilities(module, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Return the probabilities of the positions of each query, from soft attention."""
    soft = alignment.General(3, 3, local=module.local).double()
    soft.projection = module.projection
    _, weights = soft(query, keys, keys, mask)
    return (weights / weights.sum(-1, keepdim=True))[0]


@pytest.mark.parametrize("baseline", [0.0, 0.7])
@pytest.mark.parametrize("name", ["global", "predictive"])
def test_the_mean_of_the_estimates_is_the_gradient_of_the_expected_reward(name, baseline) -> None:
    """The reward depends on the positions of both queries together, so every pair is enumerated."""
    module, (query, keys, mask) = module_of(name), problem()
    rewards = torch.randn(4, 4, dtype=torch.float64)
    leaves = [query, keys, *module.parameters()]
    p = probabilities(module, query, keys, mask)
    # The exact gradient, and the largest term and the variance of an estimate of one sample.
    exact = torch.autograd.grad(-torch.einsum("i,j,ij", *p, rewards), leaves, retain_graph=True)
    square, largest = ([torch.zeros_like(x) for x in leaves] for _ in range(2))
    for i, j in itertools.product(range(3), range(3)):
        term = -(rewards[i, j] - baseline) * (p[0, i].log() + p[1, j].log())
        gradients = torch.autograd.grad(term, leaves, retain_graph=True)
        chance = p[0, i].item() * p[1, j].item()
        for k, (gradient, mean) in enumerate(zip(gradients, exact, strict=True)):
            square[k] += chance * (gradient - mean).square()
            largest[k] = torch.maximum(largest[k], (gradient - mean).abs())
    # The estimate, whose batch is one sentence repeated.
    reinforce = alignment.Reinforce().double()
    reinforce.baseline.fill_(baseline)
    repeated = [x.expand(SAMPLES, -1, -1) for x in (query, keys, keys)]
    generator = torch.Generator().manual_seed(5)
    _, weights, log_probability = module(
        *repeated, mask, generator=generator, return_log_probability=True
    )
    first, second = weights.argmax(-1).unbind(1)
    loss = reinforce(log_probability, rewards[first, second])
    estimate = torch.autograd.grad(loss, leaves)
    elements = sum(x.numel() for x in leaves)
    bounds = [bernstein(*x, SAMPLES, elements) for x in zip(square, largest, strict=True)]
    for got, mean, bound in zip(estimate, exact, bounds, strict=True):
        assert bool(((got - mean).abs() <= bound).all())
        # The bounds are small, so a wrong sign or a wrong factor fails.
        assert float(bound.max()) < 0.3 * float(mean.abs().max())


def test_positions_are_drawn_with_their_probabilities() -> None:
    module, (query, keys, mask) = module_of("global"), problem()
    query, keys = query.detach(), keys.detach()
    p = probabilities(module, query, keys, mask).detach()
    repeated = [x.expand(SAMPLES, -1, -1) for x in (query, keys, keys)]
    output, weights = module(*repeated, mask, generator=torch.Generator().manual_seed(3))
    assert torch.equal(output, weights @ repeated[2])
    frequency = weights.mean(0)
    bound = bernstein(p * (1 - p), torch.maximum(p, 1 - p), SAMPLES, p.numel())
    assert bool(((frequency - p).abs() <= bound).all())
    assert not frequency[:, 3].any()
    assert float(bound.max()) < 0.02


def test_a_seed_repeats_the_positions() -> None:
    module = alignment.Dot(attend="hard")
    tensors = [torch.randn(4, 6, 8) for _ in range(3)]
    runs = [module(*tensors, generator=torch.Generator().manual_seed(n))[1] for n in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    # Without a generator, torch's generator of the device draws.
    runs = []
    for seed in (1, 1, 2):
        torch.default_generator.manual_seed(seed)
        runs.append(module(*tensors)[1])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_evaluation_takes_the_largest_weight(dtype, device) -> None:
    module, soft = alignment.Dot(attend="hard").eval(), alignment.Dot()
    query, keys, values = (torch.randn(4, 6, 8, device=device).to(dtype) for _ in range(3))
    output, weights, log_probability = module(query, keys, values, return_log_probability=True)
    _, expected = soft(query.float(), keys.float(), values.float())
    position = expected.argmax(-1)
    assert output.dtype == weights.dtype == dtype
    assert torch.equal(weights.argmax(-1), position)
    assert torch.equal(weights.sum(-1), torch.ones(4, 6, device=device).to(dtype))
    assert torch.equal(output, values[torch.arange(4, device=device).unsqueeze(1), position])
    assert log_probability.dtype == torch.float32
    torch.testing.assert_close(log_probability, expected.amax(-1).log())


def test_values_and_scores_get_their_gradients_separately() -> None:
    module = alignment.Dot(attend="hard")
    query, keys, values = (torch.randn(2, 3, 8, requires_grad=True) for _ in range(3))
    output, weights, log_probability = module(query, keys, values, return_log_probability=True)
    output.sum().backward(retain_graph=True)
    assert query.grad is None
    assert keys.grad is None
    assert torch.equal(values.grad, weights.sum(1).unsqueeze(-1).expand(2, 3, 8))
    log_probability.sum().backward()
    assert query.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_improbable_position_has_a_finite_gradient(dtype, device) -> None:
    """The position of key 1 has a probability of e⁻³⁰, far below the smallest number of fp16."""
    module = alignment.Dot(attend="hard")
    query = torch.ones(1, 1, 1, device=device).to(dtype).requires_grad_()
    keys = torch.tensor([30.0, 0.0], device=device).to(dtype).view(1, 2, 1)
    weights = hard.probabilities(module.scores(query, keys, None), None, None, None)
    log = weights[0, 0, 1].log()
    log.backward()
    assert log.item() == pytest.approx(-30, rel=1e-5)
    assert float(query.grad) == pytest.approx(-30, rel=1e-2)


def test_the_baseline_is_a_moving_average_of_earlier_rewards() -> None:
    reinforce = alignment.Reinforce(decay=0.75)
    log_probability = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    rewards = torch.tensor([2.0, 4.0])
    # The first baseline is 0: the loss is the mean of 2 · 3 and 4 · 7.
    assert float(reinforce(log_probability, rewards)) == 17.0
    assert float(reinforce.baseline) == 0.25 * 3.0
    by_query = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = (0.25 * 1 + 1.25 * 2 + 2.25 * 3 + 3.25 * 4) / 2
    assert float(reinforce(log_probability, by_query)) == expected
    assert float(reinforce.baseline) == 0.75 * 0.75 + 0.25 * 2.5
    before = float(reinforce.baseline)
    reinforce.eval()(log_probability, rewards)
    assert float(reinforce.baseline) == before
    loaded = alignment.Reinforce()
    loaded.load_state_dict(reinforce.state_dict())
    assert float(loaded.baseline) == before


@pytest.mark.parametrize(
    ("log_probability", "reward", "message"),
    [
        (torch.zeros(3), torch.zeros(3), r"log_probability: got shape \(3,\), allowed: \(B, Lq\)"),
        (torch.zeros(3, 2), torch.zeros(2), r"reward: got shape \(2,\), allowed: \(3,\) or \(3, 2"),
        (torch.zeros(3, 2), torch.zeros(3, device="meta"), "reward: got device meta, allowed: cpu"),
    ],
)
def test_wrong_arguments_of_the_loss_are_named(log_probability, reward, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        alignment.Reinforce()(log_probability, reward)
