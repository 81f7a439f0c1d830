"""A process of bench_averaging.py: a peer of hivemind's averager, told by stdin what to do.

Prints `address A` and `ready`; `matched` for every `match` (a group is found); for every `go`, once the group
is averaged, `done`, the group's size, the least and the largest value of all tensors, and the monotonic time.
Ends with its input.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import Float16Compression
from hivemind.utils import get_dht_time

LISTEN = "/ip4/127.0.0.1/tcp/0"
HIVEMIND_TIMEOUT_S = 60.0
MATCHMAKING_S = 3.0


def averager_of(numels: Sequence[int], dht: DHT, peers: int) -> DecentralizedAverager:
    """Averages tensors of these sizes in fp16, in groups of all the peers."""
    return DecentralizedAverager(
        [torch.zeros(numel) for numel in numels],
        dht,
        start=True,
        prefix="bench",
        target_group_size=peers,
        min_group_size=peers,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=2.0,
        compression=Float16Compression(),
    )


def look_for_group(averager: DecentralizedAverager, timeout_s: float) -> StepControl:
    """Matchmaking begins; the all-reduce does not, until it is allowed."""
    return averager.step(
        wait=False,
        require_trigger=True,
        scheduled_time=get_dht_time() + MATCHMAKING_S,
        timeout=timeout_s,
    )


def matched(control: StepControl) -> bool:
    """Tell whether there is a group, or will never be."""
    return bool(control.stage == AveragingStage.AWAITING_TRIGGER or control.done())


def fill(averager: DecentralizedAverager, value: float) -> None:
    """Fill all tensors with this value."""
    with averager.get_tensors() as tensors:
        for tensor in tensors:
            tensor.fill_(value)


def bounds(averager: DecentralizedAverager) -> tuple[float, float]:
    """The least and the largest value of all tensors."""
    with averager.get_tensors() as tensors:
        return min(float(t.min()) for t in tensors), max(float(t.max()) for t in tensors)


def main(numels: str, join: str, peers: str, value: str) -> int:
    """Tensors of these sizes, averaged in fp16 by groups of `peers`. `value`: what is in all of them before
    each averaging; what is in them afterwards is said with `done`."""
    torch.set_num_threads(1)
    dht = DHT(initial_peers=[join] if join else [], host_maddrs=[LISTEN], start=True)
    averager = averager_of([int(numel) for numel in numels.split(",")], dht, int(peers))
    print(f"address {dht.get_visible_maddrs()[0]}", flush=True)
    print("ready", flush=True)
    control = None
    for line in sys.stdin:
        if line.strip() == "match":
            fill(averager, float(value))
            control = look_for_group(averager, HIVEMIND_TIMEOUT_S)
            while not matched(control):
                time.sleep(0.005)
            print("matched", flush=True)
        elif control is not None:
            control.allow_allreduce()
            group = control.result(HIVEMIND_TIMEOUT_S)
            ended_s = time.monotonic()
            low, high = bounds(averager)
            print("done", len(group or {}), low, high, ended_s, flush=True)
    averager.shutdown()
    dht.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
