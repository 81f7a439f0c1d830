"""Small calm swarms for hand-made scenarios: what happens is said in the test, not drawn."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

import msgspec
from deadlines import within_s

from p2pdiloco.core.api.events import CommitVersion, Effect
from p2pdiloco_lab.simulation.seed_plan import WorldPlan, draw_plan, genesis_version
from p2pdiloco_lab.simulation.seed_report import SeedResult
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World


def calm_plan(
    nodes: int, until_s: float = 30.0, quorum: int = 1, seed: int = 7, fragments: int = 2
) -> WorldPlan:
    """Equal machines, no faults: one round takes about two seconds."""
    plan = draw_plan(seed, "calm", nodes)
    config = msgspec.structs.replace(
        plan.config,
        inner_steps=10,
        delay_steps=2,
        quorum=quorum,
        grace_fraction=0.5,
        grace_cap_s=0.5,
        term_versions=6,
        log_versions=8,
        max_base_age_versions=6,
        tokens_per_step=64,
        genesis_versions=tuple(genesis_version(f) for f in range(fragments)),
        max_payload_bytes=(100_000,) * fragments,
        seats=tuple(spec.peer for spec in plan.nodes),
    )
    specs = tuple(dataclasses.replace(spec, step_time_s=0.2, write_s=0.02) for spec in plan.nodes)
    joins = tuple(0.3 * i for i in range(nodes))
    return dataclasses.replace(
        plan, config=config, nodes=specs, joins_s=joins, faults_until_s=until_s, settle_s=90.0, hidden=()
    )


def names(first: int, end: int) -> tuple[str, ...]:
    """Nodes by their numbers."""
    return tuple(f"n{index}" for index in range(first, end))


def plan_of(nodes: int, until_s: float, quorum: int = 2, seed: int = 7, **changes: object) -> WorldPlan:
    """Nothing goes wrong but what the test does."""
    plan = calm_plan(nodes, until_s, quorum, seed)
    config = msgspec.structs.replace(plan.config, group_size=64, **changes)
    return dataclasses.replace(plan, config=config, faults=False)


def agreed(world: World) -> list[bool]:
    """Per fragment, whether all running nodes hold the same version."""
    up = world.up_hosts()
    return [len({h.stores[f].version.header.digest() for h in up}) == 1 for f in range(2)]


def outcome(result: SeedResult) -> str:
    """What went wrong, or "ok"."""
    return result.violation or result.stuck or "ok"


def in_another_process(code: str) -> str:
    """What this program prints in a process with other hashes."""
    other = "1" if os.environ.get("PYTHONHASHSEED") == "4242" else "4242"
    environment = {**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=within_s(90)
    ).stdout


def played_well(world: World) -> SeedResult:
    """Play a world to its end. No rule is broken, nothing is stuck."""
    result = world.run()
    assert result.ok, result.detail or result.stuck
    return result


class Commits:
    """Notes when which node made which version its own, and lets a test act on effects."""

    def __init__(self, world: World, act: Callable[[Host, Effect], None] | None = None) -> None:
        self.seen: list[tuple[float, str, int, int]] = []
        """(time, peer, fragment, number)."""
        self._act = act
        world.on_effect = self._effect

    def _effect(self, host: Host, effect: Effect) -> None:
        if isinstance(effect, CommitVersion):
            header = effect.version.header
            self.seen.append((host.now, host.peer, header.fragment, header.number))
        if self._act is not None:
            self._act(host, effect)

    def made(self, fragment: int) -> dict[int, float]:
        """When anybody first held each version of a fragment."""
        return {number: at_s for at_s, _, of, number in reversed(self.seen) if of == fragment}
