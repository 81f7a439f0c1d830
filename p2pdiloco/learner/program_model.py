"""A program's own model in a session: its parameters, its constants, and whether merges stay in it.

Between two boundaries the program may do with its model what it likes: give a parameter other memory
(`p.data = …`), move the model to another device, put another Parameter under the name. `ProgramParameters`
looks parameters up by name at every boundary: what is under the name *now* is copied out and moved, or the
session ends with a sentence. Memory of yesterday would contribute zeros with all tokens, and take no merge.
`ProgramConstants` compares what the run says is constant; `MoveWatch` checks that what a merge put into the
model is still there after the program's next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from p2pdiloco.errors import UserError
from p2pdiloco.learner.optimizer import HeldParameters, is_shared_out, own
from p2pdiloco.tasks.description import VARIANCE, name_of, persistent_buffers, put_constants
from p2pdiloco.tasks.initial import plain_name, plain_parameters
from p2pdiloco.tensors.layout import FragmentLayout, Layouts, TensorMap, Tensors
from p2pdiloco.util import Frozen, Values

SAMPLE = 1024
"""Elements of a fragment's sample."""
FEW = 8
"""Parameters of which a few elements are compared between copies, and elements of each, at most."""


class HasGroups(Protocol):
    """An optimizer, as far as a session looks at it."""

    param_groups: list[Values]


class _Kind(Frozen):
    """Properties of a parameter that stay as they are for a session."""

    dtype: torch.dtype
    shape: torch.Size
    trained_by_optimizer: bool


class _Places:
    """Places of a model where modules and parameters are, as they were once: far quicker to look through than
    `named_parameters` is."""

    def __init__(self, model: nn.Module, with_buffers: bool) -> None:
        self._tables: list[Values] = []
        for module in model.modules():
            self._tables += [module._parameters, module._modules, *[module._buffers][: int(with_buffers)]]
        self._entries = [(table, key, value) for table in self._tables for key, value in table.items()]

    def same(self) -> bool:
        """Tell whether every place has the very object that it had."""
        for table, key, value in self._entries:
            if table.get(key) is not value:
                return False
        return sum(map(len, self._tables)) == len(self._entries)


