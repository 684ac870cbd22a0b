"""Activations on the host, on a partner or made again between F and B: to the bit as stock. So is
Megatron's own offloading under our schedules, where it fits; `test_refusals.py` has where not."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from events import before
from grids import grid, some
from models import KINDS, MICROBATCHES, Job, assert_same, reference, train
from ranks import RankError
from rows import row, trains
from supported import supports

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.guests import measurements
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.mcore import compat, session
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.schedules import FAMILIES, build, find
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.evict import with_eviction
from megatron_zbpp.techniques.offload import offloaded, with_offload
from megatron_zbpp.techniques.recompute import with_recomputation

EITHER = (False, True)
ALL = {'offload': 'all'}
# sequence parallelism, gradients reduced while passes run, experts
SHAPES = {
    'tp 2': {'tp': 2},
    'overlap': {'dp': 2, 'overlap': True},
    'distributed': {'dp': 2, 'distributed': True},
    'ep 2': {'kind': 'experts', 'dp': 2, 'ep': 2, 'overlap': True, 'distributed': True},
}


def planned(schedule, job):
    """From a file: some stages' activations leave, some are made again, some stay."""
    costs = with_copies(Costs.uniform(Placement.loop(2, 2)), 0.5)
    base = build(schedule, 2, job.microbatches)
    acting = with_offload(with_recomputation(base, [0], costs), [1], costs)
    assert {p.kind for _, p in acting} >= {'O', 'L', 'R'}
    return acting


def of_family(name, pp):
    """A row: schedules that move activations by themselves as they are, others with an offload."""
    made, fields = build(name, pp, MICROBATCHES), {'te': False, 'pp': pp}
    if not find(name).moves:
        made, fields = offloaded(made, 'all'), fields | ALL
    moves = any(p.kind in 'OE' for _, p in made)
    return row(': GPT on {pp} ranks', name, full=True, moves=moves, **fields)


test_identical_to_megatron = trains(
    'activation offload',
    {'te': False},
    # W split from B and not, its products added to `main_grad` or by Megatron
    row(
        ': GPT',
        ('zb-v', 'interleaved', 'po', 'v-half'),
        **{'offload': ('all', 'half', '1'), 'fused': EITHER, 'recompute': (None, 'full')},
    ),
    row(': GPT on 4 ranks', ('1f1b', 'zb-h1'), pp=4, **ALL),
    # as by the same schedule without: ranks draw in its order
    row(
        ': dropout, and an evaluation between',
        ('zb-v', 'interleaved'),
        **{'dropout': 0.1, 'recompute': (None, 'full'), 'than': 'same'} | ALL,
    ),
)
test_every_family = trains(
    'activation offload', {}, *(of_family(each.name, pp) for each in FAMILIES for pp in (2, 4))
)
test_a_plan_of_order_and_actions = trains(
    'plans of order and actions',
    {'te': False, 'moves': True, 'plan': planned},
    row(': GPT', 'gis'),
    row(': GPT', 'gis', fused=True, full=True),
)
test_te_layers = trains(
    'activation offload',
    {'bf16': True} | ALL,
    row(': {shape}', ('zb-v', 'interleaved'), shape=SHAPES, fused=(True, True, False)),
    row(
        ": {kind} of Transformer Engine's",
        ('zb-v', 'interleaved', 'po'),
        **{'kind': tuple(kind for kind in KINDS if kind != 'lengths'), 'bf16': (True, False)},
        **{'fused': (True, True, False, False), 'recompute': (None, 'selective')},
    ),
    # weights in FP8, and what is made of them for the backward, stay where they are
    row(
        ': FP8 {fp8}',
        ('zb-v', 'interleaved'),
        **{'fp8': ('weights', 'products'), 'fused': (True, False), 'distributed': True},
        full=True,
    ),
    te=True,
)


def measuring(job, argv, k):
    """As `train`; also what is said, and how many passes of each iteration have left."""
    said, left, ended = [], [], session.Session.on_iteration_end

    def noted(self, iteration):
        left.append(sum(p.kind == 'O' for _, p in iteration.schedule))
        ended(self, iteration)

    def equal(timeline):
        return Costs.uniform(timeline.schedule.placement)

    def slow(self):
        return dict.fromkeys(self.bytes, 1.5 * k / 2)  # of one of two chunks

    guest = measurements.OffloadTuner(1, said.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.Session, 'on_iteration_end', noted)
        patch.setattr(measurements, 'OffloadTuner', lambda _: guest)
        if k is not None:
            patch.setattr(measurements, 'measured_costs', equal)
            patch.setattr(ActivationStore, 'copy_times', slow)
        return train(job, argv), said, left


