"""State of a run on a node's disk: restored at a start, saved while it runs, and the run's result.

`restore` takes each fragment's newest sound checkpoint and what follows it; `Checkpoints` writes them;
`Resume` says which saved displacements of the learner may be taken up again. `RunResult` has the global
parameters, out of a vault, a data folder, a result file or (`cli.live_result`) a live run; `ResultWriter`
saves it by itself, every so often.

Listed in docs/reference/disk.md, section 3.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from p2pdiloco.adapters.data_dir import DataDir, DataDirInUse, Files, storage_error
from p2pdiloco.adapters.result_file import Label, ResultFile, load_result_file, save_result_file
from p2pdiloco.adapters.run_store import RunStore, SavedFragment
from p2pdiloco.config.manifest import Dtype, Manifest, SignedManifest, run_id, verify
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.config.values import expanded, parse_every
from p2pdiloco.core.api.config import CoreConfig, Restored, RestoredFragment, Timing
from p2pdiloco.core.api.types import Watermark
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain import Chain, numbers_can_be
from p2pdiloco.core.node import Core
from p2pdiloco.core.pending import Unmerged
from p2pdiloco.daemon.diary import Diary
from p2pdiloco.daemon.payloads import Compute, UpdateLog
from p2pdiloco.daemon.run_files.known_runs import WaysIn, run_names, saved_run, saved_runs
from p2pdiloco.daemon.run_files.run import Run, core_config, genesis_versions, given_on_disk, open_run
from p2pdiloco.daemon.run_files.shared_files import (
    kept_tokenizer,
    save_with_result,
    tokenizer_on_disk,
    tokenizers_of_result,
)
from p2pdiloco.daemon.wire import StateHeader
from p2pdiloco.errors import ConfigError, RemoteError, StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.identity import verify as verify_signature
from p2pdiloco.learner.channel import RestoreMode
from p2pdiloco.tasks.description import instance_of, listed
from p2pdiloco.tasks.initial import named_parameters, rounded
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import Task, constants_of
from p2pdiloco.tensors.layout import scatter
from p2pdiloco.tensors.vault import Vault
from p2pdiloco.util import Frozen, read_note

logger = logging.getLogger(__name__)


class Found(Frozen):
    """State restored for the core, and the version that the vault holds of every fragment."""

    restored: Restored
    problems: list[str]
    """Sentences about what was damaged and set aside."""
    versions: dict[int, tuple[SignedVersion, tuple[Watermark, ...]]]


def restore(config: CoreConfig, store: RunStore, vault: Vault, updates: UpdateLog) -> Found:
    """Load everything that is sound into the vault and the update log. Damage is set aside and logged.

    Raises:
        StorageError: a file cannot be read at all.
    """
    fragments, versions = [], {}
    for genesis in config.genesis_versions:
        fragment = genesis.header.fragment
        chain = _load(config, store, vault, updates, genesis)
        marks = chain.marks.table
        fragments.append(RestoredFragment(log=chain.logged_all(), watermarks=marks))
        versions[fragment] = (chain.signed, marks)
    proofs = store.proofs()
    problems = store.take_problems()
    for problem in problems:
        logger.warning("%s", problem)
    saved = any(f.log[-1].header.number > 0 for f in fragments)
    votes = tuple(store.votes().values())
    restored = Restored(fragments=tuple(fragments), votes=votes, proofs=proofs, saved=saved)
    return Found(restored, problems, versions)


def _load(
    config: CoreConfig, store: RunStore, vault: Vault, updates: UpdateLog, genesis: SignedVersion
) -> Chain:
    fragment = genesis.header.fragment
    chain = Chain((genesis,), (), config.log_versions, config.seats)
    checkpoint = store.load_checkpoint(fragment)
    while checkpoint is not None and (number := checkpoint.version.header.number) > 0:
        fault = _why_not(config, checkpoint, vault)
        if fault is None:
            vault.commit(fragment, number)
            chain = Chain((checkpoint.version,), checkpoint.watermarks, config.log_versions)
            break
        vault.drop_spare(fragment)
        store.distrust_checkpoint(fragment, number, fault)
        checkpoint = store.load_checkpoint(fragment)
    for version, payload in store.load_updates(fragment, chain.head.number, chain.head.digest):
        if not chain.is_child(version.header):
            break
        try:
            header = version.header
            digest = vault.apply(fragment, header.number, payload, header.longest_steps(), header.norm)
        except RemoteError as error:
            digest = str(error).encode()
        if digest != header.state_digest or header.table != chain.marks_after(header).digest:
            vault.drop_spare(fragment)
            logger.warning(
                "fragment %(fragment)d: the saved update %(number)d is not sound",
                {"fragment": fragment, "number": version.header.number},
            )
            break
        vault.commit(fragment, version.header.number)
        chain.extend(version)
        updates.add(version, payload)
    return chain


def _why_not(config: CoreConfig, saved: SavedFragment, vault: Vault) -> str | None:
    """Load a checkpoint into the spare, or say why it is no state to start from: then an older one is, or
    version 0, and the others have newer ones."""
    header = saved.version.header
    if not numbers_can_be(header, saved.watermarks, config):
        return "its numbers are none that a run has"
    try:
        theta, momentum = saved.theta.data.cast("B"), saved.momentum.data.cast("B")
        digest = vault.load_spare(header.fragment, header.number, theta, momentum)
    except RemoteError as error:
        return str(error)
    return None if digest == header.state_digest else "its parameters are not those of its version"


@dataclass
class Checkpoints:
    """Writer of regular checkpoints of all fragments, from which a node starts again."""

    _compute: Compute
    _store: RunStore
    _io: Executor
    """Thread for the disk."""
    _log_versions: int
    """Number of versions whose updates are kept."""
    _diary: Diary

    async def save(self) -> None:
        """Write every fragment's committed state; a full disk costs this checkpoint only."""
        loop, diary = asyncio.get_running_loop(), self._diary
        for layout in self._compute.vault.layouts:
            header, pin = await self._compute.run(self._compute.pin, layout.index)
            try:
                await loop.run_in_executor(self._io, self._save, header, pin.buffers)
            except StorageError as error:
                logger.error("%s", error)
                diary.write("checkpoint", f"not saved: {error}")
                return
            finally:
                pin.release()
        for problem in self._store.take_problems():
            logger.warning("%s", problem)
            diary.write("checkpoint", problem)
        diary.write("checkpoint", "all fragments are saved")

    def _save(self, header: StateHeader, buffers: list[memoryview]) -> None:
        theta, momentum = buffers
        number = header.version.header.number
        fragment = header.version.header.fragment
        try:
            self._store.save_checkpoint(header.version, header.watermarks, theta, momentum)
        except StorageError:
            # Updates replay from the last checkpoint, but must not fill what is left of the disk meanwhile.
            self._store.prune_updates(fragment, number - 4 * self._log_versions)
            raise
        self._store.prune_updates(fragment, number - self._log_versions)


