"""Assumptions of slices of sequences: what holds trains as whole sequences, the rest is refused."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from models import Job, train
from outcome import error_of
from ranks import RankError
from test_sliced_models import close, in_turn

import megatron_zbpp
from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.techniques import sliced
from megatron_zbpp.mcore.techniques.sliced_layers import require

JOB = Job(iterations=2, microbatches=2, te=False, pp=1)
EXPERTS = Job(kind='experts', iterations=2, microbatches=2, te=False, pp=1)
PAIRS = ['--micro-batch-size', 2]


# loss functions: of a mask and what the model gives
def _result(loss, mask, *counts):
    return loss, *counts, {'lm loss': torch.stack([loss.detach(), mask.sum()])}


def by_sequence(mask, losses):
    """A ratio of sequences, as in GSPO."""
    return _result((losses * mask).sum(1).div(mask.sum(1)).exp().sum(), mask)


def of_pairs(mask, losses):
    """DPO: the first half of the microbatch is preferred."""
    better, worse = (losses * mask).sum(1).chunk(2)
    return _result(-torch.nn.functional.logsigmoid(worse - better).sum(), mask)


def mean_of_nonzero(mask, losses):
    return _result((losses * mask).sum() / (losses != 0).sum(), mask)


def counting_nonzero(mask, losses):
    return _result((losses * mask).sum(), mask, (losses != 0).sum())


def clipped_by_token(mask, losses):
    """Of each token, no linear function of its loss; of a loss of 0 it is not 0."""
    ratio = (-0.1 * losses).exp()
    loss = -(torch.minimum(ratio, ratio.clamp(0.55, 0.8)) * mask).sum()
    return _result(loss / mask.sum(), mask)


def at_one_token(mask, losses):
    return _result(losses[:, -3].sum(), mask)


def three(mask, losses):
    return _result((losses * mask).sum(), mask, mask.sum().int())


def of_logits(labels, mask, logits):
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction='none'
    )
    return _result(2 * (losses.view_as(mask) * mask).sum() / mask.sum(), mask)


def stepping(loss, change=lambda output: output, logits=False, call=None, **more):
    """A forward_step with that loss function."""

    def forward_step(data, model):
        batch = next(data)
        mask, labels = batch['loss_mask'], batch['labels']
        given = {'labels': None if logits else labels}
        given |= {name: make(batch) for name, make in more.items()}
        called = call or (lambda model, *args, **given: model(*args, **given))
        mask_of_attention = given.pop('attention_mask', None)
        positions = given.pop('position_ids', batch['position_ids'])
        output = called(model, batch['tokens'], positions, mask_of_attention, **given)
        function = functools.partial(loss, labels, mask) if logits else None
        return change(output), function or functools.partial(loss, mask)

    return forward_step


def _regularized(model, *args, **given):
    _regularized.weight = next(p for p in model.parameters() if p.ndim > 1)
    return model(*args, **given)


def with_weights(mask, losses):
    """Weight decay in the loss."""
    loss, *rest = three(mask, losses)
    return loss + 1e-6 * _regularized.weight.square().sum(), *rest


def _twice(model, *args, **given):
    with torch.no_grad():
        model(*args, **given)
    return model(*args, **given)


def _beside(model, *args, **given):
    """A teacher, which sees the whole sequence in the one call of forward_step."""
    from megatron.core.utils import unwrap_model

    student = unwrap_model(model)
    names = 'vocab_size', 'max_sequence_length', 'position_embedding_type'
    names = *names, 'share_embeddings_and_output_weights'
    own = {name: getattr(student, name) for name in names}
    teacher = type(student)(student.config, student.transformer_layer_spec, **own)
    teacher.load_state_dict(student.state_dict())
    with torch.no_grad():
        _beside.seen = teacher(*args, **given)
    return model(*args, **given)


def near_the_teacher(mask, losses):
    return _result(((losses - _beside.seen).square() * mask).sum() + (losses * mask).sum(), mask)


def _half(size):
    return lambda batch: torch.zeros(size, dtype=torch.bool)


GOOD = {
    'three results': stepping(three),
    'no linear function of tokens': stepping(clipped_by_token),
    'a reward of one token': stepping(at_one_token),
    'logits': stepping(of_logits, logits=True),
    'a teacher': stepping(near_the_teacher, call=_beside),
}
NO_SUM = 'the loss function is no sum over tokens'
OUTPUT = 'let forward_step call the model that it is given and return what that gives, unchanged'
REFUSED = {
    'a ratio of sequences': (stepping(by_sequence), NO_SUM),
    'pairs': (stepping(of_pairs), NO_SUM),
    'a mean of nonzero losses': (stepping(mean_of_nonzero), NO_SUM),
    'a count of nonzero losses': (stepping(counting_nonzero), NO_SUM),
    'weights in the loss': (stepping(with_weights, call=_regularized), NO_SUM),
    'another output': (stepping(three, lambda output: 2 * output), OUTPUT),
    'an output that is written': (stepping(three, lambda output: output.mul_(2)), OUTPUT),
    'two calls': (stepping(three, call=_twice), 'a GPTModel runs twice in a pass'),
    'a call of the unwrapped model': (
        stepping(three, call=lambda model, *args, **given: model.module(*args, **given)),
        OUTPUT,
    ),
    'embeddings': (
        stepping(three, decoder_input=lambda batch: torch.zeros(16, 2, 32)),
        'decoder_input: ',
    ),
    'packed sequences': (
        stepping(three, packed_seq_params=lambda batch: 1),
        'packed_seq_params: the model is called with it, and nobody has cut it for slices',
    ),
    'padding': (stepping(three, padding_mask=_half((2, 16))), 'padding_mask: '),
    'arguments of layers': (stepping(three, extra_block_kwargs=lambda batch: {'a': 1}), 'extra_'),
    'positions by axis': (
        stepping(three, position_ids=lambda batch: batch['position_ids'].expand(3, 2, 16)),
        'position_ids of shape (3, 2, 16): ',
    ),
    'a mask of keys alone': (
        stepping(three, attention_mask=_half((2, 1, 1, 16))),
        'attention_mask of shape (2, 1, 1, 16): ',
    ),
}


@pytest.fixture(scope='module')
def argv(data):
    return [*JOB.argv('megatron', False, data), *map(str, PAIRS)]


def steps(how, forward_step, job, argv):
    import pretrain_gpt as script

    with mock.patch.object(script, 'forward_step', forward_step):
        return how(job, argv)


@pytest.mark.on_ranks(1)
def test_as_whole_sequences(argv):
    norms = set()
    for forward_step in GOOD.values():
        slices, whole = (steps(how, forward_step, JOB, argv) for how in (in_turn, train))
        close([slices], [whole], 1e-5)
        norms.add(whole.norms[0])
    assert len(norms) == len(GOOD)


@pytest.mark.on_ranks(1)
@pytest.mark.parametrize('name', REFUSED)
def test_refused_at_the_first_call(name, argv):
    forward_step, message = REFUSED[name]
    said = error_of(steps, in_turn, forward_step, JOB, argv)
    assert message in str(said) and 'a schedule of whole sequences' in said, said


@pytest.mark.on_ranks(1)
def test_modules(argv):
    """What is said of them, before the first pass or in the first call."""
    import pretrain_gpt as script
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.moe.router import TopKRouter
    from models import _repeat

    class OwnRouter(TopKRouter):
        pass

    class OwnAttention(DotProductAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    def of_class(kind, new):
        def change(model):
            for module in model.modules():
                if type(module) is kind:
                    module.__class__ = new

        return change

    def sinkhorn(model):
        for module in model.modules():
            if isinstance(module, TopKRouter):
                module.routing_type = 'sinkhorn'

    class MambaMixer(torch.nn.Module):
        pass

    class Transposed(GPTModel):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs).transpose(0, 1)

    uncut = GPTModel.forward

    def replaced(model):
        model.forward = functools.partial(uncut, model)

    def mixing(made):
        return lambda model: model.decoder.add_module('mixer', made)

    def seeing_all(model):
        model.decoder.layers[1].self_attention.attn_mask_type = AttnMaskType.no_mask

    def by_axis(model):
        model.position_embedding_type = 'mrope'

    def nameless(original):
        return lambda model, *args, **kwargs: original(model, *args, **kwargs)

    def without_any(original):
        return lambda *args, **kwargs: original(*args, **kwargs)

    def said(job, change):
        def build(*args, **kwargs):
            model = GPTModel(*args, **kwargs)
            change(model)
            return model

        with mock.patch.object(script, 'GPTModel', build):
            return error_of(in_turn, job, argv)

    found = {
        'Conv1d': said(JOB, mixing(torch.nn.Conv1d(1, 1, 1))),
        'MambaMixer': said(JOB, mixing(MambaMixer())),
        'attn_mask_type=no_mask': said(JOB, seeing_all),
        'tensor of shape (4, 2) for 4 tokens': said(JOB, of_class(GPTModel, Transposed)),
        'a DotProductAttention gets 16 tokens where slices have 4': said(JOB, replaced),
        'inputs of a Linear cannot be cut': error_of(require, torch.nn.Linear(1, 1)),
        'collect_non_loss_data: ': error_of(
            sliced.require, SimpleNamespace(collect_non_loss_data=True)
        ),
        'OwnAttention': said(JOB, of_class(DotProductAttention, OwnAttention)),
        'OwnRouter': said(EXPERTS, of_class(TopKRouter, OwnRouter)),
        'sinkhorn': said(EXPERTS, sinkhorn),
        'mrope': said(JOB, by_axis),
        'runs twice': said(JOB, lambda model: _repeat(model.decoder.layers)),
    }
    for wrapped, words in ((nameless, 'by functools.wraps'), (without_any, 'functools.wraps')):
        with mock.patch.object(GPTModel, 'forward', wrapped(GPTModel.forward)):
            found[words] = said(JOB, lambda model: None)
    for words, text in found.items():
        assert words in str(text) and 'a schedule of whole sequences' in text, (words, text)


def own_attention(argv):
    """Runs on each of two ranks: what is said where the layers of one have their own attention."""
    import pretrain_gpt as script
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class OwnAttention(DotProductAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    def build(*args, **kwargs):
        model = GPTModel(*args, **kwargs)
        for layer in model.decoder.layers if kwargs['post_process'] else ():
            layer.self_attention.core_attention.__class__ = OwnAttention
        return model

    with mock.patch.object(script, 'GPTModel', build):
        return error_of(in_two, PIPELINE, argv)


PIPELINE = Job(iterations=2, microbatches=2, te=False)


@pytest.fixture(scope='module')
def pipeline(data):
    """Flags of two ranks."""
    return PIPELINE.argv('zb-h1', False, data)


def in_two(job, argv, **shards):
    """`train` in two slices."""
    enable = functools.partial(megatron_zbpp.enable, slices=2, **shards)
    with mock.patch.object(megatron_zbpp, 'enable', enable):
        return train(job, argv)


def test_all_ranks_refuse_what_one_has(ranks, pipeline):
    said = ranks(2).run(own_attention, pipeline)
    assert said[0] == said[1] and 'OwnAttention is not known to attend to the slices' in said[0]


def by_sequence_in(argv, **shards):
    """Runs on each of two ranks."""
    steps(functools.partial(in_two, **shards), stepping(by_sequence), PIPELINE, argv)


SHARDS = pytest.param({'vocab_parallel': 'input+output'}, 'not linear', marks=pytest.mark.full)


@pytest.mark.parametrize(('shards', 'words'), [({}, NO_SUM), SHARDS])
def test_in_a_pipeline(ranks, pipeline, shards, words):
    """The rank of the loss ends the training in its first iteration."""
    with pytest.raises(RankError, match=words):
        ranks(2).run(functools.partial(by_sequence_in, **shards), pipeline)


@pytest.mark.on_ranks(1)
@pytest.mark.parametrize('kind', ['z-loss', 'z-loss by token', 'experts by sequence'])
def test_losses_of_routers(kind, argv):
    """Means of tokens are those of whole sequences, in gradients and in the log."""
    import pretrain_gpt as script

    log, found = [], []

    def noting(*args, run_batch=script.run_batch):
        loss = run_batch(*args)
        for name, entry in compat.logged_losses().items():
            log.append((name, compat.logged_values(entry).tolist()))
            compat.logged_values(entry).zero_()
        return loss

    with mock.patch.object(script, 'run_batch', noting):
        for how in (in_turn, train):
            found.append([how(replace(EXPERTS, kind=kind), argv)])
    exact = kind.startswith('z-loss')
    close(*found, 1e-6 if exact else 5e-3, exact)
    assert len(log) == 4
    for (name, own), (other, values) in zip(log[:2], log[2:], strict=True):
        assert name == other and all(values)
        assert own == pytest.approx(values, rel=1e-5 if exact else 0.1)
