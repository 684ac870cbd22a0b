"""Kept outcomes of stock trainings: what has a key of its own, what is served, what is not."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import events
import example
import models
import nvidia
import pytest
import stock
import stock_key
import torch
import wheels
from stock_key import UnknownError, by_megatron, key_of

PLAIN = (False, True, None, ())
LEFT = [None, example.Run(('0x1p+0',), ('nan',), (), {'1': 'a'}, {})]


@dataclass
class Stub:
    """Ranks that train nothing: they count, and save what they are to save."""

    size: int = 2
    results: Any = field(default_factory=lambda: LEFT)
    prepared: tuple = PLAIN
    trained: int = 0
    saves: str = 'weights'

    @property
    def pool(self) -> Stub:
        return self

    def run(self, function: Callable, *args: Any, **options: Any) -> Any:
        self.trained += 1
        words = args[0]
        if '--save' in words:
            folder = Path(words[words.index('--save') + 1], 'iter_0000001')
            folder.mkdir(parents=True, exist_ok=True)
            (folder / 'common.pt').write_text(self.saves)
        return self.results


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, of a session in which each harness has trained something anew."""
    monkeypatch.setenv(stock_key.FOLDER, str(tmp_path / 'cache'))
    monkeypatch.delenv('MEGATRON_LM', raising=False)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(stock, '_seen', {'example.measured', 'nvidia.train'})
    monkeypatch.setattr(stock, '_saved', {})
    monkeypatch.setattr(stock, 'FRESH', False)
    monkeypatch.setattr(stock, 'TRIED', 1 << 40)
    monkeypatch.setattr(stock, 'counted', Counter())
    return tmp_path / 'cache'


def train(ranks: Stub, *words: object) -> Any:
    return stock.trained(ranks, example.measured, list(map(str, words)))


def key(size=2, prepared=PLAIN, function=example.measured, args=(['--seed', '1'],)) -> str:
    return key_of(size, prepared, function, args, {})


@pytest.mark.parametrize(
    'other',
    [
        {'size': 4},
        {'prepared': (False, False, None, ())},
        {'prepared': (False, True, wheels.install, (Path(os.sys.prefix, 'te', '2.8.0'),))},
        {'function': nvidia.train},
        {'args': (['--seed', '2'],)},
        {'args': (['--seed', '1', '--spec', 'specs', 'context'],)},
        {'args': (['--seed', '1'], events.nothing)},
        {'args': (['--seed', '1'], events.Overflow(1, 0))},
        {'args': (['--seed', '1'], events.Overflow(1, 1))},
        {'args': (['--seed', '1'], nvidia.SUPPORT / 'exact_script.py')},
        {'args': (models.Job(), ['--seed', '1'])},
        {'args': (models.Job(te=False), ['--seed', '1'])},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_training_has_another_key(other):
    found = {key(), key(**other)}
    assert len(found) == 2 and key(**other) in found


def test_another_surrounding_has_another_key(monkeypatch):
    before, installed = key(), stock_key.version
    monkeypatch.setenv('UNRELATED', '1')
    assert key() == before
    for name in ('OMP_NUM_THREADS', 'NVTE_FLASH_ATTN', 'TORCHINDUCTOR_CACHE_DIR'):
        with monkeypatch.context() as patch:
            patch.setenv(name, '7')
            assert key() != before, name
    for package in ('megatron-core', 'torch', 'numpy'):
        others = {package: '0.1'}
        monkeypatch.setattr(stock_key, 'version', lambda p, o=others: o.get(p) or installed(p))
        stock_key._machine.cache_clear()
        assert key() != before, package
    stock_key._machine.cache_clear()


def test_a_harness_counts_with_all_that_it_imports(tmp_path):
    names = {path.name for path in stock_key.harness(frozenset({'nvidia'}))}
    assert {'nvidia.py', 'events.py', 'few_documents.py', 'ranks.py', 'report.py'} <= names
    assert 'test_stock.py' not in names and 'conftest.py' not in names
    data = tmp_path / 'text'
    for suffix in ('.bin', '.idx'):
        Path(f'{data}{suffix}').write_text('tokens')
    before = stock_key.contents(data)
    (data / 'cache').mkdir(parents=True)
    (data / 'cache' / 'index.npy').write_text('of a training')
    assert stock_key.contents(data) == before
    Path(f'{data}.bin').write_text('others')
    assert stock_key.contents(data) != before
    with pytest.raises(UnknownError):
        stock_key.contents(tmp_path / 'none')


@pytest.mark.parametrize(
    ('prepared', 'args'),
    [
        ((False, True, print, ()), ()),
        ((False, True, partial(wheels.install), ()), ()),
        (PLAIN, (lambda: None,)),
        (PLAIN, (['--tensorboard-dir', '/tmp/logs'],)),
        (PLAIN, (Path('/tmp/script.py'),)),
        (PLAIN, (object(),)),
    ],
)
def test_what_has_no_key(prepared, args):
    with pytest.raises(UnknownError):
        key(prepared=prepared, args=args)


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        ('--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2', True),
        ('--pipeline-schedule megatron --bf16', True),
        ('--pipeline-schedule zb-h1', False),
        ('--pipeline-schedule megatron --pipeline-offload all', False),
        ('--pipeline-schedule-file plan.json', False),
        ('--enable-optimizer-post-validation', False),
        ('--enable-zero-bubble', False),
    ],
)
def test_flags_of_ours(words, expected):
    assert by_megatron(words.split()) == expected


def test_trained_once_and_served():
    first, second = Stub(), Stub(results=[])
    assert train(first, '--seed', 1) == LEFT
    served = train(second, '--seed', 1)
    assert (first.trained, second.trained) == (1, 0) and stock.same(served, LEFT)
    train(second, '--seed', 2)
    assert second.trained == 1
    assert stock.summary() == '1 served, 2 trained'


