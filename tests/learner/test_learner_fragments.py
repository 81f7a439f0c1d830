"""The semantics of copy-out and install, in small exact numbers."""

import resource
import sys

import pytest
import torch
from learner_kit import DEVICES

from p2pdiloco.errors import InvariantViolation, UserError
from p2pdiloco.learner.channel import BaseRef, CopiedOut, Install, NothingToCopy
from p2pdiloco.learner.fragments import FragmentCounters, Fragments, first_due
from p2pdiloco.learner.optimizer import HeldParameters
from p2pdiloco.tensors.layout import Exchange, TensorSpec, plan_fragments

H = 4
LAYOUTS = plan_fragments([TensorSpec("a", (2, 2)), TensorSpec("b", (2, 2))], 2)
"""Fragment 0 is a, fragment 1 is b."""


class Rig:
    """Fragment 0 under test: theta starts at base 10."""

    def __init__(self, rho=1.0, device="cpu"):
        self.params = {"a": torch.full((2, 2), 10.0, device=device), "b": torch.zeros(2, 2, device=device)}
        self.exchange = Exchange.create(LAYOUTS)
        self.exchange.base(0, 0).fill_(10.0)
        self.fragments = Fragments(
            HeldParameters(self.params), LAYOUTS, self.exchange, [BaseRef(5, 0)] * 2, H, rho
        )
        self.fragments.counters[0].steps_since_base = 0

    def step(self, change, tokens=100):
        self.params["a"].add_(change)
        self.fragments.count_step(tokens)

    def copy(self):
        copied = self.fragments.copy_out(0, inner_step=7)
        assert isinstance(copied, CopiedOut)
        return copied

    def install(self, value, mode, tokens=0):
        old = self.fragments.bases[0]
        self.exchange.base(0, 1 - old.buffer).fill_(value)
        self.fragments.install(Install(0, old.number + 1, 1 - old.buffer, mode, tokens))

    @property
    def theta(self):
        assert self.params["a"].unique().numel() == 1
        return self.params["a"][0, 0].item()

    @property
    def displacement(self):
        return self.fragments.displacement(0)[0].item()

    @property
    def counters(self):
        return self.fragments.counters[0]


@pytest.fixture(params=DEVICES)
def rig(request):
    rig = Rig(device=request.param)
    yield rig
    rig.exchange.close()


def test_copy_out_shares_theta_and_says_what_it_took(rig):
    rig.step(-1)
    rig.step(-2)
    assert rig.copy() == CopiedOut(0, 200, 2, base_number=5, base_buffer=0, inner_step=7, due=False)
    assert rig.exchange.sent(0).tolist() == [7.0] * 4
    rig.step(-1)
    assert rig.exchange.sent(0).tolist() == [7.0] * 4
    assert rig.fragments.copy_out(0, 8) == NothingToCopy(0, slot_in_use=True)


def test_an_absence_is_counted_once_in_the_clock_of_the_run(rig):
    """Four learners; in steps of all of them, of fragment 0 alone."""
    made = 0

    def steps(count):
        nonlocal made
        for _ in range(count):
            rig.step(0)
        made += count

    def clock():
        return (2 * rig.fragments.run_tokens(4) - 400 * made) / 400

    steps(H)
    rig.copy()
    steps(1)
    assert clock() == made
    rig.install(10, "merged", 400 * H)
    assert clock() == made
    steps(40)  # cut off: the others go on without us, as far as we know
    assert clock() == made
    merged = 400 * H + 300 * 40
    for _ in range(3):  # ours waits; theirs is in the bases
        rig.install(10, "rebase", merged)
        assert made - 1 <= clock() <= made
        steps(H)
        assert made - 1 <= clock() <= made
        merged += 300 * H


def test_nothing_to_copy_without_a_step(rig):
    assert rig.fragments.copy_out(0, 0) == NothingToCopy(0, slot_in_use=False)


