"""Groups of the next version: every leaf group is to have a seat that is here, and a version is refused that
has a leaf's partial merge without any."""

from __future__ import annotations

import pytest
from kit import OF_SWARM, RUN, chain_to, child, config, genesis
from msgspec.structs import replace

from p2pdiloco.core.api.reasons import VersionFault
from p2pdiloco.core.api.types import NEVER, Contributor, Seat, Stamp, Watermark
from p2pdiloco.core.api.versions import EPOCHS_TRIED, SignedVersion, VersionHeader, leaf_index, next_plan
from p2pdiloco.core.chain import (
    AWAKE_VERSIONS,
    WITHIN_VERSIONS,
    Chain,
    Marks,
    founding,
    plan_after,
    plan_of,
    rightly_stated,
    version_fault,
)

SEATS, SIZE, TERM = OF_SWARM[:8], 4, 64
RUN_OF_GROUPS = config(group_size=SIZE, term_versions=TERM, seats=SEATS)


def header(number: int, epoch: int, groups: int) -> VersionHeader:
    return replace(genesis(0).header, number=number, epoch=epoch, groups=groups)


def worked(number: int, *peers: str, of: tuple[str, ...] = SEATS) -> Marks:
    """The table in which these seats were merged last in that version, and the others in the first."""
    marks = founding(of)
    for at, learners in ((1, of), (number, peers)):
        marks = marks.after(at, tuple(Contributor(p, Stamp(1, at), 40, 4) for p in learners))
    return marks


def leaves(epoch: int, groups: int, peers: tuple[str, ...]) -> set[int]:
    return {leaf_index(RUN, 0, epoch, groups, peer) for peer in peers}


def test_groups_rotate_at_once_when_a_leaf_has_no_seat_that_is_here() -> None:
    of = OF_SWARM[:12]
    awake = tuple(peer for peer in of if leaf_index(RUN, 0, 0, 3, peer) < 2)
    number = AWAKE_VERSIONS + 1
    plan = plan_after(header(number - 1, 0, 3), worked(number, *awake, of=of), number, RUN_OF_GROUPS)
    assert plan[0] > 0 and leaves(*plan, awake) == {0, 1, 2}


def test_groups_stay_while_every_leaf_has_a_seat_that_was_here_lately() -> None:
    number = AWAKE_VERSIONS
    plan = plan_after(header(number - 1, 0, 2), worked(number, SEATS[0]), number, RUN_OF_GROUPS)
    assert plan == (0, 2), "all were merged in the first of these versions"


def test_there_are_no_more_groups_than_seats_that_are_here() -> None:
    number = 2 * AWAKE_VERSIONS
    marks = worked(number, SEATS[0])
    assert plan_after(header(number - 1, 0, 2), marks, number, RUN_OF_GROUPS) == (1, 1)
    assert plan_after(header(number, 1, 1), marks, number + 1, RUN_OF_GROUPS) == (1, 1), "and that stays so"
    many = OF_SWARM[:40]
    marks = worked(number, *many[:3], of=many)
    plan = plan_after(header(number - 1, 0, 10), marks, number, RUN_OF_GROUPS)
    assert plan[1] in (2, 3) and leaves(*plan, many[:3]) == set(range(plan[1]))
    assert plan_after(header(number, *plan), marks, number + 1, RUN_OF_GROUPS) == plan


@pytest.mark.parametrize("first", range(0, 40, 8))
def test_a_rotation_leaves_no_leaf_without_a_seat(first: int) -> None:
    of = OF_SWARM[:9]
    plan = plan_after(header(TERM - 1, first, 3), worked(TERM, *of, of=of), TERM, RUN_OF_GROUPS)
    assert first < plan[0] <= first + EPOCHS_TRIED and leaves(*plan, of) == {0, 1, 2}


def test_of_epochs_that_all_have_such_leaves_the_one_with_the_fewest_is_next() -> None:
    fewest = next_plan(4, 3, 8, 64, 16, 8, lambda epoch, groups: 1 if epoch == 9 else 2)
    assert fewest == (9, 3), "of four groups one would be vacant"
    assert next_plan(4, 3, 9, 32, 16, 8, lambda epoch, groups: groups > 1) == (5, 1), "there are never two"
    assert next_plan(4, 2, 9, 32, 16, 8, lambda epoch, groups: 1) == (4, 2), "no other is better"


def in_groups(*without: str) -> tuple[Chain, SignedVersion]:
    """A version of two leaf groups of seats and strangers; the seats named here are not in it."""
    parent = header(0, 0, 2)
    learners = tuple(p for p in (*SEATS, "s1", "s2", "s3", "s4") if p not in without)
    made = child(parent, SEATS[0], tuple(sorted(learners)), group_size=SIZE, seats=SEATS)
    plan = plan_after(parent, founding(SEATS), 1, RUN_OF_GROUPS)
    return chain_to(parent, SEATS), replace(made, header=replace(made.header, epoch=plan[0], groups=plan[1]))


def test_a_version_with_a_leafs_partial_without_a_seat_is_refused() -> None:
    chain, made = in_groups()
    assert version_fault(chain, made.header, RUN_OF_GROUPS) is None
    plan = plan_of(chain.header, RUN_OF_GROUPS)
    seats = [peer for peer in SEATS if plan.leaf_of(peer) == (0, 1)]
    strangers = [peer for peer in ("s1", "s2", "s3", "s4") if plan.leaf_of(peer) == (0, 1)]
    assert seats and strangers
    chain, made = in_groups(*seats)
    assert len(made.header.partials) == 2 and any(part.votes for part in made.header.contributors)
    assert version_fault(chain, made.header, RUN_OF_GROUPS) is VersionFault.SEATLESS
    chain, made = in_groups(*seats, *strangers)
    assert len(made.header.partials) == 1 and version_fault(chain, made.header, RUN_OF_GROUPS) is None


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("age", [WITHIN_VERSIONS - 1, WITHIN_VERSIONS])
@pytest.mark.parametrize("ended", [False, True])
def test_who_has_a_seat_is_said_by_an_earlier_table_for_some_versions_in_groups(
    groups: int, age: int, ended: bool
) -> None:
    seat = Seat(1, 5, ended=100 - age) if ended else Seat(1, 100 - age)
    signed = SignedVersion(header(100, 0, groups), b"")
    chain = Chain((signed,), (Watermark("a", NEVER, 0, seat=seat),), 8)
    part = Contributor("a", Stamp(1, 1), 40, 4)
    part = replace(part, trust=chain.marks.mean("a").trust(part.score))
    assert rightly_stated(chain, replace(part, votes=not ended))
    earlier = rightly_stated(chain, replace(part, votes=ended))
    assert earlier is (groups > 1 and age < WITHIN_VERSIONS)
