"""Ceph's S3 gateway from the distribution's packages: a real object store on loopback, made for one run and gone after it.

Every daemon gets SIGKILL when the thread that started it ends, so that nothing outlives tests that were killed. By hand::

    python -m tests.s3.rgw        # prints the environment to use it with, serves until Ctrl-C
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_ports

COMMANDS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool", "setpriv")
KEY, SECRET = "testkey", "testsecret"
SECONDS = 60.0
"""A daemon that does not serve after so long will not."""


class NotStartedError(Exception):
    """The gateway cannot run here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Gateway:
    endpoint: str
    version: str
    pids: dict[str, int]
    """Of the daemons, by name."""
    control: str
    """The socket on which the gateway tells about itself: see ``requests``."""


def missing() -> str | None:
    """What keeps the gateway from running on this machine, or None."""
    lost = [c for c in COMMANDS if shutil.which(c) is None]
    if lost:
        return f"{lost[0]} is not installed"
    return None if os.geteuid() == 0 else "not root"


@contextmanager
def serve() -> Iterator[Gateway]:
    """Run the gateway until the block ends.

    Raises:
        NotStartedError: it cannot run here.
    """
    if (why := missing()) is not None:
        raise NotStartedError(why)
    _remove_folders_of_the_dead()
    folder = Path(tempfile.mkdtemp(prefix=f"rgw-{os.getpid()}-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield _Cluster(folder, stack).start()


def _remove_folders_of_the_dead() -> None:
    """Runs that were killed leave their objects behind."""
    for folder in Path(tempfile.gettempdir()).glob("rgw-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


class _Cluster:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.pids: dict[str, int] = {}
        self.port, self.mon_port = free_ports(2)
        self.fsid = str(uuid.uuid4())

    def start(self) -> Gateway:
        self._lay_out()
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", "{}/monmap", "--keyring", "{}/keyring")
        self._daemon("ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        self._run("ceph", "--connect-timeout", "30", "osd", "new", osd, "0")
        self._run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._daemon("ceph-osd", "-i", "0")
        gateway = self._daemon("radosgw", "-n", "client.rgw")
        endpoint = f"http://127.0.0.1:{self.port}"
        self._await(gateway, lambda: answers(endpoint))
        user = ("--uid=test", "--display-name=test", f"--access-key={KEY}", f"--secret-key={SECRET}")
        self._run("radosgw-admin", "-n", "client.rgw", "user", "create", *user)
        version = self._run("radosgw", "--version").split()[2]
        return Gateway(endpoint=endpoint, version=version, pids=self.pids, control=f"{self.folder}/client.rgw.asok")

    def _lay_out(self) -> None:
        for name in ("mon", "osd", "rgw"):
            (self.folder / name).mkdir()
        template = (Path(__file__).parent / "ceph.conf").read_text()
        values = {"fsid": self.fsid, "mon_port": self.mon_port, "port": self.port, "folder": self.folder}
        for name, value in values.items():
            template = template.replace(f"{{{name}}}", str(value))
        (self.folder / "ceph.conf").write_text(template)
        caps = {
            "mon.": ("mon", "allow *"),
            "client.admin": ("mon", "allow *", "osd", "allow *", "mgr", "allow *"),
            "osd.0": ("mon", "allow profile osd", "osd", "allow *"),
            "client.rgw": ("mon", "allow rw", "osd", "allow rwx"),
        }
        for name, cap in caps.items():
            pairs = [text for i in range(0, len(cap), 2) for text in ("--cap", *cap[i : i + 2])]
            create = ["--create-keyring"] if name == "mon." else []
            self._run("ceph-authtool", "{}/keyring", *create, "--gen-key", "-n", name, *pairs, conf=False)
        address = f"[v2:127.0.0.1:{self.mon_port}]"
        self._run("monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", address, "{}/monmap", conf=False)

    def _command(self, name: str, *args: str, conf: bool = True) -> list[str]:
        return [name, *(["-c", f"{self.folder}/ceph.conf"] if conf else []), *(a.replace("{}", str(self.folder)) for a in args)]

    def _run(self, name: str, *args: str, conf: bool = True) -> str:
        command = self._command(name, *args, conf=conf)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as err:
            raise NotStartedError(f"{name}: {err}") from err
        if done.returncode:
            raise NotStartedError(f"{name} {args[0] if args else ''} failed: {done.stderr.strip()[-300:]}")
        return done.stdout

    def _daemon(self, name: str, *args: str) -> subprocess.Popen[bytes]:
        command = ["setpriv", "--pdeathsig", "KILL", *self._command(name, "-f", *args)]
        with (self.folder / f"{name}.out").open("wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.pids[name] = process.pid
        self.stack.callback(_kill, process)
        return process

    def _await(self, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                said = " ".join(p.read_text(errors="replace").strip()[-200:] for p in sorted(self.folder.glob("*.out")))
                raise NotStartedError(f"radosgw does not serve: {said or 'it says nothing'}")
            time.sleep(0.1)


def requests(control: str) -> int:
    """How many requests the gateway with this socket has had so far, from anybody."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(control)
        asking.sendall(json.dumps({"prefix": "perf dump", "format": "json"}).encode() + b"\0")
        with asking.makefile("rb") as answer:
            found = json.loads(answer.read(int.from_bytes(answer.read(4), "big")))
    return int(found["rgw"]["req"])


def answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(endpoint, timeout=5):
            return True
    except urllib.error.HTTPError as err:
        err.close()
        return True
    except OSError:
        return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()


if __name__ == "__main__":
    began = time.monotonic()
    with serve() as gateway, suppress(KeyboardInterrupt):
        print(f"# Ceph RGW {gateway.version}, ready after {time.monotonic() - began:.1f} s: {json.dumps(gateway.pids)}")
        print(f"export AWS_ENDPOINT_URL={gateway.endpoint} AWS_ACCESS_KEY_ID={KEY} AWS_SECRET_ACCESS_KEY={SECRET}", flush=True)
        while True:
            time.sleep(3600)
