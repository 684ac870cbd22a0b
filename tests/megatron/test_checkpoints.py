"""Saved by one schedule, resumed by another: as if nothing had happened."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from example import run, train, words
from grids import grid
from nvidia import require_same
from outcome import error_of
from supported import supports

METADATA = 'iter_0000004/.metadata'


@supports('GPT, {precision}, checkpoints go from one schedule to the next', '{first} {second}')
@grid(
    precision=('fp32', 'bf16', 'bf16, distributed optimizer'),
    first=('1f1b', 'zb-v', 'megatron'),
    second=('zb-v', '1f1b', 'zb-v'),
    when=lambda precision, first, second: first != second,
)
def test_resume_with_another_schedule(ranks, data, tmp_path, first, second, precision):
    replicas = 2 if 'distributed' in precision else 1
    pool = ranks(2 * replicas)
    common = ['--num-layers', 5, '--pipeline-model-parallel-size', 2]
    common += ['--global-batch-size', 4 * replicas]
    common += ['--data-path', data, '--clip-grad', 1e9, '--train-iters', 5]
    common += ['--bf16'] if 'bf16' in precision else []
    common += ['--use-distributed-optimizer'] if replicas > 1 else []
    reference = second if replicas > 1 else 'megatron'  # ranks have shards by the schedule
    whole = run(pool, *common, '--pipeline-schedule', reference)
    saving = ['--save', tmp_path / 'checkpoint', '--exit-interval', 3]
    before = run(pool, *common, '--pipeline-schedule', first, *saving)
    loading = ['--load', tmp_path / 'checkpoint']
    after = run(pool, *common, '--pipeline-schedule', second, *loading)
    assert len(before.losses) == 3 and len(after.losses) == 2
    require_same(replace(after, losses=before.losses + after.losses), whole)


def shard(root):
    """The first file of data of the latest checkpoint."""
    return min((root / 'iter_0000004').glob('*.distcp'))


def spoil_all(root):
    (root / METADATA).unlink()
    (root / 'iter_0000002' / 'metadata.json').unlink()


CHANGES = {
    'truncated': lambda root: shard(root).write_bytes(shard(root).read_bytes()[:-10]),
    'a shard lost': lambda root: shard(root).unlink(),
    'metadata lost': lambda root: (root / METADATA).unlink(),
    'metadata empty': lambda root: (root / METADATA).write_bytes(b''),
    'tracker empty': lambda root: (root / 'latest_checkpointed_iteration.txt').write_text(''),
    'all spoilt': spoil_all,
}


def said_of(root):
    """What is said of the folder `root`, for each change alone made to it."""
    import checkpoints

    found = []
    for name, change in CHANGES.items():
        copy = root.with_name(name)
        shutil.copytree(root, copy)
        change(copy)
        with pytest.raises(checkpoints.InputError) as error:
            checkpoints.to_load(SimpleNamespace(load=copy, ckpt_step=None))
        found.append(str(error.value).replace(str(copy), 'ROOT'))
    return found


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


OTHER = 'give --ckpt-step 2 to go on from iter_0000002, which is whole'


def test_a_damaged_checkpoint_is_named(ranks, data, tmp_path):
    """And the latest whole one is offered."""
    saving = ['--save', tmp_path / 'checkpoint', '--save-interval', 2, '--train-iters', 4]
    common = ['--num-layers', 2, '--pipeline-model-parallel-size', 2, '--global-batch-size', 2]
    run(ranks(2), *common, '--data-path', data, '--pipeline-schedule', '1f1b', *saving)

    (said,) = ranks(1).run(said_of, tmp_path / 'checkpoint')
    truncated, lost, no_metadata, no_content, no_tracker, nothing = said
    assert truncated.startswith('ROOT/iter_0000004/__0_') and truncated.endswith(f'; {OTHER}')
    assert lost.startswith('ROOT/iter_0000004 is not whole: it has no __0_')
    assert no_metadata == f'ROOT/iter_0000004 is not whole: it has no .metadata; {OTHER}'
    assert no_content.startswith(f'ROOT/{METADATA} is damaged (')
    tracker = "ROOT/latest_checkpointed_iteration.txt holds '', not an iteration; give --ckpt-step"
    assert no_tracker.startswith(tracker)
    assert nothing.endswith('; no other checkpoint in ROOT is whole')

    damaged = shard(tmp_path / 'checkpoint')
    flip_a_bit(damaged)
    argv = words(data, '1f1b', '--load', tmp_path / 'checkpoint', layers=2, m=2)
    for said in ranks(2).run(error_of, train, argv, tmp_path / 'metrics'):
        assert f'{damaged} is damaged: not what was saved; {OTHER}' == said
