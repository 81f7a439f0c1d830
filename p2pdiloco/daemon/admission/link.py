"""Run links: which run, whose it is, and whom to join through, in one word (`daemon.admission.word`).

    p2pdiloco:1<base32>

A link holds no secret, unless an invite was put in. It makes joining sure: who dials the peers that it names
takes the run of its id and of its owner, or none, whatever those peers say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from p2pdiloco.config.values import DNSADDR, check_join_address, is_loopback
from p2pdiloco.core.api.types import Wire
from p2pdiloco.daemon.admission.invite import INVITE, Invite, Right, decode_invite
from p2pdiloco.daemon.admission.word import Key, Kind, Peers, pack_peers, unpack_peers
from p2pdiloco.daemon.run_files.listing import SHORT, PublishedRun, is_beginning
from p2pdiloco.errors import ConfigError, clean
from p2pdiloco.identity import peer_of, public_of

SCHEME = "p2pdiloco:"
MAX_NAMES = 4
LINK = Kind(
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
    """Run, and the way to it: all that a node needs to take part."""

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


def is_word(text: str) -> bool:
    """Tell whether this is meant as a link or an invite, whole or not."""
    return "".join(text.split()).lower().startswith(SCHEME) or INVITE.fits(text)


def read_word(text: str) -> RunLink:
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
    """Way into a swarm, as a person gave it: addresses, a run, or a word that says both."""

    join: tuple[str, ...]
    """Addresses, without words."""
    run: str
    word: str = ""
    """Link or invite that was given; empty: none."""
    link: RunLink | None = None
    """Contents of that word."""


def way_of(join: Sequence[str], run: str = "", word: str = "") -> Way:
    """Read what a person gave: `--join`, each an address or a word, `--run`, and a word by itself.

    Raises: ConfigError (a word is damaged, or is to another run than `run`; or there are several).
    """
    words = [*filter(None, (word,)), *filter(is_word, join)]
    if not words:
        return Way(tuple(join), run)
    if len(words) > 1:
        raise ConfigError("several run links or invites are given, and one says all", "leave all but one out")
    link = read_word(words[0])
    if not link.means(run):
        what = "invite" if INVITE.fits(words[0]) else "link"
        raise ConfigError(f"the {what} is to run {link.title}, and --run says {run}", "leave --run out")
    plain = [address for address in join if not is_word(address)]
    addresses = tuple(dict.fromkeys([*plain, *link.addresses]))
    return Way(addresses, link.run, words[0], link)
