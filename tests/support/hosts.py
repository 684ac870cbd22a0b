"""Two hosts on this machine: each has a network, a name, a clock and processes of its own.

They are namespaces, linked by a pair of virtual network cards; nothing leaves the machine. The
first process of each ends with this one, and everything of the host with it.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

_CARD = 'eth0'
_NAMESPACES = ('--net', '--uts', '--mount', '--pid', '--time')
# reaps what is left to it, as the first process of a host must
_FIRST = "trap '' CHLD; exec sleep infinity"


@dataclass(frozen=True)
class Host:
    name: str  # what its processes call it, and find the other by
    address: str  # on the link
    pid: int  # its first process, as this machine counts

    def command(self, *words: object, folder: Path = Path()) -> list[str]:
        """`words`, run there in `folder`."""
        there = ['nsenter', '--target', str(self.pid), *_NAMESPACES, '--']
        return [*there, 'env', f'--chdir={folder.absolute()}', *map(str, words)]

    def run(self, *words: object) -> str:
        """What a quick command printed there; raises CalledProcessError where it failed."""
        done = subprocess.run(
            self.command(*words), check=True, stdout=subprocess.PIPE, text=True, timeout=30
        )
        return done.stdout

    def processes(self, word: str) -> list[str]:
        space = os.readlink(f'/proc/{self.pid}/ns/pid')
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.readlink(f'/proc/{each.pid}/ns/pid') == space:
                    found.append(' '.join(each.cmdline()))
        return [command for command in found if word in command]


@cache
def missing() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if os.geteuid() != 0:
        return 'network namespaces need root'
    for program, package in (('ip', 'iproute2'), ('nsenter', 'util-linux')):
        if shutil.which(program) is None:
            return f'there is no {program} (Debian: apt-get install {package})'
    tried = subprocess.run(
        ['unshare', *_NAMESPACES, '--fork', '--mount-proc', 'true'], capture_output=True, text=True
    )
    return f'this machine gives no namespaces: {tried.stderr.strip()}' if tried.returncode else None


@contextlib.contextmanager
def pair(
    names: tuple[str, str], folder: Path, ahead: tuple[int, int] = (0, 0)
) -> Iterator[tuple[Host, Host]]:
    """Two linked hosts, which find each other by a file in `folder`, until it ends.

    Their monotonic clocks are `ahead` of this machine's by so many seconds.
    """
    addresses = ('10.0.0.1', '10.0.0.2')  # of their own networks: they mean nothing elsewhere
    with contextlib.ExitStack() as stack:
        hosts = tuple(
            Host(name, address, stack.enter_context(_first_process(seconds)))
            for name, address, seconds in zip(names, addresses, ahead, strict=True)
        )
        known = folder / 'hosts'
        lines = [f'{host.address} {host.name}' for host in hosts]
        known.write_text('\n'.join(['127.0.0.1 localhost', *lines]) + '\n')
        ends = [('name', _CARD, 'netns', str(host.pid)) for host in hosts]
        subprocess.run(
            ['ip', 'link', 'add', *ends[0], 'type', 'veth', 'peer', *ends[1]], check=True
        )
        for host in hosts:
            host.run('hostname', host.name)
            host.run('mount', '--bind', known, '/etc/hosts')
            host.run('ip', 'address', 'add', f'{host.address}/24', 'dev', _CARD)
            for card in ('lo', _CARD):
                host.run('ip', 'link', 'set', card, 'up')
        yield hosts


@contextlib.contextmanager
def _first_process(ahead: int) -> Iterator[int]:
    """The pid of one in namespaces of its own; when it ends, the kernel ends all that are there."""
    clock = ['--monotonic', str(ahead), '--boottime', str(ahead)]
    command = ['setpriv', '--pdeathsig', 'KILL', 'unshare', *_NAMESPACES, *clock]
    command += ['--fork', '--kill-child', '--mount-proc', 'sh', '-c', _FIRST]
    outside = psutil.Popen(command, stderr=subprocess.DEVNULL)  # says how its child ended
    try:
        deadline = time.monotonic() + 60
        while not (inside := outside.children()) or inside[0].name() != 'sleep':
            assert outside.poll() is None and time.monotonic() < deadline, 'no namespaces'
            time.sleep(0.01)
        yield inside[0].pid
    finally:
        for first in outside.children():
            first.kill()
        outside.wait(10)
