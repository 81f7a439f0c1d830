"""Deliberate bugs of the protocol, one rule taken away in each, and where the simulator should miss it.

Most are made at the border of the core (what goes in, what comes out), so that they outlive its refactorings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

import mutation_proofs
import mutation_roster
import mutation_scale
import p2pdiloco.core.follower as follower
from mutation_kit import MUTATIONS, Patch, each_answer, each_effect, each_event, mutation
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict, VoteRefusal
from p2pdiloco.core.api.types import WHOLE_RUN, Head, Reach, SignedContribution
from p2pdiloco.core.api.versions import SignedPartial
from p2pdiloco.core.base import Shared
from p2pdiloco.core.capacity import VoteDisk
from p2pdiloco.core.chain import Marks
from p2pdiloco.core.contributions import ContributionQueue
from p2pdiloco.core.election import Office, Turn
from p2pdiloco.core.inbox import GroupInbox, Inbox, LearnerInbox
from p2pdiloco.core.node import Core
from p2pdiloco.core.pending import KeptContributions
from p2pdiloco.core.round import Round
from p2pdiloco.core.voting import VoteJudge
from p2pdiloco_lab.simulation.sim_worker import Worker

__all__ = ["MUTATIONS", "mutation_proofs", "mutation_roster", "mutation_scale"]

change = msgspec.structs.replace


# --- versions ----------------------------------------------------------------------------------------


@mutation("calm", 3, 3, "longest-steps")
def followers_count_an_inner_step_too_many(patch: Patch) -> None:
    def alter(_core: Core, effect: Any) -> list[Any]:
        more = isinstance(effect, ev.ApplyUpdate)
        return [change(effect, longest_steps=effect.longest_steps + 1) if more else effect]

    each_effect(patch, alter)


# --- votes and offices -------------------------------------------------------------------------------


@mutation("calm", 3, 3, "durable-first")
def votes_are_sent_before_they_are_durable(patch: Patch) -> None:
    def alter(_core: Core, effect: Any) -> list[Any]:
        if isinstance(effect, ev.Persist) and isinstance(effect.record, ev.VoteRecord):
            return [*effect.then, change(effect, then=())]
        return [effect]

    each_effect(patch, alter)


@mutation("calm", 4, 30, "hidden-syncer")
def who_cannot_be_dialled_stands_like_any_other(patch: Patch) -> None:
    def alter(_core: Core, event: Any) -> Any:
        return ev.ReachChanged(Reach.DIRECT) if isinstance(event, ev.ReachChanged) else event

    each_event(patch, alter)


@mutation("calm", 3, 3, "durable-first")
def a_vote_is_not_persisted_at_all(patch: Patch) -> None:
    def alter(_core: Core, effect: Any) -> list[Any]:
        vote = isinstance(effect, ev.Persist) and isinstance(effect.record, ev.VoteRecord)
        forget = vote and any(isinstance(e, ev.Send) for e in effect.then)
        return [*effect.then] if forget else [effect]

    each_effect(patch, alter)


@mutation("churn", 5, 80, "one-vote")
def votes_are_forgotten_at_restart(patch: Patch) -> None:
    init = Core.__init__

    def forget(
        self: Core, config: Any, me: str, inc: int, crypto: Any, rng: Any, restored: Any, *more: Any
    ) -> None:
        init(self, config, me, inc, crypto, rng, change(restored, votes=()), *more)

    patch.set(Core, "__init__", forget)


def _no_refusal(patch: Patch, never: VoteRefusal) -> None:
    original = VoteJudge._why_no_vote

    def why(self: VoteJudge, *arguments: Any) -> VoteRefusal | None:
        reason = original(self, *arguments)
        return None if reason is never else reason

    patch.set(VoteJudge, "_why_no_vote", why)


@mutation("storm", 4, 10, "one-vote", "durable-first")
def a_voter_votes_twice_in_a_term(patch: Patch) -> None:
    _no_refusal(patch, VoteRefusal.VOTE_GIVEN)


@mutation("storm", 4, 20, "no-lighter-syncer")
def a_vote_for_a_candidate_that_is_behind(patch: Patch) -> None:
    _no_refusal(patch, VoteRefusal.LIGHTER)


@mutation("calm", 6, 20, "one-syncer", "stuck")
def a_minority_elects(patch: Patch) -> None:
    """Everybody counts himself and his neighbour only."""
    voters = Shared.voters

    def few(self: Shared, now: float) -> list[str]:
        found = voters(self, now)
        return [peer for peer in found if peer == self.me] + [peer for peer in found if peer > self.me][:1]

    patch.set(Shared, "voters", few)


@mutation("usurpers", 6, 3, "authority")
def versions_need_no_proof_of_office(patch: Patch) -> None:
    patch.set(follower, "office_fault", lambda *arguments: None)


@mutation("partition", 2, 60, "stuck", first_seed=7)
def void_certificates_are_kept(patch: Patch) -> None:
    patch.set(Office, "_void_if_outgrown", lambda self, now: None)


# --- versions ----------------------------------------------------------------------------------------


@mutation("calm", 3, 3, "durable-first")
def versions_are_announced_before_they_are_durable(patch: Patch) -> None:
    def alter(_core: Core, effect: Any) -> list[Any]:
        if isinstance(effect, ev.Persist) and isinstance(effect.record, ev.UpdateRecord):
            return [*(e for e in effect.then if isinstance(e, ev.Send)), effect]
        return [effect]

    each_effect(patch, alter)


@mutation("storm", 4, 40, "core-invariant", "equal-state", "crashed", first_seed=40)
def completions_of_old_rounds_are_accepted(patch: Patch) -> None:
    patch.set(Round, "awaits", lambda self, term, number: True)


@mutation("storm", 5, 40, "equal-state")
def a_state_with_another_digest_is_accepted(patch: Patch) -> None:
    """An outer step that came out differently is taken for the version all the same."""

    def alter(effect: Any, answer: Any) -> Any:
        return change(answer, state_digest=effect.stated) if isinstance(effect, ev.ApplyUpdate) else answer

    each_answer(patch, alter)


@mutation("storm", 5, 20, "only-forward", "crashed", "stuck", "no-spinning")
def a_lighter_head_is_followed(patch: Patch) -> None:
    patch.set(Head, "weight", property(lambda self: (-self.tokens, self.term, self.digest)))


@mutation("storm", 5, 60, "stuck", "nothing-lost", "durable-first", "core-invariant")
def a_failed_save_counts_as_a_saved_one(patch: Patch) -> None:
    each_answer(patch, lambda effect, answer: None if isinstance(effect, ev.Persist) else answer)


# --- contributions -----------------------------------------------------------------------------------


@mutation("storm", 4, 40, "nothing-twice")
def a_merged_contribution_is_admitted_again(patch: Patch) -> None:
    """Neither the header nor the payload is compared with what the chain contains."""
    judge = LearnerInbox.judge

    def blind(self: LearnerInbox, signed: Any, *arguments: Any) -> Any:
        with Patch() as inner:
            inner.set(Marks, "stamp", lambda _marks, _learner: signed.header.after)
            return judge(self, signed, *arguments)

    patch.set(LearnerInbox, "judge", blind)
    patch.set(LearnerInbox, "fits", lambda self, held: True)
    patch.set(Marks, "is_copy", lambda self, payload_digest: False)  # which would find it, too


def merge_inputs(patch: Patch, kind: type, alter: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Let workers merge other inputs than those that they were given, and measured. `kind`: of merge."""
    usual = Worker._parts

    def parts(self: Worker, effect: Any) -> tuple[Any, ...]:
        wrong = isinstance(effect, kind) and len(effect.inputs) > 1
        return usual(self, change(effect, inputs=alter(effect.inputs)) if wrong else effect)

    patch.set(Worker, "_parts", parts)


