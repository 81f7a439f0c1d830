"""Check that what a merge put into a program's model is still there after the program's next step.

Theory of operation
-------------------
An optimizer with its own copies of the parameters (fp32 masters of a bf16 model), or an average that is
copied back, writes over what a merge moved. The program then contributes the way back: it takes everybody's
progress out of the run. So of every move a sample of elements is watched:

    before -> merged    the move of an install (or of the beginning)
    merged -> after     the program's next step
    after  -> later     one more, without an install: how far a usual step goes

The move was *kept* if the share <after - before, move> / |move|^2 is about 1. It was *undone* if the share is
about 0 and `after` is near `before`, as far as a usual step goes. Nothing is decided where the move is not
several times as long as a usual step (what is stored is compared, so a move below a number type's rounding
has no length). Nor is it where the gradient explains the way back: at a high learning rate a step may go back
along the move by itself, but then it goes along the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from p2pdiloco.errors import UserError
from p2pdiloco.learner.program.parameters import HasGroups, ProgramParameters
from p2pdiloco.tensors.layout import FragmentLayout

STEPS_LONG = 4.0
"""Least length of a move that is judged, in usual steps."""
NEAR, UNDONE_SHARE, KEPT_SHARE = 0.35, 0.3, 0.5
EXPLAINED = 0.7
"""Least cosine between a step and its gradient, backwards, by which a step's direction is the gradient's."""
IN_A_ROW = 3
"""Number of moves undone in a row that are no chance."""


class WatchedMove(Struct):
    """A move that is watched. All are samples of one fragment, fp32."""

    before: Tensor
    merged: Tensor
    began: bool = False
    """True: the session's beginning."""
    gradient: Tensor | None = None
    """Gradient at `merged`, if the program keeps it until its optimizer steps."""
    after: Tensor | None = None


Verdict = Literal["kept", "undone"]


def judge(move: WatchedMove, usual_step: float) -> Verdict | None:
    """Judge a move of which `after` is known; None: it cannot be told. `usual_step`: its length (L2)."""
    assert move.after is not None
    after, merged, before = (sample.double() for sample in (move.after, move.merged, move.before))
    way, back = merged - before, after - before
    length = float(way.norm())
    if not length or length < STEPS_LONG * usual_step:
        return None
    share = float(back @ way) / length**2
    if share > KEPT_SHARE:
        return "kept"
    if share > UNDONE_SHARE or not float(back.norm()) <= NEAR * length:
        return None
    if move.gradient is not None:
        step, gradient = after - merged, move.gradient.double()
        both = float(step.norm() * gradient.norm())
        if both and -float(step @ gradient) >= EXPLAINED * both:
            return None
    return "undone"


class Keeping:
    """Watch over what installs put into a program's model."""

    def __init__(
        self,
        parameters: ProgramParameters,
        layouts: Sequence[FragmentLayout],
    ) -> None:
        self._parameters, self._layouts = parameters, layouts
        self._moves: dict[int, WatchedMove] = {}
        self._undone: dict[int, int] = {}
        """Moves undone in a row, by fragment: what is kept in another one excuses nothing."""
        self._hook: RemovableHandle | None = None

    def look_when_it_steps(self, optimizer: HasGroups | None) -> None:
        """Look at gradients when this optimizer steps, too: a program may drop them then."""
        while isinstance(wrapped := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = wrapped
        if isinstance(optimizer, Optimizer):
            self._hook = optimizer.register_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Let go of the optimizer."""
        if self._hook is not None:
            self._hook.remove()

    def sample(self, fragment: int) -> Tensor:
        """Copy a sample of a fragment, to be given to `moved`."""
        return self._parameters.sample(self._layouts[fragment])

    def moved(self, fragment: int, before: Tensor, began: bool = False) -> None:
        """Take in that a fragment was moved from there between two steps; several moves there are one.
        `began`: it is what the run put into the model when the session began."""
        known, merged = self._moves.get(fragment), self.sample(fragment)
        if known is not None and known.after is None:
            known.merged = merged
        elif not torch.equal(before, merged):
            self._moves[fragment] = WatchedMove(before, merged, began)

    def look(self) -> None:
        """Look at what was moved, after a step of the program.

        Raises:
            UserError: moves are undone by whatever the program does at its steps.
        """
        self._look_at_gradients()
        for fragment, move in list(self._moves.items()):
            now = self.sample(fragment)
            last = move.merged if move.after is None else move.after
            if bool((now == last).all()):
                continue  # no step of the optimizer: gradients are added up, or it was left out
            if move.after is None:
                move.after = now
                continue
            del self._moves[fragment]
            self._count(fragment, judge(move, float((now - move.after).double().norm())), move.began)

    def _count(self, fragment: int, verdict: Verdict | None, began: bool) -> None:
        if verdict == "kept":
            self._undone[fragment] = 0
        elif verdict == "undone":
            self._undone[fragment] = self._undone.get(fragment, 0) + 1
            if began or sum(self._undone.values()) >= IN_A_ROW:
                raise undone(began)

    def _before_step(self, *_: object) -> None:
        # A compiled step, or one that becomes a graph of a GPU, must not look at values.
        if torch.compiler.is_compiling():
            return
        if self._parameters.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self._look_at_gradients()

    def _look_at_gradients(self) -> None:
        for fragment, move in self._moves.items():
            if move.after is None:
                found = self._parameters.sample_gradient(self._layouts[fragment])
                move.gradient = move.gradient if found is None else found


def undone(began: bool) -> UserError:
    """Make the error of a program that takes out what the run puts in."""
    what = "the run put into the model when the session began" if began else "merges put into the model"
    return UserError(
        f"what {what} is gone after the program's next step: something writes its own copies of the "
        "parameters back",
        "an optimizer with fp32 masters, an average (EMA), a checkpoint that is loaded later: let it take "
        "the parameters over in session.on_merge(function), or load before the Session begins",
    )
