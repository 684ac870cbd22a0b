"""Trains by an asynchronous schedule, and by Megatron's own 1F1B on weights put in by hand."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import stock
import torch
from example import MODEL, program
from models import Job, replacements, with_fields
from outcome import logged

import megatron_zbpp
from megatron_zbpp.ir import BW, B, Pass, W
from megatron_zbpp.runtime.versions import Slots
from megatron_zbpp.techniques.updates import orders

ITERATIONS = 5
orders_of = orders._order


@dataclass(frozen=True)
class Case:
    method: str  # an asynchronous schedule
    p: int  # ranks of the pipeline, and microbatches of a call
    m: int
    words: tuple[str, ...] = ()  # flags of the example, and `--optimizer`, which it does not have
    replicas: int = 1  # of the pipeline
    job: Job | None = None  # of the model; None: the example's own
    evaluates: bool = False  # whether there is an evaluation in the middle
    half: bool = False  # whether in fp16, with a loss scale at which the first steps overflow
    split: bool = False  # whether weight gradients are computed by W, behind B
    added: tuple[str, ...] = ()  # flags of techniques, which the reference does not have

    def has(self, flag: str) -> bool:
        return flag in self.words

    @property
    def size(self) -> int:
        return self.p * self.replicas * (1 + self.has('--tensor-model-parallel-size'))

    @property
    def late(self) -> bool:
        """Whether steps are taken within the next call."""
        return self.method == 'pipedream-2bw' and not (self.has('--pipeline-clip') or self.half)

    @property
    def clips_by_stage(self) -> bool:
        """Whether stages clip by norms of their own: tied embeddings need one for both copies."""
        untied = self.has('--untie-embeddings-and-output-weights')
        waits = self.has('--pipeline-clip') or self.method == 'pipedream-2bw' or self.half
        return untied and not waits

    def argv(self, data: Any) -> list[str]:
        argv = [*MODEL, '--num-layers', 2 * self.p, '--data-path', data, '--log-interval', 1000]
        argv += ['--pipeline-model-parallel-size', self.p]
        argv += ['--global-batch-size', self.m * self.replicas]
        argv += ['--train-iters', ITERATIONS, '--lr-warmup-iters', 1, '--clip-grad', 0.5]
        return list(map(str, [*argv, *self.words]))


class ByHand:
    """Copies weights into the parameters before each of Megatron's own forward and backward steps.

    It knows the formulas of versions and nothing of orders: batches run one after the other, and
    may have other sizes. The pipeline fills anew where that changes, and where data does: PACI and
    PipeMare have no older weights then.
    """

    def __init__(self, method: str, p: int, stage: int, models: list) -> None:
        self.method, self.p, self.stage = method, p, stage
        self.parameters = [each for model in models for each in model.parameters()]
        self.history: list[list[torch.Tensor]] = []
        self.number, self.filled = -1, 0  # of the batch, and of the one with which it was filled
        self.m = self.forwards = self.backwards = 0

    def keep(self) -> None:
        self.history.append([each.data.clone() for each in self.parameters])

    def put(self, version: int) -> None:
        for parameter, data in zip(self.parameters, self.history[version], strict=True):
            parameter.data.copy_(data)

    def begin(self, m: int, fills: bool) -> None:
        self.m, self.number = m, self.number + 1
        self.filled = self.number if fills else self.filled
        self.forwards = self.backwards = 0

    def version(self, i: int) -> int:
        if self.method in ('pipedream-2bw', 'wpipe'):
            return max(0, self.number - (self.method == 'pipedream-2bw' or self.stage < self.p))
        newest_in_order = self.number + (i - (self.p - 1 - self.stage)) // self.m
        return max(self.filled if self.method in ('paci', 'pipemare') else 0, newest_in_order)

    def forward(self, original: Callable, *args: Any, **given: Any) -> Any:
        self.put(self.version(self.forwards))
        self.forwards += 1
        return original(*args, **given)

    def backward(self, original: Callable, *args: Any, **given: Any) -> Any:
        self.put_back(self.number if self.method == 'paci' else self.version(self.backwards))
        self.backwards += 1
        return original(*args, **given)

    def put_back(self, version: int) -> None:
        self.put(version)

    @contextmanager
    def rates(self, optimizer: Any, step: int) -> Iterator[None]:
        yield

    @contextmanager
    def batch(self, m: int, fills: bool = False) -> Iterator[None]:
        from megatron.core.pipeline_parallel import schedules

        self.begin(m, fills)
        steps = {'forward_step': self.forward, 'backward_step': self.backward}
        with ExitStack() as stack:
            for name, step in steps.items():
                ours = partial(step, getattr(schedules, name))
                stack.enter_context(mock.patch.object(schedules, name, ours))
            yield
        self.put(-1)


class ByChunk(ByHand):
    """The same for each chunk of a rank, of which Megatron's own schedule interleaves the steps."""

    def __init__(self, method: str, p: int, rank: int, models: list) -> None:
        self.hands = {
            id(model): ByHand(method, p, rank + p * chunk, [model])
            for chunk, model in enumerate(models)
        }
        self.made: dict[int, tuple[Any, ByHand]] = {}  # outputs by identity, and whose they are

    def keep(self) -> None:
        for hand in self.hands.values():
            hand.keep()

    def begin(self, m: int, fills: bool) -> None:
        for hand in self.hands.values():
            hand.begin(m, fills)

    def put(self, version: int) -> None:
        for hand in self.hands.values():
            hand.put(version)

    def forward(self, original: Callable, *args: Any, **given: Any) -> Any:
        hand = self.hands[id(args[2])]
        made = hand.forward(original, *args, **given)
        self.made[id(made[0])] = made[0], hand
        return made

    def backward(self, original: Callable, *args: Any, **given: Any) -> Any:
        _, hand = self.made.pop(id(args[1]))
        return hand.backward(original, *args, **given)


