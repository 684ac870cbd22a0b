"""A program on Megatron's schedules alone, neither its models nor its training: as NVIDIA's own
tests/unit_tests/pipeline_parallel/test_schedules.py, with the same shapes of input; and those tests
themselves, where MEGATRON_LM names a checkout."""

import ast
import io
import json
import sys
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import run
from example import groups
from nvidia import CHECKOUT, release
from outcome import error_of
from paths import SUPPORT
from supported import PASSES, supports

import megatron_zbpp

SEQUENCE, MICRO_BATCH, HIDDEN = 512, 8, 256
MICROBATCHES = 8


@contextmanager
def pipeline(tp, pp, chunks, layers):
    """Chunks of a model that Megatron has no class for, and what its schedules are called with."""
    from megatron.core import ModelParallelConfig, parallel_state

    config = ModelParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float,
        overlap_p2p_comm=chunks > 1,  # else Megatron mixes up the messages of two ranks with chunks
        batch_p2p_comm=chunks == 1,
    )
    config.hidden_size = HIDDEN
    models = []
    with groups(tp, pp, chunks):
        for chunk in range(chunks):
            torch.manual_seed(chunk * pp + parallel_state.get_pipeline_model_parallel_rank())
            model = layers()
            model.config, model.model_type = config, 'unit-test'
            model.set_input_tensor = partial(setattr, model, 'received')
            models.append(model)
        data = [iter(range(100)) for _ in models]
        yield models, {'model': models, 'data_iterator': data if chunks > 1 else data[0]}


def groups_of(config):
    """Explicit process groups, as a program passes them that keeps its own."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    names = ['tp', 'cp', 'embd', 'pos_embd', 'pp', 'dp_cp']
    collection = ProcessGroupCollection.use_mpu_process_groups(names)
    communicator = P2PCommunicator(pp_group=collection.pp, config=config)
    return {'pg_collection': collection, 'p2p_communicator': communicator}


def call(forward_step, arguments, function, shape=(SEQUENCE, MICRO_BATCH), **more):
    """A function of schedules, as a program calls it."""
    sizes = dict(zip(('seq_length', 'micro_batch_size'), shape, strict=True))
    sizes['num_microbatches'] = MICROBATCHES
    return function(forward_step_func=forward_step, **sizes, **arguments, **more)


def by_both(schedule, run):
    """What `run` returns by Megatron's function, and by ours."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    own = run(get_forward_backward_func())
    with megatron_zbpp.enable(schedule):
        ours = run(get_forward_backward_func())
    return own, ours


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize(
    ('schedule', 'tp', 'pp', 'chunks', 'given'),
    [
        ('1f1b', 1, 4, 1, False),
        ('zb-h1', 2, 2, 1, False),
        ('zb-h1', 2, 2, 1, True),
        ('interleaved', 2, 2, 2, False),
    ],
)
def test_loss_functions_may_return_numbers(schedule, tp, pp, chunks, given):
    rank = dist.get_rank()

    def forward_step(data_iterator, model):
        return torch.rand(SEQUENCE, MICRO_BATCH, HIDDEN), lambda output: (rank, {'loss': rank})

    with pipeline(tp, pp, chunks, lambda: torch.nn.Linear(4, 1)) as (models, arguments):
        arguments |= groups_of(models[0].config) if given else {}
        own, ours = by_both(schedule, partial(call, forward_step, arguments, forward_only=True))
    last = rank // tp == pp - 1
    assert own == ours == ([{'loss': rank}] * MICROBATCHES if last else [])


