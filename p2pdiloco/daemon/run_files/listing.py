"""Runs as peers list them: signed manifests, found in the DHT, fetched and saved.

Needs neither a model nor torch: a bootstrap, and whoever only asks, has no more than this.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from p2pdiloco.config.loader import manifest_from_canonical
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.signing import SignedManifest, decode_signed, encode_signed, run_id, verify
from p2pdiloco.daemon import wire
from p2pdiloco.errors import RemoteError, TransportError, UserError
from p2pdiloco.identity import verify as verify_signature
from p2pdiloco.ports import Refusal, Transport

logger = logging.getLogger(__name__)
PULL_TIMEOUT_S = 10.0
MAX_ASKED = 8
"""Number of peers that are asked for a manifest at one go."""


class PublishedRun(Struct, frozen=True, kw_only=True):
    """Run whose manifest was verified."""

    id: str
    signed: SignedManifest
    manifest: Manifest

    @property
    def name(self) -> str:
        """Name for people."""
        return self.manifest.run.name

    def summary(self) -> wire.RunSummary:
        """Summarize the run as it is listed."""
        return wire.RunSummary(self.id, self.name, self.signed.owner)


async def known_runs(transport: Transport) -> dict[str, tuple[wire.RunSummary, list[str]]]:
    """Look up all runs in the DHT: run id -> (summary, peers that list it)."""
    found: dict[str, tuple[wire.RunSummary, list[str]]] = {}
    for peer, value in sorted((await transport.get_records(wire.RUNS_KEY)).items()):
        try:
            listed = wire.decode(value, wire.RunList)
        except RemoteError as error:
            logger.warning("the list of runs of %s is not readable: %s", peer, error)
            continue
        for summary in listed.runs:
            found.setdefault(summary.run, (summary, []))[1].append(peer)
    return found


def choose_run(
    found: dict[str, tuple[wire.RunSummary, list[str]]], wanted: str
) -> tuple[wire.RunSummary, list[str]] | None:
    """Choose the run that is meant by a name, an id or its beginning, or by nothing. None: nothing fits
    (yet).

    Raises:
        UserError: several fit.
    """
    fits = [
        entry
        for entry in found.values()
        if not wanted or entry[0].name == wanted or (len(wanted) >= 6 and entry[0].run.startswith(wanted))
    ]
    if len(fits) > 1:
        what = f'the name "{wanted}"' if wanted else "this swarm"
        raise UserError(f"{what} has more than one run: {run_names(fits)}", "choose one with --run ID")
    return fits[0] if fits else None


def run_names(entries: Iterable[tuple[wire.RunSummary, object]]) -> str:
    """List names of runs, for a person to choose from."""
    return ", ".join(sorted(f"{summary.name} ({summary.run[:12]})" for summary, _ in entries))


def saved_runs(data_dir: Path) -> dict[str, tuple[wire.RunSummary, SignedManifest]]:
    """Load the runs that this node was a member of before, by id. A damaged manifest is passed over, and
    logged."""
    found = {}
    for path in sorted((data_dir / "runs").glob("*/manifest.signed")):
        try:
            signed = decode_signed(path.read_bytes())
            manifest = manifest_from_canonical(signed.manifest)
        except (OSError, RemoteError) as error:
            logger.warning("the saved manifest %s is not readable: %s", path, error)
            continue
        found[run_id(signed)] = (wire.RunSummary(run_id(signed), manifest.run.name, signed.owner), signed)
    return found


async def pull_manifest(
    transport: Transport, summary: wire.RunSummary, peers: list[str]
) -> SignedManifest | None:
    """Pull the manifest from the first of some peers, in any order, that has the true one. None: none has."""
    for peer in random.sample(peers, min(MAX_ASKED, len(peers))):
        try:
            answer = await transport.pull(
                peer, wire.encode(wire.PullManifest(summary.run)), 0, PULL_TIMEOUT_S
            )
            if isinstance(answer, Refusal):
                continue
            signed = decode_signed(bytes(answer[0]))
            verify(signed, verify_signature)
            if run_id(signed) != summary.run:
                raise RemoteError("manifest-run-id", f"it is run {run_id(signed)[:12]}")
            return signed
        except TransportError as error:
            logger.warning("the manifest of %s cannot be fetched from %s: %s", summary.name, peer, error)
        except RemoteError as error:
            logger.warning("the manifest of %s from %s is refused: %s", summary.name, peer, error)
    return None


def encode_manifest(run: PublishedRun) -> bytes:
    """Encode the manifest as it is served."""
    return encode_signed(run.signed)
