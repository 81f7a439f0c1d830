"""Who reads what: shards by agreement, places that survive kills, nothing twice and no hole for ever."""

import sys
import threading

import numpy as np
import pytest
import torch

from p2pdiloco.daemon import wire
from p2pdiloco.daemon.network.discovery import agreed, united
from p2pdiloco.errors import UserError
from p2pdiloco.learner.channel import MAX_EPOCH, DataShare, Status, decode_event, frame
from p2pdiloco.learner.samples import LATELY, Allotment, SampleStream

SIZE, STEP = 640, 4


class Numbers:
    """Samples that say which they are."""

    def __init__(self, size=SIZE):
        self._size = size

    def __len__(self):
        return self._size

    def batch(self, indices):
        return (torch.from_numpy(indices),)


def stream(peer="a", path=None, size=SIZE, seed=3):
    return SampleStream(Numbers(size), seed, peer, STEP, path)


def taken(source, steps):
    """Numbers of the samples of so many steps, which are used."""
    found = []
    for _ in range(steps):
        found += source.take(STEP)[0].tolist()
        source.used()
    return found


def record(share):
    return wire.Reading(share.data, share.epoch, share.taken)


def gossip(*streams, lies=None):
    """Everybody hears what everybody has begun."""
    records = {peer: record(source.shared) for peer, source in zip("abc", streams, strict=False)} | (
        lies or {}
    )
    for peer, source in zip("abc", streams, strict=False):
        source.share(agreed(source.data, peer, record(source.shared), records))


