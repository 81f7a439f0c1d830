"""File of a given version 0, and how it goes out to other nodes (without torch)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.result_file import MAX_HEADER_BYTES, Arrays, checksum, checksum_of, load_tensors
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.run_files.giving import mapped
from p2pdiloco.errors import ConfigError, RemoteError, StorageError
from p2pdiloco.tasks.registry import BUILT_IN, task_of
from p2pdiloco.tasks.task import Constant, constants_of, text_of
from p2pdiloco.tensors.sizes import MAX_NUMEL

T = TypeVar("T")
logger = logging.getLogger(__name__)
HEADER_BYTES, HEADER_BYTES_A_TENSOR = 4096, 512
"""Most that the header of such a file takes, beside the names: in JSON a letter is up to six bytes."""


def initial_beside(path: Path) -> Path:
    """Path of the given parameters of a run.toml: run.initial.safetensors."""
    return path.with_suffix(".initial.safetensors")


def kept_initial(data_dir: Path, run: str) -> Path:
    """Path at which a node keeps the given parameters of a run."""
    return run_folder(data_dir, run) / "initial.safetensors"


def size_bounds(manifest: Manifest) -> tuple[int, int]:
    """Work out how small and how large the file can be, in bytes, by the shapes of the manifest: exactly, but
    for its header.

    Of a task that is not built in only its package knows the shapes, and that may need torch: then the most
    is what any model has.

    Raises:
        RemoteError: no model is as the manifest says.
    """
    if manifest.run.task not in BUILT_IN:
        return 0, 4 * MAX_NUMEL + MAX_HEADER_BYTES
    try:
        specs = task_of(manifest).specs()
    except ConfigError as error:
        raise RemoteError("wrong-model", str(error)) from error
    constants = constants_of(manifest.model)
    content = 4 * sum(spec.numel for spec in specs) + sum(constant.nbytes for constant in constants)
    names = [spec.name for spec in specs] + [constant.name for constant in constants]
    header = HEADER_BYTES + sum(HEADER_BYTES_A_TENSOR + 6 * len(name) for name in names)
    return content, content + header


def given_arrays(file: Path, manifest: Manifest) -> Arrays:
    """Load parameters and constants of a file. Raises: StorageError (unreadable), ConfigError (others than
    the manifest names)."""
    arrays, _ = load_tensors(file, exact=True)
    _compare(file, checksum(arrays), manifest)
    return arrays


def kept_arrays(data_dir: Path, run: str, manifest: Manifest, set_aside: bool = True) -> Arrays | None:
    """Load what was kept; None: nothing that is sound, or the run draws its version 0 from the seed.

    `set_aside`: what is damaged becomes `*.corrupt`. What merely cannot be read now stays: it may be the last
    copy.
    """
    file = kept_initial(data_dir, run)
    if not manifest.run.initial or not file.exists():
        return None
    return _if_sound(file, lambda: given_arrays(file, manifest), set_aside)


def is_kept(data_dir: Path, run: str, manifest: Manifest) -> bool:
    """Tell whether all that was given is here and sound; what is damaged is set aside.

    One tensor at a time is in memory.
    """
    file = kept_initial(data_dir, run)
    if not manifest.run.initial:
        return True
    if not file.exists():
        return False

    def sound() -> bool:
        _compare(file, checksum_of(file), manifest)
        return True

    return _if_sound(file, sound, set_aside=True) is not None


def _compare(file: Path, found: str, manifest: Manifest) -> None:
    if found != manifest.run.initial:
        raise ConfigError(f"{file} has other parameters than run.initial names")


def _if_sound(file: Path, look: Callable[[], T], set_aside: bool) -> T | None:
    try:
        return look()
    except (StorageError, ConfigError) as error:
        logger.warning("the kept version 0 is of no use: %s", error)
        if set_aside and not isinstance(error.__cause__, OSError):
            try:
                Files().move(file, file.with_name(file.name + ".corrupt"))
            except StorageError as failed:
                logger.warning("%s", failed)
        return None


def constants_table(constants: Arrays) -> dict[str, list[str] | str]:
    """Write the keys of a `[model]` table that list these constants, with the checksum of their values."""
    if not constants:
        return {}
    listed = [text_of(Constant(name, array.shape, array.dtype.name)) for name, array in constants.items()]
    return {"constants": listed, "constants_sum": checksum(constants)}


def version_0_from(file: Path, offset: int, whole: bool = False) -> tuple[bytes, memoryview] | PullRefusal:
    """Give out the parameters in the file, or the `whole` file: a header, and all from that byte on.

    Or why nothing is given.
    """
    memory = mapped(file)
    if memory is None:
        return PullRefusal.NOT_HERE
    start = offset if whole else 8 + int.from_bytes(memory[:8], "little") + offset
    if start > len(memory):
        return PullRefusal.BEYOND_THE_END
    return wire.encode(wire.InitialHeader(offset)), memory[start:]


def first_not_finite(arrays: Mapping[str, np.ndarray]) -> str:
    """Find the first parameter that is not finite; return its name. Empty: all are finite."""
    return next((name for name, array in arrays.items() if not np.isfinite(array).all()), "")
