"""Tokenizers: raw bytes, or a `tokenizers` JSON file whose digest the manifest states.

Such a file is data: it is parsed by the `tokenizers` library, and nothing in it is executed. It may come from
a peer (the daemon asks its members), so size and digest are checked before it is parsed. The library works by
what a stranger's file says, so it does that in a process with limits (`tasks.tokenizer_process`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from p2pdiloco.config.manifest import BYTE_VALUES, BYTES, DataSection
from p2pdiloco.config.values import size_text
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.documents import INSTALL
from p2pdiloco.tasks.tokenizer_process import THREADS, WORDS_BYTES, memory_bytes
from p2pdiloco.util import Values

MAX_TOKENIZER_BYTES = 64 << 20
TOKENIZER_FILE = "tokenizer.json"
"""Name of the file in a model's folder."""
PATIENCE_S = 60.0
"""Time that any job of a tokenizer may take: the largest file takes some seconds."""
LEAST_BYTES_PER_S = 10_000.0
"""Least rate at which a text is encoded; usual are millions."""
TOKENS_PER_BYTE, TOKENS_PER_TEXT = 4, 64
"""Most tokens of a text for each of its bytes, and beside these: bytes as tokens are one, and three where
letters are taken apart first (NFKD of Korean)."""
TEXT_BYTES_PER_TOKEN = 1024
"""Most bytes of text for a token, beside `WORDS_BYTES`."""
WORDS_OF_REGEX = "a regular expression in the tokenizer file may be to blame: ask the run's owner"
WORDS_OF_MEMORY = "rules in the tokenizer file may multiply text: ask the run's owner"
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")

Tokens = NDArray[Any]
"""Token ids, one-dimensional: uint8, uint16 or uint32, the smallest that holds the vocabulary."""


class Tokenizer(Protocol):
    """Converter of text to token ids and back."""

    vocabulary: int
    """Upper bound of the ids, which are below it."""
    end: int
    """Id of the token that is put behind every document."""
    begin: int | None
    """Id of the token that is put in front of every document and prompt; None: there is none."""

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Ids of every document (UTF-8), without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; what is no text is replaced."""


class ByteTokenizer:
    """A tokenizer that makes every byte a token; documents end with a newline."""

    vocabulary = BYTE_VALUES
    end = ord("\n")
    begin: int | None = None

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < BYTE_VALUES).decode(errors="replace")


class _Process:
    """Process that works by one tokenizer file, and ends with this object."""

    def __init__(self, content: bytes, most: int = 0) -> None:
        """Raises:
        UserError: `tokenizers` is not installed, or the file is none of its."""
        if importlib.util.find_spec("tokenizers") is None:
            raise UserError("a tokenizer file needs the package tokenizers, which is not installed", INSTALL)
        self._file_bytes = len(content)
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "p2pdiloco.tasks.tokenizer_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C at the terminal is ours to handle
                env=os.environ | {"RAYON_NUM_THREADS": str(min(THREADS, os.cpu_count() or 1))},
            )
        self._connection = Connection(ours.detach())
        weakref.finalize(self, _end, self._process, self._connection)
        found, _ = self.ask("the tokenizer file cannot be read", "open", content, most=most)
        self.vocabulary: int = found["vocabulary"]

    def ids(self, tokens: Sequence[str]) -> list[int | None]:
        """Ids of these tokens; None: there is no such token."""
        found, _ = self.ask("the tokenizer file cannot be read", "ids", tokens=tokens)
        ids: list[int | None] = found["ids"]
        return ids

    def ask(
        self,
        what: str,
        job: str,
        blob: bytes = b"",
        most_bytes: int = 0,
        patience_s: float = 0.0,
        **more: Any,
    ) -> tuple[Values, bytes]:
        """Have a job done; returns both parts of the answer (`tasks.tokenizer_process`). `most_bytes`: of the
        second part.

        Raises:
            UserError: the library refuses or panics, or the process takes too long or too much memory and
                is gone; `what` is the sentence's beginning.
        """
        patience_s = patience_s or PATIENCE_S
        late, process = threading.Event(), self._process  # (a timer that ends must not keep this object)
        request = json.dumps({"job": job, "most_bytes": most_bytes, **more}).encode()

        def give_up() -> None:
            late.set()
            process.kill()

        with self._lock:
            timer = threading.Timer(patience_s, give_up)
            timer.start()
            try:
                for part in (request, blob):
                    self._connection.send_bytes(part)
                answer = json.loads(self._connection.recv_bytes(WORDS_BYTES + most_bytes))
                found = self._connection.recv_bytes(max(1, most_bytes))
            except (EOFError, OSError) as error:
                _end(process, self._connection)
                if late.is_set():
                    raise UserError(
                        f"{what}: it takes more than {patience_s:.0f} s", WORDS_OF_REGEX
                    ) from error
                ended = f"{what}: its process ended ({_exit_words(process.returncode)})"
                if process.returncode != -signal.SIGABRT:  # by which the library ends where it has no memory
                    raise UserError(ended) from error
                memory = memory_bytes(self._file_bytes, 0 if job == "open" else len(blob))
                raise UserError(
                    f"{ended}, as it does where {size_text(memory)} of memory are too little", WORDS_OF_MEMORY
                ) from error
            finally:
                timer.cancel()
        if "error" in answer:
            hint = WORDS_OF_REGEX if answer["panics"] else ""
            raise UserError(f"{what}: {answer['error']}"[:500], hint)
        return answer, found


def _exit_words(status: int) -> str:
    return signal.Signals(-status).name if -status in {*signal.Signals} else f"status {status}"


def _end(process: subprocess.Popen[bytes], connection: Connection[Any, Any]) -> None:
    process.kill()
    process.wait()
    connection.close()


class FileTokenizer:
    """A `tokenizers` JSON file."""

    def __init__(
        self, content: bytes, end_of_document: str, begin_of_document: str = "", most: int = 0, name: str = ""
    ) -> None:
        """`most`: ids that the model has, 0: any; `name`: the file's.

        Raises:
            UserError: `tokenizers` is not installed, the file is none of its, lacks one of the tokens, or has
                more than `most`.
        """
        self._process = _Process(content, most)
        self.vocabulary = self._process.vocabulary
        if 0 < most < self.vocabulary:
            raise UserError(
                f"model.vocabulary is {most}, but the tokenizer {name} has {self.vocabulary} tokens",
                f"set model.vocabulary to {self.vocabulary} or more",
            )
        end, begin, *usual = self._process.ids([end_of_document, begin_of_document, *_USUAL_ENDS])
        if end is None:
            known = [token for token, at in zip(_USUAL_ENDS, usual, strict=True) if at is not None]
            raise UserError(
                f'the tokenizer has no token "{end_of_document}" (data.end_of_document)',
                f"it has {', '.join(known) or 'none of the usual ones'}",
            )
        self.end: int = end
        self.begin: int | None = begin if begin_of_document else None
        if begin_of_document and self.begin is None:
            raise UserError(f'the tokenizer has no token "{begin_of_document}" (data.begin_of_document)')
        self._type = np.dtype(np.uint16 if self.vocabulary <= 1 << 16 else np.uint32)

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        if not documents:
            return []
        text = b"".join(documents)
        answer, ids = self._process.ask(
            "the tokenizer cannot encode this text",
            "encode",
            text,
            most_bytes=self._type.itemsize * (TOKENS_PER_BYTE * len(text) + TOKENS_PER_TEXT * len(documents)),
            patience_s=PATIENCE_S + len(text) / LEAST_BYTES_PER_S,
            sizes=[len(document) for document in documents],
            code=self._type.char,
        )
        return np.split(np.frombuffer(ids, dtype=self._type), np.cumsum(answer["counts"])[:-1])

    def decode(self, ids: Sequence[int]) -> str:
        _, text = self._process.ask(
            "the tokenizer cannot decode these tokens",
            "decode",
            np.array(ids, dtype=np.uint32).tobytes(),
            most_bytes=WORDS_BYTES + TEXT_BYTES_PER_TOKEN * len(ids),
        )
        return text.decode()


def end_of_document(content: bytes) -> str:
    """The token of this file that usually ends a document.

    Raises:
        UserError: it is no tokenizer file, or has none of the usual ones.
    """
    ids = _Process(content).ids(_USUAL_ENDS)
    found = next((token for token, at in zip(_USUAL_ENDS, ids, strict=True) if at is not None), None)
    if found is None:
        raise UserError(
            "the tokenizer has none of the tokens that usually end a document", "give --end-of-document TOKEN"
        )
    return found


def tokens_in_front(content: bytes, about: Mapping[str, Any]) -> list[str]:
    """List the tokens that this file's tokenizer puts in front of a text by itself. `about`: the content of
    the tokenizer_config.json that belongs to it, which goes before the file.

    Raises:
        UserError: it is no tokenizer file.
    """
    process = _Process(content)
    token, stated = about.get("bos_token"), about.get("add_bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if stated is False:
        return []
    if stated is True and isinstance(token, str) and process.ids([token]) != [None]:
        return [token]
    found, _ = process.ask("the tokenizer cannot encode a text", "front")
    return list(found["tokens"])


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a text that a model goes on with, one at least."""
    (ids,) = tokenizer.encode([prompt.encode()])
    front = [] if tokenizer.begin is None else [tokenizer.begin]
    return front + ids.tolist() or [tokenizer.end]


