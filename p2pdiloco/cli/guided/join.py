"""`p2pdiloco join`: asks what a node needs, shows what the run will do here, saves it, and starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from p2pdiloco.cli.examples import example
from p2pdiloco.cli.options import FILE
from p2pdiloco.config.settings import NodeSettings

INSTEAD = (
    "p2pdiloco node LINK, with --name, --data, --max-upload, --max-download, --max-disk as wanted; it starts "
    "by itself with the unit in node/RUNBOOK.md"
)


@click.command("join", epilog=example("join"))
@click.argument("link", metavar="[LINK|INVITE|ADDRESS]", required=False, default="")
@click.option(
    "--data-dir", type=FILE, default=NodeSettings().data_dir, show_default=True, help="Folder of the node."
)
def join(link: str, data_dir: Path) -> int | None:
    """Take part in a run, step by step: asks for what a node needs, shows what the run will do on this
    machine, saves the settings and starts.

    Nothing is written before the last question. Asked again, the answers of before are the defaults.
    """
    from p2pdiloco.cli.guided.guide import Guide
    from p2pdiloco.cli.guided.questions import need_terminal
    from p2pdiloco.config.values import expanded

    need_terminal("join", INSTEAD)
    guide = Guide(expanded(data_dir).absolute())
    values, then = guide.ask(link)
    if then == "quit":
        click.echo("nothing was saved", err=True)
        return None
    return _begin(guide.data_dir, values, then)


def _begin(data_dir: Path, values: dict[str, Any], then: str) -> int | None:
    from p2pdiloco.cli.commands import node
    from p2pdiloco.cli.guided.autostart import start_by_itself
    from p2pdiloco.cli.guided.saved import save_settings

    path = save_settings(data_dir, values)
    click.echo(f"saved; the node starts with: p2pdiloco node --config {path}", err=True)
    if then == "service":
        for line in start_by_itself(path):
            click.echo(line, err=True)
        return None
    if then == "save":
        return None
    # It was shown and agreed to.
    result = node.main(["--config", str(path), "--yes"], "p2pdiloco node", standalone_mode=False)
    return result if isinstance(result, int) else None