@pytest.mark.on_ranks(2)
@supports('a program with a model of its own')
@pytest.mark.parametrize(('schedule', 'chunks'), [('zb-h1', 1), ('zb-interleaved', 2)])
def test_a_plain_model_trains(schedule, chunks):
    """Its layers are torch's: W passes have nothing to do, which is said."""

    def layers():
        return torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh())

    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(4, 2, HIDDEN, generator=generator) for _ in range(MICROBATCHES)]

    def forward_step(data_iterator, model):
        data = next(data_iterator)
        received = model.received[0]
        output = model(data if received is None else received)
        return output, lambda output: ((output**2).mean(), {'loss': (output**2).mean().item()})

    def run(function):
        for model in models:
            model.zero_grad()
        arguments['data_iterator'] = [iter(inputs) for _ in models]
        losses = call(forward_step, arguments, function, (4, 2))
        return losses, [p.grad.clone() for model in models for p in model.parameters()]

    with pipeline(1, 2, chunks, layers) as (models, arguments):
        # Megatron's own functions ask any config for it when they train
        models[0].config.fine_grained_activation_offloading = False
        with redirect_stderr(io.StringIO()) as said:
            (losses, gradients), (our_losses, ours) = by_both(schedule, run)
    assert losses == our_losses and len(losses) == MICROBATCHES * dist.get_rank()
    assert all(g.any() and torch.equal(g, own) for g, own in zip(gradients, ours, strict=True))
    assert 'no layer left its weight gradient to a W pass' in said.getvalue()


@pytest.mark.on_ranks(2)
def test_data_that_end():
    """In an evaluation, on the last rank: a bare StopIteration would not say of what."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data_iterator, model):
        next(data_iterator)
        return torch.rand(SEQUENCE, MICRO_BATCH, HIDDEN), lambda output: (1, {})

    last = MICROBATCHES - 1
    with pipeline(1, 2, 1, lambda: torch.nn.Linear(4, 1)) as (_, arguments):
        arguments['data_iterator'] = [iter(range(MICROBATCHES - dist.get_rank()))]
        with megatron_zbpp.enable('zb-h1'):
            function = get_forward_backward_func()
            said = error_of(call, forward_step, arguments, function, forward_only=True)
    wanted = f'the data iterator has ended at microbatch {last} of {MICROBATCHES}'
    assert wanted in said if dist.get_rank() else said is None


FILE = 'tests/unit_tests/pipeline_parallel/test_schedules.py'
# call what Megatron's own function is made of, or no function that runs passes
OF_ITS_OWN = ('test_schedule_enables_grad_sync_on_first_stage', 'test_get_pipeline_parallel_order')


def nvidias_tests() -> list[str]:
    """The names of NVIDIA's tests in the checkout; none where there is none."""
    path = Path(CHECKOUT or '', FILE)
    if not CHECKOUT or not path.exists():
        return []
    tree = ast.parse(path.read_text())
    named = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in named if name.startswith('test_') and name not in OF_ITS_OWN]


def schedule(test: str) -> str:
    """Ours that does what the test is about."""
    chunks = test.endswith('interleaving') or 'with_interleaving' in test
    return 'whole_groups:interleaved' if chunks else '1f1b'


@pytest.fixture(scope='module')
def statuses() -> dict[str, list[int]]:
    """Exit codes of pytest on the ranks of each test."""
    pytest.importorskip('pytest_mock')
    wanted = [f'{FILE}::{test}={schedule(test)}' for test in nvidias_tests()]
    done = run([sys.executable, SUPPORT / 'nvidia_unit_tests.py', CHECKOUT, *wanted], timeout=1500)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["tests/')]
    print(done.stdout, done.stderr)
    return {test.partition('::')[2]: codes for test, codes in found}


@pytest.mark.skipif(
    not nvidias_tests(), reason='needs a checkout of Megatron-LM: MEGATRON_LM names it'
)
@pytest.mark.timeout(1800)
@supports("NVIDIA's own unit tests of its schedules", '1f1b interleaved', PASSES)
@pytest.mark.parametrize('test', nvidias_tests() or ['none'])
def test_passes(statuses, test, record_property):
    record_property('megatron', release())
    assert statuses[test] == [0] * 8
