"""Judge of the model: how fast this machine trains it, and what a swarm's result is worth.

Reads nodes' data folders only after the nodes have ended.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from p2pdiloco.adapters.run_store import RunStore, signed_files
from p2pdiloco.config.manifest import Manifest, load_signed, run_id
from p2pdiloco.daemon.run_files.run import fresh_vault
from p2pdiloco.demo.swarm import HeldVersions
from p2pdiloco.errors import RemoteError
from p2pdiloco.identity import verify
from p2pdiloco.learner.channel import LearnerOptions
from p2pdiloco.learner.loop import Training, evaluate, heldout_batch
from p2pdiloco.learner.ranks import choose_device, configure_torch
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import scatter
from p2pdiloco.tensors.vault import Vault
from p2pdiloco.util import Frozen

PROBE_TOKENS = 1024
"""An inner step is timed with at most about so many tokens, and scaled."""
PROBE_STEPS = 6
PROBE_LIMIT_S = 4.0
CROWDED = 0.8
"""Share of a core that a learner gets where every core has one: daemons and p2pd need the rest."""


class SavedNode(Frozen):
    """State that a node has saved: its versions, and the fragments whose bytes are not what their version
    says."""

    vault: Vault
    holdings: HeldVersions
    unsound: list[int]


class Judge:
    """Measures losses of global parameters on held-out samples, those that the nodes use too."""

    def __init__(self, manifest: Manifest) -> None:
        """Raises: UserError (there is too little data)."""
        configure_torch(choose_device("cpu"), 1)
        self._manifest = manifest
        self._task = task_of(manifest)
        self._data = self._task.load_data(None)
        tokens = LearnerOptions(peer="").evaluation_tokens
        self._heldout = heldout_batch(self._task, self._data.heldout, tokens)

    def step_time_s(self) -> float:
        """Seconds that one inner step takes here on one core of its own (the shortest of a few)."""
        manifest, inner = self._manifest, self._manifest.inner
        sample = self._task.tokens_per_sample
        tokens = min(inner.tokens_per_step, max(1, PROBE_TOKENS // sample) * sample)
        probe = replace(manifest, inner=replace(inner, tokens_per_step=tokens))
        task = task_of(probe)
        training = Training(task, task.model(), self._data.train, "probe")
        times: list[float] = []
        until = time.monotonic() + PROBE_LIMIT_S
        training.step()
        while len(times) < PROBE_STEPS and (not times or time.monotonic() < until):
            began = time.monotonic()
            training.step()
            times.append(time.monotonic() - began)
        return min(times) * inner.tokens_per_step / tokens

    def loss_of(self, vault: Vault) -> float:
        """Held-out loss of a vault's global parameters (`loss_unit`)."""
        return evaluate(self._task, self._model(vault), self._heldout).loss

    def loss_at_version_0(self) -> float:
        """Held-out loss before any training."""
        return self.loss_of(fresh_vault(self._manifest)[1])

    def sample(self, vault: Vault) -> str:
        """Text that the global parameters write; "" where the task has nothing to show."""
        return self._task.sample(self._model(vault)) or ""

    def _model(self, vault: Vault) -> Any:
        model = self._task.model()
        parameters = named_parameters(model)
        for layout in vault.layouts:
            scatter(vault.result(layout.index), layout, parameters)
        return model


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def schedule_steps(step_time_s: float, seconds: float, nodes: int) -> int:
    """Inner steps that each of so many nodes will about make: the length of the learning rate's schedule."""
    share = min(1.0, CROWDED * cores() / nodes)
    return max(50, round(seconds * share / step_time_s))


def read_saved(manifest: Manifest, name: str, data_dir: Path) -> SavedNode:
    """Read what a node that has ended left in its folder, bytes checked against their versions' digests.

    Raises:
        StorageError: there is no run in the folder, or it cannot be read.
    """
    path = next(iter(signed_files(data_dir)), data_dir / "runs")
    store = RunStore(data_dir, run_id(load_signed(path, verify)[0]))
    layouts, vault = fresh_vault(manifest)
    versions = {}
    unsound = []
    for index in range(len(layouts)):
        saved = store.load_checkpoint(index)
        if saved is None or saved.version.header.number == 0:
            continue
        header = saved.version.header
        try:
            theta, momentum = saved.theta.data.cast("B"), saved.momentum.data.cast("B")
            sound = vault.load_spare(index, header.number, theta, momentum) == header.state_digest
        except RemoteError:
            sound = False
        if not sound:
            unsound.append(index)
            continue
        vault.commit(index, header.number)
        versions[index] = {header.number: header.digest().hex()}
        earlier = store.load_updates(index, max(0, header.number - manifest.group.log_versions + 1))
        chain = {
            v.header.number: v.header.digest().hex() for v, _ in earlier if v.header.number <= header.number
        }
        # Left-overs of a lost branch do not lead to the head, and say nothing about it.
        if chain.get(header.number) == versions[index][header.number]:
            versions[index] = chain
    return SavedNode(vault, HeldVersions(name, versions), unsound)


def loss_unit(task: str) -> str:
    """Name the unit of a loss on the data that every machine has, of which text is bytes."""
    return "nats per image" if task == "image-classification" else "nats per byte"
