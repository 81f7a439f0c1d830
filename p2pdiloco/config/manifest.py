"""The manifest: everything about a run that all its peers must agree on.

Written as `run.toml`, signed by the run's owner and named by the digest of its canonical bytes. Node-local
choices (ports, folders, devices) are `config.settings`, never here. Field docstrings say what you would see
if the value were wrong. After the sections and `Manifest` come the canonical bytes and the rules that span
several keys of every run, the keys in words, the comments of run.toml, and signed manifests. What concerns
the task's own table, and run.toml, is in `tasks.registry`. A user's mistake is a `ConfigError` that names
file and key; the same mistake in what a peer sent is a `RemoteError`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol, TypeVar

import msgspec
import msgspec.inspect as inspect
from msgspec import Meta, Struct, msgpack
from msgspec.structs import replace

from p2pdiloco.errors import RemoteError, StorageError
from p2pdiloco.util import Frozen, Values, clear_folder_at

# Tables `[model]` of the built-in tasks: data only, so that manifests need no torch. Other tasks bring their
# own (`tasks.task.Task.Section`).

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}\Z"
PACKAGE_PATTERN = r"^[A-Za-z0-9._-]{0,100}\Z"
DATASET_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?\Z"
"""Pattern with an owner: `datasets` takes a bare name like "text" for all such files of the current
folder."""
TOKENIZER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?\Z"
SHA256_PATTERN = r"^([0-9a-f]{64})?\Z"
PEER_PATTERN = r"^12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\Z"
"""Pattern of the peer id of an Ed25519 key."""
RECOVERY_PATTERN = r"^(12D3KooW[1-9A-HJ-NP-Za-km-z]{44})?\Z"
Value = bool | int | float | str | list[str]
"""Type of a value in a `[model]` table."""
Few = Annotated[int, Meta(ge=1, le=256)]
Width = Annotated[int, Meta(ge=8, le=65536)]
ContextTokens = Annotated[int, Meta(ge=8, le=131072)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
Short = Annotated[str, Meta(max_length=100)]
Named = Annotated[str, Meta(min_length=1, max_length=100)]
Digest = Annotated[str, Meta(pattern=SHA256_PATTERN)]
Folder = Annotated[str, Meta(min_length=1, max_length=255)]
BYTE_VALUES = 256
BYTES = "bytes"
"""The tokenizer of raw bytes."""
SWIGLU_RATIO = 8 / 3
"""Hidden width over width at which three matrices have the parameters of the usual two of ratio 4."""
HIDDEN_MULTIPLE = 8
VOCABULARY_MULTIPLE = 64
"""Multiple of new vocabularies: a GPU's tensor cores want rows of 8 numbers (of 2 bytes) or a multiple, and
work on larger tiles."""


class Section(Frozen, forbid_unknown_fields=True):
    """A table of the manifest: immutable, unknown keys refused. (msgspec inherits all but `kw_only`.)"""


class ModelSection(Section):
    """Base of what tasks read their `[model]` with; keys are numbers, strings, arrays of strings."""

    comments: ClassVar[dict[str, str]] = {}
    """Comments of run.toml, by key."""


class CausalLMSection(ModelSection, kw_only=True):
    """A transformer in Llama's form; with `experts`, in Mixtral's."""

    comments: ClassVar[dict[str, str]] = {
        "layers": "Transformer blocks.",
        "heads": "Attention heads.",
        "key_value_heads": "Heads of keys and values, shared by several queries' heads; 0: as many as heads.",
        "width": "Width of the residual stream; a multiple of heads.",
        "hidden_width": "Width inside the feed-forward part; 0: 8/3 of width.",
        "context_tokens": "Tokens that the model sees at once.",
        "vocabulary": "Token ids; 256 is raw bytes.",
        "tied_head": "Whether the output head is the token embedding.",
        "rope_base": "Base of the rotary positions' frequencies.",
        "norm_epsilon": "What the norms add to the mean square.",
        "experts": "Feed-forward parts per block, of which each token uses some; 0: one, dense.",
        "experts_per_token": "How many of them a token uses.",
        "balance_weight": "Weight of the loss that spreads tokens evenly over experts.",
    }
    layers: Few
    heads: Few
    key_value_heads: Annotated[int, Meta(ge=0, le=256)] = 0
    width: Width
    hidden_width: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    context_tokens: ContextTokens
    vocabulary: Annotated[int, Meta(ge=2, le=1 << 20)] = BYTE_VALUES
    tied_head: bool = True
    rope_base: Annotated[float, Meta(ge=1, le=1e9)] = 10_000.0
    norm_epsilon: Annotated[float, Meta(gt=0, le=0.1)] = 1e-6
    experts: Annotated[int, Meta(ge=0, le=1024)] = 0
    experts_per_token: Annotated[int, Meta(ge=1, le=64)] = 2
    balance_weight: Annotated[float, Meta(ge=0, le=10)] = 0.01

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def key_value_width(self) -> int:
        """Width of all heads of keys (or of values) together."""
        return (self.key_value_heads or self.heads) * self.head_width

    @property
    def feed_forward_width(self) -> int:
        """Hidden width of one feed-forward part, or of one expert."""
        if self.hidden_width:
            return self.hidden_width
        return -int(-SWIGLU_RATIO * self.width // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE


class ImageSection(ModelSection, kw_only=True):
    """A small vision transformer, or a convolutional network."""

    comments: ClassVar[dict[str, str]] = {
        "architecture": "vit: a vision transformer; cnn: a residual convolutional network.",
        "classes": "Kinds of images.",
        "class_folders": "Their folders' names, in order; empty: each node's own, sorted, exactly so many.",
        "image_pixels": "Images are scaled to squares of this side.",
        "channels": "1: grey, 3: colour.",
        "layers": "Blocks.",
        "width": "Width of the residual stream (cnn: of its first third).",
        "heads": "Attention heads (cnn: unused).",
        "patch_pixels": "Side of the squares that the transformer reads (cnn: unused).",
    }
    architecture: Literal["vit", "cnn"] = "vit"
    classes: Annotated[int, Meta(ge=2, le=65536)]
    class_folders: list[Folder] = msgspec.field(default_factory=list)
    image_pixels: Annotated[int, Meta(ge=4, le=1024)]
    channels: Literal[1, 3] = 3
    layers: Few
    width: Width
    heads: Few = 4
    patch_pixels: Few = 4


def vocabulary_for(tokens: int) -> int:
    """The vocabulary of a new model for a tokenizer of so many tokens: ids beyond them never occur."""
    return -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def table(section: ModelSection) -> Values:
    """The struct as `Manifest.model`: every key, with its value."""
    found = msgspec.to_builtins(section)
    assert isinstance(found, dict)
    return found


STAGES = 3
"""Parts of the convolutional network: from the second on, each halves the image and doubles the width."""


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


class RunSection(Section, kw_only=True):
    name: Name
    """Human name of the run; the run id (digest) tells two runs of one name apart."""
    seed: Natural = 0
    """Seeds version 0, data streams and group hashes. Every peer derives the same version 0 from it."""
    task: Name = "causal-lm"
    """Kind of training: "causal-lm", "image-classification", or a task that an installed package brings
    (`tasks.registry`). A task is code of this machine, looked up by name: nothing of it comes from a peer."""
    task_package: Annotated[str, Meta(pattern=PACKAGE_PATTERN)] = ""
    """Name of the package that a node without the task is told to install."""
    initial: Digest = ""
    """SHA-256 over names, shapes and bytes of the parameters that are version 0; empty: they are drawn from
    the seed. The run's signer has them in a file beside run.toml, other nodes get them from peers."""
    initial_name: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """Name of these parameters, for people; of a GGUF file with its SHA-256."""


