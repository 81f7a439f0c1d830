"""`python -m attacks.attacker WORK`: process of strangers that attack a run.

Prints `ready` and their peer ids when they are connected, begins with the line `go`, and prints what it did
as JSON at the end of its time, or of its input.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter

import msgspec
import uvloop

from attacks.stranger import Attack, Work
from attacks.table import BY_STRANGERS


async def line() -> str:
    """Read a line of the input; empty at its end."""
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def main(work: Work) -> None:
    """Attack."""
    await carry_out(BY_STRANGERS[work.attack](work), work)


async def carry_out(attack: Attack, work: Work) -> None:
    """Start the strangers of an attack, and let them attack for the time that they have."""
    # hivemind's tasks complain of connections that end
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    done: Counter[str] = Counter()
    try:
        for stranger in attack.strangers:
            await stranger.start()
        print("ready", *(stranger.id for stranger in attack.strangers), flush=True)
        if await line():
            try:
                async with asyncio.timeout(work.seconds):
                    await attack.attack()
            except TimeoutError:
                done["seconds"] = round(work.seconds)
        for stranger in attack.strangers:
            done.update(stranger.done)
        print(json.dumps(done), flush=True)
    finally:
        for stranger in attack.strangers:
            await stranger.transport.close()


if __name__ == "__main__":
    logging.disable()
    uvloop.run(main(msgspec.json.decode(sys.argv[1], type=Work)))
