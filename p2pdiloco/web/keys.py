"""Keys of the page: the owner's token, and the cookie that stands for it in a browser.

The token is 32 random bytes in `<data_dir>/web.token`, which nobody but this user can read. It is kept over
restarts: scripts read it there. A browser gets it once, in the printed address, and has a cookie from then
on, which is another word: who finds it in a browser's files has no token for scripts.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path

from p2pdiloco.adapters.data_dir import Files, storage_error

TOKEN_NAME = "web.token"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


def token_file(data_dir: Path) -> Path:
    """Name the file of the token."""
    return data_dir / TOKEN_NAME


def load_token(data_dir: Path) -> str:
    """Load the token, or make one; nobody else can read its file from then on. Raises: StorageError."""
    path = token_file(data_dir)
    try:
        known = path.read_bytes()[:100].decode("ascii", "replace").strip() if path.exists() else ""
        is_private = not known or path.stat().st_mode & 0o077 == 0
    except OSError as error:
        raise storage_error(error, "read", path) from error
    if _TOKEN.fullmatch(known) and is_private:
        return known
    token = secrets.token_urlsafe(32)  # one that others could read is a secret no more
    Files().save(path, [token.encode() + b"\n"], durable=False, private=True)
    return token


class OwnerKeys:
    """Keys by which an owner's requests are known."""

    def __init__(self, token: str, port: int) -> None:
        """`port`: a browser sends its cookies to all ports of a host, so that each has a name of its own."""
        self._token = token.encode()
        self.cookie_name = f"p2pdiloco-{port}"
        self._cookie = hmac.new(self._token, b"p2pdiloco web cookie", hashlib.sha256).hexdigest()

    def is_token(self, word: str) -> bool:
        """Tell whether it is the token, in a time that says nothing of how much of it is right."""
        return hmac.compare_digest(word.encode("utf-8", "replace"), self._token)

    def is_cookie(self, word: str) -> bool:
        """Tell the same of the cookie."""
        return hmac.compare_digest(word.encode("utf-8", "replace"), self._cookie.encode())

    @property
    def set_cookie(self) -> str:
        """Value of the Set-Cookie header: scripts cannot read it, and other sites' pages do not send it."""
        return f"{self.cookie_name}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"
