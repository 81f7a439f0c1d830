"""Shared by commands: flags built from the settings structs, examples, ways to join, findings of checks.

There is one default per key and one environment variable per flag. click resolves flag > environment >
`default_map` (filled from --config) > default; here is only what click lacks: strict files, a refusal of
unknown variables, and lists that split on commas and spaces. A `Diagnosis` is one finding, with what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
import msgspec
from msgspec import Struct

from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.config.manifest import keys_of
from p2pdiloco.config.settings import (
    Flag,
    NodeSettings,
    Part,
    flag_of,
    flags,
    known_variable,
    load_settings_table,
)
from p2pdiloco.config.values import Addresses, expanded
from p2pdiloco.errors import UserError
from p2pdiloco.util import Frozen, Values

if TYPE_CHECKING:
    from p2pdiloco.daemon.run_files.ownership import Ownership

S = TypeVar("S", bound=Struct)
Command = Callable[..., Any]


class SplitText(click.types.StringParamType):
    """Text of which an environment variable may hold several, split on spaces and commas."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        """The variable's items."""
        return [word for word in re.split(r"[\s,]+", rv) if word]


class SpacedLists(click.Command):
    """A command whose address flags also take hivemind's form: `--initial_peers A B`. Its texts are told to
    others, so they are UTF-8."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """click's own parsing, after `--flag A B` has become `--flag A --flag B`.

        Raises:
            click.BadParameter: a text is not UTF-8; names the flag.
        """
        flags = {o for p in self.params if p.type is SPLIT_TEXT for o in p.opts}
        spread: list[str] = []
        current = ""
        for word in args:
            if current and word.startswith("/") and spread[-1] != current:
                spread.append(current)
            elif not word.startswith("/"):
                current = word if word in flags else ""
            spread.append(word)
        rest = super().parse_args(ctx, spread)
        for parameter in self.params:
            if not _is_text(ctx.params.get(parameter.name or "")):
                raise click.BadParameter("must be UTF-8 text", ctx, parameter)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """click's own; many options come in parts, in the order of these."""
        parts = [part.value for part in Part] if has_parts(ctx) else []
        records = [
            (parameter.part.value if isinstance(parameter, FlagOption) and parts else "Options", record)
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx))
        ]
        for part in [*parts, "Options"]:
            if found := [record for place, record in records if place == part]:
                with formatter.section(part):
                    formatter.write_dl(found)

    def invoke(self, ctx: click.Context) -> Any:
        """click's own; where the log is for machines, wherever that is said, an error is a line of it."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            if ctx.params.get("log") != "json":
                raise
            from p2pdiloco.daemon.display.logs import complaint_line

            say(complaint_line(error))
            return error.exit_status


class WholeSentences(click.Group):
    """A group that lists its commands in parts, each with the first sentence of its help."""

    def __init__(self, *args: Any, parts: Mapping[str, Iterable[click.Command]] | None = None, **more: Any):
        super().__init__(*args, **more)
        self._parts = parts

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """click's own, in whole sentences."""
        for part, commands in (self._parts or {"Commands": self.commands.values()}).items():
            with formatter.section(part):
                formatter.write_dl(
                    [(each.name or "", each.get_short_help_str(limit=1000)) for each in commands]
                )


class FlagOption(click.Option):
    """Option of a setting that has a flag; those for experts are hidden, and hivemind's spellings."""

    def __init__(self, names: Sequence[str], *, flag: Flag, **more: Any) -> None:
        super().__init__(
            [*names, *flag.aliases],
            help=flag.help,
            metavar=flag.metavar or None,
            **more,
        )
        self.part, self._aliases = flag.part, flag.aliases

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """click's own, by the first name."""
        record = super().get_help_record(ctx)
        if record is None or (self.part is Part.EXPERT and not ctx.meta.get(ALL)):
            return None
        names, text = record
        for alias in self._aliases:
            names = names.replace(f", {alias}", "")
        return names, text


def has_parts(ctx: click.Context) -> bool:
    """Tell whether the command has so many options that they are shown in parts."""
    return len(ctx.command.params) > MANY


