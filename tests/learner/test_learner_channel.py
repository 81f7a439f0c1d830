"""The semantics of copy-out and install, in small exact numbers."""

from __future__ import annotations

import functools
import itertools
import math
import os
import resource
import sys
import threading

import pytest
import torch
from deadlines import within_s
from learner_kit import DEVICES, TASK, alone
from learner_kit import LAYOUTS as MICRO_LAYOUTS

from p2pdiloco.config.presets import MICRO
from p2pdiloco.core.api.config import Amendment
from p2pdiloco.core.audit_state import HARMS, HELPS, ratio_of
from p2pdiloco.errors import InvariantViolation, UserError
from p2pdiloco.learner.channel import (
    Appraise,
    Appraised,
    BaseRef,
    ChannelBroken,
    CopiedOut,
    CopyOut,
    DataShare,
    Evaluate,
    Evaluated,
    FollowCourse,
    FreeSlot,
    Install,
    NothingToCopy,
    SpareMachine,
    Status,
    Stop,
    StopStepping,
)
from p2pdiloco.learner.fragments import FragmentCounters, Fragments, first_due
from p2pdiloco.learner.loop import train
from p2pdiloco.learner.mailbox import FINISH_POLL_S, Mailbox
from p2pdiloco.learner.optimizer import HeldParameters
from p2pdiloco.learner.schedule import RATE_FLOOR, learning_rate
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tensors import vault
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import Exchange, TensorSpec, gather, plan_fragments

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
    assert rig.fragments.copy_out(0, 0) == NothingToCopy(0, slot_in_use=False), "no step was made"
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rho", "theta", "steps"), [(1.0, 6.0, 1), (0.5, 7.0, 1), (0.0, 8.0, 0)])
def test_merged_keeps_the_steps_made_in_flight_as_rho_weighs_them(device, rho, theta, steps):
    rig = Rig(rho, device)
    rig.step(-3)
    rig.copy()
    rig.step(-2, tokens=50)
    rig.install(8.0, "merged")
    assert (rig.theta, rig.displacement) == (theta, 8.0 - theta)
    assert rig.counters == FragmentCounters(50 * steps, steps, steps_since_base=1)
    assert rig.fragments.bases[0] == BaseRef(6, 1)


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


def test_what_is_given_up_again_and_again_waits_for_an_inner_step_and_nobody_for_it():
    """A program that ends with its run would wait for ever."""
    rig = long_away()
    for _ in range(2):
        assert not rig.fragments.all_merged
        for copied in rig.fragments.copy_remaining(7):
            assert not rig.fragments.all_merged
            rig.fragments.free_slot(copied.fragment)
    assert not rig.fragments.copy_remaining(7) and not rig.fragments.copy_due(7)
    assert isinstance(rig.fragments.copy_out(0, 7), NothingToCopy)
    assert rig.fragments.all_merged and rig.counters.unmerged_steps == 12
    rig.step(-1)
    assert not rig.fragments.all_merged
    assert rig.fragments.copy_remaining(8)[0].inner_steps == 8


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


@pytest.mark.parametrize(("buffer", "mode"), [(1, "merged"), (0, "rebase")])
def test_merged_without_a_copy_and_installing_into_the_buffer_in_use_break_an_invariant(rig, buffer, mode):
    rig.step(-3)
    with pytest.raises(InvariantViolation):
        rig.fragments.install(Install(0, 6, buffer, mode))


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
    first = Exchange.create(LAYOUTS)
    second = Exchange.attach(os.dup(first.fd), LAYOUTS)

    def areas(exchange):
        of_one = ((exchange.base(n, 0), exchange.base(n, 1), exchange.sent(n)) for n in range(len(LAYOUTS)))
        return itertools.chain.from_iterable(of_one)

    for value, area in enumerate(areas(first), 1):
        area.fill_(value)
    assert [area.unique().tolist() for area in areas(second)] == [[value] for value in range(1, 7)]
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


# What contributions do to the loss, as a learner measures it.

INT8 = codec("int8")
STEPS = 24