@mutation("calm", 3, 5, "nothing-twice")
def one_input_is_merged_twice(patch: Patch) -> None:
    merge_inputs(patch, ev.Merge, lambda inputs: (*inputs, inputs[0]))


@mutation("calm", 3, 10, "right-base", "stuck")
def one_input_is_left_out_of_the_merge(patch: Patch) -> None:
    merge_inputs(patch, ev.Merge, lambda inputs: inputs[1:])


@mutation("calm", 3, 5, "nothing-twice", "right-base", "stuck")
def the_learner_is_not_told_that_its_work_is_merged(patch: Patch) -> None:
    def alter(_core: Core, effect: Any) -> list[Any]:
        return [change(effect, merged_ticket=None)] if isinstance(effect, ev.CommitVersion) else [effect]

    each_effect(patch, alter)


@mutation("calm", 4, 20, "right-base", "stuck", "nothing-lost")
def no_rebase(patch: Patch) -> None:
    """Another's version is taken over as it is: what was trained meanwhile is gone."""

    def alter(_core: Core, effect: Any) -> list[Any]:
        if isinstance(effect, ev.CommitVersion) and effect.merged_ticket is None:
            return [change(effect, overwrite=True)]
        return [effect]

    each_effect(patch, alter)


@mutation("partition", 4, 60, "nothing-twice", "stuck")
def watermarks_are_not_saved(patch: Patch) -> None:
    def alter(_core: Core, effect: Any) -> list[Any]:
        return [change(effect, watermarks=())] if isinstance(effect, ev.CommitVersion) else [effect]

    each_effect(patch, alter)


@mutation("partition", 4, 60, "nothing-twice", "stuck", first_seed=3)
def a_copied_state_comes_without_its_watermarks(patch: Patch) -> None:
    each_answer(patch, lambda _, a: change(a, watermarks=()) if isinstance(a, ev.StateFetched) else a)


@mutation("storm", 4, 30, "stuck", "right-base", "nothing-lost", "crashed")
def contributions_are_not_sent_again(patch: Patch) -> None:
    """A syncer's death costs a round of training."""

    def forget(self: ContributionQueue, now: float) -> None:
        while self._queue:
            self._give_up(self._queue.popleft(), "forgotten")

    patch.set(ContributionQueue, "office_changed", forget)


