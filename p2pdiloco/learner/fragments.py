"""Fragments as a learner has them: due dates, copies out, and going over to newer versions.

Theory of operation
-------------------
A learner trains parameters theta. Of every fragment it also has a *base*: the version of the global
parameters that theta is measured against, in one of the two base buffers of the exchange. What the
learner has to say is its displacement D = base - theta (the pseudo-gradient of the paper).

*Copy-out.* `sent <- theta`, the slot is in use, and the daemon encodes D = base - sent in its own process
while the learner goes on. `unmerged_tokens` and `unmerged_steps` are what D took; they go on counting.
If D is many sync intervals long (the daemon was away, or nobody could merge), only a share s of it goes
out (`core.api.versions.Stride`), `sent <- base - s D`, with as large a share of tokens and steps; the rest
of D stays for the following contributions.

*Install* of a newer version Theta', which lies in the other base buffer:

    merged     the copy is in Theta'.     theta <- Theta' + rho (theta - sent)
               rho = 1 keeps the steps made in flight, rho = 0 is the paper's overwrite. The copy's tokens
               and steps leave the counters (with rho = 0, those made in flight too). What a copy held
               back is never weighed with rho: it is as old as the copy.
    rebase     it is not.                 theta <- theta + (Theta' - base)
               D does not change, so the work is in the next contribution; counters go on.
    overwrite  D is in Theta' already.    theta <- Theta', counters zero.

A rebase while the slot is in use moves theta and base alike, so `sent` must move with them. The daemon may
just be reading `sent`, therefore it is never touched between copy-out and the end of its slot: the learner
keeps the sum of the moves in `shift`, private memory, and merges with (theta - sent - shift).

*Schedule.* A fragment is due H whole inner steps after its last copy-out or rebase, the first due dates are
spread evenly over H. If its slot is still in use it is counted as deferred, and due as soon as it is free.
A merged install does not restart the count, so that an undisturbed fragment is due exactly every H steps.
A learner whose link is too thin takes part in every k-th version only (`take_part`): what it has to say goes
on growing with each rebase, and is due after k H steps of its own.

Rules that the daemon keeps. One base buffer is the learner's (the one last `Applied`), the other is the
daemon's. The daemon posts no `Install` of a fragment before the last one is `Applied`. It does not write a
buffer that an encode of its own still reads (`CopiedOut.base_buffer`). It posts merged only for the copy that
occupies the slot of *this* learner process, and `FreeSlot` or merged only when its encode is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from p2pdiloco.core.api.versions import Stride
from p2pdiloco.errors import invariant
from p2pdiloco.learner.channel import BaseRef, CopiedOut, Install, NothingToCopy
from p2pdiloco.learner.optimizer import HeldParameters
from p2pdiloco.tensors.layout import Exchange, Layouts, TensorMap, scatter


class FragmentCounters(Struct):
    """Counters of one fragment; all but the slot survive a restart (`learner.loop.save_checkpoint`)."""

    unmerged_tokens: int = 0
    unmerged_steps: int = 0
    steps_since_base: int = 0
    """Inner steps since the last copy-out, rebase or overwrite."""
    slot_in_use: bool = False
    sent_tokens: int = 0
    sent_steps: int = 0


class Fragments:
    """Fragments of one model in one learner."""

    def __init__(
        self,
        held: HeldParameters,
        layouts: Layouts,
        exchange: Exchange,
        bases: Sequence[BaseRef],
        inner_steps: int,
        keep_in_flight: float,
    ) -> None:
        """`held` is theta, `inner_steps` is H, `keep_in_flight` is rho. theta is not touched here: see
        `reset_to_base`."""
        invariant(len(bases) == len(layouts) == exchange.fragments, "one base per fragment")
        self.held = held
        self.layouts = layouts
        self._exchange = exchange
        self.period = inner_steps
        """Inner steps between two copies of a fragment (H)."""
        self._rho = keep_in_flight
        self.bases = list(bases)
        self.counters = [
            FragmentCounters(steps_since_base=inner_steps - first_due(index, len(layouts), inner_steps))
            for index in range(len(layouts))
        ]
        self._every = 1
        self.deferred_copies = 0
        self._shift: dict[int, Tensor] = {}
        self._strides = [Stride(inner_steps) for _ in layouts]
        self._steps = 0
        """Inner steps in this life."""
        self._steps_since_copy = [0 for _ in layouts]
        self._steps_of_others = [0 for _ in layouts]
        """Steps that each other learner has made, about, that are not in our base."""
        self._held_back: dict[int, FragmentCounters] = {}
        """Tokens and steps that the copy in the slot leaves of the displacement it was taken from."""
        largest = max(layout.numel for layout in layouts)
        # Pinned, the copies from and to a GPU run at the full speed of the bus.
        self._staging = torch.empty(largest, dtype=torch.float32, pin_memory=held.on_cuda)

    def __len__(self) -> int:
        return len(self.layouts)

    def take_part(self, every: int) -> None:
        """Contribute to every `every`-th version only, from now on."""
        self._every = every
        for stride in self._strides:
            stride.rarer(every * self.period)

    def hold(self, held: HeldParameters) -> None:
        """Take theta from there, from now on: the same, held in another way."""
        self.held = held

    def count_step(self, tokens: int) -> None:
        """Count an inner step over `tokens` tokens that has changed theta."""
        for counters in self.counters:
            counters.unmerged_tokens += tokens
            counters.unmerged_steps += 1
            counters.steps_since_base += 1
        self._steps += 1
        self._steps_since_copy = [steps + 1 for steps in self._steps_since_copy]
        self._steps_of_others = [steps + 1 for steps in self._steps_of_others]

    def copy_due(self, inner_step: int) -> list[CopiedOut]:
        """Copy out every fragment that is due and whose slot is free."""
        copies = []
        for index, counters in enumerate(self.counters):
            if counters.steps_since_base < self.period or not self._portion(index):
                continue
            if self._every > 1 and self._steps_since_copy[index] < self._every * self.period:
                continue
            if counters.slot_in_use:
                self.deferred_copies += counters.steps_since_base == self.period
                continue
            copies.append(self._copy(index, inner_step, due=True))
        return copies

    def copy_remaining(self, inner_step: int) -> list[CopiedOut]:
        """Copy out every fragment with anything that no contribution carries: no inner steps come now."""
        found = (index for index, c in enumerate(self.counters) if not c.slot_in_use and self._portion(index))
        return [self._copy(index, inner_step, due=True) for index in found]

    @property
    def all_merged(self) -> bool:
        """Tell whether every inner step is in a version that this learner has taken over, or cannot be before
        another one is made: nobody is to wait for that."""
        return not any(c.slot_in_use or self._portion(index) for index, c in enumerate(self.counters))

    def copy_out(self, fragment: int, inner_step: int, under_way: bool = False) -> CopiedOut | NothingToCopy:
        """Answer a closing call. `under_way`: in the middle of an inner step, which is none of those that are
        counted until the fragment is due."""
        counters = self.counters[fragment]
        if counters.slot_in_use or not self._portion(fragment):
            return NothingToCopy(fragment, counters.slot_in_use)
        # Rounds of the others come half an interval before or after our own count.
        if self._every > 1 and self._steps_since_copy[fragment] < (self._every - 0.5) * self.period:
            return NothingToCopy(fragment, slot_in_use=False)
        copied = self._copy(fragment, inner_step, due=False)
        counters.steps_since_base -= under_way
        return copied

    def free_slot(self, fragment: int, not_finite: bool = False) -> None:
        """Free the slot, as the copy will not be merged as it stands: its work stays in the counters, and is
        due again now; or after H more steps, if it was `not_finite`."""
        counters = self.counters[fragment]
        self._release(fragment)
        self._strides[fragment].given_up(self._steps)
        if not_finite:
            return
        counters.steps_since_base = max(counters.steps_since_base, self.period)
        self._steps_since_copy[fragment] = max(self._steps_since_copy[fragment], self._every * self.period)

    @torch.no_grad()
    def install(self, command: Install) -> None:
        """Go over to the version in `command.buffer` (module docstring)."""
        index, mode = command.fragment, command.mode
        counters, old = self.counters[index], self.bases[index]
        invariant(command.buffer == 1 - old.buffer, f"fragment {index}: install into the buffer in use")
        theta = self._gather(index)
        new_base = self._exchange.base(index, command.buffer)
        if mode == "merged":
            invariant(counters.slot_in_use, f"fragment {index}: merged, but nothing is copied out")
            self._keep_in_flight(index, theta, new_base)
            # Theirs were copied out when ours were; after an absence their work of that time is merged.
            self._steps_of_others[index] = min(self._steps_since_copy[index], self.period)
        elif mode == "rebase":
            move = new_base - self._exchange.base(index, old.buffer)
            theta.add_(move)
            if counters.slot_in_use:
                self._shift[index] = self._shift[index].add_(move) if index in self._shift else move
            counters.steps_since_base = self._steps_of_others[index] = 0
        else:
            self._steps_of_others[index] = 0
            theta.copy_(new_base)
            self._release(index)
            self.counters[index] = FragmentCounters()
        self.held.scatter(theta, self.layouts[index])
        self.bases[index] = BaseRef(command.number, command.buffer, command.tokens)

    def not_finite(self, fragment: int) -> str:
        """Name a parameter of which the last copy has NaN or infinity; "": none has."""
        sent = self._exchange.sent(fragment)
        names = (
            piece.tensor
            for piece in self.layouts[fragment].pieces
            if not sent[piece.fragment_offset :][: piece.numel].isfinite().all()
        )
        return next(names, "")

    def run_tokens(self, learners: int) -> int:
        """Tokens that the run has consumed, about; the mean over fragments.

        They are the tokens in the base, our own unmerged ones, and of every other learner as many as go with
        the steps since that version. (Where we have more, after an absence or because we take part rarely,
        theirs are merged.)
        """
        tokens = 0
        for base, ours, steps in zip(self.bases, self.counters, self._steps_of_others, strict=True):
            theirs = ours.unmerged_tokens * min(steps, ours.unmerged_steps) // max(1, ours.unmerged_steps)
            tokens += base.tokens + ours.unmerged_tokens + (learners - 1) * theirs
        return tokens // len(self)

    # --- displacements, for saving and restoring -------------------------------------------------

    def displacement(self, fragment: int) -> Tensor:
        """D = base - theta: fp32 (numel,), new memory."""
        return self._exchange.base(fragment, self.bases[fragment].buffer) - self._gather(fragment)

    def not_in_flight(self, fragment: int) -> Tensor:
        """The part of D that is not in the copy in flight: sent + shift - theta (fp32, new memory)."""
        found = self._exchange.sent(fragment) - self._gather(fragment)
        return found.add_(self._shift[fragment]) if fragment in self._shift else found

    @torch.no_grad()
    def take_up(self, fragment: int, displacement: Tensor | None, counters: FragmentCounters) -> None:
        """Go on with the displacement of an earlier life, which was counted so."""
        self.reset_to_base(fragment, displacement)
        self.counters[fragment] = counters

    def reset_to_base(self, fragment: int, displacement: Tensor | None = None) -> None:
        """theta <- base - displacement (None: the base itself)."""
        base = self._exchange.base(fragment, self.bases[fragment].buffer)
        theta = base if displacement is None else base - displacement
        self.held.scatter(theta, self.layouts[fragment])

    def scatter_bases(self, params: TensorMap) -> None:
        """Put the global parameters (every fragment's current base) into another instance of the model."""
        for layout, base in zip(self.layouts, self.bases, strict=True):
            scatter(self._exchange.base(layout.index, base.buffer), layout, params)

    # ---------------------------------------------------------------------------------------------

    def _gather(self, fragment: int) -> Tensor:
        layout = self.layouts[fragment]
        theta = self._staging[: layout.numel]
        self.held.gather(layout, theta)
        return theta

    def _portion(self, fragment: int) -> int:
        """Inner steps that the next copy carries; 0: there is nothing to copy."""
        return self._strides[fragment].carried(self.counters[fragment].unmerged_steps, self._steps)

    def _copy(self, fragment: int, inner_step: int, due: bool) -> CopiedOut:
        counters, base = self.counters[fragment], self.bases[fragment]
        theta, steps = self._gather(fragment), counters.unmerged_steps
        counters.slot_in_use = True
        counters.sent_steps = self._portion(fragment)
        counters.sent_tokens = counters.unmerged_tokens * counters.sent_steps // steps
        if counters.sent_steps == steps:
            self._exchange.sent(fragment).copy_(theta)
        else:
            start = self._exchange.base(fragment, base.buffer)
            torch.lerp(start, theta, counters.sent_steps / steps, out=self._exchange.sent(fragment))
            self._held_back[fragment] = FragmentCounters(
                unmerged_tokens=counters.unmerged_tokens - counters.sent_tokens,
                unmerged_steps=steps - counters.sent_steps,
            )
        counters.steps_since_base = self._steps_since_copy[fragment] = 0
        return CopiedOut(
            fragment, counters.sent_tokens, counters.sent_steps, base.number, base.buffer, inner_step, due
        )

    def _keep_in_flight(self, fragment: int, theta: Tensor, new_base: Tensor) -> None:
        counters, held_back = self.counters[fragment], self._held_back.get(fragment)
        self._strides[fragment].merged(counters.sent_steps, self._steps)
        sent = self._exchange.sent(fragment)
        if fragment in self._shift:
            sent.add_(self._shift[fragment])  # the daemon's encode is over: it knows that this was merged
        theta.sub_(sent)
        if held_back is not None and self._rho != 1:
            base = self._exchange.base(fragment, self.bases[fragment].buffer)
            # base - sent is the share that was merged.
            old = (base - sent).mul_(held_back.unmerged_steps / counters.sent_steps)
            theta.add_(old).mul_(self._rho).sub_(old).add_(new_base)
        else:
            theta.mul_(self._rho).add_(new_base)
        if self._rho == 0:
            left = held_back or FragmentCounters()
            counters.unmerged_tokens, counters.unmerged_steps = left.unmerged_tokens, left.unmerged_steps
            counters.steps_since_base %= self.period  # nothing to say at a date that passed in flight
        else:
            counters.unmerged_tokens -= counters.sent_tokens
            counters.unmerged_steps -= counters.sent_steps
        self._release(fragment)

    def _release(self, fragment: int) -> None:
        counters = self.counters[fragment]
        counters.slot_in_use = False
        counters.sent_tokens = counters.sent_steps = 0
        self._shift.pop(fragment, None)
        self._held_back.pop(fragment, None)


def first_due(fragment: int, fragments: int, inner_steps: int) -> int:
    """The inner step at which a fragment is due for the first time: max(1, round((p + 1) H / P))."""
    return max(1, round((fragment + 1) * inner_steps / fragments))
