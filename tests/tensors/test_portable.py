"""Arithmetic that is the same everywhere: merges in processes with other vector instructions and threads."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from deadlines import within_s

from p2pdiloco.tensors.codecs import PORTABLE_TILE, add_scaled, norm, scratch

PROGRAM = Path(__file__).with_name("portable_merges.py")
HERE = torch.backends.cpu.get_cpu_capability()


def levels() -> list[str]:
    """Vector instructions that torch can be told to use here; it takes more than there is without a
    question."""
    known = ["default", "avx2", "avx512"]
    return known[: known.index(HERE.lower()) + 1] if HERE.lower() in known else ["default", HERE.lower()]


def made_with(level: str) -> tuple[str, list[dict[str, list[str]]]]:
    """What a process with these vector instructions says that it used, and made with 1, 2 threads."""
    # Threads that wait sleep: they have no processors of their own here.
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": level, "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=within_s(120))
    used, *by_threads = json.loads(done.stdout)
    return used, by_threads


@pytest.mark.process
def test_a_merge_has_the_same_bits_with_all_vector_instructions_and_numbers_of_threads() -> None:
    found = [made_with(level) for level in levels()]
    used = {level for level, _ in found}
    assert len(used) == len(found) or HERE.lower() not in ("avx2", "avx512"), used
    expected = found[0][1][0]
    for level, by_threads in found:
        for threads, cases in enumerate(by_threads, 1):
            wrong = [name for name in expected if cases[name] != expected[name]]
            assert not wrong, f"{wrong} differ with {level} and {threads} threads"


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 127, 1000, 65_536, 65_537, 200_003])
@pytest.mark.parametrize("exponent", [-149, -70, -30, -10, 0, 40, 63, 64, 127])
def test_the_norm_is_right_at_any_size_and_magnitude(numel: int, exponent: int) -> None:
    drawn = np.random.default_rng(numel).uniform(-1, 1, numel)
    values = torch.from_numpy((drawn * 2.0**exponent).astype(np.float32))
    exact = math.sqrt(math.fsum(value * value for value in values.tolist()))
    assert norm(values) == pytest.approx(exact, rel=2e-6)
    assert norm(torch.cat([values, torch.zeros(70_000)])) == pytest.approx(exact, rel=2e-6)


def test_the_norm_follows_its_rule_to_the_bit() -> None:
    values = torch.from_numpy(np.random.default_rng(3).standard_normal(2 * 65_536 + 777, np.float32))
    squares = values.numpy() * values.numpy()
    sums = squares[:65_536] + np.float32(2.0**-100)
    sums = sums + squares[65_536 : 2 * 65_536]
    sums[:777] += squares[2 * 65_536 :]
    while len(sums) > 64:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    assert norm(values) == math.sqrt(math.fsum(sums.tolist()))


def test_the_norm_is_the_same_where_small_numbers_are_made_zero() -> None:
    values = torch.from_numpy(np.random.default_rng(4).standard_normal(5000, np.float32))
    values[1000:] *= 1e-20  # squares below fp32's normal numbers
    values[2000:] *= 1e-20
    kept = norm(values), norm(values[500:])
    assert torch.set_flush_denormal(True)
    try:
        assert (norm(values), norm(values[500:])) == kept
    finally:
        torch.set_flush_denormal(False)


def test_nothing_has_no_length() -> None:
    assert [norm(torch.zeros(numel)) for numel in (0, 10, 1000, 70_000)] == [0.0] * 4


def test_not_a_number_and_infinity_have_no_length() -> None:
    for wrong in (math.nan, math.inf):
        assert not norm(torch.full((1000,), wrong)) < math.inf
        assert not norm(torch.full((10,), wrong)) < math.inf


def test_products_are_rounded_before_they_are_added() -> None:
    drawn = np.random.default_rng(5).standard_normal((2, PORTABLE_TILE + 77), np.float32)
    total = torch.from_numpy(drawn[0].copy())
    add_scaled(total, torch.from_numpy(drawn[1]), 1 / 3, scratch(len(total)))
    assert np.array_equal(total.numpy(), drawn[0] + drawn[1] * np.float32(1 / 3))
