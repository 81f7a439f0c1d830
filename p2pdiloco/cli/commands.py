"""The commands that run something: bootstrap, node, status, demo.

Only flags live here. Bodies import what they need when they are called, so that `--help` stays fast.
"""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import click
from msgspec.structs import replace

from p2pdiloco.cli.examples import example
from p2pdiloco.cli.joining import joined_through
from p2pdiloco.cli.options import FILE, Number, SpacedLists, build, config_option, setting
from p2pdiloco.config.settings import (
    BootstrapSettings,
    Compile,
    DemoSettings,
    LogStyle,
    NodeSettings,
    Precision,
    Reachability,
    Shard,
    StatusSettings,
    check_bootstrap,
    check_node,
    known_variable,
)

NODE = partial(setting, NodeSettings)
BOOTSTRAP = partial(setting, BootstrapSettings)
STATUS = partial(setting, StatusSettings)
DEMO = partial(setting, DemoSettings)

LOG: dict[str, Any] = {
    "type": click.Choice(get_args(LogStyle)),
    "help": "tui: live view; auto: tui on a terminal, else text.",
}
JOIN: dict[str, Any] = {
    "multiple": True,
    "metavar": "MULTIADDR",
    "help": "Address of a bootstrap or of any live node, with /p2p/ID, /dnsaddr/NAME, or a run link; may be "
    "repeated.",
}
RUN: dict[str, Any] = {
    "metavar": "ID|NAME",
    "help": "Id of the run, 8 digits of it or more, or its name.",
}
LOCAL: dict[str, Any] = {
    "type": FILE,
    "help": "Without --join: ask the node or bootstrap that runs here with this folder.  "
    "[default: the usual]",
}
LISTEN: dict[str, Any] = {
    "multiple": True,
    "metavar": "MULTIADDR",
    "help": "Where to listen; may be repeated. By default any port, and the same one at the next start.",
}
ANNOUNCE: dict[str, Any] = {
    "multiple": True,
    "metavar": "MULTIADDR",
    "help": "Tell others these addresses instead of those found out (for a forwarded port).",
}
UPLOAD: dict[str, Any] = {
    "metavar": "RATE",
    "help": "Use at most so many bits per second, such as 20Mbit, to send; default: whatever the link has.",
}
DOWNLOAD: dict[str, Any] = {"metavar": "RATE", "help": "The same to receive."}
WEB: dict[str, Any] = {
    "metavar": "[HOST:]PORT",
    "help": "Serve a page that shows the run, for this machine's browser; port 0: any that is free.",
}
JOIN_ALIASES = ("--initial_peers", "--initial-peers")


@click.command(cls=SpacedLists, epilog=example("bootstrap"))
@BOOTSTRAP(
    "--run",
    multiple=True,
    type=FILE,
    metavar="FILE|ID",
    help="run.toml to sign and serve, or the id of a run of --join to serve; repeatable.",
)
@BOOTSTRAP("--join", *JOIN_ALIASES, **JOIN)
@BOOTSTRAP("--data-dir", type=FILE, help="Folder of the identity and the signed manifests.")
@BOOTSTRAP("--listen", "--host_maddrs", **LISTEN)
@BOOTSTRAP("--announce", "--announce_maddrs", **ANNOUNCE)
@BOOTSTRAP("--lan", is_flag=True, help="Announce it in the local network, to everybody there (extra lan).")
@BOOTSTRAP("--relay/--no-relay", field="relay", help="Relay for peers behind NATs; bounded. Default: relay.")
@BOOTSTRAP("--max-upload", **UPLOAD)
@BOOTSTRAP("--max-download", **DOWNLOAD)
@BOOTSTRAP("--log", **LOG)
@BOOTSTRAP("--web", **WEB)
@BOOTSTRAP("--web-public", is_flag=True, help="Let anybody see the public part of the page, without a token.")
@config_option("bootstrap")
def bootstrap(**values: Any) -> int | None:
    """Serve a well-known address: discovery, manifests, list of runs. Trains nothing."""
    from p2pdiloco.daemon.admission import with_link

    settings = check_bootstrap(with_link(build(BootstrapSettings, values)))
    from p2pdiloco.daemon.bootstrap import run_bootstrap

    return run_bootstrap(settings)


