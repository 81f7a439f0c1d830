"""`p2pdiloco log-to`: the command."""

from __future__ import annotations

import signal
import threading
from functools import partial
from typing import Any, get_args

import click

from p2pdiloco.cli.logto.charts import Target, Where
from p2pdiloco.cli.options import FILE, build, setting
from p2pdiloco.config.settings import LogToSettings
from p2pdiloco.config.values import expanded
from p2pdiloco.errors import UserError, clean

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
    from p2pdiloco.cli.logto.carrying import carry
    from p2pdiloco.daemon.display.snapshot import counted

    folder = expanded(settings.data_dir)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "name a node's data folder with --data-dir")
    out = expanded(settings.out, "--out") if settings.out is not None else folder / target
    where = Where(out, settings.project, settings.name or folder.absolute().name or "node")
    stop = threading.Event()
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in ends}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda *_: stop.set())
    try:
        carried = carry(
            folder,
            target,
            where,
            follows=settings.follow,
            again=settings.again,
            stop=stop,
            say=lambda text: click.echo(clean(text), err=True),
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    torn = (
        f", passed over: {counted(carried.skipped, 'line')} that nobody can read" if carried.skipped else ""
    )
    look = f"; look at them: tensorboard --logdir {out}" if target == "tensorboard" else ""
    text = f"{counted(carried.points, 'point')} of {counted(carried.events, 'event')} carried to {target}"
    click.echo(clean(f"{text}{torn}{look}"), err=True)
    return 0
