"""The daemon's bulk code in many worlds of virtual time, and deliberate bugs that they must find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from p2pdiloco.adapters.flow import LEAST_CHUNK_BYTES
from p2pdiloco.daemon.bulk import states, updates
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.errors import UserError
from p2pdiloco_lab.bulk_world.bulk_plan import MIX_NAMES, MIXES, BulkSummary, replay_command
from p2pdiloco_lab.bulk_world.bulk_world import run_bulk_seed
from p2pdiloco_lab.lab_commands import simulate
from p2pdiloco_lab.seed_pool import play_bulk

pytestmark = pytest.mark.long

SEEDS, MANY_SEEDS = 6, 60


@pytest.mark.timeout(300)  # counted in seeds, not in seconds: a busy machine may take its time
@pytest.mark.parametrize("mix", MIX_NAMES)
def test_some_seeds(mix: str) -> None:
    hold(mix, SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mix", MIX_NAMES)
def test_many_seeds(mix: str) -> None:
    hold(mix, MANY_SEEDS)


def hold(mix: str, seeds: int) -> None:
    summary = BulkSummary()
    for result in play_bulk(range(seeds), mix, None):
        summary.add(result)
    failed = [f"{r.detail or r.stuck}: {replay_command(r, None, mix)}" for r in summary.failed]
    assert not failed, "\n".join(failed)
    assert summary.seeds == seeds and summary.versions > 2 * seeds
    happened = {kind for kind, count in summary.faults.items() if count}
    assert happened == {kind for kind, _ in MIXES[mix].faults}


CODE = """
from p2pdiloco_lab.bulk_world.bulk_world import run_bulk_seed
for seed in range(4):
    print(run_bulk_seed(seed, "storm").digest)
"""


@pytest.mark.timeout(300)
def test_equal_digests_in_two_processes_with_different_hash_seeds() -> None:
    other = "1" if os.environ.get("PYTHONHASHSEED") == "4242" else "4242"
    environment = {**os.environ, "PYTHONHASHSEED": other}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    here = [run_bulk_seed(seed, "storm").digest for seed in range(4)]
    assert len(set(here)) == 4, "different seeds do different things"
    assert done.stdout.split() == here


# --- deliberate bugs ---------------------------------------------------------------------------------


def digest_not_checked(patch: pytest.MonkeyPatch) -> None:
    async def believe(*_: Any) -> None: ...

    patch.setattr(Transfers, "_check", believe)


def resumes_beyond_what_is_here(patch: pytest.MonkeyPatch) -> None:
    keep = updates.UnfinishedUpdates.keep

    def more(self: updates.UnfinishedUpdates, key: int, unfinished: updates.Unfinished | None) -> None:
        if unfinished is not None and unfinished.have_bytes:
            end = len(unfinished.payload) - 1
            unfinished.have_bytes = min(unfinished.have_bytes + LEAST_CHUNK_BYTES, end)
        keep(self, key, unfinished)

    patch.setattr(updates.UnfinishedUpdates, "keep", more)


def begins_anew_after_a_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(updates.UnfinishedUpdates, "keep", lambda *_: None)


def pieces_of_states_begin_anew_after_a_cut(patch: pytest.MonkeyPatch) -> None:
    done = states.StateCopy.done

    def forgetting(self: states.StateCopy, part: states.StatePart) -> None:
        if part.have < part.end:
            part.have = part.began_at
        done(self, part)

    patch.setattr(states.StateCopy, "done", forgetting)


def pins_are_never_released(patch: pytest.MonkeyPatch) -> None:
    def drop(self: states.Donating, lease: Any) -> None:
        if not lease.streams and lease in self._leases:
            self._leases.remove(lease)

    patch.setattr(states.Donating, "_drop", drop)


def a_holder_gives_to_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(updates, "degree", lambda size: float("inf"))


def a_liar_is_asked_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(updates.LeftOut, "add", lambda *_: None)


def a_ticket_is_kept(patch: pytest.MonkeyPatch) -> None:
    over = updates.Fanout.over
    patch.setattr(updates.Fanout, "over", lambda self, f, a: over(self, f + 1, a))


def a_reservation_is_kept(patch: pytest.MonkeyPatch) -> None:
    from p2pdiloco.daemon.bulk.updates import Pulling

    pull = Pulling.pull

    async def reserving(self: Pulling, peer: str, request: Any, watcher: Any) -> Any:
        try:
            return await pull(self, peer, request, watcher)
        except Exception:
            self._memory._reserved_bytes += 1
            raise

    patch.setattr(Pulling, "pull", reserving)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("bug", "mix", "members", "seeds", "rules"),
    [
        (digest_not_checked, "storm", None, range(12), {"sound"}),
        (resumes_beyond_what_is_here, "partition", None, range(25), {"honest", "only-missing"}),
        (begins_anew_after_a_cut, "partition", None, range(25), {"only-missing"}),
        (pieces_of_states_begin_anew_after_a_cut, "partition", None, range(35), {"only-missing"}),
        (pins_are_never_released, "calm", None, range(2), {"rest"}),
        (a_holder_gives_to_everybody, "calm", None, range(8), {"fan-out"}),
        (a_liar_is_asked_again, "datacentre", 10, range(15, 45), {"left-out"}),
        (a_ticket_is_kept, "calm", None, range(2), {"rest"}),
        (a_reservation_is_kept, "partition", None, range(10), {"rest"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_deliberate_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None],
    mix: str,
    members: int | None,
    seeds: range,
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug(monkeypatch)
    found = []
    for seed in seeds:
        found.append(run_bulk_seed(seed, mix, members).violation)
        if found[-1] in rules:
            return
    pytest.fail(f"not found in {len(seeds)} seeds, only {set(found)}")


# --- the command -------------------------------------------------------------------------------------


def test_a_failed_seed_is_exit_status_1_and_names_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pins_are_never_released(monkeypatch)
    arguments = ["--bulk", "--seed", "2", "--mix", "calm", "--nodes", "4"]
    result = CliRunner().invoke(simulate, arguments, standalone_mode=False)
    assert result.return_value == 1
    assert "rest: " in result.output and "has version 1" in result.output
    assert "p2pdiloco simulate --bulk --seed 2 --nodes 4 --mix calm --trace" in result.output


def test_json_and_trace() -> None:
    told = CliRunner().invoke(simulate, ["--bulk", "--seed", "1", "--mix", "calm", "--trace"])
    report = json.loads(
        CliRunner().invoke(simulate, ["--bulk", "--seed", "1", "--mix", "calm", "--json"]).output
    )
    assert report["seeds"] == 1 and report["violations"] == report["stuck"] == 0
    assert report["moved_bytes"] > 0 and report["seeds_per_minute"] > 0
    assert "asks" in told.output and run_bulk_seed(1, "calm").digest in told.output
    refused = CliRunner().invoke(simulate, ["--bulk", "--vectors"], standalone_mode=False)
    assert isinstance(refused.exception, UserError)


def test_results_are_plain_data() -> None:
    result = run_bulk_seed(2, "partition", 4)
    assert msgspec.json.decode(msgspec.json.encode(result))["members"] == 4
