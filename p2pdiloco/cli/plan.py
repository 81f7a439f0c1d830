"""`p2pdiloco plan`: what a run asks of a link, and what the link could carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import Struct

from p2pdiloco.cli.examples import example
from p2pdiloco.cli.joining import joined_through
from p2pdiloco.cli.options import FILE, Number
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_bytes, for_run
from p2pdiloco.config.values import parse_rate, rate_text
from p2pdiloco.errors import InvariantViolation, UserError
from p2pdiloco.tasks.registry import load_manifest

if TYPE_CHECKING:
    from p2pdiloco.daemon.network.link import Advice, Demand
    from p2pdiloco.daemon.network.reach import MeasuredLink

LATENCY_MS = 50.0
MEMBERS = 8
STEP_TIMES_S = (0.1, 0.3, 1.0, 3.0, 10.0)


@click.command("plan", epilog=example("plan"))
@click.argument("file", type=FILE, required=False)
@click.option("--preset", default="", help="Instead of FILE: a preset.")
@click.option("--upload", default="", metavar="RATE", help="The link's bits per second up, such as 20Mbit.")
@click.option("--download", default="", metavar="RATE", help="And down; default: the same.")
@click.option(
    "--latency-ms",
    type=Number(0, 10_000),
    help=f"One way, to the other members; default: {LATENCY_MS:g}.",
)
@click.option(
    "--join",
    default="",
    metavar="ADDRESS|LINK",
    help="Measure the link to this node or bootstrap instead; without FILE: for the run that it lists.",
)
@click.option("--run", "run", default="", help="Name or id of that run, if it lists several.")
@click.option(
    "--members",
    type=click.IntRange(1, 16_384),
    help="Members of the run, with links like this one. Default: as many as the run expects, else "
    f"{MEMBERS}.",
)
@click.option("--step-s", "steps_s", type=Number(0.001, 3600), multiple=True, help="An inner step's seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    file: Path | None,
    preset: str,
    upload: str,
    download: str,
    latency_ms: float | None,
    join: str,
    run: str,
    members: int | None,
    steps_s: tuple[float, ...],
    as_json: bool,
) -> None:
    """Say what the run of FILE (a run.toml) asks of a link, and which H, P, tau and codec suit it.

    The link is given (--upload) or measured to a live peer (--join): about 2 s or 8 MiB each way.

    \b
    H    sync.inner_steps, inner steps between two contributions of a fragment
    P    sync.fragments, parts of the model: the run's own number, or 2 or 4 times as many
    tau  sync.delay_steps, inner steps from sending a fragment to having its update
    and codec.contribution and codec.update; 4 bits before topk, whose loss was not measured.

    Inner steps never wait for the network: compute stays as busy as without it. What a slow link costs is
    delay (merged work is stale), and, when a round takes longer than a fragment's H inner steps, merges that
    the node cannot be in. In runs of more than group.size members, the sums that groups send to the group
    above count too.
    """
    own = _manifest(file, preset, join)
    if not upload and not join:
        raise UserError("plan needs a link: --upload RATE or --join ADDRESS", "for example --upload 20Mbit")
    given_up, given_down = parse_rate(upload, "--upload"), parse_rate(download, "--download")
    measured, listed = _measured(join, run, with_manifest=own is None) if join else (None, None)
    manifest = own or listed
    if manifest is None:
        raise InvariantViolation("a plan without a manifest")
    # Imported here so that --help does not pay for torch.
    from p2pdiloco.daemon.budgets import Link
    from p2pdiloco.daemon.network.link import advise, demand

    members = members or manifest.group.expected_members or MEMBERS
    known = measured.link if measured else Link(given_up, given_up, LATENCY_MS / 1e3)
    link = Link(
        given_up or known.upload_bits_per_s,
        given_down or known.download_bits_per_s,
        known.latency_s if latency_ms is None else latency_ms / 1e3,
    )
    rows = [
        (demand(manifest, link, members, step_s), advise(manifest, link, members, step_s))
        for step_s in steps_s or STEP_TIMES_S
    ]
    if as_json:
        shared = {"link": _plain(link), "measured": _plain(measured)}
        click.echo(json.dumps([{**shared, "demand": _plain(d), "advice": _plain(a)} for d, a in rows]))
        return
    if measured is not None:
        click.echo(_measured_row(measured))
    _table(manifest, members, rows)


def _measured(join: str, run: str, with_manifest: bool) -> tuple[MeasuredLink, Manifest | None]:
    addresses, run = joined_through([join], run)
    from p2pdiloco.cli.measure import measured_link

    return measured_link(addresses[0], run, with_manifest)  # any of them: it is one link that is measured


def _measured_row(measured: MeasuredLink) -> str:
    up, down = rate_text(measured.upload_bits_per_s), rate_text(measured.download_bits_per_s)
    return (
        f"measured: {up}bit/s up, {down}bit/s down, round trip {measured.round_trip_s * 1e3:.3g} ms "
        f"({measured.moved_bytes / 2**20:.1f} MiB in {measured.took_s:.1f} s)"
    )


def _table(manifest: Manifest, members: int, rows: list[tuple[Demand, Advice | None]]) -> None:
    from p2pdiloco.daemon.display.snapshot import counted

    sync = manifest.sync
    click.echo(
        f"{manifest.run.name}: H {sync.inner_steps}, P {sync.fragments}, tau {sync.delay_steps}, "
        f"{manifest.codec.contribution} up, {manifest.codec.update} down; {counted(members, 'member')}"
    )
    click.echo(
        f"{'inner step':>10} {'up':>13} {'down':>13} {'round':>8} {'as syncer':>10} {'tau':>5} "
        f"{'merges':>7} {'stale':>6}   advice"
    )
    for needed, advice in rows:
        click.echo(_row(needed, advice))
    click.echo(
        "up, down: of the whole time, with the share of the link; round: from copy-out to the update being "
        "here;\ntau: what such a round takes in inner steps. Learners never wait: whatever the link, compute "
        "goes on.\nWhat suffers is merges, the share that this node can be in, and stale: how old its work "
        "is when it is\nmerged, in H inner steps."
    )
    for sentence, steps_s in _doubts(rows).items():
        click.echo(f"warning: advice for {', '.join(f'{s:g} s' for s in steps_s)}: {sentence}", err=True)


def _doubts(rows: list[tuple[Demand, Advice | None]]) -> dict[str, list[float]]:
    """Collect the doubts about rows' advice, each with the lengths of the inner steps that it is about."""
    found: dict[str, list[float]] = {}
    for needed, advice in rows:
        for sentence in advice.doubts if advice is not None else ():
            found.setdefault(sentence, []).append(needed.step_s)
    return found


