"""Node settings: rules between flags, addresses, the settings file, unknown variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco.config.settings import (
    DAY_MIN,
    FIELDS,
    BootstrapSettings,
    NodeSettings,
    OwnLimits,
    bounds_of,
    changed,
    check_bootstrap,
    check_environment,
    check_node,
    load_settings_table,
    next_begin_min,
    parse_hours,
    value_text,
)
from p2pdiloco.config.values import (
    check_multiaddr,
    check_peer_address,
    intended_line,
    parse_rate,
    parse_size,
    rate_text,
    read_toml,
)
from p2pdiloco.errors import ConfigError

PEER = "12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q"
GOOD = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"


@pytest.mark.parametrize(
    "address",
    [
        GOOD,
        f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}",
        f"/dns4/example.org/udp/9/quic-v1/p2p/{PEER}",
        f"{GOOD}/p2p-circuit/p2p/{PEER}",
    ],
)
def test_addresses_that_name_a_peer(address: str) -> None:
    check_peer_address(address)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "must look like"),
        ("203.0.113.7:31337", "must look like"),
        ("/ip4/203.0.113.7", "must look like"),
        (f"/ip4/203.0.113.777/tcp/31337/p2p/{PEER}", 'no valid ip4 address "203.0.113.777"'),
        (f"/ip4/2001:db8::1/tcp/31337/p2p/{PEER}", "no valid ip4 address"),
        (f"/ip4/203.0.113.7/tpc/31337/p2p/{PEER}", 'must use tcp or udp, not "tpc"'),
        (f"/ip4/203.0.113.7/tcp/313370/p2p/{PEER}", 'no valid port "313370"'),
        (f"/ip4/203.0.113.7/tcp/²/p2p/{PEER}", 'no valid port "²"'),
        ("/ip4/203.0.113.7/tcp/31337", "needs the peer's id at the end"),
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER[:-20]}", "mistyped peer id"),
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER[:-1]}0", "mistyped peer id"),
    ],
)
def test_mistyped_addresses_say_what_is_wrong(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match="--join") as caught:
        check_peer_address(address)
    assert words in str(caught.value)
    assert caught.value.hint


def test_listening_needs_no_peer_and_takes_none() -> None:
    check_multiaddr("/ip4/0.0.0.0/tcp/0", "--listen")
    with pytest.raises(ConfigError, match="--listen must not name a peer"):
        check_bootstrap(BootstrapSettings(listen=(GOOD,)))


def test_a_bootstrap_fetches_runs_by_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is named by its id") as error:
        check_bootstrap(BootstrapSettings(join=(GOOD,), run=(Path("ours"),)))
    assert "its link: --join p2pdiloco:1" in error.value.hint
    check_bootstrap(BootstrapSettings(join=(GOOD,), run=(Path("ab" * 32),)))
    check_bootstrap(BootstrapSettings(join=(GOOD,), run=(Path("no/such.toml"),)))  # said when it is read
    Path("ours").touch()
    check_bootstrap(BootstrapSettings(join=(GOOD,), run=(Path("ours"),)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (NodeSettings(), "there is no peer to join: give a run link, an invite, or the address"),
        (NodeSettings(genesis=True), "there is no peer to join"),
        (
            NodeSettings(join=(GOOD,), run_file=Path("run.toml")),
            "--run-file starts a new run, so it needs --genesis",
        ),
        (NodeSettings(join=(GOOD,), device="gpu"), "--device must be"),
        (NodeSettings(join=(GOOD,), device="cuda:x"), "--device must be"),
        (NodeSettings(join=(GOOD,), max_memory="1"), '--max-memory must be at least 1MiB, it is "1"'),
    ],
)
def test_rules_between_flags(
    settings: NodeSettings, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # a node of this machine's has met peers
    with pytest.raises(ConfigError) as caught:
        check_node(settings)
    assert str(caught.value).startswith(words)


def test_a_good_node_and_its_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    checked = check_node(NodeSettings(join=(GOOD,), device="cuda:1"))
    assert checked.data_dir == Path("/home/ada/.p2pdiloco/node")
    assert check_node(NodeSettings(genesis=True, run_file=Path("run.toml"))).genesis


def test_the_file_says_only_what_it_sets_with_paths_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[node]\nthreads = 2\ndata_dir = "state"\n[bootstrap]\nrun = ["a.toml", "/b.toml"]\n')
    assert load_settings_table(path, "node") == {"threads": 2, "data_dir": tmp_path / "state"}
    assert load_settings_table(path, "bootstrap") == {"run": (tmp_path / "a.toml", Path("/b.toml"))}


@pytest.mark.parametrize(
    ("text", "sentence", "hint"),
    [
        ("[node]\nthread = 2", 'there is no key "node.thread"', 'did you mean "node.threads"?'),
        ("[nodes]\nthreads = 2", 'there is no table "nodes"', 'did you mean "node"?'),
        ("threads = 2", 'there is no key "threads"', 'did you mean "node.threads"?'),
        ('[node]\nthreads = "2"', 'node.threads must be an integer from 0 to 1024, it is "2"', ""),
        ("[node]\ndata_dir = 3", "node.data_dir must be a path, it is 3", ""),
        (f'[node]\njoin = "{GOOD}"', "node.join must be an array, each item a string, it is", ""),
        ("[node]\njoin = [3]", "node.join must be an array, each item a string, it is [3]", ""),
        ('[bootstrap]\nlog = "loud"', "bootstrap.log must be one of", ""),
    ],
)
def test_the_file_is_read_strictly(text: str, sentence: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings_table(path, "node")
    assert str(caught.value).startswith(f"{path}: {sentence}")
    assert caught.value.hint == hint


def test_unknown_variables_are_refused_others_ignored() -> None:
    known = frozenset({"P2PDILOCO_THREADS"})
    check_environment({"P2PDILOCO_THREADS": "1", "PATH": "/bin"}, known)
    service = (
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_P2P",
        "PORT",
        "PORT_4001_TCP",
        "PORT_4001_UDP_ADDR",
    )
    check_environment({f"P2PDILOCO_BOOTSTRAP_{name}": "tcp://10.0.0.1:4001" for name in service}, known)
    with pytest.raises(ConfigError, match="P2PDILOCO_THREAD is not known") as caught:
        check_environment({"P2PDILOCO_THREAD": "1"}, known)
    assert caught.value.hint == 'did you mean "P2PDILOCO_THREADS"?'


# Limits of a machine's owner, as they are written.


def inside(text, day, hour, minute=0):
    return any(span.holds(day * DAY_MIN + hour * 60 + minute) for span in parse_hours(text))


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ("22-7", [(0, 22), (3, 23), (4, 0), (6, 6)], [(0, 21), (0, 7), (2, 12)]),
        ("9:30-17", [(0, 10), (6, 16)], [(0, 9), (0, 17)]),
        ("0-24", [(0, 0), (6, 23)], []),
        ("mon-fri 22-7", [(4, 23), (5, 6)], [(5, 22), (0, 6), (6, 23)]),  # Friday's night ends on Saturday
        ("mon-fri 22-7, sat-sun 0-24", [(5, 12), (0, 23), (6, 23)], [(0, 12), (0, 3)]),
        ("sat-mon 0-6", [(5, 1), (6, 1), (0, 1)], [(1, 1)]),
        ("SUN 23-1", [(6, 23), (0, 0)], [(0, 23), (6, 0)]),
        ("22-7, 12-13", [(2, 12), (2, 23)], [(2, 13)]),
    ],
)
def test_hours_of_the_week(text, yes, no):
    assert all(inside(text, *at) for at in yes)
    assert not any(inside(text, *at) for at in no)


@pytest.mark.parametrize(
    "text",
    ["22", "22-25", "22-22", "-", "24-7", "9:60-17", "mo 1-2", "22-7;", "22-7,", "a" * 300, "1-2," * 40],
)
def test_hours_that_cannot_be_are_one_sentence(text):
    with pytest.raises(ConfigError, match="--hours must be hours"):
        parse_hours(text)


def test_it_is_known_when_hours_begin():
    spans = parse_hours("mon-fri 22-7")
    assert next_begin_min(spans, 12 * 60) == 10 * 60
    assert next_begin_min(spans, 5 * DAY_MIN + 8 * 60) == 2 * DAY_MIN + 14 * 60
    assert next_begin_min(parse_hours("22-7, 12-13"), 8 * 60) == 4 * 60


def test_limits_as_numbers():
    limits = OwnLimits(
        max_upload="20Mbit", max_transfer="200GB/month", when_idle="10min", hours="22-7", max_power=200.0
    )
    bounds = bounds_of(limits)
    assert (bounds.upload_bits_per_s, bounds.download_bits_per_s) == (20e6, 0)
    assert (bounds.transfer_bytes, bounds.idle_s, bounds.max_power_w) == (200_000_000_000, 600, 200)
    assert bounds_of(OwnLimits(max_transfer="2 GiB / Month")).transfer_bytes == 2 << 30
    assert bounds_of(OwnLimits()).hours == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max-transfer": "200GB/week"}, "--max-transfer is for a calendar month"),
        ({"max-transfer": "much"}, "--max-transfer must be bytes"),
        ({"when-idle": "10"}, "--when-idle must be a time"),
        ({"when-idle": "0min"}, "--when-idle must be a time"),
        ({"when-idle": "3merges"}, "--when-idle must be a time"),
        ({"not-on-battery": "perhaps"}, "--not-on-battery must be yes or no"),
        ({"max-power": "nan"}, "--max-power"),
        ({"max-temperature": "900"}, "--max-temperature"),
        ({"min-step-s": "-1"}, "--min-step-s"),
        ({"max-upload": "1bit"}, "--max-upload must be at least"),
        ({"hours": "22-7", "colour": "red"}, 'there is no limit "colour"'),
    ],
)
def test_a_change_that_cannot_be_is_one_sentence(change, words):
    with pytest.raises(ConfigError, match=words) as told:
        changed(OwnLimits(), change)
    assert "max-transfer" not in change or told.value.hint == "for example 200GB/month"


def test_limits_are_changed_and_taken_away():
    limits = changed(
        OwnLimits(hours="22-7"), {"max-upload": "5Mbit", "not-on-battery": "yes", "hours": "none"}
    )
    assert limits == OwnLimits(max_upload="5Mbit", not_on_battery=True)
    assert changed(limits, {"max_upload": "", "not-on-battery": "no"}) == OwnLimits()
    assert [value_text(getattr(limits, name)) for name in ("max_upload", "not_on_battery", "max_power")] == [
        "5Mbit",
        "yes",
        "",
    ]


def test_every_limit_is_a_flag_of_the_node_with_the_same_default():
    assert all(getattr(NodeSettings(), name) == getattr(OwnLimits(), name) for name in FIELDS)


# Rates and sizes as people write them.


@pytest.mark.parametrize(
    ("text", "bits"),
    [("20Mbit", 20e6), ("20 mbit/s", 20e6), ("1.5Gbps", None), ("500kbit", 5e5), ("1Gbitps", 1e9), ("", 0)],
)
def test_rates(text: str, bits: float | None) -> None:
    if bits is None:
        with pytest.raises(ConfigError, match="bits per second"):
            parse_rate(text, "--max-upload")
    else:
        assert parse_rate(text, "--max-upload") == bits


@pytest.mark.parametrize("text", ["fast", "-1Mbit", "20MB", "1e9", "99kbit", "0"])
def test_what_is_no_rate_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-upload must be"):
        parse_rate(text, "--max-upload")


def test_rates_in_words() -> None:
    assert [rate_text(rate) for rate in (19.6e6, 1e9, 12.0, 999e3)] == ["19.6 M", "1 G", "12 ", "999 k"]


def test_sizes() -> None:
    assert parse_size("2GiB", "--max-memory") == 2 * 2**30
    assert parse_size("500MB", "--max-memory") == 500e6
    assert parse_size("", "--max-memory") == 0
    for text in ("2Gbit", "0", "-1MB", "lots"):
        with pytest.raises(ConfigError, match="--max-memory must be bytes"):
            parse_size(text, "--max-memory")


# What stands where quotes are missing is answered with the line as it was meant.

TEXT = "text stands in quotes: "


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("name = Zo and more", TEXT + 'name = "Zo and more"'),
        ("max_upload = 20Mbit  # of 50", TEXT + 'max_upload = "20Mbit"'),
        ("data_dir = ~/x", TEXT + 'data_dir = "~/x"'),
        ('name = "x', TEXT + 'name = "x"'),
        ("name = “x”", TEXT + 'name = "x"'),
        ('join = [/ip4/1.2.3.4/tcp/1, "b"]', TEXT + 'join = ["/ip4/1.2.3.4/tcp/1", "b"]'),
        ("join = /ip4/1.2.3.4/tcp/1", TEXT + 'join = "/ip4/1.2.3.4/tcp/1"'),
        ("genesis = Yes", "true and false are written small, without quotes: genesis = true"),
        ("relay = off", "true and false are written small, without quotes: relay = false"),
        ("name =", TEXT + 'name = ""'),
        ('name = a"b', ""),
        ("[node", ""),
        ("seed = 1", ""),
    ],
)
def test_a_line_is_written_as_it_was_meant(line: str, answer: str) -> None:
    assert intended_line(line) == answer


@pytest.mark.parametrize("line", ["name = shake\n", "name = shake", "name = shake\r\n", 'name = "shake'])
def test_a_settings_file_without_quotes_is_told_how(line: str, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(f"[node]\n{line}".encode())
    with pytest.raises(ConfigError, match="line 2 is not valid TOML") as told:
        read_toml(path)
    assert told.value.hint == TEXT + 'name = "shake"'
