"""Speed of fragments between two nodes: our streams, a bare stream over the same p2pd, bare TCP.

    .venv/bin/python scripts/bench/bench_transfer.py [--rounds 7] [--mebibytes 64] [--json FILE]

Two processes on loopback, each with a p2pd of its own, as nodes have. In every round the same bytes are
fetched three ways, one after another: by `pull` (windows, acknowledgements, checksums), by reading a libp2p
stream that the other side writes to as fast as it can, and over a plain TCP connection. All three put them
into memory that is there already, since fresh memory costs much of a transfer. Ratios are of one round. The
processor time of both processes is counted, not that of the two p2pd.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from benchkit import arguments, finish, spread, table
from p2pdiloco.adapters.framing import ByteReader, ByteWriter
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PullSource, PushSink, Refusal

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
PIECE = 256 * 1024
BARE, FRAMED, CPU = b"bare", b"framed", b"cpu"


def cpu_s() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Holder:
    """Serves as many bytes as the request asks for."""

    def __init__(self) -> None:
        self.bare = False
        self.content = bytes(PIECE)

    def is_member(self, sender: str) -> None:
        return None

    async def on_message(self, sender: str, data: bytes) -> bytes:
        if data in (BARE, FRAMED):
            self.bare = data == BARE
        return b"%.6f" % cpu_s()

    async def on_push(self, sender: str, header: bytes) -> PushSink | Refusal:
        return Refusal(b"")

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        return PullSource(b"header", [self.content] * (int(request) // PIECE), lambda: None)


class Kept:
    """A `PullSink` in memory that is there already."""

    def __init__(self, room: memoryview) -> None:
        self.room = room
        self.have_bytes = 0

    def begin(self, header: bytes, payload_bytes: int) -> None:
        assert payload_bytes == len(self.room)

    def write(self, offset: int, chunk: memoryview) -> None:
        self.room[offset : offset + len(chunk)] = chunk
        self.have_bytes = offset + len(chunk)


class Bench(HivemindTransport):
    """A transport whose streams can be had bare."""

    holder: Holder | None = None

    async def _serve_stream(self, sender: str, reader: ByteReader, writer: ByteWriter) -> None:
        if self.holder is None or not self.holder.bare:
            await super()._serve_stream(sender, reader, writer)
            return
        await send_bare(reader, writer)

    async def fetch_bare(self, peer: str, room: memoryview) -> None:
        """Fill the room from a bare stream."""
        await receive_bare(*await self._open(peer, 5.0), room)


async def send_bare(reader: ByteReader, writer: ByteWriter) -> None:
    """Write as many bytes as the other side asks for."""
    size = int((await reader.read(64)).decode())
    content = bytes(PIECE)
    for _ in range(size // PIECE):
        writer.write(content)
        await writer.drain()
    await reader.read(1)
    writer.close()


async def receive_bare(reader: ByteReader, writer: ByteWriter, room: memoryview) -> None:
    """Ask for as many bytes as there is room for, and read them."""
    writer.write(b"%d" % len(room))
    have = 0
    while have < len(room):
        piece = await reader.read(min(PIECE, len(room) - have))
        if not piece:
            raise ConnectionError("cut")
        room[have : have + len(piece)] = piece
        have += len(piece)
    writer.close()


async def transport(folder: Path, handlers: Holder, initial: tuple[str, ...] = ()) -> Bench:
    """A started transport."""
    identity = Identity.load_or_create(folder / "identity.key")
    made = Bench(identity, folder / "identity.key", folder, LISTEN, initial_peers=initial)
    made.holder = handlers
    await made.start(handlers)
    return made


async def serve(folder: Path) -> None:
    """The other process: until its standard input ends."""
    made = await transport(folder, Holder())
    server = await asyncio.start_server(send_bare, "127.0.0.1", 0, limit=2 * PIECE)
    print(made.addresses()[-1], server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()
    await made.close()


async def fetch(folder: Path, address: str, port: int, rounds: int, size: int) -> dict[str, list[float]]:
    """MB/s and processor seconds per GB of each way, a value for each round."""
    client = await transport(folder, Holder(), (address,))
    peer = address.rpartition("/")[2]
    room = memoryview(bytearray(size))

    async def framed() -> None:
        await client.send(peer, FRAMED, 5.0)
        sink = Kept(room)
        assert await client.pull_into(peer, b"%d" % size, sink, 20.0) is None and sink.have_bytes == size

    async def bare() -> None:
        await client.send(peer, BARE, 5.0)
        await client.fetch_bare(peer, room)

    async def tcp() -> None:
        await receive_bare(*await asyncio.open_connection("127.0.0.1", port, limit=2 * PIECE), room)

    ways: dict[str, Callable[[], Awaitable[None]]] = {"framed": framed, "bare": bare, "tcp": tcp}
    found: dict[str, list[float]] = {f"{way}{what}": [] for way in ways for what in ("", "_cpu")}
    for number in range(rounds + 1):
        for way, work in ways.items():
            there = float(await client.send(peer, CPU, 5.0))
            here, start = cpu_s(), time.perf_counter()
            await work()
            taken = time.perf_counter() - start
            used = cpu_s() - here + float(await client.send(peer, CPU, 5.0)) - there
            if number:  # the first of all opens windows and warms caches
                found[way].append(size / taken / 1e6)
                found[f"{way}_cpu"].append(used / size * 1e9)
    await client.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--serve", type=Path)
    args = parser.parse_args()
    if args.serve is not None:
        uvloop.run(serve(args.serve))
        return
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-bench-") as text:
        ours, theirs = Path(text) / "a", Path(text) / "b"
        ours.mkdir()
        theirs.mkdir()
        command = [sys.executable, __file__, "--serve", str(theirs)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            try:
                assert other.stdout is not None
                address, port = other.stdout.readline().split()
                size = args.mebibytes << 20
                found = uvloop.run(fetch(ours, address, int(port), args.rounds, size))
            finally:
                assert other.stdin is not None
                other.stdin.close()
    figures = {name: spread(values) for name, values in found.items()}
    of_bare = [a / b for a, b in zip(found["framed"], found["bare"], strict=True)]
    of_tcp = [a / b for a, b in zip(found["framed"], found["tcp"], strict=True)]
    figures |= {"of_bare": spread(of_bare), "of_tcp": spread(of_tcp)}
    rows = [(way, figures[way]) for way in ("framed", "bare", "tcp")]
    print(table([(f"{name}, MB/s", values) for name, values in rows], ""))
    print(table([(f"{way}, CPU-s per GB", figures[f"{way}_cpu"]) for way in ("framed", "bare", "tcp")], ""))
    print(table([("framed / bare", figures["of_bare"]), ("framed / tcp", figures["of_tcp"])], ""))
    finish("transfer", {"mebibytes": args.mebibytes, **figures}, args.json)


if __name__ == "__main__":
    main()
