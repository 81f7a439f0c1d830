"""Credits of random trees of versions: on every head's line each piece of work counts once, whatever was
displaced, sent again together with newer work, or put in twice."""

from __future__ import annotations

import tempfile
from pathlib import Path

from credits_kit import history_of, ledger_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import genesis, signed_part
from msgspec.structs import replace

from p2pdiloco.core.api.types import NEVER, Contributor, Stamp
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.credits import Doubt

STEP_TOKENS = 10
LEARNERS = ("p1", "p2", "p3")
Merge = tuple[int, dict[str, int], str]
"""Which version is the parent, how far each learner has trained since its last label, whose label is there
again."""


class Branch:
    """A version, and what was merged on the line that ends in it."""

    def __init__(self, version: SignedVersion) -> None:
        self.version = version
        self.steps: dict[str, int] = {}
        """Inner steps of every learner that are in the state."""
        self.labels: dict[str, Contributor] = {}
        self.replayed, self.replayed_tokens = 0, 0

    def grown(self, trained: dict[str, int], sequence: int, again: str) -> Branch:
        """The next version. A label is of all that its learner has trained and is not on this line."""
        header, parts = self.version.header, []
        for learner in sorted(trained):
            steps = trained[learner] - self.steps.get(learner, 0)
            before = self.labels[learner].stamp if learner in self.labels else NEVER
            stamp = Stamp(1, sequence)
            parts.append(signed_part(Contributor(learner, stamp, STEP_TOKENS * steps, steps, before)))
        replays = [self.labels[again]] if again in self.labels else []
        merged = (*parts, *replays)
        tokens = header.tokens + sum(part.tokens for part in merged)
        child = replace(
            header, number=header.number + 1, parent=header.digest(), contributors=merged, tokens=tokens
        )
        grown = Branch(SignedVersion(child, b""))
        grown.steps, grown.labels = self.steps | trained, self.labels | {p.learner: p for p in parts}
        grown.replayed = self.replayed + len(replays)
        grown.replayed_tokens = self.replayed_tokens + sum(part.tokens for part in replays)
        return grown


MERGES = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.dictionaries(st.sampled_from(LEARNERS), st.integers(1, 9), min_size=1),
        st.sampled_from(("", *LEARNERS)),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60)
@given(MERGES, st.randoms(use_true_random=False))
def test_on_every_line_each_piece_of_work_counts_once(merges: list[Merge], random: object) -> None:
    branches, trained = [Branch(genesis(0))], dict.fromkeys(LEARNERS, 0)
    for sequence, (parent, more, again) in enumerate(merges, 1):
        for learner, steps in more.items():
            trained[learner] += steps
        its = {learner: trained[learner] for learner in more}
        branches.append(branches[-1 - parent % len(branches)].grown(its, sequence, again))
    kept = [branch.version for branch in branches[1:]] * 2  # what several gave is there twice
    random.shuffle(kept)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        history = history_of(Path(folder), kept, segment_bytes=1024)
        for branch in branches[1:]:
            ledger = ledger_of(history, branch.version)
            entries = {peer: entry for (peer, _), entry in ledger.entries.items()}
            assert {peer: entry.inner_steps for peer, entry in entries.items()} == branch.steps
            assert {peer: entry.tokens for peer, entry in entries.items()} == {
                peer: STEP_TOKENS * steps for peer, steps in branch.steps.items()
            }
            assert ledger.doubts == ({Doubt.TWICE: branch.replayed} if branch.replayed else {})
            assert ledger.uncredited_tokens == branch.replayed_tokens
            assert ledger.tokens == branch.version.header.tokens
