"""Approval of a run before anything is made of it: what it takes of this machine is shown, compared, and, of
whoever sits at a terminal, asked for once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from p2pdiloco.config.manifest import BYTES, DataSection, Manifest
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.config.values import parse_size, size_text
from p2pdiloco.daemon.admission.own import check_owner
from p2pdiloco.daemon.display.wording import count
from p2pdiloco.daemon.machine import free_disk_bytes, free_memory_bytes
from p2pdiloco.daemon.payloads.memory import check_budget
from p2pdiloco.daemon.run_files.footprint import DAEMON_BYTES, LEARNER_BYTES, Footprint, footprint_of
from p2pdiloco.daemon.run_files.joined import remember_joined
from p2pdiloco.daemon.run_files.listing import PublishedRun
from p2pdiloco.errors import UserError, clean
from p2pdiloco.learner.ranks import accelerators

Ask = Callable[[str], Awaitable[bool]]


class Approval:
    """Approval of runs by the settings of one node, its machine, and whoever sits at its terminal."""

    def __init__(
        self, settings: NodeSettings, say: Callable[[str, Mapping[str, object]], None], ask: Ask | None
    ) -> None:
        """`ask`: asks a person a question; None: there is nobody to ask."""
        self._settings, self._say = settings, say
        self._ask = None if settings.yes else ask
        self._learner_in_memory = _learner_in_memory(settings)

    async def approve(self, run: PublishedRun, is_new: bool) -> None:
        """Show what a run takes, and refuse it or remember it as joined. `is_new`: this data folder has not
        been in it.

        Raises:
            UserError: it takes more than is here or permitted, or is of another owner than the link to it
                says, or the person says no.
            ConfigError: as `footprint_of`.
            StorageError: it cannot be remembered.
        """
        check_owner(self._settings, run)
        takes = footprint_of(run.manifest)
        memory, disk = free_memory_bytes(), free_disk_bytes(self._settings.data_dir)
        figures = {
            "memory_bytes": self._memory_bytes(takes),
            "memory_free_bytes": memory,
            "disk_bytes": takes.disk_bytes,
            "disk_free_bytes": disk,
            "download_bytes": takes.download_bytes,
            "parameters": takes.parameters,
            "run_name": run.name,
            "run": run.id,
            "owner": run.signed.owner,
        }
        first, *others = self._lines(run, takes, memory, disk)
        self._say(first, figures)
        for line in others:
            self._say(line, {})
        self._check_limits(run.manifest, takes)
        # Later, what is not free may be its own files, or memory of an earlier life that is ending.
        if is_new:
            self._check_machine(run.manifest, takes, memory, disk)
        if is_new and self._ask is not None and not await self._ask(f"join run {run.title}?"):
            raise UserError(f"run {run.name} is not joined", "--yes joins without a question")
        await asyncio.to_thread(remember_joined, self._settings.data_dir, run.id)

    def describe(self, run: PublishedRun) -> list[str]:
        """Say in lines what a run is and takes. Raises: ConfigError: as `footprint_of`."""
        takes = footprint_of(run.manifest)
        return self._lines(run, takes, free_memory_bytes(), free_disk_bytes(self._settings.data_dir))

    def check(self, manifest: Manifest) -> None:
        """Check that a run of our own fits this machine and the settings. Raises: as `approve`."""
        takes = footprint_of(manifest)
        self._check_limits(manifest, takes)
        disk = free_disk_bytes(self._settings.data_dir)
        self._check_machine(manifest, takes, free_memory_bytes(), disk)

    def _memory_bytes(self, takes: Footprint) -> int:
        learner = takes.learner_bytes if self._learner_in_memory else 0
        return takes.daemon_bytes + learner + self._loss_audit_bytes(takes) + takes.payload_bytes

    def _loss_audit_bytes(self, takes: Footprint) -> int:
        """Memory of loss audits, which programs of one's own do not make."""
        return takes.loss_audit_bytes if self._settings.learner_socket is None else 0

    @property
    def _programs_bytes(self) -> int:
        own = self._settings.learner_socket is None
        return DAEMON_BYTES + (LEARNER_BYTES if own else 0)

    def _check_limits(self, manifest: Manifest, takes: Footprint) -> None:
        """Check the person's limits. Raises: UserError."""
        check_budget(parse_size(self._settings.max_memory, "--max-memory"), takes.payload_bytes)
        most = parse_size(self._settings.max_disk, "--max-disk")
        if most and takes.disk_bytes > most:
            raise UserError(
                f"run {manifest.run.name} takes {size_text(takes.disk_bytes)} of disk, and --max-disk is "
                f"{size_text(most)}",
                "raise it, or join a run of a smaller model",
            )

    def _check_machine(self, manifest: Manifest, takes: Footprint, memory: int, disk: int) -> None:
        needed = self._memory_bytes(takes)
        beyond = [
            f"{size_text(wanted)} of {what}, of which {size_text(free)} are free"
            for what, wanted, free in (("memory", needed, memory), ("disk", takes.disk_bytes, disk))
            if wanted > free
        ]
        if beyond:
            raise UserError(
                f"run {manifest.run.name} takes more than this machine has: at least {' and '.join(beyond)}",
                "close other programs, raise a container's limit, or choose another disk with --data-dir",
            )

    def _lines(self, run: PublishedRun, takes: Footprint, memory: int, disk: int) -> list[str]:
        manifest, settings = run.manifest, self._settings
        if settings.learner_socket is not None:
            learner = "the learner is a program of its own"
        else:
            where = "" if self._learner_in_memory else " on its device"
            learner = f"learner {size_text(takes.learner_bytes)}{where}"
        audits = self._loss_audit_bytes(takes)
        learner += f", loss audits {size_text(audits)}" if audits else ""
        payloads = size_text(takes.payload_bytes)
        budget = f" to {settings.max_memory}" if settings.max_memory else " or more"
        most = f"; --max-disk {settings.max_disk}" if settings.max_disk else ""
        return [
            f"run {run.title} of owner {clean(run.signed.owner)}, task {manifest.run.task}",
            f"model: {count(takes.parameters)} parameters in {takes.tensors} tensors",
            f"memory: at least {size_text(self._memory_bytes(takes))} of {size_text(memory)} that are free: "
            f"daemon {size_text(takes.daemon_bytes)}, {learner}, payloads {payloads}{budget}; beside it "
            f"{size_text(self._programs_bytes)} for the programs themselves",
            f"disk: about {size_text(takes.disk_bytes)} of {size_text(disk)} that are free{most}",
            f"data: {_data_words(manifest.data)}; to download: {_download_words(manifest, takes)}",
        ]


def _learner_in_memory(settings: NodeSettings) -> bool:
    """Tell whether the learner that this node starts takes its memory from the machine's."""
    if settings.learner_socket is not None:
        return False
    kind = settings.device.partition(":")[0]
    return (next(iter(accelerators()), "cpu") if kind == "auto" else kind) in ("cpu", "mps")


def _data_words(data: DataSection) -> str:
    if data.is_each_nodes_own:
        return "your own (--data)"
    if data.source != "hub":
        return "what the task brings along"
    part = " ".join(filter(None, (data.config, data.split, data.revision)))
    return f"streams {data.dataset} ({clean(part)}) from Hugging Face while it trains, unless --data is given"


def _download_words(manifest: Manifest, takes: Footprint) -> str:
    tokenizer = ", a tokenizer file" if manifest.data.tokenizer != BYTES else ""
    return f"{size_text(takes.download_bytes)} of parameters{tokenizer}, from peers"
