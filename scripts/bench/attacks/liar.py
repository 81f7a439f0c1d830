"""`liar.py LIE SIGN_FILE … p2pdiloco node …`: a node that lies from when a file is there.

Nothing but the lie differs from any other node's code.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from attacks.lies import BY_A_MEMBER, Lie, Own
from attacks.usurper import elect_itself, usurp
from attacks.withholding import omit, trickle, withhold
from p2pdiloco.cli.main import main as command
from p2pdiloco.config.presets import for_run
from p2pdiloco.core import contributions, pending
from p2pdiloco.daemon import learner_host
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors import merge
from p2pdiloco.tensors.merge import Accumulator
from p2pdiloco.tensors.outer_update import Encoded, OwnContributions
from worlds.aims import TOKEN, rows_of


def lying(lie: Lie, sign: Path) -> None:
    """Put the lie into this process; what it does is noted in the file, a word a line."""
    honest_encode, honest_label, honest_result = (
        OwnContributions.encode,
        pending.signed_label,
        Accumulator.result,
    )
    honest_scores = merge.scores
    bases: dict[int, Tensor] = {}
    specs = task_of(for_run("micro", "lies", 1)).specs()

    def lies(word: str) -> bool:
        if not sign.exists():
            return False
        with sign.open("a") as file:
            file.write(f"{word}\n")
        return True

    def encode(self: OwnContributions, fragment: int, base: Tensor, local: Tensor) -> Encoded:
        before, bases[fragment] = bases.get(fragment), base.clone()
        if not lies("contributions"):
            return honest_encode(self, fragment, base, local)
        rows = rows_of(self._layouts[fragment], specs, TOKEN)
        moved = None if before is None or torch.equal(before, base) else before - base
        told = lie.delta(lie.aimed(Own(base - local, rows, moved)))
        return honest_encode(self, fragment, told, local.new_zeros(local.shape))

    def false_label(context: Any, pending: Any, attestation: Any) -> Any:
        signed = honest_label(context, pending, attestation)
        if not lies("labels"):
            return signed
        false = structs.replace(signed, header=lie.label(signed.header))
        work = false.contributor().work(false.header.run, false.header.fragment)
        return structs.replace(false, signature=context.shared.sign("work", work))

    def result(self: Accumulator, out: Tensor) -> None:
        honest_result(self, out)
        if lies("merges"):
            out.copy_(lie.merged(out))

    def scores(samples: Sequence[Tensor], votes: Sequence[bool] = ()) -> list[int]:
        found = honest_scores(samples, votes)
        return lie.scores(found) if lies("scores") else found

    if lie.poisons:
        learner_host.begin = begin_poisoned
    if lie.elects_itself:
        elect_itself(lies)
    if lie.trickles:
        trickle(lies)
    if lie.withholds:
        withhold(lies)
    if lie.omits:
        omit(lies)
    if lie.usurps:
        usurp(lies, lie.boasts)
    merge.scores = scores
    Accumulator.result = result  # type: ignore[method-assign]
    OwnContributions.encode = encode  # type: ignore[method-assign]
    contributions.signed_label = false_label  # type: ignore[attr-defined]


async def begin_poisoned(
    channel_fd: int, exchange_fd: int, log: int, environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    """Start the learner as `learner_host.begin` does, with poisoned data."""
    words = ("-m", "attacks.poisoned_learner", str(channel_fd), str(exchange_fd))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(channel_fd, exchange_fd),
        start_new_session=True,
        env=environment,
    )


def main(words: Sequence[str]) -> None:
    """Run the command after the word p2pdiloco, with the lie."""
    lying(BY_A_MEMBER[words[0]], Path(words[1]))
    sys.argv = ["p2pdiloco", *words[words.index("p2pdiloco") + 1 :]]
    command()


if __name__ == "__main__":
    main(sys.argv[1:])