FILE = "resume.json"
Note = dict[int, Unmerged]
"""State of our contributions, by fragment."""
_decoder = msgspec.json.Decoder(Note)


def write_resume(folder: Path, left: Note) -> None:
    """Note the state of our contributions at an orderly end; a missing note only costs the displacements."""
    try:
        Files().save(folder / FILE, [msgspec.json.encode(left)], durable=False)
    except StorageError as error:
        logger.error("the note for the next start is not saved, unmerged inner steps will be lost: %s", error)


class Resume:
    """Note of an orderly end: displacements that the last life left, until something is made of them.

    A displacement that was saved while contributions went on (a regular checkpoint) may be in the chain by
    now, as part of a later contribution. Only what an orderly end wrote is beyond that doubt
    (`core.pending.Unmerged`).

    Where a learner died before it contributed or saved (its first step may have been too large), the next one
    takes up the same.
    """

    def __init__(self, folder: Path, core: Core) -> None:
        self._path = folder / FILE
        self._core = core

    def modes(self) -> tuple[RestoreMode, ...]:
        """Decide per fragment what a new learner may take from the saved state, as the chain is now."""
        left = self._read()
        modes = tuple(
            f.own.take_up(left[f.index]) if f.index in left else "none" for f in self._core.fragments
        )
        if left:
            whole, rest = modes.count("all"), modes.count("rest")
            logger.info(
                "what the last life left unmerged is taken up: all of it in %(whole)d of %(fragments)d "
                "fragments; in %(rest)d only what came after a contribution that may be merged already",
                {"whole": whole, "fragments": len(modes), "rest": rest},
            )
        return modes

    async def use_up(self) -> None:
        """Remove the note: what is left may be contributed, or saved in another state, from now on. No life
        may take it up again.

        Raises:
            UserError: the note stays, which could have inner steps merged twice.
        """
        try:
            await asyncio.to_thread(self._remove)
        except OSError as error:
            raise UserError(f"{self._path} cannot be removed: {error}", "see whose the folder is") from error

    def _remove(self) -> None:
        files = Files()
        files.remove(self._path)
        files.sync_folder(self._path.parent)

    def _read(self) -> Note:
        return read_note(self._path, _decoder.decode, logger.warning) or {}


