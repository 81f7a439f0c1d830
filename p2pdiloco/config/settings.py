"""Node-local settings: what one operator decides about one process. Never part of a run.

Precedence, per key: flag > environment variable P2PDILOCO_<FLAG> > table [node] or [bootstrap] of the
--config file > default. `cli.options` builds the flags; the defaults are the fields' own. Two kinds of values
have parsers here: hours of a week in which a node may train ("22-7", "sat-sun 0-24"), and the limits of a
machine's owner (`OwnLimits`), which may be changed while the node runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from p2pdiloco.config.values import (
    check_join_address,
    check_multiaddr,
    convert,
    expanded,
    parse_every,
    parse_rate,
    parse_size,
    parse_web,
    read_toml,
    suggestion,
)
from p2pdiloco.errors import ConfigError
from p2pdiloco.util import Frozen, Values

ENVIRONMENT_PREFIX = "P2PDILOCO_"
LogStyle = Literal["auto", "text", "json", "tui"]
Shard = Literal["auto", "never", "always"]
Precision = Literal["auto", "fp32"]
Compile = Literal["auto", "never", "always"]
Reachability = Literal["auto", "public", "private"]
LEAST_MEMORY = 2**20
LINK = "p2pdiloco:1..."
RUN_ID = re.compile(r"[0-9a-f]{8,64}")
"""A run id, or as much of it as may stand for it."""
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
ANY_ADDRESS = ("/ip4/0.0.0.0/tcp/0",)
_OF_A_SERVICE = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)
"""Endings of the variables that Kubernetes makes of a service's name."""


Text = Annotated[str, Meta(max_length=200)]


