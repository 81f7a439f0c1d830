"""Footprint of a run on a node: memory, disk and downloads, by arithmetic on its manifest, without torch."""

from __future__ import annotations

import math

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import constants_of
from p2pdiloco.tensors.sizes import (
    CPU_MICRO_BATCH_TOKENS,
    ENCODINGS,
    appraisal_bytes,
    second_model_bytes,
    shared_bytes,
    training_bytes,
    vault_bytes,
)
from p2pdiloco.util import Frozen

DAEMON_BYTES, LEARNER_BYTES = 360_000_000, 285_000_000
"""Resident memory of the programs alone, as measured with the preset `micro` on Linux with torch for the CPU:
a daemon (285 to 319 MB) with p2pd (74 to 78 MB), and a learner (285 to 334 MB). A third of it, libraries, is
shared among them."""
LOG_BYTES = 130 * 2**20
"""Most that events.jsonl, the one before it and learner.log take."""
UPDATES_IN_MEMORY = 3
CHECKPOINTS = 2
STATE_BYTES = 8
"""Bytes of a fragment's state for every parameter: Theta and outer momentum."""


class Footprint(Frozen):
    """Footprint of a run on a node: memory, disk and downloads.

    All figures are least ones: the programs themselves come on top (`DAEMON_BYTES`, `LEARNER_BYTES`).
    """

    parameters: int
    tensors: int
    daemon_bytes: int
    """Memory of the daemon: global parameters, and what it shares with its learner."""
    payload_bytes: int
    """Memory that no node of the run can do without for contributions and updates (`--max-memory`)."""
    learner_bytes: int
    """Memory of the learner's device, or devices together: parameters, gradients, moments, and a second
    instance of the model for evaluation."""
    pass_bytes: int
    """Memory of the learner's device for a pass: activations and logits, of as many samples as a CPU takes at
    a time; 0: unknown, as the task is not built in. A GPU takes more samples where they fit."""
    loss_audit_bytes: int
    """Memory in which its learner measures contributions of others, whatever its device is; 0: there are no
    loss audits (docs/protocol/loss-audits.md)."""
    disk_bytes: int
    """Disk: checkpoints of daemon and learner, the log of updates, and a given version 0."""
    download_bytes: int
    """Bytes that peers are asked for before the first inner step, beside a tokenizer."""


def footprint_of(manifest: Manifest, pass_tokens: int = 0) -> Footprint:
    """Work out the footprint of a run, from the shapes in its manifest.

    `pass_tokens`: of a training pass, where the node sets them; 0: as many as on a CPU.

    It is arithmetic, and needs no torch for a built-in task: a manifest is a stranger's, and is looked at
    before anything is made of it.

    Raises:
        UserError: its task is not installed.
        ConfigError: `[model]` is wrong, or has more or larger tensors than any model (`tasks.registry`).
    """
    task = task_of(manifest)
    specs = task.specs()
    wanted = min(pass_tokens or CPU_MICRO_BATCH_TOKENS, manifest.inner.tokens_per_step)
    numel, fragments = sum(spec.numel for spec in specs), manifest.sync.fragments
    sent, kept = (
        ENCODINGS[name].bytes_per_parameter for name in (manifest.codec.contribution, manifest.codec.update)
    )
    fetched = 4 * numel / fragments
    payloads = sent * numel * (1 + 2 / fragments) + (UPDATES_IN_MEMORY + 1) * kept * numel + fetched
    training = training_bytes(numel, manifest.inner.optimizer)
    fragment = math.ceil(numel / fragments) if manifest.audit.loss_share else 0
    given = 4 * numel if manifest.run.initial else 0
    given += sum(constant.nbytes for constant in constants_of(manifest.model))
    return Footprint(
        parameters=numel,
        tensors=len(specs),
        daemon_bytes=vault_bytes(numel, manifest.codec.contribution) + shared_bytes(numel),
        payload_bytes=math.floor(payloads),
        learner_bytes=training + second_model_bytes(numel),
        pass_bytes=task.pass_bytes(max(1, wanted // task.tokens_per_sample)),
        loss_audit_bytes=appraisal_bytes(fragment, manifest.codec.contribution),
        # The learner's state is written anew beside the old one.
        disk_bytes=math.ceil(
            (CHECKPOINTS * STATE_BYTES + kept * manifest.group.log_versions) * numel + 2 * training + given
        ),
        download_bytes=STATE_BYTES * numel + given,
    )