class DataSection(Section, kw_only=True):
    source: Literal["embedded", "files", "jsonl", "parquet", "hub"] = "embedded"
    """"embedded" (what the task brings along: text, the Python standard library's sources; images,
    scikit-learn's digits), or each node's own --data path ("files", "jsonl", "parquet"), or "hub": a data set
    that Hugging Face `datasets` streams, by name, or from --data. Nodes that read the same data divide it
    (`learner.samples`). A manifest never names a path: a stranger's would be read from a volunteer's
    disk."""
    field: Named = "text"
    """Key of a line, or name of a column, that holds the document."""
    dataset: Annotated[str, Meta(pattern=DATASET_PATTERN)] = ""
    """Name of the data set on the hub, OWNER/NAME, for "hub". Never one that `datasets` takes for local
    files."""
    config: Short = ""
    split: Named = "train"
    revision: Short = ""
    """Commit of the data set, so that it stays the same for all; empty: the newest."""
    shuffle_samples: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    """Samples of a streamed data set that are read ahead and shuffled among themselves."""
    heldout_percent: Annotated[int, Meta(ge=1, le=50)] = 5
    """Share of the data that nobody trains on: a hash of its content says which (`tasks.documents`)."""
    heldout_split: Short = ""
    """Split that is held out as a whole, for "hub"; then all of `split` is trained on."""
    tokenizer: Annotated[str, Meta(pattern=TOKENIZER_PATTERN)] = "bytes"
    """"bytes", or a `tokenizers` JSON file's name, for people; peers give it
    (`run_files.shared_files`)."""
    tokenizer_revision: Short = ""
    tokenizer_digest: Digest = ""
    """SHA-256 of the file: with another one, the same token ids would mean other words."""
    end_of_document: Short = ""
    """The token that is put behind every document. Of bytes: a newline, stated as nothing."""
    begin_of_document: Short = ""
    """The token that is put in front of every document and prompt; empty: none. A model that was trained with
    one is far from itself without it."""

    @property
    def is_each_nodes_own(self) -> bool:
        """Tell whether every node names its own data (`--data`) because the run brings none."""
        return not (self.source == "embedded" or (self.source == "hub" and self.dataset))


