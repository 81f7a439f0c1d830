"""What run.toml says above each table and key, but for the task's own table, `[model]`. A test holds that
these are exactly the schema's keys."""

from __future__ import annotations

TABLES = {
    "run": "The run itself.",
    "model": "The model: keys of the task.",
    "data": "What the learners read.",
    "inner": "Inner optimizer: what every learner does on its own, at every inner step.",
    "sync": "Synchronisation: when fragments of the model travel, and how long a syncer waits.",
    "outer": "Outer optimizer: Nesterov momentum on the merged pseudo-gradients.",
    "codec": "How tensors travel.",
    "group": "Who merges with whom, and how long versions are kept.",
}

COMMENTS = {
    "format": "Version of this file's schema.",
    "run.name": "Human name; the run id (a digest) tells two runs of one name apart.",
    "run.seed": "Seeds version 0, data streams and group hashes.",
    "run.task": "What is learned: causal-lm, image-classification, or what an installed package brings.",
    "run.task_package": "What a node that lacks the task is told to install.",
    "data.source": "embedded: comes with the task (text: Python's library); files: each node's own --data.",
    "data.heldout_percent": "Share of files or samples, by hash of their name, that nobody trains on.",
    "inner.optimizer": "adamw, or muon for matrices with adamw for embeddings, head and vectors.",
    "inner.learning_rate": "Peak learning rate.",
    "inner.weight_decay": "Decoupled weight decay.",
    "inner.beta1": "Decay of the first moment.",
    "inner.beta2": "Decay of the second moment.",
    "inner.muon_momentum": "Momentum of muon.",
    "inner.clip_norm": "Gradients are clipped to this norm.",
    "inner.warmup_tokens": "Tokens, of all learners together, of linear warm-up; below schedule_tokens.",
    "inner.schedule_tokens": "Tokens, of all learners, until the cosine is at its floor (10 %).",
    "inner.fresh_warmup_steps": "Inner steps of warm-up of a learner whose optimizer has no moments yet.",
    "inner.tokens_per_step": "Tokens per learner and inner step: of text whole contexts; an image is 1.",
    "sync.fragments": "P: more fragments, smoother traffic, more messages.",
    "sync.inner_steps": "H: inner steps between two contributions of a fragment; larger, less traffic.",
    "sync.delay_steps": "tau: inner steps from sending to applying that are budgeted; below inner_steps.",
    "sync.quorum": "K: contributions that start the closing of a round; at most group.size.",
    "sync.grace_fraction": "gamma: share of the measured slack that a syncer waits for slower learners.",
    "sync.grace_cap_s": "Upper bound of that wait, in seconds.",
    "sync.keep_in_flight": "rho: 1 keeps inner steps made while a contribution was in flight, 0 drops them.",
    "outer.learning_rate": "eta of the outer step.",
    "outer.momentum": "mu of the outer step.",
    "outer.momentum_warmup_merges": "Momentum grows from 0 over as many merges of a fragment.",
    "codec.contribution": "Of contributions. Bytes each: fp32 4, bf16 2, int8 1, int4/e3m0 0.53, topk 0.03.",
    "codec.update": "Of the merged outer update that everyone applies; the same choice.",
    "group.size": "g: members that merge together; more fall into several groups, merged in levels.",
    "group.expected_members": "Members at the start, about (0: one group); later the versions count them.",
    "group.term_versions": "A syncer's term, in versions of its fragment; then the next one is elected.",
    "group.log_versions": "L: outer updates that every peer keeps for stragglers; older ones fetch state.",
    "group.max_base_age_versions": "Contributions against an older base are refused, rebased and sent again.",
}
