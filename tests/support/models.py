"""Small GPTs of every kind, trained with the example's own functions: all that a run leaves."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import stock
import torch
from example import MODEL, early_steps, program
from nvidia import also
from ranks import Ranks

ITERATIONS, MICROBATCHES = 3, 5
NO_CLIPPING = 1e9  # the norm is computed all the same

_EXPERTS = {
    'num_moe_experts': 4,
    'moe_router_topk': 2,
    'moe_token_dispatcher_type': 'alltoall',
    'moe_aux_loss_coeff': 1e-2,
    'moe_router_load_balancing_type': 'aux_loss',
    'add_bias_linear': False,
}
# of TransformerConfig
KINDS: dict[str, dict[str, Any]] = {
    'dense': {},
    'SwiGLU': {
        'normalization': 'RMSNorm',
        'gated_linear_unit': True,
        'activation_func': torch.nn.functional.silu,
        'add_bias_linear': False,
        'qk_layernorm': True,
    },
    'experts': _EXPERTS,
    'grouped experts': _EXPERTS | {'moe_grouped_gemm': True},
    'MLA': {
        'multi_latent_attention': True,
        'q_lora_rank': 16,
        'kv_lora_rank': 16,
        'qk_head_dim': 16,
        'qk_pos_emb_head_dim': 8,
        'v_head_dim': 16,
        'qk_layernorm': True,
        'add_bias_linear': False,
    },
}


def _experts(balancing: str, **more: Any) -> dict[str, Any]:
    """Experts whose routers are balanced in another way; coefficients of losses by name."""
    coefficients = {f'moe_{name}_coeff': value for name, value in more.items()}
    return _EXPERTS | {'moe_router_load_balancing_type': balancing} | coefficients


_UNBALANCED = _experts('none', aux_loss=0.0)  # slices of a sequence give what the whole gives
_BY_TOKEN = {'calculate_per_token_loss': True}
KINDS_OF_SOME = {
    # the dispatch goes back while weight gradients are computed
    'overlapped experts': KINDS['grouped experts']
    | {'overlap_dispatch_backward_with_experts_wgrad': True},
    # Megatron keeps what the output layer's weight gradient is computed from until the end
    'embedding deferred': {'defer_embedding_wgrad_compute': True},
    'unbalanced experts': _UNBALANCED,
    'experts by sinkhorn': _experts('sinkhorn', aux_loss=0.0),
    'z-loss, experts by sequence': _experts('seq_aux_loss', z_loss=1e-3),
    'z-loss': _UNBALANCED | {'moe_z_loss_coeff': 0.5},
    'z-loss by token': _UNBALANCED | {'moe_z_loss_coeff': 0.5} | _BY_TOKEN,
    'experts by sequence': _experts('seq_aux_loss'),
    # of routers that draw random numbers
    'noisy routing': _EXPERTS
    | {'moe_input_jitter_eps': 0.1, 'moe_router_force_load_balancing': True},
    'loss by token': _BY_TOKEN,
    'one key for all queries': {'num_query_groups': 1},
    'window': {'window_size': (5, 0)},
    'MLA with plain RoPE': KINDS['MLA'] | {'rope_type': 'rope'},  # else YaRN
    # whose all-to-all hides behind the passes of another microbatch
    'hidden all-to-all': _EXPERTS | {'overlap_moe_expert_parallel_comm': True},
}
# microbatches of any length, as programs without padding have them
KINDS['lengths'] = {'variable_seq_lengths': True, 'moe_token_dispatcher_type': 'alltoall'}
# read of the config as yarn_*, which are no fields of it
_YARN = {'rotary_scaling_factor': 4.0, 'original_max_position_embeddings': 4, 'beta_fast': 32.0}
_YARN |= {'beta_slow': 1.0, 'mscale': 1.0, 'mscale_all_dim': 0.0}
_YARN |= {'correction_range_round_to_int': True}
# by kind: what is recomputed. With biases, no backward of a recomputed MLP ends on a CPU, by
# Megatron's own schedules, too: see docs/limits.md
_SELECTIVE: dict[str, dict[str, Any]] = {
    'dense': {'recompute_modules': ['core_attn', 'mlp'], 'add_bias_linear': False},
    'SwiGLU': {'recompute_modules': ['core_attn', 'layernorm']},
    'experts': {'recompute_modules': ['core_attn', 'moe']},
    'grouped experts': {'recompute_modules': ['core_attn', 'moe_act']},
    'MLA': {'recompute_modules': ['core_attn', 'mla_up_proj']},
    'lengths': {'recompute_modules': ['core_attn']},
}


def _repeat(layers: torch.nn.ModuleList) -> None:
    for even in range(0, len(layers) - 1, 2):
        layers[even + 1] = layers[even]


def _prune(layers: torch.nn.ModuleList) -> None:
    for place in reversed(range(len(layers))):
        if layers[place].layer_number % 4 == 2:
            del layers[place]


def _renumber(layers: torch.nn.ModuleList) -> None:
    for layer in layers:
        layer.layer_number += 10


# of the layers of a chunk
CHANGES: dict[str, Callable[[torch.nn.ModuleList], None]] = {
    'run twice': _repeat,
    'pruned': _prune,
    'numbered from 11': _renumber,
}
_SPEC = ('num_moe_experts', 'moe_grouped_gemm', 'qk_layernorm', 'multi_latent_attention')


@dataclass(frozen=True)
class Job:
    kind: str = 'dense'  # a key of KINDS
    te: bool = True  # of Transformer Engine's layers, else of Megatron's own
    pp: int = 2  # ranks of the pipeline
    tp: int = 1  # of tensor parallelism with sequence parallelism
    cp: int = 1  # of context parallelism
    dp: int = 1  # replicas
    ep: int = 1  # of the replicas, those that share the experts
    bf16: bool = False  # else fp32
    recompute: str | None = None  # 'full' or 'selective'
    fused: bool = False  # weight gradients are added to `main_grad` by the product itself
    overlap: bool = False  # --overlap-grad-reduce
    distributed: bool = False  # --use-distributed-optimizer
    fp8: str | None = None  # 'products' with current scaling, or 'weights' as well
    offload: str | None = None  # --pipeline-offload, for schedules of ours
    again: str | None = None  # --pipeline-recompute, likewise
    file: str | None = None  # --pipeline-schedule-file, instead of a schedule's name
    dropout: float = 0.0  # of hidden states and of attention
    modules: tuple[str, ...] = ()  # of a layer, what Megatron's own offloading has on the host
    layers: int = 2  # of the model, over ranks of the pipeline
    positions: str = 'rope'  # or 'yarn', which the example does not take
    masks: bool = False  # attention is given masks, which keep documents apart
    iterations: int = ITERATIONS
    microbatches: int = MICROBATCHES  # of each replica
    change: str = ''  # to the layers once they are built: a key of CHANGES
    evaluation: bool = False  # in the middle, as with dropout
    shared: bool = True  # ranks of tensor parallelism share sequences out
    seeds: bool = False  # of dropout, by layer and microbatch, for schedules of ours

    @property
    def evaluates(self) -> bool:
        return self.evaluation or self.kind == 'lengths' or self.dropout > 0

    @property
    def of_kind(self) -> dict[str, Any]:
        return (KINDS | KINDS_OF_SOME)[self.kind]

    @property
    def size(self) -> int:
        return self.pp * self.tp * self.cp * self.dp

    def argv(self, schedule: str, post_validation: bool, data: Path) -> list[str]:
        words = [*MODEL, '--num-layers', self.layers * self.pp, '--data-path', data]
        words += ['--log-interval', 1000]
        words += ['--pipeline-model-parallel-size', self.pp]
        words += ['--position-embedding-type', self.positions] if self.positions != 'yarn' else []
        named = ['--pipeline-schedule', schedule]
        words += ['--pipeline-schedule-file', self.file] if self.file else named
        words += [] if schedule == 'megatron' else also(words)
        words += ['--tensor-model-parallel-size', self.tp, '--clip-grad', NO_CLIPPING]
        words += ['--global-batch-size', self.microbatches * self.dp * self.cp]
        words += ['--train-iters', self.iterations, '--lr-warmup-iters', 1]
        words += ['--bf16'] if self.bf16 else []
        words += ['--overlap-grad-reduce'] if self.overlap else []
        words += ['--use-distributed-optimizer'] if self.distributed else []
        words += ['--pipeline-offload', self.offload] if self.offload else []
        words += ['--pipeline-recompute', self.again] if self.again else []
        if post_validation:
            words += ['--enable-optimizer-post-validation']
            words += ['--optimizer-post-validation-clean-steps', 1]
        return list(map(str, words))

    def config(self) -> dict[str, Any]:
        """Of TransformerConfig, beside what the example gives."""
        recompute: dict[str, Any] = {'recompute_granularity': self.recompute}
        if self.recompute == 'full':
            recompute |= {'recompute_method': 'uniform', 'recompute_num_layers': 1}
        elif self.recompute == 'selective':
            recompute |= _SELECTIVE[self.kind]
        own: dict[str, Any] = {'fine_grained_activation_offloading': bool(self.modules)}
        if self.modules:
            own |= {'offload_modules': list(self.modules), 'min_offloaded_tensor_size': 16}
        return {
            **self.of_kind,
            **recompute,
            **own,
            'hidden_dropout': self.dropout,
            'attention_dropout': self.dropout,
            'sequence_parallel': self.tp > 1 and self.shared,
            'context_parallel_size': self.cp,
            'expert_model_parallel_size': self.ep,
            'gradient_accumulation_fusion': self.fused,
            **({'fp8': 'hybrid', 'fp8_recipe': 'tensorwise'} if self.fp8 else {}),
            'fp8_param': self.fp8 == 'weights',
        }


@dataclass(frozen=True)
class Trained:
    losses: list[float | None]  # of each iteration, on the last rank
    norms: list[float]
    parameters: dict[tuple, torch.Tensor]  # by (layer, name, ranks among those that share it)
    # by the same: where a shard begins, the optimizer's parameter, its state by name
    states: dict[tuple, tuple[int, torch.Tensor, dict[str, Any]]]
    steps: list[int]  # that the optimizer's groups count
    early: int  # optimizer steps that did not wait for all ranks
    moved: dict[int, int]  # bytes that a pass of each stage left on the host


def train(job: Job, argv: list[str]) -> Trained:
    """Runs on each rank; see `pretrain_gpt.train`."""
    with program(argv, partial(replacements, job=job)) as at:
        (optimizer, scheduler), losses = at.stepping, []
        for iteration in range(at.args.train_iters):
            if iteration == job.iterations // 2 and job.evaluates:
                with torch.no_grad():
                    losses.append(at.batch(forward_only=True))
            losses.append(at.step())
            scheduler.step(increment=1)
        parameters, states = _left(at.models, optimizer)
        steps = [int(group['step']) for group in optimizer.param_groups if 'step' in group]
        norms = [float(norm) for norm in at.norms]
        return Trained(losses, norms, parameters, states, steps, early_steps(), _moved(at.plugin))


def _moved(plugin: Any) -> dict[int, int]:
    if plugin is None:
        return {}
    device = torch.empty(0, device=torch.cuda.current_device()).device
    stored = plugin.session.activations(device)
    return {stage: found.moved for stage, found in stored.bytes.items()}


def replacements(script: Any, job: Job) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, what it is to be)."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import MLATransformerConfig

    import megatron_zbpp
    from megatron_zbpp.runtime.activations import store

    if job.seeds:
        yield megatron_zbpp, 'enable', partial(megatron_zbpp.enable, dropout_seeds=True)
    mla = 'multi_latent_attention' in job.of_kind
    make = MLATransformerConfig if mla else script.TransformerConfig
    yield script, 'TransformerConfig', with_fields(make, **job.config())
    of = 'with_transformer_engine' if job.te else 'local'
    options = {name: job.of_kind.get(name) for name in _SPEC}
    options['num_experts'] = options.pop('num_moe_experts')
    spec = partial(getattr(gpt_layer_specs, f'get_gpt_layer_{of}_spec'), **options)
    yield script, 'get_gpt_layer_local_spec', spec
    if job.change or job.positions == 'yarn':
        yield script, 'GPTModel', _changed(script.GPTModel, job)
    if job.fp8 == 'weights':
        ddp, optimizer = script.DistributedDataParallelConfig, script.OptimizerConfig
        yield script, 'DistributedDataParallelConfig', with_fields(ddp, fp8_param_gather=True)
        yield script, 'OptimizerConfig', with_fields(optimizer, fp8_recipe='tensorwise')
        yield script, 'draw_weights', _drawing_all(script.draw_weights)
    yield store, 'SMALL', 16  # elements: those of these models are small
    state = script.parallel_state
    initialize = partial(
        state.initialize_model_parallel,
        context_parallel_size=job.cp,
        expert_model_parallel_size=job.ep,
    )
    yield state, 'initialize_model_parallel', initialize
    if job.masks:
        yield script, 'forward_step', _with_masks(script)
    if job.kind == 'lengths':
        yield script, 'batches', _of_many_lengths(script.batches)
    if job.cp > 1:
        yield script, 'batches', _of_context_parallel_rank(script.batches)
    if job.fused and not layers._grad_accum_fusion_available:
        from test_linear import fused_kernels

        yield layers, '_grad_accum_fusion_available', True
        yield layers, 'fused_weight_gradient_mlp_cuda', fused_kernels()


def with_fields(make: Callable, **values: Any) -> Callable:
    return lambda *args, **given: make(*args, **(given | values))


def _with_masks(script: Any) -> Callable:
    """A forward_step that gives attention masks: a document begins with each fifth token, about."""

    def forward_step(data: Iterator | None, model: torch.nn.Module) -> tuple[Any, Any]:
        batch = next(data)
        documents = (batch['tokens'] % 5 == 0).cumsum(1)
        apart = documents[:, :, None] != documents[:, None]
        mask = apart | torch.ones_like(apart).triu(1)
        tokens = batch['tokens'], batch['position_ids']
        output = model(*tokens, mask[:, None], labels=batch['labels'])
        return output, partial(script.loss_func, batch['loss_mask'])

    return forward_step


def _changed(make: Callable, job: Job) -> Callable:
    """A model whose positions are YaRN's, or whose layers are changed once they are built."""

    def build(config: Any, *args: Any, **given: Any) -> torch.nn.Module:
        if job.positions == 'yarn':
            given['position_embedding_type'] = 'yarn'
            for name, value in _YARN.items():
                setattr(config, f'yarn_{name}', value)
        model = make(config, *args, **given)
        if job.change:
            CHANGES[job.change](model.decoder.layers)
        return model

    return build


