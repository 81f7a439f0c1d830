"""An update made again from the contributions that it names: the same bytes, or it is not their merge."""

from __future__ import annotations

import math

import pytest
import torch

from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.core.api.types import NO_LIMITS, MergeLimits
from p2pdiloco.errors import InvariantViolation
from p2pdiloco.hashing import content_digest
from p2pdiloco.tensors.codecs import CODECS, Unsound, UnusableInputs, codec
from p2pdiloco.tensors.layout import TensorSpec, plan_fragments
from p2pdiloco.tensors.merge import Input
from p2pdiloco.tensors.outer_update import Correction, longest_encoded
from p2pdiloco.tensors.vault import Vault

SPECS = [TensorSpec("emb", (40, 16), True), TensorSpec("w", (64, 32)), TensorSpec("b", (64,))]
LAYOUTS = plan_fragments(SPECS, 1)
NUMEL = LAYOUTS[0].numel
DENSE = sorted(name for name, each in CODECS.items() if not each.sparse)
LIMITS = MergeLimits(most_tokens=250, longest=1.2 * 0.01 * math.sqrt(NUMEL))


def make(contribution: str, update: str, merge: str = "rda") -> Vault:
    vault = Vault(LAYOUTS, OuterSection(merge=merge), 24, contribution, update)  # type: ignore[arg-type]
    vault.load_initial({spec.name: torch.ones(spec.shape) for spec in SPECS})
    return vault


def work(name: str) -> list[Input]:
    """Four contributions: one is too long, one says too many tokens, one is trusted little."""
    generator = torch.Generator().manual_seed(1)
    deltas = [torch.randn(NUMEL, generator=generator) * 0.01 * (1 + 2 * (n == 2)) for n in range(4)]
    labels = [(100, 24, 64), (300, 24, 64), (120, 12, 64), (90, 20, 5)]
    return [Input(codec(name).encode(d), *label) for d, label in zip(deltas, labels, strict=True)]


@pytest.mark.parametrize("merge", ["rda", "mean"])
@pytest.mark.parametrize("name", DENSE)
def test_whoever_has_the_contributions_makes_the_same_update(name: str, merge: str) -> None:
    syncer, auditor = make("int8", name, merge), make("int8", name, merge)
    inputs = work("int8")
    made = syncer.merge(0, 1, inputs, limits=LIMITS, seed=b"draws the sample")
    assert made.found.cut == (2,), "the limits have a part in it"
    before = auditor.state_digest_of(0, 0)
    remade = auditor.maker.remake(0, inputs, LIMITS, b"draws the sample")
    assert (remade.update_digest, remade.found) == (made.update_digest, made.found)
    assert auditor.state_digest_of(0, 0) == before and auditor.version(0) == 0
    with pytest.raises(InvariantViolation, match="spare is empty"):
        auditor.commit(0, 1)


def test_nothing_of_an_audit_is_in_the_next_merge() -> None:
    vault, other = make("int8", "int8"), make("int8", "int8")
    vault.maker.remake(0, work("int8")[:2])
    assert vault.merge(0, 1, work("int8")).update_digest == other.merge(0, 1, work("int8")).update_digest


def goes_on(vault: Vault, updates: list[bytearray]) -> torch.Tensor:
    """Parameters after these updates, and many that all have in common."""
    for update in updates:
        number = (vault.version(0) or 0) + 1
        vault.apply(0, number, update, 24)
        vault.commit(0, number)
    nothing = codec("fp32").encode(torch.zeros(NUMEL))
    for _ in range(120):
        number = (vault.version(0) or 0) + 1
        vault.apply(0, number, nothing, 24)
        vault.commit(0, number)
    return vault.theta(0).clone()


def correction(true: bytearray, false: bytearray) -> Correction:
    return Correction(true, false, (content_digest(true), content_digest(false)))


def test_a_correction_says_whether_it_is_what_came() -> None:
    true, false = bytearray(b"as it should have been"), bytearray(b"as it was")
    found = correction(true, false)
    assert found.is_whole() and not Correction(true, false, found.digests[::-1]).is_whole()
    for damaged in (true, false):
        damaged[3] ^= 1
        assert not found.is_whole()
        damaged[3] ^= 1


