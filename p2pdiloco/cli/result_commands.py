"""The commands for whoever wants the result of a run: export, generate, eval, checkpoint.

All take the global parameters from one source, with one set of flags (`source_options`): a live run, a node's
folder or a checkpoint file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import Files, try_file, try_folder
from p2pdiloco.cli.options import (
    AS_JSON,
    FILE,
    Number,
    command,
    data_dir_option,
    join_option,
    patience_option,
    say,
)
from p2pdiloco.config.manifest import BYTES, Dtype
from p2pdiloco.config.values import Addresses, expanded
from p2pdiloco.errors import UserError, clean

if TYPE_CHECKING:
    from p2pdiloco.daemon.run_files.saved_state import RunResult


# Source of the parameters.

_HINT = "--join LINK (a live run), --data-dir DIR (of a node), or --checkpoint FILE"


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of a source."""
    options = (
        join_option("Take the parameters from a live run: its link, or the address of any of its peers."),
        data_dir_option(
            "From the folder of a node; with --join, what is in it lets you read. "
            "[default: the usual folders]"
        ),
        click.option("--checkpoint", type=FILE, help="From a checkpoint file."),
        click.option(
            "--tokenizer", type=FILE, help="The run's tokenizer file, where none lies beside a checkpoint."
        ),
        click.option(
            "--run", metavar="NAME", default="", help="Name or id of the run, if there are several."
        ),
        patience_option(600.0, 1e6, "Give a live run up after so long."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def read_result(
    join: Addresses,
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
    given = sum(map(bool, (join, data_dir, checkpoint)))
    if given != 1 and (checkpoint or not join):
        raise UserError(f"{given or 'no'} sources of the parameters are given, one is needed", _HINT)
    if data_dir is not None and not join:
        join = _running_there(expanded(data_dir))
    if join:
        from p2pdiloco.cli.live_result import result_of_run

        result = result_of_run(join, run, timeout_s, data_dir)
    else:
        from p2pdiloco.daemon.run_files.saved_state import load_result, result_on_disk

        if data_dir is not None:
            result = result_on_disk(expanded(data_dir), run)
        elif checkpoint is not None:
            result = load_result(checkpoint)
            if run and run != result.manifest.run.name and not result.run.startswith(run):
                raise UserError(f"{checkpoint} is of {result.words()}, not of {run}")
    if not result.merges:
        where = "; a bootstrap keeps no others: ask a member with --join" if data_dir is not None else ""
        say(f"these parameters are version 0: this run has not trained them yet{where}")
    if tokenizer is None:
        return result
    from p2pdiloco.tasks.tokens import checked_content, read_tokenizer

    content = checked_content(result.manifest.data, read_tokenizer(tokenizer))
    if content is None:
        raise UserError("the run reads text as raw bytes: it has no tokenizer file", "leave --tokenizer out")
    return replace(result, tokenizer=content)


def _running_there(folder: Path) -> Addresses:
    """List the addresses of the node that runs with that folder; none: no node does."""
    from p2pdiloco.adapters.data_dir import is_in_use
    from p2pdiloco.daemon.run_files.known_runs import WaysIn

    return WaysIn.load(folder).own if folder.is_dir() and is_in_use(folder) else ()


DEVICE = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N, rocm, xpu or mps."
)
WEIGHTS, DESCRIPTION = "model.safetensors", "run.json"


@command("export", click.Command)
@source_options
@click.option("--out", type=FILE, required=True, metavar="FOLDER", help="Folder to write, made if missing.")
@click.option("--force", is_flag=True, help="Also into a folder in which there is something.")
@click.option(
    "--dtype",
    type=click.Choice(get_args(Dtype)),
    help="Type of the numbers; else that of the model which the run began with, or fp32.",
)
def export(out: Path, force: bool, dtype: Dtype | None, **source: Any) -> None:
    """Write the global parameters as a folder that Hugging Face's transformers loads.

    Models of causal-lm load as LlamaForCausalLM or, with experts, MixtralForCausalLM, those of hf-causal-lm
    as what they are. Of other tasks the folder has the parameters and the run's [model] table.
    """
    from p2pdiloco.tasks.tokens import checked_content

    _check_folder(out, force)
    result = _of_dtype(read_result(**source), dtype)
    checked_content(result.manifest.data, result.tokenizer)
    files = result.task().hub_files()
    Files().make_folder(out)
    described: dict[str, Any] = {
        "run": result.manifest.run.name,
        "run_id": result.run,
        "task": result.manifest.run.task,
        "dtype": result.manifest.export.dtype,
        "model": result.manifest.model,
    }
    if result.manifest.run.initial_name:
        described["began_with"] = result.manifest.run.initial_name
    for name, content in {**(files or {}), DESCRIPTION: json.dumps(described, indent=2).encode()}.items():
        Files().save(out / name, [content], durable=True)
    # The label stays in: generate, eval and `run new --from` read the exported file too.
    result.save(out / WEIGHTS, result.manifest.export.dtype)
    click.echo(os.fsencode(out))  # (a name that need not be text)
    say(clean(f"exported {result.words()}, in {result.manifest.export.dtype}"))
    if files is None:
        words = f"parameters by name in {WEIGHTS}, the model's table in {DESCRIPTION}"
        say(f"{result.manifest.run.task} is no model that transformers knows: {words}")
    else:
        say(f'load it: transformers.AutoModelForCausalLM.from_pretrained("{out}")')


def _of_dtype(result: RunResult, dtype: Dtype | None) -> RunResult:
    """The result of a run whose exports have this type, if one is given."""
    told = result.manifest.export
    export = replace(told, dtype=dtype or told.dtype)
    manifest = replace(result.manifest, export=export)
    return replace(result, manifest=manifest)


@command("generate", click.Command)
@source_options
@click.option("--prompt", default="\n", help="Text to go on with; - reads it from the input.")
@click.option(
    "--tokens", type=click.IntRange(1, 1 << 20), default=200, show_default=True, help="So many more."
)
@click.option(
    "--temperature",
    type=Number(0, 100),
    default=0.8,
    show_default=True,
    help="0: always the likeliest.",
)
@click.option("--seed", type=click.IntRange(min=0, max=1 << 53), default=0, help="Of the choices.")
@DEVICE
def generate(prompt: str, tokens: int, temperature: float, seed: int, device: str, **source: Any) -> None:
    """Let the model go on with a text."""
    text = _prompt(prompt)
    result = read_result(**source)
    say(clean(result.words()))
    from p2pdiloco.learner.ranks import choose_device, configure_torch

    chosen = choose_device(device)
    configure_torch(chosen, 0)
    written = result.task().written(result.model(chosen).eval(), text, tokens, temperature, seed)
    if written is None:
        raise UserError(f"the task {result.manifest.run.task} writes no text", "p2pdiloco eval measures it")
    _show(text + written)


def _show(text: str) -> None:
    """Print a model's text: on a terminal what prints, elsewhere all of it."""
    shown = clean(text, keep="\n\t") if sys.stdout.isatty() else text
    click.echo(shown, color=True)  # as it is: click would take some of it out, not all
    if shown != text:
        say("what a terminal would obey is shown as ·: send the text to a file for all of it")


def _prompt(given: str) -> str:
    """Take the prompt from the flag, or the input as bytes: what text made of it would depend on
    the locale."""
    if given == "-" and sys.stdin is None:  # closed by who started us
        raise UserError("there is no input to read the prompt from", "give it with --prompt TEXT")
    try:
        text = sys.stdin.buffer.read().decode() if given == "-" else given
        text.encode()  # a flag that is not UTF-8 has surrogates
    except UnicodeError as error:
        raise UserError(
            "the prompt is not UTF-8 text", "convert it, for instance with iconv, and give it with --prompt -"
        ) from error
    return text


@command("eval", click.Command)
@source_options
@click.option("--data", type=FILE, help="The run's data as `p2pdiloco node --data` has it.")
@click.option(
    "--tokens",
    type=click.IntRange(1, 1 << 40),
    default=16_384,
    show_default=True,
    help="Held-out tokens (or images) to measure on, in whole samples, evenly spread; at most what there is.",
)
@AS_JSON
@DEVICE
def evaluate(data: Path | None, tokens: int, as_json: bool, device: str, **source: Any) -> None:
    """Measure the global parameters on data that nobody trains on."""
    if data is not None and not data.exists():
        raise UserError(f"the data path {data} does not exist", "check --data")
    result = read_result(**source)
    found = figures(result, data, tokens, device)
    if as_json:
        click.echo(json.dumps(found))
        return
    say(clean(result.words()))
    others = "".join(f", {clean(name)} {value:.4f}" for name, value in found["metrics"].items())
    counted = result.task().counted
    if found["tokens"] > tokens:
        say(f"less than a sample cannot be measured: it has {found['tokens']} {counted}")
    click.echo(f"held-out loss {found['loss']:.4f} over {found['tokens']} {counted}{others}")


def figures(result: RunResult, data: Path | None, tokens: int, device: str) -> dict[str, Any]:
    """Held-out loss and metrics of the parameters, and which ones they are. Raises: UserError."""
    from p2pdiloco.daemon.display.logs import lasting, waiting
    from p2pdiloco.learner.loop import evaluate as measured
    from p2pdiloco.learner.loop import heldout_batch
    from p2pdiloco.learner.ranks import choose_device, configure_torch

    chosen = choose_device(device)
    configure_torch(chosen, 0)
    task = result.task()
    with waiting("reading the data"):
        read = task.load_data(str(data) if data is not None else None)
    if read.note:
        say(clean(read.note))
    batch = heldout_batch(task, read.heldout, tokens)
    with lasting("measuring on held-out samples") as tell:
        found = measured(task, result.model(chosen).eval(), batch, tell=tell)
    return {
        "run": result.manifest.run.name,
        "run_id": result.run,
        "versions": [label.number for label in result.labels],
        "merged_tokens": result.tokens,
        "loss": found.loss,
        "tokens": found.tokens,
        "metrics": found.metrics,
    }


@command("checkpoint", click.Command)
@source_options
@click.option("--out", type=FILE, required=True, metavar="FILE", help="File to write (safetensors).")
def checkpoint(out: Path, **source: Any) -> None:
    """Write the global parameters and which versions they are as one safetensors file.

    The run's tokenizer, if it has one, is written beside it.
    """
    try_file(out, "--out")
    result = read_result(**source)
    tokenizer = result.save(out)
    click.echo(os.fsencode(out))  # (a name that need not be text)
    say(clean(f"saved {result.words()}"))
    if tokenizer is not None:
        say(f"the run's tokenizer is in {tokenizer}: keep it beside {out.name}")
    elif result.tokenizer is None and result.manifest.data.tokenizer != BYTES:
        words = f"the tokenizer {result.manifest.data.tokenizer} of the run is not here, and was not saved"
        say(clean(f"{words}: who uses {out} needs it"))


def _check_folder(folder: Path, force: bool) -> None:
    """Check before anything is fetched that we may write there. Raises: UserError, StorageError."""
    try_folder(folder, "--out")
    if folder.exists() and any(folder.iterdir()) and not force:
        raise UserError(f"{folder} is not empty", "--force writes into it, --out FOLDER elsewhere")