def _drawing_all(original: Callable) -> Callable:
    """Also forgets what FP8 weights were before: the optimizer would begin there."""

    def draw_weights(chunks: list, seed: int) -> None:
        original(chunks, seed)
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            vars(parameter).pop('get_high_precision_init_val', None)

    return draw_weights


def _of_context_parallel_rank(original: Callable) -> Callable:
    def batches(*args: Any) -> Iterator[dict[str, torch.Tensor]]:
        from megatron.core.utils import get_batch_on_this_cp_rank

        for batch in original(*args):
            positions = batch.pop('position_ids')  # of the whole: rotary embeddings share them out
            yield get_batch_on_this_cp_rank(batch) | {'position_ids': positions}

    return batches


def _of_many_lengths(original: Callable) -> Callable:
    """Each microbatch as long as its first token says, whatever stage reads it."""

    def batches(*args: Any) -> Iterator[dict[str, torch.Tensor]]:
        for batch in original(*args):
            half = batch['tokens'].size(1) // 2
            length = 2 * (half // 2 + int(batch['tokens'][0, 0]) % (half // 2 + 1))
            yield {name: tensor[:, :length] for name, tensor in batch.items()}

    return batches


def _left(models: list, optimizer: Any) -> tuple[dict, dict]:
    import report
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    dense = (parallel_state.get_tensor_model_parallel_rank(), 0)
    expert = (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    parts = getattr(optimizer, 'chained_optimizers', [optimizer])
    parameters, states = {}, {}
    for layer, name, parameter in report.by_layer(models):
        key = (layer, name, *(dense if getattr(parameter, 'allreduce', True) else expert))
        plain = parameter.dequantize() if hasattr(parameter, '_scale_inv') else parameter
        parameters[key] = plain.detach().cpu().clone()
        for part in parts:
            start, main = 0, getattr(parameter, 'main_param', parameter)
            if isinstance(part, DistributedOptimizer):
                if parameter not in part.model_param_group_index_map:
                    continue
                start = part._get_model_param_range_map(parameter)['param'].start
                main = part._get_main_param_and_optimizer_states(parameter)['param']
            if main in part.optimizer.state:
                state = {
                    name: value.cpu().clone() if isinstance(value, torch.Tensor) else value
                    for name, value in part.optimizer.state[main].items()
                }
                states[key] = start, main.detach().cpu().clone(), state
    return parameters, states


def reference(
    ranks: Callable[[int], Ranks],
    data: Path,
    job: Job,
    than: str = 'megatron',
    words: Sequence[str] = (),
) -> list[Trained]:
    """Return what a job leaves by `than`, without offload and recomputation of ours."""
    plain = replace(job, offload=None, again=None, file=None)
    argv = [*plain.argv(than, False, data), *words]
    if than == 'megatron' and not job.seeds:
        return stock.trained(ranks(job.size), train, plain, argv)
    return _trained_once(ranks(job.size), plain, tuple(argv))


@functools.cache
def _trained_once(ranks: Ranks, job: Job, argv: tuple[str, ...]) -> list[Trained]:
    return ranks.run(train, job, [*argv])


def check(
    ranks: Callable[[int], Ranks],
    data: Path,
    schedule: str,
    job: Job,
    than: str = 'megatron',
    moves: bool | None = None,
) -> None:
    """Trains by `schedule`, a name or name+post-validation, and by `than`; see `rows.Training`."""
    name, _, early = schedule.partition('+')
    trained = ranks(job.size).run(train, job, job.argv(name, bool(early), data))
    assert_same(trained, reference(ranks, data, job, than))
    waits = job.fp8 == 'weights'  # they are quantized amid the step
    assert any(rank.early for rank in trained) == (bool(early) and not waits)
    moves = bool(job.offload) if moves is None else moves
    assert any(any(rank.moved.values()) for rank in trained) == moves


def assert_same(
    trained: list[Trained], reference: list[Trained], iterations: int = ITERATIONS
) -> None:
    """All that was left, whatever rank holds it: to the bit, with no NaN."""
    losses, expected = _losses(trained), _losses(reference)
    assert losses == expected and all(len(set(some)) >= iterations for some in expected)
    assert {*trained[0].steps} == {*reference[0].steps} <= {iterations}
    for what in ('parameters', 'states'):
        ours, theirs = _together(trained, what), _together(reference, what)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert not value.isnan().any(), (what, key)
            assert torch.equal(ours[key], value), (what, key)


def _losses(found: list[Trained]) -> list[tuple[float, ...]]:
    """Of ranks that have the last stage: one or two, where they share the sequence."""
    return sorted({tuple(rank.losses) for rank in found if rank.losses[0] is not None})


def _together(found: list[Trained], what: str) -> dict[tuple, torch.Tensor]:
    """One tensor a parameter, or for each name in its state: shards of replicas put together."""
    shards: dict[tuple, dict[int, torch.Tensor]] = {}
    for rank in found:
        for key, value in getattr(rank, what).items():
            start, main, state = (0, value, {}) if what == 'parameters' else value
            for name, part in {'': main, **state}.items():
                part = torch.as_tensor(part).flatten()
                known = shards.setdefault((*key, name), {}).setdefault(start, part)
                assert torch.equal(known, part), 'replicas are alike'
    return {
        key: torch.cat([parts[start] for start in sorted(parts)]) for key, parts in shards.items()
    }