def tokenizer_digest(content: bytes) -> str:
    """SHA-256 of the file, as the manifest states it."""
    return hashlib.sha256(content).hexdigest()


def read_tokenizer(path: Path) -> bytes:
    """Read a tokenizer file, bounded in size.

    Raises:
        UserError: it cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    if len(content) > MAX_TOKENIZER_BYTES:
        raise UserError(f"the tokenizer {path} has more than {MAX_TOKENIZER_BYTES >> 20} MiB")
    return content


def checked_content(section: DataSection, content: bytes | None) -> bytes | None:
    """Content of the tokenizer file that the run names; None: it reads raw bytes.

    Raises:
        UserError: there is no such file here, or it is another one than the manifest's.
    """
    if section.tokenizer == BYTES:
        return None
    if content is None:
        raise UserError(
            f'the tokenizer "{section.tokenizer}" of this run is not here',
            "give its file with --tokenizer: it lies beside run.toml, beside a member's results, and as "
            "tokenizer.json in a member's data folder; --join gets it from the run itself",
        )
    digest = tokenizer_digest(content)
    if digest != section.tokenizer_digest:
        raise UserError(
            f"this is not the tokenizer of the run: its SHA-256 is {digest[:16]}..., "
            f"data.tokenizer_digest is {section.tokenizer_digest[:16]}..."
        )
    return content


def load_tokenizer(section: DataSection, content: bytes | None, vocabulary: int) -> Tokenizer:
    """The run's tokenizer, from the content of its file, if it is one.

    Raises:
        UserError: there is no such file here, it is another one than the manifest's, or has more ids than the
            model's `vocabulary`.
    """
    content = checked_content(section, content)
    if content is None:
        return ByteTokenizer()
    return FileTokenizer(
        content, section.end_of_document, section.begin_of_document, vocabulary, section.tokenizer
    )
