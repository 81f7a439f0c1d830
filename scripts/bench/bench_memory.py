"""Growth of a syncer's memory with the number of contributors: pushes that arrive, and their merge.

    python scripts/bench/bench_memory.py [--millions 8] [--codec int4] [--contributors 2 8] [--json FILE]

For each number of contributors, a fresh process lets that many contributions to one fragment arrive, all at
the same time, chunk by chunk, through the daemon's own code, has them judged and then merged. What is told is
how far the peak of its resident memory rises above what it was before: "bounded" as nodes do it, with scratch
on the disk (beyond 16 MiB here), "in memory" with every payload there, as a comparison. Also the merge's
processor time.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchkit import AT_ONCE, MIB, arguments, finish, forget_peak, peak_bytes
from p2pdiloco.adapters.flow import CHUNK_BYTES
from p2pdiloco.adapters.spool import Spool
from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.daemon.bulk import pushes
from p2pdiloco.daemon.bulk.pushes import PushesIn
from p2pdiloco.daemon.payloads import Compute, Tickets
from p2pdiloco.hashing import content_digest
from p2pdiloco.tensors.codecs import CODECS, codec
from p2pdiloco.tensors.layout import TensorSpec, plan_fragments
from p2pdiloco.tensors.vault import Vault

COLUMNS = 1000
SHARE_BYTES = 16 * MIB
"""A node's own share is larger; with this one a few contributions show what happens beyond it."""


class Syncer:
    """The receiving half of a node, with a core that takes everything."""

    def __init__(self, numel: int, codec_name: str, folder: Path | None) -> None:
        shape = (numel // COLUMNS, COLUMNS)
        layouts = plan_fragments([TensorSpec("w", shape)], 1)
        self.vault = Vault(layouts, OuterSection(), 24, codec_name, codec_name)
        self.vault.load_initial({"w": torch.randn(shape)})
        self.compute, self.tickets, self.held = Compute(self.vault, None), Tickets(), []  # type: ignore[arg-type]
        self.spool = Spool(folder) if folder else None
        head: Any = lambda fragment: None  # noqa: E731
        self.pushes_in = PushesIn(head, self.compute, self.tickets, self._post, spool=self.spool)
        self.payload = memoryview(codec(codec_name).encode(0.01 * torch.randn(layouts[0].numel)))
        self._label = SimpleNamespace(
            payload_bytes=len(self.payload),
            payload_digest=content_digest(self.payload),
            fragment=0,
            codec=codec_name,
        )

    def _post(self, event: ev.Event) -> None:
        if isinstance(event, ev.Offered):
            self.pushes_in.decided(ev.AcceptTransfer(event.transfer, 0, len(self.payload)))
        elif isinstance(event, ev.PayloadReceived):
            self.held.append(event.ticket)
            self.pushes_in.decided(ev.AnswerTransfer(event.transfer, 0, Verdict.IN_ROUND))

    async def take(self, contributors: int) -> None:
        """Take all pushes at once, a chunk of each in turn."""
        request: Any = SimpleNamespace(signed=SimpleNamespace(header=self._label))
        sinks: list[Any] = [self.pushes_in.on_push(f"peer {i}", request) for i in range(contributors)]
        for start in range(0, len(self.payload), CHUNK_BYTES):
            for sink in sinks:
                await sink.write(start, self.payload[start : start + CHUNK_BYTES])
        for sink in sinks:
            await sink.finish()

    async def merge(self, number: int) -> float:
        """Merge what has come; seconds of processor time."""
        inputs = [(self.tickets.payload(ticket), 1000, 10) for ticket in self.held]
        start = time.process_time()
        await self.compute.run(self.vault.merge, 0, number, inputs, [], 24)
        taken_s = time.process_time() - start
        for ticket in self.held:
            self.tickets.release(ticket)
        self.held.clear()
        self.vault.drop_spare(0)
        return taken_s


async def one(numel: int, codec_name: str, contributors: int, bounded: bool) -> dict[str, float]:
    """Measure one, in a process of its own."""
    torch.set_num_threads(1)
    pushes.SHARE_BYTES = SHARE_BYTES if bounded else 1 << 60  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        syncer = Syncer(numel, codec_name, Path(folder) if bounded else None)
        await syncer.take(1)  # what is needed once and for all is not counted
        await syncer.merge(1)
        before = forget_peak()
        await syncer.take(contributors)
        merge_s = await syncer.merge(1)
        growth = peak_bytes() - before
        syncer.compute.close()
        if syncer.spool:
            syncer.spool.close()
    return {
        "growth_mib": growth / MIB,
        "payloads_mib": contributors * len(syncer.payload) / MIB,
        "merge_s": merge_s,
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--millions", type=float, default=8.0, help="of parameters in the fragment")
    parser.add_argument("--codec", default="int4", choices=list(CODECS))
    parser.add_argument("--contributors", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--one", choices=("bounded", "memory"), help="(for itself)")
    args = parser.parse_args()
    numel = int(args.millions * 1e6)
    if args.one:
        print(json.dumps(asyncio.run(one(numel, args.codec, args.contributors[0], args.one == "bounded"))))
        return
    rows = []
    print(f"{numel / 1e6:g} M parameters, {args.codec}: peak of resident memory above what it was, MiB")
    print(
        f"{'contributors':>12}{'payloads':>10}{'bounded':>10}{'in memory':>11}{'merge s':>9}{'in memory':>11}"
    )
    for contributors in args.contributors:
        row: dict[str, Any] = {"contributors": contributors}
        for how in ("bounded", "memory"):
            words = ["--one", how, "--millions", str(args.millions), "--codec", args.codec]
            words += ["--contributors", str(contributors)]
            command = [sys.executable, __file__, *words]
            ran = subprocess.run(
                command, capture_output=True, check=True, text=True, env=os.environ | AT_ONCE
            )
            row[how] = json.loads(ran.stdout)
        bounded, memory = row["bounded"], row["memory"]
        print(
            f"{contributors:>12}{bounded['payloads_mib']:>10.1f}{bounded['growth_mib']:>10.1f}"
            f"{memory['growth_mib']:>11.1f}{bounded['merge_s']:>9.3f}{memory['merge_s']:>11.3f}"
        )
        rows.append(row)
    finish("memory", {"parameters": numel, "codec": args.codec, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