class InnerSection(Section, kw_only=True):
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the inner steps. Muon is for matrices inside the model; other parameters get AdamW beside
    it. Learning rate and weight decay are AdamW's: Muon's updates are scaled to be as large."""
    learning_rate: Annotated[float, Meta(gt=0, le=1)]
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    muon_momentum: Fraction = 0.85
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


class SyncSection(Section, kw_only=True):
    fragments: Annotated[int, Meta(ge=1, le=1024)] = 24
    """P, the number of fragments. More: smoother traffic, more messages."""
    inner_steps: Annotated[int, Meta(ge=1, le=100_000)] = 24
    """H, inner steps between two contributions of one fragment. Larger: less traffic, slower consensus."""
    delay_steps: Positive = 2
    """tau, inner steps from sending a fragment to applying the merged result that are budgeted; the
    grace window is cut from it. Must be below H. Too small: slow peers miss merges."""
    quorum: Positive = 1
    """K, contributions that start the closing of a round (never more than there are live learners)."""
    grace_fraction: Fraction = 0.8
    """gamma: the share of the measured slack that a syncer waits for the slower learners. It waits no less
    than answers take to arrive, whatever gamma is, also where tau steps are shorter than an answer's way."""
    grace_cap_s: Annotated[float, Meta(ge=0, le=600)] = 30.0
    keep_in_flight: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """rho: 1 keeps the inner steps made while a contribution was in flight, 0 is the paper's overwrite."""


class OuterSection(Section, kw_only=True):
    learning_rate: Annotated[float, Meta(gt=0, le=2)] = 0.7
    momentum: Fraction = 0.8
    momentum_warmup_merges: Natural = 20
    """Momentum grows linearly from 0 over a fragment's first merges. 0 costs a short run about 9 % loss."""
    merge: Literal["rda", "mean"] = "rda"
    """Kind of average of the pseudo-gradients. "rda", radial-directional averaging, keeps their length
    (embeddings go by plain mean). "mean" takes the plain mean of all, which shortens what learners do not
    agree on."""


class CodecSection(Section, kw_only=True):
    contribution: CodecName = "int8"
    update: CodecName = "int8"


class GroupSection(Section, kw_only=True):
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


MAX_SEATS = 1024


class AdmissionSection(Section, kw_only=True):
    mode: Literal["open", "invite", "list"] = "open"
    """Condition of being a member: "open", whoever knows the run; "invite", whoever has an invite of
    its owner; "list", whom its owner has put on the list (docs/topics/admission.md)."""
    seats: Annotated[tuple[Annotated[str, Meta(pattern=PEER_PATTERN)], ...], Meta(max_length=MAX_SEATS)] = ()
    """Peers that have a seat from version 0 on: they vote and merge (docs/protocol/seats.md). Nobody makes a
    version while none of them is here. The owner gives later seats (`p2pdiloco seat`)."""
    recovery: Annotated[str, Meta(pattern=RECOVERY_PATTERN)] = ""
    """Peer id of the owner's recovery key, to be kept elsewhere: its first word ends the power of the owner's
    key (docs/topics/admission.md). Empty: there is none."""