def test_an_epoch_is_every_sample_once_in_an_order_of_its_own():
    alone = stream()
    epochs = [taken(alone, SIZE // STEP) for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SIZE))] * 2
    assert epochs[0] != epochs[1] and epochs[0][:40] != sorted(epochs[0][:40])
    assert taken(stream(seed=4), 10) != epochs[0][:40]
    # Steps that do not fit into shards go on in the next one.
    ragged = SampleStream(Numbers(), 3, "a", STEP)
    assert [n for _ in range(64) for n in ragged.take(10)[0].tolist()] == epochs[0]


def test_peers_that_know_each_other_read_different_samples_and_help_the_slow_one():
    """One is five times slower: an epoch is read once by all together, and ends for all about then."""
    fast, slow = stream("a"), stream("b")
    gossip(fast, slow)
    seen = []
    while fast.shared.epoch == slow.shared.epoch == 0:
        seen += taken(fast, 5) + taken(slow, 1)
        gossip(fast, slow)
    assert set(seen) == set(range(SIZE))
    # What is read twice: the last shard of each, begun before the news went round.
    assert len(seen) - SIZE <= 6 * STEP + 2 * STEP


def test_of_three_the_data_of_one_that_leaves_falls_to_the_others_and_nobody_repeats_its_own():
    streams = [stream(peer) for peer in "abc"]
    gossip(*streams)
    seen = {peer: [] for peer in "abc"}
    for _ in range(20):
        for peer, source in zip("abc", streams, strict=True):
            seen[peer] += taken(source, 1)
        gossip(*streams)
    assert len({n for numbers in seen.values() for n in numbers}) == 3 * 20 * STEP
    left = set(seen["c"])
    gossip(*streams[:2])
    while streams[0].shared.epoch == 0:
        for peer, source in zip("ab", streams, strict=False):
            seen[peer] += taken(source, 1)
        gossip(*streams[:2])
        if len(seen["a"]) == 50 * STEP:
            together = seen["a"] + seen["b"]
            assert len(together) == len(set(together)) and not left & set(together)
    # Helping begins when one has nothing of its own left; two may begin the same shard at the same time.
    together = seen["a"] + seen["b"]
    assert left | set(together) == set(range(SIZE)) and len(together) + len(left) - SIZE < 12 * STEP


def test_views_that_differ_collide_late():
    """Two that do not know of each other yet begin with what is most clearly theirs."""
    first, second = Allotment(1000, 0, "a"), Allotment(1000, 0, "b")
    begun = [{one.next() for _ in range(100)} for one in (first, second)]
    assert len(begun[0] & begun[1]) < 25
    owned = Allotment(1000, 0, "a")
    owned.share(("a", "b"), 0, bytes(125))
    mine = {owned.next() for _ in range(450)}
    assert len(begun[0] & mine) > 85


def test_a_killed_learner_repeats_nothing_and_one_that_ended_leaves_nothing_out(tmp_path):
    path = tmp_path / "data.place"
    source = stream(path=path)
    seen = taken(source, 21)
    source.save_place()
    again = stream(path=path)
    seen += taken(again, 3)
    # Killed here: the samples of at most 16 inner steps are left out, in each of the two kills.
    killed = stream(path=path)
    seen += taken(killed, 2)
    rest = taken(stream(path=path), (SIZE - len(seen)) // STEP - 2 * 16)
    assert len(seen + rest) == len(set(seen + rest))
    whole = stream()
    assert taken(whole, 24) == seen[: 24 * STEP]
    share = whole.shared
    assert share.shards == SIZE // STEP and int.from_bytes(share.taken, "big").bit_count() == 24
    # Other data: another order from its begin.
    assert taken(stream(path=path, size=600), 5) == taken(stream(size=600), 5)
    path.write_bytes(b"damaged")
    assert taken(stream(path=path), 5) == seen[: 5 * STEP]


def test_samples_that_are_given_back_are_taken_again_and_nothing_is_written_after_that(tmp_path):
    path = tmp_path / "data.place"
    source, seen = stream(path=path), []
    for _ in range(SIZE // STEP - 1):
        seen += taken(source, 1)
    lost = source.take(2 * STEP)[0].tolist()  # over the end of an epoch
    source.give_back()
    source.take(STEP)
    source.save_place()
    assert taken(stream(path=path), 2) == lost
    done = stream(path=path)
    seen = taken(done, 3)
    done.give_back()
    assert set(taken(stream(path=path), 3)).isdisjoint(seen)


def test_a_step_that_begins_while_samples_are_given_back_is_not_written_down(tmp_path):
    """The inner loop's thread, and the one that ends the process."""
    whole = taken(stream(), 4)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for attempt in range(300):
            source = stream(path=tmp_path / str(attempt))
            taken(source, 3)
            both = [
                threading.Thread(target=source.take, args=(STEP,)),
                threading.Thread(target=source.give_back),
            ]
            for thread in both[:: 1 if attempt % 2 else -1]:
                thread.start()
            for thread in both:
                thread.join()
            assert taken(stream(path=tmp_path / str(attempt)), 1) == whole[3 * STEP :]
    finally:
        sys.setswitchinterval(interval_s)


def test_what_a_liar_says_of_the_data_stalls_nobody():
    source = stream()
    full = b"\xff" * ((source._shards.count + 7) // 8)
    for epoch in (0, 1, 7, 7, 2):
        source.share(DataShare(source.data, epoch, full, ("a", "b")))
        source.share(DataShare(source.data, epoch, full[1:], ()))
        source.share(DataShare("other", 900, full, ()))
        assert len(taken(source, 2)) == 2 * STEP
    assert 7 <= source.shared.epoch <= 12
    # At the last epoch there is, data goes on, and the daemon goes on hearing of it.
    source.share(DataShare(source.data, MAX_EPOCH, full, ("a", "b")))
    assert len(taken(source, 2 * SIZE // STEP)) == 2 * SIZE and source.shared.epoch == MAX_EPOCH
    status = Status(1, 1, 1.0, 0.1, None, 0.1, 0.0, share=source.shared)
    assert decode_event(frame(status)[4:]) == status
    assert united([b"\x01\x00", b"\x10\x02", b"\xff"]) == b"\x11\x02"


def test_one_that_says_it_is_far_ahead_makes_nobody_leave_data_out():
    streams = [stream(peer) for peer in "ab"]
    bits = streams[0].shared.taken
    lies = [wire.Reading(streams[0].data, MAX_EPOCH, b"\xff" * len(bits)), wire.Reading("x", 5, bits)]
    lies.append(wire.Reading(streams[0].data, 0, b"\xff" * (len(bits) + 1)))
    seen = []
    while not any(source.shared.epoch for source in streams):
        gossip(*streams, lies=dict(zip(("c", "d", "e"), lies, strict=True)))
        seen += [n for source in streams for n in taken(source, 1)]
    assert set(seen) == set(range(SIZE)) and len(seen) - SIZE <= 8 * STEP
    # Most may: who comes back after epochs is where they are. One alone moves another by one.
    mine, far = record(stream().shared), wire.Reading(streams[0].data, 9, bits)
    assert agreed(mine.data, "a", mine, {"b": far, "c": far, "d": mine}).epoch == 9
    assert agreed(mine.data, "a", mine, {"b": far, "c": far, "d": mine, "e": mine}).epoch == 0
    assert agreed(mine.data, "a", mine, {"a": mine, "b": far}) == DataShare(mine.data, 1, bits, ("a", "b"))
    assert agreed(mine.data, "a", None, {}) is None


def test_few_samples_do_and_none_is_one_sentence():
    few = SampleStream(Numbers(3), 0, "a", STEP)
    assert sorted(few.take(3)[0].tolist()) == [0, 1, 2] and len(few.take(6)[0]) == 6
    with pytest.raises(UserError, match="nothing to train on"):
        SampleStream(Numbers(0), 0, "a")
    assert np.unique(few.take(300)[0].numpy(), return_counts=True)[1].tolist() == [100] * 3


def test_what_was_taken_ahead_is_given_back_and_its_place_is_saved(tmp_path):
    """As on a GPU: a step's samples are taken while it computes the step before."""
    path = tmp_path / "data.place"
    whole = taken(stream(), 4)
    for ends in ("save_place", "give_back"):
        source = stream(path=path)
        source.take(STEP)
        source.take(STEP)
        source.used()
        getattr(source, ends)()
        assert taken(stream(path=path), 2) == whole[STEP : 3 * STEP]
        path.unlink()
    source = stream(path=path)
    for _ in range(2):
        source.take(STEP)
    source.used()
    source.save_place()
    source.take(STEP)  # the second one's are used after this
    assert set(taken(stream(path=path), 1)).isdisjoint(whole[: 3 * STEP]), "killed: nothing is taken twice"


def test_others_hear_of_a_shard_when_its_samples_are_used():
    """One that was begun ahead, told of and given back at the end would be left out in that epoch."""
    one, ahead = stream(), stream()
    taken(one, 1)
    for _ in range(2):
        ahead.take(STEP)
    ahead.used()
    assert ahead.shared == one.shared
    ahead.used()
    taken(one, 1)
    assert ahead.shared == one.shared


def test_of_another_reader_the_newest_samples_are_known_and_of_others_none():
    a, b, c = stream("a"), stream("b"), stream("c")
    rng = np.random.default_rng(0)
    assert a.share_of("b", 8, rng) is None, "nothing is known of it"
    gossip(a, b, c)
    theirs = [number for _ in range(10) for number in (taken(b, 4), taken(c, 3), gossip(a, b, c))[0]]
    (drawn,) = a.share_of("b", 8, rng)
    assert set(drawn.tolist()) <= set(theirs[-2 * LATELY * 8 :]) and len(drawn) == 8
    assert a.share_of("d", 8, rng) is None and a.share_of("a", 8, rng) is None
    before = taken(stream("a"), 10)
    (anywhere,) = a.anywhere(500, rng)
    assert len(anywhere) == 500 and len(set(anywhere.tolist())) > 200
    fresh = stream("a")
    fresh.anywhere(8, rng)
    assert taken(fresh, 10) == before, "what is drawn does not count as used"
