"""Outcome of a crowd's attack: what was measured of both swarms, and what of it does not hold."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence, Set

from msgspec import Struct

from attacks.excluding import honest_excluded
from attacks.watching import Moment, forged_heads, logs_of
from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.config.manifest import WeightSection
from p2pdiloco.core.api.types import weight_of
from p2pdiloco.core.api.versions import VersionHeader
from p2pdiloco.core.chain import marks_of
from p2pdiloco.demo.swarm import SwarmNode, of_kind
from p2pdiloco.tensors.merge import open_factors

MANY_VERSIONS = 0.9
"""Share of the calm swarm's versions that must be made."""
OPEN_SHARE = 0.25
"""Share of what was trained that a run may count beyond it."""
LITTLE_LOSS = 0.03
"""Share of the calm swarm's loss by which the attacked one's may be above it."""
LATE_SHARE = 0.25
"""Share of the attack's time, at its end, over which losses are averaged."""


class CrowdSeen(Struct, frozen=True, kw_only=True):
    """Figures of the honest nodes of one swarm, from the crowd's coming to the end."""

    versions: int
    tokens_counted: float
    """Tokens that the learners' clock gained, over those that its members trained in that time."""
    loss: float | None
    excluded: int
    """Honest members that some honest node excludes."""
    ended: int
    """Honest nodes that ended by themselves."""
    forged: Sequence[str]
    """Heads of honest nodes that no member made, as `fragment/number`."""
    weight_share: float
    """Share of the crowd in the weight of the versions that were saved last."""
    seats_share: float
    """Share of the crowd among the seats, in the fragment where it is largest."""
    tokens_in_chain: float = 1.0
    """Tokens that the chains gained, over those that its members trained in that time."""


class CrowdRow(Struct, frozen=True, kw_only=True):
    """Row of the table of crowds."""

    attack: str
    riders: int
    versions_ratio: float | None
    loss_ratio: float | None
    loss: float | None
    loss_calm: float | None
    tokens_counted: float
    tokens_calm: float
    tokens_in_chain: float
    tokens_in_chain_calm: float
    honest_excluded: int
    honest_ended: int
    parameters_kept: bool
    weight_share: float
    seats_share: float
    did: Mapping[str, int]
    broken: Sequence[str]


def judge_crowd(
    attack: str, riders: int, attacked: CrowdSeen, calm: CrowdSeen, did: Mapping[str, int]
) -> CrowdRow:
    """Compare the two swarms: `broken` says what should hold and does not."""
    versions = attacked.versions / calm.versions if calm.versions else None
    loss = attacked.loss / calm.loss if attacked.loss and calm.loss else None
    broken = {
        "parameters": bool(attacked.forged),
        "an honest member excluded": attacked.excluded > 0,
        "an honest node ended": attacked.ended > 0,
        "versions": versions is not None and versions < MANY_VERSIONS,
        "tokens": attacked.tokens_counted > 1.0 + OPEN_SHARE,
        "loss": loss is None or loss > 1.0 + LITTLE_LOSS,
        "nothing was measured": versions is None,
    }
    return CrowdRow(
        attack=attack,
        riders=riders,
        versions_ratio=versions,
        loss_ratio=loss,
        loss=attacked.loss,
        loss_calm=calm.loss,
        tokens_counted=attacked.tokens_counted,
        tokens_calm=calm.tokens_counted,
        tokens_in_chain=attacked.tokens_in_chain,
        tokens_in_chain_calm=calm.tokens_in_chain,
        honest_excluded=attacked.excluded,
        honest_ended=attacked.ended,
        parameters_kept=not attacked.forged,
        weight_share=attacked.weight_share,
        seats_share=attacked.seats_share,
        did=dict(did),
        broken=[what for what, is_so in broken.items() if is_so],
    )