class ProgramParameters(HeldParameters):
    """Parameters of a program that are in its run. The memory that they have at each use is used."""

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        optimizer: HasGroups | None = None,
        constants: TensorMap = MappingProxyType({}),
    ) -> None:
        """Look the parameters of these names up for the first time; all must be there. Names of persistent
        buffers are those of statistics that the run merges, too. The run's constants go into the model."""
        self._constants = ProgramConstants(model, constants)
        self._model, self._optimizer = model, optimizer
        self._cut = _cut(model)
        for module in self._cut:
            module.reshard()
        trainable, names = dict(plain_parameters(model)), list(names)
        self._with_buffers = not trainable.keys() >= set(names)
        self._places = _Places(model, self._with_buffers)
        found = self._found()
        self._parameters = {name: found[name] for name in names}
        self._others = [value for name, value in trainable.items() if name not in self._parameters]
        self._variances = [name for name in names if self._with_buffers and name.endswith(f".{VARIANCE}")]
        trained = self._ids_of_optimizer()
        self._kinds = {
            name: _Kind(value.dtype, value.shape, id(value) in trained)
            for name, value in self._parameters.items()
        }
        self._sampled: dict[int, Tensors] = {}
        super().__init__(self._parameters)

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return next(iter(self._parameters.values())).device

    @property
    def parameters(self) -> TensorMap:
        """The Parameters and statistics themselves, by name, as they were last looked up."""
        return self._parameters

    def sample(self, layout: FragmentLayout) -> Tensor:
        """Copy some elements of a fragment, spread evenly over it: fp32 (at most `SAMPLE`,), on the CPU. Of
        what is shared out it is this rank's part."""
        found = [torch.take(own(value.data), at).float() for value, at in self._places_in(layout)]
        return torch.cat(found).cpu() if found else torch.empty(0)

    def sample_gradient(self, layout: FragmentLayout) -> Tensor | None:
        """Copy the gradients of the same elements, 0 where there is none; None: there are none at all."""
        found = [(value.grad, at) for value, at in self._places_in(layout)]
        if all(gradient is None for gradient, _ in found):
            return None
        parts = [
            torch.zeros(at.shape, device=at.device)
            if gradient is None or gradient.layout != torch.strided
            else torch.take(own(gradient), at).float()
            for gradient, at in found
        ]
        return torch.cat(parts).cpu()

    def _places_in(self, layout: FragmentLayout) -> Iterator[tuple[Tensor, Tensor]]:
        """Tensors of a fragment's sample, each with the places in it, flat, on its device."""
        places = self._sampled.setdefault(layout.index, {})
        if not places:
            spread = torch.arange(min(SAMPLE, layout.numel)) * layout.numel // min(SAMPLE, layout.numel)
            for piece in layout.pieces:
                at = spread - piece.fragment_offset
                at = at[(at >= 0) & (at < piece.numel)] + piece.tensor_offset
                at = at[at < own(self._parameters[piece.tensor]).numel()]  # rank 0 has the first rows
                if len(at):
                    places[piece.tensor] = at
        for name, at in places.items():
            value = self._parameters[name]
            places[name] = at.to(value.device)
            yield value, places[name]

    def few(self) -> list[float]:
        """Copy a few elements of a few parameters, by which copies are compared; of shares none."""
        # (statistics are each rank's own until they are merged)
        chosen = [value for value in self._parameters.values() if isinstance(value, nn.Parameter)]
        chosen = chosen[:: max(1, len(chosen) // FEW)][:FEW]
        if any(map(is_shared_out, chosen)):
            return []
        flat = [value.data.reshape(-1) for value in chosen]
        parts = [values[:: max(1, len(values) // FEW)][:FEW].to(self.device).float() for values in flat]
        return list[float](torch.cat(parts).tolist())

    def look(self) -> None:
        """Look all parameters up by name, at a boundary. What is there now is used until the next call.

        Raises:
            UserError: one is missing, has another shape or number type, or is one that the optimizer does not
                have; one that the run lacks is trained now; or a constant of the run was changed.
        """
        for module in self._cut:  # FSDP2 may have collected whole parameters for a pass
            module.reshard()
        if not self._places.same():
            self._look_up()
        for (name, kind), value in zip(self._kinds.items(), self._parameters.values(), strict=True):
            if value.dtype is not kind.dtype or value.shape != kind.shape or value.is_meta:
                raise _changed(name, kind, value)
        if any(value.requires_grad for value in self._others):
            raise self._unknown()
        self._constants.look()

    def _look_up(self) -> None:
        found = self._found()
        trained = self._ids_of_optimizer()
        for name, kind in self._kinds.items():
            value = found.get(name)
            if value is None:
                raise UserError(
                    f"the model has no parameter {name} any more, which the run trains",
                    "parameters keep their names while a Session is open: change the model before it begins",
                )
            if value is not self._parameters[name]:
                if kind.trained_by_optimizer and id(value) not in trained:
                    raise UserError(
                        f"{name} is another Parameter than before, and the optimizer does not have it: it "
                        "goes on with the old one, which the model does not use",
                        "load in place (load_state_dict without assign=True), or begin a new Session with an "
                        "optimizer of the new parameters",
                    )
                self._parameters[name] = value
        self._others = [value for name, value in plain_parameters(self._model) if name not in self._kinds]
        self._places, self._cut = _Places(self._model, self._with_buffers), _cut(self._model)

    def _found(self) -> Tensors:
        found: Tensors = dict(plain_parameters(self._model))
        return found | persistent_buffers(self._model) if self._with_buffers else found

    @torch.no_grad()
    def settle(self) -> None:
        """Keep merged variances from below zero, to where an outer step with momentum may take them."""
        for name in self._variances:
            self._parameters[name].clamp_(min=0.0)

    def _ids_of_optimizer(self) -> set[int]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return {id(value) for group in groups for value in group.get("params", ())}

    def _unknown(self) -> UserError:
        found = plain_parameters(self._model)
        name = next(n for n, value in found if value.requires_grad and n not in self._kinds)
        return UserError(
            f"{name} is trained now (requires_grad), but the run does not have it",
            "what is trained later is in a run from its beginning: new_run(…, frozen=True)",
        )


def _cut(model: nn.Module) -> list[Any]:
    """Modules that FSDP2 has cut up (`fully_shard`)."""
    return [m for m in model.modules() if hasattr(m, "reshard") and hasattr(m, "unshard")]


def _changed(name: str, kind: _Kind, value: Tensor) -> UserError:
    if value.is_meta:
        was, now, hint = "had memory", "has none (device meta)", "give it memory and values"
    elif value.dtype is not kind.dtype:
        was, now = f"was {name_of(kind.dtype)}", f"is {name_of(value.dtype)}"
        hint = f"change it back (model.to({kind.dtype}))"
    else:
        was, now = f"had shape {tuple(kind.shape)}", f"has {tuple(value.shape)}"
        hint = "change it back"
    return UserError(
        f"the parameter {name} {was} when the session began, and {now} now",
        f"{hint}, or change the model before the Session begins; its optimizer belongs to the same numbers",
    )


class ProgramConstants:
    """Buffers of a program's model that its run says are constant: they are put in when a session begins, and
    stay as they are. A buffer that training changes is none:
    others' models would not have the change, and neither would exports."""

    def __init__(self, model: nn.Module, constants: TensorMap) -> None:
        """Put them into the model. Raises: UserError (it lacks one)."""
        put_constants(model, constants)
        # As the model's own number types hold them.
        kept = persistent_buffers(model)
        self._constants = {name: kept[name].detach().clone() for name in constants}
        modules = {plain_name(path): module for path, module in model.named_modules()}
        paths = [(name, *name.rpartition(".")[::2]) for name in constants]
        self._places = [(name, modules[path], key) for name, path, key in paths]
        self._seen = self._marks()

    def look(self) -> None:
        """Compare those that were written since the last call. Raises: UserError (one has other values)."""
        marks = self._marks()
        for (name, module, key), mark, seen in zip(self._places, marks, self._seen, strict=True):
            if mark == seen:
                continue
            value = getattr(module, key, None)
            if not _same(value, self._constants[name]):
                raise UserError(
                    f"the buffer {name} was changed, which is a constant of the run's model",
                    f'if training changes it, write the run with new_run(…, own_buffers=["{name}"]): it is '
                    "each program's own then",
                )
        self._seen = marks

    def _marks(self) -> list[object]:
        """What another writing would change, of each."""
        found = [getattr(module, key, None) for _, module, key in self._places]
        return [
            None if value is None or value.is_inference() else (id(value), value.data_ptr(), value._version)
            for value in found
        ]


def _same(value: Tensor | None, known: Tensor) -> bool:
    """Wherever the buffer is by now; NaN is NaN."""
    if value is None or value.is_meta or value.shape != known.shape:
        return False
    here = value.detach().to(known.device)
    return bool(((here == known) | ((here != here) & (known != known))).all())


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


@dataclass
class MoveWatch:
    """Watch over what installs put into a program's model.

    An optimizer with its own copies of the parameters (fp32 masters of a bf16 model), or an average that is
    copied back, writes over what a merge moved. The program then contributes the way back: it takes
    everybody's progress out of the run. So of every move a sample of elements is watched:

        before -> merged    the move of an install (or of the beginning)
        merged -> after     the program's next step
        after  -> later     one more, without an install: how far a usual step goes

    The move was *kept* if the share <after - before, move> / |move|^2 is about 1. It was *undone* if the
    share is about 0 and `after` is near `before`, as far as a usual step goes. Nothing is decided where the
    move is not several times as long as a usual step (what is stored is compared, so a move below a number
    type's rounding has no length). Nor is it where the gradient explains the way back: at a high learning
    rate a step may go back along the move by itself, but then it goes along the gradient.
    """

    _parameters: ProgramParameters
    _layouts: Layouts

    def __post_init__(self) -> None:
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
                raise undone_error(began)

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


def undone_error(began: bool) -> UserError:
    """Make the error of a program that takes out what the run puts in."""
    what = "the run put into the model when the session began" if began else "merges put into the model"
    return UserError(
        f"what {what} is gone after the program's next step: something writes its own copies of the "
        "parameters back",
        "an optimizer with fp32 masters, an average (EMA), a checkpoint that is loaded later: let it take "
        "the parameters over in session.on_merge(function), or load before the Session begins",
    )
