"""Runs NVIDIA's own unit tests, with schedules of ours in Megatron's table.

    python nvidia_unit_tests.py CHECKOUT FILE::TEST=SCHEDULE ...

Megatron-Core and the package `tests` are the checkout's, on CPU and gloo. Each test has processes
of its own, forked when Megatron is imported: groups that a test leaves would take all sockets.
Prints a line of JSON for each: its name, and the exit codes of pytest on its ranks.
"""

import json
import multiprocessing
import os
import socket
import sys

RANKS = 8


def main(checkout: str, *wanted: str) -> None:
    # ours is a package `tests`, too
    sys.path[:] = [checkout, *(folder for folder in sys.path if folder not in ('', os.getcwd()))]
    from megatron_zbpp.emulation import cpu

    cpu.install()
    import megatron.core
    import megatron.core.transformer.cuda_graphs
    import megatron.training.argument_utils
    import pytest  # noqa: F401

    import megatron_zbpp.mcore  # noqa: F401

    assert megatron.core.__file__.startswith(checkout), megatron.core.__file__
    forked = multiprocessing.get_context('fork')
    for each in wanted:
        test, _, schedule = each.partition('=')
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            port = free.getsockname()[1]
        given = [(rank, port, checkout, test, schedule) for rank in range(RANKS)]
        ranks = [forked.Process(target=run, args=each) for each in given]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(300)
            if rank.is_alive():
                rank.kill()
                rank.join()
        print(json.dumps([test, [rank.exitcode for rank in ranks]]), flush=True)


def run(rank: int, port: int, checkout: str, test: str, schedule: str) -> None:
    import pytest

    import megatron_zbpp

    os.environ |= {
        'RANK': str(rank),
        'LOCAL_RANK': str(rank),
        'WORLD_SIZE': str(RANKS),
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(port),
        'GLOO_SOCKET_IFNAME': 'lo',
    }
    alone = ['-c', os.devnull, '--rootdir', checkout, '--noconftest', '-p', 'no:cacheprovider']
    with megatron_zbpp.enable(schedule):
        status = pytest.main([*alone, '-q', '-W', 'ignore', os.path.join(checkout, test)])
    sys.exit(int(status))


if __name__ == '__main__':
    main(*sys.argv[1:])
