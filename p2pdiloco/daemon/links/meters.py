"""Meters of our link, each way: what transfers show of it, beside what a person permits."""

from __future__ import annotations

import asyncio
import math

from p2pdiloco.core.capacity import Meter, UplinkMeter
from p2pdiloco.daemon.links.link import LINK_OVERHEAD, Link
from p2pdiloco.ports import Transport

UNLIMITED = Link(math.inf, math.inf)


class LinkMeters:
    """Meters of all payload bytes of one transport."""

    def __init__(
        self, transport: Transport, limits: Link = UNLIMITED, remembered_bits_per_s: float = math.inf
    ) -> None:
        """`limits`: rates that a person permits; infinite where nothing is said. `remembered_bits_per_s`:
        what the uplink carried in an earlier life."""
        self.limits = limits
        self._transport = transport
        now = asyncio.get_running_loop().time
        self.uplink = UplinkMeter(
            lambda: Meter(lambda: self.sent_bytes, now, LINK_OVERHEAD), remembered_bits_per_s
        )
        """Meter that runs while contributions and partial merges go out, and while updates are given to
        others."""
        self.downlink = Meter(lambda: self._transport.payload_bytes()[1], now, LINK_OVERHEAD)
        """Meter that runs while updates that we asked for come."""

    def permit(self, limits: Link) -> None:
        """Go by other rates of a person's from now on."""
        self.limits = limits

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that have gone out on all links, also of what is under way."""
        return self._transport.payload_bytes()[0]

    @property
    def link(self) -> Link:
        """Rates of the link as far as they are known. Round trips do not count: they cost delay, not
        participation."""
        return Link(
            min(self.limits.upload_bits_per_s, self.uplink.sure_bits_per_s),
            min(self.limits.download_bits_per_s, self.downlink.bits_per_s),
            0.0,
        )

    @property
    def uplink_bytes_per_s(self) -> float:
        """Rate of the uplink as far as it is known: what a person permits, or what was measured."""
        return self.link.upload_bits_per_s / 8
