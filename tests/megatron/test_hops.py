"""Stages that exchange several tensors, or tensors that differ from edge to edge.

Chunks of Megatron's GPTModel that hand more than the hidden state on; the reference is autograd
through all chunks in one process, microbatch after microbatch.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from unittest import mock

import pytest
from example import forget_groups
from grids import grid
from nvidia import CHECKOUT, _find_megatron, release
from ranks import RankError
from supported import TOLERANCE, absent, supports

SEQUENCE, HIDDEN, MICROBATCHES, VOCABULARY = 8, 16, 5, 64


def passing(base, wrong):
    """A GPT whose stages hand on the hidden state, half a delta in fp64, and a count of stages.

    As block attention residuals do: what comes in is mixed with what earlier stages left.

    Args:
        base: GPTModel.
        wrong: the stage that takes another delta than the one before it gives; None: none does.
    """
    import torch

    class Passing(base):
        stage = 0
        _left = None

        def hops(self, shape, dtype):
            delta = (*shape[:-1], shape[-1] // 2)
            gives = [(shape, dtype), (delta, torch.float64), ((1,), torch.int64)]
            takes = [gives[0], ((*shape[:-1], 3), torch.float64), gives[2]]
            takes = takes if self.stage == wrong else gives
            return None if self.pre_process else takes, None if self.post_process else gives

        def set_input_tensor(self, tensors):
            hidden, *self._left = tensors
            if self._left:
                delta, count = self._left
                mixed = torch.cat([delta, delta], -1).to(hidden.dtype)
                hidden = hidden + mixed / count.to(hidden.dtype)
            super().set_input_tensor([hidden])

        @functools.wraps(base.forward)
        def forward(self, *arguments, **options):
            made = super().forward(*arguments, **options)
            if self.post_process:
                return made
            delta = made[..., : made.shape[-1] // 2].double().tanh()
            delta, count = (
                (delta + self._left[0], self._left[1] + 1) if self._left else (delta, None)
            )
            return made, delta, torch.ones(1, dtype=torch.int64) if count is None else count

    return Passing


def build(layout, stages, wrong, mhc):
    """Chunks for some stages: of the model above, or Megatron's own with hyper-connections."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_model_parallel_layout=layout.text,
    )
    kind, spec, chunks = passing(GPTModel, wrong), get_gpt_layer_local_spec(), []
    if mhc:
        kind = GPTModel
        widen(config, spec)
    for chunk, stage in enumerate(stages):
        chunks.append(
            kind(
                config,
                spec,
                vocab_size=VOCABULARY,
                max_sequence_length=SEQUENCE,
                pre_process=layout.is_first(stage),
                post_process=layout.is_last(stage),
                share_embeddings_and_output_weights=False,
                vp_stage=chunk % layout.num_chunks if layout.num_chunks > 1 else None,
            )
        )
        chunks[-1].stage = stage
    return config, chunks


def widen(config, spec):
    """Give layers hyper-connections of 3 streams, behind the guard of Megatron's config."""
    from megatron.core.transformer.hyper_connection import HyperConnectionModule
    from megatron.core.transformer.transformer_layer import HyperConnectionTransformerLayer

    config.enable_mhc_connections, config.mhc_num_residual_streams = True, 3
    spec.module = HyperConnectionTransformerLayer
    spec.submodules.self_attention_hyper_connection = HyperConnectionModule
    spec.submodules.mlp_hyper_connection = HyperConnectionModule


def batches():
    import torch

    draw = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=draw)


def forward_step(data, model):
    import torch

    text = next(data)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    return model(text[:, :-1], positions, None, labels=text[:, 1:]), loss_of


def loss_of(losses):
    loss = losses.float().mean()
    return loss, {'loss': loss.detach().clone()}


def trained(schedule, ranks, wrong=None, mhc=False, options=None, lengths=False):
    """Losses and gradients of this rank's stages, in hex, by the pipeline and by autograd; and how
    many forwards the pipeline ran.
    """
    with pipeline(schedule, ranks, wrong, mhc, options, lengths) as (layout, own, call):
        import torch.distributed as dist

        held = layout.stages(dist.get_rank())
        weights = gathered({s: c.module.state_dict() for s, c in zip(held, own, strict=True)})
        losses, count = call()
        ours = {s: hashes(c.module, 'main_grad') for s, c in zip(held, own, strict=True)}
        whole = build(layout, range(ranks * layout.num_chunks), None, mhc)[1]
        for stage, chunk in enumerate(whole):
            chunk.load_state_dict(weights[stage])
        expected = by_autograd(whole)
        reference = {stage: hashes(whole[stage], 'grad') for stage in held}
        return losses, ours, expected, reference, count


