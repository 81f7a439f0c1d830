"""Seeds that once failed, each with what was wrong. They are played again with every test run.

What a seed means changes when the simulator draws something new, so an old one may have lost its point; then
it is still one seed more."""

from __future__ import annotations

PAST_FAILURES: tuple[tuple[int, str | None, int | None, str], ...] = (
    # (seed, mix, nodes, what was wrong)
    (17, "calm", None, "two offices at once while a swarm grew: the holder is re-elected first"),
    (30043, "partition", None, "a merged and forgotten contribution made the learner drop unmerged steps"),
    (1084, None, None, "on a slow disk a candidate stood in ever new terms, whose votes queued up"),
    (1106, None, None, "simulator: a node was killed just after the faults had stopped"),
    (200579, None, None, "who took office later than a member thought was suspected for ever"),
    (201027, None, None, "two left at one time, each with a version that the one who stayed never saw"),
    (
        5610,
        None,
        None,
        "a member of the chain's table that was listed, but never heard, brought another chain",
    ),
    (13360, None, None, "after one damaged payload the only holder was not asked again for half a minute"),
    (15382, None, None, "merged work that a fork sent again was given up after one damaged payload"),
    (17270, None, None, "who was elected beforehand on one side of a split kept out the other side's syncer"),
    (2883, None, None, "simulator: a stream whose last byte was under way for minutes was never given up"),
    (12430, None, None, "simulator: who stood still when it was asked to leave had the less time for it"),
    (936, None, None, "simulator: a learner that changed its pace while it stood still ran backwards"),
    (99, "storm", None, "who restarted alone knew of nobody who might come back with another chain"),
    (
        7005,
        "partition",
        None,
        "the old syncer waited for its term's last version beside the one elected beforehand",
    ),
    (
        7034,
        "partition",
        None,
        "members of other groups were not asked what they have: merged work was forgotten",
    ),
    (1163, None, None, "the syncer with the thinnest uplink merged alone, term after term"),
    (
        42168,
        "storm",
        None,
        "a payload got there, its answer did not: taken up again, it cost the rest",
    ),
    (47306, None, None, "a learner that was slowed down and up again between two reports was thought to lag"),
    (42225, "storm", None, "a partial merge came many versions late, when its part had been taken up again"),
    (41216, "churn", None, "a partial merge had what its syncer took to be in its own inbox only"),
    (
        810002,
        "partition",
        None,
        "a syncer's version was lost in a fork: it waited for what its member thought it still had, for ever",
    ),
    (820410, "partition", None, "a head was said in just those heartbeats that reached nobody"),
    (
        810423,
        "storm",
        None,
        "a leaf group's holder without a vote kept its office, and the group above had none",
    ),
    (2266, None, None, "a genesis node on a thin uplink made versions faster than newcomers could take them"),
    (39, "wan", 5, "one whose uplink just sufficed did so, too"),
    (1000358, "strangers", None, "a newcomer alone with strangers waited for a quorum of theirs, for ever"),
    (65028, "liars", None, "simulator: who was confirmed a moment ago had to know of a liar already"),
    (65026, "liars", None, "simulator: version 0 said two groups, of whose syncers one withheld"),
    (
        63234,
        "liars",
        None,
        "the only voter of a young run gave its versions to nobody, and nobody else could stand",
    ),
    (
        462454,
        "liars",
        None,
        "simulator: half of the voters could not audit what a killed syncer made, and had to know",
    ),
    (
        463614,
        "liars",
        None,
        "who was asked again before each of its versions was never found to leave a learner out",
    ),
    (
        2184,
        "old",
        4,
        "two of four refused another's heavier chain, a liar said nothing, and half were too few to yield to",
    ),
    (
        2060,
        "old",
        4,
        "who had no update of a head without support was asked again for ever, and never told why",
    ),
    (
        102,
        "storm",
        None,
        "contributions of those that were to have a seat left no room for the only seat's in its own inbox",
    ),
    (
        223,
        "wan",
        3,
        "a member refused what the syncer gave that it was about to elect, and let it alone for two minutes",
    ),
    (501, "partition", None, "a holder on whose chain a later term was made versions that nobody could take"),
    (
        120076,
        "datacentre",
        None,
        "the only seat left let its work go at once, and took the chain of the one that its version ended",
    ),
    (
        300120,
        "storm",
        None,
        "one that had copied a state took those on its parent for its own, whom no update could bring there",
    ),
    (300100, "storm", None, "the same, and the others' majority needed its vote"),
    (95002, "storm", None, "two that waited for each other's next version, after a trial, stood still"),
    (110027, "wan", None, "where holders are asked at random, one that does not deliver is asked again"),
    (500036, "partition", None, "a holder that had copied another branch counted on itself for ever"),
)
