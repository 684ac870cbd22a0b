"""The output layer on all pipeline ranks: close to stock, all schedules to the bit."""

import functools
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import report
import torch
import torch.distributed as dist
from entered import entered
from example import forget_groups, small_config
from grids import grid, some
from models import Job, assert_same, reference, train
from outcome import error_of
from supported import TOLERANCE, supports
from test_sliced_models import UNTIED, close

import megatron_zbpp
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import F, Pass
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.mcore.iteration.stages import Arguments, Call, ModelStage
from megatron_zbpp.mcore.techniques import split_embedding as embedding
from megatron_zbpp.mcore.techniques import vocabulary_shards as vocabulary
from megatron_zbpp.mcore.techniques.vocabulary_shards import divide
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques import ASKED
from megatron_zbpp.techniques.composition import (
    ADDED,
    CLASHES,
    EMBEDDING,
    SLICED,
    TRAINED,
    VOCABULARY,
    techniques_of,
)
from megatron_zbpp.techniques.evict import with_eviction
from megatron_zbpp.techniques.vocabulary.graph import S, T
from megatron_zbpp.techniques.vocabulary.place import with_embedding, with_shards

OUTPUT, BOTH = 'output', 'input+output'
WEIGHTS = ('output_layer', 'weight'), ('embedding', 'word_embeddings.weight')
few = functools.partial(Job, te=False, iterations=2, microbatches=4, evaluation=True)


def train_in_shards(layers, slices, job, argv, **techniques):
    """`train`; whole layers are drawn, and then divided."""
    import pretrain_gpt as script

    seed = script.parse_args(argv).seed
    draw, divide, by_layer = script.draw_weights, vocabulary.divide, report.by_layer

    def divide_drawn(model, both=False, first=None):
        draw([model] if first in (None, model) else [model, first], seed)
        divide(model, both, first)

    def draw_others(chunks, seed):
        with mock.patch.object(report, 'by_layer', others):
            draw(chunks, seed)

    def others(chunks):
        return (each for each in by_layer(chunks) if each[:2] not in divided(layers))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(vocabulary, 'divide', divide_drawn))
        stack.enter_context(mock.patch.object(script, 'draw_weights', draw_others))
        more = {'vocab_parallel': layers, 'slices': slices, **techniques}
        enable = functools.partial(megatron_zbpp.enable, **more)
        stack.enter_context(mock.patch.object(megatron_zbpp, 'enable', enable))
        return train(job, argv)


def divided(layers):
    """The weights that are on all ranks."""
    return WEIGHTS if layers == BOTH else WEIGHTS[:1]


def of_ranks(trained, layers=OUTPUT):
    """The same, where each shard is its rank's own."""

    def named(rank, found):
        own = divided(layers)
        return {(*key, rank) if key[:2] in own else key: v for key, v in found.items()}

    return [
        replace(each, parameters=named(rank, each.parameters), states=named(rank, each.states))
        for rank, each in enumerate(trained)
    ]


def whole(trained, job):
    """What all ranks left, as of one; shards are put together to the layers of stock."""
    states = {
        key: v for each in trained for key, v in each.states.items() if key[:2] not in WEIGHTS
    }
    for weight in WEIGHTS:
        rows = [v for each in trained for key, v in each.states.items() if key[:2] == weight]
        count = len(rows) // job.tp
        for rank in range(job.tp):  # in the order of ranks they are those of the whole layer
            means = [state['exp_avg'] for *_, state in rows[rank * count :][:count]]
            if means:
                states[(*weight, rank, 0)] = 0, None, {'exp_avg': torch.cat(means)}
    return [replace(trained[-1], states=states)]


def leave(ranks, data, job, schedule, slices=None, layers=OUTPUT, tied=False, **techniques):
    """What a training leaves on each rank."""
    words = [] if tied else UNTIED
    if schedule == 'megatron':
        return reference(ranks, data, job, words=words)
    in_shards = functools.partial(train_in_shards, layers, slices, **techniques)
    return ranks(job.size).run(in_shards, job, [*job.argv(schedule, False, data), *words])


@pytest.fixture(scope='module')
def trained(ranks, data):
    """`trained(job, schedule, slices, layers, tied)`: what it leaves; trained once."""
    return functools.cache(functools.partial(leave, ranks, data))