def flat(parameters, fragment):
    """A fragment of them."""
    found = torch.empty(MICRO_LAYOUTS[fragment].numel)
    gather(parameters, MICRO_LAYOUTS[fragment], found)
    return found


@functools.cache
def displacement(fragment=1):
    """What an honest learner's steps from version 0 come to."""
    training, _ = alone(STEPS)
    start = flat(TASK.initial_parameters(), fragment)
    return start - flat(named_parameters(training.model), fragment)


def appraised(bench, path, theirs, ours=None, fragment=1):
    """What the learner says of these."""
    vault.begin_appraisal(path, flat(TASK.initial_parameters(), fragment))
    ours = displacement() if ours is None else ours
    vault.add_contributions(path, *(INT8.encode(way.clone()) for way in (theirs, ours)))
    bench.post(Appraise(fragment, "peer-b", path))
    bench.step()
    (found,) = bench.events(Appraised)
    assert found.path == path
    return found


def test_honest_work_helps_reversed_work_harms_and_noise_does_nothing(bench, tmp_path):
    ours, before = displacement(), bench.parameters()
    noise = torch.randn(MICRO_LAYOUTS[1].numel, generator=torch.Generator().manual_seed(3))

    def ratio(theirs):
        found = appraised(bench, tmp_path / "given", theirs)
        assert len(found.theirs) == len(found.ours) == 2 and not found.same_data and found.took_s >= 0.0
        return ratio_of(found.theirs, found.ours)

    assert ratio(ours) == 1.0
    assert ratio(100 * ours) == pytest.approx(1.0, abs=0.05), "length wins nothing"
    assert ratio(-ours) == -1.0 < HARMS
    assert abs(ratio(noise * float(ours.norm() / noise.norm()))) < HELPS
    assert ratio(torch.zeros_like(ours)) == 0.0
    assert bench.training.inner_step == 5 and before.keys() == bench.parameters().keys()


def test_the_parameters_that_train_are_left_alone(bench, tmp_path):
    _, expected = alone(3)
    losses = []
    for _ in range(3):
        report = bench.training.step()
        losses.append(report.loss)
        path = tmp_path / "given"
        vault.begin_appraisal(path, torch.zeros(MICRO_LAYOUTS[1].numel))
        vault.add_contributions(path, *(INT8.encode(displacement().clone()) for _ in range(2)))
        bench.post(Appraise(1, "peer-b", path))
        assert bench.mailbox.boundary(report)
    assert losses == expected