def seen_of(
    nodes: Sequence[SwarmNode], members: Sequence[SwarmNode], before: Moment, after: Moment
) -> CrowdSeen:
    """Sum up what happened to the honest nodes between two moments. `members`: others that train. What lies
    on disks is read later (`shares`)."""
    logs = logs_of(nodes)
    own = [line for lines in logs_of(members).values() for line in lines]
    made = {
        (line.fragment, line.number, line.digest)
        for lines in [*logs.values(), own]
        for line in lines
        if line.is_made() and before.at_s <= line.mono <= after.at_s
    }
    late_s = after.at_s - LATE_SHARE * (after.at_s - before.at_s)
    told = [
        line.loss
        for lines in logs.values()
        for line in of_kind(lines, "progress")
        if line.loss is not None and late_s <= line.mono <= after.at_s
    ]
    return CrowdSeen(
        versions=len(made),
        tokens_counted=counted([*nodes, *members], nodes, before.at_s, after.at_s),
        loss=statistics.fmean(told) if told else None,
        excluded=honest_excluded(logs, []),
        ended=sum(not node.alive for node in nodes),
        forged=forged_heads(logs, own, after.at_s),
        weight_share=0.0,
        seats_share=0.0,
    )


def counted(
    training: Sequence[SwarmNode], counting: Sequence[SwarmNode], from_s: float, to_s: float
) -> float:
    """Compute the tokens that the run gained, by whoever counts most, over those that were trained."""
    gained = [run - first for node in counting for first, run in [_ends(node, "run_tokens", from_s, to_s)]]
    return max(gained) / max(1, trained_tokens(training, from_s, to_s))


def trained_tokens(nodes: Sequence[SwarmNode], from_s: float, to_s: float) -> int:
    """Count the tokens that these nodes trained between two times, by their logs."""
    ends = (_ends(node, "tokens_total", from_s, to_s) for node in nodes)
    return sum(last - first for first, last in ends)


def _ends(node: SwarmNode, name: str, from_s: float, to_s: float) -> tuple[int, int]:
    """Find the last value of a node's count before the first time, and before the second."""
    first = last = 0
    for line in node.events.read_text(errors="replace").splitlines():
        if f'"{name}"' not in line:
            continue
        try:
            at = json.loads(line)
            value, at_s = int(at[name] or 0), float(at["mono"])
        except (ValueError, KeyError):
            continue  # torn
        first = max(first, value) if at_s <= from_s else first
        last = max(last, value) if at_s <= to_s else last
    return first, last


def shares(nodes: Sequence[SwarmNode], run: str, crowd: Set[str]) -> tuple[float, float]:
    """Read from the honest nodes' disks, after their end: the crowd's share of the weight of saved versions,
    and of the seats."""
    weights = {True: 0.0, False: 0.0}
    seats = 0.0
    for node in nodes:
        store = RunStore(node.data_dir, run)
        for folder in sorted((store.folder / "fragments").glob("*")):
            saved = store.load_checkpoint(int(folder.name))
            if saved is None:
                continue
            roster = marks_of(saved.watermarks).seats
            seats = max(seats, len(roster & crowd) / max(1, len(roster)))
            for header in _headers(store, int(folder.name), saved.version.header):
                most = header.limits.most_tokens
                work = [(p.tokens, p.inner_steps, p.trust, p.votes) for p in header.contributors]
                factors = open_factors(work, most, WeightSection().open_share)
                for part, factor in zip(header.contributors, factors, strict=True):
                    weight = weight_of(part.tokens, part.inner_steps, most, part.trust)
                    weights[part.learner in crowd] += factor * weight
    return weights[True] / max(1e-9, sum(weights.values())), seats


def _headers(store: RunStore, fragment: int, newest: VersionHeader) -> list[VersionHeader]:
    """List the headers of a checkpoint and of the logged updates before and after it."""
    logged = [version.header for version, _ in store.load_updates(fragment, max(0, newest.number - 8))]
    return [newest, *(header for header in logged if header.number != newest.number)]