class RunResult(Frozen):
    """Result of a run: its global parameters, of every fragment some version.

    Export, generation, evaluation and result files read it.
    """

    signed: SignedManifest
    manifest: Manifest
    labels: tuple[Label, ...]
    """Labels of the versions, by fragment."""
    parameters: dict[str, Tensor]
    """Parameters by name, fp32, as of `Vault.result`."""
    tokenizer: bytes | None = None
    """Content of the tokenizer file that the run names, if it names one and it is here."""
    constants: Mapping[str, Tensor] = {}
    """Constants of the model (`tasks.task.Constant`)."""

    @property
    def run(self) -> str:
        """Run id."""
        return run_id(self.signed)

    @property
    def merges(self) -> int:
        """Number of versions that were made of all fragments together."""
        return sum(label.number for label in self.labels)

    @property
    def tokens(self) -> int:
        """Tokens merged into the fragment that has most."""
        return max(label.tokens for label in self.labels)

    def task(self) -> Task:
        """Make the run's task. Raises: UserError (not installed)."""
        return task_of(self.manifest, self.tokenizer)

    def model(self, device: torch.device) -> nn.Module:
        """Make the task's model with these parameters."""
        model = instance_of(self.task(), self.constants)
        found = named_parameters(model)
        with torch.no_grad():
            for name, value in self.parameters.items():
                found[name].copy_(value)
        return model.to(device)

    def save(self, path: Path, dtype: Dtype = "fp32") -> Path | None:
        """Save as a result file, its numbers rounded to this type; and the tokenizer beside it, whose path is
        returned if it was not there.

        Raises:
            StorageError: it cannot be written.
            UserError: a number is too large for the type.
        """
        arrays = {name: rounded(name, value, dtype).numpy() for name, value in self.parameters.items()}
        tokenizer = save_with_result(path, self.manifest, self.tokenizer)
        dtypes = dict.fromkeys(arrays, dtype)
        arrays |= {name: value.numpy() for name, value in self.constants.items()}
        save_result_file(path, ResultFile(self.signed, self.labels, arrays), dtypes)
        return tokenizer

    def words(self) -> str:
        """Word which result it is, for people."""
        numbers = [label.number for label in self.labels]
        versions = f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else f"{numbers[0]}"
        return f"run {self.manifest.run.name} ({self.run[:12]}), versions {versions}, {self.tokens} tokens"


def label_of(version: SignedVersion) -> Label:
    """Make the label by which a result file names a version."""
    return Label(version.header.number, version.header.digest().hex(), version.header.tokens)


def result_of(run: Run, vault: Vault, versions: Sequence[SignedVersion]) -> RunResult:
    """Copy the result that the vault has committed; `versions`: which ones, by fragment."""
    specs = task_of(run.manifest).specs()
    parameters = {spec.name: torch.zeros(spec.shape) for spec in specs}
    for layout in run.layouts:
        scatter(vault.result(layout.index), layout, parameters)
    labels = tuple(map(label_of, versions))
    return RunResult(run.signed, run.manifest, labels, parameters, constants=run.constants)


def load_result(path: Path) -> RunResult:
    """Load a result from a file; checksum, signature and the model's shape are compared.

    Raises:
        StorageError: there is none, or it is damaged.
        UserError: the run's task is not installed.
    """
    found = load_result_file(path)
    try:
        manifest = verify(found.signed, verify_signature)
    except RemoteError as error:
        raise StorageError(f"{path} is damaged: its manifest is not valid ({error})") from error
    tensors = {name: torch.from_numpy(array.copy()) for name, array in found.parameters.items()}
    constants = {name: tensors.pop(name) for c in constants_of(manifest.model) if (name := c.name) in tensors}
    expected = {spec.name: (spec.shape, torch.float32) for spec in task_of(manifest).specs()}
    if {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()} != expected or listed(
        constants
    ) != constants_of(manifest.model):
        raise StorageError(f"{path} is damaged: it has other parameters than its manifest describes")
    if len(found.labels) != manifest.sync.fragments:
        raise StorageError(f"{path} is damaged: it has other fragments than its manifest describes")
    places = tokenizers_of_result(path, manifest)
    tokenizer = next((content for place in places if (content := tokenizer_on_disk(place, manifest))), None)
    return RunResult(found.signed, manifest, found.labels, tensors, tokenizer, constants)


