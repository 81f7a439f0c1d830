"""A node's copy of one fragment: its state, the spare copy that the next version is prepared in, the log."""

from __future__ import annotations

from p2pdiloco.core.api.types import Watermark
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco_lab.simulation.node.lineage import FragmentLineage, OuterUpdate
from p2pdiloco_lab.simulation.world.disk import Checkpoint, LoggedUpdate


class Store:
    """One fragment in host memory."""

    def __init__(
        self,
        version: SignedVersion,
        state: FragmentLineage,
        watermarks: tuple[Watermark, ...],
        log: dict[int, LoggedUpdate],
    ) -> None:
        self.version, self.state, self.watermarks = version, state, watermarks
        self.log = dict(log)
        self.spare: FragmentLineage | None = None
        self.saved_s = 0.0
        self._generation = 0
        self._busy = False

    def take_spare(self) -> int | None:
        """Begin a job that will fill the spare copy. None: another job is at it."""
        if self._busy:
            return None
        self._busy = True
        self._generation += 1
        self.spare = None
        return self._generation

    def fill_spare(self, generation: int, state: FragmentLineage | None) -> None:
        """A job is done (with nothing, if None). A job that was dropped meanwhile changes nothing."""
        if generation == self._generation:
            self.spare = state
            self._busy = False

    def drop_spare(self) -> None:
        """Forget what is in the spare copy, and any job that is filling it."""
        self._generation += 1
        self.spare = None
        self._busy = False

    def commit(
        self,
        version: SignedVersion,
        update: OuterUpdate | None,
        watermarks: tuple[Watermark, ...],
        keep: int,
    ) -> None:
        """The spare copy becomes the state."""
        if self.spare is None:
            raise ValueError("nothing in the spare copy")
        self.version, self.state, self.watermarks = version, self.spare, watermarks
        self.drop_spare()
        if update is None:
            self.log.clear()
            return
        number = version.header.number
        self.log[number] = (version, update)
        for old in [n for n in self.log if n <= number - keep]:
            del self.log[old]

    def checkpoint(self) -> Checkpoint:
        """Return the content of a checkpoint."""
        return Checkpoint(self.version, self.state, self.watermarks, dict(self.log))