class OwnLimits(Frozen, kw_only=True, forbid_unknown_fields=True):
    """Limits as they are written."""

    max_upload: Text = ""
    """Bits per second that this node may use, such as "20Mbit"; empty: all that the link carries."""
    max_download: Text = ""
    min_step_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Least seconds of an inner step, on average: for the rest the machine is free, and cool."""
    max_transfer: Text = ""
    """Bytes both ways in a calendar month, such as "200GB/month"; when they are used up, the node leaves
    until the month turns. Empty: no bound."""
    hours: Text = ""
    """Hours in which it trains, by this machine's clock, such as "22-7" or "mon-fri 18-8, sat-sun 0-24";
    empty: at all times."""
    when_idle: Text = ""
    """Time for which nobody has used the machine, such as "10min", before it trains; empty: no matter who
    does."""
    not_on_battery: bool = False
    """True: it trains on mains power only."""
    max_temperature: Annotated[float, Meta(ge=0, le=150)] = 0.0
    """Degrees Celsius of GPU and CPU above which it rests; 0: no bound."""
    max_power: Annotated[float, Meta(ge=0, le=1e5)] = 0.0
    """Watts of the GPUs together above which it rests; 0: no bound."""


class NodeSettings(OwnLimits, kw_only=True, forbid_unknown_fields=True):
    """`p2pdiloco node`: a volunteer that trains."""

    join: tuple[str, ...] = ()
    """Multiaddrs (with /p2p/ID) of bootstrap peers or of any live node."""
    invite: str = ""
    """Invite of a run's owner: says which run it is, whom to join through, and lets this node in."""
    run: str = ""
    """Run id, its beginning, or a name; empty: the run of before, else that of the peers in `join`, else the
    only one."""
    data_dir: Path = Path("~/.p2pdiloco/node")
    """Identity, checkpoints, event log; one running process at a time."""
    device: str = "auto"
    """auto, cpu, cuda[:N], rocm[:N], xpu[:N] or mps."""
    nproc: str = "auto"
    """Processes of the learner, each with a device of its own; auto: one for every GPU, one on a CPU."""
    shard: Shard = "auto"
    """Sharing of parameters, gradients and moments among these processes (FSDP); auto: if one device cannot
    hold them."""
    precision: Precision = "auto"
    """Arithmetic of forward and backward passes; auto: bf16 where the device is fast at it."""
    compile: Compile = "auto"
    """Compiling of passes by torch.compile; auto: on a GPU, after some steps, if enough of the run is left;
    always: at the first step; never."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads of the learner; 0: it chooses by itself."""
    listen: tuple[str, ...] = ANY_ADDRESS
    announce: tuple[str, ...] = ()
    """Addresses to tell others instead of those found out (behind a forwarded port)."""
    reachability: Reachability = "auto"
    """Reachability of this node from outside; auto: it asks peers."""
    lan: bool = False
    """Announcing this node in the local network, to everybody there, and finding a run there if nobody says
    whom to join."""
    relay: bool = True
    """Permission to use relays, bounded: to be reached where nobody can dial us, to reach others, to relay
    for them."""
    max_memory: str = ""
    """Bytes of payloads that the daemon holds at most, such as "2GiB"; empty: as many as it needs. The model
    itself is apart."""
    max_disk: str = ""
    """Bytes that a run may take of the data folder, or it is not joined; empty: whatever fits."""
    yes: bool = False
    """Joining without a question, where a person at a terminal would be asked."""
    genesis: bool = False
    """Permission to start the run from version 0 when no peer holds any of it."""
    run_file: Path | None = None
    """A run.toml; with `genesis` only: this node is the owner of a new run."""
    name: Annotated[str, Meta(max_length=63)] = ""
    """Name that people see beside the peer id."""
    data: Path | None = None
    """Path of this node's data, for all sources but "embedded"; in place of the hub's, for "hub"."""
    log: LogStyle = "auto"
    web: str = ""
    """Address of the web page, [HOST:]PORT, of the loopback where no host is given; empty: there is none
    (docs/topics/web.md)."""
    micro_batch_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Tokens of one pass, to begin with; 0: chosen by itself. Halved for as long as memory does not
    suffice."""
    learner_nice: Annotated[int, Meta(ge=0, le=19)] = 10
    """Niceness of the training learner: how far it steps back for everything else on the machine; 0: not at
    all."""
    daemon_nice: str = "auto"
    """Niceness of encoding, merging and transfers once this node trains, for training's sake too: 0 to 19;
    auto: 12 beside a learner that waits for its GPU, 0 beside one on the CPU. Above 0, where other programs
    keep all cores busy, the node may be slow to answer and to leave."""
    learner_socket: Path | None = None
    """Socket to which a program connects and trains (`p2pdiloco.Session`); the node starts no learner
    then."""
    learner_wait_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Seconds without such a program after which the node leaves; 0: never."""
    checkpoint_every_s: Seconds = 120.0
    eval_every_s: Seconds = 60.0
    evaluate: Literal["turns", "each"] = "turns"
    """Evaluators of the global parameters: one member at a time for all, or each for itself."""
    result_dir: Path | None = None
    """Folder for results, the global parameters in files, which export, generate and others read."""
    result_every: str = "1h"
    """Interval between two results: a time ("30min") or a number of merges of all fragments together
    ("500merges")."""
    result_keep: Annotated[int, Meta(ge=1, le=10_000)] = 3
    """Number of results that are kept, the newest."""
    keep_history: bool = False
    """Keeping every version's header for the whole run, so that credits can be told
    (docs/topics/credits.md)."""


