"""The vault: two of them fed the same bytes hold the same bits; nothing a peer sends can hurt it."""

import struct

import msgspec
import pytest
import torch

from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.config.presets import for_run
from p2pdiloco.errors import InvariantViolation, RemoteError
from p2pdiloco.tensors.codecs import CODECS, codec, state_digest
from p2pdiloco.tensors.layout import TensorSpec, plan_fragments
from p2pdiloco.tensors.merge import MAX_MAGNITUDE
from p2pdiloco.tensors.vault import Vault

SPECS = [TensorSpec("emb", (40, 16), True), TensorSpec("w", (64, 32)), TensorSpec("b", (64,))]
LAYOUTS = plan_fragments(SPECS, 2)


def make(contribution="int8", update="int8", load=True, keep_in_flight=1.0) -> Vault:
    vault = Vault(LAYOUTS, OuterSection(), 24, contribution, update, keep_in_flight)
    if load:
        generator = torch.Generator().manual_seed(0)
        vault.load_initial({s.name: torch.randn(s.shape, generator=generator) for s in SPECS})
    return vault


def noise(fragment: int, seed: int, size: float = 0.01) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYOUTS[fragment].numel, generator=generator) * size


def contribute(vault: Vault, fragment: int, seed: int) -> bytearray:
    base = vault.theta(fragment)
    return vault.own.encode(fragment, base, base + noise(fragment, seed)).payload


@pytest.mark.parametrize("name", sorted(CODECS))
def test_merger_and_follower_hold_equal_bits(name):
    syncer, follower = make(name, name), make(name, name)
    assert syncer.state_digest_of(0, 0) == follower.state_digest_of(0, 0)
    for number in range(1, 5):
        for fragment in range(len(LAYOUTS)):
            inputs = [
                (contribute(v, fragment, 7 * number + i), 100 * (i + 1), 4)
                for i, v in enumerate((syncer, follower))
            ]
            before = syncer.theta(fragment).clone()
            made = syncer.merge(fragment, number, inputs)
            assert follower.apply(fragment, number, made.update, 4) == made.state_digest
            assert torch.equal(syncer.theta(fragment), before)
            for vault in (syncer, follower):
                vault.commit(fragment, number, made.state_digest)
                assert vault.version(fragment) == number
                digest = state_digest(number, vault.theta(fragment), vault.momentum(fragment))
                assert vault.state_digest_of(fragment, number) == digest == made.state_digest
            assert not torch.equal(syncer.theta(fragment), before)


def test_a_result_is_the_version_before_and_eta_of_what_was_merged():
    vault = make("fp32", "fp32")
    assert torch.equal(vault.result(0), vault.theta(0))
    for number in range(1, 5):  # while momentum warms up
        before, delta = vault.theta(0).clone(), noise(0, number)
        vault.apply(0, number, codec("fp32").encode(delta), 24)
        vault.commit(0, number)
        digest = vault.state_digest_of(0, number)
        torch.testing.assert_close(vault.result(0), before - OuterSection().learning_rate * delta)
        assert torch.equal(vault.result(0), vault.theta(0)) == (number == 1), "there is no momentum at first"
        assert state_digest(number, vault.theta(0), vault.momentum(0)) == digest


def test_work_of_less_than_an_interval_moves_by_less_momentum():
    syncer, follower = make(), make()
    inputs = [(contribute(syncer, 0, 1), 10, 24), (contribute(syncer, 0, 2), 10, 4)]
    update = syncer.merge(0, 1, inputs).update
    syncer.commit(0, 1)
    assert follower.apply(0, 1, update, 24) == syncer.state_digest_of(0, 1)
    follower.commit(0, 1)
    made = syncer.merge(0, 2, [(contribute(syncer, 0, 3), 10, 4), (contribute(syncer, 0, 4), 10, 3)])
    assert made.state_digest == follower.apply(0, 2, made.update, 4), "of the longest of them"
    assert made.state_digest != follower.apply(0, 2, made.update, 24)
    assert follower.apply(0, 2, made.update, 60) == follower.apply(0, 2, made.update, 24), (
        "at most a whole step"
    )
    with pytest.raises(InvariantViolation, match="how long"):
        syncer.merge(0, 2, inputs, [b"of a group"])


def test_where_steps_in_flight_are_dropped_every_version_makes_a_whole_step():
    kept, dropped = make(keep_in_flight=0.5), make(keep_in_flight=0.0)
    for number, steps in ((1, 24), (2, 20)):
        update = kept.merge(0, number, [(contribute(kept, 0, number), 10, steps)]).update
        whole = dropped.apply(0, number, update, 24)
        assert dropped.apply(0, number, update, steps) == whole
        assert (kept.apply(0, number, update, steps) == whole) == (steps == 24)
        for vault in (kept, dropped):
            vault.apply(0, number, update, 24)
            vault.commit(0, number)


