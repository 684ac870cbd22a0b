"""What only a GPU can show. Ranks share one over gloo; NCCL where there are two."""

from __future__ import annotations

import importlib.util
import time

import pytest
import torch
from example import forget_groups, run

CUDA = torch.cuda.is_available()
NO_CLIPPING = 1e9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason='needs an NVIDIA GPU')]
needs_te = pytest.mark.skipif(
    importlib.util.find_spec('transformer_engine') is None,
    reason='needs transformer_engine: pip install megatron_zbpp[te]',
)
needs_apex = pytest.mark.skipif(
    importlib.util.find_spec('fused_weight_gradient_mlp_cuda') is None,
    reason='needs apex, built with --cuda_ext',
)
needs_two = pytest.mark.skipif(
    CUDA and torch.cuda.device_count() < 2, reason='needs two GPUs: NCCL refuses two ranks on one'
)


@pytest.fixture
def device():
    """Where all of this runs."""
    return torch.device('cuda', torch.cuda.current_device())


def execute(name, m, backend):
    """The executor with plain torch stages on CUDA, beside all stages on this process."""
    import torch.distributed as dist

    from megatron_zbpp.planning.lower import lower
    from megatron_zbpp.runtime.clock import clock_for
    from megatron_zbpp.runtime.comm import Channels, Message
    from megatron_zbpp.runtime.executor import Executor
    from megatron_zbpp.runtime.store import WeightGradStore
    from megatron_zbpp.schedules import build

    schedule = build(name, 2, m)
    own, rank = torch.device('cuda', torch.cuda.current_device()), dist.get_rank()
    group = dist.new_group(backend=backend)
    store, count = WeightGradStore(), schedule.num_stages
    stages = {s: Stage(store, s, count).to(own) for s in schedule.placement.stages(rank)}
    message = Message((64, 64), torch.float32, own)
    pairs = {(0, 1), (1, 0)}
    executor = Executor(
        lower(schedule)[rank],
        stages,
        Channels(group, pairs),
        message,
        store,
        clock_for(own),
    )
    host = time.perf_counter()
    record = executor.run()
    torch.cuda.synchronize()
    host = time.perf_counter() - host
    times = [(executor.clock.seconds(a), executor.clock.seconds(b)) for a, b in record.marks]
    single = [Stage(None, s, count).to(own) for s in range(count)]
    for microbatch in range(m):
        value = None
        for stage in single:
            value = stage.forward(microbatch, value)
        value.backward()
    same = [torch.equal(stages[s].weight.grad, single[s].weight.grad) for s in stages]
    dist.destroy_process_group(group)
    return same, times, host


class Stage(torch.nn.Module):
    """tanh(x w), whose weight gradient waits if the store defers; the last one returns a loss."""

    def __init__(self, store, stage, count):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = torch.nn.Parameter(torch.randn(64, 64, generator=generator) / 8)
        self.store, self.first, self.last = store, stage == 0, stage == count - 1

    def forward(self, microbatch, received):
        from stages import DeferredLinear

        weight = self.weight
        if self.first:
            received = torch.full_like(weight, 0.1 * (microbatch + 1)).detach().requires_grad_()
        if self.store is not None and self.store.deferring:
            y = DeferredLinear.apply(self.store, weight, received, weight.detach())
        else:
            y = received @ weight
        return y.square().sum() if self.last else torch.tanh(y)

    def backward(self, received, output, gradient):
        torch.autograd.backward(output, gradient)
        return None if received is None else received.grad

    def release(self, output):
        pass

    def accumulating(self, last):
        import contextlib

        return contextlib.nullcontext()


def check_execution(results):
    for same, times, host in results:
        assert same and all(same)
        assert all(start <= end for start, end in times)
        flat = [t for span in times for t in span]
        assert flat == pytest.approx(sorted(flat), abs=1e-6), 'passes follow each other'
        assert 0 < flat[-1] - flat[0] < host


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_executor_on_a_shared_gpu(ranks, name):
    check_execution(ranks(2).run(execute, name, 6, 'gloo'))


@needs_two
@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_executor_over_nccl(ranks, name):
    check_execution(ranks(2).run(execute, name, 6, 'nccl'))


def test_clock(device):
    """Marks are in the order of the device's work, and tell its time, not the host's."""
    from megatron_zbpp.runtime.clock import clock_for

    clock = clock_for(device)
    x = torch.randn(4096, 4096, device=device)
    x @ x  # cuBLAS is ready
    torch.cuda.synchronize()
    start = time.perf_counter()
    marks = [clock.mark()]
    for _ in range(3):
        for _ in range(10):
            x @ x
        marks.append(clock.mark())
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    assert all(map(clock.reached, marks))
    seconds = [clock.seconds(mark) for mark in marks]
    assert seconds == sorted(seconds)
    measured = seconds[-1] - seconds[0]
    assert 0.3 * whole < measured < 1.05 * whole
    assert issued < whole
    assert start - 0.05 < seconds[0] < start + whole, "on the host's clock"


