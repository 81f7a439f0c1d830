"""`false_node.py LIE p2pdiloco node …`: a node that differs from any other's code in one thing.

"merges": as a syncer it makes noise of its merges; "states": of the states that its updates make; "nights
SIGN": the same, while there is that file; "histories": and gives none of these updates; "usurps": it elects
itself again and again, by its own vote; "accuses": it accuses an honest syncer of the first version;
"labels": as a syncer it puts a contribution into its versions which its learner did not sign so; "reverses":
it contributes the opposite of its learner's work; "hasty": it draws the conclusion from fewer loss audits, so
that a test is short.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts" / "bench"))  # what benchmarks of attacks patch

from attacks.usurper import elect_itself
from p2pdiloco.cli.main import main as command
from p2pdiloco.core import audit_state
from p2pdiloco.core.api.events import Measured
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.types import Contributor
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.audits import Auditor
from p2pdiloco.core.election import Office
from p2pdiloco.core.publisher import MergedParts
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco.tensors.merge import Given
from p2pdiloco.tensors.outer_update import Encoded, OwnContributions, UpdateMaker
from p2pdiloco.tensors.vault import MergeResult, Vault

FIRST = 4
"""First version that is accused, or has a false state."""
NODES = 3


def false_merges() -> None:
    """Encode noise that is as long as the merge, where everybody's work is in it: all have its parent then,
    and can make it again."""
    merge, encode = Vault.merge, UpdateMaker.encode
    of_all = []

    def note(self: Vault, fragment: int, number: int, inputs: Sequence[Given], *rest: Any) -> MergeResult:
        of_all.extend([True] * (len(inputs) == NODES))
        try:
            return merge(self, fragment, number, inputs, *rest)
        finally:
            of_all.clear()

    def noise(self: UpdateMaker, *asked: Any) -> tuple[bytearray, torch.Tensor]:
        update, delta = encode(self, *asked)
        if not of_all:
            return update, delta
        length = delta.norm()
        delta.normal_()
        delta.mul_(length / delta.norm())
        return self._update.encode(delta), delta

    Vault.merge, UpdateMaker.encode = note, noise  # type: ignore[method-assign]


def false_states(lies: Callable[[int], bool] = FIRST.__le__) -> None:
    """Publish the true update, and the digest of a state that has nothing to do with it. `lies` tells whether
    of the version of that number."""
    merge = Vault.merge

    def noise(self: Vault, fragment: int, number: int, *asked: Any, **more: Any) -> MergeResult:
        made = merge(self, fragment, number, *asked, **more)
        if not lies(number):
            return made
        spare = self._spares[fragment]
        spare.theta.normal_()
        return msgspec.structs.replace(made, state_digest=spare.seal(number))

    Vault.merge = noise  # type: ignore[method-assign]


def false_histories() -> None:
    """Make false states, and give nobody an update, which would show it."""
    false_states()
    serve = Transfers.on_pull

    async def gone(self: Transfers, sender: str, pull: wire.Bulk) -> PullSource | Refusal:
        if isinstance(pull, wire.PullUpdate):
            return wire.refuse(PullRefusal.GONE)
        return await serve(self, sender, pull)

    Transfers.on_pull = gone  # type: ignore[method-assign]


def usurps() -> None:
    """Hold all offices by a vote of its own, and no other, and make versions of its own work."""
    why_open = Office.why_open
    begun: list[bool] = []

    def note(self: Office, now: float, candidate: str = "") -> str:
        begun.extend([True] * (self._chain.head.number >= FIRST - 1 and not begun))
        return why_open(self, now, candidate)

    Office.why_open, Office.on_vote = note, lambda *_: None  # type: ignore[method-assign]
    elect_itself(lambda _: bool(begun))


def false_accusations() -> None:
    """Accuse the syncer of the first version that comes after a while, once something of ours was merged:
    whoever accuses before that is not heard."""
    applied = Auditor.applied

    def accuse(self: Auditor, version: SignedVersion, cosine: float | None, now: float) -> None:
        applied(self, version, cosine, now)
        me, header = self._shared.me, version.header
        honest = header.syncer != me and header.syncer not in self._shared.excluded
        if honest and self._works and header.number >= FIRST:
            self._found_false(self._whole(version)[0], [], now)

    Auditor.applied = accuse  # type: ignore[method-assign]


def false_labels() -> None:
    """Put in work that nobody signed so."""
    honest = MergedParts.listed

    def listed(self: MergedParts, measured: Sequence[Measured] = ()) -> tuple[Contributor, ...]:
        parts = honest(self, measured)
        if not measured or not parts:
            return parts  # what is to be merged, not yet what is said of it
        return (msgspec.structs.replace(parts[0], signature=bytes(64)), *parts[1:])

    MergedParts.listed = listed  # type: ignore[method-assign]


def reversing() -> None:
    """Send the opposite of what was learned."""
    honest = OwnContributions.encode

    def reversed_(self: OwnContributions, fragment: int, base: Tensor, sent: Tensor) -> Encoded:
        return honest(self, fragment, sent.clone(), base)

    OwnContributions.encode = reversed_  # type: ignore[method-assign]


def hasty() -> None:
    """No lie: the others' node."""
    audit_state.ENOUGH = 8.0


if __name__ == "__main__":
    sign = Path(sys.argv[2])
    by_night = partial(false_states, lambda _: sign.exists())
    lies = {"merges": false_merges, "states": false_states, "histories": false_histories, "usurps": usurps}
    lies |= {"labels": false_labels, "reverses": reversing, "hasty": hasty}
    {**lies, "accuses": false_accusations, "nights": by_night}[sys.argv[1]]()
    sys.argv = ["p2pdiloco", *sys.argv[sys.argv.index("p2pdiloco") + 1 :]]
    command()
