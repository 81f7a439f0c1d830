"""Runs: signed, opened and found, and what every node derives from a manifest.

`find_run` waits for the run that is meant, and gets its manifest and files from whoever has them; `open_run`
verifies it; `core_config` reads the protocol part off its manifest.

Version 0 of a run may start from given parameters. The constants of its model (`tasks.task.Constant`) come
behind the parameters, in the file and on the wire. The manifest has the checksum of both (`run.initial`). The
signer of the run has them beside run.toml. Every node keeps them in the run's folder and gives them to
whoever asks, as raw bytes that go on where a stream was cut. Only the checksum decides what is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.result_file import Arrays, checksum, save_tensors
from p2pdiloco.adapters.run_store import run_folder, signed_file
from p2pdiloco.config.manifest import (
    Manifest,
    SignedManifest,
    genesis_digest_of,
    run_id,
    save_signed,
    sign_manifest,
    verify,
)
from p2pdiloco.config.presets import warnings_about
from p2pdiloco.core.api.config import CoreConfig, Timing
from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain import FIRST_REACH
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import apart, free_memory_bytes
from p2pdiloco.daemon.run_files.known_runs import (
    ListedRun,
    PublishedRun,
    RunSearch,
    WaysIn,
    is_beginning,
    run_names,
    saved_run,
    saved_runs,
)
from p2pdiloco.daemon.run_files.shared_files import (
    PAUSE_S,
    check_given,
    checked_tokenizer,
    fetched_tokenizer,
    first_that_gives,
    given_arrays,
    initial_beside,
    keep_tokenizer,
    kept_arrays,
    kept_initial,
    tokenizer_beside,
)
from p2pdiloco.errors import ConfigError, RemoteError, TransportError, UserError, invariant
from p2pdiloco.identity import Identity
from p2pdiloco.learner.ranks import out_of_memory
from p2pdiloco.ports import Transport
from p2pdiloco.tasks.registry import load_manifest, numel_of, task_of
from p2pdiloco.tasks.task import constants_of
from p2pdiloco.tasks.tokens import read_tokenizer
from p2pdiloco.tensors.codecs import bytes_of, codec
from p2pdiloco.tensors.layout import FragmentLayout, plan_fragments, scatter
from p2pdiloco.tensors.sizes import (
    vault_bytes,
)
from p2pdiloco.tensors.vault import Vault

logger = logging.getLogger(__name__)


class Run(PublishedRun, frozen=True, kw_only=True):
    """Verified run and what follows from its manifest."""

    layouts: tuple[FragmentLayout, ...]
    tokenizer: Path | None = None
    """Tokenizer file of a run that is signed here, if it has one (`shared_files`)."""
    constants: Mapping[str, Tensor] = {}
    """Constants of its model (`tasks.task.Constant`)."""

    def doubts(self) -> list[str]:
        """List what its owner and members are warned of."""
        return warnings_about(self.manifest, sum(layout.numel for layout in self.layouts))


@contextlib.contextmanager
def room_for(manifest: Manifest) -> Iterator[None]:
    """Context in which a run's model is put into this machine's memory.

    Raises:
        UserError: it does not fit, or its task is not installed.
        ConfigError: as `tasks.registry.task_of`.
    """
    numel = numel_of(manifest)
    needed = vault_bytes(numel, manifest.codec.contribution)
    # Asked first: Linux gives memory that it does not have, and ends somebody when that is used.
    if needed > free_memory_bytes():
        raise _no_room(manifest, numel, needed)
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch has no class for it
        if not out_of_memory(error):
            raise
        raise _no_room(manifest, numel, needed) from error


def _no_room(manifest: Manifest, numel: int, needed: int) -> UserError:
    return UserError(
        f"the model of run {manifest.run.name} has {numel / 1e6:.3g} M parameters and needs at least "
        f"{needed / 2**30:.3g} GiB of memory, which this machine does not give",
        "close other programs, raise the container's or the shell's limit, or take a machine with more "
        "memory: `p2pdiloco run check` says how much a node needs",
    )


def fresh_vault(
    manifest: Manifest, given: Mapping[str, Tensor] | None = None
) -> tuple[tuple[FragmentLayout, ...], Vault]:
    """Make layouts and a vault that holds version 0; `given`: the parameters of a run that starts from some.

    Raises:
        UserError: the run's task is not installed, or the model does not fit into this machine's memory.
        ConfigError: `[model]` is wrong, or the model cannot be cut into that many fragments.
    """
    task = task_of(manifest)
    layouts = plan_fragments(task.specs(), manifest.sync.fragments)
    invariant(bool(manifest.run.initial) == (given is not None), "version 0 is given or drawn, not both")
    with room_for(manifest):
        vault = Vault.of(manifest, layouts)
        vault.load_initial(task.initial_parameters() if given is None else given)
    return layouts, vault


def genesis_digest(vault: Vault) -> bytes:
    """Compute what the manifest states of version 0, from a vault that holds it."""
    return genesis_digest_of(tuple(vault.state_digest_of(f.index, 0) for f in vault.layouts))


def sign_run(path: Path, owner: Identity, manifest: Manifest | None = None) -> tuple[Run, Vault]:
    """Read a run.toml, compute its version 0, and sign it as its owner. `manifest`: what it says, if it was
    read.

    Raises:
        ConfigError: the file is wrong.
        UserError: as `fresh_vault`.
    """
    manifest = manifest or load_manifest(path)
    try:
        with room_for(manifest):
            given = given_beside(path, manifest)
        layouts, vault = fresh_vault(manifest, given)
        tokenizer = tokenizer_beside(path) if checked_tokenizer(path, manifest) else None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.hint) from error
    signed = sign_manifest(manifest, genesis_digest(vault), owner, owner.peer_id)
    run = Run(
        id=run_id(signed),
        signed=signed,
        manifest=manifest,
        layouts=layouts,
        tokenizer=tokenizer,
        constants=constants_in(given, manifest),
    )
    return run, vault


def open_run(
    signed: SignedManifest,
    identity: Identity,
    expected_id: str = "",
    given: Mapping[str, Tensor] | None = None,
) -> tuple[Run, Vault]:
    """Verify a manifest from elsewhere: signature, run id, and that we compute the same version 0.

    `given`: see `fresh_vault`.

    Raises:
        RemoteError: the signature or the run id is wrong, or `[model]` is.
        UserError: as `fresh_vault`, or this machine computes another version 0.
    """
    manifest = verify(signed, identity.verify)
    identifier = run_id(signed)
    if expected_id and identifier != expected_id:
        raise RemoteError("manifest-run-id", f"asked for {expected_id[:12]}, got {identifier[:12]}")
    try:
        layouts, vault = fresh_vault(manifest, given)
    except ConfigError as error:
        raise RemoteError("manifest-invalid", str(error)) from error
    if genesis_digest(vault) != signed.genesis_digest:
        raise UserError(
            f"run {manifest.run.name}: this machine computes another version 0 than the run's owner",
            "update p2pdiloco on this machine; if it stays so, report it with `p2pdiloco --version`",
        )
    constants = constants_in(given, manifest)
    run = Run(id=identifier, signed=signed, manifest=manifest, layouts=layouts, constants=constants)
    return run, vault


def genesis_versions(run: Run, vault: Vault) -> tuple[SignedVersion, ...]:
    """Make version 0 of every fragment: equal on all peers, so it needs no signature."""
    return tuple(
        SignedVersion(
            VersionHeader(
                run=run.id,
                group=WHOLE_RUN,
                fragment=layout.index,
                number=0,
                parent=hashlib.sha256(run.id.encode()).digest(),
                term=0,
                syncer=run.id,
                tokens=0,
                state_digest=vault.state_digest_of(layout.index, 0),
                update_digest=bytes(32),
                update_bytes=0,
                codec=run.manifest.codec.update,
                contributors=(),
                groups=run.manifest.group.groups_at_start,
                norm=vault.first_length(layout.index),
                reach=vault.first_length(layout.index) * FIRST_REACH,
            ),
            b"",
        )
        for layout in run.layouts
    )


def core_config(run: Run, genesis: tuple[SignedVersion, ...], timing: Timing) -> CoreConfig:
    """Read the protocol part off a manifest."""
    manifest = run.manifest
    contribution, update = codec(manifest.codec.contribution), codec(manifest.codec.update)
    return CoreConfig(
        run=run.id,
        inner_steps=manifest.sync.inner_steps,
        delay_steps=manifest.sync.delay_steps,
        quorum=manifest.sync.quorum,
        grace_fraction=manifest.sync.grace_fraction,
        grace_cap_s=manifest.sync.grace_cap_s,
        group_size=manifest.group.size,
        term_versions=manifest.group.term_versions,
        log_versions=manifest.group.log_versions,
        max_base_age_versions=manifest.group.max_base_age_versions,
        tokens_per_step=manifest.inner.tokens_per_step,
        update_codec=manifest.codec.update,
        contribution_codec=manifest.codec.contribution,
        genesis_versions=genesis,
        max_payload_bytes=tuple(contribution.encoded_bytes(layout.numel) for layout in run.layouts),
        update_bytes=sum(update.encoded_bytes(layout.numel) for layout in run.layouts),
        largest_share=manifest.weight.largest_share,
        open_share=manifest.weight.open_share,
        most_units=manifest.weight.most_units,
        audited=not update.sparse,
        loss_audits=manifest.audit.loss_share,
        owner=run.signed.owner,
        recovery=run.manifest.admission.recovery,
        seats=manifest.admission.seats,
        admits=manifest.admission.mode != "open",
        timing=timing,
    )


def save_run(data_dir: Path, run: Run, vault: Vault) -> None:
    """Save the manifest beside the run's data, its version 0 where that was given, and its tokenizer.

    `vault` holds version 0.

    Raises: StorageError.
    """
    Files().make_folder(run_folder(data_dir, run.id))
    save_signed(signed_file(data_dir, run.id), run.signed)
    keep_given(data_dir, run.id, run.manifest, vault, run.constants)
    if run.tokenizer is not None:
        keep_tokenizer(data_dir, run.id, read_tokenizer(run.tokenizer))


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
    before = 4 * numel_of(manifest)
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
    """Checksum of tensors on the CPU, as `adapters.result_file.checksum`."""
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


SEARCH_PAUSE_S = 1.0
LIST_PATIENCE_S = 15.0
"""Time for which a list of runs that lacks the wanted one is asked for again before it is believed."""
OWN_PATIENCE_S = 3.0
"""Time for which a node that was a member before waits for somebody to list a run before it takes its own."""
SAY_AFTER_S = 3.0
Approve = Callable[[PublishedRun, bool], Awaitable[None]]
"""Look at a run before anything is made of it; True: this data folder has not been in it."""


async def find_run(
    transport: Transport,
    identity: Identity,
    wanted: str,
    data_dir: Path,
    say: Callable[[str], None],
    hosts: Sequence[str] = (),
    approve: Approve | None = None,
    begins: bool = False,
) -> tuple[Run, Vault]:
    """Wait for the wanted run to be listed, and verify its manifest, from our folder or from whoever lists
    it.

    Where nobody lists any run, the one that we were a member of before will do. `hosts`: the peers that we
    were told to join through (`choose_run`). `approve` looks at a run before anything is made of it.
    `begins`: we start a run, so what we were a member of before is not the one that is meant.

    Raises:
        UserError: other runs are listed, but not this one; or several fit; or the run of the wanted id is not
            valid; or as `approve` and `open_run`.
    """
    return await _Finding(transport, identity, wanted, data_dir, say, hosts, approve, begins).run()


@dataclass
class _Finding:
    _transport: Transport
    _identity: Identity
    _wanted: str
    _data_dir: Path
    _say: Callable[[str], None]
    _hosts: Sequence[str]
    _approve: Approve | None
    _begins: bool

    def __post_init__(self) -> None:
        self._ours = saved_runs(self._data_dir)
        # Folders of earlier releases do not say which of their runs was the last.
        self._before = WaysIn.load(self._data_dir).runs or (list(self._ours) if len(self._ours) == 1 else [])
        before = [] if self._begins else self._before
        self._search = RunSearch(self._transport, self._wanted, self._hosts, before)

    async def run(self) -> tuple[Run, Vault]:
        waited_s, said = 0.0, False
        while True:
            chosen = await self._search.look()
            if not self._search.listed and waited_s >= OWN_PATIENCE_S:
                chosen = chosen or self._our_own()
            found = await self._opened(chosen) if chosen is not None else None
            if found is not None:
                return found
            unknown = chosen is None or not chosen.peers
            if unknown and self._search.listed and waited_s >= LIST_PATIENCE_S:
                known = self._search.known
                raise UserError(f'the peers know no run "{self._wanted}"', f"they know: {known}")
            if unknown and not said and waited_s >= SAY_AFTER_S:
                said = True
                self._say(self._waiting())
            await asyncio.sleep(SEARCH_PAUSE_S)
            waited_s += SEARCH_PAUSE_S

    def _our_own(self) -> ListedRun | None:
        ours = saved_run(self._ours, self._wanted, self._before)
        return ListedRun(ours.id, [ours.name]) if ours is not None else None

    def _waiting(self) -> str:
        if not self._search.listed:
            return "no run is listed by these peers yet: waiting for one"
        known = run_names(self._search.listed.values())
        return f'no run "{self._wanted}" is listed by these peers yet: waiting for it; they know: {known}'

    async def _opened(self, chosen: ListedRun) -> tuple[Run, Vault] | None:
        """Get all of a run. None: it is not to be had, or not acceptable, which is said."""
        try:
            found = await self._manifest(chosen)
            if found is None:
                return None
            run = await self._whole(chosen, found)
        except (RemoteError, ConfigError) as error:
            # A wrong `[model]` shows when something is made of it.
            wrong = error if isinstance(error, RemoteError) else RemoteError("manifest-invalid", str(error))
            self._refuse(chosen, wrong)
        except TransportError as error:
            self._say(f"nobody gives all of {chosen.name} yet: {error}")
        else:
            refused = self._search.refused_words()
            if refused:
                self._say(f"refused on the way: {refused}")
            return run
        return None

    async def _manifest(self, chosen: ListedRun) -> PublishedRun | None:
        saved = self._ours.get(chosen.run)
        if saved is None:
            return await self._search.published(chosen)
        self._search.check_name(chosen, verify(saved.signed, self._identity.verify))
        return saved

    async def _whole(self, chosen: ListedRun, published: PublishedRun) -> tuple[Run, Vault]:
        run, manifest, peers = published.id, published.manifest, self._search.givers(chosen)
        if self._approve is not None:
            await self._approve(published, run not in self._ours and run not in self._before)
        with room_for(manifest):
            given = await given_parameters(self._transport, self._data_dir, run, manifest, peers)
        await fetched_tokenizer(self._transport, self._data_dir, run, manifest, peers)
        return await apart(partial(open_run, published.signed, self._identity, chosen.run, given))

    def _refuse(self, chosen: ListedRun, error: RemoteError) -> None:
        words = f"the manifest of {chosen.name} is refused: {error}"
        if self._ours.pop(chosen.run, None) is not None:  # peers may have a sound one
            self._say(words)
            return
        if is_beginning(self._wanted, chosen.run):  # nobody has another one of this id
            raise UserError(words, "its owner has to mend it, which makes another run, of another id")
        self._search.give_up(chosen, error)
        self._say(words)
