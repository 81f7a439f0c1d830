"""Node settings: rules between flags, addresses, the settings file, unknown variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco.config.settings import (
    BootstrapSettings,
    NodeSettings,
    check_bootstrap,
    check_environment,
    check_node,
    load_settings_table,
)
from p2pdiloco.config.values import check_multiaddr, check_peer_address
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
        (NodeSettings(genesis=True), "--genesis without --join needs --run-file"),
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
