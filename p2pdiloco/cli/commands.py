"""Commands that run something: bootstrap, node, join, status, demo, top, board, doctor, log-to and credits.

Only flags live here. Bodies import what they need when they are called, so that `--help` stays fast.
"""

from __future__ import annotations

import shutil
import textwrap
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource
from msgspec.structs import replace

from p2pdiloco.cli.options import (
    FILE,
    PATIENCE_S,
    Diagnosis,
    Level,
    Number,
    SpacedLists,
    build,
    command,
    config_option,
    data_dir_option,
    exit_status,
    flags_of,
    help_all,
    join_option,
    joined_through,
    patience_option,
    say,
    setting,
)
from p2pdiloco.config.settings import (
    BoardSettings,
    BootstrapSettings,
    DemoSettings,
    DoctorSettings,
    LogToSettings,
    NodeSettings,
    StatusSettings,
    Target,
    TopSettings,
    WatchSettings,
    check_bootstrap,
    check_node,
    known_variable,
)
from p2pdiloco.config.values import Addresses, expanded
from p2pdiloco.errors import UserError, clean, json_line
from p2pdiloco.util import Values

W = TypeVar("W", bound=WatchSettings)

STATUS = partial(setting, StatusSettings)
DEMO = partial(setting, DemoSettings)


@command("bootstrap")
@flags_of(BootstrapSettings, False)
@config_option("bootstrap")
def bootstrap(**values: Any) -> int | None:
    """Serve a well-known address: discovery, manifests, list of runs. Trains nothing."""
    from p2pdiloco.daemon.admission import with_link

    settings = check_bootstrap(with_link(build(BootstrapSettings, values)))
    from p2pdiloco.daemon.bootstrap import run_bootstrap

    return run_bootstrap(settings)


@command("node")
@click.argument(
    "invite", metavar="[LINK|INVITE]", required=False, default="", envvar=known_variable("--invite")
)
@flags_of(NodeSettings, False)
@config_option("node")
@click.option("--forget", is_flag=True, help="Start without the settings of the last start.")
@help_all
@click.pass_context
def node(context: click.Context, /, forget: bool, **values: Any) -> int | None:
    """Take part in a run: find it, catch up, train, contribute.

    A LINK to the run, or an INVITE of its owner, says which run it is and whom to join through. Once the run
    is joined, a start without LINK, --join, --run, --run-file and --config goes on with it, and with the
    other settings of that start; a flag wins over those, and --forget leaves them out.
    """
    from p2pdiloco.daemon.admission import with_invite
    from p2pdiloco.daemon.network.discovery import with_nearby
    from p2pdiloco.daemon.run_files.known_runs import WaysIn

    if not (forget or context.default_map or any(values[name] for name in BEGINS_ANEW)):
        values |= _remembered(context, expanded(values["data_dir"]))
    given = with_nearby(with_invite(build(NodeSettings, values)), say)
    settings = check_node(given, WaysIn.load(given.data_dir).lead_back)
    from p2pdiloco.daemon.start import run_node

    return run_node(settings)


BEGINS_ANEW = "invite", "join", "run", "run_file", "learner_socket"
"""Settings with which a start takes up nothing of the last one."""


def _remembered(context: click.Context, data_dir: Path) -> Values:
    """What the last start had, or `join` saved, of what is not given now, but for limits that were changed
    since."""
    from p2pdiloco.cli.guide import saved_settings
    from p2pdiloco.daemon.owner.wishes import load_wishes
    from p2pdiloco.daemon.run_files.known_runs import WaysIn

    kept = WaysIn.load(data_dir).settings or saved_settings(data_dir)
    wanted = kept.keys() - load_wishes(data_dir).changed
    found = {
        each.name: each.type_cast_value(context, kept[each.name] if each.multiple else str(kept[each.name]))
        for each in context.command.params
        if each.name in wanted and context.get_parameter_source(each.name) is ParameterSource.DEFAULT
    }
    if found:
        say("as before: " + ", ".join(f"{name} {value}" for name, value in found.items()))
    return found


@command("status")
@flags_of(StatusSettings)
@STATUS("--json", is_flag=True, help="Print JSON.")
@STATUS("--timeout-s", type=PATIENCE_S, help="Give up after this many seconds.")
def status(**values: Any) -> int | None:
    """Show who is here, loss, tokens, versions, and who is syncer of what.

    Without --join the node of this machine is asked. Exit status 0: a node of the run answers; 3: peers
    answer, but no node of the run; 4: nobody answers.
    """
    settings = _watching(StatusSettings, values)
    from p2pdiloco.cli.status_command import run

    return run(settings)


