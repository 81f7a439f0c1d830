"""`p2pdiloco run new`, `run check` and `plan`: write a run.toml, check one, say what a run asks of a link.

`run amend` and `run link` are in `owner_commands`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec
from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import own_peer, storage_errors, try_file
from p2pdiloco.cli.given_wish import TrainingWish, check_countable, count_tokens, with_data, with_wish
from p2pdiloco.cli.options import (
    AS_JSON,
    FILE,
    Number,
    WholeSentences,
    command,
    example,
    joined_through,
    node_folder,
    say,
)
from p2pdiloco.cli.owner_commands import amend, link
from p2pdiloco.config.manifest import BYTES, AdmissionSection, DataSection, Manifest, canonical_bytes
from p2pdiloco.config.presets import (
    LEARNERS,
    PRESETS,
    expected_merges,
    for_bytes,
    for_run,
    warnings_about,
    with_outer,
    with_seats,
)
from p2pdiloco.config.values import parse_rate, rate_text, size_text
from p2pdiloco.errors import UserError, install_hint
from p2pdiloco.tasks.registry import load_manifest, manifest_from_table, numel_of, render_toml

if TYPE_CHECKING:
    from p2pdiloco.adapters.result_file import Arrays
    from p2pdiloco.daemon.network.link import Advice, Demand
    from p2pdiloco.daemon.network.reach import MeasuredLink

MODES = {
    "open": "whoever knows the run",
    "invite": "whoever has an invite of its owner",
    "list": "whom its owner has put on the list",
}
OPEN_WORDS = """
an open run: whoever comes trains without a vote, and all of them together have {:.0%} of each merge at most.
Three seats and 1,000 volunteers learn at 25% like 5 equal learners, at 50% like 12 ([weight] open_share).\
"""
ENDS = {"stop": "stop", "go-on": "go on at the floor of the learning rate"}


@click.group("run", cls=WholeSentences)
def run_group() -> None:
    """Describe a run: write a run.toml, check one; change one that goes on; print its link."""


run_group.add_command(amend)
run_group.add_command(link)


@run_group.command("new", epilog=example("run new"))
@click.argument("name", required=False, default="")
@click.option("--guide", is_flag=True, help="Ask for all of it at the terminal, step by step.")
@click.option(
    "--preset",
    default="tiny",
    show_default=True,
    envvar="P2PDILOCO_PRESET",
    show_envvar=True,
    help=f"Start from: {', '.join(PRESETS)}; with --from only if you name one.",
)
@click.option(
    "--seed", type=click.IntRange(min=0, max=1 << 53), default=0, help="Seed of version 0 and data."
)
@click.option(
    "--expected-members",
    type=click.IntRange(min=0, max=16_384),
    default=0,
    help=f"Members at the start, about, for groups, schedule, outer step; 0: {LEARNERS}, in one group.",
)
@with_wish
@click.option(
    "--from",
    "source",
    type=FILE,
    metavar="MODEL",
    help="Start from this model: a folder of Hugging Face's form, an export, a checkpoint or GGUF file.",
)
@click.option(
    "--architecture",
    default="",
    metavar="CONFIG|NAME[@REVISION]",
    help="A new model of any architecture of transformers: a config.json, its folder, or a name on the hub.",
)
@click.option(
    "--tokenizer",
    metavar="FILE|OWNER/NAME[@REVISION]|bytes",
    help="A `tokenizers` JSON file: a path, or of the Hugging Face hub; bytes: none, text is raw bytes.  "
    "[default: the model's own with --from, else bytes]",
)
@click.option(
    "--data",
    default="",
    metavar="SOURCE|PATH",
    help="Text to train on: embedded, each node's own files, jsonl or parquet, or hub:OWNER/NAME; a path "
    "says which of these, and is counted for --epochs.  [default: the preset's]",
)
@click.option("--end-of-document", default="", metavar="TOKEN", help="Its token that ends documents.")
@click.option(
    "--admission",
    type=click.Choice(["open", "invite", "list"]),
    default="invite",
    show_default=True,
    help="Condition of being a member: none, an invite of yours, or a place on your list.",
)
@click.option("--open", "is_open", is_flag=True, help="The same as --admission open.")
@click.option(
    "--seat",
    "seats",
    multiple=True,
    metavar="PEER",
    help="Peer that has a seat from the start, beside this machine's node; may be repeated.",
)
@click.option(
    "--data-dir",
    type=FILE,
    envvar="P2PDILOCO_DATA_DIR",
    show_envvar=True,
    help="Folder of this machine's node, which has the first seat.  [default: a node's default]",
)
@click.option("--out", type=FILE, default=Path("run.toml"), show_default=True, help="File to write.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def new(
    name: str,
    guide: bool,
    preset: str,
    seed: int,
    expected_members: int,
    wish: TrainingWish,
    source: Path | None,
    architecture: str,
    tokenizer: str | None,
    data: str,
    end_of_document: str,
    admission: Literal["open", "invite", "list"],
    is_open: bool,
    seats: tuple[str, ...],
    data_dir: Path | None,
    out: Path,
    force: bool,
) -> None:
    """Write a commented run.toml for a run called NAME."""
    if out.exists() and not force:
        raise UserError(f"{out}: exists already", hint="--force overwrites it, --out FILE writes another")
    try_file(out, "--out")
    if guide:
        from p2pdiloco.cli.questions import ask_for_run

        given = {"seed": seed, "seats": seats, "data_dir": data_dir}
        click.get_current_context().invoke(new, **given, out=out, force=force, **ask_for_run(name, preset))
        return
    if not name:
        raise UserError("the run needs a name: p2pdiloco run new NAME", "or be asked for all: --guide")
    named = with_seats(for_run(preset, name, seed), map(_checked_peer, seats))
    manifest_from_table(msgspec.to_builtins(named), "the new run")  # the name, first
    wish.check(source is not None)
    manifest, path = with_data(for_run(preset, name, seed), data)
    if wish.epochs is not None:
        check_countable(manifest.data, path)
    group = replace(manifest.group, expected_members=expected_members)
    manifest = replace(manifest, group=group)
    from p2pdiloco.cli.given_model import opened, with_context, with_given_model, with_room

    source = opened(source, out, tokenizer is None)
    is_given, usual = source is not None, manifest.inner.tokens_per_step
    manifest = with_room(manifest, wish, is_given)
    manifest, parameters = with_given_model(source, architecture, manifest)
    manifest, _ = with_data(manifest, data)  # (a checkpoint brings its run's)
    own = manifest.model.get("context_tokens")
    manifest = with_context(manifest, wish, is_given, usual)
    manifest, content = _with_tokenizer(manifest, tokenizer, end_of_document, source, architecture)
    manifest = _with_settings(manifest, wish, is_given, content, path, own)
    seated = [_own_peer(data_dir), *seats]
    recovery = out.with_suffix(".recovery.key")
    section = AdmissionSection(mode="open" if is_open else admission, recovery=_peer_of(recovery))
    manifest = with_seats(replace(manifest, admission=section), seated)
    text = render_toml(manifest)
    manifest_from_table(tomllib.loads(text), "the new run")  # what is written is what every node accepts
    # What it names comes first: a run.toml is never without it.
    _save_what_it_names(out, parameters, content)
    _write(out, text, force)
    if missing := _missing_package(manifest):
        words = f"note: this run's data need {missing} on every node, and it is not installed here"
        say(f"{words}; {install_hint('vision')}")
    say(_next_words(manifest, out, recovery))


def _checked_peer(word: str) -> str:
    from p2pdiloco.identity import public_of

    if public_of(word) is None:
        raise UserError(f'--seat "{word}" is not the id of a peer', "a node prints its own when it starts")
    return word


def _next_words(manifest: Manifest, out: Path, recovery: Path) -> str:
    return (
        f"wrote {out}: {_size(manifest)}. Next, on a machine that others can reach:\n"
        f"  p2pdiloco bootstrap --run {out}\nand on the first node of the run:\n"
        f"  p2pdiloco node --genesis LINK-PRINTED-BY-BOOTSTRAP"
        f"{' --data PATH' if manifest.data.is_each_nodes_own else ''}{_list_words(manifest)}\n"
        f"seats at the start: {', '.join(manifest.admission.seats)}; the first one is this machine's node\n"
        f"keep {recovery} elsewhere: it takes the run back from a thief of owner.key"
        f"{OPEN_WORDS.format(manifest.weight.open_share) if manifest.admission.mode == 'open' else ''}"
    )


def _peer_of(path: Path) -> str:
    """Find the peer id of the key in this file, made if it is not there. Raises: StorageError."""
    from p2pdiloco.identity import Identity

    return Identity.load_or_create(path).peer_id


def _own_peer(data_dir: Path | None) -> str:
    """Find the peer id of this machine's node. Raises: ConfigError, StorageError."""
    return own_peer(node_folder(data_dir), parents=data_dir is None)