class WeightSection(Section, kw_only=True):
    largest_share: Annotated[float, Meta(gt=0, le=1)] = 1 / 3
    """Share of a merge that one learner has at most, whatever it says of its work, where all others that were
    merged lately bring usual contributions. Smaller: fast learners count for less. With a third no liar turns
    the others' direction round, from three members on. But an honest learner five times as fast as three
    others is cut, too, which cost 8 % of the loss: so in runs by invite or list H inner steps weigh in full,
    within `most_units`, and in open runs of unlike machines 0.5 or more is better. 1: `most_units` alone."""
    open_share: Fraction = 0.25
    """Share of a merge that all learners without a seat have at most, together. Larger: volunteers count for
    more, and so does whoever comes with a thousand names. Three seats and 1,000 volunteers learn at 0.25 like
    5 equal learners, at 0.5 like 12, at 0.75 like 47. Beside three seats a crowd that sends the last update
    back at the greatest length costs 4 % of the loss at 0.25, 11 % at 0.5, 24 % at 0.9 (docs/results.md)."""
    most_units: Annotated[float, Meta(ge=1, le=16)] = 4.0
    """Weight of one contribution at most, in usual ones, however many members there are. Smaller: a learner
    that was away, or is faster than most, loses more of its work."""


class AuditSection(Section, kw_only=True):
    loss_share: Annotated[float, Meta(ge=0, le=0.5)] = 0.0
    """Share of each learner's time, and of what its node receives, in which it measures what single
    contributions of others do to the loss; each node refuses those whose work does harm, or nothing
    (docs/protocol/loss-audits.md). 0: there is no such audit, which suits runs among friends. A hundredth is
    enough for open runs. Far too large: training is slower by it."""


class EndSection(Section, kw_only=True):
    learners: Literal["stop", "go-on"] = "stop"
    """Conduct of learners when the run has merged `inner.schedule_tokens`: "stop", no more inner steps; or
    "go-on", at the rate at which the cosine ends (10 %). Nodes stay, and give the result to others."""


MAX_EXPORT_TEXT = 24_576
"""Characters of one text of `[export]`."""
ExportText = Annotated[str, Meta(max_length=MAX_EXPORT_TEXT)]


class ExportSection(Section, kw_only=True):
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


class Manifest(Section, kw_only=True):
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
    """What came later is not in the canonical bytes where it says nothing (`_CAME_LATER`): runs from before
    keep their ids."""


# Canonical bytes: in, out, and rules between keys.

MAX_MANIFEST_BYTES = 64 * 1024
DECODING = (msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError)
"""Errors of a decoder that is given garbage: bad UTF-8, numbers out of range and deep nesting are not
msgspec's own."""

T = TypeVar("T")
_encoder = msgpack.Encoder()
_decoder = msgpack.Decoder(Manifest, strict=True)


def broken_rule(manifest: Manifest) -> str | None:
    """The first rule between keys that does not hold, as half a sentence; None if all hold."""
    inner, sync, group, data = manifest.inner, manifest.sync, manifest.group, manifest.data
    rules = (
        (
            inner.warmup_tokens < inner.schedule_tokens,
            f"inner.warmup_tokens must be below inner.schedule_tokens ({inner.schedule_tokens}), "
            f"it is {inner.warmup_tokens}",
        ),
        (
            sync.delay_steps < sync.inner_steps,
            f"sync.delay_steps must be below sync.inner_steps ({sync.inner_steps}), it is {sync.delay_steps}",
        ),
        (
            sync.quorum <= group.size,
            f"sync.quorum must be at most group.size ({group.size}), it is {sync.quorum}",
        ),
        (
            max(group.max_base_age_versions, group.term_versions) <= group.log_versions,
            f"group.max_base_age_versions ({group.max_base_age_versions}) and group.term_versions "
            f"({group.term_versions}) must be at most group.log_versions ({group.log_versions})",
        ),
        (
            data.tokenizer == BYTES or (data.tokenizer_digest and data.end_of_document),
            "data.tokenizer_digest and data.end_of_document must be stated with data.tokenizer "
            "(run new --tokenizer writes them)",
        ),
        (
            data.tokenizer != BYTES or not data.begin_of_document,
            f"data.begin_of_document is a token of a tokenizer file, and data.tokenizer is {BYTES}",
        ),
        (
            len(set(manifest.admission.seats)) == len(manifest.admission.seats),
            "admission.seats must not name a peer twice",
        ),
        (
            data.source == "hub" or not (data.dataset or data.heldout_split),
            'data.dataset and data.heldout_split are for data.source = "hub"',
        ),
        *(
            (_is_object(text), f"export.{name} must be a JSON object, or empty")
            for name, text in msgspec.structs.asdict(manifest.export).items()
            if name not in ("chat_template", "dtype", "context_tokens")
        ),
    )
    return first_broken(rules)