@mutation("calm", 3, 5, "true-label")
def tokens_are_counted_twice_in_the_label(patch: Patch) -> None:
    def alter(_core: Core, effect: Any) -> list[Any]:
        if isinstance(effect, ev.Offer) and isinstance(effect.signed, SignedContribution):
            header = change(effect.signed.header, tokens=2 * effect.signed.header.tokens)
            return [change(effect, signed=change(effect.signed, header=header))]
        return [effect]

    each_effect(patch, alter)


@mutation("calm", 3, 10, "last-word", "bounded")
def the_syncer_never_has_a_last_word(patch: Patch) -> None:
    each_effect(patch, lambda _core, e: [] if isinstance(e, ev.AnswerTransfer) else [e])


@mutation("calm", 3, 5, "bounded")
def buffers_are_never_released(patch: Patch) -> None:
    each_effect(patch, lambda _core, e: [] if isinstance(e, ev.Release) else [e])


# --- groups ------------------------------------------------------------------------------------------


@mutation("calm", 7, 20, "nothing-twice")
def one_partial_is_merged_twice(patch: Patch) -> None:
    def alter(_core: Core, effect: Any) -> list[Any]:
        if isinstance(effect, ev.Merge) and effect.partials:
            return [change(effect, partials=(*effect.partials, effect.partials[0]))]
        return [effect]

    each_effect(patch, alter)


@mutation("storm", 7, 60, "nothing-twice", "core-invariant", "crashed")
def a_partial_that_was_merged_is_admitted_again(patch: Patch) -> None:
    """Compare its parts neither with the chain nor with other partials."""
    judge = GroupInbox.judge

    def blind(self: GroupInbox, *arguments: Any) -> Any:
        verdict = judge(self, *arguments)
        return None if verdict in (Verdict.OVERLAP, Verdict.BEHIND) else verdict

    patch.set(GroupInbox, "judge", blind)
    patch.set(Inbox, "fits", lambda self, held: True)


@mutation("calm", 7, 10, "right-base", "stuck")
def a_group_leaves_a_member_out_of_its_partial(patch: Patch) -> None:
    merge_inputs(patch, ev.MergePartial, lambda inputs: inputs[1:])


@mutation("storm", 7, 40, "one-syncer", "one-vote", "durable-first")
def votes_of_different_groups_are_not_told_apart(patch: Patch) -> None:
    def alter(_core: Core, effect: Any) -> list[Any]:
        if isinstance(effect, ev.Persist) and isinstance(effect.record, ev.VoteRecord):
            return [change(effect, record=change(effect.record, group=WHOLE_RUN))]
        return [effect]

    each_effect(patch, alter)


@mutation("calm", 7, 20, "stuck")
def partials_are_offered_to_nobody(patch: Patch) -> None:
    def alter(_core: Core, effect: Any) -> list[Any]:
        partial = isinstance(effect, ev.Offer) and isinstance(effect.signed, SignedPartial)
        return [] if partial else [effect]

    each_effect(patch, alter)


@mutation("storm", 2, 40, "stuck")
def a_full_disk_counts_in_majorities(patch: Patch) -> None:
    patch.set(VoteDisk, "failed", lambda self, again, why, now: None)


# --- forks and membership ----------------------------------------------------------------------------


@mutation("partition", 6, 60, "nothing-lost", "stuck", "right-base")
def what_was_merged_is_forgotten_at_once(patch: Patch) -> None:
    """A fork's loser does not send again what only its branch had."""
    add = KeptContributions.add

    def forget(self: KeptContributions, *arguments: Any) -> None:
        add(self, *arguments)
        self.review(1 << 61)

    patch.set(KeptContributions, "add", forget)


@mutation("calm", 4, 30, "stuck", "one-syncer", "nothing-lost")
def a_newcomer_counts_at_once(patch: Patch) -> None:
    """Votes, stands and gives its empty state to others before it has caught up."""
    init = Core.__init__

    def confirmed(self: Core, *arguments: Any) -> None:
        init(self, *arguments)
        self._shared.confirm()

    patch.set(Core, "__init__", confirmed)


@mutation("churn", 5, 10, "leaves-in-time", "stuck")
def nobody_ever_leaves(patch: Patch) -> None:
    each_effect(patch, lambda _core, e: [] if isinstance(e, ev.Left) else [e])


@mutation("calm", 2, 3, "no-spinning")
def a_merge_that_always_fails_is_repeated_at_once(patch: Patch) -> None:
    """Every merge fails, and nobody pauses before the next."""

    def fail(self: Worker, effect: ev.Merge, answer: Any) -> None:
        generation = self._take_spare(effect.fragment)
        self._host.later(self._work_s(), self._merge_failed, effect, generation, answer)

    patch.set(Worker, "merge", fail)
    patch.set(Turn, "failed", lambda self, now: None)


@mutation("calm", 2, 3, "no-spinning")
def a_deadline_that_is_always_now(patch: Patch) -> None:
    patch.set(Core, "next_deadline", lambda self: -1.0)
