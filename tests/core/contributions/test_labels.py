"""What learners sign of their work: partial merges and versions say nothing else of them."""

from __future__ import annotations

import pytest
from kit import RUN, Solo, config, contribution, digest, signed_part
from msgspec.structs import replace

from p2pdiloco.core.api.types import Contributor, SignedContribution, Stamp
from p2pdiloco.core.pending import SIGNATURES_CHECKED, signed_by_learners, unsigned

HONEST = signed_part(Contributor("p1", Stamp(1, 2), 40, 4, Stamp(1, 1), digest("payload")))


def solo() -> Solo:
    return Solo(config(), ("p1", "p2"))


@pytest.mark.parametrize(
    "odd",
    [
        {"learner": "p2"},
        {"stamp": Stamp(1, 3)},
        {"after": Stamp(1, 0)},
        {"tokens": 41},
        {"inner_steps": 5},
        {"payload_digest": digest("other")},
        {"signature": b""},
    ],
)
def test_nobody_else_can_say_what_a_learner_did(odd: dict[str, object]) -> None:
    shared = solo().core.shared
    assert signed_by_learners(shared, 0, [HONEST])
    assert not signed_by_learners(shared, 0, [HONEST, replace(HONEST, **odd)])
    assert not signed_by_learners(shared, 1, [HONEST]), "it is of another fragment"


def test_a_label_and_its_part_in_a_merge_have_one_signature() -> None:
    one = solo()
    signed = contribution("p1", one.head)
    assert signed_by_learners(one.core.shared, 0, [signed.contributor()])
    assert signed.contributor().work(RUN, 0).payload_digest == signed.header.payload_digest
    late = SignedContribution(replace(signed.header, due=False, base_number=0), signed.signature)
    assert late.contributor() == signed.contributor(), "the rest is not the learner's for ever"


def test_a_follower_checks_some_of_very_many_a_syncer_all(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = solo().core.shared
    false = [Contributor(f"p{i}", Stamp(1, 1), 40, 4) for i in range(10 * SIGNATURES_CHECKED)]
    assert not signed_by_learners(shared, 0, false) and unsigned(shared, 0, false) is not None
    true = [signed_part(part) for part in false]
    checked: list[str] = []
    honest = shared.signed_by
    monkeypatch.setattr(shared, "signed_by", lambda peer, *what: checked.append(peer) or honest(peer, *what))
    assert signed_by_learners(shared, 0, true) and len(checked) == 10 * SIGNATURES_CHECKED, (
        "it answers for them"
    )
    checked.clear()
    assert unsigned(shared, 0, true) is None and len(set(checked)) == SIGNATURES_CHECKED
    first = set(checked)
    checked.clear()
    assert unsigned(shared, 0, true) is None and set(checked) != first, "nobody knows which"