class BootstrapSettings(Frozen, kw_only=True, forbid_unknown_fields=True):
    """`p2pdiloco bootstrap`: a well-known address. Trains nothing."""

    run: tuple[Path, ...] = ()
    """run.toml files to sign and serve, or ids of runs to fetch from `join` and serve."""
    join: tuple[str, ...] = ()
    """Peers to make one swarm with; where no file is in `run`, their runs are served here, too."""
    data_dir: Path = Path("~/.p2pdiloco/bootstrap")
    listen: tuple[str, ...] = ANY_ADDRESS
    announce: tuple[str, ...] = ()
    lan: bool = False
    """Announcing this bootstrap and its runs in the local network, to everybody there."""
    relay: bool = True
    """Relay for peers that nobody can dial, within bounds."""
    max_upload: str = ""
    max_download: str = ""
    log: LogStyle = "auto"
    web: str = ""
    """Address of the web page, as a node's."""
    web_public: bool = False
    """Permission for anybody to see the public part of the page."""

    def run_ids(self) -> list[str]:
        """List what in `run` is an id, or its beginning, and no file."""
        return [path.name for path in self.run if RUN_ID.fullmatch(path.name) and not path.exists()]

    def run_files(self) -> list[Path]:
        """List what in `run` is a file, or should be."""
        ids = set(self.run_ids())
        return [path for path in self.run if path.name not in ids]


class WatchSettings(Frozen, kw_only=True):
    """Settings of commands that look at a run."""

    join: tuple[str, ...] = ()
    data_dir: Path | None = None
    """Folder of a node or bootstrap that runs here, asked if no peer is named; None: the usual ones."""
    run: str = ""
    timeout_s: float = 20.0


class StatusSettings(WatchSettings, kw_only=True):
    """`p2pdiloco status`."""

    json: bool = False


class DemoSettings(Frozen, kw_only=True):
    """`p2pdiloco demo`: a bootstrap and `nodes` nodes as processes on loopback."""

    nodes: int = 3
    seconds: float = 120.0
    """Seconds of training; the summary comes after."""
    kill: bool = True
    """Kill a syncer on the way."""
    preset: str = "tiny"
    report: Path | None = None
    """Machine-readable summary (JSON)."""
    plot: Path | None = None
    """PNG of the loss with the kill marked."""
    keep: Path | None = None
    """Folder for everything that the processes write; None: a temporary one, removed at the end."""


class SettingsFile(Frozen, forbid_unknown_fields=True):
    """Schema of a --config file: one file may serve both roles."""

    node: NodeSettings = NodeSettings()
    bootstrap: BootstrapSettings = BootstrapSettings()


def load_settings_table(path: Path, table: str) -> Values:
    """The keys that the file sets in [node] or [bootstrap]; paths are relative to the file.

    Raises:
        ConfigError: not readable, not TOML, an unknown key, a wrong type or range; names file and key.
    """
    raw = read_toml(path)
    checked = getattr(convert(raw, SettingsFile, str(path)), table)
    # Only what the file says: everything else must stay open for the layers below it.
    values = {key: getattr(checked, key) for key in raw.get(table, {})}
    return {key: _rebased(value, path.parent) for key, value in values.items()}


def _rebased(value: object, folder: Path) -> object:
    if isinstance(value, Path):
        return folder / expanded(value, "--config")
    if isinstance(value, tuple):
        return tuple(_rebased(item, folder) for item in value)
    return value


def check_environment(environment: Mapping[str, str], known: frozenset[str]) -> None:
    """Refuse P2PDILOCO_ variables that no command reads: a mistyped one would be silently ignored.

    Those that Kubernetes gives every container of a namespace where a service is called p2pdiloco-something
    are nobody's settings.

    Raises:
        ConfigError: names the first unknown variable.
    """
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            if _OF_A_SERVICE.search(name):
                continue
            hint = suggestion(name, known) or "unset it; p2pdiloco COMMAND --help lists the variables"
            raise ConfigError(f"the environment variable {name} is not known", hint)