class Number(click.FloatRange):
    """A number in a range. (NaN is in every range of click's: it is neither below nor above.)"""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Raises: click.BadParameter."""
        found = float(super().convert(value, param, ctx))
        if math.isnan(found):
            self.fail(f"{value} is not a number in the range {self._describe_range()}.", param, ctx)
        return found


SPLIT_TEXT = SplitText()
MANY = 12
"""Limit of options that are shown in one list."""
ALL = "all"
"""Mark of a context whose help shows the options for experts."""
FILE = click.Path(path_type=Path)
"""Type of a path. Several paths in a variable are separated as in PATH."""
PATIENCE_S = Number(min=0.1, max=3600)
"""Type of how long a command waits for somebody to answer."""


def setting(
    settings: type[Struct], spelled: str, show_envvar: bool = True, field: str = "", **options: Any
) -> Command:
    """A click option for one field of a settings struct; the field's default is the flag's."""
    name = field or spelled.lstrip("-").replace("-", "_")
    default = next(f.default for f in msgspec.structs.fields(settings) if f.name == name)
    if options.get("multiple"):
        options.setdefault("type", SPLIT_TEXT)
    return click.option(
        spelled,
        name,
        default=default,
        envvar=known_variable(spelled.partition("/")[0]),
        show_envvar=show_envvar,
        show_default=default not in ("", None, (), False),
        **options,
    )


def flags_of(settings: type[Struct], says_variables: bool = True) -> Callable[[Command], Command]:
    """Options of all fields of a settings struct whose types carry a flag. `says_variables`: their help does;
    that of --config says it for all."""

    def make(command: Command) -> Command:
        kinds = get_type_hints(settings)
        for name, flag in reversed(flags(settings).items()):
            negative = "/--no-" + flag_of(name)[2:] if getattr(settings(), name) is True else ""
            option = partial(setting, settings, flag_of(name) + negative, field=name)
            values = _values_of(kinds[name])
            command = option(says_variables, cls=FlagOption, flag=flag, **values)(command)
        return command

    return make


def _values_of(kind: Any) -> Values:
    """What click is to know of the values of a field's type."""
    of = get_args(kind)
    if get_origin(kind) is Literal:
        return {"type": click.Choice(of)}
    path = {"type": FILE} if Path in (kind, *of) else {}
    if get_origin(kind) is tuple:
        return {"multiple": True, **path}
    if kind is bool:
        return {"is_flag": True}
    return {"type": kind} if kind in (int, float) else path


def help_all(command: Command) -> Command:
    """--help-all: the options for experts, too."""

    def show(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
        if wanted:
            context.meta.update({ALL: True})
            click.echo(context.get_help())
            context.exit()

    return click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show the options for experts, too.",
    )(command)


