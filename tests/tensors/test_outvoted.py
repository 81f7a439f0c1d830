"""Strangers that are most of a round: what is usual is said by those that vote."""

import pytest
import torch
from test_limits import LAYOUT, PERIOD, unit

from p2pdiloco.core.api.types import FULL_TRUST, LEAST_TRUST, NOTHING, UNCLEAR, MergeLimits
from p2pdiloco.core.api.versions import USUAL, Mean
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.merge import Accumulator, Findings, Input, add_up

OLD = Mean(USUAL, 100)
SHARED = unit(7)
CODEC = codec("fp32")


def honest(count: int) -> list[torch.Tensor]:
    return [0.6 * SHARED + 0.8 * unit(seed) for seed in range(100, 100 + count)]


def added(
    voters: list[torch.Tensor], strangers: list[torch.Tensor], said: int = -1
) -> tuple[Findings, torch.Tensor]:
    """Merge a round of these; `said` of the voters vote (all)."""
    said = len(voters) if said < 0 else said
    votes = [n < said for n in range(len(voters))] + [False] * len(strangers)
    means = [OLD] * len(voters) + [Mean()] * len(strangers)
    inputs = [
        Input(bytes(CODEC.encode(each.clone())), 40, PERIOD, FULL_TRUST, mean, vote)
        for each, mean, vote in zip([*voters, *strangers], means, votes, strict=True)
    ]
    accumulator = Accumulator(LAYOUT, PERIOD, None, MergeLimits(40, 3.0, 3.0))
    found = add_up(accumulator, CODEC, inputs, [], torch.empty(LAYOUT.numel), b"")
    out = torch.empty(LAYOUT.numel)
    accumulator.result(out)
    return found, out


@pytest.mark.parametrize("strangers", [7, 12])
def test_strangers_with_reversed_work_do_not_outvote_voters(strangers: int) -> None:
    found, merged = added(honest(8), [0.8 * unit(n) - 0.6 * SHARED for n in range(200, 200 + strangers)])
    assert UNCLEAR not in found.scores
    assert all(OLD.trust(score) == FULL_TRUST for score in found.scores[:8])
    assert all(Mean().trust(score) == LEAST_TRUST for score in found.scores[8:])
    assert torch.dot(merged, SHARED) > 0.5 * merged.norm() * SHARED.norm()


def test_strangers_with_tiny_lengths_shorten_no_merge() -> None:
    alone = float(added(honest(8), [])[1].norm())
    found, merged = added(honest(8), [1e-3 * unit(n) for n in range(300, 309)])
    assert found.cut == () and float(merged.norm()) > 0.5 * alone


def test_strangers_of_great_length_make_no_honest_work_nothing() -> None:
    found, _ = added(honest(8), [1e5 * unit(n) / 1e3 for n in range(300, 309)])
    assert NOTHING not in found.scores[:8] and set(range(8, 17)) <= set(found.cut)


def test_where_fewer_than_three_vote_all_are_the_measure() -> None:
    assert added(honest(8), [], said=2)[0] == added(honest(8), [], said=0)[0]


def test_honest_newcomers_are_usual_among_voters() -> None:
    found, _ = added(honest(8), [0.6 * SHARED + 0.8 * unit(n) for n in range(400, 404)])
    assert min(found.scores) > 40
