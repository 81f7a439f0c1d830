"""Address of the web page: [HOST:]PORT, by default of the loopback."""

from __future__ import annotations

import ipaddress
import re

from msgspec import Struct

from p2pdiloco.errors import ConfigError

LOOPBACK = "127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252})")
EXAMPLES = "for example 8080, [::1]:8080 or 192.168.1.5:8080"


class WebAddress(Struct, frozen=True):
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
