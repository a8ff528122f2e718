"""LAMB makes the updates of a NumPy reference, and skips gradients that are not finite."""

import numpy as np
import pytest
import torch

from fastbert.training.lamb import Lamb

RATE, FIRST, SECOND, EPSILON, DECAY = 0.02, 0.9, 0.999, 1e-6, 0.01


def reference(weight, gradients, *, decay, adapt):
    """Return the weight after the updates of You et al. 2020, algorithm 2, in float64."""
    x = weight.double().numpy().copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double().numpy()
        m = FIRST * m + (1 - FIRST) * g
        v = SECOND * v + (1 - SECOND) * g**2
        r = m / (1 - FIRST**t) / (np.sqrt(v / (1 - SECOND**t)) + EPSILON)
        u = r + decay * x
        ratio = 1.0
        if adapt and np.linalg.norm(x) > 0 and np.linalg.norm(u) > 0:
            ratio = np.linalg.norm(x) / np.linalg.norm(u)
        x = x - RATE * ratio * u
    return x


def make(weight, *, decay, adapt):
    group = {"params": [weight], "weight_decay": decay, "adapt": adapt}
    return Lamb([group], lr=RATE, betas=(FIRST, SECOND), eps=EPSILON)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("decay", "adapt"), [(DECAY, True), (0.0, True), (0.0, False)])
@pytest.mark.parametrize("scale", [3.0, 0.0])
def test_updates_are_those_of_the_paper(dtype, decay, adapt, scale):
    draw = torch.Generator().manual_seed(0)
    start = scale * torch.randn(7, 5, generator=draw, dtype=dtype)
    gradients = [torch.randn(7, 5, generator=draw, dtype=dtype) * 10**k for k in (0, -3, 2, 0)]
    weight = torch.nn.Parameter(start.clone())
    optimizer = make(weight, decay=decay, adapt=adapt)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    expected = torch.from_numpy(reference(start, gradients, decay=decay, adapt=adapt))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(weight.detach().double(), expected, rtol=tolerance, atol=tolerance)


def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_moments():
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = make(weight, decay=DECAY, adapt=True)
    optimizer.found_inf = torch.tensor(0.0)
    weight.grad = torch.randn(4, 3)
    optimizer.step()
    before = weight.detach().clone()
    moments = {k: v.clone() for k, v in optimizer.state[weight].items() if k != "step"}
    weight.grad = torch.full((4, 3), float("nan"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(weight, before)
    assert all(torch.equal(optimizer.state[weight][k], v) for k, v in moments.items())


def test_a_watched_step_has_the_bits_of_a_step_that_is_not_watched():
    weights = [torch.nn.Parameter(torch.ones(4, 3) * 0.3) for _ in range(2)]
    for weight, found_inf in zip(weights, (None, torch.tensor(0.0)), strict=True):
        optimizer = make(weight, decay=DECAY, adapt=True)
        optimizer.found_inf = found_inf
        for step in range(3):
            weight.grad = torch.linspace(-1, 1, 12).view(4, 3) * (step + 1)
            optimizer.step()
    assert torch.equal(*weights)


def test_a_closure_computes_the_loss():
    weight = torch.nn.Parameter(torch.tensor([[2.0]]))
    optimizer = make(weight, decay=0.0, adapt=True)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(20)]
    assert losses[0] == 4.0
    assert losses[-1] < 2.5
