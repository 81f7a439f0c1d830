"""Constants of a run in a program's model: they are put in when a session begins, and stay as they are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from p2pdiloco.errors import UserError
from p2pdiloco.tasks.description import persistent_buffers, put_constants
from p2pdiloco.tasks.initial import plain_name


class ProgramConstants:
    """Buffers of a program's model that its run says are constant. A buffer that training changes is none:
    others' models would not have the change, and neither would exports."""

    def __init__(self, model: nn.Module, constants: Mapping[str, Tensor]) -> None:
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
        """Tell of each what another writing would change."""
        found = [getattr(module, key, None) for _, module, key in self._places]
        return [
            None if value is None or value.is_inference() else (id(value), value.data_ptr(), value._version)
            for value in found
        ]


def _same(value: Tensor | None, known: Tensor) -> bool:
    """Tell whether a buffer has these values, wherever it is by now (NaN is NaN)."""
    if value is None or value.is_meta or value.shape != known.shape:
        return False
    here = value.detach().to(known.device)
    return bool(((here == known) | ((here != here) & (known != known))).all())