def check_node(settings: NodeSettings) -> NodeSettings:
    """Check what no single flag can: addresses, and rules between flags. Expands "~".

    Raises:
        ConfigError: one clear sentence naming the flag.
    """
    _check_addresses(settings.join, settings.listen, settings.announce)
    parse_web(settings.web)
    memory = parse_size(settings.max_memory, "--max-memory")
    if 0 < memory < LEAST_MEMORY:
        raise ConfigError(
            f'--max-memory must be at least 1MiB, it is "{settings.max_memory}"',
            "a million parameters need about five; what the run needs is checked when it is known",
        )
    parse_size(settings.max_disk, "--max-disk")
    bounds_of(limits_of(settings))
    parse_every(settings.result_every, "--result-every")
    if not re.fullmatch(r"auto|cpu|mps|(cuda|rocm|xpu)(:\d{1,3})?", settings.device):
        raise ConfigError(
            f'--device must be auto, cpu, mps, cuda, rocm or xpu, perhaps with :N, it is "{settings.device}"'
        )
    if not re.fullmatch(r"auto|[1-9]\d?", settings.nproc):
        raise ConfigError(f'--nproc must be auto or a number from 1 to 99, it is "{settings.nproc}"')
    if not re.fullmatch(r"auto|\d|1\d", settings.daemon_nice):
        raise ConfigError(f'--daemon-nice must be auto or from 0 to 19, it is "{settings.daemon_nice}"')
    if settings.run_file is not None and not settings.genesis:
        raise ConfigError(
            "--run-file starts a new run, so it needs --genesis",
            hint="to take part in an existing run, give --join and perhaps --run NAME",
        )
    met_before = any((expanded(settings.data_dir) / name).exists() for name in ("peers.txt", "join.txt"))
    if not settings.join and not settings.genesis and not met_before:
        raise ConfigError(
            "there is no peer to join: give a run link, an invite, or the address of a peer",
            hint="p2pdiloco node LINK, or --join ADDRESS; to start a new run alone: p2pdiloco node --genesis "
            "--run-file run.toml",
        )
    if not settings.join and settings.run_file is None and not met_before:
        raise ConfigError(
            "--genesis without --join needs --run-file: there is no peer to get the manifest from"
        )
    return replace(settings, data_dir=expanded(settings.data_dir))


def check_bootstrap(settings: BootstrapSettings) -> BootstrapSettings:
    """Check a bootstrap's settings as `check_node` does a node's."""
    _check_addresses(settings.join, settings.listen, settings.announce)
    rates(settings)
    for path in settings.run_files():
        # Names are not sure: anybody may list another run by the same one.
        if settings.join and path.name == str(path) and not path.suffix and not path.exists():
            raise ConfigError(
                f"--run {path} is no file here, and a run of the peers to join is named by its id",
                f"the id is in the line that the first bootstrap printed; or give its link: --join {LINK}",
            )
    parse_web(settings.web)
    if settings.web_public and not settings.web:
        raise ConfigError("--web-public says who may see the page, and there is none", "add --web PORT")
    return replace(settings, data_dir=expanded(settings.data_dir))


def rates(settings: NodeSettings | BootstrapSettings) -> tuple[float, float]:
    """Upload and download that are allowed, in bits per second; 0 is no limit.

    Raises:
        ConfigError: names the flag.
    """
    return parse_rate(settings.max_upload, "--max-upload"), parse_rate(
        settings.max_download, "--max-download"
    )


def _check_addresses(join: tuple[str, ...], listen: tuple[str, ...], announce: tuple[str, ...]) -> None:
    for address in join:
        check_join_address(address)
    for flag, addresses in (("--listen", listen), ("--announce", announce)):
        for address in addresses:
            check_multiaddr(address, flag)
            if "/p2p/" in address:
                raise ConfigError(f'{flag} must not name a peer (/p2p/...), it is "{address}"')


def known_variable(flag: str) -> str:
    """The environment variable of a flag: --data-dir reads P2PDILOCO_DATA_DIR."""
    return ENVIRONMENT_PREFIX + flag.lstrip("-").replace("-", "_").upper()


# Commands that watch a run or a machine.


class TopSettings(WatchSettings, kw_only=True):
    """`p2pdiloco top`."""

    every_s: float = 10.0
    """Seconds between two lines, where there is no terminal."""