class PipeMare(ByHand):
    """PipeMare's formulas: T1's rates, T2's weights of backwards. tau is a stage's delay, fewer
    steps as batches grow."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tau, self.decay, self.annealed = 0.0, 0.135, 5
        sharded = any(model.ddp_config.use_distributed_optimizer for model in args[-1])
        self.main = [p if sharded else getattr(p, 'main_param', p) for p in self.parameters]
        self.newest: list[torch.Tensor] = []  # until steps are asynchronous
        self.delta = [torch.zeros_like(each.data, dtype=torch.float32) for each in self.main]

    def begin(self, m: int, fills: bool) -> None:
        super().begin(m, fills)
        self.tau = (self.p - 1 - self.stage) / m

    def keep(self) -> None:
        super().keep()
        now = [each.data.float().clone() for each in self.main]
        before, self.newest = self.newest or now, now
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


BY = {'pipemare': PipeMare, 'wpipe': ByChunk}


def with_w(stage: int, ahead: int, m: int, total: int) -> Iterator[Pass]:
    """PipeDream's order, with W behind each B."""
    for p in orders_of(stage, ahead, m, total):
        if p.kind == BW:
            yield p._replace(kind=B)
        yield p._replace(kind=W) if p.kind == BW else p


def replaced(case: Case, optimizer: str, script: Any) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, what it is to be)."""
    yield from replacements(script, case.job) if case.job else ()
    made = {'OptimizerConfig': {'optimizer': optimizer}}
    if case.half:  # with a loss scale that is too large at first and grows again later
        half = {'fp16': True, 'bf16': False, 'params_dtype': torch.float16}
        scale = {'initial_loss_scale': 2.0**18, 'loss_scale_window': 2, 'hysteresis': 1}
        made['OptimizerConfig'] |= half | scale
        made['TransformerConfig'] = half | {'pipeline_dtype': torch.float16}
    for name, values in made.items():
        yield script, name, with_fields(getattr(script, name), **values)
    if case.split:
        yield orders, '_order', with_w
    yield from laid_out(script, case.method)


def laid_out(script: Any, method: str) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, what it is to be), so that Megatron's own schedule has the layout of WPipe."""

    def parsed(argv: list[str]) -> Any:
        args = parse(argv)
        args.layout = megatron_zbpp.layout_for(
            'wpipe', args.pipeline_model_parallel_size, args.num_layers
        )
        return args

    if method == 'wpipe':
        parse = script.parse_args
        yield script, 'parse_args', parsed


def train(case: Case, by_hand: bool, argv: list[str]) -> tuple:
    """Runs on each rank; returns all that is left, and copies of weights; bytes as the log has."""
    import report
    from megatron.core import parallel_state

    optimizer = 'adam'
    if '--optimizer' in argv:  # which the script does not have
        at = argv.index('--optimizer')
        argv, optimizer = argv[:at] + argv[at + 2 :], argv[at + 1]
    schedule = ['--pipeline-schedule', *(['megatron'] if by_hand else [case.method, *case.added])]
    patches = partial(replaced, case, optimizer)
    copies = logged('megatron_zbpp.job', 'copies of weights')
    with copies as told, program([*argv, *schedule], patches) as at:
        args, plugin, models, (stepping, scheduler) = at.args, at.plugin, at.models, at.stepping
        dataset = at.script.build_datasets(args)[0]
        if by_hand and case.clips_by_stage:
            clip_by_stage(stepping, args.use_distributed_optimizer)
        data, held_out = (at.script.iterators(args, dataset, first) for first in (0, 100))
        stage = parallel_state.get_pipeline_model_parallel_rank()
        hand = BY.get(case.method, ByHand)(case.method, case.p, stage, models)
        losses, norms, late = [], [], []
        for iteration in range(args.train_iters):
            if case.evaluates and iteration == 3:
                with evaluation(models):
                    losses.append(at.batch(held_out, forward_only=True))
            for model in models:
                model.zero_grad_buffer()
            stepping.zero_grad()
            puts = by_hand and iteration >= args.pipeline_async_warmup_steps
            if puts:
                hand.keep()
            with hand.batch(case.m) if puts else ExitStack():
                losses.append(at.batch(data))
            losses.append(logged_by_routers())
            late.append(plugin is not None and endless_of(plugin).unfinished)
            with hand.rates(stepping, scheduler.num_steps) if puts else ExitStack():
                succeeded, norm, _ = stepping.step()
            assert succeeded or case.half
            if succeeded:
                scheduler.step(increment=1)
            norms.append(norm if norm is None else float(norm))
            late.append(plugin is not None and endless_of(plugin).unfinished)
        if plugin is not None:
            plugin.finish_step()
        left = report.fingerprint(report.by_layer(models), stepping)
        most = None if plugin is None else copies_of(endless_of(plugin).versions)
        mib = [number for _, numbers in told for number in numbers]
        return losses, norms, left, most, stage, late, mib