def test_a_false_update_is_taken_back_in_the_end_momentum_included() -> None:
    maker, inputs = make("int8", "fp32").maker, work("int8")
    true = maker.remake(0, inputs, LIMITS).update
    false = codec("fp32").encode(torch.randn(NUMEL, generator=torch.Generator().manual_seed(5)) * 0.01)
    later = maker.remake(0, inputs[::-1], LIMITS)
    repaired = maker.remake(0, inputs[::-1], LIMITS, b"", correction(true, false))
    assert repaired.update_digest != later.update_digest
    honest = goes_on(make("int8", "fp32"), [true, later.update, later.update])
    lied = goes_on(make("int8", "fp32"), [false, later.update, later.update])
    healed = goes_on(make("int8", "fp32"), [false, later.update, repaired.update])
    harm, rest = float((lied - honest).norm()), float((healed - honest).norm())
    assert rest < 0.1 * harm, (rest, harm)


def test_a_repair_is_no_longer_than_any_update() -> None:
    maker, inputs = make("int8", "fp32").maker, work("int8")
    true = maker.remake(0, inputs, LIMITS).update
    false = codec("fp32").encode(torch.full((NUMEL,), 3.0))
    made = make("int8", "fp32").merge(0, 1, inputs, limits=LIMITS, correction=correction(true, false))
    assert made.norm == pytest.approx(longest_encoded(LIMITS))
    assert maker.remake(0, inputs, LIMITS, b"", correction(true, false)).update_digest == made.update_digest


def test_whoever_has_both_updates_makes_the_same_repair() -> None:
    syncer, auditor, inputs = make("int8", "int8"), make("int8", "int8"), work("int8")
    true, false = syncer.maker.remake(0, inputs[:3]).update, syncer.maker.remake(0, inputs[1:]).update
    repair = correction(true, false)
    made = syncer.merge(0, 1, inputs, limits=LIMITS, seed=b"s", correction=repair)
    assert auditor.maker.remake(0, inputs, LIMITS, b"s", repair).update_digest == made.update_digest
    for other in (None, correction(false, true)):
        assert auditor.maker.remake(0, inputs, LIMITS, b"s", other).update_digest != made.update_digest


def test_every_other_input_makes_another_update() -> None:
    maker, inputs = make("int8", "int8").maker, work("int8")
    honest = maker.remake(0, inputs, LIMITS).update_digest
    first = inputs[0]
    others = {
        "one left out": (inputs[1:], LIMITS),
        "one's bytes": ([first._replace(payload=inputs[1].payload), *inputs[1:]], LIMITS),
        "a weight": ([first._replace(tokens=first.tokens + 10), *inputs[1:]], LIMITS),
        "steps": ([first._replace(inner_steps=12), *inputs[1:]], LIMITS),
        "trust": ([first._replace(trust=63), *inputs[1:]], LIMITS),
        "no limits": (inputs, NO_LIMITS),
        "another length": (inputs, MergeLimits(LIMITS.most_tokens, 0.9 * LIMITS.longest)),
    }
    found = {what: maker.remake(0, *changed).update_digest for what, changed in others.items()}
    assert honest not in found.values() and len(set(found.values())) == len(found)
    exact = make("fp32", "fp32").maker
    there, back = (exact.remake(0, work("fp32")[::way]).update_digest for way in (1, -1))
    assert there != back, "sums depend on the order"


def test_what_cannot_be_merged_is_named() -> None:
    maker, inputs = make("int8", "int8").maker, work("int8")
    with pytest.raises(UnusableInputs) as caught:
        maker.remake(0, [inputs[0], inputs[1]._replace(payload=b"short")])
    assert list(caught.value.faults) == [1]


def test_a_sparse_update_cannot_be_made_again() -> None:
    with pytest.raises(InvariantViolation, match="only its syncer knows"):
        make("int8", "topk").maker.remake(0, work("int8"))


def test_the_cosine_of_a_contribution_with_an_update() -> None:
    maker = make("int8", "fp32").maker
    inputs, exact = work("int8"), codec("fp32")
    delta = torch.empty(NUMEL)
    codec("int8").decode(inputs[0].payload, delta)  # type: ignore[arg-type]
    payload = inputs[0].payload
    assert maker.cosine(0, payload, exact.encode(2 * delta), b"seed") == pytest.approx(1.0)
    assert maker.cosine(0, payload, exact.encode(-delta), b"seed") == pytest.approx(-1.0)
    other = torch.randn(NUMEL, generator=torch.Generator().manual_seed(9))
    wanted = float(torch.nn.functional.cosine_similarity(delta, other, dim=0))
    assert maker.cosine(0, payload, exact.encode(other), b"seed") == pytest.approx(wanted, abs=1e-5)
    zero = torch.zeros(NUMEL)
    assert maker.cosine(0, payload, exact.encode(zero), b"") is None
    assert maker.cosine(0, codec("int8").encode(zero), exact.encode(delta), b"") is None
    with pytest.raises(Unsound):
        maker.cosine(0, b"damaged", exact.encode(delta), b"")
