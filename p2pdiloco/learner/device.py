"""Where the model lives and in which precision it computes."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch

from p2pdiloco.errors import UserError

ACCELERATOR_MICRO_BATCH_TOKENS = 16_384


def choose_device(wanted: str) -> torch.device:
    """ "auto" is the best that this machine has: cuda, then mps, then cpu; else a device by torch's name.

    Raises:
        UserError: no such device here.
    """
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f'the device "{wanted}" cannot be used: {first_line}', "use --device auto, cpu, cuda or mps"
        ) from error
    return device


def configure(device: torch.device, threads: int) -> int:
    """Set torch's CPU threads (0: leave them) and matmul precision; returns the threads in use."""
    if threads > 0:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    return torch.get_num_threads()


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bf16 where the device computes in it, else nothing: parameters and gradients stay fp32."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def step_back(niceness: int) -> None:
    """Let everything else on this machine go first: the daemon's answers, and whatever else its user does.

    Linux groups processes by session and shares the cores between the groups; the niceness of a process
    counts only within its group. The learner is a session of its own, so the group has to step back too.
    """
    os.nice(niceness)
    group = Path("/proc/self/autogroup")
    if niceness and group.exists() and os.getsid(0) == os.getpid():
        try:
            group.write_text(str(niceness))
        except OSError as error:  # the kernel rate-limits such changes: then it is the processes' alone
            print(f"the session's niceness stays as it is: {error}", file=sys.stderr)


def micro_batch_tokens(device: torch.device, wanted: int, tokens_per_step: int) -> int:
    """Tokens of one forward and backward pass: as wanted, or all at once (16k on an accelerator)."""
    if wanted > 0:
        return min(wanted, tokens_per_step)
    if device.type == "cpu":
        return tokens_per_step
    return min(ACCELERATOR_MICRO_BATCH_TOKENS, tokens_per_step)
