"""The example's training as a function that a rank of a pool can call many times."""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest import mock

import stock
from nvidia import also
from ranks import Ranks, let_go
from stock_key import by_megatron

# Small, but every kind of layer is there and the vocabulary layer is the largest.
MODEL = ['--hidden-size', '32', '--num-attention-heads', '2', '--seq-length', '16']
MODEL += ['--micro-batch-size', '1']


def words(data: Path, schedule: str, *more: Any, p: int = 2, layers: int = 4, m: int = 4) -> list:
    """Of a training by `schedule` on p ranks, of m microbatches; `more` come last."""
    argv = [*MODEL, '--num-layers', layers, '--pipeline-model-parallel-size', p]
    argv += ['--pipeline-schedule', schedule, '--global-batch-size', m, '--data-path', data]
    return list(map(str, [*argv, *more]))


def prepare_on_first(prefix: Path) -> None:
    """Runs on each rank: a small data set of real text is there behind it."""
    import prepare_data
    import torch.distributed as dist

    if dist.get_rank() == 0:
        prepare_data.prepare(prefix, max_bytes=500_000)
    dist.barrier()


@dataclass(frozen=True)
class Run:
    """What a training run left: exact, so that two can be compared with ==."""

    losses: tuple[str, ...]
    grad_norms: tuple[str, ...]
    validation: tuple[str, ...]
    parameters: dict[str, str]
    optimizer: dict[str, str]

    @classmethod
    def of(cls, lines: list[dict[str, Any]]) -> Run:
        """Of lines of the example's metrics."""
        steps = [line for line in lines if 'loss' in line]
        return cls(
            tuple(line['loss'] for line in steps),
            tuple(line['grad_norm'] for line in steps),
            tuple(line['validation_loss'] for line in lines if 'validation_loss' in line),
            lines[-1]['parameters_sha256'],
            lines[-1]['optimizer_sha256'],
        )


def train(argv: list[str], metrics: Path) -> None:
    """Runs on each rank: the example's `train`, leaving no Megatron state behind."""
    import pretrain_gpt

    try:
        pretrain_gpt.train(pretrain_gpt.parse_args([*argv, '--metrics-file', str(metrics)]))
    finally:
        forget_groups()


@dataclass(frozen=True)
class Program:
    """The example as it begins on a rank."""

    script: ModuleType
    args: Any
    plugin: Any  # None: Megatron's own schedule runs
    models: list[Any]  # chunks of this rank
    norms: list[Any] = field(default_factory=list)  # of the steps so far

    @functools.cached_property
    def stepping(self) -> tuple[Any, Any]:
        """Optimizer, and the scheduler of its rates."""
        return self.script.build_optimizer(self.args, self.models)

    @property
    def optimizer(self) -> Any:
        return self.stepping[0]

    @functools.cached_property
    def data(self) -> list:
        return self.script.iterators(self.args, self.script.build_datasets(self.args)[0], 0)

    def batch(self, data: list | None = None, **options: Any) -> float | None:
        """Run a batch; the loss, on the rank that has it."""
        data = self.data if data is None else data
        return self.script.run_batch(self.args, self.models, data, **options)

    def step(self, data: list | None = None) -> float | None:
        """Run a batch, from gradients of zero, and the optimizer's step; return the loss."""
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.batch(data)
        succeeded, norm, _ = self.optimizer.step()
        assert succeeded
        self.norms.append(norm)
        return loss


@contextmanager
def program(argv: Sequence, patches: Callable = lambda script: ()) -> Iterator[Program]:
    """The example with these arguments, which leaves no state of Megatron behind.

    `patches` gives (owner, name, what it is to be) meanwhile.
    """
    import pretrain_gpt as script

    try:
        with ExitStack() as stack:
            for owner, name, replacement in patches(script):
                patch = mock.patch.object(owner, name, replacement, create=True)
                stack.enter_context(patch)
            args = script.parse_args(list(map(str, argv)))
            plugin = script.enable(args, stack)
            script.initialize(args)
            yield Program(script, args, plugin, script.build_model(args))
    finally:
        forget_groups()


def small_config(
    layers: int = 1, hidden: int = 8, heads: int = 1, p: int = 1, chunks: int = 1, **more: Any
) -> Any:
    """Megatron's config of a small model in fp32, on `p` ranks of a pipeline."""
    import torch
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        **{'pipeline_dtype': torch.float32, **more},
    )


def early_steps() -> int:
    from megatron_zbpp.mcore import enabled

    early = enabled.plugin and enabled.plugin.post_validation
    return early.early if early else 0


def forget_groups() -> None:
    """Destroys Megatron's process groups: each has threads, and they would add up over the runs.

    Models know groups, and go only if they are taken apart. Hooks of parameters hold a model,
    graphs hold those, and a model holds such graphs (fp32 shards of the distributed optimizer, what
    a router gave to its experts): a collection does not see graphs.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    from megatron_zbpp.mcore import compat, enabled

    compat.logged_losses().clear()  # of another number of layers
    compat.logged_mtp_losses().clear()  # of another depth
    if enabled.plugin is not None:
        enabled.plugin.disable()
        enabled.plugin = None  # it knows groups
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):  # which that has forgotten
            setattr(parallel_state, name, None)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    rotary_pos_embedding.RotaryEmbedding.forward.cache_clear()  # it keeps modules, those a group
    engine = sys.modules.get('transformer_engine.pytorch.distributed')
    if engine is not None:  # where a tuple in a cache holds it, no collector says so
        engine.get_distributed_world_size.cache_clear()
        engine.get_distributed_rank.cache_clear()
    for model in [o for o in gc.get_objects() if type(o) is DistributedDataParallel]:
        if not vars(model):  # FP8 weights hold one a while longer
            continue
        for module in list(model.modules()):
            vars(module).clear()
    let_go()


@contextmanager
def groups(tp: int = 1, pp: int = 1, chunks: int = 1) -> Iterator[None]:
    """Megatron's process groups for a while, and the random states that its layers draw from."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    virtual = {'virtual_pipeline_model_parallel_size': chunks} if chunks > 1 else {}
    try:
        parallel_state.initialize_model_parallel(tp, pp, **virtual)
        model_parallel_cuda_manual_seed(1)
        yield
    finally:
        forget_groups()


def logged(train: Callable, *args: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Runs on each rank: `train(*args, metrics=file)`; its result, and lines of the file."""
    with TemporaryDirectory() as folder:
        metrics = Path(folder, 'metrics.jsonl')
        result = train(*args, metrics=metrics)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
    logged = map(json.loads, lines)
    return result, [{k: v for k, v in each.items() if k != 'seconds'} for each in logged]


def measured(argv: list[str]) -> Run | None:
    """Runs on each rank: `train`; what it left, on the rank that reports."""
    _, lines = logged(train, argv)
    return Run.of(lines) if lines else None


def run(ranks: Ranks, *argv: str | int | Path) -> Run:
    """Trains with `argv` on `ranks`; a reference by Megatron's own schedule is kept."""
    words = [*MODEL, '--log-interval', '1000000', *map(str, argv)]
    named = 'megatron' in argv
    words += [] if named else also(argv)
    return stock.trained(ranks, measured, words, kept=named and by_megatron(words))[-1]
