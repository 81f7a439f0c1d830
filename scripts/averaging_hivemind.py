"""A process of bench_averaging.py: a peer of hivemind's averager, told by stdin what to do.

Prints `address A` and `ready`; `matched` for every `match` (a group is found); for every `go`, once the group
is averaged, `done`, the group's size, the least and the largest value of all tensors, and the monotonic time.
Ends with its input.
"""

from __future__ import annotations

import sys
import time

import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression
from hivemind.utils import get_dht_time

LISTEN = "/ip4/127.0.0.1/tcp/0"
HIVEMIND_TIMEOUT_S = 60.0


def main(numels: str, join: str, peers: str, value: str) -> int:
    """Tensors of these sizes, averaged in fp16 by groups of `peers`. `value`: what is in all of them before
    each averaging; what is in them afterwards is said with `done`."""
    torch.set_num_threads(1)
    dht = DHT(initial_peers=[join] if join else [], host_maddrs=[LISTEN], start=True)
    averager = DecentralizedAverager(
        [torch.zeros(int(numel)) for numel in numels.split(",")],
        dht,
        start=True,
        prefix="bench",
        target_group_size=int(peers),
        min_group_size=int(peers),
        min_matchmaking_time=3.0,
        request_timeout=2.0,
        compression=Float16Compression(),
    )
    print(f"address {dht.get_visible_maddrs()[0]}", flush=True)
    print("ready", flush=True)
    control = None
    for line in sys.stdin:
        if line.strip() == "match":
            with averager.get_tensors() as tensors:
                for tensor in tensors:
                    tensor.fill_(float(value))
            control = averager.step(
                wait=False,
                require_trigger=True,
                scheduled_time=get_dht_time() + 3.0,
                timeout=HIVEMIND_TIMEOUT_S,
            )
            while control.stage != AveragingStage.AWAITING_TRIGGER and not control.done():
                time.sleep(0.005)
            print("matched", flush=True)
        elif control is not None:
            control.allow_allreduce()
            group = control.result(HIVEMIND_TIMEOUT_S)
            ended_s = time.monotonic()
            with averager.get_tensors() as tensors:
                low, high = min(float(t.min()) for t in tensors), max(float(t.max()) for t in tensors)
            print("done", len(group or {}), low, high, ended_s, flush=True)
    averager.shutdown()
    dht.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