def of_run(merge: str) -> Vault:
    run = for_run("micro", "test")
    codecs, outer = msgspec.structs.replace(run.codec, contribution="fp32", update="fp32"), run.outer
    outer = msgspec.structs.replace(outer, merge=merge, learning_rate=1.0)
    vault = Vault.of(msgspec.structs.replace(run, codec=codecs, outer=outer), LAYOUTS)
    vault.load_initial({s.name: torch.zeros(s.shape) for s in SPECS})
    return vault


@pytest.mark.parametrize("grouped", [False, True])
def test_a_run_may_merge_all_by_plain_mean(grouped: bool):
    plain, radial = of_run("mean"), of_run("rda")
    # A fragment with more than embeddings; the weight of the second is twice that of the first.
    deltas = [noise(1, seed) for seed in (1, 2)]
    inputs = [(codec("fp32").encode(d), 24 * n, 24 * n) for n, d in enumerate(deltas, 1)]
    moved = []
    for vault in (plain, radial):
        partials = [vault.merge_partial(1, inputs[1:], ()).payload] if grouped else []
        vault.merge(1, 1, inputs[:1] if grouped else inputs, partials, 48)
        vault.commit(1, 1)
        moved.append(-vault.theta(1))
    mean = (deltas[0] + 2 * deltas[1]) / 3
    torch.testing.assert_close(moved[0], mean)
    assert float(moved[1].norm()) > 1.2 * float(mean.norm())


def test_a_newcomer_takes_the_whole_state():
    old, new = make(), make(load=False)
    made = old.merge(0, 1, [(contribute(old, 0, 1), 10, 1)])
    old.commit(0, 1)
    assert new.version(0) is None
    assert new.load_spare(0, 1, *old.state_buffers(0)) == made.state_digest
    new.commit(0, 1, made.state_digest)
    assert torch.equal(new.theta(0), old.theta(0))
    assert torch.equal(new.momentum(0), old.momentum(0))


def test_error_feedback_loses_nothing_over_many_rounds():
    vault, numel = make("int4"), LAYOUTS[0].numel
    base, decoded = torch.zeros(numel), torch.empty(numel)
    sent, delivered, worst = torch.zeros(numel), torch.zeros(numel), 0.0
    for round_ in range(60):
        source = noise(0, round_)
        source[0] = 1.0  # makes the other elements of the block coarse
        payload = vault.own.encode(0, base, -source).payload
        if round_ % 3 == 2:  # lost: neither it nor what it left out may count
            vault.own.discard_residual(0)
            continue
        vault.own.commit_residual(0)
        codec("int4").decode(payload, decoded)
        sent += source
        delivered += decoded
        worst = max(worst, float((sent - delivered).abs().max()))
    # without feedback the errors of 40 rounds add up to several steps
    assert worst <= 0.51 * 1.1 / 7


def test_what_sparse_updates_leave_out_goes_into_later_ones():
    vault, numel = make("fp32", "topk"), LAYOUTS[0].numel
    merged, applied, decoded = torch.zeros(numel), torch.zeros(numel), torch.empty(numel)
    for number in range(1, 121):
        source = noise(0, number % 4)
        payload = codec("fp32").encode(source)
        if number % 3 == 0:  # a merge that came to nothing: what it left out is not in the next one twice
            vault.merge(0, vault.version(0) + 1, [(payload, 10, 1)])
            vault.drop_spare(0)
            continue
        made = vault.merge(0, vault.version(0) + 1, [(payload, 10, 1)])
        vault.commit(0, vault.version(0) + 1, made.state_digest)
        codec("topk").decode(made.update, decoded)
        merged += source
        applied += decoded
    assert float((merged - applied).norm() / merged.norm()) < 0.5


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_residuals_are_committed_once_and_dense_codecs_have_none(name):
    vault = make("e3m0")
    contribute(vault, 0, 1)
    vault.own.commit_residual(0)
    with pytest.raises(InvariantViolation):
        vault.own.commit_residual(0)
    dense = make(name, "fp32")
    contribute(dense, 0, 1)
    dense.own.commit_residual(0)
    base = dense.theta(0)
    payload = dense.own.encode(0, base, base - 1.0).payload
    assert payload == codec(name).encode(base - (base - 1.0))


