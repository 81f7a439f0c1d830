"""Version 0 of a run that starts from given parameters: read, checked and fetched (with torch).

The manifest has the parameters' checksum (`run.initial`). Whoever signs the run has them beside run.toml.
Every node keeps them in the run's folder and gives them to whoever asks, as raw bytes that go on where a
stream was cut. Only the checksum decides what is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from p2pdiloco.adapters.disk.files import Files
from p2pdiloco.adapters.disk.result_file import Arrays, checksum, save_tensors
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.run_files.giving import PAUSE_S, check_given, first_that_gives
from p2pdiloco.daemon.run_files.initial_file import given_arrays, initial_beside, kept_arrays, kept_initial
from p2pdiloco.errors import ConfigError, RemoteError
from p2pdiloco.ports import Transport
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.digest import bytes_of
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
    specs = task_of(manifest).specs()
    if {spec.name: spec.shape for spec in specs} != {name: array.shape for name, array in arrays.items()}:
        raise ConfigError(f"{file} has other parameters than [model] of run {manifest.run.name} describes")
    return {spec.name: torch.from_numpy(arrays[spec.name].copy()) for spec in specs}


def keep_given(data_dir: Path, run: str, manifest: Manifest, vault: Vault) -> None:
    """Keep the given parameters for the next start and for others; `vault` holds version 0.

    Raises: StorageError.
    """
    file = kept_initial(data_dir, run)
    if not manifest.run.initial or file.exists():
        return
    parameters = {spec.name: torch.zeros(spec.shape) for spec in task_of(manifest).specs()}
    for layout in vault.layouts:
        scatter(vault.theta(layout.index), layout, parameters)
    Files().make_folder(file.parent)
    save_tensors(file, {name: value.numpy() for name, value in parameters.items()}, {})


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
    specs = task_of(manifest).specs()
    parameters = {spec.name: torch.zeros(spec.shape) for spec in specs}
    sink = _Sink([bytes_of(parameters[spec.name]) for spec in specs])

    async def ask(peer: str) -> dict[str, Tensor]:
        """Pull the rest from this peer; where several gave and some of it is wrong, all of it."""
        while True:
            alone = sink.have == 0
            request = wire.encode(wire.PullInitial(run, sink.have))
            check_given(await transport.pull_into(peer, request, sink, PAUSE_S))
            if sink.have == sink.size and _sum(parameters) == manifest.run.initial:
                return parameters
            sink.have = 0
            if alone:
                raise RemoteError("wrong-digest")

    return await first_that_gives("version 0", peers, ask)


def _sum(parameters: Mapping[str, Tensor]) -> str:
    return checksum({name: value.numpy() for name, value in parameters.items()})


class _Sink:
    """Sink of the bytes of all parameters, in order."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self.size = sum(buffer.nbytes for buffer in buffers)
        self.have = 0
        self._began_at = 0

    def begin(self, header: bytes, payload_bytes: int) -> None:
        offset = wire.decode(header, wire.InitialHeader).offset
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