def compare(found, stock, job, tied=False):
    """Losses, of an evaluation, too, norms (each shard counts once); of one replica, gradients."""
    relative = 1e-2 if job.bf16 else 1e-6
    for ours, theirs in zip(found, stock, strict=True):
        assert ours.norms == pytest.approx(theirs.norms, rel=relative)
        for loss, told in zip(ours.losses, theirs.losses, strict=True):
            assert loss == (told and pytest.approx(told, rel=relative))
    if job.dp == 1:
        (ours,), (theirs,) = whole(found, job), whole(stock, job)
        if tied:  # theirs has a copy on the last stage
            copies = [key for key in theirs.states if key[:2] == WEIGHTS[0]]
            assert len(copies) == job.tp and copies[0] not in ours.states
            for key in copies:
                del theirs.states[key]
        # stock differs from itself by 1.15e-6 (a norm's weight) where torch takes other kernels
        close([ours], [theirs], 3 * relative)


HOSTS = ('1f1b', 'zb-v', 'zb-h1')


def check(trained, job, schedule, slices=None, layers=OUTPUT, tied=False, alike=True, **techniques):
    """Close to stock of whole sequences, layers and activations, which a schedule leaves so; and to
    the bit as 1F1B in the same slices with all that is kept, if all schedules are `alike`."""
    found = trained(job, schedule, slices, layers, tied, **techniques)
    compare(found, trained(job, 'megatron', None, OUTPUT, tied), job, tied)
    if alike:
        plain = trained(job, HOSTS[0], slices, layers, tied)
        assert_same(*(of_ranks(each, layers) for each in (found, plain)), job.iterations)


@supports('the output layer on all ranks: GPT', '{schedule}', TOLERANCE)
@some('schedule', HOSTS, 'v-half', 'interleaved')
def test_close_to_stock(trained, schedule):
    check(trained, few(), schedule)


@supports('the output layer on all ranks, in {slices} slices: GPT', '{schedule}', TOLERANCE)
@grid(schedule=(*HOSTS[:2], 'slimpipe'), slices=(4, '5,3,6,2'))
def test_slices_close_to_stock(trained, schedule, slices):
    check(trained, few(), schedule, slices)


@supports('the output layer on all ranks, beside {technique}: GPT', '{schedule}', TOLERANCE)
@grid(technique=('recompute', 'offload'), schedule=('1f1b', 'zb-v'), slices=(4, None))
def test_activations_elsewhere(trained, technique, schedule, slices):
    """The stage before the output layer included."""
    check(trained, few(), schedule, slices, **{technique: 'all'})


@supports('the output layer and the embedding on all ranks: {layers} GPT', '{schedule}', TOLERANCE)
@some(
    'layers, schedule',
    [('tied', 'zb-v'), ('tied', '1f1b'), ('untied', '1f1b')],
    *product(('untied', 'tied'), ('zb-v', 'zb-h1', 'interleaved')),
)
def test_both_layers(trained, layers, schedule):
    check(trained, few(), schedule, None, BOTH, layers == 'tied')


@supports(
    'the output layer and the embedding on all ranks, beside {technique}, {slices} slices: '
    '{layers} GPT',
    '{schedule}',
    TOLERANCE,
)
@grid(
    technique=('no other', 'recompute', 'offload'),
    slices=(4, '5,3,6,2', 'no'),
    schedule=('zb-v', '1f1b'),
    layers=('tied', 'untied'),
)
def test_both_layers_beside_others(trained, technique, slices, schedule, layers):
    cut = None if slices == 'no' else slices
    more = {} if technique == 'no other' else {technique: 'all'}
    check(trained, few(), schedule, cut, BOTH, layers == 'tied', **more)