def _with_tokenizer(
    manifest: Manifest, wanted: str | None, end: str, source: Path | None, architecture: str
) -> tuple[Manifest, bytes | None]:
    if source is not None or wanted not in (None, BYTES):
        from p2pdiloco.cli.given_files import chosen_tokenizer

        return chosen_tokenizer(manifest, wanted, end, source)
    if not architecture:
        return for_bytes(manifest), None
    say("text is read as raw bytes: --tokenizer names another tokenizer")
    return manifest, None


def _with_settings(
    manifest: Manifest,
    wish: TrainingWish,
    is_given: bool,
    content: bytes | None,
    path: Path | None,
    own: object,
) -> Manifest:
    """Choose them, or change the preset's as wished; say which, and warn. `content`: the tokenizer's file;
    `path`: of data; `own`: the context that the model is made for."""
    from p2pdiloco.cli.given_model import (
        for_existing,
        length_of,
        settings_lines,
        settings_warnings,
        with_changes,
    )

    is_chosen, counted = wish.is_chosen(is_given), 0
    if wish.epochs or (path is not None and is_chosen and not wish.lengths()):
        counted = count_tokens(manifest, content, path)
    if is_chosen:
        length = length_of(wish, counted, path)
        manifest = for_existing(manifest, wish, length)
        for line in settings_lines(manifest, wish, length, own):
            say(line)
    else:
        manifest = with_outer(with_changes(manifest, wish, counted))
    for sentence in settings_warnings(manifest, wish) if is_given else []:
        say(f"warning: {sentence}")
    return manifest


