"""Is the simulator any good? Each rule of the protocol is taken away in turn, and must be missed soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from p2pdiloco.core.chain import Chain
from p2pdiloco.core.contributor import Contributor
from p2pdiloco.core.effects import Send, UpdateRecord, VoteRecord
from p2pdiloco.core.inbox import Inbox
from p2pdiloco.core.office import Office
from p2pdiloco.core.outbox import Outbox
from p2pdiloco.core.round import Round
from p2pdiloco.simulation.runner import run_seed

Patch = pytest.MonkeyPatch


def votes_before_they_are_durable(patch: Patch) -> None:
    original = Outbox.persist

    def persist(self: Outbox, record: Any, then: Any) -> int:
        if not isinstance(record, VoteRecord):
            return original(self, record, then)
        for effect in then:
            self.put(effect)
        return original(self, record, ())

    patch.setattr(Outbox, "persist", persist)


def versions_announced_before_they_are_durable(patch: Patch) -> None:
    original = Outbox.persist

    def persist(self: Outbox, record: Any, then: Any) -> int:
        if isinstance(record, UpdateRecord):
            for effect in [e for e in then if isinstance(e, Send)]:
                self.put(effect)
        return original(self, record, then)

    patch.setattr(Outbox, "persist", persist)


def votes_forgotten_at_restart(patch: Patch) -> None:
    original = Office.__init__

    def init(self: Office, shared: Any, group: str, fragment: int, chain: Chain, vote: Any) -> None:
        original(self, shared, group, fragment, chain, None)

    patch.setattr(Office, "__init__", init)


def no_refusal(words: str) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        original = Office._why_no_vote

        def why(self: Office, *arguments: Any) -> str:
            reason = original(self, *arguments)
            return "" if reason.startswith(words) else reason

        patch.setattr(Office, "_why_no_vote", why)

    return apply


def merged_contributions_admitted_again(patch: Patch) -> None:
    """Neither the header nor the payload is compared with what the chain contains."""
    received, judge = Round.received, Inbox.judge

    def blind(method: Any) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            header = getattr(arguments[0], "header", None)
            held = self._inbox.arriving(arguments[0]) if header is None else None
            after = header.after if header is not None else held.header.after if held else None
            with pytest.MonkeyPatch.context() as inner:
                if after is not None:
                    inner.setattr(Chain, "watermark", lambda _chain, _learner: after)
                return method(self, *arguments)

        return call

    patch.setattr(Inbox, "judge", blind(judge))
    patch.setattr(Round, "received", blind(received))


def completions_of_old_rounds_accepted(patch: Patch) -> None:
    patch.setattr(Round, "_is_current", lambda self, term, number: True)


def void_certificates_kept(patch: Patch) -> None:
    patch.setattr(Office, "_void_if_outgrown", lambda self, now: None)


def contributions_not_sent_again(patch: Patch) -> None:
    """A syncer's death costs a round of training."""

    def forget(self: Contributor, now: float) -> None:
        while self._queue:
            self._give_up(self._queue.popleft(), "forgotten")

    patch.setattr(Contributor, "office_changed", forget)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mutation", "mix", "nodes", "within_seeds", "rules"),
    [
        (votes_before_they_are_durable, "calm", 3, 3, {"durable-first"}),
        (versions_announced_before_they_are_durable, "calm", 3, 3, {"durable-first"}),
        (votes_forgotten_at_restart, "churn", 5, 80, {"one-vote"}),
        (no_refusal("our vote of"), "storm", 4, 10, {"one-vote", "durable-first"}),
        (no_refusal("our chain is heavier"), "storm", 4, 10, {"no-lighter-syncer"}),
        (merged_contributions_admitted_again, "storm", 4, 40, {"nothing-twice"}),
        (completions_of_old_rounds_accepted, "storm", 4, 20, {"core-invariant", "equal-state"}),
        (void_certificates_kept, "partition", 2, 40, {"stuck"}),
        (contributions_not_sent_again, "storm", 4, 20, {"stuck"}),
    ],
)
def test_missing_rule_is_noticed(
    mutation: Callable[[Patch], None],
    mix: str,
    nodes: int,
    within_seeds: int,
    rules: set[str],
    monkeypatch: Patch,
) -> None:
    mutation(monkeypatch)
    found = set()
    for seed in range(within_seeds):
        result = run_seed(seed, mix, nodes)
        found.add(result.violation or ("stuck" if result.stuck else ""))
        if found & rules:
            return
    pytest.fail(f"not found in {within_seeds} seeds, only {found}")
