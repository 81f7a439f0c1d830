"""Runs as peers list them and as this machine's folders know them: found, linked to, searched.

It needs neither a model nor torch: a bootstrap, and a program that only asks, has no more than this.
`RunSearch` finds the run that is meant among those that peers list, `known_run` one of a folder of this
machine. `RunLink` says in one word which run it is, and whom to join through; `way_of` reads what a person
gave.

    <data_dir>/joined.json   `WaysIn`
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import fields, replace

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.multiaddrs import tcp_of
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
from p2pdiloco.config.settings import RUN_ID, BootstrapSettings, NodeSettings
from p2pdiloco.config.values import (
    DNSADDR,
    check_join_address,
    expanded,
    is_loopback,
    is_peer_address,
    peer_in,
)
from p2pdiloco.core.api.types import Wire
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.notice import (
    INVITE,
    MAX_ADDRESSES,
    Invite,
    Key,
    LinkFormat,
    Peers,
    Right,
    decode_invite,
    pack_peers,
    unpack_peers,
)
from p2pdiloco.errors import ConfigError, RemoteError, StorageError, TransportError, UserError, clean
from p2pdiloco.identity import peer_of, public_of
from p2pdiloco.identity import verify as verify_signature
from p2pdiloco.ports import Refusal, Transport
from p2pdiloco.util import Values, read_note

logger = logging.getLogger(__name__)
PULL_TIMEOUT_S = 10.0
MAX_ASKED = 8
"""Number of peers that are asked for a manifest at one go, beside those that we were told to join."""
MAX_NAMES = 4
MAX_NAMED_RUNS = 8
SHORT = 12
"""Digits of a run id that people are shown."""
ID_DIGITS = 64


class PublishedRun(Struct, frozen=True, kw_only=True):
    """Run whose manifest was verified."""

    id: str
    signed: SignedManifest
    manifest: Manifest

    @classmethod
    def of(cls, signed: SignedManifest) -> PublishedRun:
        """Make the run of a signed manifest. Raises: RemoteError (it is not valid)."""
        return PublishedRun(
            id=run_id(signed), signed=signed, manifest=manifest_from_canonical(signed.manifest)
        )

    @property
    def name(self) -> str:
        """Name for people."""
        return self.manifest.run.name

    @property
    def title(self) -> str:
        """Name and beginning of the id, for people."""
        return f"{self.name} ({self.id[:SHORT]})"

    @property
    def owners(self) -> tuple[str, ...]:
        """Keys by which its owner's papers are judged (`core.api.papers.owner_of`)."""
        return tuple(filter(None, (self.signed.owner, self.manifest.admission.recovery)))

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

    @property
    def title(self) -> str:
        """Name and beginning of the id, for people."""
        return f"{self.name} ({self.run[:SHORT]})"


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


def run_names(runs: Iterable[ListedRun | PublishedRun]) -> str:
    """List names of runs, for a person to choose from; of many the first ones."""
    names = sorted(each.title for each in runs)
    more = f" and {len(names) - MAX_NAMED_RUNS} more" if len(names) > MAX_NAMED_RUNS else ""
    return ", ".join(names[:MAX_NAMED_RUNS]) + more


def saved_runs(data_dir: Path) -> dict[str, PublishedRun]:
    """Load the runs that this node was a member of before, by id. A damaged manifest is passed over, and
    logged."""
    found = {}
    for path in signed_files(data_dir):
        try:
            run = PublishedRun.of(decode_signed(path.read_bytes()))
        except (OSError, RemoteError) as error:
            logger.warning("the saved manifest %s is not readable: %s", path, error)
            continue
        found[run.id] = run
    return found


def saved_run(
    saved: Mapping[str, PublishedRun], wanted: str, before: Sequence[str] = ()
) -> PublishedRun | None:
    """Choose among saved runs, as `choose_run`. Raises: UserError."""
    chosen = choose_run({run: ListedRun(run, [each.name]) for run, each in saved.items()}, wanted, before)
    return saved[chosen.run] if chosen is not None else None


async def pull_run(
    transport: Transport,
    listed: ListedRun,
    hosts: Sequence[str] = (),
    refused: Callable[[str, RemoteError], None] = lambda _peer, _error: None,
) -> PublishedRun | None:
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
            return PublishedRun.of(signed)
    return None


def encode_manifest(run: PublishedRun) -> bytes:
    """Encode the manifest as it is served."""
    return encode_signed(run.signed)


JOINED = "joined.json"
MAX_JOINED = 64
MAX_JOINED_THROUGH = 32
MAX_PEERS = 16
OF_ONE_START = {"join", "invite", "data_dir", "run_file", "genesis", "yes", "log", "run"}
"""Settings that hold for one start, or are remembered elsewhere."""
Texts = Annotated[tuple[str, ...], Meta(max_length=64)]