def test_a_diverged_learner_is_told():
    vault = make()
    with pytest.raises(ValueError, match="non-finite"):
        vault.own.encode(0, vault.theta(0), vault.theta(0) * float("inf"))


def test_wrong_order_of_calls_is_our_own_mistake():
    vault, fresh = make(), make(load=False)
    payload = contribute(vault, 0, 1)
    for wrong in (
        lambda: vault.commit(0, 1),
        lambda: vault.merge(0, 2, [(payload, 1, 1)]),
        lambda: vault.merge(0, 0, [(payload, 1, 1)]),
        lambda: vault.merge(0, 1, []),
        lambda: vault.apply(0, 2, payload, 24),
        lambda: vault.state_digest_of(0, 1),
        lambda: vault.load_initial({}),
        lambda: fresh.theta(0),
        lambda: fresh.apply(0, 1, payload, 24),
    ):
        with pytest.raises(InvariantViolation):
            wrong()
    vault.apply(0, 1, payload, 24)
    with pytest.raises(InvariantViolation):
        vault.commit(0, 1, b"\0" * 32)
    vault.drop_spare(0)
    with pytest.raises(InvariantViolation):
        vault.commit(0, 1)
    assert vault.version(0) == 0


def test_what_peers_send_is_judged_and_costs_nothing():
    vault, numel = make("int8", "bf16"), LAYOUTS[0].numel
    before = vault.state_digest_of(0, 0)
    good = contribute(vault, 0, 1)
    vault.check_payload(0, good, "int8")
    poisoned = bytearray(good)
    struct.pack_into("<f", poisoned, 0, float("inf"))
    huge = codec("int8").encode(torch.full((numel,), 4 * MAX_MAGNITUDE))
    for payload, name, reason in (
        (good, "fp32", "wrong-codec"),
        (good, "bf16", "wrong-size"),
        (good[:-1], "int8", "wrong-size"),
        (poisoned, "int8", "non-finite"),
        (huge, "int8", "out-of-range"),
    ):
        with pytest.raises(RemoteError) as refused:
            vault.check_payload(0, payload, name)
        assert refused.value.reason == reason
    for attempt in (
        lambda: vault.merge(0, 1, [(good, 1, 1), (poisoned, 1, 1)]),
        lambda: vault.merge(0, 1, [(good, 0, 1)]),
        lambda: vault.apply(0, 1, b"\xff" * (2 * numel), 24),
        lambda: vault.load_spare(0, 5, bytes(4 * numel), b"\xff" * (4 * numel)),
        lambda: vault.load_spare(0, 5, b"", b""),
    ):
        vault.apply(0, 1, codec("bf16").encode(noise(0, 1)), 24)
        with pytest.raises(RemoteError):
            attempt()
        with pytest.raises(InvariantViolation):
            vault.commit(0, 1)
    assert state_digest(0, vault.theta(0), vault.momentum(0)) == before


def radial() -> Vault:
    vault = Vault(LAYOUTS, OuterSection(merge="rda"), 24, "int8", "int8")
    vault.load_initial({s.name: torch.zeros(s.shape) for s in SPECS})
    return vault


def test_the_worst_accepted_contributions_make_an_update_that_everyone_accepts():
    vault, numel = radial(), LAYOUTS[1].numel
    spread = codec("int8").encode(torch.full((numel,), MAX_MAGNITUDE))
    spike = torch.zeros(numel)
    for piece in LAYOUTS[1].pieces:
        spike[piece.fragment_offset] = 1.0
    made = vault.merge(1, 1, [(spread, 10, 1), (codec("int8").encode(spike), 10, 1)])
    assert codec("int8").peak(made.update, numel) >= MAX_MAGNITUDE
    assert radial().apply(1, 1, made.update, 1) == made.state_digest


def test_a_pinned_state_keeps_its_bytes_while_the_fragment_moves_on():
    vault = make()
    pin = vault.pin(0)
    before = [bytes(buffer) for buffer in pin.buffers]
    for number in range(1, 4):
        vault.apply(0, number, codec("int8").encode(noise(0, number)), 24)
        vault.commit(0, number)
    assert [bytes(buffer) for buffer in pin.buffers] == before
    assert pin.number == 0 and pin.state_digest == make().state_digest_of(0, 0)
    pin.release()
    pin.release()
    after = vault.pin(0)
    after.release()
    reused = vault.theta(0).data_ptr()
    for number in range(4, 6):
        vault.apply(0, number, codec("int8").encode(noise(0, number)), 24)
        vault.commit(0, number)
    assert vault.theta(0).data_ptr() == reused
