"""Node-local settings: what one operator decides about one process. Never part of a run.

Precedence, per key: flag > environment variable P2PDILOCO_<FLAG> > table [node] or [bootstrap] of the
--config file > default. `cli.options` builds the flags; the defaults are the fields' own. Two kinds of values
have parsers here: hours of a week in which a node may train ("22-7", "sat-sun 0-24"), and the limits of a
machine's owner (`OwnLimits`), which may be changed while the node runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from p2pdiloco.config.manifest import keys_of
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


class Part(Enum):
    """Parts of a command's help, in their order."""

    RUN = "The run"
    NODE = "This node"
    NETWORK = "Network"
    LIMITS = "Limits"
    RESULTS = "Results"
    EXPERT = "For experts"
    """Part that `--help` leaves out, and `--help-all` shows."""


class Flag(Frozen):
    """Flag of a setting, on its type: what help, reference and `limits` say of it."""

    part: Part
    help: str
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    """Spellings of hivemind's for the same flag."""


RUN, NODE, NETWORK, LIMITS, RESULTS, EXPERT = (partial(Flag, part) for part in Part)


def flags(settings: type[Struct]) -> dict[str, Flag]:
    """Find the flags of a struct's fields, by field; some fields have none."""
    hints = get_type_hints(settings, include_extras=True)
    found = {name: getattr(kind, "__metadata__", ()) for name, kind in hints.items()}
    return {name: each for name, about in found.items() for each in about if isinstance(each, Flag)}


Join = Annotated[
    tuple[str, ...],
    RUN(
        "Address of a bootstrap or of any live node, with /p2p/ID, /dnsaddr/NAME, or a run link; may be "
        "repeated.",
        "MULTIADDR",
        ("--initial_peers", "--initial-peers"),
    ),
]
Listen = Annotated[
    tuple[str, ...],
    NETWORK(
        "Where to listen; may be repeated. By default any port, and the same one at the next start. 0.0.0.0 "
        "stands for IPv6, too: name an address to leave it out.",
        "MULTIADDR",
        ("--host_maddrs",),
    ),
]
Announce = Annotated[
    tuple[str, ...],
    NETWORK(
        "Tell others these addresses instead of those found out (for a forwarded port).",
        "MULTIADDR",
        ("--announce_maddrs",),
    ),
]
Upload = Annotated[
    Text,
    LIMITS(
        "Use at most so many bits per second, such as 20Mbit, to send; default: whatever the link has.",
        "RATE",
    ),
]
Download = Annotated[Text, LIMITS("The same to receive.", "RATE")]
Log = Annotated[LogStyle, NODE("tui: live view; auto: tui on a terminal, else text.")]
Web = Annotated[
    str,
    NODE(
        "Serve a page that shows the run, for this machine's browser (docs/topics/web.md); port 0: any that "
        "is free.",
        "[HOST:]PORT",
    ),
]


class OwnLimits(Frozen, kw_only=True, forbid_unknown_fields=True):
    """Limits as they are written."""

    max_upload: Upload = ""
    max_download: Download = ""
    max_transfer: Annotated[
        Text,
        LIMITS(
            "Bytes both ways in a calendar month, such as 200GB/month; then the node leaves until the month "
            "turns.",
            "SIZE/month",
        ),
    ] = ""
    hours: Annotated[
        Text,
        LIMITS(
            'Train in these only, by this machine\'s clock, such as 22-7 or "mon-fri 18-8, sat-sun 0-24".',
            "HOURS",
        ),
    ] = ""
    when_idle: Annotated[
        Text, LIMITS("Train when nobody has used the machine for so long: 10min.", "TIME")
    ] = ""
    not_on_battery: Annotated[bool, LIMITS("Train on mains power only.")] = False
    max_temperature: Annotated[
        float,
        Meta(ge=0, le=150),
        EXPERT("Rest while GPU or CPU are hotter, in degrees Celsius."),
    ] = 0.0
    max_power: Annotated[
        float, Meta(ge=0, le=1e5), EXPERT("Rest while the GPUs together draw more, in watts.")
    ] = 0.0
    min_step_s: Annotated[
        float,
        Meta(ge=0, le=60),
        EXPERT("An inner step takes at least so long, on average: spares the machine."),
    ] = 0.0