@pytest.mark.parametrize('flags', [(), ('--bf16',)], ids=['fp32', 'bf16'])
def test_identical_to_megatron(ranks, data, tmp_path, flags):
    """Losses, parameters and Adam's state of 10 iterations."""
    common = ['--pipeline-model-parallel-size', 2, '--num-layers', 4, '--data-path', data, *flags]
    common += ['--global-batch-size', 6, '--train-iters', 10, '--clip-grad', NO_CLIPPING]
    reference = run(ranks(2), tmp_path, *common, '--pipeline-schedule', 'megatron')
    assert len(set(reference.losses)) == 10
    for schedule in ('1f1b', 'zb-h1', 'zb-v'):
        trained = run(ranks(2), tmp_path, *common, '--pipeline-schedule', schedule)
        assert trained.losses == reference.losses, schedule
        assert trained.parameters == reference.parameters, schedule
        assert trained.optimizer == reference.optimizer, schedule


def layer_gradients(kind, split, setting):
    """Gradients of three microbatches through one layer in DistributedDataParallel, on CUDA.

    Args:
        kind: a key of LAYERS.
        split: whether W is a pass of its own.
        setting: of SETTINGS.
    """
    import contextlib

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    import megatron_zbpp
    from megatron_zbpp.mcore import te

    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        config = layer_config(setting)
        plugin = megatron_zbpp.enable('zb-h1')
        if split and kind.startswith('TE'):
            te.delay_weight_gradients(config)
        layer = LAYERS[kind](config, setting == 'bias').cuda()
        model = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer
        )
        modules, store = te.delaying_modules(model), plugin.store
        assert bool(modules) == (split and kind.startswith('TE'))
        torch.manual_seed(2)
        inputs = [torch.randn(32, 2, 64, device='cuda', dtype=config.params_dtype) for _ in '123']
        received = []
        with model.no_sync():
            for k, x in enumerate(inputs):
                x.requires_grad_()
                store.open((0, k))
                with store.scope((0, k) if split else None), precision(setting):
                    output = call(kind, model, x)
                    with te.queueing(modules, store) if split else contextlib.nullcontext():
                        output.float().square().mean().backward()
                received.append(x.grad.cpu())
            before = grads(layer)
            for k in range(3):
                store.run((0, k))
        assert not store.pending
        return received, before, grads(layer)
    finally:
        forget_groups()


def layer_config(setting):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=setting == 'fused',
    )


def precision(setting):
    import contextlib

    if setting != 'fp8':
        return contextlib.nullcontext()
    from transformer_engine.pytorch import fp8_autocast

    return fp8_autocast(enabled=True)


def call(kind, model, x):
    output = model(x, [32, 32]) if kind == 'TE GroupedLinear' else model(x)
    output, bias = output if isinstance(output, tuple) else (output, None)
    return output if bias is None else output + bias


def grads(layer):
    """By name; those of weights in fp32, where the optimizer reads them."""
    return {name: p.main_grad.cpu().clone() for name, p in layer.named_parameters()}


def linear_options(config, bias):
    return {'config': config, 'init_method': config.init_method, 'bias': bias}


def megatron_linear(config, bias):
    from megatron.core.tensor_parallel import ColumnParallelLinear

    return ColumnParallelLinear(64, 128, **linear_options(config, bias))


def te_column(config, bias):
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    options = linear_options(config, bias) | {'gather_output': False, 'skip_bias_add': False}
    return TEColumnParallelLinear(64, 128, is_expert=False, **options)


def te_layer_norm_linear(config, bias):
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

    options = linear_options(config, bias) | {'gather_output': False, 'skip_bias_add': False}
    return TELayerNormColumnParallelLinear(64, 128, is_expert=False, **options)


def te_layer_norm_mlp(config, bias):
    """Not a layer of Megatron's specs; TE's own, as users build it."""
    from transformer_engine.pytorch import LayerNormMLP

    return LayerNormMLP(
        64,
        128,
        bias=bias,
        params_dtype=config.params_dtype,
        fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
        delay_wgrad_compute=config.delay_wgrad_compute,
    )


def te_grouped(config, bias):
    """Two experts' products in one; `tokens` says how many rows each gets."""
    from transformer_engine.pytorch import GroupedLinear

    return GroupedLinear(
        2,
        64,
        128,
        bias=bias,
        params_dtype=config.params_dtype,
        fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
        delay_wgrad_compute=config.delay_wgrad_compute,
    )


LAYERS = {
    'Megatron': megatron_linear,
    'TE Linear': te_column,
    'TE LayerNormLinear': te_layer_norm_linear,
    'TE LayerNormMLP': te_layer_norm_mlp,
    'TE GroupedLinear': te_grouped,
}
TE_LAYERS = [kind for kind in LAYERS if kind.startswith('TE')]