def config_option(table: str) -> Command:
    """--config FILE: fills click's default_map from one table before the other flags are resolved."""

    def load(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
        if path is not None:
            context.default_map = load_settings_table(path, table)

    return click.option(
        "--config",
        type=FILE,
        envvar=known_variable("--config"),
        show_envvar=True,
        is_eager=True,
        expose_value=False,
        callback=load,
        help=f"TOML file with a table [{table}]: its keys are the flags, dashes as underscores. Each is a "
        "variable, too: --data-dir is P2PDILOCO_DATA_DIR.",
    )


def build(settings: type[S], values: Values) -> S:
    """The struct of the resolved flags, its ranges checked.

    Raises:
        click.BadParameter: a value out of range; names the flag.
    """
    try:
        return msgspec.convert(values, settings, strict=True, dec_hook=lambda _kind, value: value)
    except msgspec.ValidationError as error:
        name = str(error).partition(" - at `$.")[2].rstrip("`")
        context = click.get_current_context()
        parameter = next(p for p in context.command.params if p.name == name)
        raise click.BadParameter(f"must be {keys_of(settings)[name].words}", context, parameter) from error


def _is_text(value: object) -> bool:
    """Tell whether a flag's text is one that others can be told: bytes that are not UTF-8 are kept by Python
    as what no encoder takes. Paths may be anything."""
    texts = value if isinstance(value, tuple) else (value,)
    try:
        for text in texts:
            str(text if isinstance(text, str) else "").encode()
    except UnicodeEncodeError:
        return False
    return True


def known_variables(group: click.Group) -> frozenset[str]:
    """Every variable that some command reads (one shell may serve several commands)."""
    found: set[str] = set()
    for command in group.commands.values():
        if isinstance(command, click.Group):
            found |= known_variables(command)
        found |= {option.envvar for option in command.params if isinstance(option.envvar, str)}
    return frozenset(found)


# Examples: a line that can be typed, at the end of a `--help` whose text has none.

LINK = "p2pdiloco:1s3cc..."
EXAMPLES = {
    "run new": "run new shakespeare --preset small --admission invite",
    "run check": "run check run.toml",
    "run link": "run link shakespeare --qr-file shakespeare.svg",
    "run amend": "run amend shakespeare --pause --message 'back on monday'",
    "plan": "plan run.toml --upload 20Mbit",
    "bootstrap": "bootstrap --run run.toml --listen /ip4/0.0.0.0/tcp/31337",
    "node": f"node {LINK} --name anna --max-upload 20Mbit",
    "join": f"join {LINK}",
    "status": f"status --join {LINK}",
    "demo": "demo --nodes 3 --seconds 60",
    "chaos": "chaos --nodes 5 --minutes 10 --out chaos",
    "simulate": "simulate --seeds 100",
    "invite": "invite shakespeare --uses 5 --expires 7d --name anna",
    "ban": "ban shakespeare 12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q",
    "unban": "unban shakespeare 12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q",
    "revoke": "revoke shakespeare anna",
    "admit": "admit shakespeare 12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q",
    "dismiss": "dismiss shakespeare 12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q",
    "seat": "seat shakespeare 12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q",
    "vouch": "vouch shakespeare",
    "members": "members shakespeare",
    "can-join": f"can-join {LINK}",
    "export": f"export --join {LINK} --out my-model",
    "generate": f"generate --join {LINK} --prompt 'To be'",
    "eval": f"eval --join {LINK}",
    "checkpoint": f"checkpoint --join {LINK} --out theta.safetensors",
}
"""Commands by what is typed after `p2pdiloco`."""
COMPLETION = (
    '\b\nWords are completed by TAB, in bash, after\n  eval "$(_P2PDILOCO_COMPLETE=bash_source p2pdiloco)"'
)


def example(path: str) -> str:
    """Word the end of a command's help."""
    return f"\b\nExample:\n  p2pdiloco {EXAMPLES[path]}"


def say(words: str) -> None:
    """Say something to the person, on stderr: stdout is for data."""
    click.echo(words, err=True)


# What several commands have.


def command(
    path: str, kind: type[click.Command] = SpacedLists, **more: Any
) -> Callable[[Command], click.Command]:
    """Make a function the command that is typed so after `p2pdiloco`, its example at the end of its help.
    `more`: as click has it."""
    return click.command(path.split()[-1], cls=kind, epilog=example(path), **more)


def data_dir_option(words: str) -> Callable[[Command], Command]:
    """--data-dir of a command, with what its help says."""
    return click.option("--data-dir", type=FILE, help=words)


def node_folder(data_dir: Path | None) -> Path:
    """Find the folder of this machine's node: that one, or the usual one."""
    return expanded(data_dir or NodeSettings().data_dir)


def join_option(words: str, metavar: str = "MULTIADDR") -> Callable[[Command], Command]:
    """--join of a command that asks somebody, with what its help says."""
    return click.option("--join", multiple=True, type=SPLIT_TEXT, metavar=metavar, help=words)


def patience_option(default_s: float, most_s: float, words: str) -> Callable[[Command], Command]:
    """--timeout-s of a command that asks somebody."""
    patience = Number(min=0.1, max=most_s)
    return click.option("--timeout-s", type=patience, default=default_s, show_default=True, help=words)


AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


# Ways into a swarm: `--join` is an address, a DNS name, a run link or an invite.


def joined_through(join: Sequence[str], run: str = "") -> tuple[Addresses, str]:
    """Read `--join` and `--run`: the peers to join through, names looked up, and the run that is meant.

    Raises:
        ConfigError: an address or a word is malformed, or a word is to another run than `run`.
        UserError: nothing is found behind names.
    """
    from p2pdiloco.daemon.run_files.known_runs import way_of  # --help needs none of it

    way = way_of(join, run)
    return peers_behind(way.join), way.run


class RunPlace(Frozen):
    """Run of which a person's key is here, and the way to its members."""

    run: str
    """Name of the run, its id, or the beginning of that."""
    join: Addresses
    data_dir: Path | None
    """Folder with the key; None: the usual ones."""

    def owned(self) -> Ownership:
        """Find the key. Raises: UserError."""
        from p2pdiloco.daemon.run_files.ownership import Ownership

        return Ownership.find(self.run, self.data_dir)


# Findings: each good, worth a warning, bad, or not to be had, with what to do.


class Level(Enum):
    """Levels of a finding."""

    GOOD = "good"
    SKIPPED = "skipped"
    """Level of what could not be looked at; the words say why."""
    WARNING = "warning"
    BAD = "bad"


class Diagnosis(Frozen):
    """Finding on one thing."""

    level: Level
    check: str
    words: str
    todo: str = ""
    """Sentence on what to do; empty: nothing."""


EXIT_STATUSES = {Level.GOOD: 0, Level.SKIPPED: 0, Level.WARNING: 1, Level.BAD: 2}


good, skipped, warning, bad = (partial(Diagnosis, level) for level in Level)


def exit_status(findings: Iterable[Diagnosis]) -> int:
    """Return 0 if nothing is wrong, 1 with warnings, 2 if something is bad."""
    return max((EXIT_STATUSES[finding.level] for finding in findings), default=0)