class NodeSettings(OwnLimits, kw_only=True, forbid_unknown_fields=True):
    """`p2pdiloco node`: a volunteer that trains."""

    join: Join = ()
    invite: str = ""
    """Invite of a run's owner: says which run it is, whom to join through, and lets this node in."""
    run: Annotated[
        str,
        RUN(
            "Id of the run, 8 digits of it or more, or its name; default: the run of before, else that of "
            "the peers to join, else the only one.",
            "ID|NAME",
        ),
    ] = ""
    yes: Annotated[bool, RUN("Join without a question, where somebody at a terminal would be asked.")] = False
    genesis: Annotated[bool, RUN("Start the run from version 0 if no peer holds any of it.")] = False
    run_file: Annotated[
        Path | None, RUN("run.toml of a new run, which this node then owns (with --genesis).")
    ] = None
    name: Annotated[str, Meta(max_length=63), NODE("What people see beside the peer id.")] = ""
    data_dir: Annotated[
        Path,
        NODE("Folder of identity, checkpoints and events.jsonl; one running process at a time."),
    ] = Path("~/.p2pdiloco/node")
    data: Annotated[
        Path | None,
        NODE("File or folder of the data, for runs that bring none, or in place of a hub's."),
    ] = None
    device: Annotated[str, NODE("auto, cpu, mps, or cuda, rocm, xpu, perhaps with :N.")] = "auto"
    log: Log = "auto"
    web: Web = ""
    lan: Annotated[
        bool,
        NETWORK(
            "Announce this node in the local network; without --join: find a run there (extra lan).",
        ),
    ] = False
    listen: Listen = ANY_ADDRESS
    announce: Announce = ()
    max_disk: Annotated[
        str,
        LIMITS(
            "Join no run that takes more of the data folder than this, such as 20GiB.",
            "SIZE",
        ),
    ] = ""
    max_memory: Annotated[
        str,
        EXPERT(
            "Hold at most so many bytes of peers' payloads, such as 2GiB, beside the model itself; default: "
            "as many as come.",
            "SIZE",
        ),
    ] = ""
    result_dir: Annotated[
        Path | None,
        RESULTS(
            "Write checkpoints of the global parameters, which export, generate and others read, into this "
            "folder.",
        ),
    ] = None
    result_every: Annotated[
        str,
        EXPERT(
            "Between two results, such as 30min, or 500merges of all fragments together.",
            "EVERY",
        ),
    ] = "1h"
    result_keep: Annotated[int, Meta(ge=1, le=10_000), EXPERT("Keep so many results, the newest.")] = 3
    keep_history: Annotated[
        bool,
        RESULTS(
            "Keep who contributed what, for `p2pdiloco credits` (docs/topics/credits.md).",
        ),
    ] = False
    nproc: Annotated[str, EXPERT("Processes of the learner, a device each; auto: one for every GPU.")] = (
        "auto"
    )
    shard: Annotated[
        Shard,
        EXPERT(
            "Share model, gradients, moments out among these processes (FSDP); auto: if a device is too "
            "small.",
        ),
    ] = "auto"
    precision: Annotated[
        Precision,
        EXPERT("Of forward and backward passes; auto: bf16 where the device is fast at it."),
    ] = "auto"
    compile: Annotated[
        Compile,
        EXPERT(
            "Of passes; auto: on a GPU, after some steps, if the run is long enough; always: at once.",
        ),
    ] = "auto"
    threads: Annotated[
        int, Meta(ge=0, le=1024), EXPERT("CPU threads of the learner; 0: chosen by itself.")
    ] = 0
    micro_batch_tokens: Annotated[
        int,
        Meta(ge=0, le=1 << 24),
        EXPERT(
            "Tokens per forward pass, to begin with, halved while memory does not suffice; 0: chosen by "
            "itself.",
        ),
    ] = 0
    learner_nice: Annotated[
        int,
        Meta(ge=0, le=19),
        EXPERT("0 to 19: how far training steps back for all else on the machine."),
    ] = 10
    daemon_nice: Annotated[
        str,
        EXPERT(
            "How far merging and transfers step back, for training too, 0 to 19; auto: 12 beside a GPU. "
            "Above 0 the node may be slow to answer where other programs keep all cores busy.",
        ),
    ] = "auto"
    learner_socket: Annotated[
        Path | None,
        EXPERT("Start no learner: a program connects there (p2pdiloco.Session)."),
    ] = None
    learner_wait_s: Annotated[
        float,
        Meta(ge=0, le=1e6),
        EXPERT("Leave when no such program was there for so long; 0: never."),
    ] = 0.0
    reachability: Annotated[
        Reachability, EXPERT("Whether others can dial this node; auto: it asks them.")
    ] = "auto"
    relay: Annotated[
        bool,
        EXPERT(
            "Use relays to be reached behind a NAT, and relay for others; bounded. Default: relay.",
        ),
    ] = True
    port_map: Annotated[
        bool,
        EXPERT("Ask the router to forward the port, behind one (UPnP, NAT-PMP). Default: port-map."),
    ] = True
    checkpoint_every_s: Annotated[Seconds, EXPERT("Seconds between checkpoints.")] = 120.0
    eval_every_s: Annotated[Seconds, EXPERT("Seconds between evaluations on held-out data.")] = 60.0
    evaluate: Annotated[
        Literal["turns", "each"],
        EXPERT("turns: one member at a time evaluates for all; each: this node always."),
    ] = "turns"