def first_broken(rules: Iterable[tuple[object, str]]) -> str | None:
    """Find the first sentence whose rule does not hold."""
    return next((sentence for holds, sentence in rules if not holds), None)


def _is_object(text: str) -> bool:
    try:
        return not text or isinstance(msgspec.json.decode(text), dict)
    except DECODING:
        return False


def canonical_bytes(manifest: Manifest) -> bytes:
    """The one encoding of a manifest (msgpack, every field, schema order, the task's keys sorted): what is
    signed and hashed. Without what came later and says nothing, as in runs that are older."""
    told: Values = msgspec.to_builtins(manifest)
    told["model"] = dict(sorted(manifest.model.items()))
    for name, keys in _CAME_LATER.items():
        section = getattr(manifest, name)
        usual = type(section)()
        for key in keys:
            if getattr(section, key) == getattr(usual, key):
                del told[name][key]
        if section == usual and name != "data":
            del told[name]
    return _encoder.encode(told)


_CAME_LATER = {
    "data": ("begin_of_document",),
    "admission": ("seats", "recovery"),
    "weight": (),
    "audit": (),
    "end": (),
    "export": ("dtype", "context_tokens"),
}
"""Keys that runs from before them do not have, by table; all of these tables but `data` came later, too."""


@functools.cache
def typed(section: type[ModelSection]) -> type[Struct]:
    """The manifest's schema with the task's table spelled out: what run.toml is read and written with."""
    fields = [
        (field.name, section if field.name == "model" else field.type, field.default)
        for field in msgspec.structs.fields(Manifest)
    ]
    return msgspec.defstruct("TypedManifest", fields, bases=(Section,), frozen=True, kw_only=True)


def untyped(manifest: Struct) -> Manifest:
    """The manifest of a `typed` one."""
    values = {name: getattr(manifest, name) for name in Manifest.__struct_fields__}
    return Manifest(**values | {"model": table(values["model"])})


def manifest_from_canonical(data: bytes) -> Manifest:
    """Decode what a peer sent.

    Raises:
        RemoteError: "manifest-oversized", "manifest-garbage" (not a manifest, or not its canonical
            encoding), "manifest-invalid" (a rule between keys is broken).
    """
    manifest = _decoded(_decoder, data, MAX_MANIFEST_BYTES)
    if canonical_bytes(manifest) != data:
        raise RemoteError("manifest-garbage", "not the canonical encoding of this version of p2pdiloco")
    broken = broken_rule(manifest)
    if broken:
        raise RemoteError("manifest-invalid", broken)
    return manifest


def _decoded(decoder: msgpack.Decoder[T], data: bytes, most: int) -> T:
    if len(data) > most:
        raise RemoteError("manifest-oversized", f"{len(data)} bytes")
    try:
        return decoder.decode(data)
    except DECODING as error:
        raise RemoteError("manifest-garbage", str(error)) from error


def render_toml(manifest: Manifest, section: type[ModelSection]) -> str:
    """The manifest as a commented run.toml; `section` is its task's table."""
    lines = [
        f'# Run "{manifest.run.name}": all that its peers must agree on; any change makes another run.',
        "# Check it with: p2pdiloco run check FILE. Ports, folders and devices are flags of p2pdiloco node.",
        "",
    ]
    comments = COMMENTS | {f"model.{key}": text for key, text in section.comments.items()}
    table_name = ""
    for key in keys_of(typed(section)).values():
        if key.section != table_name:
            table_name = key.section
            lines += ["", f"# {TABLES[table_name]}", f"[{table_name}]"]
        owner = getattr(manifest, table_name) if table_name else manifest
        if isinstance(owner, dict) and key.name not in owner:
            continue  # it came later, and says nothing
        value = owner[key.name] if isinstance(owner, dict) else getattr(owner, key.name)
        lines.append(f"# {comments.get(key.path, key.name)} ({key.words})")
        lines.append(f"{key.name} = {as_toml(value)}")
    return "\n".join(lines) + "\n"


# Keys in words, read off the structs, so that neither can go stale: for errors and for run.toml.

