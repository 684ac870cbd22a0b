"""Stands in for an interpreter: hands its program to the server of `forked`, and ends as it does.

It starts in 20 ms, so it imports nothing else.
"""

import os
import pickle
import signal
import socket
import sys

_PASSED_ON = 'SIGTERM', 'SIGINT', 'SIGHUP', 'SIGQUIT', 'SIGUSR1', 'SIGUSR2'


def main(folder: str, python: str, *first: str) -> None:
    """Run `first` and the command line by the server whose sockets are in `folder`.

    What no fork can do is for `python`.
    """
    words = [*first, *sys.argv[1:]]
    while words[:1] == ['-u']:
        del words[0]
    options = [word for word in words[:1] if word.startswith('-') and word not in ('-m', '-c')]
    if not words or options or '--multiprocessing-fork' in words:
        os.execv(python, [python, *first, *sys.argv[1:]])
    on_cpu = 'LOCAL_RANK' in os.environ or {'megatron_zbpp.launch', '--cpu'} <= {*words}
    server = socket.socket(socket.AF_UNIX)
    server.connect(f'{folder}/{"cpu" if on_cpu else "plain"}')
    request = pickle.dumps((words, os.getcwd(), dict(os.environ)))
    socket.send_fds(server, [len(request).to_bytes(8, 'big')], [0, 1, 2])
    server.sendall(request)
    for name in _PASSED_ON:
        signal.signal(signal.Signals[name], lambda number, frame: server.send(bytes([number])))
    status = int(server.recv(16) or -signal.SIGKILL)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
