"""run.toml and the manifest's canonical bytes: in, out, and the rules that span several keys.

A user's mistake is a `ConfigError` naming file and key; the same mistake in what a peer sent is a
`RemoteError`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from p2pdiloco.config.comments import COMMENTS, TABLES
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import approximate_parameters
from p2pdiloco.config.schema import as_toml, keys_of
from p2pdiloco.config.strict import convert, read_toml
from p2pdiloco.errors import ConfigError, RemoteError

MAX_MANIFEST_BYTES = 64 * 1024
BYTE_VALUES = 256

_decoder = msgspec.msgpack.Decoder(Manifest, strict=True)


def load_manifest(path: Path) -> Manifest:
    """Read and check a run.toml.

    Raises:
        ConfigError: one sentence naming the file and the key or line.
    """
    manifest = convert(read_toml(path), Manifest, str(path))
    check_manifest(manifest, str(path))
    return manifest


def check_manifest(manifest: Manifest, label: str) -> None:
    """Check the rules that span several keys.

    Raises:
        ConfigError: the first broken one; `label` (a file name) opens the sentence.
    """
    broken = broken_rule(manifest)
    if broken:
        raise ConfigError(f"{label}: {broken}")


def broken_rule(manifest: Manifest) -> str | None:
    """The first rule between keys that does not hold, as half a sentence; None if all hold."""
    model, inner, sync, group = manifest.model, manifest.inner, manifest.sync, manifest.group
    rows = approximate_parameters(model) // model.width
    rules = (
        (
            model.width % model.heads == 0,
            f"model.width must be a multiple of model.heads ({model.heads}), it is {model.width}",
        ),
        (
            model.vocabulary >= BYTE_VALUES,
            f"model.vocabulary must be at least {BYTE_VALUES} (raw bytes), it is {model.vocabulary}",
        ),
        (
            inner.tokens_per_step % model.context_tokens == 0,
            f"inner.tokens_per_step must be a multiple of model.context_tokens ({model.context_tokens}), "
            f"it is {inner.tokens_per_step}",
        ),
        (
            inner.warmup_steps < inner.schedule_steps,
            f"inner.warmup_steps must be below inner.schedule_steps ({inner.schedule_steps}), "
            f"it is {inner.warmup_steps}",
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
            sync.fragments <= rows,
            f"sync.fragments must be at most {rows} for a model of this shape, it is {sync.fragments}",
        ),
        (
            group.max_base_age_versions <= group.log_versions,
            f"group.max_base_age_versions must be at most group.log_versions ({group.log_versions}), "
            f"it is {group.max_base_age_versions}",
        ),
    )
    return next((sentence for holds, sentence in rules if not holds), None)


def canonical_bytes(manifest: Manifest) -> bytes:
    """The one encoding of a manifest (msgpack, every field, schema order): what is signed and hashed."""
    return msgspec.msgpack.encode(manifest)


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
    # Deeply nested garbage raises RecursionError, not msgspec's own error.
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteError("manifest-garbage", str(error)) from error
    if canonical_bytes(manifest) != data:
        raise RemoteError("manifest-garbage", "not the canonical encoding")
    broken = broken_rule(manifest)
    if broken:
        raise RemoteError("manifest-invalid", broken)
    return manifest


def render_toml(manifest: Manifest) -> str:
    """The manifest as a commented run.toml; `load_manifest` reads the same manifest back."""
    lines = [
        f'# Run "{manifest.run.name}": all that its peers must agree on; any change makes another run.',
        "# Check it with: p2pdiloco run check FILE. Ports, folders and devices are flags of p2pdiloco node.",
        "",
    ]
    section = ""
    for key in keys_of(Manifest).values():
        if key.section != section:
            section = key.section
            lines += ["", f"# {TABLES[section]}", f"[{section}]"]
        owner: Struct = getattr(manifest, section) if section else manifest
        lines.append(f"# {COMMENTS[key.path]} ({key.words})")
        lines.append(f"{key.name} = {as_toml(getattr(owner, key.name))}")
    return "\n".join(lines) + "\n"
