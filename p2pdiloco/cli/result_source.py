"""Source of the global parameters for export, generate, eval and checkpoint: one set of flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from p2pdiloco.cli.joining import joined_through
from p2pdiloco.cli.options import FILE, WORDS, Number
from p2pdiloco.config.values import expanded
from p2pdiloco.errors import UserError

if TYPE_CHECKING:
    from p2pdiloco.daemon.run_files.saved_state import RunResult

_HINT = "--join ADDRESS (a live run), --data-dir DIR (of a node that has ended), or --checkpoint FILE"


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of a source."""
    options = (
        click.option(
            "--join",
            multiple=True,
            type=WORDS,
            metavar="MULTIADDR",
            help="Take the parameters from a live run: its link, or the address of any of its peers.",
        ),
        click.option("--data-dir", type=FILE, help="From the folder of a node that has ended."),
        click.option("--checkpoint", type=FILE, help="From a checkpoint file."),
        click.option(
            "--tokenizer", type=FILE, help="The run's tokenizer file, where none lies beside a checkpoint."
        ),
        click.option(
            "--run", metavar="NAME", default="", help="Name or id of the run, if there are several."
        ),
        click.option(
            "--timeout-s",
            type=Number(min=0.1, max=1e6),
            default=600.0,
            show_default=True,
            help="Give a live run up after so long.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def read_result(
    join: tuple[str, ...],
    data_dir: Path | None,
    checkpoint: Path | None,
    tokenizer: Path | None,
    run: str,
    timeout_s: float,
) -> RunResult:
    """The global parameters from the one source that is given, with the run's tokenizer.

    Raises:
        UserError: none or several are given, it is not to be had, or the tokenizer is not the run's.
    """
    result = _read(join, data_dir, checkpoint, run, timeout_s)
    if not result.merges:
        where = "; a bootstrap keeps no others: ask a member with --join" if data_dir is not None else ""
        click.echo(f"these parameters are version 0: this run has not trained them yet{where}", err=True)
    if tokenizer is None:
        return result
    from p2pdiloco.tasks.tokens import checked_content, read_tokenizer

    content = checked_content(result.manifest.data, read_tokenizer(tokenizer))
    if content is None:
        raise UserError("the run reads text as raw bytes: it has no tokenizer file", "leave --tokenizer out")
    return msgspec.structs.replace(result, tokenizer=content)


def _read(
    join: tuple[str, ...], data_dir: Path | None, checkpoint: Path | None, run: str, timeout_s: float
) -> RunResult:
    given = sum(map(bool, (join, data_dir, checkpoint)))
    if given != 1:
        raise UserError(f"{given or 'no'} sources of the parameters are given, one is needed", _HINT)
    if join:
        join, run = joined_through(join, run)
        from p2pdiloco.cli.result_live import result_of_run

        return result_of_run(join, run, timeout_s)
    from p2pdiloco.daemon.run_files.saved_state import load_result, result_on_disk

    if data_dir is not None:
        return result_on_disk(expanded(data_dir), run)
    assert checkpoint is not None
    result = load_result(checkpoint)
    if run and run != result.manifest.run.name and not result.run.startswith(run):
        raise UserError(f"{checkpoint} is of {result.words()}, not of {run}")
    return result
