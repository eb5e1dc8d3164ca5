"""Settings: where they come from, what is refused, and in which words."""

from __future__ import annotations

import contextlib
import pathlib
import re
import socket

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd import main
from elasticd.base import config
from elasticd.base.errors import CannotStart, InvalidConfig
from elasticd.base.settings import EtcdSettings, Settings
from elasticd.machine import addresses, host


def write(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "elasticd.toml"
    path.write_text(text)
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, 'cluster = "file"\nnode = "file"\nslots = 1\n')
    environment = {"ELASTICD_CLUSTER": "environment", "ELASTICD_NODE": "environment", "HOME": "/"}
    loaded = config.load(path, environment, {"cluster": "flag"})
    assert (loaded.settings.cluster, loaded.settings.node, loaded.settings.slots) == ("flag", "environment", 1)
    assert loaded.settings.log_level == "info"
    wanted = {"cluster": "flag", "node": "environment", "slots": "file", "log_level": "default"}
    assert {name: loaded.sources[name] for name in wanted} == wanted


def test_tables_lists_and_numbers_from_text() -> None:
    environment = {
        "ELASTICD_ETCD_ENDPOINTS": "a:1, b:2",
        "ELASTICD_TIMEOUTS_LEASE_TTL_S": "4.5",
        "ELASTICD_SLOTS": "auto",
    }
    flags = {"etcd.allow_unsound_version": "true", "timeouts.beat_s": "0.2"}
    settings = config.load(None, environment, flags).settings
    assert settings.etcd.endpoints == ("a:1", "b:2")
    assert settings.timeouts.lease_ttl_s == 4.5
    assert settings.slots == "auto"
    assert settings.etcd.allow_unsound_version is True
    assert settings.timeouts.beat_s == 0.2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('clutser = "x"', "clutser = 'x': no such field; did you mean 'cluster'?"),
        ("[etcd]\nendpoint = []", "etcd.endpoint = []: no such field; did you mean 'endpoints'?"),
        ("[timeouts]\nlease_ttl = 4", "timeouts.lease_ttl = 4: no such field; did you mean 'lease_ttl_s'?"),
        ('etcd = "host:2379"', "etcd = 'host:2379': expected a table [etcd]"),
        ('slots = "many"', "slots = 'many': a whole number from 1, or 'auto'"),
        ("slots = 0", "slots = 0: a whole number from 1, or 'auto'"),
        ('log_level = "loud"', "log_level = 'loud': 'debug', 'info', 'warning' or 'error'"),
        ("gpus = 3", "gpus = 3: 'auto' or 'none'"),
        ("cluster = 3", "cluster = 3: a text"),
        ("gpu_self_test = 1", "gpu_self_test = 1: true or false"),
        ("shutdown_drain_s = -1", "shutdown_drain_s = -1: a number from 0 to 3600"),
        ("[retention]\nlog_files = 1.5", "retention.log_files = 1.5: a whole number from 0 to 10000000"),
        ("[etcd]\nendpoints = [1]", "etcd.endpoints = [1]: a list of texts"),
        ('cluster = "A B"', "cluster = 'A B': use 1 to 63 of"),
        ('[etcd]\nendpoints = ["http://x:1"]', "etcd.endpoints = 'http://x:1': write host:port"),
        ('[etcd]\nendpoints = ["x"]', "etcd.endpoints = 'x': write host:port"),
        ('[http]\nlisten = "x:99999"', "http.listen = 'x:99999': write host:port"),
        ('[etcd]\nuser = "root"', "etcd.user and etcd.password_file: give both or neither"),
        ('[etcd]\nca_file = "/nowhere"', "etcd.ca_file = '/nowhere': cannot be read"),
        ("[timeouts]\nlease_ttl_s = 2", "timeouts.lease_renew_s (1.5 s) must be below timeouts.lease_ttl_s (2 s)"),
        ("[timeouts]\nbeat_s = -1", "timeouts.beat_s = -1.0: must be above 0"),
        (f'socket = "/{"x" * 120}"', "longer than the 107 bytes"),
        ("cluster = ", "is not TOML"),
    ],
)
def test_config_error_names_the_setting_and_its_value(tmp_path: pathlib.Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidConfig, match=re.escape(words)) as error:
        config.load(path, {}, {})
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"/nowhere/x.toml: cannot be read: No such file"):
        config.load(pathlib.Path("/nowhere/x.toml"), {}, {})


