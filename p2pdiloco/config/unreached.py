"""Parameters that nothing will ever reach: rows of token ids which the run's tokenizer does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.models import BYTE_VALUES, BYTES, vocabulary_for


def unreached_rows(manifest: Manifest, ids: int = 0, numel: int = 0) -> str:
    """Say how many token ids of the model never occur; empty: none, but for rounding.

    `ids`: those of the tokenizer; 0: raw bytes', and of another tokenizer nothing is known. `numel`:
    parameters of the model, of which the share is said; 0: not known.
    """
    ids = ids or (BYTE_VALUES if manifest.data.tokenizer == BYTES else 0)
    vocabulary, width, tables = _embedding(manifest.model)
    if not ids or vocabulary <= max(ids, vocabulary_for(ids)):
        return ""
    unused = (vocabulary - ids) * width * tables
    share = f", {unused / numel:.0%} of the model" if numel else ""
    size = f": {unused / 1e6:.3g} M parameters{share}, are never reached" if width else " never occur"
    enough = ids if manifest.data.tokenizer == BYTES else vocabulary_for(ids)
    return (
        f"the model has {vocabulary} token ids, and {manifest.data.tokenizer} has {ids}{size}; a vocabulary "
        f"of {enough} is enough, or give the tokenizer that the model is for (run new --tokenizer)"
    )


def _embedding(model: Mapping[str, object]) -> tuple[int, int, int]:
    """Return vocabulary, width, and number of tables of one row for an id; zeros: the model has none."""
    found: Mapping[str, object] = model
    keys = ("vocabulary", "width", "tied_head")
    if isinstance(text := model.get("config"), str):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return 0, 0, 0
        keys = ("vocab_size", "hidden_size", "tie_word_embeddings")
        if not isinstance(found, dict):
            return 0, 0, 0
    vocabulary, width, tied = (found.get(key) for key in keys)
    if not isinstance(vocabulary, int):
        return 0, 0, 0
    return vocabulary, width if isinstance(width, int) else 0, 1 if tied in (True, None) else 2