def _save_what_it_names(out: Path, parameters: Arrays | None, content: bytes | None) -> None:
    if parameters is not None:
        from p2pdiloco.cli.given_model import save_beside

        say(f"version 0 is in {save_beside(out, parameters)}: keep it beside {out.name}")
    if content is not None:
        from p2pdiloco.cli.given_files import save_tokenizer

        say(f"the tokenizer is in {save_tokenizer(out, content)}: keep it beside {out.name}")


def _write(out: Path, text: str, force: bool) -> None:
    with storage_errors("write", out), out.open("w" if force else "x", encoding="utf-8") as file:
        file.write(text)
    click.echo(os.fsencode(out))  # (a name that need not be text)


def _missing_package(manifest: Manifest) -> str:
    """Name the package of the extra `vision` that the run needs and that is not here; empty: none."""
    if manifest.run.task != "image-classification":
        return ""
    package, module = ("scikit-learn", "sklearn") if manifest.data.source == "embedded" else ("Pillow", "PIL")
    return "" if importlib.util.find_spec(module) else package


def _list_words(manifest: Manifest) -> str:
    if manifest.admission.mode != "list":
        return ""
    return (
        "\nand put every node on the list, the first one, too; each prints its peer id when it starts:\n"
        f"  p2pdiloco admit {manifest.run.name} PEER"
    )


@run_group.command("check", epilog=example("run check"))
@click.argument("file", type=FILE)
def check(file: Path) -> None:
    """Check a run.toml and say what it describes."""
    manifest = load_manifest(file)
    ids = 0
    if manifest.data.tokenizer != BYTES:
        from p2pdiloco.daemon.run_files.shared_files import checked_tokenizer
        from p2pdiloco.tasks.tokens import FileTokenizer

        content = checked_tokenizer(file, manifest)
        data = manifest.data
        if content is not None:
            ids = FileTokenizer(content, data.end_of_document, data.begin_of_document).vocabulary
    if manifest.run.initial:
        from p2pdiloco.daemon.run_files.run import given_beside

        given_beside(file, manifest)
    inner, sync = manifest.inner, manifest.sync
    digest = hashlib.sha256(canonical_bytes(manifest)).hexdigest()
    click.echo(f'{file}: run "{manifest.run.name}", {_size(manifest)}')
    click.echo(
        f"inner steps: {inner.tokens_per_step} tokens each, schedule of {inner.schedule_tokens} of the run, "
        f"{inner.optimizer}, rate {inner.learning_rate:g}"
    )
    click.echo(
        f"fragments: {sync.fragments}, each every {sync.inner_steps} inner steps, quorum {sync.quorum}, "
        f"{manifest.codec.contribution} up, {manifest.codec.update} down"
    )
    click.echo(_data_words(manifest.data))
    click.echo(f"members: {MODES[manifest.admission.mode]}")
    click.echo(f"seats at the start: {', '.join(manifest.admission.seats) or 'none: nobody makes a version'}")
    click.echo(f"groups: of {manifest.group.size} members, {manifest.group.groups_at_start} at the start")
    click.echo(
        f"outer steps: about {expected_merges(manifest)} of each fragment until the schedule's end, rate "
        f"{manifest.outer.learning_rate:g}, momentum {manifest.outer.momentum:g} after "
        f"{manifest.outer.momentum_warmup_merges}, merged by {manifest.outer.merge}"
    )
    click.echo(f"when the schedule is over, learners {ENDS[manifest.end.learners]}")
    for line in _footprint_lines(manifest):
        click.echo(line)
    click.echo(f"manifest digest: {digest} (not the run's id, which depends on its owner, too)")
    for doubt in warnings_about(manifest, numel_of(manifest), ids):
        say(f"warning: {doubt}")


