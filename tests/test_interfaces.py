"""Interfaces and addresses of this machine: all of them, what a setting chooses, and where other ranks are told to connect."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

from ckpt import settings
from ckpt.errors import CkptError, UsageError
from ckpt.net import endpoints
from ckpt.net.endpoints import InterfaceAddress, choose, from_here, interface_addresses, is_loopback, own_addresses
from ckpt.settings import NAMES, warn_of_misspelt

KNOWN = [
    InterfaceAddress(interface=name, host=host)
    for name, host in [
        ("lo", "127.0.0.1"),
        ("lo", "::1"),
        ("eth0", "10.0.0.1"),
        ("eth0", "fd00::1"),
        ("eth01", "10.1.0.1"),
        ("ib0", "10.2.0.1"),
        ("docker0", "172.17.0.1"),
    ]
]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("eth", ["eth0", "eth0", "eth01"]),
        ("=eth0", ["eth0", "eth0"]),
        ("ib,eth01", ["ib0", "eth01"]),
        ("=ib0, eth0", ["ib0", "eth0", "eth0"]),
        ("^docker,lo", ["eth0", "eth0", "eth01", "ib0"]),
        ("^=eth0,lo", ["eth01", "ib0", "docker0"]),
    ],
)
def test_choices_are_written_as_for_nccl(text: str, names: list[str]) -> None:
    assert [a.interface for a in choose("NCCL_SOCKET_IFNAME", text, KNOWN)] == names


def test_gloo_has_whole_names() -> None:
    assert [a.interface for a in choose("GLOO_SOCKET_IFNAME", "eth0,ib0", KNOWN)] == ["eth0", "eth0", "ib0"]


@pytest.mark.parametrize("text", ["wlan", "=eth", "^eth,ib,lo,docker", ",", "="])
def test_a_choice_of_nothing_names_what_there_is(text: str) -> None:
    with pytest.raises(UsageError, match=r"names no network interface.*eth0 \(10.0.0.1 fd00::1\), eth01 \(10.1.0.1\)") as caught:
        choose("CKPT_SOCKET_IFNAME", text, KNOWN)
    assert caught.value.where == "CKPT_SOCKET_IFNAME"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_system_names_its_interfaces() -> None:
    known = interface_addresses()
    assert InterfaceAddress(interface="lo", host="127.0.0.1") in known
    assert {a.interface for a in known} <= {name for _, name in socket.if_nameindex()}
    assert not [a for a in known if a.host.startswith("fe80:")]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One with the interfaces of KNOWN, on which the store is reached by ib0 and most other places by eth0."""
    for name in ("CKPT_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(endpoints, "interface_addresses", lambda: list(KNOWN))
    monkeypatch.setattr(endpoints, "_way_to", {"store": "10.2.0.1", "here": "127.0.0.1", "192.0.2.1": "10.0.0.1"}.get)
    return monkeypatch


def test_the_way_to_the_store_is_first(machine: pytest.MonkeyPatch) -> None:
    rest = ["fd00::1", "10.1.0.1"]
    assert own_addresses("store") == ["10.2.0.1", "10.0.0.1", *rest, "172.17.0.1", "127.0.0.1"]
    assert own_addresses("here") == own_addresses(None) == ["10.0.0.1", *rest, "10.2.0.1", "172.17.0.1", "127.0.0.1"]


def test_settings_have_an_order(machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, text, expected in [
        ("NCCL_SOCKET_IFNAME", "^docker,lo", ["10.2.0.1", "10.0.0.1", "fd00::1", "10.1.0.1"]),
        ("GLOO_SOCKET_IFNAME", "eth0", ["10.0.0.1", "fd00::1"]),
        ("CKPT_SOCKET_IFNAME", "=eth01", ["10.1.0.1"]),
        ("CKPT_SOCKET_IFNAME", "", ["10.0.0.1", "fd00::1"]),
        ("GLOO_SOCKET_IFNAME", "lo", ["127.0.0.1"]),
    ]:
        machine.setenv(name, text)
        assert own_addresses("store") == expected
    machine.setenv("GLOO_SOCKET_IFNAME", "gone0")
    assert own_addresses("store")[0] == "10.2.0.1" and "172.17.0.1" not in own_addresses("store")  # NCCL's counts
    assert "GLOO_SOCKET_IFNAME is not followed: 'gone0' names no network interface" in caplog.text
    machine.setenv("CKPT_SOCKET_IFNAME", "gone1")
    with pytest.raises(UsageError, match="gone1"):
        own_addresses("store")


def test_loopback_is_for_ranks_of_this_machine() -> None:
    both = [("10.0.0.1", 1), ("127.0.0.1", 2)]
    assert from_here(both, same_network=True) == both[::-1]
    assert from_here(both, same_network=False) == both[:1]
    assert from_here(both[1:], same_network=False) == both[1:]


def test_a_machine_without_a_network(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(endpoints, "interface_addresses", lambda: KNOWN[:2])
    machine.setattr(endpoints, "_way_to", lambda host: None)
    assert [is_loopback(host) for host in own_addresses(None)] == [True]


def test_listening_with_too_many_files_says_so(machine: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    machine.setattr(socket, "create_server", full)
    with pytest.raises(CkptError, match="Too many open files") as caught:
        endpoints.listen(None)
    assert "ulimit -n" in str(caught.value)


# ------------------------------ The environment variables: what they may hold, and that their table and the user's page name the same ones.

ROOT = Path(__file__).parent.parent


def test_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_DIRECT", raising=False)
    assert settings.direct() == "auto"
    for mode in ("auto", "on", "off"):
        monkeypatch.setenv("CKPT_DIRECT", mode)
        assert settings.direct() == mode
    monkeypatch.setenv("CKPT_DIRECT", "yes")
    with pytest.raises(UsageError, match="CKPT_DIRECT"):
        settings.direct()


def test_every_variable_is_documented() -> None:
    read = set(re.findall(r'"(CKPT_\w+)"', Path(settings.__file__).read_text()))
    table = set(re.findall(r"^``(CKPT_\w+)``", settings.__doc__ or "", re.MULTILINE))
    page = set(re.findall(r"^\| `(CKPT_\w+)` \|", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE))
    assert read == table == page == set(NAMES)
    assert "CKPT_DIRECT" in read


def test_a_misspelt_variable_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Not those of the user that only begin like ours."""
    for name in ("CKPT_TIMOUT", "CKPT_DIR", "CKPT_PATH", "CKPT_TIMEOUT"):
        monkeypatch.setenv(name, "5")
    warn_of_misspelt.cache_clear()
    assert settings.timeout(None) == settings.timeout(None) == 5
    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable CKPT_TIMOUT is ignored: ckpt has none of this name. Did you mean CKPT_TIMEOUT?"
    ]
