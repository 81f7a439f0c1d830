"""Runs: signing and opening their manifests, and what every node derives from one."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from p2pdiloco.adapters.data_dir import Files
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
from p2pdiloco.config.presets import doubts
from p2pdiloco.core.api.config import CoreConfig, Timing
from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain import FIRST_REACH
from p2pdiloco.daemon.machine import free_memory_bytes
from p2pdiloco.daemon.run_files.initial import constants_in, given_beside, keep_given
from p2pdiloco.daemon.run_files.listing import PublishedRun
from p2pdiloco.daemon.run_files.tokenizers import (
    checked_tokenizer,
    keep_tokenizer,
    tokenizer_beside,
)
from p2pdiloco.errors import ConfigError, RemoteError, UserError, invariant
from p2pdiloco.identity import Identity
from p2pdiloco.learner.ranks import out_of_memory
from p2pdiloco.tasks.registry import load_manifest, task_of
from p2pdiloco.tasks.tokens import read_tokenizer
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import FragmentLayout, plan_fragments
from p2pdiloco.tensors.sizes import vault_bytes
from p2pdiloco.tensors.vault import Vault


class Run(PublishedRun, frozen=True, kw_only=True):
    """Verified run and what follows from its manifest."""

    layouts: tuple[FragmentLayout, ...]
    tokenizer: Path | None = None
    """Tokenizer file of a run that is signed here, if it has one (`daemon.run_files.tokenizers`)."""
    constants: Mapping[str, Tensor] = {}
    """Constants of its model (`tasks.constants`)."""

    def doubts(self) -> list[str]:
        """List what its owner and members are warned of."""
        return doubts(self.manifest, sum(layout.numel for layout in self.layouts))


@contextlib.contextmanager
def room_for(manifest: Manifest) -> Iterator[None]:
    """Context in which a run's model is put into this machine's memory.

    Raises:
        UserError: it does not fit, or its task is not installed.
        ConfigError: as `tasks.registry.task_of`.
    """
    numel = sum(spec.numel for spec in task_of(manifest).specs())
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
        most_units=manifest.weight.most_units,
        expected_members=manifest.group.expected_members,
        audited=not update.sparse,
        loss_audits=manifest.audit.loss_share,
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
