"""A side task runs while ranks wait: it uses the gaps, and iterations take as long as without."""

import time
from contextlib import contextmanager
from copy import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from example import groups
from nvidia import EARLY, needs_training, run
from outcome import error_of
from test_frozen import adapted

import megatron_zbpp
from benchmarks.pipelines.emulated import Times, sleep_until
from benchmarks.pipelines.runners import EmulatedModel, ZbppRunner
from megatron_zbpp.mcore import enabled
from megatron_zbpp.schedules import build

pytestmark = pytest.mark.one_release

P, M = 4, 8
TIMES = 0.02, 0.02, 0.02  # of F, B, W
STEP = 0.002
ROUNDS = 4
TURN = 5  # iterations that are timed together, where they overlap
MEASURED = 15  # of those, after which times are known


@contextmanager
def emulated(schedule, name, times, **options):
    """A runner of a schedule's passes, which take so long."""
    with groups(pp=schedule.num_ranks):
        runner = ZbppRunner(schedule, name, EmulatedModel(Times(*times)), **options)
        with runner.ready():
            yield runner


def trained(name, early):
    """Seconds of iterations without and with the task, which take turns; of its steps in one
    iteration, and how many optimizer steps were early."""

    def step():
        sleep_until(time.perf_counter() + STEP)

    with emulated(build(name, P, M), name, TIMES, optimizer=True, early=early) as runner:
        work = runner.plugin.side_task(step, STEP)
        for _ in range(MEASURED if early else 5):
            runner.iterate()
        assert early or work.steps == 0
        taken, seconds = ([], []), []
        for at in range(2 * ROUNDS):
            work.finished = at % 2 == 0
            dist.barrier()
            start = time.perf_counter()
            for _ in range(TURN if early else 1):
                runner.iterate()
            taken[at % 2].append(time.perf_counter() - start)
            seconds.append(work.seconds)
        used = (seconds[-1] - seconds[-2]) / TURN if early else seconds[-1] / ROUNDS
        return *taken, used, runner.plugin.post_validation.early if early else 0


@pytest.mark.full
@pytest.mark.parametrize('early', [False, True], ids=['waiting', 'post-validation'])
def test_side_task(ranks, early):
    """At most 1 % slower, and 80 % of the time that is idle is used; with post-validation ranks
    wait in their steps, too, where no side task runs. The least of many iterations, each as long as
    its last rank takes, is what is left of them where other programs take the machine's time."""
    waits = P * (P - 1) * sum(TIMES)
    without, with_task, used = [], [], []
    for _ in range(6):
        *taken, seconds, stepped = zip(*ranks(P).run(trained, '1f1b', early), strict=True)
        assert not early or all(stepped[:-1])  # the last one soon knows everything: it waits
        for found, of_ranks in zip((without, with_task), taken, strict=True):
            found += map(max, zip(*of_ranks, strict=True))
        if early:
            waits = P * (min(without) / TURN - M * sum(TIMES))
        used.append(sum(seconds) / waits)
        if min(with_task) <= 1.01 * min(without) and max(used) >= (0.35 if early else 0.8):
            return
    raise AssertionError((without, with_task, used, waits))


@pytest.mark.on_ranks(2)
def test_ranks_that_disagree():
    """Only the first one has a side task."""
    with emulated(build('zb-h1', 2, 2), 'zb-h1', (0.001,) * 3, optimizer=False) as runner:
        if dist.get_rank() == 0:
            runner.plugin.side_task(lambda: False, 0.1)
        assert 'side task' in error_of(runner.iterate)


@contextmanager
def once_set_up(training, prepare):
    """NVIDIA's loop, which calls `prepare()` behind its set-up; a list of what that returned."""
    original, told = training.setup_model_and_optimizer, []

    def setup_model_and_optimizer(*args, **kwargs):
        made = original(*args, **kwargs)
        told.append(prepare())
        return made

    with mock.patch.object(training, 'setup_model_and_optimizer', setup_model_and_optimizer):
        yield told


@contextmanager
def beside(training):
    """NVIDIA's loop with a task that draws random numbers: how many steps, early and side ones."""

    def prepare():
        return enabled.plugin.side_task(lambda: torch.rand(8), 1e-5, margin=1e-5)

    found = []
    with once_set_up(training, prepare) as works:
        yield found
        early = enabled.plugin.post_validation
        found += [works[0].steps, 0 if early is None else early.early]


def reported(ranks, event, schedule, iterations, *more, batch=8):
    """By rank, of a training with something beside it: to the bit what it is without."""
    flags = ['--pipeline-model-parallel-size', 2, '--global-batch-size', batch]
    flags += ['--train-iters', iterations, '--pipeline-schedule', schedule]
    flags += ['--untie-embeddings-and-output-weights', *more]
    without, found = run(ranks(2), *flags), run(ranks(2), *flags, event=event)
    assert found.losses == without.losses and found.parameters == without.parameters
    return found.reported


