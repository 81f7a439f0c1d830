"""Checks of a run: what it takes of this machine, and what the link to its peers carries of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from p2pdiloco.cli.doctor.findings import Diagnosis, bad, good, skipped, warning
from p2pdiloco.cli.doctor.machine import existing
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.values import rate_text, size_text
from p2pdiloco.daemon.budgets import free_disk_bytes, free_memory_bytes
from p2pdiloco.daemon.network.reach import measure
from p2pdiloco.daemon.run_files.known_runs import ListedRun, RunSearch
from p2pdiloco.errors import UserError, clean
from p2pdiloco.ports import Transport

STEP_TIMES_S = (0.1, 0.3, 1.0, 3.0, 10.0)
MEMBERS = 8
"""Number of members that is reckoned with where the run does not say."""


async def find(
    transport: Transport, wanted: str, peers: Sequence[str]
) -> tuple[Diagnosis, ListedRun | None, Manifest | None]:
    """Find the run. Raises: UserError (several fit), RemoteError."""
    search = RunSearch(transport, wanted, peers)
    listed = await search.look()
    if listed is None:
        known = search.known
        todo = f"they know: {known}" if known else "a bootstrap serves one with --run run.toml"
        name = f'run "{wanted}"' if wanted else "run"
        return bad("run", f"these peers list no {name}", todo), None, None
    found = await search.manifest(listed)
    if found is None:
        return bad("run", f"nobody gives the manifest of {clean(listed.name)}", "try again"), listed, None
    manifest = found[1]
    admission = (
        ""
        if manifest.admission.mode == "open"
        else f", by {manifest.admission.mode}: p2pdiloco can-join says more"
    )
    words = f"{clean(manifest.run.name)} ({listed.run[:12]}), task {clean(manifest.run.task)}{admission}"
    return good("run", words), listed, manifest


def footprint(manifest: Manifest, data_dir: Path) -> Iterator[Diagnosis]:
    """Compare what the run takes with what is free. Raises: UserError, ModuleNotFoundError (no torch)."""
    from p2pdiloco.daemon.run_files.run import DAEMON_BYTES, LEARNER_BYTES, footprint_of

    takes = footprint_of(manifest)
    daemon = takes.daemon_bytes + takes.payload_bytes
    everything = daemon + takes.learner_bytes + takes.loss_audit_bytes + DAEMON_BYTES + LEARNER_BYTES
    memory, disk = free_memory_bytes(), free_disk_bytes(existing(data_dir))
    least = f"the run takes at least {size_text(everything)} with its learner on the CPU"
    words = f"{least}, {size_text(memory)} are free"
    if daemon + takes.loss_audit_bytes + DAEMON_BYTES > memory:
        yield bad("memory", words, "close other programs, or choose another machine")
    elif everything > memory:
        todo = "with a GPU whose memory holds the learner it fits: " + size_text(takes.learner_bytes)
        yield warning("memory", words, todo)
    else:
        yield good("memory", words)
    words = f"the run takes about {size_text(takes.disk_bytes)}, {size_text(disk)} are free"
    if takes.disk_bytes > disk:
        yield bad("disk", words, "make room, or choose another disk with --data-dir")
    else:
        yield good("disk", words)


async def link(transport: Transport, peer: str, manifest: Manifest | None) -> list[Diagnosis]:
    """Measure the link, and say what `plan` makes of it."""
    try:
        measured = await measure(transport, peer)
    except UserError as error:  # a peer that measures with somebody else is nothing bad
        return [skipped("link", str(error), error.hint)]
    up, down = rate_text(measured.upload_bits_per_s), rate_text(measured.download_bits_per_s)
    words = f"{up}bit/s up, {down}bit/s down, round trip {measured.round_trip_s * 1e3:.3g} ms to …{peer[-6:]}"
    if manifest is None:
        return [good("link", words)]
    from p2pdiloco.daemon.network.link import demand

    members = manifest.group.expected_members or MEMBERS
    demands = [demand(manifest, measured.link, members, step_s) for step_s in STEP_TIMES_S]
    carried = next((needed for needed in demands if needed.carried and needed.every == 1), None)
    more = "p2pdiloco plan --join ADDRESS says more"
    if carried is None:
        few = demands[-1]
        todo = f"{more}; the run's owner can choose settings for slower links"
        return [warning("link", f"{words}: too slow for every merge, {few.participation:.0%} at best", todo)]
    shown = f"{words}: enough for every merge from {carried.step_s:g} s for an inner step on"
    if carried.step_s > 1.0:
        return [warning("link", shown, f"a faster machine contributes less often; {more}")]
    return [good("link", shown)]
