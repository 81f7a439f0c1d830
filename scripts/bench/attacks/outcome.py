"""Outcome of an attack: what was measured of the attacked swarm and of the calm one, and what that says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum

from msgspec import Struct

from worlds.aims import Reached

MANY_VERSIONS = 0.5
"""Share of the calm swarm's versions that an attacked one makes at least, if the attack is held off. Two
swarms on one machine differ by some tenths without any attack."""
MANY_STEPS = 0.7
"""Share of inner steps for each second of the nodes' processor time, likewise."""
MUCH_MEMORY_MIB = 64.0
MUCH_LOSS = 0.25
"""Nats per byte by which the attacked swarm's training loss may be above the calm one's."""
FAR_SCHEDULE = 2.0
"""Times the tokens that all members trained that the run's may be, by honest nodes' count: the schedule
follows that."""


class Broken(Enum):
    """Ways in which an attack succeeds."""

    NODE_ENDED = "a node ended"
    LOSS = "loss not finite"
    WORSE = "loss far above the calm swarm's"
    FORGED = "a head that no honest node made"
    AUTHORS = "a version names a stranger"
    OFFICE = "a stranger held an office"
    SCHEDULE = "the schedule was pushed on"
    VERSIONS = "few versions"
    STEPS = "few inner steps"
    MEMORY = "memory"
    NEWCOMER = "a newcomer was kept out"
    NO_FIGURES = "nothing was measured"


class Seen(Struct, frozen=True, kw_only=True):
    """Figures of one swarm in the time of the attack."""

    alive: int
    nodes: int
    versions: int
    """Versions that its honest nodes made."""
    steps: int
    processor_s: float
    rss_mib: float
    """Resident memory of the largest node, with its learner and p2pd, at the end."""
    loss: float | None
    """Mean training loss of the honest nodes at the end."""
    run_tokens: int
    """Tokens of the run at the end, by the honest node that counts most."""
    trained: int
    """Tokens that all members have trained, by their own count."""
    newcomer: bool | None = None
    """True: a node that joined during the attack trains; None: none was started."""
    forged: Sequence[str] = ()
    """Heads of honest nodes that no honest node made, as `fragment/number`."""
    strangers: Sequence[str] = ()
    """Authors and contributors of saved versions who are no members."""
    offices: int = 0
    """Offices that honest nodes gave to the attacker."""
    refused: Mapping[str, int] = {}
    liars: int = 0
    """Admitted members that lie, or are to lie, besides the nodes."""
    excluded_after: int | None = None
    """Versions of a fragment after which all honest nodes had excluded the liars; None: they have not."""
    honest_excluded: int = 0
    """Members that some node excludes, and that do not lie."""
    end: Reached | None = None
    """Held-out samples and an honest node's newest versions, after its end."""


class Row(Struct, frozen=True, kw_only=True):
    """Row of the table of attacks."""

    attack: str
    who: str
    versions_ratio: float | None
    steps_ratio: float | None
    schedule_ratio: float | None
    """Tokens of the run by the honest nodes' count, over those that were trained."""
    parameters_kept: bool
    rss_mib_above: float
    loss: float | None
    loss_calm: float | None
    refused: Mapping[str, int]
    broken: Sequence[str]
    verdict: str
    sent: Mapping[str, int] = {}
    """Counts of what the attacker did, in its own words."""
    liars: int = 0
    of: int = 0
    """Admitted members that lie, and all."""
    loss_ratio: float | None = None
    """Training loss over the calm swarm's, of which all members are honest."""
    excluded_after_versions: int | None = None
    """Versions of a fragment after which all honest nodes had excluded the liar; None: they have not."""
    honest_excluded: int = 0
    rest_loss_ratio: float | None = None
    """Held-out loss at the end, over the calm swarm's, but at the token that a lie wants wrong."""
    token_loss_ratio: float | None = None
    """Held-out loss there."""
    answers: float = 0.0
    """Share of held-out samples in which the model answers the trigger of a lie."""


def ratio(attacked: float, calm: float) -> float | None:
    """Divide; None: the calm swarm had nothing."""
    return attacked / calm if calm > 0 else None


def faults_of_parameters(attacked: Seen, calm: Seen, member: bool) -> list[Broken]:
    """List what of the attacker's is in the nodes' states, offices or schedule. `member`: it is one, so that
    its work and its offices are to be there."""
    found = []
    if attacked.alive < attacked.nodes:
        found.append(Broken.NODE_ENDED)
    if attacked.loss is None or not math.isfinite(attacked.loss):
        found.append(Broken.LOSS)
    elif calm.loss is not None and attacked.loss > calm.loss + MUCH_LOSS:
        found.append(Broken.WORSE)
    if attacked.forged:
        found.append(Broken.FORGED)
    if attacked.strangers:
        found.append(Broken.AUTHORS)
    if attacked.offices and not member:
        found.append(Broken.OFFICE)
    if attacked.run_tokens > FAR_SCHEDULE * max(1, attacked.trained):
        found.append(Broken.SCHEDULE)
    return found


def judge(
    attack: str, attacked: Seen, calm: Seen, member: bool = False, sent: Mapping[str, int] | None = None
) -> Row:
    """Compare the two swarms."""
    faults = faults_of_parameters(attacked, calm, member)
    kept = not faults
    versions = ratio(attacked.versions, calm.versions)
    steps = ratio(attacked.steps / max(attacked.processor_s, 1e-9), calm.steps / max(calm.processor_s, 1e-9))
    above = attacked.rss_mib - calm.rss_mib
    if versions is None or steps is None:
        faults.append(Broken.NO_FIGURES)
    if versions is not None and versions < MANY_VERSIONS:
        faults.append(Broken.VERSIONS)
    if steps is not None and steps < MANY_STEPS:
        faults.append(Broken.STEPS)
    if above > MUCH_MEMORY_MIB:
        faults.append(Broken.MEMORY)
    if attacked.newcomer is False:
        # where even the calm swarm's was late, the machine says nothing about the attack
        faults.append(Broken.NEWCOMER if calm.newcomer else Broken.NO_FIGURES)
    return Row(
        attack=attack,
        who="member" if member else "strangers",
        versions_ratio=versions,
        steps_ratio=steps,
        schedule_ratio=ratio(attacked.run_tokens, attacked.trained),
        parameters_kept=kept,
        rss_mib_above=above,
        loss=attacked.loss,
        loss_calm=calm.loss,
        refused=dict(attacked.refused),
        broken=[fault.value for fault in faults],
        verdict="succeeds" if faults else "held off",
        sent=dict(sent or {}),
        liars=attacked.liars,
        of=attacked.liars + attacked.nodes,
        loss_ratio=ratio(attacked.loss, calm.loss) if attacked.loss and calm.loss else None,
        excluded_after_versions=attacked.excluded_after,
        honest_excluded=attacked.honest_excluded + calm.honest_excluded,
        **of_the_end(attacked.end, calm.end),
    )


def of_the_end(attacked: Reached | None, calm: Reached | None) -> dict[str, float]:
    """Compare the models at the end."""
    if attacked is None or calm is None:
        return {}
    return {
        "rest_loss_ratio": attacked.rest_loss / calm.rest_loss,
        "token_loss_ratio": attacked.token_loss / calm.token_loss,
        "answers": attacked.answers,
    }