def test_unknown_variables_and_flags_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"environment variable ELASTICD_CLUSTR: .*did you mean 'cluster'"):
        config.load(None, {"ELASTICD_CLUSTR": "x"}, {})
    with pytest.raises(InvalidConfig, match=r"timeouts.beats = .*did you mean 'beat_s'"):
        config.load(None, {}, {"timeouts.beats": "1"})


def test_every_setting_explains_itself() -> None:
    docs = config.explain()
    assert set(docs) == set(config.HINTS)
    assert not [name for name, text in docs.items() if len(text) < 20]


def test_every_setting_is_described_with_its_source() -> None:
    loaded = config.load(None, {}, {"cluster": "c"})
    data = msgspec.to_builtins(main.describe(loaded.settings, loaded.sources))
    rows = {row["name"]: row for row in data["settings"]}
    assert rows["cluster"] == {"name": "cluster", "value": "c", "source": "flag", "doc": config.explain()["cluster"]}
    assert any(rule["below"] == "timeouts.abort_s" for rule in data["hierarchy"])


def test_blanks_are_filled_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "GPU_7.Example.org")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/elasticd")
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/elasticd")
    full = host.complete(Settings(), ())
    assert (full.node, full.address, full.interface) == ("gpu_7", "127.0.0.1", "lo")
    assert (full.state_dir, full.socket) == ("/var/lib/elasticd", "/run/elasticd/elasticd.sock")
    assert isinstance(full.slots, int)
    assert full.slots >= 1
    assert host.complete(Settings(), (0, 1, 2)).slots == 3


def test_the_address_follows_the_interface_and_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    far = Settings(etcd=EtcdSettings(endpoints=("etcd-1:2379", "10.0.0.1:2379")))
    sources = {"etcd-1": "127.0.0.1", "10.0.0.1": "10.0.0.7", addresses.DEFAULT_ROUTE: "172.16.0.7"}

    def source_address(host: str) -> str:
        if host not in sources:
            raise OSError(101, "Network is unreachable")
        return sources[host]

    monkeypatch.setattr(addresses, "source_address", source_address)
    monkeypatch.setattr(addresses, "interface_with", {"10.0.0.7": "eth1", "172.16.0.7": "eth0"}.get)
    assert addresses.find(far) == addresses.OwnAddress("10.0.0.7", "eth1", "reaches etcd at 10.0.0.1:2379")
    assert host.complete(far, ()).interface == "eth1"
    behind_nat = msgspec.structs.replace(far, address="203.0.113.5")
    assert addresses.find(behind_nat).interface == "eth1"
    del sources["10.0.0.1"]
    assert addresses.find(far) == addresses.OwnAddress("172.16.0.7", "eth0", "that of the default route")
    del sources[addresses.DEFAULT_ROUTE]
    with pytest.raises(CannotStart, match=r"etcd-1:2379 is this machine; 10.0.0.1:2379: Network is unreachable"):
        addresses.find(far)
    for wrong in (msgspec.structs.replace(far, address="127.0.0.1"), msgspec.structs.replace(far, interface="lo")):
        with pytest.raises(InvalidConfig, match=r"no other node can reach it, but etcd at etcd-1:2379, 10.0.0.1:2379"):
            addresses.find(wrong)
    assert host.complete(Settings(interface="lo"), ()).address == "127.0.0.1"
    with pytest.raises(InvalidConfig, match=r"interface = 'eth99': does not exist here; there are: .*lo"):
        host.complete(Settings(interface="eth99"), ())


