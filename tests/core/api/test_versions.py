"""Version headers: what names them, and evidence about one of their contributors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import child, genesis
from msgspec.structs import replace

from p2pdiloco.core.api import types
from p2pdiloco.core.api.types import MergeLimits, signed_bytes
from p2pdiloco.core.api.versions import MergedPartial, ShortHeader, VersionHeader


def test_a_version_is_named_and_signed_by_its_short_header() -> None:
    header = child(genesis(0).header, by="p2").header
    short = header.short()
    assert ShortHeader.__struct_fields__ == VersionHeader.__struct_fields__
    assert header.contributors and short.digest() == header.digest() == header.head().digest
    assert signed_bytes("version", short) == signed_bytes("version", header)


@pytest.mark.parametrize("field", [f for f in VersionHeader.__struct_fields__ if f != "contributors"])
def test_no_field_changes_without_the_name(field: str) -> None:
    header = child(genesis(0).header, by="p2").header
    value = getattr(header, field)
    others = {str: "other", int: 77, float: 0.77, bytes: b"\7" * 32, MergeLimits: MergeLimits(77, 7.0)}
    others[type(None)] = b"\7" * 32
    others[tuple] = (MergedPartial("1/0/0", "p1", bytes(32), b""),)
    other = others[type(value)]
    assert replace(header, **{field: other}).digest() != header.digest()


def test_no_contributor_changes_without_the_name() -> None:
    header = child(genesis(0).header, by="p2").header
    part = header.contributors[0]
    for other in (replace(part, tokens=part.tokens + 1), replace(part, signature=b"other")):
        assert replace(header, contributors=(other, *header.contributors[1:])).digest() != header.digest()
    assert replace(header, contributors=()).digest() != header.digest()


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=33), st.data())
def test_a_path_leads_from_its_own_entry_to_the_root_and_from_no_other(
    entries: list[bytes], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(entries) - 1))
    way, root = types.merkle_path(entries, index), types.merkle_root(entries)
    assert types.merkle_root_of(entries[index], way) == root
    assert types.merkle_root_of(entries[index] + b"x", way) != root
    if way:
        (on_left, sibling), *rest = way
        assert types.merkle_root_of(
            entries[index], ((on_left, bytes(32)), *rest)
        ) != root or sibling == bytes(32)


def test_an_inner_node_does_not_pass_for_an_entry() -> None:
    entries = [b"a", b"b", b"c"]
    (_, left), *_ = types.merkle_path(entries, 1)
    inner = left + types.merkle_path(entries, 0)[0][1]
    assert types.merkle_root([inner, b"c"]) != types.merkle_root(entries)


def test_order_and_number_of_entries_count() -> None:
    roots = {
        types.merkle_root(e) for e in ([], [b""], [b"", b""], [b"a", b"b"], [b"b", b"a"], [b"a", b"b", b"b"])
    }
    assert len(roots) == 6