def test_merged_keeps_the_steps_made_in_flight(rig):
    rig.step(-3)
    rig.copy()
    rig.step(-2, tokens=50)
    rig.install(8.0, "merged")
    assert rig.theta == 8.0 - 2.0
    assert rig.counters == FragmentCounters(unmerged_tokens=50, unmerged_steps=1, steps_since_base=1)
    assert rig.fragments.bases[0] == BaseRef(6, 1)
    assert rig.displacement == 2.0


@pytest.mark.parametrize(("rho", "theta", "steps"), [(0.5, 7.0, 1), (0.0, 8.0, 0)])
def test_rho_weighs_the_steps_made_in_flight(rho, theta, steps):
    rig = Rig(rho)
    rig.step(-3)
    rig.copy()
    rig.step(-2)
    rig.install(8.0, "merged")
    assert rig.theta == theta
    assert (rig.counters.unmerged_steps, rig.counters.unmerged_tokens) == (steps, 100 * steps)
    assert not rig.counters.slot_in_use


def test_rebase_keeps_displacement_and_counters(rig):
    rig.step(-3)
    rig.install(20.0, "rebase")
    assert rig.theta == 17.0
    assert rig.displacement == 3.0
    assert rig.counters == FragmentCounters(unmerged_tokens=100, unmerged_steps=1, steps_since_base=0)


def test_rebases_in_flight_then_merged(rig):
    rig.step(-3)
    rig.copy()  # sent 7, displacement 3
    rig.step(-2)
    rig.install(20.0, "rebase")
    rig.install(24.0, "rebase")
    assert rig.exchange.sent(0).tolist() == [7.0] * 4  # the daemon may be reading it
    assert rig.fragments.not_in_flight(0)[0].item() == 2.0
    rig.step(-1)
    rig.install(30.0, "merged")
    assert rig.theta == 30.0 - 2.0 - 1.0
    assert (rig.counters.unmerged_tokens, rig.counters.unmerged_steps) == (200, 2)
    rig.copy()
    rig.install(31.0, "merged")  # the moves of the former flight are forgotten
    assert rig.theta == 31.0


def test_overwrite_takes_the_version_as_it_is(rig):
    rig.step(-3)
    rig.copy()
    rig.step(-2)
    rig.install(8.0, "overwrite")
    assert rig.theta == 8.0
    assert rig.counters == FragmentCounters()


def test_a_freed_slot_is_due_at_once_with_all_of_its_work(rig):
    rig.step(-3)
    rig.copy()
    rig.step(-2)
    assert rig.fragments.copy_due(8) == []
    rig.fragments.free_slot(0)
    [copied] = rig.fragments.copy_due(8)
    assert copied == CopiedOut(0, 200, 2, 5, 0, 8, due=True)
    assert rig.exchange.sent(0).tolist() == [5.0] * 4


def long_away(rho=1.0):
    """Twelve steps of -1, where a contribution carries at most eight: displacement 12."""
    rig = Rig(rho)
    for _ in range(12):
        rig.step(-1)
    return rig


def test_a_long_displacement_goes_out_in_shares():
    rig = long_away()
    assert rig.copy() == CopiedOut(0, 800, 8, base_number=5, base_buffer=0, inner_step=7, due=False)
    assert rig.exchange.sent(0)[0].item() == pytest.approx(10.0 - 8.0)
    rig.step(-1)
    assert rig.fragments.not_in_flight(0)[0].item() == pytest.approx(4.0 + 1.0)
    rig.install(20.0, "merged")
    assert rig.theta == pytest.approx(20.0 - 5.0)
    assert (rig.counters.unmerged_tokens, rig.counters.unmerged_steps) == (500, 5)
    copied = rig.copy()
    assert (copied.tokens, copied.inner_steps) == (500, 5)
    rig.install(30.0, "merged")
    assert rig.theta == pytest.approx(30.0)