class DoctorSettings(WatchSettings, kw_only=True):
    """Settings of `p2pdiloco doctor`."""

    json: bool = False
    timeout_s: float = 240.0


class LogToSettings(Frozen, kw_only=True):
    """`p2pdiloco log-to`."""

    data_dir: Path = Path("~/.p2pdiloco/node")
    follow: bool = False
    out: Path | None = None
    """Folder of the charts' files; None: in the data folder, by the charts' name."""
    project: str = "p2pdiloco"
    name: str = ""
    """Name of the run in the charts; empty: the data folder's."""
    again: bool = False


class BoardSettings(WatchSettings, kw_only=True):
    """`p2pdiloco board`."""

    out: Path = Path("board")
    """Folder of the files."""
    every: str = ""
    """Time between two versions of the files, such as 30s; empty: they are written once."""


# Hours of a week.

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60
WEEK_MIN = 7 * DAY_MIN
MAX_SPANS = 16
_SPAN = re.compile(
    r"(?:([a-z]{3})(?:\s*-\s*([a-z]{3}))?\s+)?(\d{1,2})(?::(\d\d))?\s*-\s*(\d{1,2})(?::(\d\d))?"
)


class Span(Frozen):
    """Span of time on each of some days; one that ends the next morning belongs to the day of its
    beginning."""

    days: tuple[int, ...]
    """Days, 0 is Monday."""
    begin_min: int
    """Minutes since midnight."""
    length_min: int

    def holds(self, week_min: int) -> bool:
        """Tell whether that minute of the week is in it."""
        return any((week_min - d * DAY_MIN - self.begin_min) % WEEK_MIN < self.length_min for d in self.days)


def parse_hours(text: str, flag: str = "--hours") -> tuple[Span, ...]:
    """Parse the hours; none are no bound.

    Raises:
        ConfigError: they cannot be made out; names the flag.
    """
    if not text.strip():
        return ()
    parts = text.strip().lower().split(",")
    spans = [_span(part.strip()) for part in parts[:MAX_SPANS]]
    found = tuple(span for span in spans if span is not None)
    if len(found) != len(parts):
        raise ConfigError(
            f'{flag} must be hours of the day, it is "{text}"',
            'for example 22-7, or "mon-fri 18:30-8, sat-sun 0-24": by the clock of this machine',
        )
    return found


def _span(text: str) -> Span | None:
    found = _SPAN.fullmatch(text)
    if found is None:
        return None
    first, last = found[1], found[2] or found[1]
    if first is not None and not {first, last} <= set(DAYS):
        return None
    begins = DAYS.index(first or "mon")
    length = (DAYS.index(last or "sun") - begins) % 7 + 1
    begin, end = (int(found[n]) * 60 + int(found[n + 1] or 0) for n in (3, 5))
    minutes_are_right = int(found[4] or 0) < 60 and int(found[6] or 0) < 60
    if not minutes_are_right or begin >= DAY_MIN or end > DAY_MIN or begin == end:
        return None
    days = tuple((begins + n) % 7 for n in range(length))
    return Span(days, begin, (end - begin) % DAY_MIN or DAY_MIN)


def next_begin_min(spans: tuple[Span, ...], week_min: int) -> int:
    """Find in how many minutes the next span begins, of one or more."""
    return min((day * DAY_MIN + s.begin_min - week_min) % WEEK_MIN for s in spans for day in s.days)


# Limits of a machine's owner.

YES, NO = ("yes", "true", "on", "1"), ("no", "false", "off", "0", "")
NONE = "none"
"""Value that takes a limit away, as the empty one does."""
_MONTHLY = re.compile(r"\s*/\s*month\s*$", re.IGNORECASE)


FIELDS = tuple(field.name for field in msgspec.structs.fields(OwnLimits))
DEFAULTS: Values = {name: getattr(OwnLimits(), name) for name in FIELDS}


