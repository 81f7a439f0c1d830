"""Process in which a tokenizer file is parsed and does its work, with limits: `tasks.tokens` starts it.

The file is somebody's claim. A normalizer of a megabyte makes gigabytes of a text, a regular expression
backtracks for ever, and either would end the process of a node or a learner. So this process has a limit of
memory for what it has to do, its starter has a limit of time, and an answer has as many bytes as the job may
need. What dies here is a sentence there.

The limit is `RLIMIT_DATA`, which Linux keeps. On macOS the system does not keep it: there time and answers
are limited, memory is not. A request and its answer are a JSON object and bytes each; nothing is unpickled.
"""

from __future__ import annotations

import json
import socket
import sys
from array import array
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from msgspec import Struct

from p2pdiloco.errors import first_line
from p2pdiloco.util import Values, end_with, yield_memory

PROGRAM_BYTES = 512 << 20
"""Memory of the process without a file: 17 MiB were measured, and 225 to 316 MiB that the allocator keeps for
its threads between texts."""
THREADS = 4
"""Threads of the library at most: the allocator keeps memory for each."""
BYTES_PER_FILE_BYTE = 96
"""Memory for each byte of the file: 12 were measured for BPE, 53 for Unigram with 250,000 tokens."""
BYTES_PER_TEXT_BYTE = 768
"""Memory for each byte of a text: 40 were measured for English, 190 where every byte becomes a token, and
more than 256 where each of these is taken apart first (NFKD of Korean)."""
MOST_BYTES = 2 << 30
"""Memory of the process at most, whatever the file's size, beside what a text needs."""
WORDS_BYTES = 1 << 20
"""Bytes of the part of an answer that is JSON, at most, where the job says nothing else."""
PANIC = "PanicException"
"""Name of the class of what a panic of the library becomes: a `BaseException` of no module."""


def memory_bytes(file_bytes: int, text_bytes: int) -> int:
    """Memory that the process may take, in bytes."""
    return (
        min(MOST_BYTES, PROGRAM_BYTES + BYTES_PER_FILE_BYTE * file_bytes) + BYTES_PER_TEXT_BYTE * text_bytes
    )


class _Model(Struct):
    vocab: dict[str, int] | list[msgspec.Raw] | None = None


class _File(Struct):
    model: _Model


class TokenizerJobs:
    """Jobs that the starter may ask for, by the names of the methods; `blob` is the bytes of the request."""

    def __init__(self) -> None:
        self._backend: Any = None
        self.file_bytes = 0
        self.text_bytes = 0
        """Longest request so far: what one took, the allocator may keep."""

    def open(self, blob: bytes, most: int) -> Values:
        """Parse the file, unless it lists more than `most` tokens (0: any number)."""
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):  # the library says why
            listed = len(msgspec.json.decode(blob, type=_File).model.vocab or ())
            if 0 < most < listed:
                return {"vocabulary": listed}
        from tokenizers import Tokenizer

        self._backend = Tokenizer.from_str(blob.decode())
        self._backend.no_padding()
        self._backend.no_truncation()
        # Ids may have gaps, and then the largest is not the count.
        return {"vocabulary": 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)}

    def ids(self, blob: bytes, tokens: list[str]) -> Values:
        """Ids of these tokens; None: there is no such token."""
        return {"ids": [self._backend.token_to_id(token) for token in tokens]}

    def front(self, blob: bytes) -> Values:
        """Tokens that the file puts in front of a text."""
        plain = self._backend.encode("a", add_special_tokens=False)
        whole = self._backend.encode("a", add_special_tokens=True)
        places = range(len(whole.ids) - len(plain.ids) + 1) if plain.ids else ()
        at = next((at for at in places if whole.ids[at : at + len(plain.ids)] == plain.ids), 0)
        return {"tokens": whole.tokens[:at]}

    def encode(self, blob: bytes, sizes: list[int], code: str) -> Values:
        """Ids of texts of these sizes in bytes, as an array of that type code, and how many each has."""
        texts, start = [], 0
        for size in sizes:
            texts.append(blob[start : start + size].decode(errors="replace"))
            start += size
        found = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        blob = b"".join(array(code, encoding.ids).tobytes() for encoding in found)
        return {"counts": [len(encoding) for encoding in found], "blob": blob}

    def decode(self, blob: bytes) -> Values:
        """Text of ids (uint32)."""
        return {"blob": self._backend.decode(array("I", blob).tolist(), skip_special_tokens=False).encode()}


def limit_memory(most: int) -> None:
    """Limit this process's memory, in bytes, where the system does that."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer_to(worker: TokenizerJobs, request: Values, blob: bytes) -> tuple[bytes, bytes]:
    """Do one job; returns the two parts of the answer."""
    job, most = request.pop("job"), request.pop("most_bytes")
    if job == "open":
        worker.file_bytes = len(blob)
    else:
        worker.text_bytes = max(worker.text_bytes, len(blob))
    limit_memory(memory_bytes(worker.file_bytes, worker.text_bytes))
    try:
        found = getattr(worker, job)(blob, **request)
        made = found.pop("blob", b"")
        words = json.dumps(found).encode()
        if len(made) > most or len(words) > WORDS_BYTES + most:
            raise ValueError(f"of {len(blob)} bytes it makes {len(made) + len(words)}")
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        panics = not isinstance(error, Exception)
        said = "there is too little memory" if isinstance(error, MemoryError) else first_line(error)
        return json.dumps({"error": said[:400], "panics": panics}).encode(), b""
    return words, made


def main(fd: int) -> None:
    """Answer requests until the other end of the socket is closed."""
    yield_memory()
    sock = socket.socket(fileno=fd)
    end_with(sock)
    connection, worker = Connection(sock.fileno()), TokenizerJobs()
    while True:
        request, blob = json.loads(connection.recv_bytes()), connection.recv_bytes()
        for part in answer_to(worker, request, blob):
            connection.send_bytes(part)


if __name__ == "__main__":
    main(int(sys.argv[1]))
