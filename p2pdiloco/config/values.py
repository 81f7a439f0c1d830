"""Values as people write them: TOML files read strictly, amounts, paths, addresses.

Every complaint is one sentence that names the file and the key, or the flag.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import msgspec
from msgspec import Struct

from p2pdiloco.config.manifest import Key, keys_of, shown, tables_of
from p2pdiloco.errors import ConfigError
from p2pdiloco.util import Frozen, Values

MAX_FILE_BYTES = 128 * 1024
"""Room for a manifest of the largest size (`config.manifest`) with its comments."""
S = TypeVar("S", bound=Struct)


def is_whole(value: object) -> TypeGuard[int]:
    """Tell whether a value of TOML or JSON is a whole number. `true` is none, though Python's bool is an
    int."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether a value of TOML or JSON is a number."""
    return is_whole(value) or isinstance(value, float)


def read_toml(path: Path) -> Values:
    """The file's tables. Raises: ConfigError (as `read_settings` and `parse_toml`)."""
    return parse_toml(path, read_settings(path))


def read_settings(path: Path) -> bytes:
    """The file's bytes. Raises: ConfigError (missing, unreadable, or over 128 KiB)."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES // 1024} KiB, so it is no settings file")
    return data


def parse_toml(path: Path, data: bytes) -> Values:
    """The tables of a file with these bytes. Raises: ConfigError (not UTF-8, or not TOML: names the line)."""
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # some editors begin with a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, data, error) from error


def _syntax_error(path: Path, data: bytes, error: tomllib.TOMLDecodeError) -> ConfigError:
    lines = data.decode("utf-8-sig").split("\n")
    match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error))
    if match:
        sentence = f"{path}: line {match[2]} is not valid TOML: {match[1]} (column {match[3]})"
        return ConfigError(sentence, intended_line(lines[int(match[2]) - 1]))
    reason = str(error).removesuffix(" (at end of document)")
    last = len(data.splitlines())
    sentence = f"{path}: line {last} is not valid TOML: {reason} (the file ends here)"
    return ConfigError(sentence, intended_line(lines[last - 1]) if last else "")


def convert(raw: Mapping[str, Any], struct: type[S], label: str) -> S:
    """A table of tables as a struct, with nothing unknown, missing, mistyped or out of range.

    Raises:
        ConfigError: the first complaint; `label` (a file name) opens the sentence.
    """
    keys = keys_of(struct)
    _refuse_unknown(raw, keys, tables_of(struct), label)
    for key in keys.values():
        given = raw.get(key.section, {}) if key.section else raw
        if key.required and key.name not in given:
            raise ConfigError(f"{label}: {key.path} is missing", hint=f"it must be {key.words}")
    try:
        return msgspec.convert(raw, struct, strict=True, dec_hook=_from_text)
    except msgspec.ValidationError as error:
        raise ConfigError(_value_sentence(raw, keys, label, str(error))) from None


def _from_text(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    # msgspec adds where, and makes it a ValidationError.
    raise TypeError(f"expected a string, got {type(value).__name__}")


def _refuse_unknown(
    raw: Mapping[str, Any], keys: Mapping[str, Key], tables: Mapping[str, type[Struct]], label: str
) -> None:
    for name, value in raw.items():
        if name in tables:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{label}: {name} must be a table, it is {shown(value)}")
            for inner in value:
                if f"{name}.{inner}" not in keys:
                    hint = suggestion(f"{name}.{inner}", keys)
                    raise ConfigError(f'{label}: there is no key "{name}.{inner}"', hint)
        elif name not in keys:
            what = "table" if isinstance(value, Mapping) else "key"
            hint = suggestion(name, tables if what == "table" else keys)
            raise ConfigError(f'{label}: there is no {what} "{name}"', hint)


def suggestion(given: str, known: Collection[str]) -> str:
    """A hint that names the closest known word, or "" when none is close."""
    last = given.rpartition(".")[2]
    elsewhere = [path for path in known if path.rpartition(".")[2] == last]
    close = elsewhere or difflib.get_close_matches(given, known, n=1)
    return f'did you mean "{close[0]}"?' if close else ""


def _value_sentence(raw: Mapping[str, Any], keys: Mapping[str, Key], label: str, complaint: str) -> str:
    """Turn msgspec's "Expected `int` >= 1 - at `$.sync.quorum`" into a sentence of ours."""
    match = re.fullmatch(r".* - at `\$\.([A-Za-z0-9_.]+)(?:\[.*)?`", complaint)
    if match is None or match[1] not in keys:
        return f"{label}: {complaint}"
    key = keys[match[1]]
    value = raw[key.section][key.name] if key.section else raw[key.name]
    return f"{label}: {key.path} must be {key.words}, it is {shown(value)}"


# A line of TOML as it was meant: quotes left out, or typed as a word processor likes.

_LINE = re.compile(r"\s*([\w.-]+)\s*=\s*(.*?)\s*(?:#.*)?")
_QUOTES = "\"'`“”„‟«»‘’‚"
_BOOLEANS = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}


