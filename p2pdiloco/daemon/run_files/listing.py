"""Runs as peers list them: signed manifests, found in the DHT, fetched and saved.

Needs neither a model nor torch: a bootstrap, and whoever only asks, has no more than this.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from p2pdiloco.adapters.run_store import signed_files
from p2pdiloco.config.manifest import (
    Manifest,
    SignedManifest,
    check_signature,
    decode_signed,
    encode_signed,
    manifest_from_canonical,
    run_id,
)
from p2pdiloco.config.settings import RUN_ID
from p2pdiloco.config.values import peer_in
from p2pdiloco.daemon import wire
from p2pdiloco.errors import RemoteError, TransportError, UserError
from p2pdiloco.identity import verify as verify_signature
from p2pdiloco.ports import Refusal, Transport

logger = logging.getLogger(__name__)
PULL_TIMEOUT_S = 10.0
MAX_ASKED = 8
"""Number of peers that are asked for a manifest at one go, beside those that we were told to join."""
MAX_NAMES = 4
MAX_WORDS = 8
SHORT = 12
"""Digits of a run id that people are shown."""
ID_DIGITS = 64


class PublishedRun(Struct, frozen=True, kw_only=True):
    """Run whose manifest was verified."""

    id: str
    signed: SignedManifest
    manifest: Manifest

    @property
    def name(self) -> str:
        """Name for people."""
        return self.manifest.run.name

    @property
    def title(self) -> str:
        """Name and beginning of the id, for people."""
        return f"{self.name} ({self.id[:SHORT]})"

    def summary(self) -> wire.RunSummary:
        """Summarize the run as it is listed."""
        return wire.RunSummary(self.id, self.name, self.signed.owner)


class ListedRun(Struct):
    """A run as peers list it. Only the id is sure: anybody may list it, by any name."""

    run: str
    names: list[str] = field(default_factory=list)
    """Names by which it is listed, at most `MAX_NAMES`."""
    peers: list[str] = field(default_factory=list)

    def add(self, name: str, peer: str) -> None:
        """Add a peer that lists it by this name."""
        if name not in self.names and len(self.names) < MAX_NAMES:
            self.names.append(name)
        self.peers.append(peer)

    @property
    def name(self) -> str:
        """Name for people, until the manifest says the true one; the id's beginning where nobody names it."""
        return self.names[0] if self.names else self.run[:SHORT]


async def known_runs(transport: Transport) -> dict[str, ListedRun]:
    """Look up all runs in the DHT, by id."""
    found: dict[str, ListedRun] = {}
    for peer, value in sorted((await transport.get_records(wire.RUNS_KEY)).items()):
        try:
            listed = wire.decode(value, wire.RunList)
        except RemoteError as error:
            logger.warning("the list of runs of %s is not readable: %s", peer, error)
            continue
        for summary in listed.runs:
            found.setdefault(summary.run, ListedRun(summary.run)).add(summary.name, peer)
    return found


def choose_run(
    found: Mapping[str, ListedRun], wanted: str, before: Sequence[str] = (), hosts: Collection[str] = ()
) -> ListedRun | None:
    """Choose the run that is meant by an id, its beginning, or a name, or by nothing. None: nothing fits
    (yet).

    Where several fit, it is the first of `before` (run ids) among them, else the only one that a peer of
    `hosts` lists.

    Raises:
        UserError: several fit all the same.
    """
    fits = _fitting(found, wanted)
    if len(fits) > 1:
        known = [fits[run] for run in before if run in fits][:1]
        theirs = [listed for listed in fits.values() if set(hosts).intersection(listed.peers)]
        fits = {listed.run: listed for listed in known or theirs} or fits
    if len(fits) > 1:
        what = f'the name "{wanted}"' if wanted else "this swarm"
        raise UserError(
            f"{what} has more than one run: {run_names(fits.values())}",
            f"ask who runs yours which it is, then choose it by its id: --run {min(fits)[:SHORT]}",
        )
    return next(iter(fits.values()), None)


def _fitting(found: Mapping[str, ListedRun], wanted: str) -> dict[str, ListedRun]:
    """Ids come first: who names a run like the beginning of another's id keeps nobody from that one."""
    if not wanted:
        return dict(found)
    by_id = {run: listed for run, listed in found.items() if is_beginning(wanted, run)}
    return by_id or {run: listed for run, listed in found.items() if wanted in listed.names}


def is_beginning(wanted: str, run: str) -> bool:
    """Tell whether this is a run's id, or enough of its beginning."""
    return bool(RUN_ID.fullmatch(wanted)) and run.startswith(wanted)


def is_whole_id(wanted: str) -> bool:
    """Tell whether this is a whole run id: no list can say more of which run is meant."""
    return len(wanted) == ID_DIGITS and bool(RUN_ID.fullmatch(wanted))


def peers_of(addresses: Iterable[str]) -> list[str]:
    """List the peers whom addresses name, each once."""
    return list(dict.fromkeys(map(peer_in, addresses)))


def run_names(listed: Iterable[ListedRun]) -> str:
    """List names of runs, for a person to choose from; of many the first ones."""
    names = sorted(f"{entry.name} ({entry.run[:SHORT]})" for entry in listed)
    more = f" and {len(names) - MAX_WORDS} more" if len(names) > MAX_WORDS else ""
    return ", ".join(names[:MAX_WORDS]) + more


def saved_runs(data_dir: Path) -> dict[str, tuple[ListedRun, SignedManifest]]:
    """Load the runs that this node was a member of before, by id. A damaged manifest is passed over, and
    logged."""
    found = {}
    for path in signed_files(data_dir):
        try:
            signed = decode_signed(path.read_bytes())
            manifest = manifest_from_canonical(signed.manifest)
        except (OSError, RemoteError) as error:
            logger.warning("the saved manifest %s is not readable: %s", path, error)
            continue
        found[run_id(signed)] = (ListedRun(run_id(signed), [manifest.run.name]), signed)
    return found


async def pull_manifest(
    transport: Transport,
    listed: ListedRun,
    hosts: Sequence[str] = (),
    refused: Callable[[str, RemoteError], None] = lambda _peer, _error: None,
) -> tuple[SignedManifest, Manifest] | None:
    """Pull the manifest from the first that has the true one: of `hosts`, then of peers that list it, in any
    order. None: none of `MAX_ASKED` has.

    `refused` is told who gave another one.

    Raises:
        RemoteError: it is the run's manifest, so that all peers have the same, and not valid.
    """
    others = [peer for peer in listed.peers if peer not in hosts]
    asked = [*hosts, *random.sample(others, min(MAX_ASKED, len(others)))]
    for peer in asked:
        try:
            answer = await transport.pull(peer, wire.encode(wire.PullManifest(listed.run)), 0, PULL_TIMEOUT_S)
            if isinstance(answer, Refusal):
                continue
            signed = decode_signed(bytes(answer[0]))
            # First of all: whatever is behind another id is nothing to us.
            if run_id(signed) != listed.run:
                raise RemoteError("manifest-run-id", f"it is run {run_id(signed)[:SHORT]}")
            # The id does not cover the signature.
            check_signature(signed, verify_signature)
        except TransportError as error:
            logger.warning("the manifest of %s cannot be fetched from %s: %s", listed.name, peer, error)
        except RemoteError as error:
            logger.warning("the manifest of %s from %s is refused: %s", listed.name, peer, error)
            refused(peer, error)
        else:
            return signed, manifest_from_canonical(signed.manifest)
    return None


def encode_manifest(run: PublishedRun) -> bytes:
    """Encode the manifest as it is served."""
    return encode_signed(run.signed)
