"""Tokenizers: raw bytes, or a `tokenizers` JSON file whose digest the manifest states.

Such a file is data: it is parsed by the `tokenizers` library, and nothing in it is executed. It may come from
a peer (the daemon asks its members), so size and digest are checked before it is parsed.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from p2pdiloco.config.manifest import BYTE_VALUES, BYTES, DataSection
from p2pdiloco.errors import UserError, first_line
from p2pdiloco.tasks.documents import INSTALL

MAX_TOKENIZER_BYTES = 64 << 20
TOKENIZER_FILE = "tokenizer.json"
"""Name of the file in a model's folder."""
PATIENCE_S = 60.0
"""Time that any call of the library may take: the largest file takes some seconds."""
LEAST_BYTES_PER_S = 10_000.0
"""Least rate at which a text is encoded; usual are millions."""
PANIC = "PanicException"
"""Name of the class of what a panic of the library becomes: a `BaseException` of no module."""
WORDS_OF_REGEX = "a regular expression in the tokenizer file may be to blame: ask the run's owner"
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


class FileTokenizer:
    """A `tokenizers` JSON file."""

    def __init__(self, content: bytes, end_of_document: str, begin_of_document: str = "") -> None:
        """Raises:
        UserError: `tokenizers` is not installed, the file is none of its, or lacks one of the tokens."""
        self._backend = _parsed(content)
        self._backend.no_padding()
        self._backend.no_truncation()
        # Ids may have gaps, and then the largest is not the count.
        self.vocabulary = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        end = self._backend.token_to_id(end_of_document)
        if end is None:
            raise UserError(
                f'the tokenizer has no token "{end_of_document}" (data.end_of_document)',
                f"it has {', '.join(_usual_ends(self._backend)) or 'none of the usual ones'}",
            )
        self.end: int = end
        self.begin: int | None = self._backend.token_to_id(begin_of_document) if begin_of_document else None
        if begin_of_document and self.begin is None:
            raise UserError(f'the tokenizer has no token "{begin_of_document}" (data.begin_of_document)')
        self._type = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        texts = [document.decode(errors="replace") for document in documents]
        patience_s = PATIENCE_S + sum(map(len, documents)) / LEAST_BYTES_PER_S
        found = _asked(
            "the tokenizer cannot encode this text",
            lambda: self._backend.encode_batch_fast(texts, add_special_tokens=False),
            patience_s,
        )
        return [np.array(encoding.ids, dtype=self._type) for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            _asked(
                "the tokenizer cannot decode these tokens",
                lambda: self._backend.decode(list(ids), skip_special_tokens=False),
            )
        )


def end_of_document(content: bytes) -> str:
    """The token of this file that usually ends a document.

    Raises:
        UserError: it is no tokenizer file, or has none of the usual ones.
    """
    found = _usual_ends(_parsed(content))
    if not found:
        raise UserError(
            "the tokenizer has none of the tokens that usually end a document", "give --end-of-document TOKEN"
        )
    return found[0]


def tokens_in_front(content: bytes, about: Mapping[str, Any]) -> list[str]:
    """List the tokens that this file's tokenizer puts in front of a text by itself. `about`: the content of
    the tokenizer_config.json that belongs to it, which goes before the file.

    Raises:
        UserError: it is no tokenizer file.
    """
    backend = _parsed(content)
    token, stated = about.get("bos_token"), about.get("add_bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if stated is False:
        return []
    if stated is True and isinstance(token, str) and backend.token_to_id(token) is not None:
        return [token]
    what = "the tokenizer cannot encode a text"
    plain = _asked(what, lambda: backend.encode("a", add_special_tokens=False))
    whole = _asked(what, lambda: backend.encode("a", add_special_tokens=True))
    places = range(len(whole.ids) - len(plain.ids) + 1) if plain.ids else ()
    at = next((at for at in places if whole.ids[at : at + len(plain.ids)] == plain.ids), 0)
    return list(whole.tokens[:at])


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a text that a model goes on with, one at least."""
    (ids,) = tokenizer.encode([prompt.encode()])
    front = [] if tokenizer.begin is None else [tokenizer.begin]
    return front + ids.tolist() or [tokenizer.end]


def _parsed(content: bytes) -> Any:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise UserError(
            "a tokenizer file needs the package tokenizers, which is not installed", INSTALL
        ) from error
    return _asked("the tokenizer file cannot be read", lambda: Backend.from_str(content.decode()))


def _asked(what: str, ask: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Answer of the library, which works by what a stranger's file says.

    A regex that backtracks for ever does so in a thread that is left behind: nothing can stop it but the
    process's end, which a `UserError` is for whoever asks.

    Raises:
        UserError: it refuses, panics, or takes too long; `what` is the sentence's beginning.
    """
    answers: list[Any] = []
    faults: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001 (a panic is no Exception; all are looked at below)
            faults.append(error)

    thread = threading.Thread(target=work, name="tokenizer", daemon=True)
    thread.start()
    thread.join(patience_s)
    if answers:
        return answers[0]
    if not faults:
        raise UserError(f"{what}: it takes more than {patience_s:.0f} s", WORDS_OF_REGEX)
    (error,) = faults
    if not isinstance(error, Exception) and type(error).__name__ != PANIC:
        raise error
    hint = "" if isinstance(error, Exception) else WORDS_OF_REGEX
    raise UserError(f"{what}: {first_line(error)}"[:500], hint) from error


def _usual_ends(backend: Any) -> list[str]:
    return [token for token in _USUAL_ENDS if backend.token_to_id(token) is not None]


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
    found = FileTokenizer(content, section.end_of_document, section.begin_of_document)
    if found.vocabulary > vocabulary:
        raise UserError(
            f"model.vocabulary is {vocabulary}, but the tokenizer {section.tokenizer} has "
            f"{found.vocabulary} tokens",
            f"set model.vocabulary to {found.vocabulary} or more",
        )
    return found