@pytest.mark.on_ranks(2)
@some('schedule', ['zb-v'], '1f1b')
def test_without_the_flag_no_function_of_it_is_called(data, schedule):
    """By pass, message, layer or step; with the flag all of its files are."""
    job = replace(few(), evaluation=False)
    argv = [*job.argv(schedule, False, data), *UNTIED]
    divided = functools.partial(train_in_shards, BOTH, None)
    plain, sharded = (entered(how, job, argv) for how in (train, divided))
    own = {file for file in sharded if 'vocabulary' in file or 'embedding' in file}
    parts = 'split_vocabulary', 'vocabulary_shards', 'split_embedding'
    assert own >= {f'mcore/techniques/{part}.py' for part in parts}
    own |= {'runtime/collectives.py'}
    assert own < sharded.keys() and not own & plain.keys()
    assert plain['runtime/executor.py'] > 0 < sharded['runtime/executor.py']


BY_TOKEN, SHARDED = 'tensor parallelism, loss by token', 'bf16, distributed optimizer'
JOBS = {
    BY_TOKEN: few('loss by token', tp=2, shared=False),
    'SwiGLU on 4 ranks': few('SwiGLU', pp=4, layers=1),
    SHARDED: few(bf16=True, distributed=True, overlap=True, dp=2),
    'learned positions': few('loss by token', tp=2, shared=False, positions='learned_absolute'),
}


@supports('the output layer on all ranks: {model}', 'zb-h1', TOLERANCE)
@some('model', [BY_TOKEN], *[*JOBS][1:3])
def test_models(trained, model):
    check(trained, JOBS[model], 'zb-h1', alike=model != BY_TOKEN)


@supports('the output layer and the embedding on all ranks: {case}', '1f1b', TOLERANCE)
@some('case', [f'tied, {BY_TOKEN}'], SHARDED, 'learned positions')
def test_both_layers_of(trained, case):
    job = JOBS[case.removeprefix('tied, ')]
    check(trained, job, '1f1b', None, BOTH, case.startswith('tied'))


@pytest.mark.te
@pytest.mark.full
@supports("the output layer on all ranks: {kind} of Transformer Engine's", 'zb-v', TOLERANCE)
@pytest.mark.parametrize('kind', ['sequence parallel', 'MLA', 'sequence parallel, embedding tied'])
def test_te_layers(te_ranks, data, kind):
    job = few('MLA', te=True) if kind == 'MLA' else few('SwiGLU', te=True, tp=2)
    tied = kind.endswith('tied')
    leaving = functools.partial(leave, te_ranks, data)
    check(leaving, job, 'zb-v', None, BOTH if tied else OUTPUT, tied, alike=False)


