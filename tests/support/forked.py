"""Runs programs as forks of a process that has imported torch and Megatron already.

A rank of a launch takes longer to import them than to train. A stand-in for the interpreter hands
command line, variables and files to a server, whose fork runs the program; what that starts by
`sys.executable`, and ranks of torchrun, are forked, too. What only a fresh interpreter shows is for
`commands.run`: what is imported, and when the launcher installs the emulation.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import multiprocessing.process
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

# what each server imports; that of programs on the CPU after it has installed the emulation
_IMPORTS = {
    'plain': ('torch', 'torch.distributed.run', 'megatron_zbpp.cli'),
    'cpu': (
        *('torch._dynamo', 'sympy', 'megatron.core.models.gpt', 'megatron.core.optimizer'),
        *('megatron.core.datasets.gpt_dataset', 'megatron.training.training'),
        'megatron_zbpp.mcore.plugin',
    ),
}


def run(
    command: Sequence[object], *, env: Mapping[str, str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """As `commands.run`, of a program of this interpreter, `zbpp`, torchrun, or bash with such."""
    import commands
    import torch

    if torch.cuda.is_available() or 'MEGATRON_LM' in os.environ:
        return commands.run(command, env=env, **options)
    folder, server = start()
    program, *words = map(str, command)
    program = 'python' if program == sys.executable else Path(program).name
    path = os.pathsep.join([str(folder), (env or {}).get('PATH', os.environ['PATH'])])
    stand_in = folder / program
    given = [stand_in if stand_in.exists() else program, *words]
    changed = {**(env or {}), 'PATH': path, 'PYTHON_EXEC': str(folder / 'python')}
    try:
        return commands.run(given, env=changed, **options)
    except AssertionError:  # programs end a moment after their stand-ins are killed
        psutil.wait_procs(_programs(server), timeout=60)
        raise


def _programs(server: subprocess.Popen) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            found += [each] * (os.getsid(each.pid) != server.pid)
    return found


@functools.cache
def start() -> tuple[Path, subprocess.Popen]:
    """Start the servers, once; return the folder of the stand-ins, and the first server."""
    folder = Path(tempfile.mkdtemp(prefix='forked-'))
    for name, first in {
        'python': [],
        'torchrun': ['-m', 'torch.distributed.run'],
        'zbpp': ['-m', 'megatron_zbpp.cli'],
    }.items():
        words = [str(folder), sys.executable, *first]
        lines = [f'#!{sys.executable} -IS', 'import sys']
        lines += [f'sys.path.insert(0, {str(Path(__file__).parent)!r})', 'import stand_in']
        (folder / name).write_text('\n'.join([*lines, f'stand_in.main(*{words!r})\n']))
        (folder / name).chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith('PYTHON')}
    server = subprocess.Popen(
        [sys.executable, __file__, folder],
        env={**environment, 'OMP_NUM_THREADS': '1'},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(_stop, server, folder)
    assert server.stdout.readline() == b'listens\n', 'the server ended'
    return folder, server


def _stop(server: subprocess.Popen, folder: Path) -> None:
    server.stdin.close()
    server.wait()
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()


def serve(folder: Path) -> tuple:
    """Return, in forks only, what each is to run; the server of the CPU is a fork, too."""
    listeners = {name: socket.socket(socket.AF_UNIX) for name in _IMPORTS}
    for name, listener in listeners.items():
        listener.bind(str(folder / name))
        listener.listen(100)
    print('listens', flush=True)
    own = 'plain'
    preload(own)
    while True:
        ready, _, _ = select.select([0, *listeners.values()], [], [])
        if 0 in ready:  # who started this process is gone
            sys.exit()
        for name, listener in [each for each in listeners.items() if each[1] in ready]:
            if name != own:
                other = name if os.fork() else own
                listeners.pop(other).close()
                if other == own:
                    own = name
                    preload(own)
                break
            connection, _ = listener.accept()
            if not os.fork():
                for each in listeners.values():
                    each.close()
                return supervise(connection)
            connection.close()


def supervise(connection: socket.socket) -> tuple:
    """Return the request in a fork; pass signals on to it, and end it with who asked for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, *_ = socket.recv_fds(connection, 8, 3)
    content = connection.recv(int.from_bytes(size, 'big'), socket.MSG_WAITALL)
    pid = os.fork()
    if not pid:
        connection.close()
        return files, *pickle.loads(content)
    for file in files:
        os.close(file)
    process = os.pidfd_open(pid)
    while process not in (ready := select.select([0, connection, process], [], [])[0]):
        numbers = b'' if 0 in ready else connection.recv(64)
        for number in numbers:
            os.kill(pid, number)
        if not numbers:
            _kill(pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # nobody waits any more
        connection.sendall(str(status).encode())
    os._exit(0)


def _kill(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        program = psutil.Process(pid)
        for each in [*program.children(recursive=True), program]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def preload(name: str) -> None:
    """Import what programs of a server need; variables that it sets stay for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if name == 'cpu':
        from megatron_zbpp.emulation import cpu

        cpu.install()
    for module in _IMPORTS[name]:
        with contextlib.suppress(ModuleNotFoundError):  # the program says so, if it needs it
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks


def become(
    files: list[int], words: list[str], folder: str, environment: dict, own: dict[str, str]
) -> None:
    """Run a program in this process as if it had been started by itself."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder
    os.environ.clear()
    os.environ.update(own | environment)
    if 'PYTHONUNBUFFERED' in environment:
        sys.stdout.reconfigure(write_through=True)
    sys.executable = environment.get('PYTHON_EXEC', sys.executable)
    sys.modules.pop('stand_in', None)
    places = [place for place in environment.get('PYTHONPATH', '').split(os.pathsep) if place]
    sys.path[:] = [*places, *sys.path[1:]]
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    for place in places:
        if Path(place, 'sitecustomize.py').exists():
            runpy.run_path(str(Path(place, 'sitecustomize.py')))
            break
    kind, *rest = words
    if kind == '-m':
        module, *arguments = rest
        sys.argv = ['-m', *arguments]
        sys.path.insert(0, folder)
        for loaded in (module, f'{module}.__main__'):
            if not hasattr(sys.modules.get(loaded), '__path__'):
                sys.modules.pop(loaded, None)
        runpy._run_module_as_main(module)
    elif kind == '-c':
        code, *arguments = rest
        sys.argv = ['-c', *arguments]
        sys.path.insert(0, '')
        exec(compile(code, '<string>', 'exec', dont_inherit=True), main.__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(kind).resolve().parent))
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, 'exec', dont_inherit=True), main.__dict__)


def finish(code: object) -> None:
    """End as an interpreter does, without taking all modules apart, which takes half a second."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == '__main__':
    before = set(os.environ)
    request = serve(Path(sys.argv[1]))
    own = {name: os.environ[name] for name in sorted({*os.environ} - before)}
    try:
        become(*request, own)
    except SystemExit as ended:
        code = ended.code
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        code = 0
    finish(code)