_PATTERNS = {
    NAME_PATTERN: "1 to 63 of a-z 0-9 . _ - and begin with a letter or digit",
    PACKAGE_PATTERN: "at most 100 of A-Z a-z 0-9 . _ -",
    DATASET_PATTERN: "a data set's name on the hub (OWNER/NAME), or empty",
    TOKENIZER_PATTERN: "bytes, a file's name without folder, or OWNER/NAME on the hub",
    SHA256_PATTERN: "64 hexadecimal digits, or empty",
    PEER_PATTERN: "a peer id (12D3KooW...)",
    RECOVERY_PATTERN: "a peer id (12D3KooW...), or empty",
}


class Key(Frozen):
    """A key of a TOML schema."""

    section: str
    """Empty for keys above all tables."""
    name: str
    words: str
    """Description of the values allowed: `an integer from 1 to 256`."""
    required: bool

    @property
    def path(self) -> str:
        """Name as people write it: `sync.delay_steps`."""
        return f"{self.section}.{self.name}" if self.section else self.name


def keys_of(struct: type[Struct], section: str = "") -> dict[str, Key]:
    """List all keys of a struct, by path, in their order; fields that are structs become tables (one
    level)."""
    found: dict[str, Key] = {}
    for field in _fields_of(struct):
        if isinstance(field.type, inspect.StructType):
            found |= keys_of(field.type.cls, field.encode_name)
        elif isinstance(field.type, inspect.DictType):
            continue  # a table whose keys somebody else knows
        else:
            key = Key(section, field.encode_name, words_for(field.type), field.required)
            found[key.path] = key
    return found


def tables_of(struct: type[Struct]) -> dict[str, type[Struct]]:
    """The fields of a struct that are tables, by name, in their order."""
    fields = _fields_of(struct)
    return {f.encode_name: f.type.cls for f in fields if isinstance(f.type, inspect.StructType)}


