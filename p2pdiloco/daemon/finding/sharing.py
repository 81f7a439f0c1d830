"""Records on the DHT of who reads which part of the data, which learners must know of each other.

Every member has a record under the run's key: which data its learner reads, the epoch, and a bit for every
shard that was begun, by anybody as far as it knows (`learner.reading.shards`). It is renewed when it changes,
and before it expires; whoever is gone is forgotten with its record. Members that read other data are none of
our learner's business. Anybody may write a record: in an open run it is read once its author has a mark.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from p2pdiloco.daemon import wire
from p2pdiloco.errors import RemoteError
from p2pdiloco.learner.channel import DataShare, Status
from p2pdiloco.ports import Transport

logger = logging.getLogger(__name__)
LIFETIME_S = 60.0
RENEW_S = 20.0
FIRST_S, SETTLED_S, SLOWER = 5.0, 20.0, 1.25
"""Pause between two looks at the records, and least pause between two changes of ours: at first, later, and
by what factor it grows each time once our learner is there.

Of four nodes, looking every 5 s for ever cost each of them more than half of what heartbeats do, on a link
that may have 1 Mbit/s. Whoever sees a shard begun 40 s late (20 s until it is told, 20 s until it is looked
up) at worst repeats that much.
"""
AGAIN_S = 1.0
"""First pause before a record that could not be told is told again; it doubles up to the usual pause."""
COMPLAIN_AFTER = 3
"""Failures in a row until a person hears of it."""
NOT_TOLD = "data-shards-not-told"
"""Name of such failures among the refusals of a report."""
LOOK_S_PER_READER = 0.25
LOOK_AT_MOST_S = 60.0
"""Pause between looks for every reader, up to `LOOK_AT_MOST_S`: a look costs about 300 bytes for each."""
MAX_READERS = 2048


class ReadingLearner(Protocol):
    """Learner, as far as it matters here (`daemon.learner.learner_link`)."""

    status: Status | None

    def share_data(self, share: DataShare) -> None:
        """Tell the learner what of its data is begun, and by whom else it is read."""


class Sharing:
    """Exchange of these records: ours, and what follows from the others'."""

    def __init__(
        self,
        transport: Transport,
        run: str,
        learner: ReadingLearner,
        counts: Callable[[str], bool] = lambda _peer: True,
    ) -> None:
        """`counts`: tells whether to listen to a peer; others' records are passed over."""
        self._counts = counts
        self._transport = transport
        self._key = wire.reading_key(run)
        self._learner = learner
        self._told: DataShare | None = None
        self._written: wire.Reading | None = None
        self._renew_s = 0.0
        self._failed = 0
        """Number of times in a row that nobody could be told, though there are others."""
        self.failures = 0
        """Number of all such failures."""

    async def publish(self) -> None:
        """Keep our record on the DHT, for ever."""
        pause_s = FIRST_S
        while True:
            if await self.tell() or not self._failed:
                await asyncio.sleep(pause_s)
                pause_s = self._later_s(pause_s)
            else:
                await asyncio.sleep(min(AGAIN_S * 2 ** min(self._failed - 1, 10), pause_s))

    async def tell(self) -> bool:
        """Renew our record, if there is a reason. False: nobody else has it, and it is to be told again."""
        ours, now = self._ours(), asyncio.get_running_loop().time()
        if ours is None or (ours == self._written and now < self._renew_s):
            return True
        self._written, self._renew_s = ours, now + RENEW_S
        told = await self._transport.put_record(self._key, wire.encode(ours), LIFETIME_S)
        if not told:
            self._written = None
        self._count(told)
        return told

    def _count(self, told: bool) -> None:
        if told:
            if self._failed >= COMPLAIN_AFTER:
                logger.info("the others are told again which data this node has begun")
            self._failed = 0
        elif self._transport.peers_connected():  # alone there is nobody to be told
            self._failed += 1
            self.failures += 1
            if self._failed == COMPLAIN_AFTER:
                words = (
                    "which data this node has begun could not be told %(times)d times: others may read it too"
                )
                logger.warning(words, {"times": self._failed})

    async def watch(self) -> None:
        """Look for ever what the others read, and tell the learner."""
        pause_s = FIRST_S
        while True:
            readers = await self.look()
            await asyncio.sleep(min(LOOK_AT_MOST_S, max(pause_s, LOOK_S_PER_READER * readers)))
            pause_s = self._later_s(pause_s)

    def _later_s(self, pause_s: float) -> float:
        """Lengthen the pause once the learner is there: others are to hear soon of one that begins late,
        and it of them."""
        return min(SETTLED_S, SLOWER * pause_s) if self._learner.status is not None else FIRST_S

    async def look(self) -> int:
        """Look once; return how many records there were."""
        records: dict[str, wire.Reading] = {}
        found = sorted((await self._transport.get_records(self._key)).items())
        for peer, value in [pair for pair in found if self._reads(pair[0])][:MAX_READERS]:
            try:
                records[peer] = wire.decode(value, wire.Reading)
            except RemoteError as error:
                logger.debug("what %s says that it reads is not readable: %s", peer, error)
        ours = self._ours()
        # Before our learner has begun we do not know its data: most of the others' is the best guess.
        names = Counter(sorted(record.data for record in records.values()))
        data = ours.data if ours else max(names, key=lambda name: names[name], default="")
        share = agreed(data, self._transport.peer_id, ours, records)
        if share is not None and share != self._told:
            self._told = share
            self._learner.share_data(share)
        return len(records)

    def _reads(self, peer: str) -> bool:
        return peer == self._transport.peer_id or self._counts(peer)

    def _ours(self) -> wire.Reading | None:
        share = self._learner.status.share if self._learner.status else None
        return wire.Reading(share.data, share.epoch, share.taken) if share else None


def agreed(
    data: str, me: str, ours: wire.Reading | None, records: Mapping[str, wire.Reading]
) -> DataShare | None:
    """Work out what to tell the learner of `me`, which says `ours`, from all records. None: nobody reads its
    data.

    A record is no more than its writer's word. A later epoch counts when most of the others are in it, two at
    least; with a single other reader the next one does. Of the shards of our epoch every word counts: whoever
    began one may be the only one that knows.
    """
    bytes_of = {len(ours.taken)} if ours is not None else {len(record.taken) for record in records.values()}
    same = {
        peer: record
        for peer, record in records.items()
        if record.data == data and len(record.taken) in bytes_of
    }
    others = [record for peer, record in same.items() if peer != me]
    known = [*others, ours] if ours is not None else others
    if not known:
        return None
    now = ours.epoch if ours is not None else 0
    reached = sorted((record.epoch for record in others), reverse=True)[len(others) // 2] if others else now
    epoch = max(now, reached if len(others) > 1 else min(reached, now + 1))
    size = max(len(record.taken) for record in known)
    taken = united([bytes(size), *(record.taken for record in known if record.epoch == epoch)])
    return DataShare(data, epoch, taken, tuple(same))


def united(sets: list[bytes]) -> bytes:
    """Unite sets of bits of the same length (others are left out): the bits that are in any."""
    length = max(map(len, sets), default=0)
    bits = 0
    for one in sets:
        bits |= int.from_bytes(one, "big") if len(one) == length else 0
    return bits.to_bytes(length, "big")
