"""Substance of simulated payloads and states: bytes beside their lineage, by default none.

The simulator moves *matter*, opaque bytes, wherever a real node would move a payload or a state. `Substance`
says what is done with them; `p2pdiloco.lab.vectors` has one that trains a small model with the real tensors
code. Matter is never changed in place.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from p2pdiloco.core.api.events import Measured

Work = tuple[bytes, int, int, int]
"""A contribution to a merge: its payload, tokens, inner steps, trust weight."""
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


class Substance:
    """Arithmetic of a whole world. Pure: equal arguments give equal bytes."""

    def genesis(self, fragment: int) -> bytes:
        """State of version 0."""
        return b""

    def trainer(self, peer: str, states: list[tuple[int, bytes]]) -> Trainer:
        """A learner of this node; per fragment the number and state of the version that it starts from."""
        return Trainer()

    def combine(self, fragment: int, parts: list[bytes]) -> bytes:
        """Several contributions of one learner as one."""
        return b""

    def partial(self, fragment: int, inputs: list[Work], partials: list[bytes]) -> bytes:
        """A group's contributions, and partial merges from below, added up."""
        return b""

    def measure(
        self, fragment: int, inputs: list[Work], digests: list[bytes], seed: bytes
    ) -> tuple[Measured, ...]:
        """Findings of a merge about its inputs, which have these payload digests: anything that can be."""
        return tuple(Measured(0.5 + digest[0] / 512, 48 + digest[1] % 32) for digest in digests)

    def merge(
        self,
        fragment: int,
        number: int,
        state: bytes,
        inputs: list[Work],
        partials: list[bytes],
        longest_steps: int,
    ) -> bytes:
        """The outer update that makes version `number` of `state`; of the longest contribution in it."""
        return b""

    def grouped_error(
        self, fragment: int, inputs: list[Work], partials: list[bytes], flat: list[Work]
    ) -> float:
        """Distance of the merge of `inputs` and `partials` from that of all contributions, `flat`, in one
        group.

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


NOTHING = Substance()