@pytest.mark.parametrize('how', ['off', 'a GPU', 'a checkout'])
def test_nothing_is_kept(how, cache, monkeypatch):
    if how == 'off':
        monkeypatch.setenv(stock_key.FOLDER, 'off')
    elif how == 'a GPU':
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    else:
        monkeypatch.setenv('MEGATRON_LM', '/checkout')
    ranks = Stub()
    train(ranks)
    train(ranks)
    assert ranks.trained == 2 and not cache.exists() and stock.summary() == '2 not kept'


def test_a_training_of_ours_is_not_kept(cache):
    ranks: Any = Stub(results=LEFT)
    for _ in range(2):
        example.run(ranks, '--pipeline-schedule', 'zb-v')
        example.run(ranks, '--pipeline-schedule', 'megatron', '--pipeline-offload', 'all')
    assert ranks.trained == 4 and not cache.exists()


def entry_in(cache: Path) -> Path:
    (path,) = cache.glob('??/*')
    return path


@pytest.mark.parametrize('damage', [lambda content: content[:-9], lambda content: b''])
def test_a_damaged_entry_is_replaced(cache, damage):
    ranks = Stub()
    train(ranks)
    whole = entry_in(cache).read_bytes()
    entry_in(cache).write_bytes(damage(whole))
    assert train(ranks) == LEFT and ranks.trained == 2
    assert entry_in(cache).read_bytes() == whole


def write(path: Path, number: int) -> None:
    for _ in range(50):
        stock.Entry([number] * 10_000, {}).write(path)


def test_several_write_the_same(cache):
    path = cache / '00' / 'key'
    stock.Entry([0] * 10_000, {}).write(path)
    with ProcessPoolExecutor(2) as processes:
        writing = [processes.submit(write, path, number) for number in (1, 2)]
        while not all(each.done() for each in writing):
            found = stock.Entry.read(path)
            assert found is not None and len(set(found.results)) == 1
    assert entry_in(cache) == path, 'no part is left'


def test_entries_not_read_for_longest_go(cache, monkeypatch):
    ranks = Stub()
    for seed in (1, 2, 3):
        train(ranks, '--seed', seed)
        for age, path in enumerate(sorted(cache.glob('??/*'), key=os.path.getmtime)):
            os.utime(path, (age, age))
    train(ranks, '--seed', 1)  # served: it is the latest
    size = max(path.stat().st_size for path in cache.glob('??/*'))
    monkeypatch.setattr(stock, 'LIMIT', 2 * size + 10)
    stock.prune()
    trained = ranks.trained
    train(ranks, '--seed', 1)
    train(ranks, '--seed', 3)
    assert ranks.trained == trained
    train(ranks, '--seed', 2)
    assert ranks.trained == trained + 1


def test_a_checkpoint_is_kept_and_its_loader_served(tmp_path, monkeypatch):
    first, ranks = Stub(), Stub()
    for number, each in enumerate((first, ranks)):
        monkeypatch.setattr(stock, '_saved', {})
        folder = tmp_path / str(number)
        folder.mkdir()
        train(each, '--save', folder)
        assert (folder / 'iter_0000001' / 'common.pt').read_text() == 'weights'
        train(each, '--load', folder)
    assert (first.trained, ranks.trained) == (2, 0)
    (folder / 'iter_0000001' / 'common.pt').write_text('other weights')
    train(ranks, '--load', folder)
    assert ranks.trained == 1, 'somebody has changed it'
    other = Stub(saves='ours')
    other.run(None, ['--save', str(tmp_path / 'ours')])
    train(other, '--load', tmp_path / 'ours')
    train(other, '--load', tmp_path / 'ours')
    assert other.trained == 3, 'no stock training has left it'


def test_one_goes_on_where_another_has_saved(tmp_path):
    """The key of a loader has that of the saver."""
    ranks = Stub()
    for name, seed in (('a', 1), ('b', 2)):
        train(ranks, '--save', tmp_path / name, '--seed', seed)
        train(ranks, '--load', tmp_path / name)
    assert ranks.trained == 4


@pytest.mark.parametrize('why', ['fresh', 'the first of a harness', 'a sixteenth'])
def test_some_are_trained_anew(why, monkeypatch):
    """Once in a session."""
    ranks = Stub()
    train(ranks)
    setting = {'fresh': ('FRESH', True), 'a sixteenth': ('TRIED', 1)}
    monkeypatch.setattr(stock, *setting.get(why, ('TRIED', 1 << 40)))
    seen = set() if why == 'the first of a harness' else {'example.measured'}
    monkeypatch.setattr(stock, '_seen', {*seen})
    train(ranks)
    train(ranks)
    assert ranks.trained == 2
    ranks.results = [LEFT[0], replace(LEFT[1], losses=('0x1.8p+0',))]
    monkeypatch.setattr(stock, '_seen', seen)
    with pytest.raises(stock.StaleError, match=r'measured on 2 ranks with .*: this stock training'):
        train(ranks)


def test_to_the_bit():
    one = torch.tensor([0.0, math.nan])
    assert stock.same([{'a': (one, math.nan)}], [{'a': (one.clone(), math.nan)}])
    for other in (torch.tensor([-0.0, math.nan]), one.double(), one[:1]):
        assert not stock.same([one], [other])
    assert not stock.same(1, 1.0) and not stock.same([1], [1, 2]) and not stock.same({1: 2}, {1: 3})
    assert not stock.same(LEFT[1], replace(LEFT[1], losses=()))
