"""benchmarks/one_gpu tells what fails: ranks that end, ranks that hang, other bits."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from benchmarks.one_gpu import ddp_race, nccl, ranks

SLEEPS = ['-c', 'import time; time.sleep(600)']
SAYS = ['-c', 'import os; print(os.environ["NCCL_HOSTID"], os.environ["LOCAL_RANK"])']


def test_each_rank_is_a_host_of_its_own(tmp_path):
    """On the first GPU: NCCL asks host and GPU together, and takes sockets."""
    assert ranks.run(2, SAYS, tmp_path, 120) == ''
    said = [(tmp_path / f'rank{rank}.log').read_text() for rank in range(2)]
    assert said == ['host0 0\n', 'host1 0\n']


@pytest.mark.parametrize(
    ('words', 'seconds', 'said'),
    [
        (SLEEPS, 1, 'ranks [0, 1] hang: they had not ended after 1 s'),
        (['-c', 'import os, sys; sys.exit(3 * int(os.environ["RANK"]))'], 120, 'rank 1 ended with'),
    ],
    ids=['hang', 'end'],
)
def test_ranks_that_fail(tmp_path, words, seconds, said):
    assert ranks.run(2, words, tmp_path, seconds).startswith(said)


@pytest.mark.parametrize('differs', [None, 'loss', 'parameters_sha256', 'optimizer_sha256'])
def test_other_bits_are_told(tmp_path, monkeypatch, capsys, differs):
    """Of losses, parameters and the optimizer's state."""

    def train(size, words, logs, seconds, **more):
        logs.mkdir(parents=True, exist_ok=True)
        (logs / 'rank0.log').write_text('memory: 5\n')
        names = {'loss': 'a', 'parameters_sha256': {'0': 'b'}, 'optimizer_sha256': {'0': 'c'}}
        if differs and 'zb-v' in words:
            names[differs] = 'other'
        hashes = {name: value for name, value in names.items() if name != 'loss'}
        lines = [{'loss': names['loss']}, hashes]
        (logs / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)))
        return ''

    monkeypatch.setattr(ranks, 'run', train)
    args = Namespace(only=['zb-h1', 'zb-v'], logs=tmp_path, iterations=1, seconds=1)
    fine = nccl.run_case(nccl.CASES[0], args, tmp_path)
    assert fine == (differs is None)
    out = capsys.readouterr().out
    assert 'p2, zb-h1: done memory: 5' in out
    assert ('zb-v: FAILED: not the bits of the reference' in out) == (differs is not None)


@pytest.mark.parametrize('case', nccl.CASES, ids=lambda case: case.name)
def test_flags_are_the_examples(case, tmp_path, monkeypatch):
    """Each training that is planned is one that the example takes."""
    monkeypatch.syspath_prepend(str(ranks.ROOT / 'examples' / 'gpt'))
    import command_line

    monkeypatch.setenv('WORLD_SIZE', str(case.num_ranks))
    for schedule in ('megatron', *case.schedules):
        words = case.words(schedule, tmp_path / 'metrics', tmp_path / 'text', 6)
        args = command_line.parse_args(words[1:])
        assert (args.pipeline_model_parallel_size, args.data_parallel_size) == case.sizes[::2]


def test_the_defect_is_expected_on_a_gpu(monkeypatch, capsys):
    """A race that does not show proves nothing: it is told, and fails."""
    monkeypatch.setattr(ddp_race.torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(ddp_race.torch.cuda, 'get_device_name', lambda: 'made up')
    for early, code in ((0.0, 0), (1.0, 1)):

        def reduced(device, defined, side, early=early):
            return early if side and not defined else 1.0

        monkeypatch.setattr(ddp_race, 'reduced', reduced)
        assert ddp_race.main() == code
        assert ('NOT AS EXPECTED' in capsys.readouterr().out) == bool(code)