def _watching(kind: type[W], values: Values) -> W:
    """Settings of a command that looks at a run, with the addresses behind what is joined through."""
    settings = build(kind, values)
    join, run_id = joined_through(settings.join, settings.run)
    return replace(settings, join=join, run=run_id)


@command("demo", click.Command)
@DEMO("--nodes", type=click.IntRange(1, 64), help="Nodes, beside the bootstrap.")
@DEMO("--seconds", type=Number(min=1, max=1e6), help="Seconds of training.")
@click.option("--no-kill", is_flag=True, envvar="P2PDILOCO_NO_KILL", show_envvar=True, help="Kill nobody.")
@DEMO("--preset", help="Run to train.")
@DEMO("--report", type=FILE, metavar="FILE", help="Write the summary as JSON.")
@DEMO("--plot", type=FILE, metavar="FILE", help="Write a PNG of the loss, with the kill marked.")
@DEMO("--keep", type=FILE, metavar="DIR", help="Keep everything that the processes wrote.")
def demo(no_kill: bool, **values: Any) -> int | None:
    """Train with several real nodes on this machine, kill a syncer, and show the recovery."""
    settings = build(DemoSettings, values | {"kill": not no_kill})
    from p2pdiloco.demo.demo import run

    return run(settings)


# `p2pdiloco top` and `p2pdiloco board`.

TOP = partial(setting, TopSettings)
BOARD = partial(setting, BoardSettings)


@click.command(cls=SpacedLists)
@flags_of(TopSettings)
@TOP("--timeout-s", type=PATIENCE_S, help="Give up if nobody answers at first for so long.")
@TOP("--every-s", type=Number(min=1, max=3600), help="Between two lines, where there is no terminal.")
def top(**values: Any) -> int | None:
    """Show the whole swarm, live: who is here and behind, speed, loss, progress, elections and faults.

    Several members are asked, and others when those are gone. q leaves, ? explains, arrows and page keys move
    in the list of members, s sorts it. Not on a terminal it writes lines. Exit statuses are those of status.

    \b
    Example: p2pdiloco top                       of the node that runs here
             p2pdiloco top --join ADDRESS        of any bootstrap or node
    """
    settings = _watching(TopSettings, values)
    from p2pdiloco.cli.top import run

    return run(settings)


@click.command(cls=SpacedLists)
@flags_of(BoardSettings)
@BOARD("--out", type=FILE, metavar="DIR", help="Folder of the files: index.html, view.json, static/.")
@BOARD("--every", metavar="TIME", help="Write again and again, such as 30s, until told to stop.")
@BOARD("--timeout-s", type=PATIENCE_S, help="Give up if nobody answers for so long.")
def board(**values: Any) -> int | None:
    """Write the public page of a run as files that any web server carries.

    Once, or again and again with --every. Each file is replaced whole. If nobody answers later, the files
    stay and say their age. Exit statuses are those of status.

    \b
    Example: p2pdiloco board --join ADDRESS --out /var/www/run --every 30s
    """
    settings = _watching(BoardSettings, values)
    from p2pdiloco.cli.board import run

    return run(settings)


# `p2pdiloco doctor`.

DOCTOR = partial(setting, DoctorSettings)
COLOURS = {Level.GOOD: "green", Level.SKIPPED: "bright_black", Level.WARNING: "yellow", Level.BAD: "red"}
NAME_CELLS, LEVEL_CELLS, WIDTH = 10, 8, 110


