"""What the learner's tests share: a micro run, its corpus, and a learner without a process."""

import functools
import socket

import torch

from p2pdiloco.config.presets import MICRO
from p2pdiloco.learner.channel import BaseRef, Deframer, LearnerEnd, PassOptions, decode_event, frame
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.loop import Training, heldout_batch
from p2pdiloco.learner.mailbox import Mailbox, Stillness
from p2pdiloco.learner.optimizer import HeldParameters
from p2pdiloco.learner.ranks import accelerators
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import Exchange, gather, plan_fragments

torch.set_num_threads(1)

DEVICES = ("cpu", *accelerators())
"""That are here: a machine with a GPU tests what only they do, too."""
TASK = task_of(MICRO)
LAYOUTS = plan_fragments(TASK.specs(), MICRO.sync.fragments)
BASES = tuple(BaseRef(0, 0) for _ in LAYOUTS)


@functools.cache
def data():
    return TASK.load_data(None)


def filled_exchange(manifest=MICRO):
    """An exchange with version 0 in every base buffer 0."""
    task = task_of(manifest)
    layouts = plan_fragments(task.specs(), manifest.sync.fragments)
    exchange = Exchange.create(layouts)
    parameters = task.initial_parameters()
    for layout in layouts:
        gather(parameters, layout, exchange.base(layout.index, 0))
    return exchange


class Bench:
    """A learner in this process, with a socket pair to a pretended daemon."""

    def __init__(self, manifest=MICRO, device="cpu"):
        self.exchange = filled_exchange(manifest)
        task = task_of(manifest)
        model = task.model().to(device)
        self.device = torch.device(device)
        self.still = Stillness(self.device)
        self.training = Training(
            task,
            model,
            data().train,
            "peer-a",
            options=PassOptions(precision="fp32"),
            meanwhile=self.still.meanwhile,
        )
        self.fragments = Fragments(
            HeldParameters(named_parameters(model)),
            LAYOUTS,
            self.exchange,
            BASES,
            manifest.sync.inner_steps,
            1.0,
        )
        self.fragments.scatter_bases(named_parameters(model))
        self.daemon, theirs = socket.socketpair()
        self.daemon.setblocking(False)
        self.channel = LearnerEnd(theirs)
        self._theirs = theirs
        self._deframer = Deframer()
        heldout = heldout_batch(task, data().heldout, 1024)
        self.mailbox = Mailbox(
            self.channel,
            self.training,
            self.fragments,
            heldout,
            lambda: task.model().to(self.device),
            1000.0,
        )

    def post(self, command):
        self.daemon.send(frame(command))

    def step(self):
        """Make an inner step, and what is to be done at its boundary; whether it goes on."""
        return self.mailbox.boundary(self.training.step())

    def events(self, kind=object):
        try:
            data = self.daemon.recv(1 << 20)
        except BlockingIOError:
            return []
        found = map(decode_event, self._deframer.feed(data))
        return [event for event in found if isinstance(event, kind)]

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.training.model.named_parameters()}

    def close(self):
        self.daemon.close()
        self._theirs.close()
        self.exchange.close()


def training_of(manifest=MICRO, device="cpu", **options):
    """A training that starts at version 0 and has nothing but a loop. `options`: of its passes."""
    task = task_of(manifest)
    model = task.model().to(device)
    model.load_state_dict(task.initial_parameters())
    options = PassOptions(**{"precision": "fp32"} | options)
    return Training(task, model, data().train, "peer-a", options=options)


def losses_of(training, steps):
    return [training.step().loss for _ in range(steps)]


def alone(steps, manifest=MICRO, device="cpu", **options):
    """A training, and its losses in so many steps."""
    training = training_of(manifest, device, **options)
    return training, losses_of(training, steps)
