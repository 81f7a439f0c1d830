"""Consequences of what is known of our link: offices, how often we contribute, words for people."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.base import Shared
from p2pdiloco.core.capacity import TELL_EVERY_S
from p2pdiloco.daemon.diary import Diary
from p2pdiloco.daemon.learner.learner_link import LearnerLink
from p2pdiloco.daemon.links.linkwatch import LinkWatch

logger = logging.getLogger(__name__)


class LinkTeller:
    """Teller of what is known of the link: to the core, the learner and people."""

    def __init__(
        self,
        watch: LinkWatch,
        shared: Shared,
        learner: LearnerLink,
        diary: Diary,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._watch = watch
        self._shared = shared
        self._learner = learner
        self._diary = diary
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._tell_uplink(1)

    async def tell_regularly(self) -> None:
        """Judge now and then, for ever."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            self.judge()

    def judge(self) -> None:
        """Judge the link; what is new is said, and done."""
        watch, learner, now = self._watch, self._learner, self._loop.time()
        members = len(self._shared.view.members(now)) + 1
        self._tell_uplink(members)
        status, others_s = learner.status, self._shared.median_step_s(now)
        step_s = others_s if status is None else status.step_time_s
        if not watch.judge(members, step_s, catching_up=status is None):  # it may never catch up for the link
            return
        learner.take_part(watch.every)
        words = watch.words or "the link keeps up again: contributing to every version"
        up, down = watch.meters.link.upload_bits_per_s, watch.meters.link.download_bits_per_s
        self._diary.say(
            logging.WARNING if watch.words else logging.INFO,
            "link",
            words,
            every=watch.every,
            upload_bits_per_s=round(up) if up < math.inf else None,
            download_bits_per_s=round(down) if down < math.inf else None,
        )

    def _tell_uplink(self, members: int) -> None:
        """Tell the core what our link carries, or is permitted to. With others' links it decides how often
        we hold an office."""
        # A machine that rests for its owner leaves offices to others, as one with a thin uplink does.
        rests = self._learner.handed_over
        rate = 0.0 if rests else self._watch.office_bits_per_s(members)
        if rate != self._shared.uplink.bits_per_s:
            self._post(ev.UplinkMeasured(rate))