def intended_line(line: str) -> str:
    """Say how a line that is no TOML is to be written; empty if that cannot be told."""
    found = _LINE.fullmatch(line)
    if found is None or _is_fine(line):
        return ""
    key, value = found.groups()
    if value.lower() in _BOOLEANS:
        return f"true and false are written small, without quotes: {key} = {_BOOLEANS[value.lower()]}"
    if value.startswith("["):
        items = [item.strip() for item in value.strip("[]").split(",") if item.strip()]
        written = f"{key} = [{', '.join(map(_quoted, items))}]"
    else:
        written = f"{key} = {_quoted(value)}"
    return f"text stands in quotes: {written}" if _is_fine(written) else ""


def _quoted(value: str) -> str:
    """Write a value as it was meant: a number or a whole text as it is, else in straight quotes."""
    return value if _is_fine(f"x = {value}") else f'"{value.strip(_QUOTES)}"'


def _is_fine(line: str) -> bool:
    try:
        tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False
    return True


# Amounts with a unit: "20Mbit" a second, "2GiB".

_RATES = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SIZES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
LEAST_RATE = 100e3
"""Bits a second: below it a node could not even hear its peers in time."""


def parse_rate(text: str, flag: str) -> float:
    """Bits per second; 0 for the empty text, which is no limit.

    Raises:
        ConfigError: not a rate, or below 100 kbit; names the flag.
    """
    rate = _parse(re.sub(r"(/s|ps)$", "", text.strip(), flags=re.IGNORECASE), _RATES)
    if rate is None:
        raise ConfigError(
            f'{flag} must be bits per second, it is "{text}"', "for example 20Mbit, 500kbit or 1Gbit"
        )
    if text.strip() and rate < LEAST_RATE:
        raise ConfigError(f'{flag} must be at least 100kbit, it is "{text}"')
    return rate


def parse_size(text: str, flag: str) -> float:
    """Bytes; 0 for the empty text, which is no limit.

    Raises:
        ConfigError: not a size; names the flag.
    """
    size = _parse(text.strip(), _SIZES)
    if size is None or (text.strip() and size < 1):
        raise ConfigError(f'{flag} must be bytes, it is "{text}"', "for example 2GiB, 500MB or 512MiB")
    return size


def parse_every(text: str, flag: str) -> tuple[float, int]:
    """(seconds, merges) of "30min", "12h", "90s" or "500merges"; one of them is 0.

    Raises:
        ConfigError: none of these; names the flag.
    """
    found = re.fullmatch(r"(\d{1,9})\s*(s|min|h|merges?)", text.strip())
    if found is None or not int(found[1]):
        raise ConfigError(
            f'{flag} must be a time or a number of merges, it is "{text}"', "30min or 500merges"
        )
    number, unit = int(found[1]), found[2]
    if unit.startswith("merge"):
        return 0.0, number
    return number * {"s": 1.0, "min": 60.0, "h": 3600.0}[unit], 0


def parse_life(text: str, flag: str) -> int:
    """Seconds of "30min", "12h", "7d" or "2w"; 0 for "never".

    Raises:
        ConfigError: none of these; names the flag.
    """
    if text.strip() == "never":
        return 0
    found = re.fullmatch(r"(\d{1,6})\s*(s|min|h|d|w)", text.strip())
    if found is None or not int(found[1]):
        raise ConfigError(f'{flag} must be a time, it is "{text}"', "for example 12h, 7d, 4w, or never")
    return int(found[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}[found[2]]


def rate_text(bits_per_s: float) -> str:
    """Rate as text without its unit: "19.6 M", before "bit/s"."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if bits_per_s >= factor:
            return f"{bits_per_s / factor:.3g} {unit}"
    return f"{bits_per_s:.0f} "


def size_text(number_bytes: float) -> str:
    """Size as text: "1.25 GiB", "312 MiB"."""
    for factor, unit in ((2.0**50, "PiB"), (2.0**40, "TiB"), (2.0**30, "GiB")):
        if number_bytes >= factor:
            return f"{number_bytes / factor:.3g} {unit}"
    return (
        f"{number_bytes / 2**20:.3g} MiB"
        if number_bytes < 2**20 * 999.5
        else f"{number_bytes / 2**20:.0f} MiB"
    )


def _parse(text: str, units: dict[str, float]) -> float | None:
    if not text:
        return 0.0
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text)
    factor = units.get(found[2].lower()) if found else None
    return float(found[1]) * factor if found and factor is not None else None


# Paths: "~" is the home folder, which a user id without a name does not have.


def expanded(path: Path, flag: str = "--data-dir") -> Path:
    """Put the home folder in the place of "~".

    Raises:
        ConfigError: nobody says where it is: no HOME, and no name for the user id, as in many containers.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        whose = path.parts[0].removeprefix("~")
        nobody = f"HOME is not set, and the user id {os.getuid()} has no name"
        lacking = f'there is no user "{whose}"' if whose else nobody
        raise ConfigError(
            f"{flag} {path}: {lacking}, so there is no home folder",
            f"name a folder with {flag}, or set HOME",
        ) from error


def those_known(paths: Iterable[Path]) -> list[Path]:
    """Expand the default folders of several programs; without a home there are none."""
    try:
        return [path.expanduser() for path in paths]
    except RuntimeError:
        return []


def has_home() -> bool:
    """Tell whether "~" is a folder that somebody knows."""
    return bool(those_known([Path("~")]))


# Addresses (multiaddrs).

_PEER = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,64}")
_PEER_HINT = "copy a whole line that a bootstrap or node printed: /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo..."