def first_call(argv):
    """Runs on a rank that is a whole pipeline: what is said of what cannot be, and of the cures."""
    import pretrain_gpt as script
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_zbpp.mcore.techniques import split_vocabulary as vocabulary

    config = small_config()

    class Own(script.GPTModel):
        def compute_language_model_loss(self, labels, logits):
            return super().compute_language_model_loss(labels, logits)

    class Capped(script.GPTModel):
        def _scale_logits(self, logits):
            return logits.tanh()

    def built(of=script.GPTModel, divided=True, ranks=1, both=False, **more):
        model = of(config, get_gpt_layer_local_spec(), vocab_size=24, max_sequence_length=4, **more)
        if ranks > 1:
            model.pg_collection = SimpleNamespace(mp=dist.group.WORLD, pp=dist.group.WORLD)
            model.pg_collection.mp = SimpleNamespace(size=lambda: ranks)
            model.pg_collection.pp = model.pg_collection.mp
        if divided:
            with mock.patch.object(dist, 'all_gather_object', as_on_all):
                divide(model, both, model if both else None)
        return model

    def as_on_all(found, own, group):
        found[:] = [own] * len(found)

    tokens = torch.arange(4)[None]

    def model_alone(model):
        return model(tokens, tokens, None, labels=tokens)

    def call_of(model, forward_step):
        given = {'data_iterator': None, 'seq_length': 4, 'micro_batch_size': 1}
        given |= {'num_microbatches': 1, 'model': model, 'forward_step_func': forward_step}
        return Call(Arguments(**given), WeightGradStore(), 1, torch.device('cpu'))

    def passes(forward_step):
        """F, S and T of a microbatch."""
        call = call_of(model := built(), forward_step)
        wraps = {'split_vocabulary': vocabulary.OutputWrapper}
        stage = ModelStage(call, model, None, None, True, wraps)
        shards = vocabulary.Shards([stage], [(4, 1)])
        packed = stage.forward(Pass(F, 0, 0), None)
        made = shards.logits(Pass(S, 1, 0), {'hidden': [packed]})
        shards.weight_gradient(Pass(T, 1, 0), {'statistics': [(made['statistics'],)]})
        assert len(call.results) == 1 and call.num_tokens == 4

    def read(input_ids):
        """D, of a model that is called with these tokens."""
        module = torch.nn.Module()
        vars(module).update(pre_process=True, forward=lambda input_ids: None)
        module.embedding = SimpleNamespace(word_embeddings=SimpleNamespace(tokens=None))
        call = call_of(module, lambda data, model: model(input_ids))
        stage = SimpleNamespace(call=call, model=module, data_iterator=None)
        assert embedding.EmbeddingWrapper(stage).read(Pass('D', 0, 0)) is input_ids

    def step(loss, labels=tokens, change=lambda output: output):
        def forward_step(data, model):
            output = change(model(tokens, tokens, None, labels=labels))
            return output, lambda losses: (loss(losses), torch.tensor(4), {})

        return forward_step

    def required(model):
        vocabulary.require([model], SimpleNamespace(collect_non_loss_data=False))

    script.initialize(script.parse_args(argv))
    try:
        return {
            'good': error_of(passes, step(torch.sum)) or error_of(required, built()),
            'no linear loss': error_of(passes, step(lambda losses: losses.square().sum())),
            'no labels': error_of(passes, step(torch.sum, labels=None)),
            'a changed output': error_of(passes, step(torch.sum, change=lambda output: 2 * output)),
            'no tokens': error_of(read, tokens) or error_of(read, None),
            'the embedding by itself': error_of(model_alone, built(both=True)),
            'no shards': error_of(required, built(divided=False)),
            'words': error_of(built, ranks=5) or str(error_of(built, ranks=3, divided=False)),
            'tied': error_of(built, share_embeddings_and_output_weights=True),
            'a loss of its own': error_of(built, of=Own),
            'gathered': error_of(built, parallel_output=False),
            'capped': error_of(built, of=Capped),
        }
    finally:
        forget_groups()


SAID = {
    'no linear loss': 'the loss function is not linear in the losses of tokens',
    'no labels': 'let forward_step call the model with labels and return what it gives',
    'a changed output': 'let forward_step call the model with labels and return what it gives',
    'no shards': 'build a GPTModel or HybridModel, once megatron_zbpp.enable() has been called',
    'words': 'a vocabulary of 24 words does not divide among 5 ranks: give '
    '--make-vocab-size-divisible-by 640',
    'tied': 'give --pipeline-vocab-parallel input+output, or --untie-embeddings-and-output-weights',
    'the embedding by itself': 'the embedding is on all pipeline ranks, and the model was called',
    'no tokens': 'let forward_step call the model with input_ids of a whole microbatch',
    'a loss of its own': 'Own has a loss of its own (label smoothing, distillation)',
    'capped': '_scale_logits: Capped scales or caps its logits, which shards do not',
    'gathered': "a ColumnParallelLinear that does more than Megatron's (logits asked for",
}


@pytest.mark.on_ranks(2)
def test_all_ranks_refuse_what_one_has(data):
    """The last one, an output layer of its own: else the others would wait for it."""
    import pretrain_gpt as script
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class Capped(ColumnParallelLinear):
        pass

    script.initialize(script.parse_args(few(pp=2).argv('megatron', False, data)))
    try:
        last, config = dist.get_rank() == 1, small_config(4, p=2)
        model = script.GPTModel(config, get_gpt_layer_local_spec(), 48, 12, not last, last)
        if last:
            model.output_layer.__class__ = Capped
        assert 'is a Capped that does more than' in error_of(divide, model)
    finally:
        forget_groups()


def test_refused_at_the_first_call(ranks, data):
    (found,) = ranks(1).run(first_call, few(pp=1).argv('megatron', False, data))
    assert found.pop('good') is None
    assert found.keys() == SAID.keys()
    for name, said in SAID.items():
        assert said in found[name]
        assert 'leave out --pipeline-vocab-parallel' in found[name]


