"""The register of members: who has worked stays, the others are judged by what was seen."""

from __future__ import annotations

import pytest

from p2pdiloco.core.api.evidence import TwoVotes
from p2pdiloco.core.api.types import Vote, VoteBody
from p2pdiloco.daemon.admission import Charter, Gate, NotAdmitted, Register
from p2pdiloco.daemon.papers import AdmissionFault, Notice, admission, grant, signed
from p2pdiloco.daemon.wire import AdmissionShown, ShowAdmission
from p2pdiloco.identity import Identity

OWNER, KEY, *PEERS = (Identity.from_seed(bytes([n]) * 32) for n in range(6))
RUN = "ab" * 32
GRANT = grant(RUN, KEY.peer_id, 1000, 2, OWNER)
ONE, TWO, THREE, _ = (peer.peer_id for peer in PEERS)


def register(now_s: float = 0.0, worked: tuple[str, ...] = (), mode: str = "invite") -> Register:
    charter = Charter(RUN, OWNER.peer_id, mode)  # type: ignore[arg-type]
    return Register(charter, worked.__contains__, clock=lambda: now_s)


def take(book: Register, peer: str, vouched: bool = False) -> AdmissionFault | None:
    return book.take(peer, admission(GRANT, peer, KEY), vouched)


def test_who_has_worked_or_is_vouched_for_needs_no_clock() -> None:
    book = register(2000.0, worked=(ONE,))
    assert take(book, ONE) is None and take(book, TWO, vouched=True) is None
    assert take(book, THREE) is AdmissionFault.EXPIRED
    assert book.fault(ONE) is None and book.fault(THREE) is AdmissionFault.NOT_SHOWN


def test_uses_bind_whoever_has_not_worked_and_its_own_return_is_none() -> None:
    book = register(worked=(THREE,))
    assert [take(book, peer) for peer in (ONE, TWO, ONE, THREE)] == [None] * 4
    fourth = PEERS[3].peer_id
    assert take(book, fourth) is take(book, fourth, vouched=True) is AdmissionFault.USED_UP


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdiloco.daemon.admission.MAX_ADMITTED", 1)
    book = register()
    assert take(book, ONE) is None and take(book, TWO) is AdmissionFault.FULL and take(book, ONE) is None


def test_an_open_run_has_bans_and_keeps_no_admissions() -> None:
    book = register(mode="open")
    assert take(book, ONE) is None and not book.admissions
    assert book.take_notice(signed(Notice(RUN, 1, (ONE,)), OWNER))
    assert take(book, ONE) is AdmissionFault.BANNED and book.fault(TWO) is None


def test_the_owners_own_nodes_are_admitted_by_its_key_alone() -> None:
    for mode in ("invite", "list"):
        book = register(mode=mode)
        own = admission(grant(RUN, OWNER.peer_id, 0, 1, OWNER), ONE, OWNER)
        assert book.take(ONE, own) is None and book.fault(ONE) is None
        more = admission(grant(RUN, OWNER.peer_id, 0, 1, OWNER), TWO, OWNER)
        assert book.take(TWO, more) is None, "it is never used up"
        book.take_notice(signed(Notice(RUN, 1, revoked=(OWNER.peer_id,)), OWNER))
        assert book.fault(ONE) is None
    assert take(register(mode="list"), ONE) is AdmissionFault.NOT_LISTED


@pytest.mark.parametrize("mode", ["open", "invite"])
def test_who_is_shown_to_have_lied_is_shut_out_like_the_banned(mode: str) -> None:
    lie = TwoVotes(*(Vote(VoteBody(RUN, "all", 0, 3, who, ONE), b"") for who in (TWO, THREE)))
    proofs = {}
    charter = Charter(RUN, OWNER.peer_id, mode)  # type: ignore[arg-type]
    book = Register(charter, clock=lambda: 0.0, proof_of=proofs.get)
    assert take(book, ONE) is None and book.fault(ONE) is None and not book.is_banned(ONE)
    proofs[ONE] = lie
    assert book.fault(ONE) is AdmissionFault.EXCLUDED and book.is_banned(ONE)
    assert take(book, ONE) is AdmissionFault.EXCLUDED, "whatever it shows"
    assert ONE not in [shown.peer for shown in book.newest(9)]
    gate = Gate(book, None, lambda _what: None)
    for check in (gate.check, gate.check_not_banned):
        with pytest.raises(NotAdmitted) as refused:
            check(ONE)
        assert refused.value.reason == "excluded"
    shown = gate.answer(ONE, ShowAdmission(RUN, None, 0))
    assert isinstance(shown, AdmissionShown) and shown.proof == lie, "and it hears why"
    other = gate.answer(TWO, ShowAdmission(RUN, admission(GRANT, TWO, KEY), 0))
    assert isinstance(other, AdmissionShown) and other.proof is None
