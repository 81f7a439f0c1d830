"""Finding a run to take part in: it is waited for, and its manifest and files come from whoever has them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from p2pdiloco.config.manifest import Manifest, SignedManifest, run_id, verify
from p2pdiloco.daemon.apart import apart
from p2pdiloco.daemon.run_files.initial import given_parameters
from p2pdiloco.daemon.run_files.joined import joined_runs
from p2pdiloco.daemon.run_files.listing import (
    ListedRun,
    PublishedRun,
    choose_run,
    is_beginning,
    run_names,
    saved_runs,
)
from p2pdiloco.daemon.run_files.runs import Run, open_run, room_for
from p2pdiloco.daemon.run_files.searching import RunSearch
from p2pdiloco.daemon.run_files.tokenizers import fetched_tokenizer
from p2pdiloco.errors import ConfigError, RemoteError, TransportError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import Transport
from p2pdiloco.tensors.vault import Vault

logger = logging.getLogger(__name__)
SEARCH_PAUSE_S = 1.0
LIST_PATIENCE_S = 15.0
"""Time for which a list of runs that lacks the wanted one is asked for again before it is believed."""
OWN_PATIENCE_S = 3.0
"""Time for which a node that was a member before waits for somebody to list a run before it takes its own."""
SAY_AFTER_S = 3.0
Approve = Callable[[PublishedRun, bool], Awaitable[None]]
"""Look at a run before anything is made of it; True: this data folder has not been in it."""


async def find_run(
    transport: Transport,
    identity: Identity,
    wanted: str,
    data_dir: Path,
    say: Callable[[str], None],
    hosts: Sequence[str] = (),
    approve: Approve | None = None,
    begins: bool = False,
) -> tuple[Run, Vault]:
    """Wait for the wanted run to be listed, and verify its manifest, from our folder or from whoever lists
    it.

    Where nobody lists any run, the one that we were a member of before will do. `hosts`: the peers that we
    were told to join through (`listing.choose_run`). `approve` looks at a run before anything is made of it.
    `begins`: we start a run, so what we were a member of before is not the one that is meant.

    Raises:
        UserError: other runs are listed, but not this one; or several fit; or the run of the wanted id is not
            valid; or as `approve` and `open_run`.
    """
    return await _Finding(transport, identity, wanted, data_dir, say, hosts, approve, begins).run()


class _Finding:
    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        wanted: str,
        data_dir: Path,
        say: Callable[[str], None],
        hosts: Sequence[str],
        approve: Approve | None,
        begins: bool,
    ) -> None:
        self._approve = approve
        self._transport, self._identity, self._data_dir = transport, identity, data_dir
        self._wanted, self._say = wanted, say
        self._ours = saved_runs(data_dir)
        # Folders of earlier releases do not say which of their runs was the last.
        self._before = joined_runs(data_dir) or (list(self._ours) if len(self._ours) == 1 else [])
        self._search = RunSearch(transport, wanted, hosts, [] if begins else self._before)

    async def run(self) -> tuple[Run, Vault]:
        waited_s, said = 0.0, False
        while True:
            chosen = await self._search.look()
            if not self._search.listed and waited_s >= OWN_PATIENCE_S:
                chosen = chosen or self._our_own()
            found = await self._opened(chosen) if chosen is not None else None
            if found is not None:
                return found
            unknown = chosen is None or not chosen.peers
            if unknown and self._search.listed and waited_s >= LIST_PATIENCE_S:
                known = self._search.known
                raise UserError(f'the peers know no run "{self._wanted}"', f"they know: {known}")
            if unknown and not said and waited_s >= SAY_AFTER_S:
                said = True
                self._say(self._waiting())
            await asyncio.sleep(SEARCH_PAUSE_S)
            waited_s += SEARCH_PAUSE_S

    def _our_own(self) -> ListedRun | None:
        return choose_run(
            {run: listed for run, (listed, _) in self._ours.items()}, self._wanted, self._before
        )

    def _waiting(self) -> str:
        if not self._search.listed:
            return "no run is listed by these peers yet: waiting for one"
        known = run_names(self._search.listed.values())
        return f'no run "{self._wanted}" is listed by these peers yet: waiting for it; they know: {known}'

    async def _opened(self, chosen: ListedRun) -> tuple[Run, Vault] | None:
        """Get all of a run. None: it is not to be had, or not acceptable, which is said."""
        try:
            found = await self._manifest(chosen)
            if found is None:
                return None
            run = await self._whole(chosen, *found)
        except (RemoteError, ConfigError) as error:
            # A wrong `[model]` shows when something is made of it.
            wrong = error if isinstance(error, RemoteError) else RemoteError("manifest-invalid", str(error))
            self._refuse(chosen, wrong)
        except TransportError as error:
            self._say(f"nobody gives all of {chosen.name} yet: {error}")
        else:
            refused = self._search.refused_words()
            if refused:
                self._say(f"refused on the way: {refused}")
            return run
        return None

    async def _manifest(self, chosen: ListedRun) -> tuple[SignedManifest, Manifest] | None:
        saved = self._ours.get(chosen.run)
        if saved is None:
            return await self._search.manifest(chosen)
        manifest = verify(saved[1], self._identity.verify)
        self._search.check_name(chosen, manifest)
        return saved[1], manifest

    async def _whole(
        self, chosen: ListedRun, signed: SignedManifest, manifest: Manifest
    ) -> tuple[Run, Vault]:
        run, peers = run_id(signed), self._search.givers(chosen)
        if self._approve is not None:
            listed = PublishedRun(id=run, signed=signed, manifest=manifest)
            await self._approve(listed, run not in self._ours and run not in self._before)
        with room_for(manifest):
            given = await given_parameters(self._transport, self._data_dir, run, manifest, peers)
        await fetched_tokenizer(self._transport, self._data_dir, run, manifest, peers)
        return await apart(partial(open_run, signed, self._identity, chosen.run, given))

    def _refuse(self, chosen: ListedRun, error: RemoteError) -> None:
        words = f"the manifest of {chosen.name} is refused: {error}"
        if self._ours.pop(chosen.run, None) is not None:  # peers may have a sound one
            self._say(words)
            return
        if is_beginning(self._wanted, chosen.run):  # nobody has another one of this id
            raise UserError(words, "its owner has to mend it, which makes another run, of another id")
        self._search.give_up(chosen, error)
        self._say(words)
