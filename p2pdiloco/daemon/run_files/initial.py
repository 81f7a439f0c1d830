"""Version 0 of a run that starts from given parameters: read, checked and fetched (with torch).

The constants of its model (`tasks.constants`) come behind the parameters, in the file and on the wire. The
manifest has the checksum of both (`run.initial`). The signer of the run has them beside run.toml.
Every node keeps them in the run's folder and gives them to whoever asks, as raw bytes that go on where a
stream was cut. Only the checksum decides what is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.result_file import Arrays, checksum, save_tensors
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.run_files.giving import PAUSE_S, check_given, first_that_gives
from p2pdiloco.daemon.run_files.initial_file import given_arrays, initial_beside, kept_arrays, kept_initial
from p2pdiloco.errors import ConfigError, RemoteError
from p2pdiloco.ports import Transport
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import constants_of
from p2pdiloco.tensors.codecs import bytes_of
from p2pdiloco.tensors.layout import scatter
from p2pdiloco.tensors.vault import Vault

logger = logging.getLogger(__name__)


def given_beside(path: Path, manifest: Manifest) -> dict[str, Tensor] | None:
    """Load the parameters that a run.toml names; None: version 0 is drawn from the seed.

    Raises:
        ConfigError: they are not there, or are others.
    """
    if not manifest.run.initial:
        return None
    file = initial_beside(path)
    if not file.exists():
        raise ConfigError(
            f"{path}: run.initial names parameters, but there is no {file.name} beside it",
            "p2pdiloco run new NAME --from MODEL writes both",
        )
    return _tensors(file, given_arrays(file, manifest), manifest)


def _tensors(file: Path, arrays: Arrays, manifest: Manifest) -> dict[str, Tensor]:
    """Make tensors of arrays. Raises: ConfigError (they are not those of `[model]`)."""
    wanted = {name: (value.shape, value.dtype) for name, value in _empty(manifest).items()}
    found = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    if wanted != {name: (value.shape, value.dtype) for name, value in found.items()}:
        raise ConfigError(f"{file} has other parameters than [model] of run {manifest.run.name} describes")
    return {name: found[name] for name in wanted}


def _empty(manifest: Manifest) -> dict[str, Tensor]:
    """Make room for version 0 and for the model's constants, in the order in which they travel."""
    parameters = {spec.name: torch.zeros(spec.shape) for spec in task_of(manifest).specs()}
    return parameters | _empty_constants(manifest)


def _empty_constants(manifest: Manifest) -> dict[str, Tensor]:
    return {
        constant.name: torch.zeros(constant.shape, dtype=getattr(torch, constant.kind))
        for constant in constants_of(manifest.model)
    }


def constants_in(given: Mapping[str, Tensor] | None, manifest: Manifest) -> dict[str, Tensor]:
    """Pick the constants out of what was given."""
    return {constant.name: (given or {})[constant.name] for constant in constants_of(manifest.model)}


def keep_given(
    data_dir: Path, run: str, manifest: Manifest, vault: Vault, constants: Mapping[str, Tensor]
) -> None:
    """Keep the given parameters and constants for the next start and for others; `vault` holds version 0.

    Raises: StorageError.
    """
    file = kept_initial(data_dir, run)
    if not manifest.run.initial or file.exists():
        return
    parameters = {spec.name: torch.zeros(spec.shape) for spec in task_of(manifest).specs()}
    for layout in vault.layouts:
        scatter(vault.theta(layout.index), layout, parameters)
    Files().make_folder(file.parent)
    save_tensors(file, {name: value.numpy() for name, value in (parameters | dict(constants)).items()}, {})


def given_on_disk(
    data_dir: Path, run: str, manifest: Manifest, set_aside: bool = True
) -> dict[str, Tensor] | None:
    """Load what was kept, as `kept_arrays` finds it.

    Raises:
        ConfigError: `[model]` is wrong, or describes other parameters.
    """
    arrays = kept_arrays(data_dir, run, manifest, set_aside)
    return None if arrays is None else _tensors(kept_initial(data_dir, run), arrays, manifest)


async def given_parameters(
    transport: Transport, data_dir: Path | None, run: str, manifest: Manifest, peers: Sequence[str]
) -> dict[str, Tensor] | None:
    """Get the given parameters from our folder, else from one of these peers after the other.

    None: version 0 is drawn from the seed.

    Raises:
        TransportError: nobody gives them.
        ConfigError: as `given_on_disk`.
    """
    if not manifest.run.initial:
        return None
    here = given_on_disk(data_dir, run, manifest) if data_dir is not None else None
    if here is not None:
        return here
    return await _pulled(transport, run, peers, _empty(manifest), 0, manifest.run.initial)


async def given_constants(
    transport: Transport, run: str, manifest: Manifest, peers: Sequence[str]
) -> dict[str, Tensor]:
    """Get the constants of a run's model alone, from one of these peers after the other.

    Raises:
        TransportError: nobody gives them.
        ConfigError: `[model]` is wrong.
    """
    empty = _empty_constants(manifest)
    if not empty:
        return {}
    before = 4 * sum(spec.numel for spec in task_of(manifest).specs())
    return await _pulled(transport, run, peers, empty, before, str(manifest.model["constants_sum"]))


async def _pulled(
    transport: Transport, run: str, peers: Sequence[str], room: dict[str, Tensor], start: int, expected: str
) -> dict[str, Tensor]:
    """Pull what goes into this room: the bytes of version 0 from `start` on, with this checksum."""
    sink = _Sink([bytes_of(value) for value in room.values()], start)

    async def ask(peer: str) -> dict[str, Tensor]:
        """Pull the rest from this peer; where several gave and some of it is wrong, all of it."""
        while True:
            alone = sink.have == 0
            request = wire.encode(wire.PullInitial(run, start + sink.have))
            check_given(await transport.pull_into(peer, request, sink, PAUSE_S))
            if sink.have == sink.size and checksum_of_tensors(room) == expected:
                return room
            sink.have = 0
            if alone:
                raise RemoteError("wrong-digest")

    return await first_that_gives("version 0", peers, ask)


def checksum_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Checksum of tensors on the CPU, as `adapters.disk.result_file.checksum`."""
    return checksum({name: value.numpy() for name, value in tensors.items()})


class _Sink:
    """Sink of the bytes of tensors, in order; those before `start` are not asked for."""

    def __init__(self, buffers: Sequence[memoryview], start: int) -> None:
        self._buffers = buffers
        self._start = start
        self.size = sum(buffer.nbytes for buffer in buffers)
        self.have = 0
        self._began_at = 0

    def begin(self, header: bytes, payload_bytes: int) -> None:
        offset = wire.decode(header, wire.InitialHeader).offset - self._start
        if offset != self.have or offset + payload_bytes != self.size:
            raise RemoteError("wrong-size", "version 0")
        self._began_at = offset

    def write(self, offset: int, chunk: memoryview) -> None:
        at = self._began_at + offset
        self.have = at + len(chunk)
        for buffer in self._buffers:
            if at < buffer.nbytes and chunk.nbytes:
                part = chunk[: buffer.nbytes - at]
                buffer[at : at + part.nbytes] = part
                chunk, at = chunk[part.nbytes :], at + part.nbytes
            at = max(0, at - buffer.nbytes)
