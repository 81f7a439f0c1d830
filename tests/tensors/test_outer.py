"""The outer step: bit for bit an fp32 elementwise computation, and torch's own Nesterov SGD."""

import struct

import numpy as np
import pytest
import torch
from blake3 import blake3

from p2pdiloco.errors import InvariantViolation
from p2pdiloco.tensors.digest import state_digest
from p2pdiloco.tensors.outer import momentum_at, outer_step

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