@supports('activation offload: as much as measured', '{schedule}')
@grid(schedule=('po', 'zb-v'), k=(3.0, None, 0.5), fused=(False, True))
def test_as_much_as_is_free(ranks, data, schedule, k, fused):
    """All of it goes while k is measured, then the share 1/k; all ranks switch together."""
    job = Job(te=False, offload='auto', fused=fused, iterations=4)
    found = ranks(2).run(measuring, job, job.argv(schedule, False, data), k)
    assert_same([trained for trained, _, _ in found], reference(ranks, data, job), job.iterations)
    (line,), (), left = found[0][1], found[1][1], found[0][2]
    assert all(each == left for _, _, each in found)
    assert left[0] == left[1] == left[2] > 0
    if k == 3:
        assert 'k = 3 measured: the share 1/k, 33%, that has the time goes' in line
        assert left[3] < left[0]
    elif k == 0.5:
        assert 'k = 0.5 measured: all that has the time goes to the host' in line
        assert left[3] >= left[0]
    else:
        assert line.startswith('offload auto: k = ') and 'activations of a full rank' in line


def evicting(schedule, job):
    """A plan whose first rank holds less than the schedule takes."""
    plain = build(schedule, job.pp, job.microbatches)
    costs = Costs.uniform(plain.placement)
    plan = with_eviction(plain, range(8), costs, [0.6 * peak(plain, costs)[0], *(99.0,) * 3])
    assert any(p.kind == 'E' for _, p in plan)
    return plan


# two ranks hold no more than the bound by themselves; where forwards run again, what goes to the
# partner is their input, of which the first stage has none (tests/dist/test_activations_leave.py
# has six ranks, of which the second evicts, too)
SIZES = {'2': {'pp': 2, 'moves': False}, '4': {}}
# and with dropout what its forward saves for that
DROPOUT = {'0.0': {'dropout': 0.0, 'moves': False}, '0.1': {'dropout': 0.1}}
test_partners = trains(
    'activations on a partner',
    {'te': False, 'pp': 4, 'moves': True},
    row(
        ': GPT on {p} ranks', 'bpipe', p=SIZES, fused=EITHER, recompute=(None, 'full'), bf16=EITHER
    ),
    row(
        ' with recompute passes: GPT',
        'bpipe',
        **{'again': 'all', 'dropout': DROPOUT, 'fused': EITHER},
    ),
    row(': a plan that evicts', ('zb-v', 'interleaved'), plan=evicting),
    row(': dropout, and an evaluation between', 'bpipe', dropout=0.1),
    row(': optimizer steps that do not wait', 'bpipe+post-validation'),
    row(': tp 2', 'bpipe', tp=2, bf16=True, full=True),
)
# microbatches of any length, on Megatron's own layers; tokens of experts
OF_PARTNERS = {
    'lengths': {'kind': 'lengths', 'te': False, 'fused': False},
    'experts': {'kind': 'experts'},
}
test_partners_te = trains(
    'activations on a partner',
    {'pp': 4, 'moves': True},
    row(': {kind}', 'bpipe', kind=OF_PARTNERS, fused=(True, True, False)),
    te=True,
)


LAYERS = (None, 'full')  # that Megatron itself recomputes within
# R draws the masks of its F; where stages are Megatron's, they are Megatron's own
MASKS = {'0.1': {'dropout': 0.1, 'than': 'same'}, 'none': {}}
PLACES = {'zb-h1': {'schedule': 'zb-h1'}, 'zb-v': {'schedule': 'zb-v', 'than': 'same'}}
# sequence parallelism; experts, and gradients that are reduced while passes run
TENSORS_AND_EXPERTS = {
    'tp 2': {'tp': 2},
    'ep 2': {'kind': 'experts', 'dp': 2, 'ep': 2, 'overlap': True, 'distributed': True},
}


def leaves(schedule, again, offload, masks, **others):
    """Half of them run again and one leaves: of one chunk a rank only masks do."""
    return (schedule, again, offload, masks) != ('1f1b', 'half', '1', 'none')


test_recompute_passes = trains(
    'recompute passes',
    {'te': False, 'again': 'all'},
    row(
        ': GPT',
        ('gpipe', 'zb-v', 'interleaved'),
        **{'again': ('all', 'half', '1'), 'fused': EITHER, 'recompute': LAYERS},
    ),
    row(': GPT on 4 ranks', ('gpipe', 'zb-v'), pp=4, full=True),
    row(
        ': dropout, and an evaluation between',
        PLACES,
        **{'dropout': 0.1, 'recompute': (None, *LAYERS)},
    ),
    row(': dropout with tensor parallelism', 'zb-h1', tp=2, dropout=0.1, full=True),
    # what is run ahead is run again; data and random states are those of then
    row(': optimizer steps that do not wait', 'zb-h1+post-validation', dropout=0.1),
    # what does not run again is on the host; where all of a rank does, the input is
    row(
        ' with offload: GPT',
        ('po', 'interleaved', '1f1b'),
        leaves,
        **{'again': ('1', 'all', 'half'), 'offload': ('all', 'half', '1')},
        **{'fused': (True, False), 'masks': MASKS},
    ),
    row(
        ' with offload: optimizer steps that do not wait',
        ('1f1b+post-validation', 'zb-h1+post-validation'),
        **{'offload': 'all', 'full': True},
    ),
)
test_recompute_passes_te = trains(
    'recompute passes',
    {'bf16': True, 'again': 'all'},
    row(': {shape}', ('zb-v', 'interleaved'), shape=TENSORS_AND_EXPERTS, fused=(True, False)),
    row(
        ": {kind} layers of Transformer Engine's",
        ('zb-v', 'interleaved'),
        **{'kind': tuple(kind for kind in KINDS if kind != 'lengths'), 'bf16': (True, False)},
        **{'fused': (True, True, False, False), 'recompute': (None, 'selective'), 'full': True},
    ),
    row(
        " with offload: {kind} layers of Transformer Engine's",
        ('zb-v', 'interleaved'),
        **{'kind': ('dense', 'experts', 'MLA'), 'tp': (1, 2), 'full': True},
        **{'fused': True, 'again': '1', 'offload': 'all'},
    ),
    te=True,
)