@click.command(cls=SpacedLists)
@flags_of(DoctorSettings)
@DOCTOR("--json", is_flag=True, help="Print one JSON object a line.")
@DOCTOR("--timeout-s", type=Number(min=5, max=3600), help="Take no longer than this.")
def doctor(**values: Any) -> int:
    """Look for what keeps a node from its work: this machine, its network, the way to a run.

    Each line is good, a warning, bad, or skipped with the reason, and says what to do. Exit status 0: nothing
    is wrong; 1: there are warnings; 2: something is bad. Without --join the node that runs here is asked, and
    those that it last joined through, or met.

    \b
    Example: p2pdiloco doctor --join /dns/example.org/tcp/31337/p2p/12D3Koo... --run NAME
    """
    settings = build(DoctorSettings, values)
    from p2pdiloco.cli.doctor import all_of, examine
    from p2pdiloco.cli.status_command import visit
    from p2pdiloco.daemon.display.snapshot import counted
    from p2pdiloco.daemon.run_files.known_runs import way_of

    way = way_of(settings.join, settings.run)  # names are looked up later, as something to look at
    settings = replace(settings, join=tuple(way.join), run=way.run)
    found = visit(all_of(examine(settings), settings.timeout_s, partial(_print, as_json=settings.json)))
    status = exit_status(found)
    if not settings.json:
        counts = {level: sum(finding.level is level for finding in found) for level in Level}
        warnings = counted(counts[Level.WARNING], "warning")
        click.echo(f"{counts[Level.GOOD]} good, {warnings}, {counts[Level.BAD]} bad")
    return status


def _print(finding: Diagnosis, *, as_json: bool) -> None:
    if as_json:
        click.echo(json_line(finding))
        return
    start = f"{finding.level.value:<{LEVEL_CELLS}} {finding.check:<{NAME_CELLS}} "
    indent, coloured = " " * len(start), click.style(start, fg=COLOURS[finding.level])
    width = max(WIDTH // 2, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
    wrap = partial(textwrap.wrap, width=width - len(indent), break_long_words=False, break_on_hyphens=False)
    click.echo(coloured + f"\n{indent}".join(wrap(clean(finding.words))))
    if finding.todo:
        click.echo(indent + f"\n{indent}".join(wrap(clean(f"-> {finding.todo}"))))


# `p2pdiloco log-to`.

LOG_TO = partial(setting, LogToSettings)


@click.command("log-to")
@click.argument("target", type=click.Choice(get_args(Target)))
@LOG_TO("--data-dir", type=FILE, help="Folder of the node, which may run meanwhile, or be gone.")
@LOG_TO("--follow/--no-follow", field="follow", help="Go on as the log grows, until told to stop.")
@LOG_TO(
    "--out",
    type=FILE,
    metavar="DIR",
    help="Folder of the charts' files.  [default: TARGET in the data folder; trackio has its own]",
)
@LOG_TO("--project", help="Project, for wandb and trackio.")
@LOG_TO("--name", help="Name of the run in the charts.  [default: that of the data folder]")
@LOG_TO("--again", is_flag=True, help="From the beginning, although points were carried before.")
def log_to(target: Target, **values: Any) -> int:
    """Carry a node's figures to TensorBoard, Weights & Biases or Trackio.

    They are read from events.jsonl and drawn over the tokens that the run has consumed. Another call goes on
    where the last one stopped. Each needs its package: pip install '.[tensorboard]', '.[wandb]' or
    '.[trackio]'.

    \b
    Example: p2pdiloco log-to tensorboard --follow
             tensorboard --logdir ~/.p2pdiloco/node/tensorboard
    """
    settings = build(LogToSettings, values)
    from p2pdiloco.cli.charts import ChartPlace, carry
    from p2pdiloco.daemon.display.snapshot import counted
    from p2pdiloco.demo.guard import stop_signals

    folder = expanded(settings.data_dir)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "name a node's data folder with --data-dir")
    out = expanded(settings.out, "--out") if settings.out is not None else folder / target
    where = ChartPlace(out, settings.project, settings.name or folder.absolute().name or "node")
    with stop_signals() as stop:
        carried = carry(
            folder,
            target,
            where,
            follows=settings.follow,
            again=settings.again,
            stop=stop,
            say=lambda text: say(clean(text)),
        )
    torn = (
        f", passed over: {counted(carried.skipped, 'line')} that nobody can read" if carried.skipped else ""
    )
    look = f"; look at them: tensorboard --logdir {out}" if target == "tensorboard" else ""
    text = f"{counted(carried.points, 'point')} of {counted(carried.events, 'event')} carried to {target}"
    say(clean(f"{text}{torn}{look}"))
    return 0


# `p2pdiloco credits`.

BUCKETS = {"hour": 3600, "day": 86_400}