SHARDS = 4
# shares of the largest value. A shard divides by its own sum and alpha corrects that: the same sums
# in another order. In bf16 the parts of dX cancel each other, and each rank rounds its own
NEAR = {
    torch.float32: {'losses': 2e-7, 'hidden': 1e-6, 'weight': 1e-6},
    torch.bfloat16: {'losses': 2e-7, 'hidden': SHARDS * 2**-7, 'weight': 2**-8},
}


@pytest.mark.parametrize('dtype', NEAR, ids=str)
def test_s_and_t_are_close_to_one_softmax(dtype):
    """To the bit are the logits that enter sums: the largest ones, and those of targets."""
    drawing = torch.Generator().manual_seed(3)
    weight = (torch.randn(48, 16, generator=drawing) * 0.5).to(dtype).requires_grad_()
    hidden = torch.randn(24, 16, generator=drawing).to(dtype).requires_grad_()
    targets, weights = torch.randint(48, (24,), generator=drawing), torch.linspace(-0.2, 1, 24)
    weights.clamp_(min=0)  # as of masked tokens
    logits = torch.cat([hidden @ rows.t() for rows in weight.chunk(SHARDS)], -1).float()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction='none')
    (losses * weights).sum().backward()
    ranks = [SimpleNamespace(rows=r, place=n) for n, r in enumerate(weight.detach().chunk(SHARDS))]
    logits_of = vocabulary.OutputShard._logits
    shards = [logits_of(each, hidden.detach(), targets) for each in ranks]
    whole = vocabulary.combined([made.statistics for made, _ in shards])
    assert torch.equal(whole[0], logits.amax(-1))
    assert torch.equal(whole[2], logits.gather(-1, targets[:, None])[:, 0])
    own = [p.away * vocabulary.share(m.statistics, whole) - p.there for m, p in shards]
    found = {
        'losses': (vocabulary.losses_of(whole), losses.detach()),
        'hidden': ((sum(o.to(dtype) for o in own) * weights[:, None]).to(dtype), hidden.grad),
        'weight': (
            torch.cat([vocabulary.weight_gradient(made, whole, weights) for made, _ in shards]),
            weight.grad,
        ),
    }
    for name, share in NEAR[dtype].items():
        ours, theirs = found[name]
        assert ours.dtype == theirs.dtype and theirs.abs().max() > 1
        assert (ours - theirs).abs().max() <= share * theirs.abs().max(), name


LAYERS = {VOCABULARY: OUTPUT, EMBEDDING: BOTH}
PAIRS = [
    pair for pair in product(TRAINED, ADDED) if LAYERS.keys() & {*pair} and pair not in CLASHES
]
HOST, SLICES = 'zb-v', 4


def evicting(layers, job, folder):
    """A file of a schedule with shards that keeps some of a rank's activations on its partner."""
    schedule = with_shards(build(HOST, job.pp, job.microbatches))
    schedule = with_embedding(schedule) if layers == BOTH else schedule
    costs = Costs.uniform(schedule.placement).with_times(S=(0.0,) * 6, T=(0.0,) * 6)
    limits = [0.6 * peak(schedule, costs)[0], *(99.0,) * (job.pp - 1)]
    made = with_eviction(schedule, range(schedule.num_stages), costs, limits)
    assert 'evict' in techniques_of(made)
    file = folder / 'evicting.json'
    file.write_text(made.to_json())
    return str(file)


@supports('{has}, beside {added}: GPT', HOST)
@some('has, added', [pair for pair in PAIRS if 'evict' in pair], *PAIRS)
def test_to_the_bit(trained, tmp_path, has, added):
    """As the output layer on all ranks by itself, in the same slices, under another schedule."""
    pair, job = (has, added), few()
    own = job
    layers = BOTH if EMBEDDING in pair else OUTPUT
    slices = SLICES if SLICED in pair else None
    if 'evict' in pair:
        own = replace(job, file=evicting(layers, job, tmp_path))
    more = {name: 'all' for name in pair if name in ASKED}
    found = trained(own, HOST, slices, layers, False, **more)
    plain = trained(job, '1f1b', slices, layers, False)
    assert_same(of_ranks(found, layers), of_ranks(plain, layers), job.iterations)
