"""Node-local settings: what one operator decides about one process. Never part of a run.

Precedence, per key: flag > environment variable P2PDILOCO_<FLAG> > table [node] or [bootstrap] of the
--config file > default. `cli.options` builds the flags; the defaults are the fields' own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.config.addresses import check_join_address, check_multiaddr
from p2pdiloco.config.folders import expanded
from p2pdiloco.config.owner.own_limits import bounds_of, limits_of
from p2pdiloco.config.strict import convert, read_toml, suggestion
from p2pdiloco.config.units import parse_every, parse_rate, parse_size
from p2pdiloco.config.web_address import parse_web
from p2pdiloco.errors import ConfigError

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


class NodeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    max_upload: str = ""
    """Bits per second that this node may use, such as "20Mbit"; empty: all that the link carries."""
    max_download: str = ""
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
    min_step_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Least seconds of an inner step, on average: for the rest the machine is free, and cool."""
    max_transfer: str = ""
    """Bytes both ways in a calendar month, such as "200GB/month"; when they are used up, the node leaves
    until the month turns. Empty: no bound."""
    hours: str = ""
    """Hours in which it trains, by this machine's clock, such as "22-7" or "mon-fri 18-8, sat-sun 0-24";
    empty: at all times."""
    when_idle: str = ""
    """Time for which nobody has used the machine, such as "10min", before it trains; empty: no matter who
    does."""
    not_on_battery: bool = False
    """True: it trains on mains power only."""
    max_temperature: Annotated[float, Meta(ge=0, le=150)] = 0.0
    """Degrees Celsius of GPU and CPU above which it rests; 0: no bound."""
    max_power: Annotated[float, Meta(ge=0, le=1e5)] = 0.0
    """Watts of the GPUs together above which it rests; 0: no bound."""
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


class BootstrapSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class StatusSettings(Struct, frozen=True, kw_only=True):
    """`p2pdiloco status`."""

    join: tuple[str, ...] = ()
    data_dir: Path | None = None
    """Folder of a node or bootstrap that runs here, asked if no peer is named; None: the usual ones."""
    run: str = ""
    json: bool = False
    timeout_s: float = 20.0


class DemoSettings(Struct, frozen=True, kw_only=True):
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


class SettingsFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of a --config file: one file may serve both roles."""

    node: NodeSettings = NodeSettings()
    bootstrap: BootstrapSettings = BootstrapSettings()


def load_settings_table(path: Path, table: str) -> dict[str, Any]:
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
    return msgspec.structs.replace(settings, data_dir=expanded(settings.data_dir))


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
    return msgspec.structs.replace(settings, data_dir=expanded(settings.data_dir))


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
