"""The example's training as a function that a rank of a pool can call many times."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import stock
from nvidia import also
from ranks import Ranks, let_go
from stock_key import by_megatron

# Small, but every kind of layer is there and the vocabulary layer is the largest.
MODEL = ['--hidden-size', '32', '--num-attention-heads', '2', '--seq-length', '16']
MODEL += ['--micro-batch-size', '1']


@dataclass(frozen=True)
class Run:
    """What a training run left: exact, so that two can be compared with ==."""

    losses: tuple[str, ...]
    grad_norms: tuple[str, ...]
    validation: tuple[str, ...]
    parameters: dict[str, str]
    optimizer: dict[str, str]

    @classmethod
    def read(cls, metrics: Path) -> Run:
        """Of the example's metrics, without times."""
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
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


def early_steps() -> int:
    """How many optimizer steps this rank took early so far."""
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


def measured(argv: list[str]) -> Run | None:
    """Runs on each rank: `train`; what it left, on the rank that reports."""
    with TemporaryDirectory() as folder:
        metrics = Path(folder, 'metrics.jsonl')
        train(argv, metrics)
        return Run.read(metrics) if metrics.exists() else None


def run(ranks: Ranks, *argv: str | int | Path) -> Run:
    """Trains with `argv` on `ranks`; a reference by Megatron's own schedule is kept."""
    words = [*MODEL, '--log-interval', '1000000', *map(str, argv)]
    named = 'megatron' in argv
    words += [] if named else also(argv)
    return stock.trained(ranks, measured, words, kept=named and by_megatron(words))[-1]