def _manifest(file: Path | None, preset: str, join: str) -> Manifest | None:
    """None: the peer's."""
    if (file is not None and preset) or not (file or preset or join):
        raise UserError(
            "plan needs a run.toml, or --preset NAME, or --join ADDRESS of a peer that lists the run",
            "p2pdiloco plan run.toml --upload 20Mbit",
        )
    if file is not None:
        return load_manifest(file)
    return for_bytes(for_run(preset, preset)) if preset else None  # as `run new` writes it


def _plain(value: Struct | None) -> object:
    return msgspec.to_builtins(value)


def _row(needed: Demand, advice: Advice | None) -> str:
    if advice is None:
        words = "too little for any setting: a longer inner step, or fewer members in a group"
    else:
        easy = advice.demand
        share = max(easy.upload_share, easy.download_share)
        words = (
            f"H {advice.inner_steps}, P {advice.fragments}, tau {advice.delay_steps}, {advice.codec}: "
            f"{share:.0%} of the link, stale {easy.delay_cycles:.2f}"
        )
    return (
        f"{needed.step_s:>8.3g} s {rate_text(needed.upload_bits_per_s):>7} {needed.upload_share:>5.0%} "
        f"{rate_text(needed.download_bits_per_s):>7} {needed.download_share:>5.0%} "
        f"{needed.member_round_s:>6.1f} s {needed.syncer_round_s:>8.1f} s "
        f"{needed.delay_steps:>5} {needed.participation:>7.0%} {needed.delay_cycles:>6.2f}   {words}"
    )