def check_layer(ranks, kind, setting):
    fused = ranks(1).run(layer_gradients, kind, False, setting)[0]
    split = ranks(1).run(layer_gradients, kind, True, setting)[0]
    for whole, own in zip(fused[0], split[0], strict=True):
        assert torch.equal(whole, own), 'gradient of the input'
    assert fused[2].keys() == split[2].keys()
    for name, gradient in fused[2].items():
        assert gradient.any(), name
        assert torch.equal(gradient, split[2][name]), name
    waiting = [name for name, gradient in split[1].items() if not gradient.any()]
    assert waiting, 'weight gradients waited for W'


@pytest.mark.parametrize('setting', ['plain', 'bias'])
def test_local_layer(ranks, setting):
    check_layer(ranks, 'Megatron', setting)


@needs_apex
def test_local_layer_with_the_fused_kernel(ranks):
    check_layer(ranks, 'Megatron', 'fused')


@needs_te
@pytest.mark.parametrize('setting', ['plain', 'bias', 'fused', 'fp8'])
@pytest.mark.parametrize('kind', TE_LAYERS)
def test_te_layer(ranks, kind, setting):
    if setting == 'fp8' and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip('this GPU has no FP8')
    check_layer(ranks, kind, setting)


def train_model(schedule, spec, options, cp):
    """Three iterations of a small GPT over pipeline ranks: losses and gradients of all ranks.

    Args:
        schedule: of ours, or None for Megatron's.
        spec: 'local' or 'te'.
        options: of TransformerConfig.
        cp: context-parallel ranks.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel as DDP
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_batch_on_this_cp_rank

    import megatron_zbpp

    if schedule:
        megatron_zbpp.enable(schedule)
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=2, context_parallel_size=cp
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        config = TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            autocast_dtype=torch.bfloat16,
            pipeline_model_parallel_size=2,
            context_parallel_size=cp,
            finalize_model_grads_func=finalize_model_grads,
            gradient_accumulation_fusion=False,
            **options,
        )
        experts = options.get('num_moe_experts')
        grouped = options.get('moe_grouped_gemm', False)
        te = 'with_transformer_engine' if spec == 'te' else 'local'
        make = getattr(gpt_layer_specs, f'get_gpt_layer_{te}_spec')
        torch.manual_seed(10 + rank)
        chunk = GPTModel(
            config,
            make(num_experts=experts, moe_grouped_gemm=grouped),
            vocab_size=128,
            max_sequence_length=32,
            pre_process=rank == 0,
            post_process=rank == 1,
            share_embeddings_and_output_weights=False,
        ).cuda()
        model = DDP(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            Float16Module(config, chunk),
        )
        config.no_sync_func = model.no_sync
        losses = []

        def forward_step(data, model):
            batch = get_batch_on_this_cp_rank(dict(next(data)))
            output = model(batch['tokens'], batch['position_ids'], None, labels=batch['labels'])

            def loss_func(values):
                losses.append(values.detach().float().mean().item())
                return values.float().mean(), {}

            return output, loss_func

        for _ in range(3):
            model.zero_grad_buffer()
            generator = torch.Generator().manual_seed(5)
            words = [torch.randint(128, (1, 33), generator=generator).cuda() for _ in range(4)]
            positions = torch.arange(32, device='cuda')[None]
            data = [
                {'tokens': w[:, :-1], 'labels': w[:, 1:], 'position_ids': positions} for w in words
            ]
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(data),
                model=model,
                num_microbatches=4,
                seq_length=32,
                micro_batch_size=1,
            )
            with torch.no_grad():
                for parameter in chunk.parameters():
                    parameter -= 1e-2 * parameter.main_grad.to(parameter.dtype)
        dist.barrier()
        return losses, {name: p.detach().cpu() for name, p in chunk.named_parameters()}
    finally:
        forget_groups()


def check_model(ranks, size, *arguments):
    reference = ranks(size).run(train_model, None, *arguments)
    trained = ranks(size).run(train_model, 'zb-h1', *arguments)
    assert any(losses for losses, _ in reference)
    for (losses, parameters), (own, ours) in zip(reference, trained, strict=True):
        assert losses == own
        assert all(torch.equal(parameters[name], ours[name]) for name in parameters)


MOE = {
    'num_moe_experts': 2,
    'moe_router_topk': 1,
    'moe_router_pre_softmax': True,
    'moe_token_dispatcher_type': 'alltoall',
    'moe_aux_loss_coeff': 1e-2,
    'moe_router_load_balancing_type': 'aux_loss',
    'add_bias_linear': False,
}


@pytest.mark.skipif(
    importlib.util.find_spec('grouped_gemm') is None, reason='needs grouped_gemm: pip install it'
)
def test_grouped_gemm_of_experts(ranks):
    check_model(ranks, 2, 'local', MOE | {'moe_grouped_gemm': True}, 1)


def test_experts_one_by_one(ranks):
    check_model(ranks, 2, 'local', MOE, 1)


@needs_te
@pytest.mark.parametrize('options', [{}, MOE | {'moe_grouped_gemm': True}], ids=['dense', 'MoE'])
def test_te_model(ranks, options):
    check_model(ranks, 2, 'te', options, 1)


@needs_te
def test_te_context_parallelism(ranks):
    check_model(ranks, 4, 'te', {}, 2)
