"""Stages that exchange several tensors, or tensors that differ from edge to edge. Chunks of
Megatron's GPTModel that hand more than the hidden state on; the reference is autograd through all
chunks in one process, microbatch after microbatch."""

import functools
import sys
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from example import groups, small_config
from grids import grid
from nvidia import CHECKOUT, _find_megatron, known_config, release
from ranks import RankError
from supported import TOLERANCE, absent, supports

import megatron_zbpp

SEQUENCE, HIDDEN, MICROBATCHES, VOCABULARY = 8, 16, 5, 64
# of a model, whose gradients are those of autograd
PLAIN = {'hidden_dropout': 0.0, 'attention_dropout': 0.0, 'bias_dropout_fusion': False}
PLAIN |= {'deallocate_pipeline_outputs': True, 'gradient_accumulation_fusion': False}


def passing(base, wrong):
    """A GPT whose stages hand on the hidden state, half a delta in fp64, and a count of stages. As
    block attention residuals do: what comes in is mixed with what earlier stages left."""

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
            delta, count = made[..., : made.shape[-1] // 2].double().tanh(), torch.ones(1).long()
            if self._left:
                delta, count = delta + self._left[0], self._left[1] + 1
            return made, delta, count

    return Passing


def build(layout, stages, wrong, mhc):
    """Chunks for some stages: of the model above, or Megatron's own with hyper-connections."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    config = small_config(4, HIDDEN, 2, ranks, pipeline_model_parallel_layout=layout.text, **PLAIN)
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
    draw = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=draw)


def forward_step(data, model):
    text = next(data)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    return model(text[:, :-1], positions, None, labels=text[:, 1:]), loss_of


def loss_of(losses):
    loss = losses.float().mean()
    return loss, {'loss': loss.detach().clone()}


def trained(schedule, ranks, wrong=None, mhc=False, options=None, lengths=False):
    """Hold that losses and gradients of this rank's stages are those of autograd, to the bit; how
    often the pipeline ran each stage forward."""
    with pipeline(schedule, ranks, wrong, mhc, options, lengths) as (layout, own, call):
        rank = dist.get_rank()
        held = {s: c.module for s, c in zip(layout.stages(rank), own, strict=True)}
        weights = gathered({stage: chunk.state_dict() for stage, chunk in held.items()})
        losses, count = call()
        whole = build(layout, range(ranks * layout.num_chunks), None, mhc)[1]
        for stage, chunk in enumerate(whole):
            chunk.load_state_dict(weights[stage])
        assert by_autograd(whole) == losses or (not losses and rank < ranks - 1)
        for stage, chunk in held.items():
            for ours, theirs in zip(chunk.parameters(), whole[stage].parameters(), strict=True):
                both = (each.float().numpy().tobytes() for each in (ours.main_grad, theirs.grad))
                assert len({*both}) == 1, stage
        return count / len(held)


@contextmanager
def pipeline(schedule, ranks, wrong=None, mhc=False, options=None, lengths=False):
    """The layout, this rank's chunks in DDP, and what runs a batch: losses in hex, forwards."""
    _find_megatron()
    from megatron.core.distributed import DistributedDataParallel as DDP
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.pipeline_parallel import get_forward_backward_func

    layout = megatron_zbpp.layout_for(schedule, ranks, 4)
    many = layout.num_chunks > 1
    with (
        megatron_zbpp.enable(schedule, **options or {}),
        groups(pp=ranks, chunks=layout.num_chunks),
    ):
        torch.manual_seed(7 + dist.get_rank())
        config, own = build(layout, layout.stages(dist.get_rank()), wrong, mhc)
        config.variable_seq_lengths = lengths
        models = [DDP(config, DistributedDataParallelConfig(), chunk) for chunk in own]
        data = [batches() for _ in models]

        def call():
            step = mock.Mock(wraps=forward_step)
            results = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=data if many else data[0],
                model=models if many else models[0],
                num_microbatches=MICROBATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=2,
            )
            return [result['loss'].item().hex() for result in results], step.call_count

        yield layout, models, call


def left(schedule, ranks, options, calls):
    """Losses in hex of calls between which steps change nothing; gradients behind the last."""
    with pipeline(schedule, ranks, options=options) as (_, models, call):
        from megatron_zbpp.mcore import enabled

        losses = []
        for at in range(calls):
            losses += call()[0]
            for face in enabled.plugin.session.faces if at < calls - 1 else ():
                if face.name == 'updating':
                    face.endless.step(lambda: None)
        named = [(c, *each) for c, model in enumerate(models) for each in model.named_parameters()]
        return losses, {(chunk, name): p.main_grad.tolist() for chunk, name, p in named}


def gathered(own):
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


@pytest.fixture(autouse=True)
def recorded(record_property):
    """Rows are of the release in the checkout, where there is one."""
    if CHECKOUT:
        record_property('megatron', release())


