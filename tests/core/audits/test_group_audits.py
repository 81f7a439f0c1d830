"""What several groups made is audited merge by merge, and the maker of a false one is excluded."""

from __future__ import annotations

import pytest
from kit import RUN, Solo, child, config, found, genesis, reasons, sign
from msgspec.structs import replace

from p2pdiloco.core import audits, chain
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.evidence import Accusation, FalsePartial, Refutation
from p2pdiloco.core.api.messages import Announce
from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.core.api.versions import MergedPartial, SignedVersion

Effects = list[ev.Effect]
LEARNERS = ("me", *(f"p{i}" for i in range(1, 20)))
ROOT = "p1"
SAME, DIFFERENT, MISSING = AuditOutcome.SAME, AuditOutcome.DIFFERENT, AuditOutcome.MISSING


@pytest.fixture(autouse=True)
def nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 0.0)


def node() -> Solo:
    """One of twenty members in five groups of three levels."""
    run = config(1, audited=True, group_size=4, genesis_versions=(genesis(0, 5),), seats=LEARNERS)
    solo = Solo(run, LEARNERS[1:])
    solo.wait(4.0)  # a full certificate counts where no syncer of our group was known for some seconds
    return solo


def version(solo: Solo, **odd: object) -> SignedVersion:
    head = solo.core.fragments[0].chain.header
    return child(head, ROOT, LEARNERS, group_size=4, groups=5, seats=LEARNERS, **odd)


def applied(solo: Solo, made: SignedVersion, cosine: float | None = -0.9) -> Effects:
    """It becomes ours, and its update goes so far the way of our own contribution to it."""
    effects = solo.message(ROOT, Announce(0, made.header.head(), ROOT))
    for pull in found(effects, ev.FetchUpdate):
        effects += solo.answer(pull, ev.UpdateFetched(made, 900))
    for job in found(effects, ev.ApplyUpdate):
        effects += solo.answer(job, ev.UpdateApplied(made.header.state_digest, cosine=cosine))
    return effects


def groups_of(effects: Effects) -> list[str]:
    """Whose merges are to be made again."""
    return [WHOLE_RUN if a.part is None else a.part.entry.group for a in found(effects, ev.Audit)]


def outcome(solo: Solo, made: SignedVersion, group: str, how: AuditOutcome) -> Effects:
    """That came of the audit that is under way: it is the one of this group's merge."""
    (audit,) = found([ask.effect for ask in solo.unanswered], ev.Audit)
    assert (audit.version, groups_of([audit])) == (made, [group])
    return solo.answer(audit, ev.Audited(how))


def ours(solo: Solo, made: SignedVersion) -> list[MergedPartial]:
    """The partial merges that have our contribution, the leaf group's first."""
    tree = made.header.tree(chain.plan_of(genesis(0, 5).header, solo.core.shared.config)) or {}
    mine = [part.entry for part in tree.values() if any(p.learner == "me" for p in part.parts)]
    assert len(mine) == 2 and len(tree) == 8, "two levels below the topmost group"
    return sorted(mine, key=lambda entry: entry.group)


def excluded(solo: Solo) -> set[str]:
    return {peer for peer in LEARNERS if peer in solo.core.shared.excluded}


def test_the_own_group_comes_first_and_the_sum_of_all_at_last() -> None:
    solo = node()
    made = version(solo)
    leaf, upper = ours(solo, made)
    effects = applied(solo, made)
    assert groups_of(effects) == [leaf.group]
    (audit,) = found(effects, ev.Audit)
    assert audit.part is not None and not audit.below, "contributions were added up"
    effects = outcome(solo, made, leaf.group, SAME)
    assert groups_of(effects) == [upper.group]
    (audit,) = found(effects, ev.Audit)
    assert audit.part is not None and leaf in [part.entry for part in audit.below]
    effects = outcome(solo, made, upper.group, MISSING)
    assert groups_of(effects) == [WHOLE_RUN]
    (audit,) = found(effects, ev.Audit)
    assert upper in [part.entry for part in audit.below] and leaf not in [part.entry for part in audit.below]
    assert not excluded(solo)
    assert not found(outcome(solo, made, WHOLE_RUN, DIFFERENT), ev.Audit)
    assert excluded(solo) == {ROOT}


@pytest.mark.parametrize("level", [0, 1])
def test_who_made_the_false_merge_is_excluded_and_nothing_above_is_made_again(level: int) -> None:
    solo = node()
    made = version(solo)
    applied(solo, made)
    for entry in ours(solo, made)[:level]:
        outcome(solo, made, entry.group, SAME)
    liar = ours(solo, made)[level]
    effects = outcome(solo, made, liar.group, DIFFERENT)
    assert liar.group in reasons(effects, "audit")[0]
    assert not found(effects + solo.wait(1.0), ev.Audit) and excluded(solo) == {liar.syncer}


def invented(solo: Solo, level: int) -> SignedVersion:
    """A version with a partial merge that its syncer did not sign so."""
    made = version(solo)
    false = ours(solo, made)[level]
    others = (
        replace(each, payload_digest=bytes(32)) if each == false else each for each in made.header.partials
    )
    return version(solo, partials=tuple(others))


def test_who_merges_what_a_group_did_not_sign_answers_for_it() -> None:
    solo = node()
    effects = applied(solo, invented(solo, 0))
    assert not found(effects, ev.Audit), "it shows without a single payload"
    assert excluded(solo) == {ROOT}, "the group above signed another one"


