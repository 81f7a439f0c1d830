"""Trying of states that others gave: carries out `TryStates` by a program of its own (`learner.trial`)."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pdiloco.adapters.result_file import save_tensors
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core.api import events as ev
from p2pdiloco.daemon.learner_host import open_log
from p2pdiloco.daemon.payloads import Compute
from p2pdiloco.errors import P2PDilocoError, StorageError
from p2pdiloco.learner import channel as ch
from p2pdiloco.tensors.vault import Vault

logger = logging.getLogger(__name__)

FILE = "tried.safetensors"
FREE_BYTES = 256 << 20
"""Bytes of the disk that stay free."""
ANSWER_S = 900.0
"""Longest wait for the program: it reads the data first."""


@dataclass
class Trying:
    """Trying of others' states beside ours, on this node's held-out data. The core asks for one at a time."""

    _compute: Compute
    _folder: Path
    """Folder of the run's data, where the program finds the file."""
    _manifest: Manifest
    _options: ch.LearnerOptions
    _log: Path

    def __post_init__(self) -> None:
        self._path = self._folder / FILE
        self._best: float | None = None
        """Lowest loss of ours that was measured in this life."""
        self._remove()  # of a node that was killed meanwhile

    def _remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    async def tried(self, effect: ev.TryStates) -> ev.Tried | ev.Undone:
        """Try the states in the spare copies of these fragments."""
        order = ch.TryOrder(self._manifest, self._options, effect.fragments, self._path, self._best)
        try:
            await self._compute.run(self._write, effect.fragments)
            async with asyncio.timeout(ANSWER_S):
                answer = await _answer(order, self._log)
        except (P2PDilocoError, OSError, TimeoutError) as error:
            logger.warning("states of others cannot be tried: %s", error or "no answer in time")
            return ev.Undone(str(error) or "no answer in time")
        finally:
            self._remove()
        if isinstance(answer, ch.StatesTried):
            self._best = min(answer.ours, self._best or math.inf)
            return ev.Tried(answer.passed, answer.words)
        reason = answer.reason if isinstance(answer, ch.Failed) else "no answer"
        logger.warning("states of others cannot be tried: %s", reason)
        return ev.Undone(reason)

    def _write(self, fragments: Sequence[int]) -> None:
        """Raises: StorageError."""
        states = states_of(self._compute.vault, fragments)
        size = sum(values.nbytes for values in states.values())
        if shutil.disk_usage(self._path.parent).free < size + FREE_BYTES:
            raise StorageError(f"the disk has no room for {size} bytes of states")
        save_tensors(self._path, states, {}, durable=False)


def states_of(vault: Vault, fragments: Sequence[int]) -> dict[str, Any]:
    """Name all states of ours, and those in the spare copies of these fragments, for the program that tries
    them; shared memory."""
    ours = {f.index: (vault.theta(f.index), vault.momentum(f.index)) for f in vault.layouts}
    theirs = {fragment: vault.spare(fragment) for fragment in fragments}
    return {
        f"{whose}.{fragment}.{name}": values.numpy()
        for whose, states in (("ours", ours), ("theirs", theirs))
        for fragment, state in states.items()
        for name, values in zip(("theta", "momentum"), state, strict=True)
    }


async def _answer(order: ch.TryOrder, log: Path) -> ch.LearnerEvent:
    """Let the program answer; what it says otherwise goes to the log. It ends with us, by its input, and with
    this call."""
    with os.fdopen(open_log(log), "wb") as said:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "p2pdiloco.learner.trial"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=said,
            start_new_session=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(ch.frame(order))
        size = int.from_bytes(await process.stdout.readexactly(4), "big")
        return ch.decode_event(await process.stdout.readexactly(min(size, ch.MAX_FRAME_BYTES)))
    except asyncio.IncompleteReadError:
        raise ch.ChannelBroken(f"the program that tries them has ended: see {log}") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