def result_on_disk(data_dir: Path, wanted: str) -> RunResult:
    """Load the result from the folder of a node that does not run now: checkpoints and the updates after
    them.

    Raises:
        StorageError: no such folder, a node runs in it, or it cannot be read.
        UserError: it has no such run, or several; or the run's task is not installed.
    """
    with _locked(data_dir):
        saved = saved_runs(data_dir)
        chosen = saved_run(saved, wanted, WaysIn.load(data_dir).runs)
        if chosen is None:
            if not saved:
                raise UserError(f"{data_dir} has no run", "give the --data-dir of a node that was in one")
            raise UserError(f'{data_dir} has no run "{wanted}"', f"it has {run_names(saved.values())}")
        signed = chosen.signed
        try:
            manifest = verify(signed, verify_signature)
            given = given_on_disk(data_dir, chosen.id, manifest, set_aside=False)
            if manifest.run.initial and given is None:
                raise StorageError(f"version 0 of {chosen.name} is not in {data_dir}", "start its node once")
            run, vault = open_run(signed, Identity.generate(), given=given)
        except (RemoteError, ConfigError) as error:
            raise StorageError(
                f"the manifest of {chosen.name} in {data_dir} is not valid: {error}"
            ) from error
        config = core_config(run, genesis_versions(run, vault), Timing())
        found = restore(config, RunStore(data_dir, run.id), vault, UpdateLog(1))
        result = result_of(run, vault, [found.versions[layout.index][0] for layout in run.layouts])
        tokenizer = tokenizer_on_disk(kept_tokenizer(data_dir, run.id), manifest)
        return msgspec.structs.replace(result, tokenizer=tokenizer)


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    try:
        with DataDir(data_dir, create=False):
            yield
    except DataDirInUse as error:
        raise StorageError(str(error), "ask the running node instead: --join ADDRESS") from error


class ResultPlan(Frozen):
    """Plan for result files: where, how often and how many."""

    folder: Path
    every_s: float
    """Time between two result files; 0: they are counted by merges."""
    every_merges: int
    keep: int

    @classmethod
    def of(cls, settings: NodeSettings) -> ResultPlan | None:
        """Read the plan off the flags; None: nothing is to be written."""
        if settings.result_dir is None:
            return None
        every_s, merges = parse_every(settings.result_every, "--result-every")
        return cls(expanded(settings.result_dir, "--result-dir"), every_s, merges, settings.result_keep)


@dataclass
class ResultWriter:
    """Writer of the result files that a node saves by itself: every so often, a bounded number of them
    kept."""

    _run: Run
    _compute: Compute
    _io: Executor
    """Thread of its own for what touches the disk, since nothing else can wait for a whole model."""
    _plan: ResultPlan
    _tokenizer: Path
    """File of the run's tokenizer, if it has one."""
    _tell: Callable[[str, bool], None]
    """Function that hears of every attempt: (sentence, saved)."""

    def __post_init__(self) -> None:
        self._saved_at = self._tried_at = self._compute.vault.merges

    async def watch(self, committed: asyncio.Event) -> None:
        """Save, until cancelled, when it is time and enough was merged since the last one. `committed` is set
        with every version. What could not be written is tried again the next time."""
        while True:
            await asyncio.sleep(self._plan.every_s)
            while not self._due:
                committed.clear()
                await committed.wait()
            await self.save()

    @property
    def _due(self) -> bool:
        merges, every = self._compute.vault.merges, self._plan.every_merges
        return merges >= self._tried_at + every if every else merges > self._saved_at

    async def save_last(self) -> None:
        """Write what no result file has yet: nothing may come after it."""
        if self._compute.vault.merges > self._saved_at:
            await self.save()

    async def save(self) -> None:
        """Write one result file, and delete the oldest beyond the bound. A full disk costs no more than
        that."""
        parameters = {spec.name: torch.zeros(spec.shape) for spec in task_of(self._run.manifest).specs()}
        copied = [
            await self._compute.run(self._compute.copy_out, layout, parameters)
            for layout in self._run.layouts
        ]
        run, labels = self._run, tuple(map(label_of, copied))
        found = RunResult(run.signed, run.manifest, labels, parameters, constants=run.constants)
        self._tried_at = found.merges
        name = f"{self._run.name}-{self._run.id[:8]}-{found.merges:09d}.safetensors"
        try:
            await asyncio.get_running_loop().run_in_executor(self._io, self._write, found, name)
        except StorageError as error:
            self._tell(f"result not saved: {error}", False)
        else:
            self._saved_at = found.merges
            self._tell(f"result saved as {name}", True)

    def _write(self, result: RunResult, name: str) -> None:
        files, folder = Files(), self._plan.folder
        files.make_folder(folder)
        content = tokenizer_on_disk(self._tokenizer, result.manifest)
        beside = msgspec.structs.replace(result, tokenizer=content).save(folder / name)
        try:  # for whom the folder is for
            for path in filter(None, (folder / name, beside)):
                path.chmod(folder.stat().st_mode & 0o644)
        except OSError as error:
            raise storage_error(error, "save", folder / name) from error
        ours = re.compile(re.escape(f"{self._run.name}-{self._run.id[:8]}") + r"-\d{9,19}\.safetensors")
        others = [
            path for path in files.list_folder(folder) if ours.fullmatch(path.name) and path.name != name
        ]
        # Never the one just written, even where a state that was lost again had more merges.
        for path in sorted(others, key=_merges_of)[: max(0, len(others) + 1 - self._plan.keep)]:
            files.delete(path)


def _merges_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