@click.command("credits", cls=SpacedLists)
@join_option("Peer to ask; may be repeated.")
@click.option("--run", default="", metavar="ID|NAME", help="Id of the run, or its name.")
@data_dir_option("A node's folder: asked without --join; its key signs.")
@click.option("--verify", is_flag=True, help="Count it here, and check every learner's signature.")
@click.option("--by", type=click.Choice(list(BUCKETS)), help="Tell hours or days apart (UTC).")
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
@patience_option(20.0, 3600, "Give up if nobody answers for so long.")
def credits_command(
    join: Addresses,
    run: str,
    data_dir: Path | None,
    verify: bool,
    by: str | None,
    top: int,
    style: str | None,
    history: Path | None,
    certificate: Path | None,
    peer: str,
    check: Path | None,
    prove: str,
    word: str,
    proof: str,
    timeout_s: float,
) -> int:
    """Show who did how much of a run: tokens, inner steps and merged contributions of every learner.

    The figures are from labels that learners signed, departed members included. Members that run with
    --keep-history are asked; --verify counts everything on this machine.

    \b
    Example: p2pdiloco credits --join ADDRESS --verify --csv > credits.csv
             p2pdiloco credits --peer ada --certificate ada.json --data-dir ~/.p2pdiloco/node
             p2pdiloco credits --check ada.json
    """
    from p2pdiloco.cli import credits_report

    if check is not None:
        if prove:
            click.echo(credits_report.proof_for(check, prove, data_dir))
            return 0
        if bool(word) != bool(proof):
            raise UserError("--word and --proof belong together")
        return credits_report.check_certificate(check, word, proof)
    if prove or word or proof:
        raise UserError("--prove, --word and --proof are about a certificate: --check FILE")
    if bool(certificate) != bool(peer):
        raise UserError(
            "a certificate is of one learner: --certificate FILE --peer ID|NAME",
            "--peer picks no rows: without it all learners are shown, and --csv or --json can be searched",
        )
    from p2pdiloco.cli.status_command import local_addresses, visit

    addresses, wanted = joined_through(join, run)
    wish = credits_report.CreditsSearch(
        join=addresses or local_addresses(data_dir),
        run=wanted,
        bucket_s=BUCKETS[by] if by else 0,
        verify=verify or certificate is not None,
        history=expanded(history, "--history") if history is not None else None,
        timeout_s=timeout_s,
    )
    found = visit(credits_report.collect_credits(wish))
    if certificate is not None:
        credits_report.certify(found, peer, certificate, data_dir)
    elif style is not None:
        as_text = credits_report.as_csv if style == "csv" else credits_report.as_json
        click.echo(as_text(found), nl=style == "json")
        for line, _ in credits_report.caveats(found) if style == "csv" else ():
            say(line)
    else:
        from rich.console import Console

        Console().print(credits_report.render(found, top, bool(by)))
    return 0


# `p2pdiloco join`.

INSTEAD = (
    "p2pdiloco node LINK, with --name, --data, --max-upload, --max-download, --max-disk as wanted; it starts "
    "by itself with the unit in node/RUNBOOK.md"
)


@command("join", click.Command)
@click.argument("link", metavar="[LINK|INVITE|ADDRESS]", required=False, default="")
@click.option(
    "--data-dir", type=FILE, default=NodeSettings().data_dir, show_default=True, help="Folder of the node."
)
def join(link: str, data_dir: Path) -> int | None:
    """Take part in a run, step by step: asks for what a node needs, shows what the run will do on this
    machine, saves the settings and starts.

    Nothing is written before the last question. Asked again, the answers of before are the defaults.
    """
    from p2pdiloco.cli.guide import Guide
    from p2pdiloco.cli.questions import need_terminal

    need_terminal("join", INSTEAD)
    guide = Guide(expanded(data_dir).absolute())
    values, then = guide.ask(link)
    if then == "quit":
        say("nothing was saved")
        return None
    return _begin(guide.data_dir, values, then)


def _begin(data_dir: Path, values: Values, then: str) -> int | None:
    from p2pdiloco.cli.guide import save_settings, start_by_itself

    path = save_settings(data_dir, values)
    say(f"saved; the node starts with: p2pdiloco node --config {path}")
    if then == "service":
        for line in start_by_itself(path):
            say(line)
        return None
    if then == "save":
        return None
    # It was shown and agreed to.
    result = node.main(["--config", str(path), "--yes"], "p2pdiloco node", standalone_mode=False)
    return result if isinstance(result, int) else None
