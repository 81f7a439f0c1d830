"""A process of bench_rivals.py: a learner that synchronises as OpenDiLoCo or torchft does, told by stdin.

It makes inner steps by sleeping, `STEP_S` each, and does between them what the way asks for (`bench_rivals`
says what that is). Prints `address A` (where others join) and `ready`; begins with the line `go`; after every
sync interval `cycle`, the inner steps so far, the monotonic time, the seconds in which it stood still, the
syncs that gave the mean of all nodes, and those that did not. Ends with its input.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import psutil
import torch

if TYPE_CHECKING:
    from hivemind.averaging.control import StepControl

STORE_PORT = 29500
"""Port of torch.distributed's store; every node has a network namespace of its own."""
MATCH_STEPS = 4
"""Inner steps before the end of a sync interval at which hivemind begins to look for its group."""
HIVEMIND_TIMEOUT_S = 900.0
POLL_S = 0.02
TOLERANCE = 0.01
DTYPES = {"torchft": torch.float32, "torchft-bf16": torch.bfloat16, "torchft-fp8": torch.uint8}


class Work(msgspec.Struct, frozen=True):
    """Task that all nodes do alike, and which of them this is."""

    way: str
    rank: int
    nodes: int
    folder: str
    """Folder for sockets, removed by whoever started this."""
    address: str
    join: str
    """Address of the first node, as it printed it; empty for the first."""
    numels: list[int]
    """Sizes of the tensors (OpenDiLoCo) or fragments (torchft)."""
    step_s: float
    inner_steps: int
    delay_steps: int

    @property
    def mean(self) -> float:
        """Mean of the nodes' ranks, which is what they average."""
        return (self.nodes - 1) / 2


class Tally:
    """Syncs that averaged, and those that did not."""

    def __init__(self) -> None:
        self.good = self.bad = 0

    def add(self, good: bool) -> None:
        """One more."""
        self.good += good
        self.bad += not good


class Way(Protocol):
    """Way in which nodes synchronise."""

    tally: Tally

    def after(self, step: int) -> None:
        """Called after every inner step, from 1 on; may block."""

    def close(self) -> None:
        """The end."""


def schedule(inner_steps: int, fragments: int, delay_steps: int) -> dict[int, list[tuple[str, int]]]:
    """Schedule of torchft in a sync interval: ("send" or "wait", fragment) after which inner step.

    Fragment i is waited for at H (i + 1) / P, and sent off as many steps before as asked for, but after the
    one before it has come: only one is on its way at a time, which torchft insists on.

    Fragment i is waited for at H (i + 1) / P, and sent off as many steps before as asked for, but after the
    one before it has come: only one is on its way at a time, which torchft insists on.
    """
    plan: dict[int, list[tuple[str, int]]] = {}
    begin = 0
    for fragment in range(fragments):
        end = inner_steps * (fragment + 1) // fragments
        delay = min(delay_steps, end - begin - 1)
        plan.setdefault(end - delay, []).append(("send", fragment))
        plan.setdefault(end, []).append(("wait", fragment))
        begin = end
    return plan


class Torchft:
    """All-reduces over gloo, one for each fragment, overlapped with the inner steps of its delay."""

    def __init__(self, work: Work) -> None:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = device_of(work.address)
        first = work.join or work.address
        if not work.rank:
            print(f"address {work.address}", flush=True)
        dist.init_process_group(
            "gloo", init_method=f"tcp://{first}:{STORE_PORT}", rank=work.rank, world_size=work.nodes
        )
        dist.barrier()
        self.tally = Tally()
        self._work, self._reduce = work, dist.all_reduce
        self._buffers = [torch.zeros(numel, dtype=DTYPES[work.way]) for numel in work.numels]
        self._plan = schedule(work.inner_steps, len(work.numels), work.delay_steps)
        self._pending: dict[int, Any] = {}

    def after(self, step: int) -> None:
        """See Way."""
        place = (step - 1) % self._work.inner_steps + 1
        for what, fragment in self._plan.get(place, ()):
            buffer = self._buffers[fragment]
            if what == "send":
                buffer.fill_(self._work.rank)
                self._pending[fragment] = self._reduce(buffer, async_op=True)
                continue
            self._pending.pop(fragment).wait()
            total = self._work.mean * self._work.nodes
            self.tally.add(float(buffer.min()) == total == float(buffer.max()))

    def close(self) -> None:
        """Close without a word to the others, who may be in the middle of an all-reduce with us."""
        os._exit(0)


