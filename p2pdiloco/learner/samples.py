"""Stream of a learner's samples, shard after shard as allotted, and its place in them.

`SampleStream` reads; `Allotment` says which shard is next. Samples that have an index are put into a
pseudo-random order, one for every epoch (`permuted`), and that order is cut into shards (`Ordered`). What has
no random access brings shards and their order along (`tasks.task.Shards`).

The place is written down ahead: before a sample is used, the file says that it and the next ones of
`AHEAD_STEPS` inner steps are used. So whatever is killed, nothing is taken twice in an epoch; what was
written and not used is left out. After an orderly end nothing is. The file is renamed into place and not
flushed to the disk: a power cut may cost the last seconds' places.

Rules: docs/protocol/learner.md, section 7.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import torch
from msgspec import Meta, msgpack
from numpy.typing import NDArray

from p2pdiloco.errors import DataError
from p2pdiloco.learner.channel import MAX_EPOCH, MAX_SHARDS, DataShare, Epoch
from p2pdiloco.tasks.documents import hash64
from p2pdiloco.tasks.task import Count, Place, Reader, Samples, Shards
from p2pdiloco.util import Frozen, read_note

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch, Indices

AHEAD_STEPS = 16
FINGERPRINT_SAMPLES = 64
LATELY = 4
"""Times as many samples as are drawn of another reader's share: those that it took last."""


class SavedPlace(Frozen):
    """Content of the file."""

    data: str
    """Identity of the data that these are places of (`SampleStream.data`)."""
    epoch: Epoch
    taken: Annotated[bytes, Meta(max_length=MAX_SHARDS)]
    reading: tuple[Epoch, Count]
    """Epoch and number of the shard."""
    place: Place
    used: Count
    """Number of samples from there on that are used."""


_decoder = msgpack.Decoder(SavedPlace)


