"""Measuring of a swarm while it is attacked: versions, steps, processor time, memory, and its end."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch
from msgspec import Struct

from attacks.excluding import excluded_after, honest_excluded
from attacks.outcome import Seen
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.cli.status_command import visitor
from p2pdiloco.config.manifest import load_signed
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import StatusReport, decode_status
from p2pdiloco.demo.swarm import Line, SwarmNode, of_kind, read_log
from p2pdiloco.errors import P2PDilocoError, RemoteError, TransportError
from p2pdiloco.identity import verify
from p2pdiloco.learner.loop import heldout_batch
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import plan_fragments, scatter
from worlds.aims import Reached, reached

MIB = 1 << 20
ASK_S = 3.0
HELDOUT_TOKENS = 32_768


class Moment(Struct, frozen=True):
    """A swarm at one moment: when, and of each node the processor time that it has used and its memory."""

    at_s: float
    processor_s: Mapping[str, float]
    rss_bytes: Mapping[str, int]


def moment(nodes: Sequence[SwarmNode], at_s: float) -> Moment:
    """Look at all processes of the nodes."""
    used = {node.name: family_of(node) for node in nodes}
    return Moment(
        at_s, {name: one[0] for name, one in used.items()}, {name: one[1] for name, one in used.items()}
    )


def family_of(node: SwarmNode) -> tuple[float, int]:
    """Processor seconds and resident bytes of a node and of what it has started; nothing if it has ended."""
    try:
        daemon = psutil.Process(node.pid)
        family = [daemon, *daemon.children(recursive=True)]
    except (psutil.Error, ValueError):
        return 0.0, 0
    seconds, size = 0.0, 0
    for process in family:
        try:
            times = process.cpu_times()
            seconds += times.user + times.system
            size += process.memory_info().rss
        except psutil.Error:
            continue  # it ended in this moment
    return seconds, size


def logs_of(nodes: Sequence[SwarmNode]) -> dict[str, list[Line]]:
    """Read the event logs of all nodes."""
    return {node.name: read_log(node.events, node.name) for node in nodes}


def last_loss(logs: Mapping[str, Sequence[Line]], until_s: float) -> float | None:
    """Average the training losses that the nodes told last; None: some node has none."""
    losses = []
    for lines in logs.values():
        told = [line.loss for line in of_kind(lines, "progress") if line.mono <= until_s]
        if not told or told[-1] is None:
            return None
        losses.append(told[-1])
    return statistics.fmean(losses) if losses else None


def run_tokens(node: SwarmNode) -> int:
    """Find the run's tokens as the node counted them last."""
    counts = [0]
    for line in node.events.read_text(errors="replace").splitlines()[-400:]:
        if '"run_tokens"' in line:
            try:
                counts.append(int(json.loads(line)["run_tokens"] or 0))
            except (ValueError, KeyError):
                continue  # torn
    return max(counts)


def trained(lines: Sequence[Line]) -> int:
    """Find the tokens that a node has trained, by its own count."""
    return max((line.tokens_total for line in of_kind(lines, "progress")), default=0)


def forged_heads(logs: Mapping[str, Sequence[Line]], own: Sequence[Line], until_s: float) -> list[str]:
    """List heads that honest nodes took and neither an honest node nor, in `own`, an admitted one made.
    `until_s`: of heads taken later the makers' lines may be missing, as logs are read one after the other."""
    made = {
        (line.fragment, line.number, line.digest)
        for line in [*(line for lines in logs.values() for line in lines), *own]
        if line.is_made()
    }
    taken = (line for lines in logs.values() for line in lines if line.is_head() and line.mono <= until_s)
    held = [line for line in taken if line.number > 0]
    return sorted({f"{x.fragment}/{x.number}" for x in held if (x.fragment, x.number, x.digest) not in made})


def strangers_in(node: SwarmNode, run: str, members: Sequence[str]) -> list[str]:
    """List who is no member and is named by a version that the node has saved, after its end."""
    store = RunStore(node.data_dir, run)
    named: set[str] = set()
    for folder in sorted((store.folder / "fragments").glob("*")):
        saved = store.load_checkpoint(int(folder.name))
        headers = [] if saved is None else [saved.version.header]
        first = headers[0].number - 1 if headers else 0
        headers += [version.header for version, _ in store.load_updates(int(folder.name), max(0, first))]
        for header in headers:
            if header.number:
                named |= {header.syncer, *(part.learner for part in header.contributors)}
    return sorted(named - set(members))