class WaysIn(Struct, frozen=True):
    """Memory of a folder: how its node gets into its runs again, and how others get to it."""

    runs: Texts = ()
    """Ids of the runs that were joined, the newest first: it is joined again by a start that names none,
    whatever else is listed by its name by then, and a person who was asked whether to join one is not asked
    again."""
    join: Texts = ()
    """Addresses that were last given to join through, names of the DNS among them."""
    settings: Values = {}
    """What else the last start was given, and the id of its run."""
    link: str = ""
    """Invite or run link that was given last, perhaps a secret; empty: none."""
    met: Annotated[tuple[Texts, ...], Meta(max_length=MAX_PEERS)] = ()
    """Addresses of the last members met, of each a few, the newest member last."""
    own: Texts = ()
    """Addresses under which this node was last reached, the best first. Its owner's invites name them."""
    port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    """Port on which it listened last; 0: none."""

    @classmethod
    def load(cls, data_dir: Path) -> WaysIn:
        """Load it; a lost file is none, and addresses of peers that are no addresses are left out."""
        path = expanded(data_dir) / JOINED
        ways = read_note(path, msgspec.json.Decoder(cls).decode, logger.warning) or cls()
        return replace(ways, own=tuple(filter(is_peer_address, ways.own)))

    @property
    def lead_back(self) -> bool:
        """True: the node of this folder joined a run, or met a member of one."""
        return bool(self.runs or self.join or self.met)

    @property
    def members(self) -> list[str]:
        """Addresses of members, by which a node finds its swarm again when all others are gone."""
        return [each for found in self.met for each in found if is_peer_address(each)]

    @property
    def run_link(self) -> RunLink | None:
        """Contents of the link or invite that was given last; None: there is none that can be read."""
        try:
            return read_link(self.link) if self.link else None
        except ConfigError as error:
            logger.warning("the link in %s is damaged, and as if it had never been given: %s", JOINED, error)
            return None

    def joined(self, settings: NodeSettings, run: str) -> WaysIn:
        """Make a run the newest that was joined, with what this start was given."""
        given = Values(run=run)
        for each in fields(NodeSettings):
            value = getattr(settings, each.name)
            if each.name not in OF_ONE_START and value != each.default:
                given[each.name] = str(expanded(value).absolute()) if isinstance(value, Path) else value
        if settings.learner_socket is not None:  # a program's own start
            given = self.settings
        runs = tuple(dict.fromkeys([run, *self.runs]))[:MAX_JOINED]
        return replace(self, runs=runs, join=settings.join[:MAX_JOINED_THROUGH] or self.join, settings=given)

    def given(self, text: str) -> WaysIn:
        """Take in a link or invite that was given; a link that lets nobody in takes no invite's place."""
        before, now = self.run_link, read_link(text)
        if before and before.invite and not now.invite and before.run == now.run:
            return self
        return replace(self, link="".join(text.split()))

    def having_met(self, peers: Sequence[Sequence[str]]) -> WaysIn:
        """Take in the addresses of peers, 4 of each. Those of earlier lives stay as long as there is room: a
        node that meets only one peer this time does not forget the others."""
        kept = {peer_in(found[0]): tuple(found[:4]) for found in peers if found}
        earlier = [found for found in self.met if found and peer_in(found[0]) not in kept]
        return replace(self, met=(*earlier, *kept.values())[-MAX_PEERS:])

    def reached_at(self, addresses: Sequence[str]) -> WaysIn:
        """Take in the node's own addresses."""
        return replace(self, own=tuple(addresses[:MAX_PEERS]))

    def listening(self, addresses: Sequence[str]) -> WaysIn:
        """Take in the first port of the addresses at which the node listens, if there is one."""
        ports = (found[1] for each in addresses if (found := tcp_of(each)))
        return replace(self, port=next(ports, self.port))


_changing = Lock()


def change_ways(data_dir: Path, change: Callable[..., WaysIn], *told: object) -> None:
    """Change what a folder remembers, by a method of `WaysIn` and what it is told. What is no news is not
    saved, so a full disk keeps nobody from going on. For the process that has the folder's lock; not on the
    event loop.

    Raises: StorageError (it is news, and not saved; or what is there cannot be read just now).
    """
    path = data_dir / JOINED
    with _changing:
        if path.is_file():
            Files().read(path)
        before = WaysIn.load(data_dir)
        content = msgspec.json.encode(change(before, *told))
        if content != msgspec.json.encode(before):
            # Whatever the news is, link and runs are written anew with it, and have to outlive a power cut.
            Files().save(path, [content], durable=True, private=True)