@needs_training
@pytest.mark.parametrize('early', [False, True], ids=['waiting', 'post-validation'])
def test_a_whole_training(ranks, early):
    """Random masks included; steps are still early."""
    more = ['--clip-grad', 1e9, '--hidden-dropout', 0.1]
    more += [*EARLY, '--log-interval', 6] if early else []
    found = reported(ranks, beside, 'zb-h1', 18, *more, batch=6)
    steps, stepped_early = zip(*found, strict=True)
    assert sum(steps) > 0
    assert bool(stepped_early[0]) == early


def small(args):
    """A GPT of Megatron's of two layers, whole on this rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training.arguments import core_transformer_config_from_args

    config = copy(core_transformer_config_from_args(args))
    config.pipeline_model_parallel_size, config.pipeline_model_parallel_layout = 1, None
    config.num_layers = 2
    return GPTModel(config, get_gpt_layer_local_spec(), 256, 16, True, True)


def layers_of(args):
    """A GPT that does not train, and its layers as functions of one value."""
    model = small(args).eval()
    positions = torch.arange(16)[None]
    decoder = model.decoder

    return model, [
        lambda tokens: model.embedding(tokens, positions),
        *(lambda hidden, each=each: each(hidden, None)[0] for each in decoder.layers),
        lambda hidden: model.output_layer(decoder.final_layernorm(hidden))[0],
    ]


@contextmanager
def teaching(training):
    """NVIDIA's loop with a teacher's forwards beside it."""

    def prepare():
        teacher, layers = layers_of(training.get_args())
        tokens = torch.randint(255, (500, 2, 16), generator=torch.Generator().manual_seed(1))
        found = []
        step = megatron_zbpp.forwards(layers, iter(tokens), found.append)
        return teacher, tokens, found, enabled.plugin.side_task(step, 1e-4, margin=1e-5)

    report = []
    with once_set_up(training, prepare) as told:
        yield report
    ((teacher, tokens, found, work),) = told
    with torch.no_grad():
        for given, logits in zip(tokens, found, strict=False):
            alone = teacher(given, torch.arange(16)[None], None)
            assert torch.equal(alone.transpose(0, 1), logits)
    report += [len(found), work.steps]


@needs_training
def test_a_teacher_beside_a_training(ranks):
    """Its forwards give what they give alone."""
    found = reported(ranks, teaching, 'zb-h1', 30)
    assert any(outputs for outputs, _ in found)
    assert all(4 * n <= taken < 4 * n + 4 for n, taken in found)


class Adapters:
    """Two adapters of one frozen GPT, each with weights and an optimizer of its own (mLoRA)."""

    def __init__(self, args):
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        self.model = small(args).requires_grad_(False)
        self.layers = [layer.self_attention for layer in self.model.decoder.layers]
        base, config = [layer.linear_qkv for layer in self.layers], self.model.config
        self.adapted = [[adapted(own, config, 96) for own in base] for _ in range(2)]
        self.optimizers = [
            torch.optim.Adam([p for own in each for p in own.parameters() if p.requires_grad], 1e-2)
            for each in self.adapted
        ]
        self.tokens = torch.randint(255, (2, 2, 17), generator=torch.Generator().manual_seed(1))
        self.losses = []

    def step(self):
        """One of an adapter: forward, backward and optimizer, with masks of its own."""
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(len(self.losses))
        own = len(self.losses) % 2
        for layer, linear in zip(self.layers, self.adapted[own], strict=True):
            layer.linear_qkv = linear
        tokens = self.tokens[own]
        self.optimizers[own].zero_grad()
        loss = self.model(tokens[:, :-1], torch.arange(16)[None], None, labels=tokens[:, 1:]).mean()
        loss.backward()
        self.optimizers[own].step()
        self.losses.append(loss.item().hex())


@contextmanager
def tuning(training):
    """NVIDIA's loop with adapters that train beside it; then the same adapters alone."""
    from megatron_zbpp.mcore.side_effects import isolated

    def prepare():
        beside = isolated(lambda: Adapters(training.get_args()))
        return beside, enabled.plugin.side_task(beside.step, 1e-4, margin=1e-5)

    report = []
    with once_set_up(training, prepare) as told:
        yield report
    ((beside, work),) = told
    alone = Adapters(training.get_args())
    for _ in range(max(work.steps, 40)):
        alone.step()
    report += [work.steps, beside.losses, alone.losses]


@needs_training
@pytest.mark.parametrize('schedule', ['zb-h1', 'zb-v'])
def test_adapters_that_train_beside_a_training(ranks, schedule):
    """Both train as they do alone; both draw random masks, from the states that Megatron tracks."""
    masks = ['--hidden-dropout', 0.1, '--attention-dropout', 0.1]
    found = reported(ranks, tuning, schedule, 20, *masks)
    assert sum(steps for steps, *_ in found) > 4
    for steps, losses, alone in found:
        assert losses == alone[:steps] and len(losses) == steps
        for own in (alone[::2], alone[1::2]):
            assert float.fromhex(own[-1]) < float.fromhex(own[0])
