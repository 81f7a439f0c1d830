"""A session in this process, with a daemon of paper that merges its work with that of pretended others."""

import os
import socket

import torch
from torch import nn

from p2pdiloco.learner.channel import (
    Applied,
    BaseRef,
    CopiedOut,
    Deframer,
    Install,
    LearnerOptions,
    Start,
    decode_event,
    frame,
)
from p2pdiloco.session import Session, new_run
from p2pdiloco.tasks.registry import load_manifest, task_of
from p2pdiloco.tensors.layout import Exchange, gather, plan_fragments

torch.set_num_threads(1)
INNER_STEPS, TOKENS = 10, 64


def network():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


def samples():
    inputs = torch.randn(64, 16)
    return inputs, inputs[:, :4].sum(1, keepdim=True).sin()


class PaperDaemon:
    """Daemon whose other member contributes `others(base)` to every version."""

    adopted = False

    def __init__(self, folder, model, others=torch.zeros_like, fragments=2):
        """The run begins at `model`'s parameters."""
        sync = {"inner_steps": INNER_STEPS, "fragments": fragments}
        self.manifest = load_manifest(new_run(model, folder / "run.toml", "paper", TOKENS, **sync))
        self.layouts = plan_fragments(task_of(self.manifest).specs(), fragments)
        self.exchange = Exchange.create(self.layouts)
        for layout in self.layouts:
            gather(dict(model.named_parameters()), layout, self.exchange.base(layout.index, 0))
        self.bases = [BaseRef(0, 0) for _ in self.layouts]
        self._others = others
        self.contributed, self.ended = [], False
        self._mine, self._theirs = socket.socketpair()
        self._mine.setblocking(False)
        self._deframer = Deframer()

    def post(self, command):
        self._mine.sendall(frame(command))

    def serve(self):
        """Merge what was copied out since the last call; returns the other events."""
        try:
            data = self._mine.recv(1 << 20)
        except BlockingIOError:
            return []
        events = [decode_event(body) for body in self._deframer.feed(data)]
        for event in events:
            if isinstance(event, CopiedOut):
                self._merge(event.fragment)
            elif isinstance(event, Applied):
                buffer = 1 - self.bases[event.fragment].buffer
                self.bases[event.fragment] = BaseRef(event.number, buffer)
        return [event for event in events if not isinstance(event, CopiedOut | Applied)]

    def _merge(self, fragment):
        old = self.bases[fragment]
        base = self.exchange.base(fragment, old.buffer)
        self.contributed.append(base - self.exchange.sent(fragment))
        mean = (self.contributed[-1] + self._others(base)) / 2
        self.exchange.base(fragment, 1 - old.buffer).copy_(base - mean)
        self.post(Install(fragment, old.number + 1, 1 - old.buffer, "merged", 0))

    # --- as a session asks its daemon ----------------------------------------------------------------

    def connect(self, words, until):
        self.post(Start(self.manifest, LearnerOptions(peer="me"), tuple(self.bases)))
        return self._theirs, os.dup(self.exchange.fd)

    def check(self, until): ...

    def tell_addresses(self, run): ...

    def terminate(self):
        self.ended = True
        return False

    def end(self, patience_s):
        self.ended = True
        self._mine.close()
        self.exchange.close()


def begin(monkeypatch, daemon, model, optimizer, **more):
    monkeypatch.setattr("p2pdiloco.session.SessionDaemon", lambda folder: daemon)
    return Session(model, optimizer, "paper", data_dir="none", **more)


def train(session, daemon, step, steps):
    """Inner steps of a program, whose own part is `step()`; returns how many were followed by a merge."""
    merges = 0
    for _ in range(steps):
        assert session.step(TOKENS, step())
        merges += session.merged
        daemon.serve()
    return merges
