"""Figures for Prometheus: what the page shows, as numbers with units in their names (docs/topics/metrics.md).

Made when somebody asks, from the same view as the page; nothing is counted for them otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.release import VERSION
from p2pdiloco.web.sources import Views
from p2pdiloco.web.view import MemberCondition, NodeCondition, OwnView, PublicView, Pulse, RunView

PREFIX = "p2pdiloco_"
Value = float | int | None
Samples = Iterable[tuple[tuple[str, ...], Value]]


class Figure(Struct, frozen=True):
    """Metric of the table."""

    name: str
    """Name with unit, without prefix. Those that begin with `run_` are about the run, so that anybody may see
    them where the page is public; those that end in `_total` count, and only grow while the program runs."""
    help: str
    samples: Callable[[PublicView, OwnView], Samples]
    labels: tuple[str, ...] = ()
    """Labels beside `run`, which is the id of the run."""

    @property
    def is_public(self) -> bool:
        """True: it says nothing of the program or its machine."""
        return self.name.startswith("run_")

    @property
    def counts(self) -> bool:
        """True: it is a counter."""
        return self.name.endswith("_total")


def _one(get: Callable[[PublicView], Value]) -> Callable[[PublicView, OwnView], Samples]:
    return lambda public, _own: [((), get(public))]


def _own(get: Callable[[OwnView], Value]) -> Callable[[PublicView, OwnView], Samples]:
    return lambda _public, own: [((), get(own))]


def _age(public: PublicView, at_s: float | None) -> Value:
    return None if at_s is None else max(0.0, public.made_at_s - at_s)


def _left(public: PublicView, at_s: float | None) -> Value:
    return None if at_s is None else max(0.0, at_s - public.made_at_s)


def _states(public: PublicView, _own: OwnView) -> Samples:
    states = [member.state for member in public.members]
    return [((word.value,), states.count(word)) for word in MemberCondition]


FIGURES = (
    Figure(
        "run_pulse",
        "1 for the word of the run's pulse (docs/topics/web.md), 0 for all others.",
        lambda public, _own: [((word.value,), public.pulse is word) for word in Pulse],
        ("pulse",),
    ),
    Figure(
        "run_version_age_seconds",
        "Age of the newest version, of whatever fragment.",
        _one(lambda public: _age(public, public.newest.at_s)),
    ),
    Figure(
        "run_version_interval_seconds",
        "Usual time between two versions.",
        _one(lambda public: public.newest.usual_s),
    ),
    Figure(
        "run_last_merge_contributors",
        "Members whose work is in the newest version.",
        _one(lambda public: public.newest.contributors),
    ),
    Figure(
        "run_versions_total",
        "Versions of all fragments together.",
        _one(lambda public: public.progress.versions),
    ),
    Figure(
        "run_merged_tokens_total",
        "Tokens merged, the mean over fragments.",
        _one(lambda public: public.progress.tokens),
    ),
    Figure(
        "run_schedule_tokens",
        "Length of the schedule in tokens.",
        _one(lambda public: public.progress.schedule_tokens or None),
    ),
    Figure(
        "run_left_seconds",
        "Time to the end of the schedule at the present pace.",
        _one(lambda public: _left(public, public.progress.ends_at_s)),
    ),
    Figure(
        "run_tokens_per_second",
        "Tokens that all members together train on, as they say.",
        _one(lambda public: public.progress.tokens_per_s),
    ),
    Figure(
        "run_heldout_loss_nats",
        "Held-out loss of the result, nats per token.",
        _one(lambda public: public.heldout_loss),
    ),
    Figure(
        "run_heldout_loss_age_seconds",
        "Age of the held-out loss.",
        _one(lambda public: _age(public, public.heldout_at_s)),
    ),
    Figure(
        "run_training_loss_nats",
        "Mean training loss of the members that said one.",
        _one(lambda public: public.training_loss),
    ),
    Figure("run_members", "Members by state, of those that are listed.", _states, ("state",)),
    Figure("run_members_known", "Members of the run.", _one(lambda public: public.members_total)),
    Figure(
        "run_excluded_members",
        "Peers that are shown to have lied.",
        _one(lambda public: len(public.excluded)),
    ),
    Figure(
        "node_state",
        "1 for the word of the node's state (docs/topics/web.md), 0 for all others.",
        lambda _public, own: [((word.value,), own.state is word) for word in NodeCondition],
        ("state",),
    ),
    Figure(
        "node_resting",
        "1 while the owner of the machine, or a rule of theirs, keeps it from training.",
        _own(lambda own: bool(own.rest)),
    ),
    Figure("node_inner_steps_total", "Inner steps of the learner.", _own(lambda own: own.me.inner_step)),
    Figure("node_trained_tokens_total", "Tokens trained on.", _own(lambda own: own.me.tokens_total)),
    Figure(
        "node_tokens_per_second",
        "Tokens trained on a second.",
        _own(lambda own: own.me.tokens_per_s),
    ),
    Figure("node_step_seconds", "Length of an inner step.", _own(lambda own: own.step_time_s)),
    Figure(
        "node_training_loss_nats",
        "Training loss, nats per token.",
        _own(lambda own: own.me.loss),
    ),
    Figure(
        "node_contributions_merged_total",
        "Contributions of this node that were merged.",
        _own(lambda own: own.work.merged),
    ),
    Figure(
        "node_contributed_tokens_total",
        "Tokens of the contributions that were merged, over all fragments.",
        _own(lambda own: own.work.merged_tokens),
    ),
    Figure(
        "node_contributions_waiting",
        "Contributions that are made and not merged yet.",
        _own(lambda own: own.waiting),
    ),
    Figure(
        "node_contributions_given_up_total",
        "Contributions given up for good.",
        _own(lambda own: own.work.given_up),
    ),
    Figure(
        "node_contributions_refused_total",
        "Refusals of contributions, by the syncer's reason.",
        lambda _public, own: [((reason,), count) for reason, count in own.work.refused.items()],
        ("reason",),
    ),
    Figure(
        "node_weight_share",
        "Weight of this node's work beside a usual member's, 0 to 1 (docs/protocol/weights.md, section 5).",
        lambda public, _own: [((), member.weighs) for member in public.members if member.is_me],
    ),
    Figure(
        "node_refusals_total",
        "Refusals of what peers sent, by reason.",
        lambda _public, own: [((reason,), count) for reason, count in own.refusals.items()],
        ("reason",),
    ),
    Figure(
        "node_expelled_members",
        "Members whose work this node refuses by its loss audits, by what these have shown.",
        lambda _public, own: [((each.value,), own.expelled.get(each, 0)) for each in LossFinding],
        ("reason",),
    ),
    Figure(
        "node_sent_bytes_total", "Bytes sent: messages and payloads.", _own(lambda own: own.link.sent_bytes)
    ),
    Figure(
        "node_received_bytes_total", "Bytes of payloads received.", _own(lambda own: own.link.received_bytes)
    ),
    Figure(
        "node_uplink_bits_per_second",
        "Rate that the uplink carries, as far as it is known.",
        _own(lambda own: own.link.known_up_bits_per_s),
    ),
    Figure(
        "node_link_behind",
        "1 while the link does not keep up with what the run asks.",
        _own(lambda own: bool(own.link.words)),
    ),
    Figure(
        "node_offices",
        "Fragments whose syncer this node is.",
        lambda public, own: [((), sum(row.syncer == own.me.peer for row in public.fragments))],
    ),
)
OF_EVERY_PROGRAM = ("node_state", "node_sent_bytes_total", "node_received_bytes_total")
"""Figures of a node that a bootstrap has, too."""
NONE_YET = PublicView(run_name="", run_id="", made_at_s=0.0)


class _Runs(Collector):
    """Figures of all runs that a program serves."""

    def __init__(self, views: Views, shows_all: bool) -> None:
        self._views, self._shows_all = views, shows_all

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            PREFIX + "build", "1, with the release as a label.", labels=["version", "role"]
        )
        views = list(self._all())
        for view in views[:1]:
            build.add_metric([VERSION, view.role], 1)
        yield build
        for figure in FIGURES:
            if figure.is_public or self._shows_all:
                yield _family(figure, views)

    def _all(self) -> Iterator[RunView]:
        first = self._views.view("", self._shows_all)
        if first is None:
            return
        yield first
        for choice in first.runs:
            if first.public is None or choice.run_id != first.public.run_id:
                view = self._views.view(choice.run_id, self._shows_all)
                if view is not None:
                    yield view


def _family(figure: Figure, views: Iterable[RunView]) -> Metric:
    kind = CounterMetricFamily if figure.counts else GaugeMetricFamily
    family = kind(PREFIX + figure.name, figure.help, labels=["run", *figure.labels])
    for view in views:
        if figure.is_public:
            if view.public is None:
                continue
        elif view.own is None or (view.role != "node" and figure.name not in OF_EVERY_PROGRAM):
            continue
        public, own = view.public or NONE_YET, view.own or OwnView(state=NodeCondition.JOINING)
        for labels, value in figure.samples(public, own):
            if value is not None:
                family.add_metric([public.run_id, *labels], float(value))
    return family


class Metrics:
    """Figures of a program, for whoever asks."""

    def __init__(self, views: Views) -> None:
        self._all, self._public = CollectorRegistry(), CollectorRegistry()
        self._all.register(_Runs(views, True))
        self._public.register(_Runs(views, False))
        ProcessCollector(registry=self._all)

    def exposition(self, is_owner: bool) -> bytes:
        """Make the text that Prometheus reads."""
        return generate_latest(self._all if is_owner else self._public)