@pytest.mark.parametrize(
    ("hostname", "name"),
    [("a", "a"), ("Node-1.x.y", "node-1"), ("_w 1_", "w-1"), ("...", "node"), ("x" * 80, "x" * 63)],
)
def test_node_names_are_made_fit(hostname: str, name: str) -> None:
    assert host.node_name(hostname) == name


def test_check_only(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--config", str(write(tmp_path, "slots = 3")), "--check"]) == 0
    assert main.main(["--config", str(write(tmp_path, "slot = 3")), "--check"]) == 78
    assert "did you mean 'slots'" in capsys.readouterr().err


def test_the_example_file_shows_every_setting_and_its_default(tmp_path: pathlib.Path) -> None:
    example = pathlib.Path(__file__).parents[2] / "systemd" / "elasticd.toml"
    text = example.read_text()
    config.load(example, {}, {})  # as it comes
    without_comments = re.sub(r"(?m)^#(?=[a-z_]+ = )", "", text)
    loaded = config.load(write(tmp_path, without_comments), {}, {})
    assert {name for name, source in loaded.sources.items() if source == "file"} == set(config.HINTS)
    differs = {n for n in config.HINTS if _value(loaded.settings, n) != _value(Settings(), n)}
    assert differs <= {"socket_group", "admin_group"}


def _value(settings: object, name: str) -> object:
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


@pytest.mark.parametrize(
    ("environment", "flags", "words"),
    [
        ({}, {"http.listen": "nowhere"}, "flag: http.listen = 'nowhere': write host:port"),
        ({"ELASTICD_SLOTS": "0"}, {"node": "a"}, "environment: slots = 0: "),
        ({"ELASTICD_NODE": "a"}, {"slots": "x"}, "flag: slots = 'x': "),
        ({}, {"nods": "x"}, "flag: nods = 'x': no such field"),
        ({}, {"cluster.": ""}, "flag: cluster. = '': no such field: cluster is no table"),
        ({}, {"timeouts.lease_renew_s": "1e9"}, "flag: .*timeouts.lease_renew_s"),
        ({"ELASTICD_NODE": "a"}, {"http.listen": "a:²"}, "flag: http.listen = 'a:²'"),
    ],
)
def test_a_refusal_names_where_the_setting_was_given(
    environment: dict[str, str], flags: dict[str, str], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=f"^{words}"):
        config.load(None, environment, flags)


TYPED = st.text(st.characters(exclude_categories=["Cs"]), max_size=15) | st.sampled_from(
    ["inf", "nan", "2026-11-22", "[1]", "{a=1}", "-1", "1e400", "9" * 5000, "[" * 5000, "a:²", "x" * 5000, ""]
)


@given(
    flags=st.dictionaries(st.sampled_from(sorted(config.HINTS)) | TYPED | st.just("a." * 2000), TYPED, max_size=3),
    environment=st.dictionaries(st.sampled_from(["ELASTICD_SLOTS", "ELASTICD_ETCD", "ELASTICD_X"]), TYPED, max_size=2),
)
@settings(max_examples=300, deadline=None)
def test_any_setting_is_taken_or_refused_in_words(flags: dict[str, str], environment: dict[str, str]) -> None:
    with contextlib.suppress(InvalidConfig):
        config.load(None, environment, flags)


@pytest.mark.parametrize(("text", "found"), [("", (0, 0)), ("29400-29500", (29400, 29500)), ("1-8", (1, 8))])
def test_ports_are_a_range(text: str, found: tuple[int, int]) -> None:
    assert config.port_range(text) == found


@pytest.mark.parametrize("text", ["29400", "a-b", "29500-29400", "0-100", "65000-65536", "5-6", "1-8-9", "-", "²-³"])
def test_a_wrong_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ports = "):
        config.port_range(text)
