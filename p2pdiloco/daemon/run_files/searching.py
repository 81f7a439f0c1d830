"""Search for the run that is meant, among those that peers list, and for its manifest.

Needs neither a model nor torch: nodes search like this, and so does whoever only asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from p2pdiloco.config.manifest import Manifest, SignedManifest
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.run_files.listing import (
    ListedRun,
    choose_run,
    is_beginning,
    is_whole_id,
    known_runs,
    pull_manifest,
    run_names,
)
from p2pdiloco.errors import RemoteError, TransportError, UserError
from p2pdiloco.ports import Transport

logger = logging.getLogger(__name__)
HOST_TIMEOUT_S = 3.0
HOST_PATIENCE = 10
"""Looks for which what only our hosts can settle waits for them, if they do not answer."""
MAX_GIVEN_UP = 256


async def runs_of(
    transport: Transport, host: str, refused: Callable[[str, RemoteError], None] = lambda _host, _error: None
) -> tuple[wire.RunSummary, ...] | None:
    """Ask a host which runs it lists. None: it does not answer. `refused` is told of nonsense."""
    try:
        reply = await transport.send(host, wire.QUERY + wire.encode(wire.RunsQuery()), HOST_TIMEOUT_S)
        return wire.decode(reply, wire.RunList).runs
    except TransportError as error:
        logger.debug("%s does not say which runs it knows: %s", host, error)
        return None
    except RemoteError as error:
        refused(host, error)
    return ()


class RunSearch:
    """Search for one run: which of those that are listed is meant, and what its manifest says."""

    def __init__(
        self, transport: Transport, wanted: str, hosts: Sequence[str] = (), before: Sequence[str] = ()
    ) -> None:
        """`wanted`: an id, its beginning, a name, or nothing. `hosts`: the peers that a person named to join
        through, `before`: ids of runs that this node was in, newest first (`choose_run`)."""
        self._transport = transport
        self._wanted = wanted
        self._hosts = list(dict.fromkeys(hosts))
        self._before = before
        self._given_up: set[str] = set()
        self._silent_looks = 0
        self.listed: dict[str, ListedRun] = {}
        """Runs that were listed at the last look, without those that were given up."""
        self.refusals: Counter[str] = Counter()
        """Count of false manifests and lists by reason."""

    @property
    def known(self) -> str:
        """Names of the runs that were listed at the last look; empty: there are none."""
        return run_names(self.listed.values())

    async def look(self) -> ListedRun | None:
        """Look once for the run. None: nobody lists it (yet).

        A whole id is enough: it needs nobody's list, and nobody's list can keep us from it.

        Raises:
            UserError: several fit.
        """
        found = await known_runs(self._transport)
        if is_whole_id(self._wanted):
            found.setdefault(self._wanted, ListedRun(self._wanted))
        elif self._hosts:
            await self._ask_hosts(found)
        self.listed = {
            run: entry for run, entry in found.items() if run not in self._given_up and entry.peers
        }
        candidates = {run: entry for run, entry in found.items() if run not in self._given_up}
        try:
            return choose_run(candidates, self._wanted, self._before, self._hosts)
        except UserError:
            if 0 < self._silent_looks <= HOST_PATIENCE:
                return None
            raise

    async def _ask_hosts(self, found: dict[str, ListedRun]) -> None:
        """Add what our hosts themselves say: their records may not be there yet, or not any more."""
        answers = await asyncio.gather(
            *(runs_of(self._transport, host, self._refused) for host in self._hosts)
        )
        self._silent_looks = self._silent_looks + 1 if None in answers else 0
        for host, runs in zip(self._hosts, answers, strict=True):
            for summary in runs or ():
                entry = found.setdefault(summary.run, ListedRun(summary.run))
                if host not in entry.peers:
                    entry.add(summary.name, host)

    async def manifest(self, listed: ListedRun) -> tuple[SignedManifest, Manifest] | None:
        """Get the run's manifest from whoever has the true one. None: nobody that was asked has.

        Raises:
            RemoteError: it is not valid, or by a name that a person wanted another run.
        """
        signed = await pull_manifest(self._transport, listed, self._hosts, self._refused)
        if signed is not None:
            self.check_name(listed, signed[1])
        return signed

    def givers(self, listed: ListedRun) -> list[str]:
        """List whom to ask for what belongs to a run: who lists it, or else the peers to join through."""
        return listed.peers or self._hosts

    def check_name(self, listed: ListedRun, manifest: Manifest) -> None:
        """Check that a run which was chosen by its name has this name. Raises: RemoteError."""
        if self._wanted not in ("", manifest.run.name) and not is_beginning(self._wanted, listed.run):
            raise RemoteError("manifest-name", f"the run is called {manifest.run.name}")

    def give_up(self, listed: ListedRun, error: RemoteError) -> None:
        """Pass a run over from now on, as what its owner signed is no good."""
        self.refusals[error.reason] += 1
        if len(self._given_up) < MAX_GIVEN_UP:
            self._given_up.add(listed.run)

    def _refused(self, peer: str, error: RemoteError) -> None:
        self.refusals[error.reason] += 1
        logger.debug("refused %s: %s", peer, error)

    def refused_words(self) -> str:
        """Word what was refused on the way, as `manifest-run-id 2, garbage 1`; empty: nothing."""
        return ", ".join(f"{reason[:40]} {number}" for reason, number in self.refusals.most_common(6))