def _data_words(data: DataSection) -> str:
    what = f"hub, {data.dataset or 'each node names its own'}" if data.source == "hub" else data.source
    held = f'split "{data.heldout_split}"' if data.heldout_split else f"{data.heldout_percent} %"
    begin = f", documents begin with {data.begin_of_document}" if data.begin_of_document else ""
    own = "; every node says where its own lies: --data PATH" if data.is_each_nodes_own else ""
    return f"data: {what}, tokenizer {data.tokenizer}{begin}, held out {held}{own}"


def _size(manifest: Manifest) -> str:
    return f"{manifest.run.task}, {numel_of(manifest) / 1e6:.3g} M parameters"


def _footprint_lines(manifest: Manifest) -> list[str]:
    """Say how much memory and disk no node can do without, whatever it trains on."""
    from p2pdiloco.daemon.run_files.footprint import DAEMON_BYTES, LEARNER_BYTES, LOG_BYTES, footprint_of

    takes = footprint_of(manifest)
    daemon, learner = takes.daemon_bytes + takes.payload_bytes, takes.learner_bytes + takes.pass_bytes
    audits = takes.loss_audit_bytes
    beside = f" and, beside it, {size_text(audits)} for loss audits" if audits else ""
    once = (
        f"with {size_text(takes.pass_bytes)} for a pass"
        if takes.pass_bytes
        else "without a pass over samples"
    )
    return [
        f"memory of a node: at least {size_text(DAEMON_BYTES + daemon)} for daemon and network, of which "
        f"{size_text(daemon)} for this model",
        f"memory of its learner: at least {size_text(LEARNER_BYTES + learner + audits)}, of which "
        f"{size_text(learner)} on its device, or devices together, {once}{beside}",
        f"disk of a node: about {size_text(takes.disk_bytes)}, and up to {size_text(LOG_BYTES)} of logs",
    ]


# `p2pdiloco plan`: what a run asks of a link, and what the link could carry.

LATENCY_MS = 50.0
MEMBERS = 8
STEP_TIMES_S = (0.1, 0.3, 1.0, 3.0, 10.0)


@command("plan", click.Command)
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
@AS_JSON
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
    measured, manifest = None, own
    if join:
        from p2pdiloco.cli.live_result import measured_link

        addresses, run = joined_through([join], run)
        # Any of them: it is one link that is measured.
        measured, manifest = measured_link(addresses[0], run, own)
    assert manifest is not None
    # Imported here so that --help does not pay for torch.
    from p2pdiloco.daemon.budgets import LinkCapacity
    from p2pdiloco.daemon.network.link import advise, demand

    members = members or manifest.group.expected_members or MEMBERS
    known = measured.link if measured else LinkCapacity(given_up, given_up, LATENCY_MS / 1e3)
    link = LinkCapacity(
        given_up or known.upload_bits_per_s,
        given_down or known.download_bits_per_s,
        known.latency_s if latency_ms is None else latency_ms / 1e3,
    )
    rows = [
        (demand(manifest, link, members, step_s), advise(manifest, link, members, step_s))
        for step_s in steps_s or STEP_TIMES_S
    ]
    if as_json:
        shared = {"link": link, "measured": measured}
        click.echo(json.dumps(msgspec.to_builtins([{**shared, "demand": d, "advice": a} for d, a in rows])))
        return
    if measured is not None:
        click.echo(_measured_row(measured))
    _table(manifest, members, rows)


def _measured_row(measured: MeasuredLink) -> str:
    return f"measured: {measured.words()} ({measured.moved_bytes / 2**20:.1f} MiB in {measured.took_s:.1f} s)"


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
        say(f"warning: advice for {', '.join(f'{s:g} s' for s in steps_s)}: {sentence}")


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
