"""Division of the data among readers, without anybody who hands it out.

The data of an epoch is cut into shards. Every shard has an owner: the reader with the highest rendezvous
hash among those that are known (`daemon.finding.sharing` tells them). A reader takes what it owns, first that
in which its own hash is highest; when nothing of that is left it helps the others, and when nothing is left
at all the next epoch begins, with other owners. Readers tell each other which shards were begun: a set that
only grows, so that any two can be united, and the later epoch wins, if most are in it
(`daemon.finding.sharing.agreed`).

Two readers whose views agree never take the same shard, but at the end of an epoch, where a helper may begin
what its owner has just begun. Where views differ (somebody came a moment ago, the network is cut), a shard
may be read twice in an epoch; that both go first for what they own most clearly makes that late and rare.
A reader that is gone owns nothing any more. What it had begun and not finished is left out in this epoch;
in the next one it has other owners.

Rules: docs/protocol/learner.md, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2pdiloco.learner.channel_messages import MAX_EPOCH
from p2pdiloco.learner.reading.permutation import Array, mixed
from p2pdiloco.tasks.documents import hash64


class Allotment:
    """Choice of the shard that this reader takes next."""

    def __init__(self, count: int, seed: int, peer: str) -> None:
        """Begin with epoch 0. `count`: of shards, at most `channel_messages.MAX_SHARDS`."""
        self.count = count
        self._seed, self._peer = seed, peer
        self._others: tuple[str, ...] = ()
        self.epoch = 0
        self._taken = np.zeros(count, dtype=bool)
        self._hashes: tuple[Array, Array] | None = None
        """Hashes of every shard, ours, and whether we own it; None: to be worked out."""

    @property
    def taken(self) -> bytes:
        """A bit for every shard of this epoch that somebody has begun."""
        return np.packbits(self._taken).tobytes()

    def share(self, readers: Sequence[str], epoch: int, taken: bytes) -> None:
        """Take in who else reads this data (we do not matter), and what is begun as far as they know."""
        others = tuple(sorted(set(readers) - {self._peer}))
        if others != self._others:
            self._others, self._hashes = others, None
        if len(taken) != (self.count + 7) // 8 or not self.epoch <= epoch <= MAX_EPOCH:
            return
        if epoch > self.epoch:
            self._begin(epoch)
        self._taken |= np.unpackbits(np.frombuffer(taken, dtype=np.uint8), count=self.count).astype(bool)

    def next(self) -> tuple[int, int]:
        """Begin another shard: (epoch, shard)."""
        if self._taken.all():
            self._begin(min(self.epoch + 1, MAX_EPOCH))
        ours, owned = self._hashes or self._hashed()
        free = ~self._taken
        choice = np.flatnonzero(free & owned if (free & owned).any() else free)
        shard = int(choice[np.argmax(ours[choice])])
        self._taken[shard] = True
        return self.epoch, shard

    def begun_by(self, peer: str) -> Array:
        """List the shards of this epoch that another reader has begun, for all that we know: it owns them.
        The newest come first."""
        if peer not in self._others:
            return np.empty(0, dtype=np.int64)
        shards = self._shards()
        theirs = mixed(shards ^ np.uint64(hash64(peer)))
        owned = self._taken.copy()
        for other in (self._peer, *self._others):
            if other != peer:
                owned &= theirs > mixed(shards ^ np.uint64(hash64(other)))
        found = np.flatnonzero(owned)
        return found[np.argsort(theirs[found])]

    def _begin(self, epoch: int) -> None:
        self.epoch, self._hashes = epoch, None
        self._taken = np.zeros(self.count, dtype=bool)

    def _hashed(self) -> tuple[Array, Array]:
        shards = self._shards()
        ours = mixed(shards ^ np.uint64(hash64(self._peer)))
        owned = np.ones(self.count, dtype=bool)
        for other in self._others:
            owned &= ours > mixed(shards ^ np.uint64(hash64(other)))
        self._hashes = ours, owned
        return self._hashes

    def _shards(self) -> Array:
        base = np.uint64(hash64(f"shards/{self._seed}/{self.epoch}"))
        return mixed(base + np.arange(self.count, dtype=np.uint64))
