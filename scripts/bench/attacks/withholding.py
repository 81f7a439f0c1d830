"""An admitted member that withholds: versions from everybody, or one learner's work from its versions."""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.inbox import Held, LearnerInbox
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.ports import PullSource, Refusal

VERSIONS = wire.PullUpdate | wire.PullState


def withhold(lies: Callable[[str], bool]) -> None:
    """Give nobody an update or a state; `lies` tells whether it has begun."""
    honest = Transfers.on_pull

    async def busy(self: Transfers, sender: str, pull: wire.Bulk) -> PullSource | Refusal:
        if isinstance(pull, VERSIONS) and lies("versions withheld"):
            return wire.refuse(PullRefusal.BUSY)
        return await honest(self, sender, pull)

    Transfers.on_pull = busy  # type: ignore[method-assign]


def omit(lies: Callable[[str], bool]) -> None:
    """Merge nothing of the first learner that comes, though it is here."""
    honest = LearnerInbox.ready
    victim: list[str] = []

    def without(self: LearnerInbox) -> list[Held]:
        ready = honest(self)
        others = [held.child for held in ready if not held.own]
        if not others or not lies("contributions left out"):
            return ready
        victim[:] = victim or others[:1]
        return [held for held in ready if held.child not in victim]

    LearnerInbox.ready = without  # type: ignore[method-assign, assignment]