def endless_of(plugin: Any) -> Any:
    return next(face.endless for face in plugin.session.faces if face.name == 'updating')


def logged_by_routers() -> dict[str, list[float]]:
    """What a loop logs behind a call, by name and layer; zeros from then on."""
    from megatron_zbpp.mcore import compat

    found = {name: compat.logged_values(each) for name, each in compat.logged_losses().items()}
    shown = {name: values.tolist() for name, values in found.items()}
    for values in found.values():
        values.zero_()
    return shown


def copies_of(versions: Any) -> tuple[list[int], int]:
    """The copies that there were of each stage's weights, and the bytes beside Megatron's."""
    of_stage = [*getattr(versions, 'of_stage', {0: versions}).values()]
    return [each.most for each in of_stage], sum(map(bytes_beside, of_stage))


def bytes_beside(versions: Any) -> int:
    """Bytes of all tensors that are held, but those that the optimizer steps or the model has."""
    stepped = getattr(versions, '_stepped', None) or ()
    buffered = isinstance(versions, Slots) and stepped
    megatron = [*stepped, *(() if buffered else versions._parameters)]
    theirs = {each.data_ptr() for each in megatron}
    held = {each.data_ptr(): each.nbytes for each in tensors_in(vars(versions).values())}
    return sum(nbytes for place, nbytes in held.items() if place not in theirs)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.nn.Parameter):
            continue  # the model's, wherever it is pointed to
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


@contextmanager
def evaluation(models: list) -> Iterator[None]:
    """Let models evaluate: without dropout, whose random states would differ."""
    for model in models:
        model.eval()
    with torch.no_grad():
        yield
    for model in models:
        model.train()


def clip_by_stage(stepping: Any, sharded: bool) -> None:
    from megatron.core import parallel_state

    for leaf in stepping.chained_optimizers:
        of_stage = parallel_state.get_tensor_and_data_parallel_group
        plain = parallel_state.get_tensor_model_parallel_group
        leaf.grad_stats_parallel_group = of_stage() if sharded else plain()


def trained(ranks: Callable, data: Any, case: Case, by_hand: bool) -> list[tuple]:
    given = train, case, by_hand, case.argv(data)
    return stock.trained(ranks(case.size), *given, kept=by_hand)


def taken_late(late: bool, last: bool, evaluates: bool, warm: int) -> list[bool]:
    """Whether a step is still to be taken, before and behind each step of the program.

    The first waits. Ranks that run ahead have taken it within the call, as all have that evaluate.
    """
    found = []
    for iteration in range(ITERATIONS):
        taken = iteration < 2 + warm or not last or (evaluates and iteration == 3)
        found += [not taken, iteration > warm] if late else [False, False]
    return found


SIZES = (2, 2), (4, 3), (2, 1), (4, 8), (4, 4), (4, 1), (2, 4)
COPIES = {each: (2,) * (each[0] - 1) + (1,) for each in SIZES} | {(4, 1): (4, 3, 2, 1)}


def require_equal(ranks: Callable, data: Any, case: Case) -> None:
    """Raise unless both leave the same losses, norms, parameters and optimizer state."""
    ours, reference = (trained(ranks, data, case, by_hand) for by_hand in (False, True))
    p, warm = case.p, 2 if case.has('--pipeline-async-warmup-steps') else 0
    for rank, (own, other) in enumerate(zip(ours, reference, strict=True)):
        norms = other[1]
        if case.late:  # of the step before, but for the first
            norms = [*norms[: warm + 1], *norms[warm:-1]]
        assert (own[0], own[1], own[2]) == (other[0], norms, other[2]), rank
        assert own[5] == taken_late(case.late, own[4] == p - 1, case.evaluates, warm), rank
    taken = [norm for norm in ours[0][1] if norm is not None]
    assert 0 < len(taken) < ITERATIONS or not case.half, ours[0][1]
    assert min(taken) > 0.5, 'clipping must have been active'
    fixed = {'paci': (1,) * p, 'pipemare': (2,) * (p - 1) + (1,), 'pipedream-2bw': (2,) * p}
    copies = fixed.get(case.method) or COPIES.get((p, case.m), ())
    for own in ours:
        assert own[3][0] == ([2, 1] if case.method == 'wpipe' else [copies[own[4]]])
    assert ours[0][6] == [ours[0][3][1] / 2**20], 'bytes of copies are those that the log has'
    assert ours[0][3][1] or case.method == 'paci'
