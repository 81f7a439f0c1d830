"""Signed records of the DHT: what is signed, and what makes a record acceptable.

A record lives under (key, subkey); the subkey is its owner's peer id, so every peer has exactly one record
under a key and nobody can touch another's. On the wire a value is the msgpack encoding of bytes, followed
by the owner's 64-byte Ed25519 signature over domain, key, subkey, value and expiration.
"""

from __future__ import annotations

import msgspec

from p2pdiloco.core.api.types import Crypto
from p2pdiloco.identity import SIGNATURE_BYTES

MAX_VALUE_BYTES = 32 * 1024
MAX_LIFETIME_S = 300.0
"""Time for which a record is kept at most: it says where somebody is, who can say so again."""
MAX_CLOCK_SKEW_S = 10.0
_DOMAIN = "p2pdiloco/1/record"
_encoder = msgspec.msgpack.Encoder()
_bytes = msgspec.msgpack.Decoder(bytes)
_text = msgspec.msgpack.Decoder(str)


def signed_value(crypto: Crypto, key: bytes, subkey: bytes, value: bytes, expires: float) -> bytes:
    """Append our signature to the value. key: 20-byte DHT id; subkey, value: msgpack; expires: Unix time,
    s."""
    return value + crypto.sign(signed_message(key, subkey, value, expires))


def acceptable(crypto: Crypto, key: bytes, subkey: bytes, signed: bytes, expires: float, now: float) -> bool:
    """Tell whether a record from a peer is well-formed, bounded, and signed by the peer that its subkey
    names.

    Expired records pass (the DHT drops them by itself, and a dictionary is judged as a whole).
    """
    if not (SIGNATURE_BYTES < len(signed) <= MAX_VALUE_BYTES + SIGNATURE_BYTES + 8) or len(subkey) > 96:
        return False
    if not expires <= now + MAX_LIFETIME_S + MAX_CLOCK_SKEW_S:  # so written that NaN fails
        return False
    value, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    try:
        owner = _text.decode(subkey)
        _bytes.decode(value)  # an undecodable value would fail every reader's whole look-up
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return crypto.verify(owner, signed_message(key, subkey, value, expires), signature)


def stripped(signed: bytes) -> bytes:
    """Cut the signature off."""
    return signed[:-SIGNATURE_BYTES]


def signed_message(key: bytes, subkey: bytes, value: bytes, expires: float) -> bytes:
    """Encode what a record's owner signs."""
    return _encoder.encode([_DOMAIN, key, subkey, value, float(expires)])