@pytest.mark.on_ranks('ranks_')
@supports('stages that exchange several tensors ({given})')
@grid(
    schedule=('zb-v', 'zb-h1', 'interleaved', '1f1b'),
    ranks_=(2, 4, 2, 2),
    given=('no options', 'recompute', 'prewarm'),
    when=lambda schedule, ranks_, given: ranks_ == 2 or schedule in ('zb-h1', '1f1b'),  # 4 layers
)
def test_gradients_are_those_of_autograd(schedule, ranks_, given):
    """Hidden states, a delta of another shape and dtype, and numbers without a gradient."""
    options = {'recompute': {'recompute': 'all'}, 'prewarm': {'prewarm': True}}.get(given)
    ran = trained(schedule, ranks_, options=options)
    assert given == 'recompute' or ran == MICROBATCHES + (given == 'prewarm')


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
        of_layers = [name for name in gradients if 'layers' in name[1]]
        assert of_layers
        for name in of_layers:
            both = map(torch.tensor, (own[name], gradients[name]))
            torch.testing.assert_close(*both, rtol=1e-4, atol=1e-6)


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


@supports("hyper-connections of several residual streams (mHC), without Megatron's guard")
@grid(schedule=('zb-v', 'zb-h1', 'interleaved'), ranks_=(2, 2, 2))
def test_residual_streams(ranks, schedule, ranks_):
    """Of main, whose config refuses pipelines yet: edges are n times as wide."""
    require_residual_streams(ranks)
    ranks(ranks_).run(trained, schedule, ranks_, None, True)


def test_megatron_guards_residual_streams(ranks):
    """When this fails Megatron has them with pipelines: compare with its own schedule then."""
    require_residual_streams(ranks)
    with pytest.raises(RankError, match='does not support pipeline_model_parallel_size > 1'):
        ranks(2).run(guarded)


def require_residual_streams(ranks):
    if 'enable_mhc_connections' not in ranks(2).run(fields_of_config)[0]:
        absent('hyper-connections are on main')


def fields_of_config():
    _find_megatron()
    return known_config()


def guarded():
    small_config(4, HIDDEN, 2, 2, hidden_dropout=0.0, enable_mhc_connections=True)


# an encoder on the first stage: each of the decoder attends to what it made, and hands that on
MEMORY = 12  # tokens that the encoder reads


def passing_memory(base):
    """A T5 whose decoder hands on what it has attended to."""

    class Passing(base):
        def hops(self, shape, dtype):
            hidden, memory = (shape, dtype), ((MEMORY, *shape[1:]), dtype)
            both = [hidden, memory]
            takes = None if self.add_encoder else [memory] if self.pre_process else both
            return takes, None if self.post_process else [memory] if self.add_encoder else both

        def forward(self, *arguments, **options):
            made = super().forward(*arguments, **options)
            return (
                made if self.add_encoder or self.post_process else (made, self.encoder_hidden_state)
            )

    return Passing


def build_t5(layout, stages, *_):
    """A chunk for each stage: the first has the encoder, the second the decoder's embedding."""
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    # layers of each stage, which knows nothing of the others
    config = small_config(1, HIDDEN, 2, masked_softmax_fusion=False, **PLAIN)
    chunks = [
        passing_memory(T5Model)(
            config,
            config,
            t5_spec.encoder_model_with_local_spec(),
            t5_spec.decoder_model_with_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=MEMORY,
            pre_process=stage < 2,
            post_process=layout.is_last(stage),
            add_encoder=layout.is_first(stage),
            add_decoder=not layout.is_first(stage),
        )
        for stage in stages
    ]
    return config, chunks


def t5_step(data, model):
    text = next(data)
    read = text[:, :1] + torch.arange(MEMORY).expand(2, -1)
    square = torch.ones(2, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    open_ = torch.zeros(2, 1, MEMORY, MEMORY, dtype=torch.bool)
    masks = open_, square, open_[:, :, :SEQUENCE]
    made = model(read % VOCABULARY, text[:, :-1], *masks, lm_labels=text[:, 1:])
    return made, loss_of


@pytest.mark.on_ranks('ranks_')
@supports("an encoder's outputs beside hidden states (T5Model, encoder on the first stage)")
@grid(
    schedule=('zb-h1', 'interleaved', '1f1b', 'zb-2p'),
    ranks_=(4, 2, 4, 2),
    when=lambda schedule, ranks_: (schedule, ranks_) != ('interleaved', 4),  # of four layers
)
def test_an_encoder(schedule, ranks_):
    """Of the encoder's weights, too, to which each stage of the decoder adds."""
    with mock.patch.multiple(sys.modules[__name__], build=build_t5, forward_step=t5_step):
        trained(schedule, ranks_)
