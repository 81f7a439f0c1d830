"""Gossip of proofs: what is found or told is checked, acted upon once, kept, and told to the others.

A node that accepts a proof tells everybody whom it talks to, so news floods through the swarm and ends, as
each accepts each culprit once. Heartbeats say by a number whom their sender excludes; one that excludes
others than we do is told ours, again and again at growing intervals: it may have been away.

Rules: docs/protocol/proofs.md, sections 4 and 5.
"""

from __future__ import annotations

from p2pdiloco.core.api.effects import CastOut, KeepProofs
from p2pdiloco.core.api.messages import Message, Progress, Proven, Sibling, Stated
from p2pdiloco.core.api.reasons import MessageFault
from p2pdiloco.core.api.statements import Accusation, Evidence, FalseState, cause_of
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.proofs.excluded import STATEMENTS
from p2pdiloco.core.shared import Shared
from p2pdiloco.util import BoundedDict

TOLD_AT_ONCE = 16
"""Proofs that a peer is told at one go; the others the next time."""
AGAIN_S, LONGEST_S = 4.0, 64.0
"""Time until a peer that does not exclude whom we exclude is told again: doubled every time, up to that."""
TOLD_AFAR = 16
"""Listed peers, beside those to which we talk, that are told of a new proof."""
MOST_TOLD = 512


class Gossip:
    """Gossip of one node, and what follows from a proof on it."""

    def __init__(self, shared: Shared, fragments: tuple[Fragment, ...], saved: tuple[Evidence, ...]) -> None:
        self._shared = shared
        self._fragments = fragments
        self._excluded = shared.excluded
        self._told: BoundedDict[str, tuple[float, float, tuple[int, bool]]] = BoundedDict(MOST_TOLD)
        """Time at which each peer is told again, the pause after that, and what its heartbeat said: whom it
        excludes, and whether it is confirmed. Before that it believes nobody."""
        self._turn = 0
        ours = self._excluded.restore(saved)
        if ours is not None:
            shared.out.put(CastOut(ours.words(), cause_of(ours)))
        for proof in self._excluded.proofs:
            subject = proof.subject if isinstance(proof, Accusation) else None
            if isinstance(subject, FalseState) and subject.fragment < len(fragments):
                fragments[subject.fragment].context.false_states.restore(subject)

    # --- what others say -------------------------------------------------------------------------------

    def on_proven(self, sender: str, message: Proven, _now: float) -> None:
        """Take a proof that a peer tells."""
        if self._excluded.worth(message.proof):
            self._excluded.found(message.proof, sender)

    def on_sibling(self, sender: str, message: Sibling, _now: float) -> None:
        """Compare a version that a peer shows with ours."""
        index = message.version.header.fragment
        if index < len(self._fragments):
            self._fragments[index].siblings.seen(sender, message.version)
        else:
            self._refuse(sender, MessageFault.UNKNOWN_FRAGMENT)

    def heard(self, sender: str, message: Progress, now: float) -> None:
        """Tell a member that excludes others than we do whom we exclude, and let it tell us."""
        said = message.proofs
        if said == self._excluded.mark or sender in self._excluded:
            return
        if self._shared.view.progress(sender) is None:
            return
        state = said, message.confirmed
        again_s, pause_s, before = self._told.get(sender, (now, AGAIN_S, state))
        if state[1] and not before[1]:
            again_s = min(again_s, now + AGAIN_S)
            self._told[sender] = again_s, AGAIN_S, state
        if now < again_s:
            return
        if state != before:
            pause_s = AGAIN_S
        self._told[sender] = now + pause_s, min(2 * pause_s, LONGEST_S), state
        if said:
            self._shared.notices.greet(sender)  # it need not hear us otherwise
        proofs = self._excluded.proofs
        if not proofs:
            return
        first = self._turn % len(proofs)
        self._turn = first + TOLD_AT_ONCE
        for proof in (proofs + proofs)[first : first + min(TOLD_AT_ONCE, len(proofs))]:
            self._shared.out.send(sender, telling(proof))

    def refuses(self, sender: str, now: float) -> bool:
        """Tell whether nothing that this peer says is to be heard. It is told why, now and then."""
        proof = self._excluded.proof_of(sender)
        if proof is None:
            return False
        if self._excluded.first_time(sender):
            self._refuse(sender, MessageFault.EXCLUDED)
        again_s, pause_s, _ = self._told.get(sender, (now, AGAIN_S, (0, False)))
        if now >= again_s:
            self._told[sender] = now + pause_s, min(2 * pause_s, LONGEST_S), (0, False)
            self._shared.out.send(sender, telling(proof))
        return True

    def _refuse(self, peer: str, fault: MessageFault) -> None:
        self._shared.out.record("refusal", None, str(fault), peer=peer)

    # --- what follows ----------------------------------------------------------------------------------

    def settle(self, now: float) -> bool:
        """Look at what was found. Tell whether somebody is excluded now who was not before."""
        new = False
        for proof, giver, certain in self._excluded.take_found():
            if not self._excluded.worth(proof):
                continue
            if certain or self._excluded.holds(proof):
                new = self._accept(proof, giver, now) or new
            elif giver:
                self._refuse(giver, MessageFault.FALSE_PROOF)
        return new

    def _accept(self, proof: Evidence, giver: str, now: float) -> bool:
        shared, culprit = self._shared, proof.culprit()
        known = culprit in self._excluded
        if not self._excluded.add(proof):
            return False
        shared.out.put(KeepProofs(self._excluded.kept))
        if not known:
            shared.out.record("excluded", None, proof.words(), peer=culprit)
        if culprit == shared.me:
            shared.out.put(CastOut(proof.words(), cause_of(proof)))
            return True
        for peer in audience(shared, now):
            if peer != giver:  # but its author: it may not know that a copy of it runs
                shared.out.send(peer, telling(proof))
        shared.exclude(culprit, now)
        for fragment in self._fragments:
            fragment.follower.heads.gone(culprit)
            fragment.touch()
        return True


def audience(shared: Shared, now: float) -> list[str]:
    """Choose who is told of news: whom we talk to, and of a large run some others. A culprit may have been
    the only one between our group and theirs."""
    near = shared.view.members(now)
    known = {*near, shared.me}
    far = [peer for peer, _ in shared.roster.members if peer not in known]
    return [*near, *shared.rng.sample(far, min(TOLD_AFAR, len(far)))]


def telling(proof: Evidence) -> Message:
    """Make the message that tells somebody of evidence."""
    return Stated(proof) if isinstance(proof, STATEMENTS) else Proven(proof)
