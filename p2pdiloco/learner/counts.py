"""Counters of a training: what a checkpoint keeps of it beside moments and displacements."""

from __future__ import annotations

from p2pdiloco.core.api.config import Amendment, in_force


class TrainingCounts:
    """Steps and tokens of one learner, and of its run as far as known."""

    def __init__(self) -> None:
        self.inner_step = 0
        self.tokens_total = 0
        self.run_tokens = 0
        """Tokens that all learners of the run have consumed, as far as known: the schedule's clock."""
        self.learners = 1
        """Learners of the run now, as far as known, this one included."""
        self.optimizer_steps = 0
        """Number of optimizer steps that the moments are made of."""
        self.amendments: tuple[Amendment, ...] = ()
        """Changes of the run by its owner."""

    def count(self, tokens: int) -> None:
        """Count an inner step over so many tokens."""
        self.inner_step += 1
        self.tokens_total += tokens
        self.run_tokens += tokens

    def run_is_at(self, run_tokens: int, learners: int = 1, ahead: int | None = None) -> None:
        """Tell the schedule how many tokens the run has consumed, by so many learners. It goes forward only,
        but where it is `ahead` tokens further: then this node holds another chain now, or believed that there
        are more learners than there are. None: however far."""
        if run_tokens > self.run_tokens or (ahead is not None and run_tokens + ahead < self.run_tokens):
            self.run_tokens = run_tokens
        self.learners = max(1, learners)

    @property
    def amendment(self) -> Amendment | None:
        """Amendment that is in force where the run is, as far as known; None: there is none."""
        return in_force(self.amendments, self.run_tokens)

    def amend(self, amendments: tuple[Amendment, ...]) -> None:
        """Go by these amendments from now on."""
        self.amendments = amendments

    def goes_on_from(self, inner_step: int, tokens_total: int, run_tokens: int) -> None:
        """Go on where an earlier life ended."""
        self.inner_step, self.tokens_total = inner_step, tokens_total
        self.run_is_at(run_tokens)

    def moments_are_of(self, optimizer_steps: int) -> None:
        """Take in how many optimizer steps restored moments are made of."""
        self.optimizer_steps = optimizer_steps