Addresses = tuple[str, ...]
"""Ways to peers that a person gave: multiaddrs, names of the DNS, links."""
DNSADDR = "/dnsaddr/"


def check_join_address(address: str) -> None:
    """Check a --join address: one of a peer, or /dnsaddr/NAME, which lists several, perhaps with /p2p/ID.

    Raises:
        ConfigError: says which part is wrong.
    """
    if not address.startswith(DNSADDR):
        check_peer_address(address)
        return
    name, found, peer = address.removeprefix(DNSADDR).partition("/p2p/")
    if not re.fullmatch(r"[^/\s]+", name):
        raise ConfigError(f'--join must look like /dnsaddr/NAME or /dnsaddr/NAME/p2p/ID, it is "{address}"')
    if found and not _PEER.fullmatch(peer):
        raise ConfigError(f'--join has a mistyped peer id "{peer}" in "{address}"', _PEER_HINT)


def check_peer_address(address: str) -> None:
    """Check the address of a peer: a multiaddr that ends in /p2p/ID.

    Raises:
        ConfigError: says which part is wrong.
    """
    check_multiaddr(address, "--join")
    head, found, peer = address.rpartition("/p2p/")
    if not found or not head:
        raise ConfigError(f'--join needs the peer\'s id at the end (/p2p/ID), it is "{address}"', _PEER_HINT)
    if not _PEER.fullmatch(peer):
        raise ConfigError(f'--join has a mistyped peer id "{peer}" in "{address}"', _PEER_HINT)


def is_peer_address(address: str) -> bool:
    """Tell whether this is the address of a peer."""
    try:
        check_peer_address(address)
    except ConfigError:
        return False
    return True


def check_multiaddr(address: str, flag: str) -> None:
    """Check a multiaddr's form: a known host protocol, a valid host, tcp or udp, a port.

    Raises:
        ConfigError: says which part is wrong.
    """
    hint = "" if flag == "--listen" else _PEER_HINT
    parts = address.split("/")
    if len(parts) < 5 or parts[0] or parts[1] not in {"ip4", "ip6", "dns", "dns4", "dns6"}:
        raise ConfigError(f'{flag} must look like /ip4/HOST/tcp/PORT, it is "{address}"', hint)
    kind, host, transport, port = parts[1:5]
    if kind in {"ip4", "ip6"}:
        try:
            right = ipaddress.ip_address(host).version == int(kind[2])
        except ValueError:
            right = False
        if not right:
            raise ConfigError(f'{flag} has no valid {kind} address "{host}" in "{address}"', hint)
    if transport not in {"tcp", "udp"}:
        raise ConfigError(f'{flag} must use tcp or udp, not "{transport}", in "{address}"', hint)
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f'{flag} has no valid port "{port}" in "{address}"', hint)


def peer_in(address: str) -> str:
    """Return the peer id at the end of a checked address."""
    return address.rpartition("/p2p/")[2]


def is_public(address: str) -> bool:
    """Tell whether a multiaddr (checked) is one that the whole Internet can dial, or a name."""
    kind, host = address.split("/")[1:3]
    return not kind.startswith("ip") or ipaddress.ip_address(host).is_global


def is_loopback(address: str) -> bool:
    """Tell whether a multiaddr (checked) is one that only this machine can dial."""
    kind, host = address.split("/")[1:3]
    return kind.startswith("ip") and ipaddress.ip_address(host).is_loopback


# Address of the web page: [HOST:]PORT, by default of the loopback.

LOOPBACK = "127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252})")
EXAMPLES = "for example 8080, [::1]:8080 or 192.168.1.5:8080"


class WebAddress(Frozen):
    """Host and port; port 0 is any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True: only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


def parse_web(text: str, flag: str = "--web") -> WebAddress | None:
    """Read [HOST:]PORT; None for the empty text, which is no page.

    Raises:
        ConfigError: it is no such thing; names the flag.
    """
    text = text.strip()
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = _ipv6(host[1:-1])
    elif (colon and not host) or ":" in host or (host and not _NAME.fullmatch(host)):
        host = ""
    elif not colon:
        host = LOOPBACK
    if not host or not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
        raise ConfigError(f'{flag} must be [HOST:]PORT, it is "{text}"', EXAMPLES)
    return WebAddress(host, int(port))


def _ipv6(text: str) -> str:
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        return ""