def note_ways(data_dir: Path, change: Callable[..., WaysIn], *told: object) -> None:
    """Change the same where that can be saved. A failure is logged: it costs this memory only."""
    try:
        change_ways(data_dir, change, *told)
    except StorageError as error:
        logger.warning("what leads back into the run is not kept for later starts: %s", error)


def goes_on(settings: NodeSettings) -> bool:
    """Tell whether a start with these settings goes on where this folder was before: the run that is meant is
    saved here, and is named or is to be reached by what was given the last time. Whoever starts a service
    again with its machine does so. That nobody answers there yet is then no mistake of a person's.

    To be asked before the addresses of this start are kept.
    """
    saved, before = saved_runs(settings.data_dir), WaysIn.load(settings.data_dir)
    if settings.run_file is not None:
        is_saved, is_named = bool(saved), False
    else:
        try:
            chosen = saved_run(saved, settings.run, before.runs)
        except UserError:  # several fit, which is said later
            return False
        is_saved, is_named = chosen is not None, bool(settings.run)
    # Folders of earlier releases do not say whom they joined.
    return is_saved and (is_named or not before.join or set(settings.join) <= set(before.join))


SCHEME = "p2pdiloco:"
LINK = LinkFormat(
    noun="a run link",
    prefix=f"{SCHEME}1",
    domain=b"p2pdiloco/1/link\0",
    hint="copy the whole word that `p2pdiloco run link`, a bootstrap or a node printed; it begins with "
    f"{SCHEME}1",
)


class _PackedLink(Wire, frozen=True):
    """Form in which a link is written."""

    run: Key
    owner: Key
    name: Annotated[str, Meta(max_length=64)]
    peers: Peers
    dns: Annotated[tuple[Annotated[str, Meta(max_length=320)], ...], Meta(max_length=MAX_NAMES)] = ()
    """Addresses /dnsaddr/NAME."""
    invite: Right | None = None


class RunLink(Struct, frozen=True):
    """Run, and the way to it in one word, `p2pdiloco:1<base32>` (`daemon.notice.LinkFormat`): all that a node
    needs to take part.

    A link holds no secret, unless an invite was put in. It makes joining sure: a node that dials the peers
    that it names takes the run of its id and of its owner, or none, whatever those peers say.
    """

    run: str
    """Id of the run."""
    addresses: tuple[str, ...]
    owner: str = ""
    """Peer id of the run's owner; empty: not said."""
    name: str = ""
    """Name of the run for people, as whoever made the link says; empty: not said."""
    invite: Invite | None = None
    """Invite to it: then the link is a secret."""

    def means(self, wanted: str) -> bool:
        """Tell whether an id, its beginning, a name, or nothing means this run."""
        return wanted in ("", self.name) or is_beginning(wanted, self.run)

    @property
    def title(self) -> str:
        """Name and beginning of the id, for people."""
        return f"{clean(self.name)} ({self.run[:SHORT]})" if self.name else self.run[:SHORT]


def link_of(run: PublishedRun, addresses: Sequence[str], invite: Invite | None = None) -> str:
    """Make the link to a run. Raises: ConfigError (it cannot hold an address)."""
    return encode_link(RunLink(run.id, tuple(addresses), run.signed.owner, run.name, invite))


def encode_link(link: RunLink) -> str:
    """Encode a link as text; of the addresses as many as there is room for. Raises: ConfigError."""
    owner = public_of(link.owner)
    if owner is None:
        raise ConfigError(f'"{link.owner}" is no key of an owner')
    names = [address for address in link.addresses if address.startswith(DNSADDR)]
    for address in names:
        check_join_address(address)
    peers = pack_peers(_worth_telling([a for a in link.addresses if a not in names]), LINK.noun)
    right = link.invite.right if link.invite is not None else None
    return LINK.encode(
        _PackedLink(bytes.fromhex(link.run), owner, link.name, peers, tuple(names[:MAX_NAMES]), right)
    )


def _worth_telling(addresses: Sequence[str]) -> Sequence[str]:
    """List the addresses without those of the loopback, where there are others."""
    return [address for address in addresses if not is_loopback(address)] or addresses


def is_link(text: str) -> bool:
    """Tell whether this is meant as a link or an invite, whole or not."""
    return "".join(text.split()).lower().startswith(SCHEME) or INVITE.fits(text)


