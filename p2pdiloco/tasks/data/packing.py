"""Packing of documents into samples: joined, cut into windows, not padded, nothing lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from p2pdiloco.errors import DataError
from p2pdiloco.tasks.data.split import cut
from p2pdiloco.tasks.data.tokens import Tokenizer, Tokens

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch, Indices

ENCODED_TOGETHER_BYTES = 8 << 20
"""Bytes of text that go through the tokenizer at one go; a longer document is cut at the end of a line."""


class Windows:
    """Windows of a text: `tasks.task.Samples`. The next one begins with the last token of the one before, so
    that every token is predicted once. A batch is one tensor, int64 (n, context + 1)."""

    def __init__(self, text: Tokens, context_tokens: int, name: str = "training") -> None:
        """`name`: whose text it is, for a sentence.

        Raises:
            UserError: the text is shorter than one window.
        """
        self.text = text
        self._context = context_tokens
        self._count = (len(text) - 1) // context_tokens
        if self._count < 1:
            raise DataError(
                f"the {name} text has {len(text)} tokens, the context needs {context_tokens + 1}",
                "give more text with --data",
            )

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Indices) -> Batch:
        """The windows with these indices."""
        places = indices[:, None] * self._context + np.arange(self._context + 1)
        return (torch.from_numpy(self.text[places].astype(np.int64)),)


class Packer:
    """Tokens of documents, each with the token that ends it behind, and in front the one that begins it, if
    there is one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[tuple[bytes, bool, bool]] = []
        """Pieces of documents, and whether a document begins and ends with one."""
        # Where one token does both, the end of a document is the begin of the next.
        is_other = tokenizer.begin is not None and tokenizer.begin != tokenizer.end
        self._begin = [tokenizer.begin] if is_other else []
        self._waiting_bytes = 0
        self._parts: list[Tokens] = []

    def add(self, document: bytes, ends: bool = True, begins: bool = True) -> None:
        """Add the next document, UTF-8. `ends`: False, it is a part, and the document goes on behind it;
        `begins`: False, it is a part, and the document began before it."""
        stop, is_last = 0, False
        while not is_last:
            start, stop = stop, cut(document, stop, stop + ENCODED_TOGETHER_BYTES)
            is_last = stop == len(document)
            self._waiting.append((document[start:stop], begins and start == 0, is_last and ends))
            self._waiting_bytes += stop - start
            if self._waiting_bytes >= ENCODED_TOGETHER_BYTES:
                self._encode()

    def _encode(self) -> None:
        encoded = self._tokenizer.encode([piece for piece, _, _ in self._waiting])
        for tokens, (_, begins, ends) in zip(encoded, self._waiting, strict=True):
            if begins and self._begin:
                self._parts.append(np.array(self._begin, dtype=tokens.dtype))
            self._parts.append(tokens)
            if ends:
                self._parts.append(np.array([self._tokenizer.end], dtype=tokens.dtype))
        self._waiting, self._waiting_bytes = [], 0

    def take(self) -> Tokens:
        """Take all tokens since the last call."""
        self._encode()
        parts, self._parts = self._parts, []
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)