@contextmanager
def pipeline(schedule, ranks, wrong=None, mhc=False, options=None, lengths=False):
    """The layout, this rank's chunks in DDP, and what runs a batch: losses in hex, forwards."""
    _find_megatron()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel as DDP
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_zbpp

    plugin = megatron_zbpp.enable(schedule, **options or {})
    try:
        layout = megatron_zbpp.layout_for(schedule, ranks, 4)
        chunks = layout.num_chunks if layout.num_chunks > 1 else None
        parallel_state.initialize_model_parallel(1, ranks, chunks)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(7 + dist.get_rank())
        held = layout.stages(dist.get_rank())
        config, own = build(layout, held, wrong, mhc)
        config.variable_seq_lengths = lengths
        models = [DDP(config, DistributedDataParallelConfig(), chunk) for chunk in own]

        def call():
            step = mock.Mock(wraps=forward_step)
            results = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=data if chunks else data[0],
                model=models if chunks else models[0],
                num_microbatches=MICROBATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=2,
            )
            return [result['loss'].item().hex() for result in results], step.call_count

        data = [batches() for _ in models]
        yield layout, models, call
    finally:
        plugin.disable()
        forget_groups()


def left(schedule, ranks, options, calls):
    """Losses in hex of calls between which steps change nothing; gradients behind the last."""
    with pipeline(schedule, ranks, options=options) as (_, models, call):
        from megatron_zbpp.mcore import enabled

        losses = []
        for at in range(calls):
            losses += call()[0]
            endless = enabled.plugin.session.endless
            if at < calls - 1 and endless is not None:
                endless.step(lambda: None)
        named = [(c, *each) for c, model in enumerate(models) for each in model.named_parameters()]
        return losses, {(chunk, name): p.main_grad.tolist() for chunk, name, p in named}


def gathered(own):
    import torch.distributed as dist

    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {stage: state for part in parts for stage, state in part.items()}


def by_autograd(chunks):
    data, losses = batches(), []
    for _ in range(MICROBATCHES):
        text, given = next(data), [None]
        for chunk in chunks:
            chunk.set_input_tensor(given)
            made, loss = forward_step(iter([text]), chunk)
            given = [*made] if isinstance(made, tuple) else [made]
        loss, report = loss(made)
        (loss / MICROBATCHES).backward()
        losses.append(report['loss'].item().hex())
    return losses


def hashes(chunk, field):
    """Sums and all bits of each gradient."""
    found = {}
    for name, parameter in chunk.named_parameters():
        gradient = getattr(parameter, field)
        found[name] = gradient.double().sum().item().hex(), hash(gradient.float().numpy().tobytes())
    return found


@pytest.fixture(autouse=True)
def recorded(record_property):
    """Rows are of the release in the checkout, where there is one."""
    if CHECKOUT:
        record_property('megatron', release())


def require_same(found, ranks):
    for losses, ours, expected, reference, _ in found:
        assert ours == reference
        assert losses in ([], expected)
    assert found[-1][0] and len(found) == ranks


@pytest.mark.shared
@supports('stages that exchange several tensors ({given})')
@grid(
    schedule=('zb-v', 'zb-h1', 'interleaved', '1f1b'),
    ranks_=(2, 4, 2, 2),
    given=('no options', 'recompute', 'prewarm'),
    when=lambda schedule, ranks_, given: ranks_ == 2 or schedule in ('zb-h1', '1f1b'),  # 4 layers
)
def test_gradients_are_those_of_autograd(ranks, schedule, ranks_, given):
    """Hidden states, a delta of another shape and dtype, and numbers without a gradient."""
    options = {'recompute': {'recompute': 'all'}, 'prewarm': {'prewarm': True}}.get(given)
    found = ranks(ranks_).run(trained, schedule, ranks_, None, False, options)
    require_same(found, ranks_)
    if given != 'recompute':
        each = MICROBATCHES + (given == 'prewarm')
        assert [ran for *_, ran in found] == [each * len(ours) for _, ours, *_ in found]


