"""Files of operators: example settings with the true defaults, homes that nobody knows, service units."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest
import yaml
from deadlines import within_s
from msgspec import Struct

from p2pdiloco.cli.group import cli
from p2pdiloco.cli.main import run
from p2pdiloco.cli.options import known_variables
from p2pdiloco.config.settings import (
    BootstrapSettings,
    NodeSettings,
    check_bootstrap,
    check_environment,
    check_node,
    load_settings_table,
)
from p2pdiloco.config.values import expanded, has_home, those_known
from p2pdiloco.daemon.program import data_folder
from p2pdiloco.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES: list[tuple[str, type[Struct]]] = [("node", NodeSettings), ("bootstrap", BootstrapSettings)]
ILLUSTRATIVE = {"data", "run_file", "learner_socket", "result_dir"}
"""Paths that are unset by default: the commented line can only show an example."""


def commented(role: str) -> str:
    """The example with its commented-out keys switched on."""
    text = (ROOT / role / f"{role}.toml").read_text(encoding="utf-8")
    return re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)


@pytest.mark.parametrize(("role", "settings"), EXAMPLES)
def test_the_example_is_usable_as_it_is(role: str, settings: type[Struct]) -> None:
    values = load_settings_table(ROOT / role / f"{role}.toml", role)
    assert values["data_dir"] == Path(f"/var/lib/p2pdiloco/{role}")
    loaded = settings(**values)
    check_node(loaded) if isinstance(loaded, NodeSettings) else check_bootstrap(loaded)  # type: ignore[arg-type]


@pytest.mark.parametrize(("role", "settings"), EXAMPLES)
def test_every_key_is_in_the_example_and_shown_defaults_are_true(
    role: str, settings: type[Struct], tmp_path: Path
) -> None:
    path = tmp_path / f"{role}.toml"
    path.write_text(commented(role), encoding="utf-8")
    values = load_settings_table(path, role)
    defaults = {field.name: field.default for field in msgspec.structs.fields(settings)}
    assert set(values) == set(defaults)
    as_shipped = load_settings_table(ROOT / role / f"{role}.toml", role)
    for key in set(values) - set(as_shipped) - ILLUSTRATIVE:
        assert values[key] == defaults[key], key


@pytest.mark.parametrize("role", ["node", "bootstrap"])
def test_an_operators_folder_holds_no_python(role: str) -> None:
    names = {path.name for path in (ROOT / role).iterdir()}
    wanted = {"Containerfile", "RUNBOOK.md", f"{role}.toml", f"p2pdiloco-{role}.service"}
    if role == "bootstrap":
        wanted |= {"requirements.txt", "compose.yaml", "prometheus.yml", "alerts.yml", "grafana.json"}
    assert names == wanted
    assert tomllib.loads((ROOT / role / f"{role}.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("role", ["node", "bootstrap"])
def test_an_image_has_an_init_as_its_first_process(role: str) -> None:
    """Python hears no SIGTERM before it has a handler, if it is the first process."""
    entry = re.search(r"^ENTRYPOINT (.*)$", (ROOT / role / "Containerfile").read_text(), re.MULTILINE)
    assert entry is not None and entry[1] == f'["tini", "--", "p2pdiloco", "{role}"]'


@pytest.mark.parametrize("role", ["node", "bootstrap"])
def test_an_image_is_built_of_all_that_the_package_names(role: str) -> None:
    """A licence that is named and not there ends the build."""
    copied = " ".join(
        re.findall(r"^COPY (.*) \S+$", (ROOT / role / "Containerfile").read_text(), re.MULTILINE)
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*project["license-files"], project["readme"], "pyproject.toml", "setup.py"} <= set(copied.split())


def test_the_compose_file_speaks_of_settings_ports_and_files_that_exist() -> None:
    path = ROOT / "bootstrap" / "compose.yaml"
    services = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]
    assert {"bootstrap", "node-1", "node-2"} <= set(services)
    for name, service in services.items():
        if "build" not in service:
            continue
        check_environment(service["environment"], known_variables(cli))
        build = service["build"]
        image = (path.parent / build["context"] / build["dockerfile"]).read_text(encoding="utf-8")
        assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", image, re.MULTILINE)), name
        inside = {port.rpartition(":")[2] for port in service["ports"]}
        exposed = {"/".join(found) for found in re.findall(r"(\d+)/(tcp|udp)", image)}
        assert {port if "/" in port else f"{port}/tcp" for port in inside} <= exposed, name
        pages = [port for port in service["ports"] if port.endswith(":8080")]
        assert pages and all(port.startswith("127.0.0.1:") for port in pages), "for this machine only"


def test_the_compose_file_s_prometheus_asks_its_services_where_their_pages_are() -> None:
    path = ROOT / "bootstrap" / "compose.yaml"
    compose = yaml.safe_load(path.read_text(encoding="utf-8"))
    for config in compose["configs"].values():
        assert "content" in config or (path.parent / config["file"]).is_file()
    watching = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    built = {name: service for name, service in compose["services"].items() if "build" in service}
    targets = {
        target: job["authorization"]["credentials_file"]
        for job in watching["scrape_configs"]
        for target in job["static_configs"][0]["targets"]
    }
    asked_for = set(re.findall(r'job="(\w+)"', (path.parent / "alerts.yml").read_text(encoding="utf-8")))
    jobs = {job["static_configs"][0]["labels"]["job"] for job in watching["scrape_configs"]}
    assert jobs == asked_for, "alerts hear of all of them"
    assert set(targets) == {f"{service['hostname']}:8080" for service in built.values()}
    for target, token in targets.items():
        name, role = target.partition(":")[0], Path(token).parent.name
        assert token == f"/{name}/{role}/web.token"
        assert f"{name}:/{name}:ro" in compose["services"]["prometheus"]["volumes"]
        image = (path.parent / ".." / built[name]["build"]["dockerfile"]).read_text(encoding="utf-8")
        assert f"P2PDILOCO_DATA_DIR=/data/{role}" in image


# Homes that nobody knows: no HOME, and a user id without a name, as in many containers.

JOIN = ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGrW3c3JmGwPbTbVmn9LrgvmHDiEy2hkrUGWuJgKVCyUq",)


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)
    assert not has_home() and those_known([Path("~/x")]) == []


@pytest.mark.usefixtures("homeless")
def test_a_folder_that_is_named_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    node = check_node(NodeSettings(data_dir=Path("node"), join=JOIN))
    bootstrap = check_bootstrap(BootstrapSettings(data_dir=tmp_path / "bootstrap"))
    for settings in (node, bootstrap):
        monkeypatch.delenv("HOME", raising=False)
        with data_folder(settings):
            # Libraries keep what they fetch there, and not in a folder called "~".
            assert Path.home() == tmp_path / settings.data_dir
    monkeypatch.delenv("HOME", raising=False)
    new = ["run", "new", "x", "--preset", "micro", "--data-dir", "node"]
    assert run(new) == 0 and run(["run", "check", "run.toml"]) == 0


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(
    "arguments",
    [
        ("node", "--join", *JOIN),
        ("bootstrap",),
        ("status",),
        ("invite", "x"),
        ("ban", "x", "y"),
        ("can-join", "x"),
        ("run", "new", "x"),
        ("export", "--data-dir", "~/x", "--out", "y"),
        ("status", "--data-dir", "~/x"),
    ],
)
def test_else_it_is_one_sentence(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    if arguments[0] == "export":  # the config's tests run without torch, too
        pytest.importorskip("torch")
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert "HOME is not set, and the user id 987654321 has no name, so there is no home folder\n" in said
    assert "hint: name a folder with --data-dir, or set HOME\n" in said


def test_a_home_is_found_and_that_of_nobody_is_not() -> None:
    assert expanded(Path("~/x")) == Path.home() / "x" and expanded(Path("x")) == Path("x")
    with pytest.raises(ConfigError, match='--out ~nobody-such/x: there is no user "nobody-such"'):
        expanded(Path("~nobody-such/x"), "--out")


# The units let samples write what they name, hear the daemon's word, and leave it little else.

ROLES = ["node", "bootstrap"]
WRITTEN = ("data_dir", "result_dir", "learner_socket")
"""Settings that name a path which is written."""
MOST_EXPOSED = 39
"""Exposure in tenths, of 100."""


def unit(role: str) -> dict[str, str]:
    """Directives of the unit, each with its last value."""
    text = (ROOT / role / f"p2pdiloco-{role}.service").read_text(encoding="utf-8")
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("role", ROLES)
def test_the_unit_lets_the_sample_write_what_it_names(role: str, tmp_path: Path) -> None:
    path = tmp_path / f"{role}.toml"
    path.write_text(commented(role), encoding="utf-8")
    values, found = load_settings_table(path, role), unit(role)
    assert found["ProtectSystem"] == "strict"
    folders = [Path(word.lstrip("-")) for word in found.get("ReadWritePaths", "").split()]
    folders += [Path("/var/lib") / found["StateDirectory"]]
    folders += [Path("/run") / found["RuntimeDirectory"]] if "RuntimeDirectory" in found else []
    named = [Path(values[key]) for key in WRITTEN if values.get(key)]
    assert named and all(any(p.is_relative_to(f) for f in folders) for p in named), (named, folders)
    assert found["Environment"] == f"HOME=/var/lib/{found['StateDirectory']}", "caches"


def test_node_and_bootstrap_of_the_samples_fit_on_one_machine() -> None:
    listens = [load_settings_table(ROOT / role / f"{role}.toml", role)["listen"] for role in ROLES]
    assert not set(listens[0]) & set(listens[1])
    assert NodeSettings().data_dir != BootstrapSettings().data_dir
    for role, (listen,) in zip(ROLES, listens, strict=True):
        assert listen in (ROOT / role / "Containerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("role", ROLES)
def test_the_unit_hears_what_the_daemon_says(role: str) -> None:
    found = unit(role)
    assert (found["Type"], found["NotifyAccess"]) == ("notify", "main")
    assert int(found["WatchdogSec"]) >= 60


@pytest.mark.process
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_the_unit_is_hardened(role: str) -> None:
    file = str(ROOT / role / f"p2pdiloco-{role}.service")
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={MOST_EXPOSED}",
        "--no-pager",
        file,
    ]
    judged = subprocess.run(command, capture_output=True, text=True, timeout=within_s(60))
    if "nrecognized option" in judged.stderr:
        pytest.skip("a systemd that cannot judge a file")
    assert judged.returncode == 0, judged.stdout[-200:] + judged.stderr
