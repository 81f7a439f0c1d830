"""Restart from a node's data folder: each fragment's newest sound checkpoint and what follows it.

Listed in docs/reference/disk.md, section 3.
"""

from __future__ import annotations

import logging

from msgspec import Struct

from p2pdiloco.adapters.run_store import RunStore, SavedFragment
from p2pdiloco.core import chain
from p2pdiloco.core.api.config import CoreConfig, Restored, RestoredFragment
from p2pdiloco.core.api.types import Watermark
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain import Chain
from p2pdiloco.daemon.payloads.update_log import UpdateLog
from p2pdiloco.errors import RemoteError
from p2pdiloco.tensors.vault import Vault

logger = logging.getLogger(__name__)


class Found(Struct, frozen=True):
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
        marks = chain.table()
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
    chain = Chain((genesis,), (), config.log_versions)
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
    if not chain.can_be(header, saved.watermarks, config):
        return "its numbers are none that a run has"
    try:
        theta, momentum = saved.theta.data.cast("B"), saved.momentum.data.cast("B")
        digest = vault.load_spare(header.fragment, header.number, theta, momentum)
    except RemoteError as error:
        return str(error)
    return None if digest == header.state_digest else "its parameters are not those of its version"
