"""Loss audits: a contribution to a version is fetched, and our learner measures what it does to the loss.

The learner gets a file: the parameters that the version was made from, that contribution, and our own one.

Rules: docs/protocol/loss-audits.md, section 2.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.daemon.bulk.audits.auditing import Auditing
from p2pdiloco.daemon.bulk.audits.giving import read
from p2pdiloco.daemon.bulk.chain_view import ChainView
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.errors import StorageError
from p2pdiloco.learner import channel as ch
from p2pdiloco.ports import Buffer
from p2pdiloco.tensors import vault as appraisal

logger = logging.getLogger(__name__)
FILE = "appraised-"
"""Beginning of the name of a file for the learner; each audit has a file of its own."""
FREE_BYTES = 256 << 20
"""Bytes of the disk that stay free."""
ANSWER_S = 600.0
"""Longest wait for the learner: it answers between two inner steps, when it is not compiling."""


class AppraisingLearner(Protocol):
    """Learner, as far as this is concerned (`daemon.learner.questions`)."""

    @property
    def appraises(self) -> bool:
        """True: it is here, and can measure contributions."""

    async def appraise(self, question: ch.Appraise) -> ch.Appraised | None:
        """Let it measure two contributions; None: nothing came."""


class LossAuditing:
    """Loss auditing: carries out `LossAudit`, of which the core asks for one at a time."""

    def __init__(
        self,
        chain: ChainView,
        compute: Compute,
        auditing: Auditing,
        learner: AppraisingLearner,
        folder: Path,
        manifest: Manifest,
        post: Callable[[ev.Event], None],
    ) -> None:
        """`folder`: of the run's data, where the learner finds the file."""
        self._chain, self._compute, self._auditing = chain, compute, auditing
        self._learner, self._folder = learner, folder
        self._count = 0
        """Number of audits so far. Each has a file of its own: a learner that answers late, or only now takes
        up what nobody waits for any more, neither reads nor answers what was asked after it."""
        self._manifest = manifest
        self._post = post
        self._remove()  # of a node that was killed meanwhile

    def _remove(self) -> None:
        try:
            for path in self._folder.glob(f"{FILE}*"):
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s", error)

    async def audit(self, effect: ef.LossAudit) -> None:
        """Have a contribution measured, and tell the core what was found."""
        found = None
        try:
            found = await self._measured(effect)
        except (StorageError, OSError) as error:
            logger.warning("%s", error)
        finally:
            self._remove()
        event = ev.LossAudited(effect.fragment, effect.version.header.digest())
        if found is not None:
            figures = found.theirs, found.ours, found.same_data, found.took_s
            event = ev.LossAudited(event.fragment, event.digest, *figures)
        self._post(event)

    async def _measured(self, effect: ef.LossAudit) -> ch.Appraised | None:
        """Raises: StorageError."""
        if not self._learner.appraises:
            return None
        header, fragment = effect.version.header, effect.fragment
        update = await self._chain.update_of(fragment, header.number)
        start = None
        if update is not None:
            start = await self._compute.run(self._start, fragment, header.number, update[1])
        ours = await self._chain.contribution_of(fragment, effect.ours.payload_digest)
        if start is None or ours is None:
            return None
        size = appraisal.file_bytes(self._manifest.codec.contribution, len(start))
        if shutil.disk_usage(self._folder).free < size + FREE_BYTES:
            return None
        self._count += 1
        path = self._folder / f"{FILE}{self._count}"
        await asyncio.to_thread(appraisal.begin, path, start)
        del start
        async with self._auditing.contribution(effect.version, effect.theirs) as theirs:
            if theirs is None:
                return None
            await asyncio.to_thread(appraisal.add, path, await read(theirs), await read(ours))
        question = ch.Appraise(fragment, effect.theirs.learner, path)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._learner.appraise(question)
        except TimeoutError:
            return None

    def _start(self, fragment: int, number: int, update: Buffer) -> Tensor | None:
        """Find the parameters that the version was made from; None: the fragment has moved on. Of a version
        of less than an interval they are about right."""
        vault = self._compute.vault
        if vault.version(fragment) != number:
            return None
        codec, rate = self._manifest.codec.update, self._manifest.outer.learning_rate
        return appraisal.start_of(vault.result(fragment), update, codec, rate)
