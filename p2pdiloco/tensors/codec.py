"""Codecs that a manifest may name."""

from __future__ import annotations

from types import MappingProxyType

from p2pdiloco.errors import invariant
from p2pdiloco.tensors.codec_4bit import E3M0, Int4
from p2pdiloco.tensors.codec_base import Codec
from p2pdiloco.tensors.codec_dense import Bf16, Fp32, Int8
from p2pdiloco.tensors.codec_topk import TopK

CODECS = MappingProxyType({made.name: made for made in (Fp32(), Bf16(), Int8(), Int4(), E3M0(), TopK())})
"""Codecs by name."""


def codec(name: str) -> Codec:
    """Find the codec of that name; names come from a checked manifest."""
    invariant(name in CODECS, f"no codec is called {name!r}")
    return CODECS[name]