@pytest.mark.parametrize(("rho", "theta"), [(0.5, 40.0 - 4.0 - 1.0), (0.0, 40.0 - 4.0)])
def test_what_a_copy_held_back_is_not_weighed_with_rho(rho, theta):
    rig = long_away(rho)
    rig.copy()
    rig.step(-2)
    rig.install(30.0, "rebase")
    rig.install(40.0, "merged")
    # Of the steps in flight, half or nothing is kept; with 0 < rho < 1 all of them still count.
    assert rig.theta == pytest.approx(theta)
    assert rig.counters.unmerged_steps == (5 if rho else 4)
    assert rig.counters.unmerged_tokens == 100 * rig.counters.unmerged_steps


def test_a_freed_share_goes_back_into_the_displacement():
    rig = long_away()
    rig.copy()
    rig.fragments.free_slot(0)
    assert rig.displacement == pytest.approx(12.0)
    assert (rig.counters.unmerged_steps, rig.counters.sent_steps) == (12, 0)
    rig.counters.unmerged_steps, rig.counters.unmerged_tokens = 8, 800  # as if nothing were too long now
    rig.copy()
    rig.install(20.0, "merged")
    assert rig.theta == pytest.approx(20.0), "what the freed copy held back is forgotten"


def test_a_learner_that_makes_no_steps_sends_shares_of_which_none_is_like_the_one_before():
    """Equal ones have the same bytes, and are refused as copies of what was merged last."""
    rig = long_away()
    for _ in range(12):
        rig.step(-1)
    shares = []
    while copied := rig.fragments.copy_remaining(7):
        shares.append(copied[0].inner_steps)
        rig.install(100.0 * len(shares), "merged")
    assert shares == [8, 7, 8, 1] and not rig.counters.unmerged_steps


def test_what_is_given_up_again_and_again_waits_for_an_inner_step():
    rig = long_away()
    for _ in range(2):
        assert rig.fragments.copy_remaining(7)
        rig.fragments.free_slot(0)
    assert not rig.fragments.copy_remaining(7) and not rig.fragments.copy_due(7)
    assert isinstance(rig.fragments.copy_out(0, 7), NothingToCopy) and rig.counters.unmerged_steps == 12
    rig.step(-1)
    assert rig.fragments.copy_remaining(8)[0].inner_steps == 8


def test_nobody_waits_for_what_was_given_up_until_an_inner_step_is_made():
    """A program that ends with its run would wait for ever."""
    rig = long_away()
    for _ in range(2):
        assert not rig.fragments.all_merged
        for copied in rig.fragments.copy_remaining(7):
            assert not rig.fragments.all_merged
            rig.fragments.free_slot(copied.fragment)
    assert rig.fragments.all_merged and rig.counters.unmerged_steps == 12
    rig.step(-1)
    assert not rig.fragments.all_merged


def test_where_rounds_take_longer_than_h_steps_contributions_carry_all_of_them():
    rig, carried = Rig(), []
    for _ in range(6):
        for _ in range(5 * H):
            rig.step(-1)
        carried.append(rig.copy().inner_steps)
        rig.install(50.0, "merged")
    # The first two may still be absences. What they left waiting is made up for.
    assert carried[:2] == [2 * H, 2 * H]
    assert carried[2:] == [10 * H, 6 * H, 5 * H, 5 * H]
    assert rig.counters.unmerged_steps == 0


def test_however_long_a_displacement_an_eighth_goes_out():
    rig = Rig()
    rig.counters.unmerged_steps, rig.counters.unmerged_tokens = 800, 8000
    assert rig.copy().inner_steps == 100


def test_merged_without_a_copy_breaks_an_invariant(rig):
    rig.step(-3)
    with pytest.raises(InvariantViolation):
        rig.install(8.0, "merged")


def test_install_into_the_buffer_in_use_breaks_an_invariant(rig):
    with pytest.raises(InvariantViolation):
        rig.fragments.install(Install(0, 6, 0, "rebase"))


