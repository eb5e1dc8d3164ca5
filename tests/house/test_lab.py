"""The hosts of the laboratory do what the tests believe they do."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest
from support.lab import Host, Hosts
from support.machine import cgroup2
from support.procs import alive
from support.wait import eventually

pytestmark = pytest.mark.netns


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def hosts(three: Hosts) -> Iterator[Hosts]:
    yield three
    three.heal()


def reaches(source: Host, target: Host) -> bool:
    ping = ["ping", "-q", "-c1", "-W0.15", "-i0.1", target.address]
    return source.run(ping, check=False).returncode == 0


def test_hosts_see_each_other_and_have_names(hosts: Hosts) -> None:
    assert all(reaches(a, b) for a in hosts for b in hosts if a is not b)
    assert hosts[1].run(["hostname"]).stdout.strip() == "node1"
    assert socket.gethostname() != "node1"


def test_the_outside_reaches_a_host(hosts: Hosts) -> None:
    serve = "import socket; s = socket.create_server(('', 7000)); s.accept()[0].sendall(b'hello')"
    hosts[0].popen([sys.executable, "-c", serve])

    def greet() -> bytes:
        with contextlib.suppress(ConnectionError), socket.create_connection((hosts[0].address, 7000), 2) as s:
            return s.recv(10)
        return b""

    assert eventually(greet, 10.0) == b"hello"


def test_a_partition_cuts_two_hosts_only(hosts: Hosts) -> None:
    hosts.partition(0, 1)
    assert not reaches(hosts[0], hosts[1])
    assert not reaches(hosts[1], hosts[0])
    assert reaches(hosts[0], hosts[2])
    hosts.heal()
    assert reaches(hosts[0], hosts[1])


def test_lab_one_way_partition_passes_the_other_direction(hosts: Hosts) -> None:
    hosts.partition(0, 1, one_way=True)
    receive = textwrap.dedent("""
        import socket, sys
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.bind(('', 7001))
        print('ready', flush=True)
        sys.stdin.read()  # until all has been sent
        s.settimeout(0.5)
        try:
            print(s.recv(10).decode())
        except TimeoutError:
            print('nothing')
    """)
    heard = {}
    for source, target in ((0, 1), (1, 0)):
        argv = [sys.executable, "-c", receive]
        listener = hosts[target].popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert listener.stdin is not None
        assert listener.stdout is not None
        assert listener.stdout.readline() == "ready\n"
        send = f"import socket; socket.socket(2, 2).sendto(b'word', ('{hosts[target].address}', 7001))"
        # the first packet may be lost while the addresses of the link are asked for, so look at what arrives
        hosts[source].run([sys.executable, "-c", send])
        listener.stdin.close()
        heard[source, target] = listener.stdout.readline().strip()
    assert heard == {(0, 1): "nothing", (1, 0): "word"}


def test_isolated_but_for_one(hosts: Hosts) -> None:
    hosts.isolate(0, keep=[2])
    assert not reaches(hosts[0], hosts[1])
    assert reaches(hosts[0], hosts[2])


def test_a_link_goes_down_and_comes_up(hosts: Hosts) -> None:
    hosts.link_down(2)
    assert not reaches(hosts[0], hosts[2])
    hosts[2].link_up()
    eventually(lambda: reaches(hosts[0], hosts[2]), 5.0)


def test_power_off_says_nothing_to_the_peers(hosts: Hosts) -> None:
    serve = "import socket, time; s = socket.create_server(('', 7002)); c = s.accept(); time.sleep(60)"
    process = hosts[1].popen([sys.executable, "-c", serve])
    talk = textwrap.dedent(f"""
        import socket, time
        end_s = time.monotonic() + 10
        while True:
            try:
                s = socket.create_connection(('{hosts[1].address}', 7002), 1)
                break
            except OSError:
                assert time.monotonic() < end_s
                time.sleep(0.02)
        print('connected', flush=True)
        s.settimeout(0.5)
        try:
            print('told' if s.recv(1) == b'' else 'data')
        except TimeoutError:
            print('silence')
        except ConnectionError:
            print('told')
    """)
    answers = {}
    for fault in ("power_off", "kill_processes"):
        client = hosts[0].popen([sys.executable, "-c", talk], stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        assert client.stdout.readline() == "connected\n"
        getattr(hosts[1], fault)()
        assert not hosts[1].pids()
        assert process.wait(5) != 0
        answers[fault] = client.stdout.readline().strip()
        hosts.heal()
        process = hosts[1].popen([sys.executable, "-c", serve])
    assert answers == {"power_off": "silence", "kill_processes": "told"}


def test_lab_power_off_kills_detached_processes(hosts: Hosts) -> None:
    detach = (
        "import subprocess; print(subprocess.Popen(['setsid', 'sleep', '60'], stdout=-3, stderr=-3).pid, flush=True)"
    )
    pid = int(hosts[1].run([sys.executable, "-c", detach]).stdout)
    assert pid in hosts[1].pids()
    hosts[1].power_off()
    assert not alive(pid)


def test_a_frozen_host_neither_works_nor_refuses(hosts: Hosts) -> None:
    ticking = "import time\nwhile True: print(1, flush=True); time.sleep(0.01)"
    process = hosts[0].popen([sys.executable, "-c", ticking], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    hosts[0].freeze()
    os.set_blocking(process.stdout.fileno(), False)
    process.stdout.read()
    time.sleep(0.1)
    assert process.stdout.read() is None
    assert reaches(hosts[1], hosts[0])  # the kernel lives
    hosts[0].thaw()
    eventually(process.stdout.read, 5.0)


def test_a_filter_can_refuse_a_port(hosts: Hosts) -> None:
    hosts[0].filter("tcp dport 7003 reject with tcp reset")
    connect = f"import socket; socket.create_connection(('{hosts[0].address}', 7003), 5)"
    refused = hosts[1].run([sys.executable, "-c", connect], check=False)
    assert "ConnectionRefusedError" in refused.stderr


def test_the_switch_delays_and_loses() -> None:
    with Hosts(2, quality=True) as hosts:
        eventually(lambda: reaches(hosts[0], hosts[1]), 5.0)
        hosts.set_quality(1, delay_s=0.04)
        took = hosts[0].run(["ping", "-q", "-c2", "-i0.1", "-W1", hosts[1].address]).stdout
        fastest_ms = float(took.rpartition("= ")[2].split("/")[0])
        assert 80 <= fastest_ms < 160  # there and back
        hosts.set_quality(1, loss=1.0)
        assert not reaches(hosts[0], hosts[1])


def test_everything_goes_when_the_block_raises() -> None:
    seen: list[int] = []
    labels: list[str] = []

    def fails() -> None:
        with Hosts(2) as hosts:
            seen.extend([hosts[0].holder, hosts[1].popen(["sleep", "60"]).pid])
            labels.append(hosts._label)
            hosts[1].freeze()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not any(map(alive, seen))
    root = cgroup2()
    assert root is not None
    assert not (root / labels[0]).exists()
    assert not pathlib.Path("/sys/class/net", labels[0]).exists()


def test_a_killed_test_run_leaves_nothing(tmp_path: pathlib.Path) -> None:
    """As when a test exceeds its time limit: pytest ends itself without a word."""
    (tmp_path / "test_dies.py").write_text(
        textwrap.dedent(f"""
        import os, pathlib, signal
        from support.lab import Hosts

        def test_dies():
            with Hosts(1) as hosts:
                sleeper = hosts[0].popen(["sleep", "61"])
                pathlib.Path({str(tmp_path / "out")!r}).write_text(f"{{hosts._label}} {{sleeper.pid}}")
                os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    tests = pathlib.Path(__file__).parents[1]
    (tmp_path / "conftest.py").write_text((tests / "conftest.py").read_text().replace(
        "pathlib.Path(__file__).parent", f"pathlib.Path({str(tests)!r})"
    ))  # fmt: skip
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(tests)}
    done = subprocess.run(run, env=env, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stdout
    label, pid = (tmp_path / "out").read_text().split()
    root = cgroup2()
    assert root is not None
    eventually(lambda: not alive(int(pid)) and not (root / label).exists(), 10.0, "the reaper has been")
    eventually(lambda: not pathlib.Path("/sys/class/net", label).exists(), 5.0)