def test_a_version_is_no_word_of_a_syncer_that_signed_none() -> None:
    solo = node()
    made = invented(solo, 1)
    leaf, _ = ours(solo, made)
    assert groups_of(applied(solo, made)) == [leaf.group]
    assert not found(outcome(solo, made, leaf.group, SAME), ev.Audit)
    assert excluded(solo) == {ROOT}


def test_versions_that_look_wrong_meanwhile_do_not_keep_the_rest_from_its_turn() -> None:
    solo = node()
    first = version(solo)
    applied(solo, first)
    second = version(solo)
    applied(solo, second)
    leaf, upper = ours(solo, first)
    assert groups_of(outcome(solo, first, leaf.group, SAME)) == [upper.group]
    assert groups_of(outcome(solo, first, upper.group, SAME)) == [WHOLE_RUN]
    (audit,) = found(outcome(solo, first, WHOLE_RUN, SAME), ev.Audit)
    assert audit.version == second and audit.part is not None


def test_each_merge_is_drawn_by_those_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    solo = node()
    made = version(solo)
    leaf, upper = ours(solo, made)
    monkeypatch.setattr(audits, "DRAWN", 100.0)
    (drawn,) = groups_of(applied(solo, made, 0.9))
    counts: dict[str, int] = {leaf.group: 0, upper.group: 0, WHOLE_RUN: 0}
    fragment = solo.core.fragments[0]
    outcome(solo, made, drawn, SAME)
    monkeypatch.setattr(audits, "DRAWN", 1.0)
    for _ in range(400):
        fragment.auditor.applied(made, None, solo.now)
        for group in groups_of(solo.taken(solo.core.shared.out.take())):
            counts[group] += 1
            outcome(solo, made, group, SAME)
    assert 0 < counts[WHOLE_RUN] < counts[upper.group] < counts[leaf.group] < 200


# --- accusations ------------------------------------------------------------------------------------------


def accusation(solo: Solo, made: SignedVersion, by: str, **odd: object) -> Accusation:
    """Somebody says that our own group's partial merge is false."""
    header = made.header
    tree = header.tree(chain.plan_of(genesis(0, 5).header, solo.core.shared.config)) or {}
    part = tree[ours(solo, made)[0].group]
    label = part.label(RUN, 0, header.limits)
    subject = replace(FalsePartial(header.number, header.digest(), label, part.entry.signature), **odd)
    return Accusation(subject, by, sign(by, "accusation", subject))


def stated(effects: Effects) -> list[object]:
    """What we state, before whomever."""
    return list(
        {each.message.statement for each in found(effects, ev.Send) if type(each.message) is msg.Stated}
    )


def accused(**odd: object) -> tuple[Solo, SignedVersion, str, Accusation, Effects]:
    """We hold a version, and hear that our group's partial merge in it is false."""
    solo = node()
    made = version(solo)
    applied(solo, made, cosine=None)
    liar = ours(solo, made)[0].syncer
    by = next(peer for peer in LEARNERS[1:] if peer not in (liar, ROOT))
    said = accusation(solo, made, by, **odd)
    return solo, made, liar, said, solo.message(by, msg.Stated(said))


def test_who_finds_a_partial_false_excludes_its_syncer_and_accuses_it_before_all() -> None:
    solo = node()
    made = version(solo)
    applied(solo, made)
    leaf = ours(solo, made)[0]
    effects = outcome(solo, made, leaf.group, DIFFERENT)
    assert solo.core.shared.excluded.peers == (leaf.syncer,)
    assert stated(effects) == [accusation(solo, made, "me")]
    assert stated(effects)[0].holds(RUN, solo.core.shared.crypto.verify)


def test_an_accused_partial_is_made_again_by_whoever_hears_it() -> None:
    solo, made, liar, said, effects = accused()
    (audit,) = found(effects, ev.Audit)
    assert groups_of(effects) == [ours(solo, made)[0].group] and audit.givers == (said.accuser,)
    assert not solo.core.shared.excluded.peers
    outcome(solo, made, groups_of(effects)[0], DIFFERENT)
    assert solo.core.shared.excluded.peers == (liar,)


def test_who_accuses_a_partial_that_is_right_is_excluded() -> None:
    solo, made, _, said, effects = accused()
    effects = outcome(solo, made, groups_of(effects)[0], SAME)
    assert solo.core.shared.excluded.peers == (said.accuser,)
    assert any(isinstance(each, Refutation) and each.accusation == said for each in stated(effects))


def test_nobody_is_blamed_for_a_partial_that_is_not_there() -> None:
    """Its label is its syncer's, but not of that version: it may have merged again."""
    solo, made, *_ = accused()
    label = accusation(solo, made, "p2").subject.label
    other = replace(label, payload_digest=bytes(32))
    solo, _, _, said, effects = accused(label=other, signature=sign(label.syncer, "partial", other))
    assert not found(effects, ev.Audit) and not solo.core.shared.excluded.peers
    assert not solo.core.shared.accusations.of(said.subject.digest())


def test_an_accusation_of_a_partial_is_short() -> None:
    _, _, _, said, _ = accused()
    refuted = Refutation(said, "p3", sign("p3", "refutation", said))
    assert len(msg.encode(RUN, msg.Stated(refuted))) < 1200