class OpenDiLoCo:
    """hivemind's averager, for which everything stands still."""

    def __init__(self, work: Work, ended: threading.Event) -> None:
        from averaging_hivemind import averager_of
        from hivemind import DHT
        from hivemind.p2p import P2P

        P2P._UNIX_SOCKET_PREFIX = f"/unix{work.folder}/hivemind-"  # it leaves them in /tmp when it is killed
        self._dht = DHT(
            initial_peers=[work.join] if work.join else [],
            host_maddrs=[f"/ip4/{work.address}/tcp/0"],
            start=True,
        )
        self._averager = averager_of(work.numels, self._dht, work.nodes)
        if not work.rank:
            print(f"address {self._dht.get_visible_maddrs()[0]}", flush=True)
        self.tally = Tally()
        self._work, self._ended = work, ended
        self._control: StepControl | None = None

    def after(self, step: int) -> None:
        """See Way."""
        from averaging_hivemind import look_for_group

        left = -step % self._work.inner_steps
        if left == min(MATCH_STEPS, self._work.inner_steps - 1):
            self._control = look_for_group(self._averager, HIVEMIND_TIMEOUT_S)
        elif not left and self._control is not None:
            self.tally.add(self._average(self._control))

    def _average(self, control: StepControl) -> bool:
        """Average, and tell whether it gave the mean of all."""
        from averaging_hivemind import bounds, fill, matched

        fill(self._averager, self._work.rank)
        while not (matched(control) or self._ended.is_set()):
            time.sleep(POLL_S)
        control.allow_allreduce()
        while not (control.done() or self._ended.is_set()):
            time.sleep(POLL_S)
        if not control.done() or control.cancelled():
            return False
        error = control.exception(0)
        if error is not None:
            # hivemind's users go on with the next round, and so does this
            print(f"averaging failed: {error!r}", file=sys.stderr, flush=True)
            return False
        group = control.result(0)
        wrong = max(abs(value - self._work.mean) for value in bounds(self._averager))
        return len(group or {}) == self._work.nodes and wrong < TOLERANCE

    def close(self) -> None:
        """See Way."""
        self._averager.shutdown()
        self._dht.shutdown()


def device_of(address: str) -> str:
    """The network device with this address. Raises: ValueError."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in found):
            return name
    raise ValueError(f"no device has the address {address}")


def train(way: Way, work: Work, ended: threading.Event) -> None:
    """Inner steps until the input ends."""
    step, stood_s = 0, 0.0
    while not ended.wait(work.step_s):
        step += 1
        began_s = time.monotonic()
        way.after(step)
        now_s = time.monotonic()
        stood_s += now_s - began_s
        if step % work.inner_steps == 0:
            print("cycle", step, now_s, stood_s, way.tally.good, way.tally.bad, flush=True)


def main(words: Sequence[str]) -> int:
    """`words`: the work, as JSON."""
    torch.set_num_threads(1)
    work = msgspec.json.decode(words[0], type=Work)
    go, ended = threading.Event(), threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "go":
                go.set()
        ended.set()
        go.set()
        if work.way != "opendiloco":
            os._exit(0)  # an all-reduce whose others have left never returns, and nothing is to be removed

    way: Way = OpenDiLoCo(work, ended) if work.way == "opendiloco" else Torchft(work)
    # Not before: hivemind forks, and a child that closes our input would wait for the reader's lock for ever.
    threading.Thread(target=listen, daemon=True).start()
    try:
        print("ready", flush=True)
        go.wait()
        train(way, work, ended)
    finally:
        way.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