class BootstrapSettings(Frozen, kw_only=True, forbid_unknown_fields=True):
    """`p2pdiloco bootstrap`: a well-known address. Trains nothing."""

    run: Annotated[
        tuple[Path, ...],
        RUN(
            "run.toml to sign and serve, or the id of a run of --join to serve (by default all of theirs); "
            "repeatable.",
            "FILE|ID",
        ),
    ] = ()
    join: Join = ()
    data_dir: Annotated[Path, NODE("Folder of the identity and the signed manifests.")] = Path(
        "~/.p2pdiloco/bootstrap"
    )
    log: Log = "auto"
    web: Web = ""
    web_public: Annotated[bool, NODE("Let anybody see the public part of the page, without a token.")] = False
    lan: Annotated[
        bool,
        NETWORK("Announce it and its runs in the local network, to everybody there (extra lan)."),
    ] = False
    listen: Listen = ANY_ADDRESS
    announce: Announce = ()
    relay: Annotated[bool, NETWORK("Relay for peers behind NATs; bounded. Default: relay.")] = True
    port_map: Annotated[
        bool,
        NETWORK("Ask the router to forward the port, behind one (UPnP, NAT-PMP). Default: port-map."),
    ] = True
    max_upload: Upload = ""
    max_download: Download = ""

    def run_ids(self) -> list[str]:
        """List what in `run` is an id, or its beginning, and no file."""
        return [path.name for path in self.run if RUN_ID.fullmatch(path.name) and not path.exists()]

    def run_files(self) -> list[Path]:
        """List what in `run` is a file, or should be."""
        ids = set(self.run_ids())
        return [path for path in self.run if path.name not in ids]


class WatchSettings(Frozen, kw_only=True):
    """Settings of commands that look at a run."""

    join: Join = ()
    data_dir: Annotated[
        Path | None,
        NODE(
            "Without --join: ask the node or bootstrap that runs here with it.  [default: the usual]",
        ),
    ] = None
    run: Annotated[str, RUN("Id of the run, 8 digits of it or more, or its name.", "ID|NAME")] = ""
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


def check_node(settings: NodeSettings, was_here: bool = False) -> NodeSettings:
    """Check what no single flag can: addresses, and rules between flags. Expands "~".

    `was_here`: the node of this folder joined a run before, or met a member of one.

    Raises:
        ConfigError: one clear sentence naming the flag.
    """
    _check_addresses(settings)
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
    if not (settings.join or settings.run_file or was_here):
        raise ConfigError(
            "there is no peer to join: give a run link, an invite, or the address of a peer",
            hint="p2pdiloco node LINK, or --join ADDRESS; to start a new run alone: p2pdiloco node --genesis "
            "--run-file run.toml",
        )
    return replace(settings, data_dir=expanded(settings.data_dir))


def check_bootstrap(settings: BootstrapSettings) -> BootstrapSettings:
    """Check a bootstrap's settings as `check_node` does a node's."""
    _check_addresses(settings)
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


def rates(settings: OwnLimits | BootstrapSettings) -> tuple[float, float]:
    """Upload and download that are allowed, in bits per second; 0 is no limit.

    Raises:
        ConfigError: names the flag.
    """
    return parse_rate(settings.max_upload, "--max-upload"), parse_rate(
        settings.max_download, "--max-download"
    )


def _check_addresses(settings: NodeSettings | BootstrapSettings) -> None:
    for address in settings.join:
        check_join_address(address)
    for flag, addresses in (("--listen", settings.listen), ("--announce", settings.announce)):
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


Target = Literal["tensorboard", "wandb", "trackio"]
"""Charts to which a log can be carried."""


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
    upload, download = rates(limits)
    return Bounds(
        upload_bits_per_s=upload,
        download_bits_per_s=download,
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
                f'there is no limit "{given[:40]}"',
                "limits: " + ", ".join(flag_of(name)[2:] for name in FIELDS),
            )
        values[name] = _value(name, text.strip())
    try:
        found = msgspec.convert({**msgspec.structs.asdict(limits), **values}, OwnLimits, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).partition("`$.")[2].rstrip("`")
        raise ConfigError(f"{flag_of(name)} must be {keys_of(OwnLimits)[name].words}") from error
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
    return text


def value_text(value: object) -> str:
    """Word a limit's value as `changed` takes it; empty: no limit."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:g}" if value else ""
    return str(value)