def test_the_share_of_a_reader_of_the_same_data_is_drawn_from(bench, tmp_path):
    stream, theirs = bench.training.stream, displacement()
    count = stream.shared.shards
    taken = bytes([170]) * ((count + 7) // 8)
    stream.share(DataShare(stream.data, 0, taken, ("peer-b", "peer-c")))
    assert appraised(bench, tmp_path / "given", theirs).same_data
    stream.share(DataShare(stream.data, 0, taken, ("peer-c",)))
    assert not appraised(bench, tmp_path / "given", theirs).same_data


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_file_that_is_not_whole_has_no_figures(bench, tmp_path, kept):
    path = tmp_path / "given"
    vault.begin_appraisal(path, torch.zeros(math.ceil(kept * MICRO_LAYOUTS[1].numel)))
    if not kept:
        path.unlink()
    bench.post(Appraise(1, "peer-b", path))
    bench.step()
    (found,) = bench.events(Appraised)
    assert found == Appraised(path, took_s=found.took_s)


@pytest.mark.parametrize("heldout", [(), (torch.empty(0, 8), torch.empty(0, 8))])
def test_without_held_out_data_nothing_is_measured(bench, tmp_path, heldout):
    assert bench.mailbox.appraises
    bench.mailbox._heldout = heldout
    assert not bench.mailbox.appraises
    found = appraised(bench, tmp_path / "given", displacement())
    assert (found.theirs, found.ours) == ((), ())


def test_who_is_to_end_measures_nothing(bench, tmp_path):
    bench.post(StopStepping())
    bench.post(Appraise(1, "peer-b", tmp_path / "given"))
    bench.mailbox.obey()
    assert not bench.events(Appraised)


def test_the_start_is_found_from_the_version_and_its_update():
    start, delta = torch.randn(1000), torch.randn(1000)
    payload = codec("fp32").encode(delta.clone())
    found = vault.start_of_version(start - 0.7 * delta, payload, "fp32", 0.7)
    assert torch.allclose(found, start, atol=1e-5)


def test_what_is_read_is_copied_nowhere(tmp_path, monkeypatch):
    """A copy is memory that nobody counts, and that the process keeps."""
    path, chosen, numel = tmp_path / "file", codec("int4"), 1_000
    values = torch.linspace(-1.0, 1.0, numel)
    vault.begin_appraisal(path, values)
    vault.add_contributions(path, chosen.encode(values), chosen.encode(-values))
    given = []
    decode = type(chosen).decode

    def spied(self, payload, out):
        given.append(payload.obj if isinstance(payload, memoryview) else None)
        decode(self, payload, out)

    monkeypatch.setattr(type(chosen), "decode", spied)
    found = vault.read_appraisal(path, "int4", numel)
    assert len(given) == 2 and given[0] is given[1] is not None
    assert torch.equal(found.theirs, -found.ours) and torch.equal(found.start, values)


# A learner goes by the run's course: amended rates, and no inner steps while the run rests.

INNER = MICRO.inner
PATIENCE_S = 30.0


def test_an_amendment_changes_the_rate_from_its_tokens_on(bench):
    at = INNER.warmup_tokens + 10 * INNER.tokens_per_step
    longer = Amendment(1, at, schedule_tokens=10 * INNER.schedule_tokens, rate_factor=0.5)
    bench.training.amend((longer,))
    rates = []
    for tokens in (at - INNER.tokens_per_step, at):
        bench.training.run_is_at(tokens)
        bench.training.step()
        rates.append(bench.training.optimizer.param_groups[0]["lr"])
    assert rates[0] == learning_rate(INNER, at - INNER.tokens_per_step, 0)
    assert rates[1] == learning_rate(INNER, at, 1, longer) < 0.52 * rates[0]


def test_the_floor_comes_where_the_amended_schedule_ends():
    ends = 2 * INNER.schedule_tokens
    longer = Amendment(1, 0, schedule_tokens=ends)
    assert learning_rate(INNER, INNER.schedule_tokens, 1) == pytest.approx(RATE_FLOOR * INNER.learning_rate)
    assert learning_rate(INNER, INNER.schedule_tokens, 1, longer) > 0.5 * INNER.learning_rate
    assert learning_rate(INNER, ends, 1, longer) == pytest.approx(RATE_FLOOR * INNER.learning_rate)
    # Whatever an owner writes, it is a number.
    assert learning_rate(INNER, INNER.warmup_tokens, 1, Amendment(1, 0, schedule_tokens=1)) > 0


def heard(bench, kind, number):
    """Wait for so many events of a kind, and return them; whatever comes beside them is left out."""
    bench.daemon.settimeout(within_s(PATIENCE_S))
    found = []
    while len(found) < number:
        found += bench.events(kind)
    return found


@pytest.mark.parametrize("at_its_start", [False, True])
def test_who_rests_hands_out_what_it_has_and_goes_on_when_it_is_told(bench, at_its_start):
    bench.step()
    bench.events()
    bench.post(FollowCourse((), "paused"))

    def learn():
        if not at_its_start or bench.mailbox.begin():
            train(bench.training, bench.mailbox.boundary)

    training = threading.Thread(target=learn)
    training.start()
    try:
        copies = heard(bench, CopiedOut, len(MICRO_LAYOUTS))  # long before any is due
        assert sorted(copy.fragment for copy in copies) == [layout.index for layout in MICRO_LAYOUTS]
        stands = bench.training.inner_step
        bench.post(FreeSlot(2))  # nobody took that one: it goes out again
        assert [copy.fragment for copy in heard(bench, CopiedOut, 1)] == [2]
        assert bench.training.inner_step == stands == (1 if at_its_start else 2)
        bench.mailbox._next_status = 0.0
        assert heard(bench, Status, 1)[0].tokens_per_s == 0.0
        bench.post(FollowCourse())
        bench.mailbox._status_interval_s = 0.0
        bench.mailbox._next_status = 0.0
        while heard(bench, Status, 1)[0].inner_step < stands + 3:
            pass
    finally:
        bench.post(Stop())
        training.join(within_s(PATIENCE_S))
    assert not training.is_alive()


# The mailbox of the daemon's commands, between inner steps.


def test_rebases_by_zero_do_not_change_the_training(bench):
    _, expected = alone(12)
    losses = []
    for step in range(12):
        report = bench.training.step()
        losses.append(report.loss)
        for layout in bench.fragments.layouts:
            old = bench.fragments.bases[layout.index]
            bench.exchange.base(layout.index, 1 - old.buffer).copy_(
                bench.exchange.base(layout.index, old.buffer)
            )
            bench.post(Install(layout.index, step + 1, 1 - old.buffer, "rebase"))
        assert bench.mailbox.boundary(report)
    assert losses == expected
    assert bench.fragments.bases == [BaseRef(12, 0)] * 4


def test_evaluation_is_of_the_global_parameters_not_of_the_learner_s(bench):
    losses = []
    for steps in (0, 20, 0):
        for _ in range(steps):
            bench.training.step()
        bench.post(Evaluate())
        bench.step()
        losses += [event.loss for event in bench.events(Evaluated)]
        if steps:
            bench.exchange.base(0, 0).zero_()
    first, second, third = losses
    assert third != first == second == pytest.approx(math.log(256), abs=0.3)


def test_commands_that_come_while_others_are_obeyed_wait_for_the_next_boundary(bench, monkeypatch):
    made = []

    def evaluate_and_be_asked_again():
        bench.post(Evaluate())
        bench.channel.take_calls()  # as the thread that answers closing calls reads meanwhile
        made.append(bench.training.inner_step)
        assert len(made) < 10, "no inner step is made any more"

    monkeypatch.setattr(bench.mailbox, "_evaluate", evaluate_and_be_asked_again)
    bench.post(Evaluate())
    for _ in range(3):
        assert bench.step()
    assert made == [1, 2, 3]
    (first, *_) = bench.events(Evaluated)
    assert first.loss is None, "nothing was measured"


def test_a_daemon_that_does_not_read_never_blocks_the_learner(bench):
    for step in range(3000):
        longest_s = 2.0 if step == 2990 else 1.0
        bench.channel.emit(Status(step, 0, 0.0, 0.0, None, longest_s, 0.0, 3 * longest_s))
    seen = []
    while events := bench.events():
        seen += events
        bench.channel.flush()
    assert len(seen) < 3000
    assert seen[-1].inner_step == 2999
    assert max(status.longest_gap_s for status in seen) == 2.0
    assert max(status.longest_aside_s for status in seen) == 6.0
    with pytest.raises(ChannelBroken, match="does not read"):
        for _ in range(100_000):
            bench.channel.emit(NothingToCopy(0, False))


class Waiting:
    """A bench's mailbox, whose clock stands still except while the learner waits. `said`: commands that come
    in a wait, by its number; `took_s`: of waits that are not as long as they might be."""

    def __init__(self, bench, said, took_s=None, status_interval_s=1000.0):
        self.now, self.waits = 100.0, []
        self._bench, self._said, self._took_s = bench, said, took_s or {}
        bench.channel.wait = self._wait
        given = (bench.channel, bench.training, bench.fragments, (), None, status_interval_s)
        self.mailbox = Mailbox(*given, clock=lambda: self.now)

    def _wait(self, timeout_s):
        self.waits.append(timeout_s)
        for command in self._said.get(len(self.waits), ()):
            self._bench.post(command)
        self.now += self._took_s.get(len(self.waits), timeout_s)

    def step(self, took_s=0.0):
        self.now += took_s
        return self.mailbox.boundary(self._bench.training.step())


def test_a_step_with_a_least_length_waits_for_commands_not_for_time(bench):
    """The daemon speaks in the middle of a wait."""
    waiting = Waiting(bench, {2: [CopyOut(0)]}, {2: 3.0})
    waiting.mailbox.spare(SpareMachine(min_step_s=10.0))
    assert waiting.step() and waiting.step()
    bench.events()
    assert (waiting.waits, waiting.now) == ([10.0], 110.0)
    assert waiting.step(2.0)
    assert waiting.waits == [10.0, 8.0, 5.0]
    answers = bench.events((CopiedOut, NothingToCopy))
    assert answers[-1].fragment == 0, "asked in the wait, answered in it"
    assert waiting.step(11.5) and waiting.step()
    assert waiting.waits[3:] == [8.5], "1.5 s too late: made up for by the next one"
    assert waiting.step(100.0) and waiting.step() and waiting.step()
    assert waiting.waits[4:] == [8.0], "2 s of it are made up for"
    bench.post(Stop(None))
    assert not waiting.step() and len(waiting.waits) == 5


@pytest.mark.parametrize(
    ("wish", "then_s"), [(SpareMachine(min_step_s=2.0), 2.0), (SpareMachine(True, 10.0), FINISH_POLL_S)]
)
def test_a_wait_for_the_next_step_ends_when_its_owner_wants_something_else(bench, wish, then_s):
    waiting = Waiting(bench, {1: [wish], 2: [SpareMachine()]}, {1: 0.0})
    waiting.mailbox.spare(SpareMachine(min_step_s=10.0))
    assert waiting.step() and waiting.step()
    assert waiting.waits == [10.0, then_s]


def test_a_learner_rests_for_its_machine_until_all_is_merged_and_apart_from_the_run(bench):
    said = {
        2: [Install(fragment, 1, 1, "merged") for fragment in range(len(bench.fragments))],
        4: [FollowCourse((), "paused")],
        5: [SpareMachine()],  # the run's pause is another's
        7: [FollowCourse()],
    }
    waiting = Waiting(bench, said, status_interval_s=0.0)
    assert waiting.step()
    bench.events()
    bench.post(SpareMachine(rests=True))
    assert waiting.step()
    assert len(waiting.waits) == 7, "it rested for both"
    events = bench.events()
    copied = [event.fragment for event in events if isinstance(event, CopiedOut)]
    assert copied == list(range(len(bench.fragments))), "each once, whatever its due date"
    statuses = [event for event in events if isinstance(event, Status)]
    assert not any(event.tokens_per_s for event in statuses[:5])
    handed_over = [event.handed_over for event in statuses]
    assert handed_over[:5] == [False, False, True, True, True] and not any(handed_over[5:])


@pytest.mark.parametrize("daemon_stopped", [False, True])
def test_a_rest_is_no_inner_step_and_no_evaluation(bench, monkeypatch, daemon_stopped):
    """A measurement within a rest is left out once: twice, steps would take less than no time."""
    waiting = Waiting(bench, {3: [Evaluate()], 5: [FollowCourse()]}, status_interval_s=0.0)

    def evaluate():
        waiting.now += 7.0

    stops = []
    monkeypatch.setattr(bench.channel.standstill, "lasts", lambda: bool(stops) and len(waiting.waits) < 5)
    monkeypatch.setattr(waiting.mailbox, "_evaluate", evaluate)
    assert waiting.step()
    if daemon_stopped:
        stops.append(True)
    else:
        bench.post(FollowCourse((), "paused"))
    assert waiting.step(2.0)
    assert len(waiting.waits) == 5, "it rested"
    assert waiting.step(2.0)
    seen = bench.events(Status)
    assert seen[-1].step_time_s == 2.0
    assert max(status.longest_gap_s for status in seen) == 2.0
    assert max(status.longest_aside_s for status in seen) == 7.0
