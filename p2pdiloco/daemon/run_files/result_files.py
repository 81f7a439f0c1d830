"""Result files that a node writes by itself: every so often, a bounded number of them kept."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from p2pdiloco.adapters.data_dir import Files, storage_error
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.config.values import expanded, parse_every
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.daemon.run_files.result import RunResult, label_of
from p2pdiloco.daemon.run_files.runs import Run
from p2pdiloco.daemon.run_files.tokenizers import tokenizer_on_disk
from p2pdiloco.errors import StorageError
from p2pdiloco.tasks.registry import task_of


class ResultPlan(Struct, frozen=True):
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


class ResultWriter:
    """Writer of result files."""

    def __init__(
        self,
        run: Run,
        compute: Compute,
        io: Executor,
        plan: ResultPlan,
        tokenizer: Path,
        tell: Callable[[str, bool], None],
    ) -> None:
        """`tokenizer`: the file of the run's tokenizer, if it has one. `tell(sentence, saved)` hears of every
        attempt; `io` runs what touches the disk: a thread of its own, since nothing else can wait for a whole
        model."""
        self._run = run
        self._tokenizer = tokenizer
        self._compute = compute
        self._io = io
        self._plan = plan
        self._tell = tell
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