def _fields_of(struct: type[Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return info.fields


def words_for(kind: inspect.Type) -> str:
    """Describe the values of this type, to end a sentence that begins with "must be"."""
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "an integer" + _bounds(kind)
        case inspect.FloatType():
            return "a number" + _bounds(kind)
        case inspect.LiteralType():
            values = [json.dumps(value) for value in kind.values]
            return values[0] if len(values) == 1 else "one of " + ", ".join(values)
        case inspect.StrType() if kind.pattern:
            return _PATTERNS[kind.pattern]
        case inspect.StrType():
            return "a string"
        case inspect.VarTupleType() | inspect.ListType():
            return "an array, each item " + words_for(kind.item_type)
        case inspect.CustomType():
            return "a path"
        case inspect.UnionType():
            return words_for(next(t for t in kind.types if not isinstance(t, inspect.NoneType)))
    raise TypeError(f"no words for {kind!r}")


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    low, above, below = kind.ge, kind.gt, kind.lt
    # Bounds that only keep numbers exact on the wire are nobody's business until they are exceeded.
    high = None if kind.le is not None and kind.le >= 1 << 53 else kind.le
    if low is not None:
        if high is not None:
            return f" from {_plain(low)} to {_plain(high)}"
        return f" from {_plain(low)} to below {_plain(below)}" if below is not None else f" >= {_plain(low)}"
    parts = [f"above {_plain(above)}"] if above is not None else []
    parts += [f"at most {_plain(high)}"] if high is not None else []
    return " " + " and ".join(parts) if parts else ""


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def as_toml(value: object) -> str:
    """A scalar or an array of strings as TOML text (JSON strings are valid TOML basic strings)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def shown(value: object) -> str:
    """A value from a user's file, short enough for a sentence."""
    if isinstance(value, Mapping):
        return "a table"
    text = as_toml(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Comments in run.toml above each table and key but for the task's own table, `[model]`.

TABLES = {
    "run": "The run itself.",
    "model": "The model: keys of the task.",
    "data": "What the learners read.",
    "inner": "Inner optimizer: what every learner does on its own, at every inner step.",
    "sync": "Synchronisation: when fragments of the model travel, and how long a syncer waits.",
    "outer": "Outer optimizer: Nesterov momentum on the merged pseudo-gradients.",
    "codec": "How tensors travel.",
    "group": "Who merges with whom, and how long versions are kept.",
    "admission": "Who may be a member.",
    "weight": "How much one learner weighs in a merge (docs/results.md).",
    "audit": "What members look at of each other's work (docs/protocol/loss-audits.md).",
    "end": "What happens at the end of the schedule (docs/topics/course.md).",
    "export": "What a given model's folder said besides, for `p2pdiloco export` (run new --from writes it).",
}

COMMENTS = {
    "format": "Version of this file's schema.",
    "run.name": "Human name; the run id (a digest) tells two runs of one name apart.",
    "run.seed": "Seeds version 0, data streams and group hashes.",
    "run.task": "What is learned: causal-lm, image-classification, or what an installed package brings.",
    "run.task_package": "What a node that lacks the task is told to install.",
    "run.initial": "SHA-256 of given parameters that are version 0 (run new --from); empty: from the seed.",
    "run.initial_name": "What those are, for people.",
    "data.source": "embedded: comes with the task; files, jsonl, parquet: own --data; hub: streamed.",
    "data.field": "Key of a JSONL line, or column, that is the document (jsonl, parquet, hub).",
    "data.dataset": "Name on the Hugging Face hub (hub); a node's --data folder takes its place.",
    "data.config": "Its configuration; empty: the default one.",
    "data.split": "Its split to train on.",
    "data.revision": "Its commit, so that it stays the same; empty: the newest.",
    "data.shuffle_samples": "So many samples of a stream are read ahead and shuffled (hub).",
    "data.heldout_percent": "Share that nobody trains on, by hash of the content.",
    "data.heldout_split": "A split that is held out instead (hub).",
    "data.tokenizer": "bytes, or name of a tokenizers JSON file kept beside this one (run new --tokenizer).",
    "data.tokenizer_revision": "The file's commit on the hub.",
    "data.tokenizer_digest": "The file's SHA-256: all nodes must have the same one.",
    "data.end_of_document": "Token between documents; empty for bytes, which have a newline there.",
    "data.begin_of_document": "Token in front of each document and prompt; empty: none.",
    "inner.optimizer": "adamw, or muon for matrices with adamw for embeddings, head and vectors.",
    "inner.learning_rate": "Peak learning rate; of muon it may be one to four times adamw's.",
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
    "sync.grace_fraction": "gamma: share of the slack that a syncer waits; never less than answers take.",
    "sync.grace_cap_s": "Upper bound of that wait, in seconds.",
    "sync.keep_in_flight": "rho: 1 keeps inner steps made while a contribution was in flight, 0 drops them.",
    "outer.learning_rate": "eta of the outer step.",
    "outer.momentum": "mu of the outer step.",
    "outer.momentum_warmup_merges": "Momentum grows from 0 over as many merges of a fragment.",
    "outer.merge": "mean, or rda (radial-directional averaging), which keeps pseudo-gradients' length.",
    "codec.contribution": "Of contributions. Bytes each: fp32 4, bf16 2, int8 1, int4/e3m0 0.53, topk 0.03.",
    "codec.update": "Of the merged outer update that everyone applies; the same choice.",
    "group.size": "g: members that merge together; more fall into several groups, merged in levels.",
    "group.expected_members": "Members at the start, about (0: one group); later the versions count them.",
    "group.term_versions": "A syncer's term, in versions of its fragment; then the next one is elected.",
    "group.log_versions": "L: outer updates that every peer keeps for stragglers; older ones fetch state.",
    "group.max_base_age_versions": "Contributions against an older base are refused, rebased and sent again.",
    "admission.mode": "open: whoever knows the run; invite: by the owner's invites; list: the owner's list.",
    "admission.seats": "Peers that vote and merge from version 0 on; its owner seats others: p2pdiloco seat.",
    "admission.recovery": "Peer id of the key that ends the power of a stolen owner.key.",
    "weight.largest_share": "Of a merge, one learner's at most, from three on; 1: no limit, among friends.",
    "weight.open_share": "Of a merge, what all learners without a seat have at most, together.",
    "weight.most_units": "Weight of a contribution at most, in usual ones.",
    "audit.loss_share": "Of learners' time, for measuring single contributions of others; 0: none.",
    "end.learners": "stop: no inner steps beyond schedule_tokens; go-on: at the floor of the learning rate.",
    "export.token_ids": "Ids of special tokens in its config.json; empty: data.end_of_document's.",
    "export.tokenizer_config": "Its tokenizer_config.json.",
    "export.generation_config": "Its generation_config.json: when to stop, how to choose tokens.",
    "export.chat_template": "Its chat template.",
    "export.dtype": "Type of its parameters, and of those that are exported.",
    "export.context_tokens": "Tokens that it is made for, as exports say; 0: as many as the run trains on.",
}


# Signed manifests: an owner publishes one, its digest names the run, and a newcomer verifies it.

MAX_SIGNED_BYTES = MAX_MANIFEST_BYTES + 1024
"""Bytes of a manifest with owner, digest and signature: whatever manifest is allowed can be signed."""
Verify = Callable[[str, bytes, bytes], bool]
"""(peer id, message, signature) -> whether that peer signed it; never raises
(`core.api.types.Crypto.verify`)."""


class Signer(Protocol):
    """The half of `core.api.types.Crypto` that an owner needs."""

    def sign(self, message: bytes) -> bytes:
        """Sign the message; returns the signature."""


class SignedManifest(Frozen, array_like=True, forbid_unknown_fields=True):
    """A manifest as it travels and as it lies on disk. Field order is wire format."""

    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]
    """Canonical bytes (`canonical_bytes`)."""
    owner: Annotated[str, Meta(min_length=1, max_length=80)]
    """The owner's peer id."""
    genesis_digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """SHA-256 over all fragments' version-0 state digests, in order."""
    signature: Annotated[bytes, Meta(max_length=128)]


_signing_decoder = msgpack.Decoder(SignedManifest, strict=True)


def genesis_digest_of(state_digests: tuple[bytes, ...]) -> bytes:
    """SHA-256 over the version-0 state digests (32 bytes each) of all fragments, by index."""
    return hashlib.sha256(b"p2pdiloco/1/genesis\0" + b"".join(state_digests)).digest()


def sign_manifest(manifest: Manifest, genesis_digest: bytes, crypto: Signer, owner: str) -> SignedManifest:
    """Sign as the run's owner; `owner` is the peer id of crypto's key."""
    unsigned = SignedManifest(canonical_bytes(manifest), owner, genesis_digest, b"")
    signature = crypto.sign(_covered("manifest", unsigned))
    return replace(unsigned, signature=signature)


def run_id(signed: SignedManifest) -> str:
    """The run's name among programs: 64 hex digits over owner, manifest and genesis digest."""
    return hashlib.sha256(_covered("run-id", signed)).hexdigest()


def verify(signed: SignedManifest, crypto_verify: Verify) -> Manifest:
    """The manifest, if its owner signed it and it is valid.

    Raises:
        RemoteError: "manifest-signature", or as `manifest_from_canonical`.
    """
    check_signature(signed, crypto_verify)
    return manifest_from_canonical(signed.manifest)


def check_signature(signed: SignedManifest, crypto_verify: Verify) -> None:
    """Check that the owner signed it; nothing of the manifest is decoded.

    Raises:
        RemoteError: "manifest-signature".
    """
    if not crypto_verify(signed.owner, _covered("manifest", signed), signed.signature):
        raise RemoteError("manifest-signature", f"not signed by {signed.owner}")


def encode_signed(signed: SignedManifest) -> bytes:
    """Encode for the wire (at most `MAX_SIGNED_BYTES`)."""
    return _encoder.encode(signed)


def decode_signed(data: bytes) -> SignedManifest:
    """Decode what a peer sent; `verify` comes next.

    Raises:
        RemoteError: "manifest-oversized" or "manifest-garbage".
    """
    return _decoded(_signing_decoder, data, MAX_SIGNED_BYTES)


def save_signed(path: Path, signed: SignedManifest) -> None:
    """Write atomically: a crash leaves the old file or the new one, whole.

    Raises:
        StorageError: the folder is missing, full or not writable; no temporary file stays.
    """
    # The process id keeps two writers apart; leftovers of a kill have a name that is never read.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                file.write(encode_signed(signed))
                file.flush()
                os.fsync(file.fileno())
            clear_folder_at(path)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def load_signed(path: Path, crypto_verify: Verify) -> tuple[SignedManifest, Manifest]:
    """Read and verify a saved manifest.

    Raises:
        StorageError: missing, unreadable, damaged, or not signed by the owner that it names.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SIGNED_BYTES + 1)
        signed = decode_signed(data)
        return signed, verify(signed, crypto_verify)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except RemoteError as error:
        raise StorageError(f"{path}: is damaged ({error})", hint="delete it; peers give it again") from error


def _covered(domain: str, signed: SignedManifest) -> bytes:
    """Bytes that signature and run id cover: all fields but the signature, under a domain separator."""
    fields = (signed.owner, signed.manifest, signed.genesis_digest)
    return b"p2pdiloco/1/" + domain.encode() + b"\0" + _encoder.encode(fields)