class Ordered:
    """Samples with an index as `tasks.task.Shards`."""

    def __init__(self, samples: Samples, seed: int, step_samples: int) -> None:
        self.samples, self.seed = samples, seed
        self.count = min(MAX_SHARDS, max(1, len(samples) // step_samples))
        self.identity = fingerprint(samples)

    def places(self, shard: int) -> Array:
        """List the places of a shard's samples in the order of an epoch."""
        size = len(self.samples)
        return np.arange(shard * size // self.count, (shard + 1) * size // self.count)

    def at(self, places: Array, epoch: int) -> Batch:
        """Return the samples at these places of an epoch's order."""
        return self.samples.batch(permuted(places, len(self.samples), f"{self.seed}/{epoch}"))

    def open(self, epoch: int, shard: int, place: Place) -> Reader:
        return _Slice(self, epoch, shard, place)


class _Slice:
    """A shard of an order."""

    def __init__(self, of: Ordered, epoch: int, shard: int, place: Place) -> None:
        self._of, self._epoch, self._places = of, epoch, of.places(shard)
        self.place = place

    def take(self, samples: int) -> Batch | None:
        places = self._places[self.place.offset :][:samples]
        if not len(places):
            return None
        self.place = Place(self.place.offset + len(places))
        return self._of.at(places, self._epoch)

    def close(self) -> None:
        """End reading; there is nothing to give back."""


class SampleStream:
    """A learner's endless sequence of training samples (module docstring)."""

    def __init__(
        self, samples: Samples | Shards, seed: int, peer: str, step_samples: int = 1, path: Path | None = None
    ) -> None:
        """`step_samples`: of an inner step; `path`: where the place is kept, None: nowhere.

        Raises:
            UserError: there is nothing to train on.
        """
        if not isinstance(samples, Shards):
            if len(samples) < 1:
                raise DataError("there is nothing to train on", "give more with --data")
            samples = Ordered(samples, seed, step_samples)
        self._shards = samples
        self._step_samples = step_samples
        self._path = path
        text = f"{seed}/{samples.count}/{samples.identity}"
        self.data = hashlib.sha256(text.encode()).hexdigest()[:16]
        """Identity of the data: equal in learners that read the same data in the same run."""
        self._allotment = Allotment(samples.count, seed, peer)
        self._reading: tuple[int, int] = (0, 0)
        self._reader: Reader | None = None
        self._ahead = 0
        """Samples that are used already as far as the file knows."""
        self._unwritable = False
        self._unused: deque[SavedPlace] = deque()
        """Places of the samples that were taken, a step's each, until they are used."""
        self._given_back = False
        self._writing = threading.Lock()
        self._resume()

    def share(self, share: DataShare) -> None:
        """Take in what is known of others that read this data."""
        if share.data == self.data:
            self._allotment.share(share.readers, share.epoch, share.taken)

    @property
    def shared(self) -> DataShare:
        """Progress of ours that others should know. A shard that was begun ahead may be given back."""
        at = self._unused[0] if self._unused else self._allotment
        return DataShare(self.data, at.epoch, at.taken, shards=self._allotment.count)

    def take(self, samples: int) -> Batch:
        """Take the next so many samples.

        Raises:
            UserError: the data cannot be read any more, or has no sample.
        """
        parts: list[Batch] = []
        missing, empty = samples, 0
        reader = self._reader or self._begin(Place())
        with self._writing:
            self._unused.append(self._at(reader.place, 0))
        while missing:
            if self._ahead < missing:
                self._write(reader.place, max(missing, AHEAD_STEPS * self._step_samples))
            batch = reader.take(missing)
            if batch is None:
                empty += 1
                if empty > 2 * self._shards.count:
                    raise DataError("there is nothing to train on", "give more with --data")
                reader = self._finish(reader)
                continue
            empty = 0
            parts.append(batch)
            missing -= len(batch[0])
            self._ahead -= len(batch[0])
        return (
            parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))
        )

    def used(self) -> None:
        """Declare that what was taken first, of what is not used, has gone into the parameters."""
        with self._writing:
            self._unused.popleft()

    def give_back(self) -> None:
        """Give back what was taken and not used: the next life takes it again.

        The place is kept as it is now from here on; another thread may be in `take`, whose samples nobody
        uses.
        """
        with self._writing:
            if (saved := self._first_unused()) is not None:
                self._put(saved)
            self._given_back = True

    def anywhere(self, samples: int, rng: np.random.Generator) -> Batch | None:
        """Draw some of the samples; None: they have no index. They do not count as used."""
        if not isinstance(self._shards, Ordered):
            return None
        return self._shards.at(rng.integers(0, len(self._shards.samples), samples), self._allotment.epoch)

    def share_of(self, peer: str, samples: int, rng: np.random.Generator) -> Batch | None:
        """Draw some of the samples that another reader took last in this epoch, by all that we know; None: of
        none is that known. They do not count as used."""
        if not isinstance(self._shards, Ordered):
            return None
        found: list[Array] = []
        for shard in self._allotment.begun_by(peer):
            found.append(self._shards.places(int(shard)))
            if sum(map(len, found)) >= LATELY * samples:
                break
        if not found:
            return None
        drawn = rng.permutation(np.concatenate(found))[:samples]
        return self._shards.at(drawn, self._allotment.epoch)

    def save_place(self) -> None:
        """Write down exactly where we are: an orderly end follows, or a save. (What was taken ahead is used
        only after more was taken, which is written down before.)"""
        self._ahead = 0
        with self._writing:
            if (saved := self._first_unused()) is not None and not self._given_back:
                self._put(saved)

    def _first_unused(self) -> SavedPlace | None:
        if self._unused:
            return self._unused[0]
        return self._at(self._reader.place, 0) if self._reader is not None else None

    def _begin(self, place: Place) -> Reader:
        self._reading = self._allotment.next()
        self._reader = self._shards.open(*self._reading, place)
        self._ahead = 0
        return self._reader

    def _finish(self, reader: Reader) -> Reader:
        reader.close()
        return self._begin(Place(carry=reader.place.carry))

    def _write(self, place: Place, used: int) -> None:
        self._ahead = used
        with self._writing:
            if not self._given_back:
                self._put(self._at(place, used))

    def _at(self, place: Place, used: int) -> SavedPlace:
        return SavedPlace(self.data, self._allotment.epoch, self._allotment.taken, self._reading, place, used)

    def _put(self, saved: SavedPlace) -> None:
        if self._path is None:
            return
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            temporary.write_bytes(msgpack.encode(saved))
            temporary.replace(self._path)
        except OSError as error:
            if not self._unwritable:
                print(f"the place in the data cannot be kept: {error}", file=sys.stderr)
            self._unwritable = True

    def _decoded(self, content: bytes) -> SavedPlace:
        """Raises: ValueError, msgspec.MsgspecError: it is no place of any data, or of this data."""
        saved = _decoder.decode(content)
        if saved.data == self.data and saved.reading[1] >= self._shards.count:
            raise ValueError(f"shard {saved.reading[1]} of {self._shards.count}")
        return saved

    def _resume(self) -> None:
        """Only from a file that is of this data."""
        if self._path is None:
            return
        saved = read_note(self._path, self._decoded, lambda text: print(text, file=sys.stderr))
        if saved is None or saved.data != self.data:
            return
        self._allotment.share((), saved.epoch, saved.taken)
        self._reading = saved.reading
        self._reader = self._shards.open(*saved.reading, saved.place)
        left = saved.used
        while left and (batch := self._reader.take(min(left, self._step_samples))) is not None:
            left -= len(batch[0])


def fingerprint(samples: Samples) -> str:
    """Digest of some samples, evenly spread, and of their number: equal where the data is."""
    size = len(samples)
    count = min(size, FINGERPRINT_SAMPLES)
    digest = hashlib.sha256(str(size).encode())
    for tensor in samples.batch(np.arange(count, dtype=np.int64) * size // count):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Allotment:
    """Choice of the shard that this reader takes next: a division of the data without anybody who hands it
    out.

    The data of an epoch is cut into shards. Every shard has an owner: the reader with the highest rendezvous
    hash among those that are known (the daemon's `Sharing` tells them). A reader takes what it owns, first
    that in which its own hash is highest; when nothing of that is left it helps the others, and when nothing
    is left at all the next epoch begins, with other owners. Readers tell each other which shards were begun:
    a set that only grows, so that any two can be united, and the later epoch wins, if most are in it (the
    daemon's `agreed`).

    Two readers whose views agree never take the same shard, but at the end of an epoch, where a helper may
    begin what its owner has just begun. Where views differ (somebody came a moment ago, the network is cut),
    a shard may be read twice in an epoch; that both go first for what they own most clearly makes that late
    and rare. A reader that is gone owns nothing any more. What it had begun and not finished is left out in
    this epoch; in the next one it has other owners.
    """

    def __init__(self, count: int, seed: int, peer: str) -> None:
        """Begin with epoch 0. `count`: of shards, at most `MAX_SHARDS`."""
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
        self._hashes = self._hashes or self._owned_by(self._peer)
        ours, owned = self._hashes
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
        theirs, owned = self._owned_by(peer)
        found = np.flatnonzero(owned & self._taken)
        return found[np.argsort(theirs[found])]

    def _begin(self, epoch: int) -> None:
        self.epoch, self._hashes = epoch, None
        self._taken = np.zeros(self.count, dtype=bool)

    def _owned_by(self, peer: str) -> tuple[Array, Array]:
        """Hashes of every shard and this reader, and whether it owns it."""
        base = np.uint64(hash64(f"shards/{self._seed}/{self.epoch}"))
        shards = mixed(base + np.arange(self.count, dtype=np.uint64))
        theirs = mixed(shards ^ np.uint64(hash64(peer)))
        owned = np.ones(self.count, dtype=bool)
        for other in {self._peer, *self._others} - {peer}:
            owned &= theirs > mixed(shards ^ np.uint64(hash64(other)))
        return theirs, owned


_ROUNDS = 4

Array = NDArray[Any]


def permuted(places: Array, size: int, key: str) -> Indices:
    """A keyed pseudo-random permutation of range(size), at these places: int64, same shape. Any part of it is
    known, and none is stored.

    A balanced Feistel network over the next even power of two; results beyond `size` walk on along their
    cycle until they are inside it (at most 4 tries on average).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(hash64(f"permutation/{key}/{i}")) for i in range(_ROUNDS)]
    values = _feistel(places.astype(np.uint64), half_bits, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: Array, half_bits: int, keys: list[np.uint64]) -> Array:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mixed(right ^ key) & mask)
    return (left << shift) | right


def mixed(values: Array) -> Array:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast(Array, values ^ (values >> np.uint64(31)))
