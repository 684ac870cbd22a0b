"""The output layer on all pipeline ranks in training: close to stock, all schedules to the bit."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from grids import grid
from models import Job, assert_same, train
from supported import TOLERANCE, supports
from test_sliced_models import UNTIED, close

LAYER = 'output_layer'
few = functools.partial(Job, te=False, iterations=2, microbatches=4, evaluation=True)


def train_in_shards(job, argv):
    """`train`; whole layers are drawn, and then divided."""
    import pretrain_gpt as script
    import report

    import megatron_zbpp
    from megatron_zbpp.mcore.patches import vocabulary

    seed = script.parse_args(argv).seed
    draw, divide, by_layer = script.draw_weights, vocabulary.divide, report.by_layer

    def divide_drawn(model):
        draw([model], seed)
        divide(model)

    def draw_others(chunks, seed):
        with mock.patch.object(report, 'by_layer', others):
            draw(chunks, seed)

    def others(chunks):
        return (each for each in by_layer(chunks) if each[0] != LAYER)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(vocabulary, 'divide', divide_drawn))
        stack.enter_context(mock.patch.object(script, 'draw_weights', draw_others))
        enable = functools.partial(megatron_zbpp.enable, vocab_parallel='output')
        stack.enter_context(mock.patch.object(megatron_zbpp, 'enable', enable))
        return train(job, argv)


def of_ranks(trained):
    """The same, where each shard is its rank's own."""

    def named(rank, found):
        return {(*key, rank) if key[0] == LAYER else key: value for key, value in found.items()}

    return [
        replace(each, parameters=named(rank, each.parameters), states=named(rank, each.states))
        for rank, each in enumerate(trained)
    ]


def whole(trained, job):
    """What all ranks left, as of one; shards are put together to the layers of stock."""
    states = {key: v for each in trained for key, v in each.states.items() if key[0] != LAYER}
    rows = [v for each in trained for key, v in each.states.items() if key[0] == LAYER]
    count = len(rows) // job.tp
    for rank in range(job.tp):  # in the order of ranks they are those of the whole layer
        means = [state['exp_avg'] for *_, state in rows[rank * count :][:count]]
        states[LAYER, 'weight', rank, 0] = 0, None, {'exp_avg': torch.cat(means)}
    return [replace(trained[-1], states=states)]


@pytest.fixture(scope='module')
def trained(ranks, data):
    """`trained(job, schedule)`: what it leaves; trained once."""

    @functools.cache
    def run(job, schedule):
        own = [*job.argv(schedule, False, data), *UNTIED]
        if schedule == 'megatron':
            return ranks(job.size).run(train, job, own)
        return ranks(job.size).run(train_in_shards, job, own)

    return run


HOSTS = ('1f1b', 'zb-v', 'zb-h1', 'v-half', 'interleaved')


@supports('the output layer on all ranks: GPT', '{schedule}', TOLERANCE)
@grid(schedule=HOSTS)
def test_close_to_stock(trained, schedule):
    """Losses, of an evaluation, too, norms (each shard counts once) and gradients; hosts alike."""
    job = few()
    found = trained(job, schedule)
    close(whole(found, job), whole(trained(job, 'megatron'), job), 1e-6)
    assert_same(of_ranks(found), of_ranks(trained(job, HOSTS[0])), job.iterations)


