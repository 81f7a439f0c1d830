"""Watch over the swarm of a chaos run: the nodes' logs, read while they grow."""

from __future__ import annotations

from collections.abc import Sequence

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.demo.judge import read_saved
from p2pdiloco.demo.swarm import Chronicle, SwarmNode, Tail, conflicts, of_traces
from p2pdiloco.errors import StorageError
from p2pdiloco_lab.chaos.facts import Act, Facts


class SwarmWatch:
    """Facts of all nodes, up to date after every `read`."""

    def __init__(self, fragments: int) -> None:
        self._log = Chronicle(fragments)
        self.facts = Facts(self._log)
        self._tails: list[Tail] = []

    def meet(self, node: SwarmNode) -> None:
        """Read this node's log from now on."""
        self._log.meet(node.name, node.peer)
        self._tails.append(Tail(node.events, node.name))

    def knows(self, name: str) -> bool:
        """Tell whether the node was met."""
        return name in self._log.nodes

    def read(self, acts: Sequence[Act]) -> None:
        """Take in what the nodes wrote since, and what was done to them."""
        for tail in self._tails:
            for line in tail.lines():
                self.facts.feed(line)
        self.facts.acts += acts

    # --- questions -----------------------------------------------------------------------------------

    def trains(self, name: str) -> bool:
        """Tell whether the node's learner runs and nothing is done to it at present."""
        last = next((act.state for act in reversed(self.facts.acts) if act.node == name), "")
        return last in ("training", "resumed")

    def heads(self) -> dict[int, int]:
        """Fragment -> newest version number that any node ever held."""
        traces = self._log.nodes.values()
        return {f: max((t.head(f) for t in traces), default=0) for f in range(self._log.fragments)}

    def status(self, nodes: Sequence[SwarmNode], since_s: float) -> str:
        """One line for people."""
        recent = [merge for merge in self._log.merges[-500:] if merge.mono > since_s]
        if not recent:
            return "waiting for the first merges"
        mean = sum(merge.contributors for merge in recent) / len(recent)
        alive = sum(self.trains(node.name) for node in nodes)
        return f"{alive} of {len(nodes)} nodes train, {mean:.1f} contributors a merge"

    def not_back(self, nodes: Sequence[SwarmNode]) -> list[str]:
        """Nodes of whose work nothing was merged since they were last struck, in words."""
        struck_s = {act.node: act.at_s for act in self.facts.acts}
        return [
            f"{node.name}: nothing of it is merged since it was last struck"
            for node in nodes
            if max((line.mono for line in self._log.nodes[node.name].merged), default=0.0)
            < struck_s.get(node.name, 0.0)
        ]

    def not_agreed(self, nodes: Sequence[SwarmNode], heads: dict[int, int]) -> list[str]:
        """Fragments of which not all nodes hold one version, newer than these, with equal digests."""
        chains = [self._log.nodes[node.name].chains for node in nodes]
        missing = []
        for fragment, head in heads.items():
            held = [{item for item in chain.get(fragment, {}).items() if item[0] > head} for chain in chains]
            if not set.intersection(*held):
                without = [node.name for node, have in zip(nodes, held, strict=True) if not have]
                who = f"nothing new at {', '.join(without)}" if without else "no common version"
                missing.append(f"fragment {fragment}: {who} after version {head}")
        return missing

    def disagreements(self, manifest: Manifest, nodes: Sequence[SwarmNode]) -> list[str]:
        """Find disagreements in the logs of these nodes, who have ended, and between the bytes that they
        saved.

        A node that is gone for good does not count: perhaps nobody heard of its last version.
        """
        found, _ = conflicts(of_traces(self._log.nodes[node.name] for node in nodes))
        found += self._log.wrong_digests()
        saved = []
        for node in nodes:
            try:
                saved.append(read_saved(manifest, node.name, node.data_dir))
            except StorageError as error:
                found.append(f"{node.name}: {error}")
        found += [f"{s.holdings.name} saved other bytes of fragment {f}" for s in saved for f in s.unsound]
        return found + conflicts([s.holdings for s in saved])[0]