@click.command(cls=SpacedLists, epilog=example("node"))
@click.argument(
    "invite", metavar="[LINK|INVITE]", required=False, default="", envvar=known_variable("--invite")
)
@NODE("--join", *JOIN_ALIASES, **JOIN)
@NODE("--run", **RUN)
@NODE("--data-dir", type=FILE, help="Folder of identity, checkpoints and events.jsonl.")
@NODE("--device", help="auto, cpu, mps, or cuda, rocm, xpu, perhaps with :N.")
@NODE("--nproc", help="Processes of the learner, a device each; auto: one for every GPU.")
@NODE(
    "--shard",
    type=click.Choice(get_args(Shard)),
    help="Share model, gradients, moments out among these processes (FSDP); auto: if a device is too small.",
)
@NODE(
    "--precision",
    type=click.Choice(get_args(Precision)),
    help="Of forward and backward passes; auto: bf16 where the device is fast at it.",
)
@NODE(
    "--compile",
    type=click.Choice(get_args(Compile)),
    help="Of passes; auto: on a GPU, after some steps, if the run is long enough; always: at once.",
)
@NODE("--threads", type=int, help="CPU threads of the learner; 0: chosen by itself.")
@NODE("--listen", "--host_maddrs", **LISTEN)
@NODE("--announce", "--announce_maddrs", **ANNOUNCE)
@NODE(
    "--reachability",
    type=click.Choice(get_args(Reachability)),
    help="Whether others can dial this node; auto: it asks them.",
)
@NODE(
    "--lan",
    is_flag=True,
    help="Announce this node in the local network; without --join: find a run there (extra lan).",
)
@NODE(
    "--relay/--no-relay",
    field="relay",
    help="Use relays to be reached behind a NAT, and relay for others; bounded. Default: relay.",
)
@NODE("--max-upload", **UPLOAD)
@NODE("--max-download", **DOWNLOAD)
@NODE(
    "--max-memory",
    metavar="SIZE",
    help="Hold at most so many bytes of peers' payloads, such as 2GiB; default: as many as come.",
)
@NODE(
    "--max-disk",
    metavar="SIZE",
    help="Join no run that takes more of the data folder than this, such as 20GiB.",
)
@NODE("--yes", is_flag=True, help="Join without a question, where somebody at a terminal would be asked.")
@NODE("--genesis", is_flag=True, help="Start the run from version 0 if no peer holds any of it.")
@NODE("--run-file", type=FILE, help="run.toml of a new run, which this node then owns (with --genesis).")
@NODE("--name", help="What people see beside the peer id.")
@NODE("--data", type=FILE, help="File or folder of the data, for runs that bring none.")
@NODE("--log", **LOG)
@NODE("--web", **WEB)
@NODE("--checkpoint-every-s", type=float, help="Seconds between checkpoints.")
@NODE("--eval-every-s", type=float, help="Seconds between evaluations on held-out data.")
@NODE(
    "--evaluate",
    type=click.Choice(["turns", "each"]),
    help="turns: one member at a time evaluates for all; each: this node always.",
)
@NODE("--result-dir", type=FILE, help="Write checkpoints of the global parameters into this folder.")
@NODE("--result-every", metavar="EVERY", help="Between two of them, such as 30min or 500merges.")
@NODE("--result-keep", type=int, help="Keep so many, the newest.")
@NODE("--keep-history", is_flag=True, help="Keep who contributed what, for `p2pdiloco credits`.")
@NODE("--micro-batch-tokens", type=int, help="Tokens per forward pass, to begin with; 0: chosen by itself.")
@NODE("--learner-nice", type=int, help="0 to 19: how far training steps back for all else on the machine.")
@NODE(
    "--daemon-nice", help="How far merging and transfers step back, for training too; auto: 12 beside a GPU."
)
@NODE("--learner-socket", type=FILE, help="Start no learner: a program connects there (p2pdiloco.Session).")
@NODE("--learner-wait-s", type=float, help="Leave when no such program was there for so long; 0: never.")
@NODE(
    "--min-step-s", type=float, help="An inner step takes at least so long, on average: spares the machine."
)
@NODE("--max-transfer", metavar="SIZE/month", help="Bytes of a calendar month, such as 200GB/month.")
@NODE("--hours", metavar="HOURS", help='Train in these only, such as 22-7 or "mon-fri 18-8, sat-sun 0-24".')
@NODE("--when-idle", metavar="TIME", help="Train when nobody has used the machine for so long: 10min.")
@NODE("--not-on-battery", is_flag=True, help="Train on mains power only.")
@NODE("--max-temperature", type=float, help="Rest while GPU or CPU are hotter, in degrees Celsius.")
@NODE("--max-power", type=float, help="Rest while the GPUs draw more, in watts.")
@config_option("node")
def node(**values: Any) -> int | None:
    """Take part in a run: find it, catch up, train, contribute.

    A LINK to the run, or an INVITE of its owner, says which run it is and whom to join through, and is
    remembered. So are the addresses of --join (in join.txt of --data-dir): a start without any dials them.
    """
    from p2pdiloco.daemon.admission import with_invite
    from p2pdiloco.daemon.network.discovery import with_nearby

    given = with_nearby(with_invite(build(NodeSettings, values)), lambda text: click.echo(text, err=True))
    settings = check_node(given)
    from p2pdiloco.daemon.start import run_node

    return run_node(settings)


@click.command(cls=SpacedLists, epilog=example("status"))
@STATUS("--join", *JOIN_ALIASES, **JOIN)
@STATUS("--data-dir", **LOCAL)
@STATUS("--run", **RUN)
@STATUS("--json", is_flag=True, help="Print JSON.")
@STATUS("--timeout-s", type=Number(min=0.1, max=3600), help="Give up after this many seconds.")
def status(**values: Any) -> int | None:
    """Show who is here, loss, tokens, versions, and who is syncer of what.

    Without --join the node of this machine is asked. Exit status 0: a node of the run answers; 3: peers
    answer, but no node of the run; 4: nobody answers.
    """
    settings = build(StatusSettings, values)
    join, run_id = joined_through(settings.join, settings.run)
    settings = replace(settings, join=join, run=run_id)
    from p2pdiloco.cli.status import run

    return run(settings)


@click.command(epilog=example("demo"))
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
