"""Statements on merges, and a node that hears them: what tests of accusations and of hearing share."""

from __future__ import annotations

from kit import Solo, branch, child, config, found, sign, table

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, RestoredFragment
from p2pdiloco.core.api.evidence import Accusation, FalseState, FalseVersion, Refutation, short_of
from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco_lab.simulation.lineage import HashCrypto

Effects = list[ev.Effect]
SAME, DIFFERENT, MISSING = AuditOutcome.SAME, AuditOutcome.DIFFERENT, AuditOutcome.MISSING
PEERS = ("p1", "p2", "p3", "p4")
ALL = ("me", *PEERS)
VERIFY = HashCrypto("").verify


CHAIN = branch(9, learners=ALL)
"""A chain by which all of them vote, made by p1."""


GONE = child(CHAIN[-2].header, "p1", ("p2",))
OLD = child(CHAIN[-3].header, "p1", ("p2",))
"""Versions of another branch: they cannot be audited here."""


def node(chain: list[SignedVersion] = CHAIN, *, saved: bool = True, **run: object) -> Solo:
    """We hold that chain, and so do the others."""
    fragment = RestoredFragment(log=tuple(chain), watermarks=table(chain[-1]))
    solo = Solo(
        config(1, audited=True, log_versions=20, **run), PEERS, Restored(fragments=(fragment,), saved=saved)
    )
    solo.wait(2.0)
    return solo


def accusation(version: SignedVersion = CHAIN[-1], by: str = "p2") -> Accusation:
    subject = FalseVersion(short_of(version))
    return Accusation(subject, by, sign(by, "accusation", subject))


def of_state(version: SignedVersion, by: str = "p2") -> Accusation:
    subject = FalseState(short_of(version))
    return Accusation(subject, by, sign(by, "accusation", subject))


def refutation(of: Accusation, by: str) -> Refutation:
    return Refutation(of, by, sign(by, "refutation", of))


def states(solo: Solo, statement: Accusation | Refutation, by: str = "") -> Effects:
    return solo.message(by or statement.author(), msg.Stated(statement))


def excluded(solo: Solo) -> tuple[str, ...]:
    return solo.core.shared.excluded.peers


def outcome(solo: Solo, audit: ev.Audit, how: AuditOutcome, withheld: bool = False) -> Effects:
    return solo.answer(audit, ev.Audited(how, withheld=withheld))


def stated(effects: Effects) -> dict[str, list[object]]:
    """What is stated, by whom it is told."""
    told: dict[str, list[object]] = {}
    for each in found(effects, ev.Send):
        if isinstance(each.message, msg.Stated):
            told.setdefault(each.peer, []).append(each.message.statement)
    return told
