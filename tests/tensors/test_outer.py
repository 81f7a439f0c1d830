"""The outer step: bit for bit an fp32 elementwise computation, and torch's own Nesterov SGD."""

import struct

import numpy as np
import pytest
import torch
from blake3 import blake3

from p2pdiloco.errors import InvariantViolation
from p2pdiloco.tensors.codecs import state_digest
from p2pdiloco.tensors.outer_update import momentum_at, outer_step, without_lookahead

NUMEL = (1 << 16) + 77
"""More than one tile, and not a multiple of any vector."""


def draws(seed: int, numel: int = NUMEL):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(numel).astype(np.float32) * np.float32(s) for s in (1, 0.1, 0.01)]


@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.9), (1.0, 0.0), (0.3, 0.123456789)])
def test_bit_for_bit_the_numpy_reference(eta, mu):
    theta, momentum, delta = draws(1)
    delta[:5] = [0.0, -0.0, 1e-45, 3e-39, 1e30]
    eta32, mu32 = np.float32(eta), np.float32(mu)
    expected_momentum = mu32 * momentum + delta
    expected_theta = theta - eta32 * (delta + mu32 * expected_momentum)
    out_theta, out_momentum = torch.empty(NUMEL), torch.empty(NUMEL)
    outer_step(*map(torch.from_numpy, (theta, momentum, delta)), eta, mu, out_theta, out_momentum)
    assert out_momentum.numpy().tobytes() == expected_momentum.tobytes()
    assert out_theta.numpy().tobytes() == expected_theta.tobytes()


def test_many_steps_follow_torch_sgd_with_nesterov():
    parameter = torch.nn.Parameter(torch.from_numpy(draws(2, 500)[0]))
    theta, momentum = parameter.detach().clone(), torch.zeros(500)
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for round_ in range(20):
        delta = torch.from_numpy(draws(10 + round_, 500)[2])
        parameter.grad = delta.clone()
        sgd.step()
        next_theta, next_momentum = torch.empty(500), torch.empty(500)
        outer_step(theta, momentum, delta, 0.7, 0.9, next_theta, next_momentum)
        theta, momentum = next_theta, next_momentum
    torch.testing.assert_close(theta, parameter.detach(), rtol=1e-5, atol=1e-5)


def test_without_its_lookahead_theta_is_where_nesterov_as_first_written_is():
    """v' = mu v - eta gradient(x + mu v), x' = x + v'; our theta is x + mu v."""
    x, velocity = draws(3, 200)[0].astype(np.float64), np.zeros(200)
    theta, momentum = torch.from_numpy(x).float(), torch.zeros(200)
    for _ in range(12):
        velocity = 0.9 * velocity - 0.1 * (x + 0.9 * velocity)  # of x squared / 2
        x = x + velocity
        before, gradient = theta, theta.clone()
        theta, next_momentum = torch.empty(200), torch.empty(200)
        outer_step(before, momentum, gradient, 0.1, 0.9, theta, next_momentum)
        momentum = next_momentum
        found = without_lookahead(theta, momentum, 0.1, 0.9)
        np.testing.assert_allclose(found.numpy(), x, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, before - 0.1 * gradient)
    assert not np.allclose(theta.numpy(), x, atol=1e-2)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.96])
def test_a_part_of_an_interval_gets_that_part_of_a_step_of_momentum(share):
    theta, momentum, delta = draws(1)
    decay, rest = np.float32(1 - share * (1 - 0.9)), np.float32((1 - share) * 0.9)
    expected_momentum = decay * momentum + delta
    work = np.float32(0.9) * expected_momentum + delta - rest * momentum
    expected_theta = theta - np.float32(0.7) * work
    out = [torch.empty(NUMEL), torch.empty(NUMEL)]
    outer_step(*map(torch.from_numpy, (theta, momentum, delta)), 0.7, 0.9, *out, share)
    assert out[0].numpy().tobytes() == expected_theta.tobytes()
    assert out[1].numpy().tobytes() == expected_momentum.tobytes()
    # Without look-ahead: between where it was and where a whole step from theta would have led.
    found = without_lookahead(*out, 0.7, 0.9)
    was = without_lookahead(torch.from_numpy(theta), torch.from_numpy(momentum), 0.7, 0.9)
    between = (1 - share) * was + share * torch.from_numpy(theta) - 0.7 * torch.from_numpy(delta)
    torch.testing.assert_close(found, between, rtol=1e-5, atol=1e-6)


def test_no_interval_and_nothing_merged_changes_nothing():
    theta, momentum, _ = map(torch.from_numpy, draws(1))
    out = [torch.empty(NUMEL), torch.empty(NUMEL)]
    outer_step(theta, momentum, torch.zeros(NUMEL), 0.7, 0.9, *out, 0.0)
    torch.testing.assert_close(out, [theta, momentum], rtol=0, atol=1e-6)


def test_momentum_grows_linearly_over_the_first_merges():
    assert [momentum_at(n, 0.8, 4) for n in range(1, 8)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert momentum_at(1, 0.9, 0) == 0.9
    with pytest.raises(InvariantViolation):
        momentum_at(0, 0.9, 4)


def test_state_digest_depends_on_number_and_every_bit():
    theta, momentum = torch.zeros(3), torch.zeros(3)
    digests = {state_digest(1, theta, momentum), state_digest(2, theta, momentum)}
    digests.add(state_digest(1, theta, -momentum))
    theta[2] = 1e-45
    digests.add(state_digest(1, theta, momentum))
    assert len(digests) == 4 and all(len(d) == 32 for d in digests)
    spelled = blake3(struct.pack("<Qfff", 1, 1.0, 2.0, 0.5))
    assert state_digest(1, torch.tensor([1.0, 2.0]), torch.tensor([0.5])) == spelled.digest()
