"""Rows of programs that call `enable`, or ask for a schedule."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from unittest import mock

from cures.asking import (
    annealed,
    clipped_by,
    enable,
    programs,
    schedule,
    settings,
    split,
    stages,
    start_like,
    updating,
    versions,
)
from cures.row import row
from megatron_zbpp.ir import Placement


def plugin(method: str, *given: object, schedule: str = 'zb-v', **named: object) -> Callable:
    """A call of what `enable` returns."""

    def run() -> None:
        from megatron_zbpp.mcore.plugin import Plugin
        from megatron_zbpp.mcore.settings import Settings

        getattr(Plugin(Settings(schedule)), method)(*given, **named)

    return run


def without_plugin(deferred: bool) -> Callable:
    def run() -> None:
        from megatron_zbpp.mcore import preflight

        preflight.require_taken_back(SimpleNamespace(defer_embedding_wgrad_compute=deferred))

    return run


def offset(**chunk: int) -> Callable:
    """Megatron asks where the layers of a chunk begin."""

    def run() -> None:
        from megatron_zbpp.mcore.layout import StageLayout

        StageLayout(Placement.v(2), 'Et|t|t|tL').get_layer_offset(pp_rank=0, **chunk)

    return run


def moved(command_line: bool) -> Callable:
    """A Megatron whose command line is elsewhere."""

    def run() -> None:
        import megatron_zbpp
        from megatron_zbpp.mcore.command_line import arguments

        name = 'megatron.training.arguments'
        with mock.patch.dict(sys.modules, {name: ModuleType(name)}):
            if command_line:
                arguments.install()
            else:
                megatron_zbpp.enable('zb-v').disable()

    return run


def named(*names: str) -> Callable:
    """Families of one's own, each with another one's name, or its own."""

    def run() -> None:
        from megatron_zbpp.schedules import registry

        with (
            mock.patch.dict(registry._FAMILIES),
            mock.patch.dict(registry._NAMES),
        ):
            for each in names:

                def made(num_ranks: int, num_microbatches: int) -> None: ...

                made.__name__ = each
                registry.family(each, aliases=('shared',) if 'shared' in names else ())(made)

    return run


def technique(name: str, graph: str) -> Callable:
    def run() -> None:
        from megatron_zbpp import techniques

        made = SimpleNamespace(name=name, graph=ModuleType(graph))
        with mock.patch.dict(techniques._OWN), mock.patch.object(techniques, 'register_graph'):
            techniques.register(made)

    return run


def asked_for(name: str) -> Callable:
    def run() -> None:
        from megatron_zbpp import techniques

        techniques.find(name)

    return run


def frozen(**changes: object) -> Callable:
    """A file of `zbpp freeze`, changed by hand."""

    def run() -> None:
        from pathlib import Path

        import megatron_zbpp

        whole = json.loads(Path('freeze.json').read_text())
        Path('changed.json').write_text(json.dumps(whole | changes))
        megatron_zbpp.enable('zb-h1', freeze='changed.json').disable()

    return run


def _load(name: str) -> object:
    import megatron_zbpp

    return megatron_zbpp.load(name)


def _costs(name: str) -> object:
    from megatron_zbpp import Costs, build

    return Costs.uniform(build(name, 2, 4).placement)


PROGRAMS = {
    'no name': row(
        settings(schedule=5), 'the name of one (zbpp list --all)', settings(schedule='zb-v')
    ),
    'a file as a name': row(
        settings(schedule='zb-v.json'),
        'give megatron_zbpp.load of it',
        settings(schedule=lambda: _load('zb-v.json')),
    ),
    'chunks': row(
        settings(schedule='zb-v', num_chunks=8), '(num_chunks, --vpp', settings(schedule='zb-v')
    ),
    'a limit': row(
        settings(schedule='zb-v', memory_limit=3),
        'takes no memory_limit (given 3): leave it out, or use one that does: ',
        settings(schedule='zb-v'),
        settings(schedule='zb-1p', memory_limit=3),
    ),
    'a limit below one microbatch': row(
        settings(schedule='auto', memory_limit=0.5),
        'memory_limit is 0.5, but each plan holds one microbatch on a rank: give 1 or more',
        settings(schedule='auto', memory_limit=1),
    ),
    'updates': row(
        settings(schedule=updating),
        'has asynchronous updates: simulated, does not train yet: take a synchronous schedule, '
        'such as zb-v, or by its name pipedream, pipedream-2bw, paci, pipemare, wpipe, wpipe-joint',
        settings(schedule='1f1b'),
        settings(schedule='wpipe'),
    ),
    'post-validation of an asynchronous schedule': row(
        settings(schedule='paci', post_validation=True),
        'post_validation is True, but paci is asynchronous: leave it out, or take a synchronous '
        'schedule, such as zb-v',
        settings(schedule='paci'),
        settings(schedule='zb-v', post_validation=True),
    ),
    'two barriers': row(
        settings(schedule=functools.partial(split, 2)),
        'trains with one: make the schedule by zbpp plan --vocab-parallel',
        settings(schedule=split),
    ),
    'chunks of a schedule': row(
        settings(schedule=schedule('1f1b'), num_chunks=1),
        'num_chunks: the schedule that is given has its own: leave it out',
        settings(schedule=schedule('1f1b')),
    ),
    'an amount, planned': row(
        settings(schedule='auto', offload='half'),
        'offload: auto plans orders only: name a schedule, or give a plan',
        settings(schedule='zb-v', offload='half'),
    ),
    **{
        f'{name} of {value!r}': row(
            settings(schedule=family, **{name: value}),
            f'{name} is {value!r}: give a {kind} from {least} up',
            settings(schedule=family, **{name: least}),
        )
        for family, name, value, kind, least in (
            ('interleaved', 'num_chunks', 2.5, 'whole number', 1),
            ('zb-1p', 'memory_limit', -1, 'number', 0),
            ('zb-v', 'watchdog_timeout', 'long', 'number', 0),
            ('zb-v', 'watchdog_pause_timeout', -3, 'number', 0),
            ('zb-v', 'post_validation', 1.5, 'whole number', 0),
            ('auto', 'profile_iters', 0, 'whole number', 1),
            ('zb-v', 'kept_gib', -1, 'number', 0),
            ('zb-v', 'check_interval', -1, 'whole number', 0),
            ('zb-v', 'message_ctas', 0, 'whole number', 1),
        )
    },
    'a start': row(
        settings(same_start='tt|ttL'),
        'give True, False, or the stages',
        settings(same_start=True),
        settings(same_start=False),
        settings(same_start='Ett|ttL'),
    ),
    'seeds of dropout': row(
        settings(dropout_seeds=1),
        'give True or False',
        settings(dropout_seeds=True),
        settings(dropout_seeds=False),
    ),
    'a start of another model': row(
        start_like('Ett|tL'),
        'give the stages of stock Megatron with as many layers, or leave it True',
        start_like('Ett|ttL'),
        start_like(True),
    ),
    'a priority': row(
        settings(message_priority='low'),
        "give 'high' or 'group'",
        settings(message_priority='high'),
        settings(message_priority='group'),
    ),
    'a norm to clip by': row(
        settings(schedule='paci', clip='rank'),
        "give 'stage' or 'global'",
        settings(schedule='paci', clip='stage'),
        settings(schedule='paci', clip='global'),
    ),
    'a norm of a synchronous schedule': row(
        settings(schedule='zb-v', clip='stage'),
        'clips as Megatron does: leave it out',
        settings(schedule='zb-v'),
    ),
    'a norm that stages cannot have': row(
        clipped_by('stage'), "give 'global', which waits", clipped_by('global'), clipped_by(None)
    ),
    "a decay of PipeMare's": row(
        settings(schedule='pipemare', correction_decay=1.0),
        'give a number above 0, below 1',
        settings(schedule='pipemare', correction_decay=0.5),
    ),
    'copies of tied embeddings at two rates': row(
        versions(tied=True),
        'give --untie-embeddings-and-output-weights, --pipeline-anneal-steps 0',
        versions(),
        versions(tied=True, anneals=0),
    ),
    'rates without a scheduler': row(
        annealed(None), 'give the steps over which', annealed(5), annealed(0)
    ),
    'receives': row(
        settings(message_receives='soon'),
        "give 'early', 'late' or 'latest'",
        settings(message_receives='latest'),
    ),
    'an amount': row(
        settings(schedule='zb-v', recompute='most'),
        "recompute of 'most': give 'half', 'all' or a number of chunks",
        settings(schedule='zb-v', recompute='half'),
        settings(schedule='zb-v', recompute='all'),
        settings(schedule='zb-v', recompute=1),
    ),
    'too much of it': row(
        programs(schedule='zb-v', recompute=3),
        'give a number up to 2',
        programs(schedule='zb-v', recompute=2),
    ),
    'it twice': row(
        programs(schedule='po-h', offload='half'),
        'it is placed once: leave it out',
        programs(schedule='po-h'),
    ),
    'it behind copies': row(
        programs(schedule='po-h', recompute='half'),
        'take a schedule without it, such as po or 1f1b, and ask for both',
        programs(schedule='po', recompute='half', offload='half'),
        programs(schedule='1f1b', recompute='half', offload='half'),
    ),
    'it behind partners': row(
        programs(schedule='bpipe', ranks=4, offload='half'),
        'take a schedule that moves nothing, such as 1f1b',
        programs(schedule='1f1b', ranks=4, offload='half'),
    ),
    'more chunks than there are': row(
        enable(schedule='zb-v', recompute=9),
        'recompute of 9 chunks: a rank has 2: give a number up to 2',
        enable(schedule='zb-v', recompute=2),
    ),
    'pictures in no folder': row(
        enable(trace_dir=5), 'give the path of a folder, or None', enable(trace_dir='pictures')
    ),
    'pictures in a file': row(
        enable(trace_dir='a-file'),
        'which is a file: give the path of a folder',
        enable(trace_dir='pictures'),
    ),
    'freezing, planned': row(
        enable(schedule='auto', freeze='freeze.json'),
        'name that instead of auto',
        enable(schedule='zb-h1', freeze='freeze.json'),
    ),
    'freezing by no file': row(
        enable(schedule='zb-h1', freeze=5),
        'give the path of what zbpp freeze -o wrote, or None',
        enable(schedule='zb-h1', freeze='freeze.json'),
        enable(schedule='zb-h1', freeze=None),
    ),
    'freezing by another file': row(
        enable(schedule='zb-h1', freeze='plan.json'),
        'give what zbpp freeze -o wrote',
        enable(schedule='zb-h1', freeze='freeze.json'),
    ),
    'freezing after no steps': row(
        frozen(warm_up=0), 'warm_up 0: give steps, 1 or more', frozen(warm_up=1)
    ),
    'freezing of more than all': row(
        frozen(ratios={'0W0': 1.5}), 'give a number from 0 to 1', frozen(ratios={'0W0': 0.5})
    ),
    'freezing of another pass': row(
        frozen(ratios={'7W0': 1.0}),
        'is no pass of zb-h1 with weights',
        frozen(ratios={'1W0': 1.0}),
    ),
    'freezing of another schedule': row(
        programs(schedule='zb-v', freeze='freeze.json'),
        'plan it anew (zbpp freeze -o)',
        programs(schedule='zb-h1', freeze='freeze.json'),
    ),
    'flags': row(
        enable(flags=5), 'give names with values, such as vars(args)', enable(flags={'lr': 1})
    ),
    'one rank': row(
        programs(schedule='zb-v', ranks=1),
        'use more pipeline ranks or another schedule, such as 1f1b',
        programs(schedule='zb-v', ranks=2),
        programs(schedule='1f1b', ranks=1),
    ),
    'one rank of each replica': row(
        programs(schedule='dualpipe', ranks=1),
        'dualpipe needs at least 2 pipeline ranks a replica, not 1: use more pipeline ranks or',
        programs(schedule='dualpipe', ranks=2),
        programs(schedule='1f1b', ranks=1),
    ),
    'no microbatches': row(
        programs(0, schedule='zb-v'), 'give at least 1', programs(1, schedule='zb-v')
    ),
    'a name that is none': row(
        schedule(None), 'give one, such as zb-v (zbpp list)', schedule('zb-v')
    ),
    'no pairs': row(
        schedule('zb-v', together=True), 'use dualpipe-v', schedule('dualpipe-v', together=True)
    ),
    "slices of a family of one's own": row(
        programs(schedule='own_slices:made'),
        'give its function a parameter num_slices',
        programs(schedule='own_asked:made'),
    ),
    'no such slices': row(
        schedule('zb-h1', num_slices=2), 'it takes whole sequences', schedule('zb-h1')
    ),
    'costs of other stages': row(
        lambda: schedule('zb-v', costs=_costs('zb-h1'))(),
        'give one entry per stage, in model order',
        lambda: schedule('zb-v', costs=_costs('zb-v'))(),
    ),
    'a name twice': row(
        named('shared', 'other'),
        "which 'cures.of_programs:shared' has: choose another",
        named('one', 'other'),
    ),
    'a technique of the library': row(
        technique('offload', 'offload'), 'choose another name', technique('mine', 'mine')
    ),
    'a technique by another name': row(
        technique('mine', 'other'), 'give both one name', technique('mine', 'mine')
    ),
    'no technique': row(asked_for('prune'), 'use offload, recompute, evict', asked_for('offload')),
    'seconds': row(
        plugin('side_task', None, -1), 'give seconds, from 0 up', plugin('side_task', None, 1)
    ),
    'no seconds': row(
        plugin('side_task', None, 0),
        'give the seconds that a step takes',
        plugin('side_task', None, 1),
    ),
    'bytes': row(
        plugin('side_task', None, 1, memory=-1),
        'give bytes, from 0 up',
        plugin('side_task', None, 1, memory=0),
    ),
    'a side task beside an asynchronous schedule': row(
        plugin('side_task', None, 1, schedule='paci'),
        'take a synchronous schedule, such as zb-v',
        plugin('side_task', None, 1),
    ),
    'a step': row(plugin('resume', -1), 'a whole number from 0 up', plugin('resume', 0)),
    'built without the plugin': row(
        without_plugin(True),
        'call megatron_zbpp.enable() before the model is built, which takes it back',
        without_plugin(False),
    ),
    'a command line elsewhere': row(
        moved(True), 'call megatron_zbpp.enable() in the script instead', moved(False)
    ),
    'a layout of other stages': row(
        stages('Et|tt|tL'),
        'has 3 stages, but the schedule places 4 (2 ranks of 2): give that many, divided by |',
        stages('Et|t|t|tL'),
    ),
    'multi-token prediction before the loss': row(
        stages('Et|t|tm|tL'),
        'take a schedule that has one, such as zb-h1 or zb-interleaved, or put m before L in the '
        'last stage',
        stages('Et|t|t|tmL'),
        stages('Et|t|tm|tL', 'loop'),
    ),
    'no chunk': row(offset(), 'pass the index of the chunk', offset(vp_stage=1)),
}
