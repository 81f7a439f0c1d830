"""Substance of simulated payloads and states: bytes beside their lineage, by default none.

The simulator moves *matter*, opaque bytes, wherever a real node would move a payload or a state. `Substance`
says what is done with them; `p2pdiloco_lab.vectors` has one that trains a small model with the real tensors
code. Matter is never changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec import Struct

from p2pdiloco.core.api.events import Measured
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import MergeLimits
from p2pdiloco.core.api.versions import Mean

Work = tuple[bytes, int, int, int]
"""A contribution that was merged: its payload, tokens, inner steps, trust weight."""
Resumed = tuple[int, bytes]
"""Work of a fragment that a returning learner takes up again: first unmerged inner step, displacement."""
Mode = Literal["merged", "rebase", "overwrite"]


class Losses(Struct, frozen=True):
    """Quality of the global parameters, in nats."""

    start: float
    """Loss of version 0."""
    end: float
    """Loss of the heaviest heads in the end."""
    floor: float
    """The data's entropy: nothing can be better."""


class Given(NamedTuple):
    """A contribution to a merge. What its learner is trusted with follows from the mean and its score."""

    matter: bytes
    tokens: int
    inner_steps: int
    mean: Mean
    digest: bytes
    """Digest of its payload."""
    votes: bool = False


class Made(Struct, frozen=True):
    """Result of a merge, or of adding up a group's contributions."""

    matter: bytes
    found: tuple[Measured, ...]
    """Findings about each input."""
    cut: tuple[int, ...] = ()
    """Indices of the inputs that were cut: too long."""
    norm: float | None = None
    """Length of an update; None: nobody knows."""


class Tree(Struct, frozen=True):
    """Everything that is added up in a merge of groups, as its groups do it."""

    inputs: tuple[Work, ...]
    below: tuple[Tree, ...] = ()
    """Trees of its partial merges."""

    def flat(self) -> tuple[Work, ...]:
        """List all contributions."""
        return self.inputs + tuple(work for tree in self.below for work in tree.flat())


class UnusableMatter(Exception):
    """Error: inputs of a merge in which a fault was found."""

    def __init__(self, faults: Mapping[int, Verdict]) -> None:
        """`faults`: by index among the inputs and, after these, the partials."""
        super().__init__(f"{len(faults)} unusable")
        self.faults = faults


class Trainer:
    """The parameters of one node's learner, over all lives of its process. This one has none.

    `LearnerModel` decides when what happens; a trainer computes what has become due meanwhile."""

    def begin(self, step: int, resumed: dict[int, Resumed]) -> None:
        """A process starts after `step` inner steps, from the bases and what is resumed."""

    def end(self) -> None:
        """The process is gone, and its parameters with it."""

    def advance(self, step: int) -> None:
        """Make inner steps until there are `step` of them."""

    def copy_out(self, fragment: int, steps: int) -> bytes:
        """The encoded displacement, which has taken so many inner steps; its slot is in use from here on."""
        return b""

    def committed(self, fragment: int) -> None:
        """The daemon committed a version that contains the slot's copy."""

    def retire(self, fragment: int) -> None:
        """The slot's copy will not be merged as it stands."""

    def install(self, fragment: int, number: int, state: bytes, mode: Mode) -> None:
        """Go over to a version; without a process, only the base moves."""

    def saved(self, fragment: int) -> tuple[bytes, bytes]:
        """The displacement at an orderly end, and the part of it that is not in the slot's copy."""
        return b"", b""


class FalseWork(NamedTuple):
    """Contribution that a liar sends in place of its work."""

    matter: bytes
    work: float
    """Tokens and inner steps of its label, as multiples of the true ones."""


class Substance:
    """Arithmetic of a whole world. Equal arguments give equal bytes."""

    liars: frozenset[str] = frozenset()
    """Learners that lie about their work."""
    waits_s = 0.0
    """Time for which a liar looks at what others send."""

    def told(self, peer: str, fragment: int, matter: bytes) -> FalseWork:
        """Tell what a liar sends in place of this."""
        return FalseWork(matter, 1.0)

    def genesis(self, fragment: int) -> bytes:
        """State of version 0."""
        return b""

    def trainer(self, peer: str, states: list[tuple[int, bytes]]) -> Trainer:
        """A learner of this node; per fragment the number and state of the version that it starts from."""
        return Trainer()

    def combine(self, fragment: int, parts: list[bytes]) -> bytes:
        """Several contributions of one learner as one."""
        return b""

    def first_length(self, fragment: int) -> float | None:
        """Length of version 0; None: what the plan says."""
        return None

    def partial(
        self, fragment: int, inputs: list[Given], partials: list[bytes], limits: MergeLimits, seed: bytes
    ) -> Made:
        """A group's contributions, and partial merges from below, added up. Raises: UnusableMatter."""
        return Made(b"", _invented(inputs))

    def merge(
        self,
        fragment: int,
        number: int,
        state: bytes,
        inputs: list[Given],
        partials: list[bytes],
        longest_steps: int,
        limits: MergeLimits,
        seed: bytes,
    ) -> Made:
        """The outer update that makes version `number` of `state`; `longest_steps`: of the longest
        contribution in it. Raises: UnusableMatter."""
        return Made(b"", _invented(inputs))

    def grouped_error(self, fragment: int, tree: Tree) -> float:
        """Distance of a merge of groups from that of all its contributions in one, where nothing is cut.

        As a share of the contributions' mean length.
        """
        return 0.0

    def outer_step(
        self, fragment: int, number: int, state: bytes, update: bytes, longest_steps: int
    ) -> bytes:
        """The state of version `number` after that update, whose longest contribution is so long."""
        return b""

    def losses(self, states: list[bytes]) -> Losses | None:
        """Evaluate these states of all fragments; None where nothing is trained."""
        return None


def _invented(inputs: list[Given]) -> tuple[Measured, ...]:
    """Make findings up, of those that honest learners have: anything that can be."""
    return tuple(Measured(0.5 + given.digest[0] / 512, 48 + given.digest[1] % 32) for given in inputs)


NOTHING = Substance()