def heldout_of(node: SwarmNode, run: str, manifest: Path) -> Reached:
    """Measure what a node has saved, after its end, on held-out samples.

    Raises:
        ValueError: a fragment was not saved.
    """
    task = task_of(load_signed(manifest, verify)[1])
    store, model = RunStore(node.data_dir, run), task.model()
    params = named_parameters(model)
    for layout in plan_fragments(task.specs(), task.manifest.sync.fragments):
        saved = store.load_checkpoint(layout.index)
        if saved is None:
            raise ValueError(f"fragment {layout.index} was not saved")
        scatter(torch.from_numpy(saved.theta.copy()), layout, params)
    (windows,) = heldout_batch(task, task.load_data(None).heldout, HELDOUT_TOKENS)
    return reached(model, windows)


def seen(
    nodes: Sequence[SwarmNode],
    liars: Sequence[SwarmNode],
    before: Moment,
    after: Moment,
    attackers: Sequence[str],
    newcomer: SwarmNode | None,
) -> Seen:
    """Sum up what happened between two moments to the honest nodes."""
    admitted = [*liars, *([newcomer] if newcomer is not None else [])]
    logs, own = logs_of(nodes), [line for lines in logs_of(admitted).values() for line in lines]
    made, steps, offices = set(), 0, 0
    for lines in logs.values():
        within = [line for line in lines if before.at_s <= line.mono <= after.at_s]
        made |= {(x.fragment, x.number, x.digest) for x in within if x.is_made()}
        told = [line.inner_step for line in of_kind(within, "progress")]
        steps += max(0, told[-1] - told[0]) if told else 0
        offices += sum(x.kind == "office" and x.syncer in attackers for x in within)
    spent = sum(max(0.0, after.processor_s[n] - before.processor_s[n]) for n in before.processor_s)
    joined = None
    if newcomer is not None:
        joined = bool(of_kind(read_log(newcomer.events), "progress"))
    loss = last_loss(logs, after.at_s)
    return Seen(
        alive=sum(node.alive for node in nodes),
        nodes=len(nodes),
        versions=len(made),
        steps=steps,
        processor_s=spent,
        rss_mib=max(after.rss_bytes.values()) / MIB,
        loss=loss if loss is None or math.isfinite(loss) else math.inf,
        run_tokens=max(map(run_tokens, nodes)),
        trained=sum(map(trained, [*logs.values(), own])),
        newcomer=joined,
        forged=forged_heads(logs, own, after.at_s),
        offices=offices,
        liars=len(liars),
        excluded_after=excluded_after(logs, [node.peer for node in liars], before.at_s) if liars else None,
        honest_excluded=honest_excluded(logs, [node.peer for node in liars]),
    )


async def merged_tokens(join: str, run: str, peers: Sequence[str]) -> int:
    """Ask every node for the tokens of its chains' heads, the mean over fragments: the most that one says.

    Raises:
        P2PDilocoError: one of them does not answer.
    """
    async with visitor((join,)) as transport:
        members = await transport.get_records(wire.members_key(run))
        reports = [await _report(transport, members, run, peer) for peer in peers]
    return max(each.run_tokens for each in reports)


async def _report(
    transport: HivemindTransport, members: Mapping[str, bytes], run: str, peer: str
) -> StatusReport:
    record = wire.decode(members[peer], wire.Presence)
    await transport.connect(peer, record.addresses)
    query = wire.QUERY + wire.encode(wire.StatusQuery(run))
    return decode_status(await transport.send(peer, query, ASK_S))


async def refusals(join: str, run: str, peers: Sequence[str]) -> dict[str, int]:
    """Ask every node what it has refused, and add that up by reason."""
    counts: Counter[str] = Counter()
    try:
        async with visitor((join,)) as transport:
            members = await transport.get_records(wire.members_key(run))
            for peer in peers:
                try:
                    report = await _report(transport, members, run, peer)
                except (KeyError, RemoteError, TransportError) as error:
                    counts[f"no report: {error}"[:60]] += 1
                    continue
                counts.update(report.refusals)
            await asyncio.sleep(0)
    except P2PDilocoError as error:
        counts[f"not asked: {error}"[:60]] += 1
    return dict(counts.most_common())


def addresses_of(node: SwarmNode) -> list[str]:
    """Addresses at which the node listens, as it said in its log."""
    words = node.log.read_text(errors="replace").split()
    mine = [w for w in words if w.startswith("/ip4/127.0.0.1/tcp/") and w.endswith(f"/p2p/{node.peer}")]
    return sorted(set(mine))


def run_of(bootstrap: Path) -> Path:
    """Path of the signed manifest of the run that a bootstrap serves."""
    return next(iter(sorted((bootstrap / "runs").glob("*/manifest.signed"))))
