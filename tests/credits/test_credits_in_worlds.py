"""Credits of simulated runs with partitions and crashes: what every learner did that is in the state."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco.core.api.effects import CommitVersion, Effect
from p2pdiloco.credits import HeadRef, HistoryRecord, HistoryStore, Signatures, count_line
from p2pdiloco_lab.simulation.lineage import HashCrypto
from p2pdiloco_lab.simulation.seed_plan import RUN, draw_plan
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World


class Kept:
    """Histories that all nodes of a world keep, in one store: every branch that anybody took is in it."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.history = world, HistoryStore(folder)
        self.digests: dict[tuple[int, int], set[bytes]] = {}
        world.on_effect = self._effect

    def _effect(self, host: Host, effect: Effect) -> None:
        if not isinstance(effect, CommitVersion):
            return
        header = effect.version.header
        known = self.digests.setdefault((header.fragment, header.number), set())
        if header.digest() not in known:
            known.add(header.digest())
            self.history.append(HistoryRecord(round(host.now), effect.version))

    def forks(self) -> int:
        """Number of versions of which there were several."""
        return sum(len(digests) > 1 for digests in self.digests.values())


@pytest.mark.parametrize(("mix", "seed"), [("partition", 5), ("partition", 14), ("storm", 2), ("churn", 8)])
def test_credits_are_what_the_state_has_of_every_learner(mix: str, seed: int, tmp_path: Path) -> None:
    world = World(draw_plan(seed, mix))
    kept = Kept(world, tmp_path)
    assert not world.run().violation
    counted = 0
    for host in world.core_hosts():
        for store in host.stores:
            head = store.version.header
            signatures = Signatures(RUN, head.fragment, HashCrypto("asker").verify)
            ledger = count_line(
                kept.history, RUN, head.fragment, HeadRef.of(head.head()), signatures=signatures
            )
            assert not ledger.doubts and ledger.first <= 1
            steps = {peer: entry.inner_steps for (peer, _), entry in ledger.entries.items()}
            truth = {p: sum(b - a for a, b in spans) for p, spans in store.state.covered.items()}
            assert steps == truth, "exactly what is in the state"
            assert ledger.tokens == head.tokens
            assert sum(e.tokens for e in ledger.entries.values()) == head.tokens
            counted += len(steps)
    assert counted and kept.forks(), "branches were displaced"