class Bounds(Frozen, kw_only=True):
    """Limits as numbers; 0, nothing or False is no bound."""

    upload_bits_per_s: float
    download_bits_per_s: float
    transfer_bytes: int
    min_step_s: float
    hours: tuple[Span, ...]
    idle_s: float
    not_on_battery: bool
    max_temperature_c: float
    max_power_w: float


def bounds_of(limits: OwnLimits) -> Bounds:
    """Parse limits. Raises: ConfigError (names the flag)."""
    return Bounds(
        upload_bits_per_s=parse_rate(limits.max_upload, "--max-upload"),
        download_bits_per_s=parse_rate(limits.max_download, "--max-download"),
        transfer_bytes=_transfer_bytes(limits.max_transfer),
        min_step_s=limits.min_step_s,
        hours=parse_hours(limits.hours),
        idle_s=parse_every(limits.when_idle, "--when-idle")[0] if _is_time(limits.when_idle) else 0.0,
        not_on_battery=limits.not_on_battery,
        max_temperature_c=limits.max_temperature,
        max_power_w=limits.max_power,
    )


def _is_time(text: str) -> bool:
    """Tell whether there is a time. Raises: ConfigError (something else is there)."""
    if not text.strip():
        return False
    if not re.fullmatch(r"[1-9]\d{0,8}\s*(s|min|h)", text.strip()):
        raise ConfigError(f'--when-idle must be a time, it is "{text}"', "for example 10min")
    return True


def _transfer_bytes(text: str) -> int:
    monthly, example = _MONTHLY.sub("", text), "for example 200GB/month"
    if "/" in monthly:
        raise ConfigError(f'--max-transfer is for a calendar month, it is "{text}"', example)
    try:
        return int(parse_size(monthly, "--max-transfer"))
    except ConfigError as error:
        raise ConfigError(str(error), example) from error


def limits_of(settings: Any) -> OwnLimits:
    """Take the limits out of a node's settings."""
    return OwnLimits(**{name: getattr(settings, name) for name in FIELDS})


def flag_of(name: str) -> str:
    """Name the flag of a field."""
    return "--" + name.replace("_", "-")


def changed(limits: OwnLimits, changes: dict[str, str]) -> OwnLimits:
    """Change limits by name, "max-upload" or "max_upload"; "none" and the empty value take one away.

    Raises: ConfigError (an unknown name, a value that cannot be).
    """
    values: Values = {}
    for given, text in changes.items():
        name = _field(given)
        if name not in FIELDS:
            raise ConfigError(
                f'there is no limit "{given[:40]}"', "limits: " + ", ".join(map(_plain, FIELDS))
            )
        values[name] = _value(name, text.strip())
    try:
        found = msgspec.convert({**msgspec.structs.asdict(limits), **values}, OwnLimits)
    except msgspec.ValidationError as error:
        name = str(error).partition("`$.")[2].rstrip("`")
        raise ConfigError(f"{flag_of(name)}: {str(error).partition(' - at')[0]}") from error
    bounds_of(found)
    return found


def changed_names(changes: dict[str, str]) -> list[str]:
    """List the fields that changes name, which have been looked at."""
    return sorted({_field(name) for name in changes})


def _field(given: str) -> str:
    return given.lstrip("-").replace("-", "_")


def _value(name: str, text: str) -> Any:
    if text.lower() == NONE or not text:
        return DEFAULTS[name]
    if isinstance(DEFAULTS[name], bool):
        if text.lower() not in (*YES, *NO):
            raise ConfigError(f'{flag_of(name)} must be yes or no, it is "{text[:40]}"')
        return text.lower() in YES
    if isinstance(DEFAULTS[name], float):
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f'{flag_of(name)} must be a number, it is "{text[:40]}"') from None
    return text


def _plain(name: str) -> str:
    return name.replace("_", "-")


def value_text(value: object) -> str:
    """Word a limit's value as `changed` takes it; empty: no limit."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:g}" if value else ""
    return str(value)
