"""The manifest: everything about a run that all its peers must agree on.

Written as `run.toml`, checked strictly (`config.loader`), signed by the run's owner and named by the
digest of its canonical bytes (`config.signing`). Node-local choices (ports, folders, devices) are
`config.settings`, never here. Field docstrings say what you would see if the value were wrong.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from p2pdiloco.config.models import (
    DATASET_PATTERN,
    NAME_PATTERN,
    PACKAGE_PATTERN,
    SHA256_PATTERN,
    TOKENIZER_PATTERN,
    Section,
    Value,
)

Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
Positive = Annotated[int, Meta(ge=1, le=1 << 53)]
Natural = Annotated[int, Meta(ge=0, le=1 << 53)]
CodecName = Literal["fp32", "bf16", "int8", "int4", "e3m0", "topk"]
Dtype = Literal["fp32", "bf16", "fp16"]
"""Type of the numbers in which parameters are exported."""


FORMAT = 4
"""Version of the schema. Version 3 held files out by name, 2 had schedules in inner steps of each learner, 1
had one task."""

MAX_NAME = 200


class RunSection(Section, frozen=True, kw_only=True):
    name: Name
    """Human name of the run; the run id (digest) tells two runs of one name apart."""
    seed: Natural = 0
    """Seeds version 0, data streams and group hashes. Every peer derives the same version 0 from it."""
    task: Name = "causal-lm"
    """Kind of training: "causal-lm", "image-classification", or a task that an installed package brings
    (`tasks.registry`). A task is code of this machine, looked up by name: nothing of it comes from a peer."""
    task_package: Annotated[str, Meta(pattern=PACKAGE_PATTERN)] = ""
    """Name of the package that a node without the task is told to install."""
    initial: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """SHA-256 over names, shapes and bytes of the parameters that are version 0; empty: they are drawn from
    the seed. Whoever signs the run has them in a file beside run.toml, other nodes get them from peers."""
    initial_name: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """Name of these parameters, for people; of a GGUF file with its SHA-256."""


class DataSection(Section, frozen=True, kw_only=True):
    source: Literal["embedded", "files", "jsonl", "parquet", "hub"] = "embedded"
    """"embedded" (what the task brings along: text, the Python standard library's sources; images,
    scikit-learn's digits), or each node's own --data path ("files", "jsonl", "parquet"), or "hub": a data set
    that Hugging Face `datasets` streams, by name, or from --data. Nodes that read the same data divide it
    (`learner.reading.shards`). A manifest never names a path: a stranger's would be read from a volunteer's
    disk."""
    field: Annotated[str, Meta(min_length=1, max_length=100)] = "text"
    """Key of a line, or name of a column, that holds the document."""
    dataset: Annotated[str, Meta(pattern=DATASET_PATTERN)] = ""
    """Name of the data set on the hub, OWNER/NAME, for "hub". Never one that `datasets` takes for local
    files."""
    config: Annotated[str, Meta(max_length=100)] = ""
    split: Annotated[str, Meta(min_length=1, max_length=100)] = "train"
    revision: Annotated[str, Meta(max_length=100)] = ""
    """Commit of the data set, so that it stays the same for all; empty: the newest."""
    shuffle_samples: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    """Samples of a streamed data set that are read ahead and shuffled among themselves."""
    heldout_percent: Annotated[int, Meta(ge=1, le=50)] = 5
    """Share of the data that nobody trains on: a hash of its content says which (`tasks.data.split`)."""
    heldout_split: Annotated[str, Meta(max_length=100)] = ""
    """Split that is held out as a whole, for "hub"; then all of `split` is trained on."""
    tokenizer: Annotated[str, Meta(pattern=TOKENIZER_PATTERN)] = "bytes"
    """"bytes", or a `tokenizers` JSON file's name, for people; peers give it
    (`daemon.run_files.tokenizers`)."""
    tokenizer_revision: Annotated[str, Meta(max_length=100)] = ""
    tokenizer_digest: Annotated[str, Meta(pattern=SHA256_PATTERN)] = ""
    """SHA-256 of the file: with another one, the same token ids would mean other words."""
    end_of_document: Annotated[str, Meta(max_length=100)] = ""
    """The token that is put behind every document. Of bytes: a newline, stated as nothing."""
    begin_of_document: Annotated[str, Meta(max_length=100)] = ""
    """The token that is put in front of every document and prompt; empty: none. A model that was trained with
    one is far from itself without it."""

    @property
    def is_each_nodes_own(self) -> bool:
        """Tell whether every node names its own data (`--data`) because the run brings none."""
        return not (self.source == "embedded" or (self.source == "hub" and self.dataset))


class InnerSection(Section, frozen=True, kw_only=True):
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the inner steps. Muon is for matrices inside the model; other parameters get AdamW beside
    it. Learning rate and weight decay are AdamW's: Muon's updates are scaled to be as large."""
    learning_rate: Annotated[float, Meta(gt=0, le=1)]
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 0.1
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    muon_momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.85
    """Momentum of Muon's matrices, if Muon is the optimizer. Swarms want less than one process does
    (docs/results.md)."""
    clip_norm: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    warmup_tokens: Natural
    """Tokens of the run, all its learners', over which the learning rate grows linearly."""
    schedule_tokens: Positive
    """Tokens of the run until the cosine reaches its floor (10 %), which is the run's end unless `[end]` says
    otherwise. A learner that joins late begins where the run is."""
    fresh_warmup_steps: Natural = 0
    """Inner steps over which the rate of a learner grows whose optimizer has no moments yet, wherever the run
    is: its first steps are large and in arbitrary directions."""
    tokens_per_step: Positive
    """Tokens per learner and inner step: a multiple of what one sample counts, which is the context for
    text and 1 for an image."""


class SyncSection(Section, frozen=True, kw_only=True):
    fragments: Annotated[int, Meta(ge=1, le=1024)] = 24
    """P, the number of fragments. More: smoother traffic, more messages."""
    inner_steps: Annotated[int, Meta(ge=1, le=100_000)] = 24
    """H, inner steps between two contributions of one fragment. Larger: less traffic, slower consensus."""
    delay_steps: Positive = 2
    """tau, inner steps from sending a fragment to applying the merged result that are budgeted; the
    grace window is cut from it. Must be below H. Too small: slow peers miss merges."""
    quorum: Positive = 1
    """K, contributions that start the closing of a round (never more than there are live learners)."""
    grace_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.8
    """gamma: the share of the measured slack that a syncer waits for the slower learners. It waits no less
    than answers take to arrive, whatever gamma is, also where tau steps are shorter than an answer's way."""
    grace_cap_s: Annotated[float, Meta(ge=0, le=600)] = 30.0
    keep_in_flight: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """rho: 1 keeps the inner steps made while a contribution was in flight, 0 is the paper's overwrite."""


class OuterSection(Section, frozen=True, kw_only=True):
    learning_rate: Annotated[float, Meta(gt=0, le=2)] = 0.7
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.8
    momentum_warmup_merges: Natural = 20
    """Momentum grows linearly from 0 over a fragment's first merges. 0 costs a short run about 9 % loss."""
    merge: Literal["rda", "mean"] = "rda"
    """Kind of average of the pseudo-gradients. "rda", radial-directional averaging, keeps their length
    (embeddings go by plain mean). "mean" takes the plain mean of all, which shortens what learners do not
    agree on."""


class CodecSection(Section, frozen=True, kw_only=True):
    contribution: CodecName = "int8"
    update: CodecName = "int8"


class GroupSection(Section, frozen=True, kw_only=True):
    size: Annotated[int, Meta(ge=2, le=256)] = 16
    """g: members per group. A run of more members falls into several groups, which merge in levels."""
    expected_members: Annotated[int, Meta(ge=0, le=16_384)] = 0
    """Number of members that the run starts with, about; 0: at most `size`. Only the first versions depend on
    it: later ones count the members. Far too low: one group serves all for a while, and turns many away."""
    term_versions: Annotated[int, Meta(ge=1, le=10_000)] = 16
    """A syncer's term, in versions of its fragment; then the next one is elected."""
    log_versions: Annotated[int, Meta(ge=1, le=1024)] = 16
    """L: outer updates that every peer keeps for stragglers; older stragglers fetch state."""
    max_base_age_versions: Annotated[int, Meta(ge=0, le=64)] = 4
    """A contribution measured against an older base than this is refused, rebased and sent again."""

    @property
    def groups_at_start(self) -> int:
        """Number of leaf groups into which the members fall for the first versions."""
        return max(1, -(-self.expected_members // self.size))


class AdmissionSection(Section, frozen=True, kw_only=True):
    mode: Literal["open", "invite", "list"] = "open"
    """Condition of being a member: "open", whoever knows the run; "invite", whoever has an invite of
    its owner; "list", whom its owner has put on the list (docs/topics/admission.md)."""


class WeightSection(Section, frozen=True, kw_only=True):
    largest_share: Annotated[float, Meta(gt=0, le=1)] = 1 / 3
    """Share of a merge that one learner has at most, whatever it says of its work, where all others that were
    merged lately bring usual contributions. Smaller: fast learners count for less. With a third no liar turns
    the others' direction round, from three members on. But an honest learner five times as fast as three
    others is cut, too, which cost 8 % of the loss: so in runs by invite or list H inner steps weigh in full,
    within `most_units`, and in open runs of unlike machines 0.5 or more is better. 1: `most_units` alone."""
    most_units: Annotated[float, Meta(ge=1, le=16)] = 4.0
    """Weight of one contribution at most, in usual ones, however many members there are. Smaller: a learner
    that was away, or is faster than most, loses more of its work."""


class AuditSection(Section, frozen=True, kw_only=True):
    loss_share: Annotated[float, Meta(ge=0, le=0.5)] = 0.0
    """Share of each learner's time, and of what its node receives, in which it measures what single
    contributions of others do to the loss; each node refuses those whose work does harm, or nothing
    (docs/protocol/loss-audits.md). 0: there is no such audit, which suits runs among friends. A hundredth is
    enough for open runs. Far too large: training is slower by it."""


class EndSection(Section, frozen=True, kw_only=True):
    learners: Literal["stop", "go-on"] = "stop"
    """Conduct of learners when the run has merged `inner.schedule_tokens`: "stop", no more inner steps; or
    "go-on", at the rate at which the cosine ends (10 %). Nodes stay, and give the result to others."""


MAX_EXPORT_TEXT = 24_576
"""Characters of one text of `[export]`."""
ExportText = Annotated[str, Meta(max_length=MAX_EXPORT_TEXT)]


class ExportSection(Section, frozen=True, kw_only=True):
    """Words of a given model's folder that no training needs, for whoever uses the result."""

    token_ids: ExportText = ""
    """Ids of special tokens in its config.json, as JSON. Empty: those of the run's end of a document."""
    tokenizer_config: ExportText = ""
    """Content of its tokenizer_config.json, but for what tokenizer.json says."""
    generation_config: ExportText = ""
    """Content of its generation_config.json: when to stop, and how to choose."""
    chat_template: ExportText = ""
    """Template by which its tokenizer writes a conversation (Jinja)."""
    dtype: Dtype = "fp32"
    """Type of its parameters, by its config.json; exports have it, too."""
    context_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    """Tokens that it is made for, by its config.json; exports say so. 0: as many as the run trains on."""


class Manifest(Section, frozen=True, kw_only=True):
    """A run, as its owner describes it. Equal manifests have equal canonical bytes."""

    format: Literal[4] = 4
    run: RunSection
    model: dict[str, Value]
    """The task's own table, every key of its struct present (`tasks.registry.task_of` decodes it)."""
    data: DataSection = DataSection()
    inner: InnerSection
    sync: SyncSection = SyncSection()
    outer: OuterSection = OuterSection()
    codec: CodecSection = CodecSection()
    group: GroupSection = GroupSection()
    admission: AdmissionSection = AdmissionSection()
    weight: WeightSection = WeightSection()
    audit: AuditSection = AuditSection()
    end: EndSection = EndSection()
    export: ExportSection = ExportSection()
    """The last five, and `data.begin_of_document`, are not in the canonical bytes where they say nothing:
    runs from before them keep their ids."""
