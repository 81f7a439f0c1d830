"""`p2pdiloco credits`: the command."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import click

from p2pdiloco.cli.joining import joined_through
from p2pdiloco.cli.options import FILE, WORDS, Number, SpacedLists
from p2pdiloco.errors import UserError

BUCKETS = {"": 0, "hour": 3600, "day": 86_400}


@click.command("credits", cls=SpacedLists)
@click.option("--join", multiple=True, type=WORDS, metavar="MULTIADDR", help="Peer to ask; may be repeated.")
@click.option("--run", default="", metavar="ID|NAME", help="Id of the run, or its name.")
@click.option("--data-dir", type=FILE, help="A node's folder: asked without --join; its key signs.")
@click.option("--verify", is_flag=True, help="Count it here, and check every learner's signature.")
@click.option(
    "--by", type=click.Choice(["hour", "day"]), default=None, help="Tell hours or days apart (UTC)."
)
@click.option("--top", type=click.IntRange(1, 1_000_000), default=50, show_default=True, help="Rows to show.")
@click.option("--csv", "style", flag_value="csv", help="Print CSV, all rows.")
@click.option("--json", "style", flag_value="json", help="Print JSON, all rows.")
@click.option(
    "--history", type=FILE, metavar="DIR", help="Keep there what is fetched: next time only the rest is."
)
@click.option("--certificate", type=FILE, metavar="FILE", help="Write a signed certificate of --peer.")
@click.option(
    "--peer", default="", metavar="ID|NAME", help="Learner of --certificate: id, its end, or a name."
)
@click.option("--check", type=FILE, metavar="FILE", help="Check a certificate; asks nobody.")
@click.option(
    "--prove", default="", metavar="WORD", help="With --check: sign that word as the peer it is of."
)
@click.option(
    "--word", default="", metavar="WORD", help="With --check and --proof: the word that was to be signed."
)
@click.option("--proof", default="", metavar="HEX", help="With --check: what --prove printed.")
@click.option(
    "--timeout-s",
    type=Number(min=0.1, max=3600),
    default=20.0,
    show_default=True,
    help="Give up if nobody answers for so long.",
)
def credits_command(
    join: tuple[str, ...],
    run: str,
    data_dir: Path | None,
    by: Literal["hour", "day"] | None,
    certificate: Path | None,
    peer: str,
    check: Path | None,
    **more: object,
) -> int:
    """Show who did how much of a run: tokens, inner steps and merged contributions of every learner.

    The figures are from labels that learners signed, departed members included. Members that run with
    --keep-history are asked; --verify counts everything on this machine.

    \b
    Example: p2pdiloco credits --join ADDRESS --verify --csv > credits.csv
             p2pdiloco credits --peer ada --certificate ada.json --data-dir ~/.p2pdiloco/node
             p2pdiloco credits --check ada.json
    """
    from p2pdiloco.cli.credits import papers

    prove, word, proof = str(more["prove"]), str(more["word"]), str(more["proof"])
    if check is not None:
        if prove:
            click.echo(papers.proof_for(check, prove, data_dir))
            return 0
        if bool(word) != bool(proof):
            raise UserError("--word and --proof belong together")
        return papers.check(check, word, proof)
    if prove or word or proof:
        raise UserError("--prove, --word and --proof are about a certificate: --check FILE")
    if bool(certificate) != bool(peer):
        raise UserError(
            "a certificate is of one learner: --certificate FILE --peer ID|NAME",
            "--peer picks no rows: without it all learners are shown, and --csv or --json can be searched",
        )
    return _ask(join, run, data_dir, by, (certificate, peer), more)


def _ask(
    join: tuple[str, ...],
    run: str,
    data_dir: Path | None,
    by: str | None,
    paper: tuple[Path | None, str],
    more: dict[str, object],
) -> int:
    from rich.console import Console

    from p2pdiloco.cli.credits import papers, view
    from p2pdiloco.cli.credits.collecting import CreditsWish, collect
    from p2pdiloco.cli.status import local_addresses
    from p2pdiloco.cli.visitor import visit
    from p2pdiloco.config.values import expanded

    addresses, wanted = joined_through(join, run)
    certificate, peer = paper
    history = more["history"]
    wish = CreditsWish(
        join=addresses or local_addresses(data_dir),
        run=wanted,
        bucket_s=BUCKETS[by or ""],
        verify=bool(more["verify"]) or certificate is not None,
        history=expanded(history, "--history") if isinstance(history, Path) else None,
        timeout_s=float(str(more["timeout_s"])),
    )
    logging.getLogger().setLevel(logging.ERROR)  # what a peer did wrong here is not worth a line
    found = visit(collect(wish))
    if certificate is not None:
        papers.certify(found, peer, certificate, data_dir)
    elif more["style"] == "csv":
        click.echo(view.as_csv(found), nl=False)
        for line, _ in view.words(found):
            click.echo(line, err=True)
    elif more["style"] == "json":
        click.echo(view.as_json(found))
    else:
        Console().print(view.render(found, int(str(more["top"])), bool(by)))
    return 0