def first_call(argv):
    """Runs on a rank that is a whole pipeline: what is said of what cannot be, and of the cures."""
    from types import SimpleNamespace

    import pretrain_gpt as script
    import torch.distributed as dist
    from example import forget_groups
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from megatron_zbpp.ir import F, Pass
    from megatron_zbpp.mcore.iteration import vocabulary
    from megatron_zbpp.mcore.iteration.arguments import Arguments
    from megatron_zbpp.mcore.iteration.stages import Call
    from megatron_zbpp.mcore.patches.vocabulary import divide
    from megatron_zbpp.runtime.weight_grads import WeightGradStore
    from megatron_zbpp.techniques.vocabulary.graph import S, T

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)

    class Own(script.GPTModel):
        def compute_language_model_loss(self, labels, logits):
            return super().compute_language_model_loss(labels, logits)

    def built(of=script.GPTModel, divided=True, ranks=1, **more):
        model = of(config, get_gpt_layer_local_spec(), vocab_size=24, max_sequence_length=4, **more)
        if ranks > 1:
            model.pg_collection = SimpleNamespace(mp=dist.group.WORLD, pp=dist.group.WORLD)
            model.pg_collection.mp = SimpleNamespace(size=lambda: ranks)
            model.pg_collection.pp = model.pg_collection.mp
        if divided:
            divide(model)
        return model

    def told(function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except (NotImplementedError, ValueError) as error:
            return str(error)
        return None

    tokens = torch.arange(4)[None]

    def model_alone(model):
        return model(tokens, tokens, None, labels=tokens)

    def passes(forward_step):
        """F, S and T of a microbatch."""
        given = {'data_iterator': None, 'seq_length': 4, 'micro_batch_size': 1}
        given |= {'num_microbatches': 1, 'model': built()}
        arguments = Arguments(forward_step_func=forward_step, **given)
        call = Call(arguments, WeightGradStore(), 1, torch.device('cpu'))
        stage = vocabulary.VocabularyStage(call, arguments.model, None, None, True)
        actions = vocabulary.Shards([stage], (4, 1)).actions
        packed = stage.forward(Pass(F, 0, 0), None)
        made = actions[S](Pass(S, 1, 0), {'hidden': [packed]})
        actions[T](Pass(T, 1, 0), {'statistics': [(made['statistics'],)]})
        assert len(call.results) == 1 and call.num_tokens == 4

    def step(loss, labels=tokens, change=lambda output: output):
        def forward_step(data, model):
            output = change(model(tokens, tokens, None, labels=labels))
            return output, lambda losses: (loss(losses), torch.tensor(4), {})

        return forward_step

    def required(collects, model):
        vocabulary.require([model], SimpleNamespace(collect_non_loss_data=collects))

    script.initialize(script.parse_args(argv))
    try:
        return {
            'good': told(passes, step(torch.sum)) or told(required, False, built()),
            'no linear loss': told(passes, step(lambda losses: losses.square().sum())),
            'no labels': told(passes, step(torch.sum, labels=None)),
            'a changed output': told(passes, step(torch.sum, change=lambda output: 2 * output)),
            'by itself': told(model_alone, built()) or str(told(model_alone, built(divided=False))),
            'other data': told(required, True, built()),
            'no shards': told(required, False, built(divided=False)),
            'words': told(built, ranks=5) or str(told(built, ranks=3, divided=False)),
            'tied': told(built, share_embeddings_and_output_weights=True),
            'a loss of its own': told(built, of=Own),
            'gathered': told(built, parallel_output=False),
        }
    finally:
        forget_groups()


SAID = {
    'no linear loss': 'the loss function is not linear in the losses of tokens',
    'no labels': 'let forward_step call the model with labels and return what it gives',
    'a changed output': 'let forward_step call the model with labels and return what it gives',
    'by itself': 'the model was called by itself: run it by a schedule',
    'other data': 'collect_non_loss_data: ',
    'no shards': 'build a GPTModel, once megatron_zbpp.enable() has been called',
    'words': 'a vocabulary of 24 words does not divide among 5 ranks: give '
    '--make-vocab-size-divisible-by 640',
    'tied': 'give --untie-embeddings-and-output-weights',
    'a loss of its own': 'Own has a loss of its own (label smoothing, distillation)',
    'gathered': "a ColumnParallelLinear that does more than Megatron's (logits asked for",
}


def test_refused_at_the_first_call(ranks, data):
    (found,) = ranks(1).run(first_call, few(pp=1).argv('megatron', False, data))
    assert found.pop('good') is None
    assert found.keys() == SAID.keys()
    for name, said in SAID.items():
        assert said in found[name]
        assert 'leave out --pipeline-vocab-parallel' in found[name]
