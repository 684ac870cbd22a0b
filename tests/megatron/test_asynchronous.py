"""Asynchronous schedules leave what Megatron's own 1F1B leaves on weights put in by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from example import MODEL, forget_groups
from grids import grid
from supported import supports

ITERATIONS = 5


def version_of_forward(method: str, p: int, m: int, stage: int, j: int) -> int:
    """The version of the weights of a stage that microbatch j of the training uses."""
    return max(0, j // m - 1 if method == 'pipedream-2bw' else (j - (p - 1 - stage)) // m)


class ByHand:
    """Copies weights into the parameters before each of Megatron's own forward and backward steps.

    It knows the formulas of versions and nothing of orders: batches run one after the other.
    """

    def __init__(self, method: str, p: int, m: int, stage: int, models: list) -> None:
        self.method, self.sizes = method, (p, m, stage)
        self.parameters = [each for model in models for each in model.parameters()]
        self.history: list[list[torch.Tensor]] = []
        self.forwards = self.backwards = 0

    def keep(self) -> None:
        self.history.append([each.data.clone() for each in self.parameters])

    def put(self, version: int) -> None:
        for parameter, data in zip(self.parameters, self.history[version], strict=True):
            parameter.data.copy_(data)

    def forward(self, original: Callable, *args: Any, **given: Any) -> Any:
        self.put(version_of_forward(self.method, *self.sizes, self.forwards))
        self.forwards += 1
        return original(*args, **given)

    def backward(self, original: Callable, *args: Any, **given: Any) -> Any:
        version = version_of_forward(self.method, *self.sizes, self.backwards)
        self.put_back(self.backwards // self.sizes[1] if self.method == 'paci' else version)
        self.backwards += 1
        return original(*args, **given)

    def put_back(self, version: int) -> None:
        self.put(version)

    @contextmanager
    def rates(self, optimizer: Any, step: int) -> Iterator[None]:
        yield

    @contextmanager
    def batch(self) -> Iterator[None]:
        from megatron.core.pipeline_parallel import schedules

        steps = {'forward_step': self.forward, 'backward_step': self.backward}
        with ExitStack() as stack:
            for name, step in steps.items():
                ours = partial(step, getattr(schedules, name))
                stack.enter_context(mock.patch.object(schedules, name, ours))
            yield
        self.put(-1)


class PipeMare(ByHand):
    """PipeMare's formulas: T1's rates, T2's weights of backwards. tau is the delay of a stage."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        p, m, stage = self.sizes
        self.tau, self.decay, self.annealed = (p - 1 - stage) / m, 0.135, 5
        self.main = [getattr(each, 'main_param', each) for each in self.parameters]
        self.newest = [each.data.clone() for each in self.main]
        self.delta = [torch.zeros_like(each) for each in self.newest]

    def keep(self) -> None:
        super().keep()
        before, self.newest = self.newest, [each.data.clone() for each in self.main]
        if self.tau:
            gamma = self.decay ** (1 / self.tau)
            moved = [new - old for new, old in zip(self.newest, before, strict=True)]
            both = zip(self.delta, moved, strict=True)
            self.delta = [gamma * delta + (1 - gamma) * by for delta, by in both]

    def put_back(self, version: int) -> None:
        for each, new, delta in zip(self.parameters, self.newest, self.delta, strict=True):
            each.data.copy_(new - self.tau * delta)

    @contextmanager
    def rates(self, optimizer: Any, step: int) -> Iterator[None]:
        groups = optimizer.param_groups
        rates = [group['lr'] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group['lr'] = rate / max(self.tau, 1) ** (1 - min(step / self.annealed, 1))
        yield
        for group, rate in zip(groups, rates, strict=True):
            group['lr'] = rate


def without(argv: list[str], flag: str, default: str) -> tuple[list[str], str]:
    """Return the words without a flag that the script does not have, and its value."""
    if flag not in argv:
        return argv, default
    at = argv.index(flag)
    return argv[:at] + argv[at + 2 :], argv[at + 1]


def configured(original: Callable, name: str, **given: Any) -> Any:
    return original(**given | {'optimizer': name})


def train(method: str, by_hand: bool, evaluates: bool, argv: list[str]) -> tuple:
    """Runs on each rank; returns all that is left, and how many copies of weights there were."""
    import pretrain_gpt as script
    import report
    from megatron.core import parallel_state

    argv, optimizer = without(argv, '--optimizer', 'adam')
    schedule = ['--pipeline-schedule', 'megatron' if by_hand else method]
    with ExitStack() as stack:
        stack.callback(forget_groups)
        args = script.parse_args([*argv, *schedule])
        plugin = script.enable(args, stack)
        script.initialize(args)
        models = script.build_model(args)
        config = partial(configured, script.OptimizerConfig, optimizer)
        with mock.patch.object(script, 'OptimizerConfig', config):
            stepping, scheduler = script.build_optimizer(args, models)
        dataset = script.build_datasets(args)[0]
        if by_hand and clips_by_stage(method, args):
            for leaf in stepping.chained_optimizers:
                of_stage = parallel_state.get_tensor_and_data_parallel_group
                plain = parallel_state.get_tensor_model_parallel_group()
                sharded = args.use_distributed_optimizer
                leaf.grad_stats_parallel_group = of_stage() if sharded else plain
        data, held_out = (script.iterators(args, dataset, at) for at in (0, 100))
        p, rank = args.pipeline_model_parallel_size, 'get_pipeline_model_parallel_rank'
        stage = getattr(parallel_state, rank)()
        by = PipeMare if method == 'pipemare' else ByHand
        hand = by(method, p, args.num_microbatches, stage, models)
        losses, norms, late = [], [], []
        for iteration in range(args.train_iters):
            if evaluates and iteration == 3:
                with torch.no_grad():
                    losses.append(script.run_batch(args, models, held_out, forward_only=True))
            for model in models:
                model.zero_grad_buffer()
            stepping.zero_grad()
            puts = by_hand and iteration >= args.pipeline_async_warmup_steps
            if puts:
                hand.keep()
            with hand.batch() if puts else ExitStack():
                losses.append(script.run_batch(args, models, data))
            late.append(plugin is not None and plugin.session.endless.unfinished)
            with hand.rates(stepping, iteration) if puts else ExitStack():
                succeeded, norm, _ = stepping.step()
            assert succeeded
            scheduler.step(increment=1)
            norms.append(float(norm))
            late.append(plugin is not None and plugin.session.endless.unfinished)
        if plugin is not None:
            plugin.finish_step()
        left = report.fingerprint(report.by_layer(models), stepping)
        most = None if plugin is None else plugin.session.endless.versions.most
        return losses, norms, left, most, stage, late


def trained(ranks, data, method, p, m, by_hand, evaluates, *more) -> list[tuple]:
    replicas = 2 if '--replicas' in more else 1
    shards = 2 if '--tensor-model-parallel-size' in more else 1
    argv = [*MODEL, '--num-layers', 2 * p, '--data-path', data, '--log-interval', 1000]
    argv += ['--pipeline-model-parallel-size', p, '--global-batch-size', m * replicas]
    argv += ['--train-iters', ITERATIONS, '--lr-warmup-iters', 1, '--clip-grad', 0.5]
    argv += [word for word in more if word != '--replicas']
    return ranks(p * replicas * shards).run(train, method, by_hand, evaluates, list(map(str, argv)))


def clips_by_stage(method: str, args: Any) -> bool:
    """Whether stages clip by norms of their own: tied embeddings need one for both copies."""
    if method == 'pipedream-2bw':
        return args.pipeline_clip == 'stage'
    return args.untie_embeddings_and_output_weights and args.pipeline_clip != 'global'


def taken_late(late: bool, last: bool, evaluates: bool, warm: int) -> list[bool]:
    """Whether a step is still to be taken, before and behind each step of the program.

    The first waits. Ranks that run ahead have taken it within the call, as all have that evaluate.
    """
    found = []
    for iteration in range(ITERATIONS):
        taken = iteration < 2 + warm or not last or (evaluates and iteration == 3)
        found += [not taken, iteration > warm] if late else [False, False]
    return found


COPIES = {(2, 2): (2, 1), (4, 1): (4, 3, 2, 1), (4, 4): (2, 2, 2, 1)}
METHODS = ('pipedream-2bw', 'pipedream', 'paci', 'pipemare')
SETTINGS = {
    'two replicas, distributed optimizer, overlapped reduction, bf16': (
        '--replicas --bf16 --use-distributed-optimizer --overlap-grad-reduce'
    ),
    'tensor parallel 2': '--tensor-model-parallel-size 2',
    'two replicas': '--replicas --untie-embeddings-and-output-weights',
    'SGD, bf16': '--optimizer sgd --bf16',
    'norm of all, for which steps wait': (
        '--untie-embeddings-and-output-weights --pipeline-clip global'
    ),
    'two synchronous steps first': '--pipeline-async-warmup-steps 2',
    'Muon': '--optimizer muon',
}


def require_equal(ranks, data, method, p, m, evaluates, *more) -> None:
    ours = trained(ranks, data, method, p, m, False, evaluates, *more)
    reference = trained(ranks, data, method, p, m, True, evaluates, *more)
    late = method == 'pipedream-2bw' and '--pipeline-clip' not in more
    warm = 2 if '--pipeline-async-warmup-steps' in more else 0
    for rank, (own, other) in enumerate(zip(ours, reference, strict=True)):
        norms = other[1]
        if late:  # of the step before, but for the first
            norms = [*norms[: warm + 1], *norms[warm:-1]]
        assert (own[0], own[1], own[2]) == (other[0], norms, other[2]), rank
        assert own[5] == taken_late(late, own[4] == p - 1, evaluates, warm), rank
    assert min(ours[0][1]) > 0.5, 'clipping must have been active'
    fixed = {'paci': (1,) * p, 'pipemare': (2,) * (p - 1) + (1,), 'pipedream-2bw': (2,) * p}
    copies = fixed.get(method) or COPIES[p, m]
    assert [own[3] for own in ours] == [copies[own[4]] for own in ours]


@supports('asynchronous, beside 1F1B with weights put in by hand', ' '.join(METHODS))
@grid(
    method=METHODS,
    sizes=((4, 1), (2, 2), (4, 4)),
    more=((), ('--bf16',), ('--untie-embeddings-and-output-weights',)),
)
def test_as_with_weights_put_in_by_hand(ranks, data, method, sizes, more):
    """Losses, norms, parameters, optimizer state to the bit; clipping is active."""
    p, m = sizes
    if method == 'pipedream-2bw':
        m = max(m, p - 1)
    require_equal(ranks, data, method, p, m, bool(more), *more)


def _has_weights(method: str, setting: str) -> bool:
    """Whether a rank has all the weights of its stage in float32, as PipeMare needs them."""
    return method != 'pipemare' or 'distributed' not in setting


@supports('asynchronous: {setting}', ' '.join(METHODS))
@grid(_has_weights, method=METHODS, setting=tuple(SETTINGS))
def test_beside_other_parallelism(ranks, data, method, setting):
    """The same on several ranks a stage, whose optimizer may write to buffers."""
    if setting == 'Muon':
        pytest.importorskip('emerging_optimizers')
    require_equal(ranks, data, method, 2, 2, True, *SETTINGS[setting].split())


def test_at_rate_zero_all_are_1f1b(ranks, data):
    """Weights do not move: losses, gradients and what the optimizer keeps are those of 1F1B."""
    still = ['--lr', 0, '--min-lr', 0]
    _, *others = METHODS
    stock = trained(ranks, data, 'paci', 2, 2, True, False, *still)
    for method in others:
        ours = trained(ranks, data, method, 2, 2, False, False, *still)
        assert [own[:3] for own in ours] == [other[:3] for other in stock], method