def read_link(text: str) -> RunLink:
    """Read a link, or an invite. Raises: ConfigError (it is neither, or damaged)."""
    word = "".join(text.split()).lower()
    if INVITE.fits(text):
        invite = decode_invite(text)
        return RunLink(invite.run, invite.addresses, invite=invite)
    version = word.removeprefix(SCHEME)[:1]
    if word.startswith(SCHEME) and version.isdigit() and not LINK.fits(text):
        raise ConfigError(
            f"this run link is of form {version}, and this release reads form 1",
            "update p2pdiloco, or ask for the run's address and id: p2pdiloco node --join ADDRESS --run ID",
        )
    if not word.startswith(SCHEME):
        raise ConfigError(
            f'a run link begins with {LINK.prefix}, an invite with {INVITE.prefix}, this with "{word[:16]}"',
            LINK.hint,
        )
    return LINK.decode(text, _PackedLink, _unpacked)


def _unpacked(packed: _PackedLink) -> RunLink:
    for address in packed.dns:
        check_join_address(address)
    addresses = (*unpack_peers(packed.peers), *packed.dns)
    run = packed.run.hex()
    invite = Invite.of(run, packed.invite, addresses) if packed.invite is not None else None
    return RunLink(run, addresses, peer_of(packed.owner), packed.name, invite)


class Way(Struct, frozen=True):
    """Way into a swarm, as a person gave it: addresses, a run, or a link that says both."""

    join: tuple[str, ...]
    """Addresses, without links."""
    run: str
    text: str = ""
    """Link or invite that was given, as text; empty: none."""
    link: RunLink | None = None
    """Contents of that text."""


def way_of(join: Sequence[str], run: str = "", text: str = "") -> Way:
    """Read what a person gave: `--join`, each an address or a link, `--run`, and a link by itself.

    Raises: ConfigError (a link is damaged, or is to another run than `run`; or there are several).
    """
    texts = [*filter(None, (text,)), *filter(is_link, join)]
    if not texts:
        return Way(tuple(join), run)
    if len(texts) > 1:
        raise ConfigError("several run links or invites are given, and one says all", "leave all but one out")
    link = read_link(texts[0])
    if not link.means(run):
        what = "invite" if INVITE.fits(texts[0]) else "link"
        raise ConfigError(f"the {what} is to run {link.title}, and --run says {run}", "leave --run out")
    plain = [address for address in join if not is_link(address)]
    addresses = tuple(dict.fromkeys([*plain, *link.addresses]))
    return Way(addresses, link.run, texts[0], link)


def usual_folders(data_dir: Path | None) -> list[Path]:
    """List the folders to look through: the given one, or a node's and a bootstrap's default ones."""
    usual = NodeSettings().data_dir, BootstrapSettings().data_dir
    return [expanded(folder) for folder in ((data_dir,) if data_dir is not None else usual)]


def known_addresses(data_dir: Path, join: Sequence[str]) -> list[str]:
    """List addresses for a word: those that were named, else this folder's own and those met; may be none."""
    ways = WaysIn.load(data_dir)
    return list(join or [*ways.own[:MAX_ADDRESSES], *ways.members[::-1]])


def addresses_of(data_dir: Path, join: Sequence[str]) -> list[str]:
    """List the same, at least one.

    Raises: UserError (there are none).
    """
    found = known_addresses(data_dir, join)
    if not found:
        raise UserError(
            "there is no address in this folder that could be named",
            "start the node or bootstrap first, or name one: --join ADDRESS",
        )
    return found


def known_run(wanted: str, data_dir: Path | None) -> tuple[Path, PublishedRun]:
    """Find a run that a folder of this machine knows, as its node is in it or its bootstrap serves it, and
    that folder: by its id, the beginning of it, or its name; by nothing the one that was joined last, or the
    only one.

    Raises: UserError (there is none, or there are several).
    """
    folders = usual_folders(data_dir)
    names: list[PublishedRun] = []
    for folder in folders:
        saved = saved_runs(folder)
        names += saved.values()
        chosen = saved_run(saved, wanted, WaysIn.load(folder).runs)
        if chosen is not None:
            return folder, chosen
    where = " or ".join(map(str, folders))
    if names:
        raise UserError(f'no run "{wanted}" is in {where}', f"there is {run_names(names)}")
    raise UserError(
        f"no run is in {where}: no node joined one from there, and no bootstrap serves one",
        "name the folder of a node or bootstrap of the run: --data-dir DIR",
    )


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

    @property
    def waits(self) -> bool:
        """True: at the last look a host did not answer, which may settle it."""
        return 0 < self._silent_looks <= HOST_PATIENCE

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
            if self.waits:
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

    async def published(self, listed: ListedRun) -> PublishedRun | None:
        """Get the run with its manifest from whoever has the true one. None: nobody that was asked has.

        Raises:
            RemoteError: it is not valid, or by a name that a person wanted another run.
        """
        run = await pull_run(self._transport, listed, self._hosts, self._refused)
        if run is not None:
            self.check_name(listed, run.manifest)
        return run

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
