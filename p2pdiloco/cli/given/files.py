"""Files of a model in somebody's folder: those that its index lists, or the one of the usual name, no others.

What lies beside them (an older file, another program's, a run's own version 0) is named, and not read.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from p2pdiloco.adapters.result_file import Arrays, load_tensors, tensor_types
from p2pdiloco.cli.given.kinds import refuse_other_kinds
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.hub_models import NOT_PARAMETERS

CONFIG = "config.json"
ENDING = ".safetensors"
SINGLE = f"model{ENDING}"
INDEX = f"{SINGLE}.index.json"
MAX_INDEX_BYTES = 64 << 20
_PART = re.compile(rf"(.*)-(\d{{5}})-of-(\d{{5}}){re.escape(ENDING)}")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class ModelFiles:
    """The files at `source`, a folder or one file of it.

    `listed`: by parameter, the file that the index says it is in; empty: there is no index. `foreign`: files
    that are not read.
    """

    def __init__(self, source: Path) -> None:
        """Raises:
        UserError: there is none, or one of another kind; the index cannot be read, or lists files that are
            missing; so are parts.
        """
        self.folder = source if source.is_dir() else source.parent
        self.listed: dict[str, str] = {}
        refuse_other_kinds(source)
        if not source.is_dir():
            self.files, self.foreign = [source], []
            return
        found = sorted(source.glob(f"*{ENDING}"))
        index = source / INDEX
        if index.exists():
            self.listed = _read_index(index)
            self.files = sorted({source / name for name in self.listed.values()})
            missing = [file.name for file in self.files if not file.exists()]
            if missing:
                raise UserError(
                    f"{index} lists {missing[0]}, which is not there", "get the whole folder again"
                )
        elif (source / SINGLE).exists():
            self.files = [source / SINGLE]
        else:
            self.files = found
            _check_parts(found)
        if not self.files:
            raise UserError(f"{source} has no safetensors file", "give a folder that has, or a checkpoint")
        self.foreign = [file for file in found if file not in self.files]
        for file in self.files:
            refuse_other_kinds(file)

    def parameters(self) -> Arrays:
        """Load what the files hold. Raises: StorageError, UserError (as `weights`)."""
        self.weights()
        found: Arrays = {}
        for file in self.files:
            found |= load_tensors(file, NOT_PARAMETERS)[0]
        return found

    def types(self) -> dict[str, str]:
        """Types of the parameters, as safetensors calls them, by name. Raises: StorageError."""
        return {name: kind for file in self.files for name, kind in _types(file).items()}

    def weights(self) -> dict[str, str]:
        """Names of the parameters, each with its file's.

        Raises:
            UserError: a listed parameter is missing, one is in two files, or in another than is listed; a
                file cannot be read.
        """
        found: dict[str, str] = {}
        for file in self.files:
            for name in _types(file):
                listed = self.listed.get(name, "" if self.listed else file.name)
                if listed != file.name or name in found:
                    other = found.get(name) or (f"in {listed}" if listed else "listed nowhere")
                    raise UserError(
                        f"{file} has {name}, which by {INDEX} is {other}"
                        if self.listed
                        else f"{file} has {name}, and so has {other}",
                        "get the whole folder again",
                    )
                found[name] = file.name
        missing = [name for name in self.listed if name not in found and not name.endswith(NOT_PARAMETERS)]
        if missing:
            file = self.folder / self.listed[missing[0]]
            raise UserError(
                f"{file} lacks {missing[0]}, which {INDEX} lists there", "get the whole folder again"
            )
        return found

    @contextmanager
    def alone(self) -> Iterator[Path]:
        """Give a folder in which there are these files only, for a library that chooses by itself."""
        with tempfile.TemporaryDirectory() as made:
            weights = self.weights()
            is_single = len(self.files) == 1
            for file in self.files:
                (Path(made) / (SINGLE if is_single else file.name)).symlink_to(file.absolute())
            if not is_single:
                text = msgspec.json.encode({"metadata": {}, "weight_map": weights})
                (Path(made) / INDEX).write_bytes(text)
            (Path(made) / "generation_config.json").write_text("{}")  # (the library asks for one)
            yield Path(made)

    def words(self) -> str:
        """Say what is not read; empty: all is."""
        if not self.foreign:
            return ""
        first, others = self.foreign[0], len(self.foreign) - 1
        more = f" and {others} more" if others else ""
        by = f"{INDEX} does not list {'them' if others else 'it'}" if self.listed else f"there is {SINGLE}"
        return f"not read: {first}{more}, since {by}"


def _types(file: Path) -> dict[str, str]:
    return {name: kind for name, kind in tensor_types(file).items() if not name.endswith(NOT_PARAMETERS)}


def _read_index(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            listed = msgspec.json.decode(file.read(MAX_INDEX_BYTES), type=_Index).weight_map
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is no index of safetensors files: {error}", "get the folder again"
        ) from error
    odd = [name for name in listed.values() if Path(name).name != name or not name.endswith(ENDING)]
    if odd or not listed:
        what = f"lists {odd[0]}, which is no file of its folder" if odd else "lists nothing"
        raise UserError(f"{path} {what}", "get the folder again")
    return listed


def _check_parts(files: list[Path]) -> None:
    """Refuse parts of which some are missing, by their names. Raises: UserError."""
    parts = [match for file in files if (match := _PART.fullmatch(file.name))]
    for match in parts:
        stem, _, total = match.groups()
        here = {int(other[2]) for other in parts if other[1] == stem and other[3] == total}
        lacking = sorted({*range(1, min(int(total), 9999) + 1)} - here)
        if lacking:
            name = f"{stem}-{lacking[0]:05}-of-{total}{ENDING}"
            raise UserError(f"{files[0].parent} has no {name}", "get the whole folder again")