@supports('stages that exchange several tensors (weights of several versions)')
@pytest.mark.parametrize('schedule', ['pipedream', 'pipedream-2bw'])
def test_beside_versions_of_weights(ranks, schedule):
    """Tuples of later batches are in flight between calls: as 1F1B, where steps change nothing."""
    found, plain = (ranks(2).run(left, name, 2, {}, 3) for name in (schedule, '1f1b'))
    assert found == plain and len(plain[-1][0]) == 3 * MICROBATCHES


@supports('stages that exchange several tensors ({layers} on all ranks)', '1f1b zb-h1', TOLERANCE)
@pytest.mark.parametrize('layers', ['output', 'input+output'])
def test_beside_shards(ranks, layers):
    """To the bit under two schedules; nearly as with whole layers, whose sums round otherwise."""
    options = {'vocab_parallel': layers}
    found, other = (ranks(2).run(left, name, 2, options, 1) for name in ('zb-h1', '1f1b'))
    assert found == other
    for (losses, own), (expected, gradients) in zip(
        found, ranks(2).run(left, '1f1b', 2, {}, 1), strict=True
    ):
        assert list(map(float.fromhex, losses)) == pytest.approx(list(map(float.fromhex, expected)))
        layers = [name for name in gradients if 'layers' in name[1]]
        assert layers
        for name in layers:
            assert_near(own[name], gradients[name])


def assert_near(found, expected):
    import torch

    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_neighbours_that_do_not_agree(ranks):
    """All ranks say so, with both shapes, before anything could hang."""
    with pytest.raises(RankError) as refused:
        ranks(2).run(trained, 'zb-v', 2, 2)
    said = (
        'stage 1 gives (8, 2, 16) of torch.float32 and (8, 2, 8) of torch.float64 and (1,) of '
        'torch.int64, but stage 2 takes (8, 2, 16) of torch.float32 and (8, 2, 3) of torch.float64 '
        'and (1,) of torch.int64: have hops(shape, dtype) of both models tell the same'
    )
    assert str(refused.value).count(said) == 2


@pytest.mark.parametrize(
    ('options', 'lengths', 'cure'),
    [
        ({'offload': 'all'}, False, 'leave out offload, or take a schedule without eviction'),
        ({}, True, 'leave out --variable-seq-lengths'),
    ],
)
def test_what_does_not_go_with_it(ranks, options, lengths, cure):
    """The rest of such options is refused at the same place; without them it trains, see above."""
    with pytest.raises(RankError, match=f'exchange .*tensors.*: {cure}'):
        ranks(4).run(trained, 'zb-h1', 4, None, False, options, lengths)


@pytest.mark.shared
@supports("hyper-connections of several residual streams (mHC), without Megatron's guard")
@grid(schedule=('zb-v', 'zb-h1', 'interleaved'), ranks_=(2, 2, 2))
def test_residual_streams(ranks, schedule, ranks_):
    """Of main, whose config refuses pipelines yet: edges are n times as wide."""
    if not ranks(2).run(has_residual_streams)[0]:
        absent('hyper-connections are on main')
    require_same(ranks(ranks_).run(trained, schedule, ranks_, None, True), ranks_)


def test_megatron_guards_residual_streams(ranks):
    """When this fails Megatron has them with pipelines: compare with its own schedule then."""
    if not ranks(2).run(has_residual_streams)[0]:
        absent('hyper-connections are on main')
    with pytest.raises(RankError, match='does not support pipeline_model_parallel_size > 1'):
        ranks(2).run(guarded)


def has_residual_streams():
    _find_megatron()
    from megatron.core.transformer import TransformerConfig

    return hasattr(TransformerConfig, 'enable_mhc_connections')


def guarded():
    import torch
    from megatron.core.transformer import TransformerConfig

    sizes = {'num_layers': 4, 'hidden_size': HIDDEN, 'num_attention_heads': 2}
    TransformerConfig(
        **sizes,
        hidden_dropout=0.0,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        enable_mhc_connections=True,
    )
