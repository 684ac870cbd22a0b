"""What is drawn for random trainings, what is promised of it, and how its script is called."""

import sys

import compositions
import pytest
from commands import run
from paths import ROOT
from ranks import RankError

DRAWN = [compositions.draw(seed) for seed in range(1500)]


def test_everything_is_drawn():
    assert [compositions.draw(seed) for seed in range(50)] == DRAWN[:50]
    # each schedule, model, technique and event, and each pair of techniques
    assert {each.schedule for each in DRAWN} == {*compositions.SCHEDULES}
    assert {each.words[1] for each in DRAWN} == {*compositions.MODELS}
    assert {each.event for each in DRAWN} == {*compositions.EVENTS}
    names = [*compositions.TECHNIQUES]
    seen = {(one, other) for each in DRAWN for one in each.techniques for other in each.techniques}
    missing = {(one, other) for one in names for other in names} - seen
    assert missing == {
        ('split_vocabulary', 'split_embedding'),
        ('split_embedding', 'split_vocabulary'),
    }


def test_the_docs_say_what_is_promised():
    promised = {each for drawn in DRAWN for each in compositions.promises(drawn)}
    assert {each.how for each in promised} == {
        compositions.BITS,
        compositions.CLOSE,
        compositions.REFUSED,
        compositions.ENDS,
    }
    for promise in promised:
        page = ' '.join((ROOT / 'docs' / promise.page).read_text().split())
        assert promise.quote in page, promise
    assert compositions.pairs()['offload', 'evict'] == 'to the bit'
    assert compositions.pairs()['overlap', 'offload'].startswith('refused: Megatron frees')
    assert {row for row, _ in compositions.pairs()} >= {'sliced', 'split_vocabulary'}


TRACEBACK = """rank 0: Traceback (most recent call last):
  File "/site-packages/{file}", line 1, in step
    fail()
{error}
rank 1: no answer
"""


@pytest.mark.parametrize(
    ('file', 'error', 'explained'),
    [
        ('megatron_zbpp/mcore/a.py', 'NotImplementedError: x = 1: a reason: a cure', True),
        ('megatron_zbpp/mcore/a.py', 'KeyError: (1, 0, 0)', False),
        ('megatron_zbpp/mcore/a.py', 'AssertionError', False),
        ('torch/autograd.py', 'RuntimeError: sizes: 1, 2', False),
    ],
)
def test_errors_without_a_reason_are_faults(file, error, explained):
    found = compositions.Failure.of(RankError(TRACEBACK.format(file=file, error=error)))
    assert found == (error, explained)
    assert compositions.Outcome('unexplained', error).is_fault


def test_the_script_lists_and_refuses():
    command = [sys.executable, 'scripts/fuzz_training.py', '--seed', '7', '--count']
    lines = run([*command, '2', '--list'], cwd=ROOT).stdout.splitlines()
    assert [line.partition(':')[0] for line in lines] == ['7', '8']
    assert all(str(compositions.draw(7 + k)) in line for k, line in enumerate(lines))
    refused = run([*command, '0'], cwd=ROOT)
    assert refused.returncode == 2
    assert '--count 0 is wrong because nothing would run' in refused.stderr
