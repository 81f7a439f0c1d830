"""The manifest's canonical bytes: in, out, and the rules that span several keys of every run.

What concerns the task's own table, and run.toml, is in `tasks.manifests`. A user's mistake is a
`ConfigError` naming file and key; the same mistake in what a peer sent is a `RemoteError`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from p2pdiloco.config.comments import COMMENTS, TABLES
from p2pdiloco.config.manifest import (
    AdmissionSection,
    AuditSection,
    EndSection,
    ExportSection,
    Manifest,
    WeightSection,
)
from p2pdiloco.config.models import BYTES, ModelSection, Section, table
from p2pdiloco.config.schema import as_toml, keys_of
from p2pdiloco.errors import RemoteError

MAX_MANIFEST_BYTES = 64 * 1024
DECODING = (msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError)
"""Errors of a decoder that is given garbage: bad UTF-8, numbers out of range and deep nesting are not
msgspec's own."""

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Manifest, strict=True)


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
            group.max_base_age_versions <= group.log_versions,
            f"group.max_base_age_versions must be at most group.log_versions ({group.log_versions}), "
            f"it is {group.max_base_age_versions}",
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
            data.source == "hub" or not (data.dataset or data.heldout_split),
            'data.dataset and data.heldout_split are for data.source = "hub"',
        ),
        *(
            (_is_object(text), f"export.{name} must be a JSON object, or empty")
            for name, text in msgspec.structs.asdict(manifest.export).items()
            if name not in ("chat_template", "dtype", "context_tokens")
        ),
    )
    return next((sentence for holds, sentence in rules if not holds), None)


def _is_object(text: str) -> bool:
    try:
        return not text or isinstance(msgspec.json.decode(text), dict)
    except DECODING:
        return False


def canonical_bytes(manifest: Manifest) -> bytes:
    """The one encoding of a manifest (msgpack, every field, schema order, the task's keys sorted): what is
    signed and hashed. Without what came later and says nothing, as in runs that are older."""
    data = _told(manifest.data, {"begin_of_document": ""})
    export = _told(manifest.export, {"dtype": ExportSection().dtype, "context_tokens": 0})
    return _encoder.encode(_told(manifest, _CAME_LATER, data=data, export=export))


_CAME_LATER: dict[str, Section] = {
    "admission": AdmissionSection(),
    "weight": WeightSection(),
    "audit": AuditSection(),
    "end": EndSection(),
    "export": ExportSection(),
}


def _told(section: Struct, quiet: Mapping[str, object], **encoded: Struct) -> Struct:
    """Make a struct of the fields of a section whose values are not these; `encoded`: instead of its own."""
    values = {name: getattr(section, name) for name in section.__struct_fields__}
    told = tuple(name for name, value in values.items() if value != quiet.get(name))
    return _with(told)(*map((values | encoded).__getitem__, told))


@functools.cache
def _with(fields: tuple[str, ...]) -> type[Struct]:
    return msgspec.defstruct("ToldManifest", fields)


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
    if len(data) > MAX_MANIFEST_BYTES:
        raise RemoteError("manifest-oversized", f"{len(data)} bytes")
    try:
        manifest = _decoder.decode(data)
    except DECODING as error:
        raise RemoteError("manifest-garbage", str(error)) from error
    if canonical_bytes(manifest) != data:
        raise RemoteError("manifest-garbage", "not the canonical encoding of this version of p2pdiloco")
    broken = broken_rule(manifest)
    if broken:
        raise RemoteError("manifest-invalid", broken)
    return manifest


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