ATTENTION = ('core_attn', 'attn_proj', 'qkv_linear')
OF_EXPERTS = ('expert_fc1', 'moe_act')


def counting(job, argv):
    """As `train`; and how many tensors went to the host and came back."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as own

    handler, counts = own.ChunkOffloadHandler, {'offload': 0, 'reload': 0}
    own.PipelineOffloadManager.reset_instance()  # this process has trained others

    def note(name, *_, **__):
        counts[name] += 1

    noted = [(handler, name, partial(note, name)) for name in counts]
    with before(*noted), pytest.MonkeyPatch.context() as patch:
        if hasattr(handler, '_can_manage_tensor_for_offload'):  # it asks for the type `cuda`
            plain = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
            patch.setattr(handler, '_can_manage_tensor_for_offload', plain)
        return train(job, argv), counts


def chunk_of_one_layer():
    """Whether the second module of a layer counts for the next chunk, and whether that is known. In
    the second iteration: what runs back first has one layer, whose modules all stay."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as own

    manager = own.PipelineOffloadManager
    manager.reset_instance()
    init = manager.init_model_chunk_offload_handler
    more = {'pp_rank': 0} if compat.takes(init, 'pp_rank') else {}
    named = compat.takes(own.ChunkOffloadHandler.on_group_commit_forward, 'name')
    found = []
    for iteration in range(2):
        for _ in range(2 - iteration):  # microbatches; of the second iteration, one will do
            manager.get_instance().init_model_chunk_offload_handler(**more, vp_size=1, vp_stage=0)
            for name in ('core_attn', 'attn_proj'):
                handler = manager.get_instance().pop_forward_chunk(name=name)
                handler.on_group_start_forward(name)
                handler.on_group_commit_forward(*([name] if named else []), [])
                found.append(handler)
        if iteration == 0:
            manager.get_instance().reset()
    manager.reset_instance()
    return found[4] is not found[5], compat.forgets_modules_that_stay()


@pytest.mark.te
def test_chunks_of_one_layer(te_ranks, data):
    """Where the module that comes next would count for the next chunk, that is known, and refused:
    Megatron's own schedule fails there, too."""
    found = te_ranks(2).run(chunk_of_one_layer)
    assert found in ([(True, True)] * 2, [(False, False)] * 2)
    job = Job(bf16=True, modules=ATTENTION, layers=1)
    if found[0] == (True, True):
        with pytest.raises(RankError, match='two layers or more in each chunk'):
            te_ranks(2).run(counting, job, job.argv('1f1b', False, data))
    else:
        check(te_ranks, data, '1f1b', job)


def check(ranks, data, schedule, job):
    """As by Megatron's own 1F1B that keeps everything on the device."""
    plain = replace(job, modules=())
    found = ranks(job.size).run(counting, job, job.argv(schedule, False, data))
    assert_same([trained for trained, _ in found], reference(ranks, data, plain))
    for _, counts in found:
        assert counts['offload'] == counts['reload'] > 0


@pytest.mark.te
@supports("Megatron's own offloading of activations, {kind}", '{schedule}')
@some(
    'schedule, kind, fused, bf16',
    [
        ('zb-h1', 'dense', True, True),
        ('1f1b', 'grouped experts', False, True),
        ('interleaved', 'dense', False, True),
    ],
    ('1f1b', 'dense', True, False),
    ('zb-h2', 'grouped experts', False, True),
    ('zb-h1', 'grouped experts', False, False),
    ('zb-interleaved', 'dense', True, True),
    ('zeropp', 'dense', False, True),
)
def test_megatrons_own(te_ranks, data, schedule, kind, fused, bf16):
    """Where backwards come in the order that it takes for granted."""
    modules = ATTENTION + (OF_EXPERTS if kind == 'grouped experts' else ())
    layers = 2 * (1 if build(schedule, 2, 4).placement.num_chunks == 1 else 2)
    job = Job(kind, fused=fused, bf16=bf16, modules=modules, layers=layers)
    check(te_ranks, data, schedule, job)


@pytest.mark.te
@pytest.mark.full
@supports("Megatron's own offloading of activations, an evaluation between", '1f1b')
def test_megatrons_own_beside_an_evaluation(te_ranks, data):
    check(te_ranks, data, '1f1b', Job(bf16=True, dropout=0.1, modules=ATTENTION))
