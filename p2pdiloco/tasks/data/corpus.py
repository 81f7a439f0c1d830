"""Text for language models, from every source that a manifest can name."""

from __future__ import annotations

from p2pdiloco.config.manifest import DataSection
from p2pdiloco.tasks.data.tokens import Tokenizer
from p2pdiloco.tasks.task import Data


def load_corpus(section: DataSection, path: str | None, context_tokens: int, tokenizer: Tokenizer) -> Data:
    """Training and held-out samples: windows of context + 1 tokens, int64 (n, context + 1).

    `path`: the node's --data.

    Raises:
        UserError: one sentence: what is missing, unreadable, too small, too large.
    """
    if section.source == "hub":
        from p2pdiloco.tasks.data.hub_streams import load_stream

        return load_stream(section, path, context_tokens, tokenizer)
    from p2pdiloco.tasks.data.text import load_text

    return load_text(section, path, context_tokens, tokenizer)
