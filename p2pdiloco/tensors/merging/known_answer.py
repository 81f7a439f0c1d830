"""Known answer of merges: a small merge whose bits every machine must make.

An audit costs somebody its place, so whoever makes them first shows that its own arithmetic is everybody's:
there are processors and builds of torch that this project has never seen, and broken ones.

Whoever changes the answer changes what merges are: then WIRE_VERSION is raised, as nodes of both kinds would
accuse each other.

Rules: docs/protocol/audits.md, section 2.
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import Tensor

from p2pdiloco.core.api.types import MergeLimits
from p2pdiloco.tensors.codec import CODECS
from p2pdiloco.tensors.codec_base import Codec
from p2pdiloco.tensors.digest import state_digest
from p2pdiloco.tensors.layout import FragmentLayout, Piece
from p2pdiloco.tensors.merging.making import UpdateMaker
from p2pdiloco.tensors.outer import outer_step

ANSWER = "2df16ae439c1df563476cbc4becd817f8635b2c810c7fcbe865ecf8045d6dae3"
STEP_ANSWER = "b0cb1078596dc9a1fd842f0365298b3cada3f7fac5fa74ec4743b7e5381907db"
_SIZES = (4_099, 513, 600)
"""Elements of the pieces, the last one an embedding: several widths of squares with a rest, and few."""
_FAINT = 64
"""Elements of which momentum is next to nothing."""
_FAINT_BLOCK = 1_024
"""Elements that lie below fp32's normal numbers in contributions, some whole blocks of every codec."""
_LIMITS = MergeLimits(most_tokens=300, longest=8.0, of_median=3.0)


def _layout() -> FragmentLayout:
    pieces, offset = [], 0
    for number, numel in enumerate(_SIZES):
        pieces.append(Piece(f"piece {number}", 0, offset, numel, number == len(_SIZES) - 1))
        offset += numel
    return FragmentLayout(0, offset, tuple(pieces))


def _delta(numel: int, learner: int) -> Tensor:
    """Make a contribution of numbers that fp32 holds exactly, by arithmetic of whole numbers alone."""
    places = torch.arange(numel, dtype=torch.int64)
    drawn = (places * (2_654_435_761 + 2 * learner) + learner) % 65_521
    return (drawn - 32_760).float() * (0.5**18 * (learner + 1))


def _contribution(codec: Codec, numel: int, learner: int, faint: int) -> bytearray:
    """Encode a contribution whose first elements are below fp32's normal numbers, which some machines make
    zero. An encoder sends zeros for most of these, but a learner may send them all the same: the bits of its
    elements, or of its scales, are written as they are."""
    payload, width = codec.encode(_delta(numel, learner)), codec.sections[0]
    for block in range(-(-faint // codec.block)):
        bits = 1 + (5 * block + learner) % 8 if width == 2 else 4_001 + 37 * (block + learner)
        payload[width * block : width * (block + 1)] = bits.to_bytes(width, "little")
    return payload


def answer() -> str:
    """Make the merges, with every dense codec, and compute one digest of them.

    The fourth contribution has nothing but faint elements, so it has a length and no direction. What an
    update's codec cuts off is in a partial merge, whose sums are fp32.
    """
    layout, made = _layout(), hashlib.sha256()
    for name, codec in sorted(CODECS.items()):
        if codec.sparse:
            continue
        rooms = (torch.empty(layout.numel) for _ in range(3))
        maker = UpdateMaker((layout,), 24, codec, codec, *rooms)
        faint = (_FAINT_BLOCK, _FAINT_BLOCK, _FAINT_BLOCK, layout.numel)
        inputs = [
            (_contribution(codec, layout.numel, n, faint[n]), 100 * (n + 1), 20 + 3 * n, 64 - 20 * n)
            for n in range(4)
        ]
        partial = maker.remake_partial(0, inputs, _LIMITS, b"known")
        for merge in (maker.remake(0, inputs, _LIMITS, b"known", partials=[partial.update]), partial):
            figures = merge.found.cut, merge.found.lengths, merge.found.scores
            made.update(f"{name} {merge.update_digest.hex()} {figures}".encode())
    return made.hexdigest()


def step_answer() -> str:
    """Make outer steps, a whole one and a shorter one, and compute the digest of the state after them."""
    layout = _layout()
    theta, momentum, out_theta, out_momentum = (_delta(layout.numel, n) for n in range(4))
    delta = _delta(layout.numel, 5)
    # The momentum of what is trained no more falls below fp32's normal numbers, which some machines cut off.
    momentum[:_FAINT] *= 0.5**130
    delta[:_FAINT] = 0.0
    for share in (1.0, 0.625):
        step = theta, momentum, delta, 0.7, 0.9
        outer_step(*step, out_theta, out_momentum, share)
        theta, momentum, out_theta, out_momentum = out_theta, out_momentum, theta, momentum
    return state_digest(2, theta, momentum).hex()


@cache
def steps_as_everywhere() -> bool:
    """Tell whether this machine makes the outer steps that others make. Looked at once in a process."""
    return step_answer() == STEP_ANSWER and merges_as_everywhere()


@cache
def merges_as_everywhere() -> bool:
    """Tell whether this machine makes the known answer. Looked at once in a process."""
    return answer() == ANSWER