def test_undisturbed_fragments_are_due_every_h_steps_spread_evenly():
    rig = Rig()
    rig.fragments = Fragments(HeldParameters(rig.params), LAYOUTS, rig.exchange, [BaseRef(5, 0)] * 2, H, 1.0)
    dates = {0: [], 1: []}
    for step in range(1, 17):
        rig.fragments.count_step(1)
        for copied in rig.fragments.copy_due(step):
            dates[copied.fragment].append(step)
        # A round takes one inner step.
        for index, counters in enumerate(rig.fragments.counters):
            if counters.slot_in_use and counters.steps_since_base == 1:
                base = rig.fragments.bases[index]
                rig.fragments.install(Install(index, base.number + 1, 1 - base.buffer, "merged"))
    assert dates == {0: [2, 6, 10, 14], 1: [4, 8, 12, 16]}
    assert rig.fragments.deferred_copies == 0


def test_due_while_the_slot_is_in_use_is_counted_once_and_made_up_for(rig):
    for step in range(1, 8):
        rig.step(-1)
        rig.fragments.copy_due(step)  # copied at 4
    rig.step(-1)
    rig.step(-1)
    assert rig.fragments.copy_due(9) == []
    rig.fragments.deferred_copies = 0
    rig.counters.steps_since_base = H
    assert [c.fragment for c in rig.fragments.copy_due(9)] == []
    assert rig.fragments.deferred_copies == 1
    rig.install(6.0, "merged")
    [copied] = [c for c in rig.fragments.copy_due(9) if c.fragment == 0]
    assert (copied.inner_steps, copied.base_number) == (5, 6)


@pytest.mark.parametrize(("fragments", "period"), [(24, 24), (8, 24), (4, 8), (10, 4)])
def test_first_due_dates(fragments, period):
    dates = [first_due(index, fragments, period) for index in range(fragments)]
    assert dates == sorted(dates)
    assert dates[0] >= 1
    assert dates[-1] == period
    assert max(dates.count(date) for date in dates) <= -(-fragments // period) + 1


def test_exchange_is_seen_by_a_second_mapping_and_areas_do_not_overlap():
    import os

    first = Exchange.create(LAYOUTS)
    second = Exchange.attach(os.dup(first.fd), LAYOUTS)
    value = 0.0
    for layout in LAYOUTS:
        for area in (first.base(layout.index, 0), first.base(layout.index, 1), first.sent(layout.index)):
            value += 1
            area.fill_(value)
    seen = [
        area.unique().tolist()
        for layout in LAYOUTS
        for area in (second.base(layout.index, 0), second.base(layout.index, 1), second.sent(layout.index))
    ]
    assert seen == [[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]]
    view = first.base(0, 0)
    first.close()
    second.close()
    assert view.tolist() == [1.0] * 4  # a view outlives the exchange
    with pytest.raises(InvariantViolation):
        first.base(0, 0)


def test_every_third_version_only(rig):
    """Others make a version every H steps: our copies come every third time and carry it all."""
    rig.fragments.take_part(3)
    copied = []
    for number in range(1, 10):
        for _ in range(H):
            rig.step(-1)
            copied += [c for c in rig.fragments.copy_due(0) if c.fragment == 0]
        called = rig.fragments.copy_out(0, 0)
        if isinstance(called, CopiedOut):
            copied.append(called)
        else:
            assert called == NothingToCopy(0, slot_in_use=rig.counters.slot_in_use)
        rig.install(10.0 - number, "merged" if rig.counters.slot_in_use else "rebase")
    assert [c.inner_steps for c in copied] == [3 * H] * 3
    assert rig.counters.unmerged_steps == 0


def test_a_call_just_before_our_turn_is_answered_and_long_before_it_is_not(rig):
    rig.fragments.take_part(3)
    for _ in range(2 * H + 1):
        rig.step(-1)
    assert rig.fragments.copy_out(0, 0) == NothingToCopy(0, slot_in_use=False)
    rig.step(-1)
    assert rig.copy().inner_steps == 2 * H + 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere buffers are real files")
def test_a_limit_of_files_is_not_called_a_lack_of_memory():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(UserError, match="the limit of the size of files is too small") as ended:
            Exchange.create(LAYOUTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ulimit -f" in ended.value.hint
