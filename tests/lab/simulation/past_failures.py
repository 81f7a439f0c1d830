"""Seeds that once failed, each with what was wrong. They are played again with every test run.

What a seed means changes when the simulator draws something new, so an old one may have lost its point; then
it is still one seed more."""

from __future__ import annotations

PAST_FAILURES: dict[tuple[str | None, int | None], dict[int, str]] = {
    (None, None): {
        1084: "on a slow disk a candidate stood in ever new terms, whose votes queued up",
        1106: "simulator: a node was killed just after the faults had stopped",
        200579: "who took office later than a member thought was suspected for ever",
        201027: "two left at one time, each with a version that the one who stayed never saw",
        5610: "a member of the chain's table that was listed, but never heard, brought another chain",
        13360: "after one damaged payload the only holder was not asked again for half a minute",
        15382: "merged work that a fork sent again was given up after one damaged payload",
        17270: "who was elected beforehand on one side of a split kept out the other side's syncer",
        2883: "simulator: a stream whose last byte was under way for minutes was never given up",
        12430: "simulator: who stood still when it was asked to leave had the less time for it",
        936: "simulator: a learner that changed its pace while it stood still ran backwards",
        1163: "the syncer with the thinnest uplink merged alone, term after term",
        47306: "a learner that was slowed down and up again between two reports was thought to lag",
        2266: "a genesis node on a thin uplink made versions faster than newcomers could take them",
    },
    ("calm", None): {
        17: "two offices at once while a swarm grew: the holder is re-elected first",
    },
    ("churn", None): {
        41216: "a partial merge had what its syncer took to be in its own inbox only",
        705: "the same as seed 700080 of a partition, where one had a head older than the log",
    },
    ("datacentre", None): {
        120076: "the only seat left let its work go at once, and took the chain of the one that "
        "its version ended",
        700018: "a root waited sixteen intervals a version for one on another branch",
    },
    ("liars", None): {
        65028: "simulator: who was confirmed a moment ago had to know of a liar already",
        65026: "simulator: version 0 said two groups, of whose syncers one withheld",
        63234: "the only voter of a young run gave its versions to nobody, and nobody else could stand",
        462454: "simulator: half of the voters could not audit what a killed syncer made, and had to know",
        463614: "who was asked again before each of its versions was never found to leave a learner out",
    },
    ("old", 4): {
        2184: "two of four refused another's heavier chain, a liar said nothing, and half were "
        "too few to yield to",
        2060: "who had no update of a head without support was asked again for ever, and never told why",
    },
    ("partition", None): {
        30043: "a merged and forgotten contribution made the learner drop unmerged steps",
        7005: "the old syncer waited for its term's last version beside the one elected beforehand",
        7034: "members of other groups were not asked what they have: merged work was forgotten",
        810002: "a syncer's version was lost in a fork: it waited for what its member thought it "
        "still had, for ever",
        820410: "a head was said in just those heartbeats that reached nobody",
        501: "a holder on whose chain a later term was made versions that nobody could take",
        500036: "a holder that had copied another branch counted on itself for ever",
        700080: "one of two that are left found the other's state worse, in another epoch",
    },
    ("storm", None): {
        99: "who restarted alone knew of nobody who might come back with another chain",
        42168: "a payload got there, its answer did not: taken up again, it cost the rest",
        42225: "a partial merge came many versions late, when its part had been taken up again",
        810423: "a leaf group's holder without a vote kept its office, and the group above had none",
        102: "contributions of those that were to have a seat left no room for the only "
        "seat's in its own inbox",
        300120: "one that had copied a state took those on its parent for its own, whom no "
        "update could bring there",
        300100: "the same, and the others' majority needed its vote",
        95002: "two that waited for each other's next version, after a trial, stood still",
    },
    ("strangers", None): {
        1000358: "a newcomer alone with strangers waited for a quorum of theirs, for ever",
    },
    ("wan", None): {
        110027: "where holders are asked at random, one that does not deliver is asked again",
    },
    ("wan", 3): {
        223: "a member refused what the syncer gave that it was about to elect, and let it "
        "alone for two minutes",
    },
    ("wan", 5): {
        39: "one whose uplink just sufficed did so, too",
    },
}
"""(mix, nodes) -> seed -> what was wrong."""
