"""The cure that a message of the flags or of `enable` names, applied to what raised it.

Each statement that raises before a training starts is in the table, or in a list with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import raised
from paths import ROOT

from megatron_zbpp.ir import Pass, Placement

# what is looked through for messages
ROOMS = (
    '__init__.py',
    'bridge.py',
    'launch.py',
    'mcore',
    'guests',
    'emulation',
    'analysis/posting.py',
    'partitioning/freeze_plans.py',
    'schedules/__init__.py',
    'schedules/registry.py',
    'techniques/__init__.py',
    'techniques/amounts.py',
    'techniques/composition.py',
    'ir/layout.py',
)
SIZES = '--num-layers 4 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4'


# ways to ask for something; each returns what is called on a rank


def flags(words: str, sizes: str = SIZES, **environment: str) -> Callable:
    """Megatron's own command line, where it is here, up to what our flags prepare."""

    def run() -> None:
        from megatron_zbpp.emulation.flags import cpu_flags
        from megatron_zbpp.mcore import enabled

        given = f'{sizes} {words}'.split()
        said = io.StringIO()
        try:
            with (
                mock.patch.object(sys, 'argv', ['script.py']),
                mock.patch.dict(os.environ, {'WORLD_SIZE': '2'} | environment),
                contextlib.redirect_stderr(said),
            ):
                _parser().parse_known_args([*cpu_flags(given), *given])
        except SystemExit as left:
            raise AssertionError(said.getvalue()) from left.__context__
        finally:
            if enabled.plugin is not None:
                enabled.plugin.disable()
            enabled.plugin = None

    return run


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from megatron_zbpp.mcore.command_line import arguments, launch_line

    if not launch_line._lacks():
        from megatron.training import arguments as megatrons

        arguments.install()
        parser = megatrons.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    else:
        parser = launch_line._own_parser()
        parser.parse_known_args = arguments._preparing(parser.parse_known_args)
    for name in ('--yaml-cfg', '--use-checkpoint-args', '--hybrid-layer-pattern'):
        if name not in parser._option_string_actions:  # of other releases
            parser.add_argument(name, nargs='?', const=True)
    return parser


def line(words: str, sizes: str = SIZES, gpus: int | None = None) -> Callable:
    """A launch line that `zbpp doctor` reads."""

    def run() -> None:
        from megatron_zbpp.mcore.command_line import dry_run, launch_line

        with mock.patch.dict(os.environ):
            os.environ.pop('WORLD_SIZE', None)
            dry_run.dry_run_of(launch_line.read(f'{words} {sizes}'.split(), gpus))

    return run


def benched(words: str) -> Callable:
    """A launch line that `zbpp bench` reads."""

    def run() -> None:
        from megatron_zbpp.mcore.command_line.bench import Bench

        with mock.patch.dict(os.environ):
            os.environ.pop('WORLD_SIZE', None)
            Bench.of(words.split())

    return run


def settings(**given: object) -> Callable:
    def run() -> None:
        from megatron_zbpp.mcore.settings import Settings

        made = {name: value() if callable(value) else value for name, value in given.items()}
        Settings(**made)

    return run


def start_like(stock: bool | str) -> Callable:
    """A model of a V whose start is to equal that of stock Megatron with these stages."""

    def run() -> None:
        from megatron_zbpp.mcore.same_start.reference import chains_of

        chains_of(stock, ['Et', 't', 't', 'tL'], Placement.v(2).reversed())

    return run


def enable(**given: object) -> Callable:
    def run() -> None:
        import megatron_zbpp

        megatron_zbpp.enable(**given).disable()

    return run


def schedule(name: str, **given: object) -> Callable:
    def run() -> object:
        from megatron_zbpp import build

        return build(name, 2, 4, **given)

    return run


def programs(microbatches: int = 4, ranks: int = 2, **given: object) -> Callable:
    """What a program asks of its schedule, once it knows its sizes."""

    def run() -> None:
        from megatron_zbpp.mcore.programs import Programs
        from megatron_zbpp.mcore.settings import Settings

        made = {name: value() if callable(value) else value for name, value in given.items()}
        Programs(Settings(**made)).lowered(ranks, microbatches, forward_only=False)

    return run


def split(barriers: int = 1) -> object:
    """A schedule with the output layer on all ranks."""
    from megatron_zbpp import build
    from megatron_zbpp.techniques.vocabulary.graph import split_vocabulary
    from megatron_zbpp.techniques.vocabulary.place import with_shards

    host = build('1f1b', 2, 4)
    if barriers == 1:
        return with_shards(host)
    return replace(host, graph=split_vocabulary(host.graph, 2, barriers))


def updating() -> object:
    """A schedule with updates inside an iteration."""
    from megatron_zbpp import build
    from megatron_zbpp.techniques.updates.graph import updating

    host = build('1f1b', 2, 4)
    return replace(host, graph=updating(host.graph))


def versions(tied: bool = False, anneals: int | None = None) -> Callable:
    """Weights of PipeMare on 4 ranks, in batches of one microbatch."""

    def run() -> None:
        import torch

        from megatron_zbpp.mcore.iteration.asynchronous import ForwardsInFlight, maker
        from megatron_zbpp.mcore.session import Session
        from megatron_zbpp.mcore.settings import Settings

        model = torch.nn.Linear(1, 1)
        model.share_embeddings_and_output_weights = tied
        session = Session(Settings('pipemare', anneal_steps=anneals))
        lowered = session.programs.lowered(4, 1, False)
        maker(session, ForwardsInFlight(session), lowered, [model], 0)

    return run


def annealed(steps: int | None) -> Callable:
    """A step of PipeMare without a scheduler."""

    def run() -> None:
        from megatron_zbpp.mcore.post_validation.annealed_rates import AnnealedRates
        from megatron_zbpp.mcore.session import Session
        from megatron_zbpp.mcore.settings import Settings

        rates = AnnealedRates(Session(Settings('pipemare', anneal_steps=steps)))
        with rates.annealed(SimpleNamespace(param_groups=[{'lr': 1.0}])):
            pass

    return run


def clipped_by(norm: str | None) -> Callable:
    """Stages that cannot have norms of their own."""

    def run() -> None:
        from megatron_zbpp.mcore.post_validation.stage_norm import StageNorms
        from megatron_zbpp.mcore.session import Session
        from megatron_zbpp.mcore.settings import Settings

        StageNorms(Session(Settings('paci', clip=norm))).decide(['embeddings are tied'])

    return run


def recipe(schedule: str = 'zb-v', change: Callable = lambda config: None, **model: object):
    """Megatron-Bridge's configuration, checked."""

    def run() -> None:
        from bridge import config

        from megatron_zbpp.mcore import bridge
        from megatron_zbpp.mcore.settings import Settings

        own = config(**model)
        change(own)
        with mock.patch.dict(os.environ, {'WORLD_SIZE': '2'}):
            bridge.prepare(own, Settings(schedule))

    return run


def stages(text: str, placement: str = 'v') -> Callable:
    """A layout in Megatron's language, which TransformerConfig is given."""

    def run() -> None:
        from megatron_zbpp.mcore.layout import StageLayout

        StageLayout(Placement.v(2) if placement == 'v' else Placement.loop(2, 2), text)

    return run


def nodes(words: str, **environment: str) -> Callable:
    """`--pair-partners` of the launcher."""

    def run() -> None:
        from megatron_zbpp.mcore.command_line.pairing import rank_for

        rank_for(words.split(), environment)

    return run


def refusal(how: dict, **values: object) -> Callable:
    """Settings that are refused with others, or by some schedules."""

    def run() -> None:
        from megatron_zbpp.mcore import refusals

        found = list(refusals.refused(SimpleNamespace(**values), **how))
        if found:
            raise NotImplementedError('. '.join(map(str, found)))

    return run


# files that rows name, in the folder where they run


def write_files() -> None:
    from pathlib import Path

    from megatron_zbpp import build
    from megatron_zbpp.ir import Schedule
    from megatron_zbpp.partitioning.freeze_plans import FreezePlan

    made = build('zb-h1', 2, 4)

    def write(name: str, text: str) -> None:
        Path(name).write_text(text)

    def plan(name: str, layout: str, **more: object) -> None:
        own = {'layout': layout, 'schedule': json.loads(made.to_json())}
        write(name, json.dumps(own | more))

    plan('plan.json', 'Ett|ttL')
    plan('of-five.json', 'Ettt|ttL')
    plan('of-mtp.json', 'Ett|ttmL')
    plan('letters.json', 'tt|tt')
    plan('selective.json', 'Ett|ttL', selective=True)
    plan('hybrid.json', 'E**|*-L')
    write('zb-v.json', build('zb-v', 2, 4).to_json())
    write('sliced.json', build('seq1f1b', 2, 4, num_slices=2).to_json())
    write('of-three.json', build('zb-v', 3, 4).to_json())
    write('of-eight.json', build('zb-v', 2, 8).to_json())
    write('1f1b.json', build('1f1b', 2, 4).to_json())
    write('broken.json', '{"schedule": 1}')
    write('freeze.json', FreezePlan(made, (), 1.0, 1.0).to_json())
    write('freeze-1f1b.json', FreezePlan(build('1f1b', 2, 4), (), 1.0, 1.0).to_json())
    cut = FreezePlan(build('seq1f1b-zb', 2, 4, num_slices=2), (), 1.0, 1.0)
    write('freeze-slices.json', cut.to_json())
    inner = build('1f1b', 3, 4)
    for name, order in (('inner', (0, 2, 1)), ('outer', (0, 1, 2))):
        ranks = [inner.passes[order.index(rank)] for rank in range(3)]
        write(f'{name}.json', Schedule.of(name, Placement(order), 4, ranks).to_json())
    write('own_yaml.py', 'import yaml\n')
    write('own_nothing.py', '')
    write('own_needs.py', 'import nowhere_at_all\n')
    write('own_fails.py', 'import megatron_zbpp.schedules\nmegatron_zbpp.schedules.lost\n')
    head = 'from megatron_zbpp.schedules import build, family\n\n'
    head += '@family("made")\ndef made(num_ranks, num_microbatches):\n    return {}\n'
    write('own_text.py', head.format('"a text"'))
    write('own_more.py', head.format('build("1f1b", num_ranks, num_microbatches + 1)'))
    write('own_slices.py', head.format('build("seq1f1b", num_ranks, num_microbatches)'))
    asked = head.replace('microbatches)', 'microbatches, num_slices=4)')
    kept = 'build("seq1f1b", num_ranks, num_microbatches, num_slices=num_slices)'
    write('own_asked.py', asked.format(kept))
    write('own_right.py', head.format('build("1f1b", num_ranks, num_microbatches)'))
    Path('a-file').write_text('')


@dataclass(frozen=True)
class Row:
    """A message, and what is done about it.

    Attributes:
        given: raises it.
        said: words of it.
        cures: what it names, each done by itself: all of them pass.
        refuses: whether the release of Megatron that is here has the reason for it.
    """

    given: Callable
    said: str
    cures: tuple[Callable, ...]
    refuses: Callable[[], bool]


def row(
    given: Callable, said: str, *cures: Callable, refuses: Callable[[], bool] = lambda: True
) -> Row:
    return Row(given, said, cures, refuses)


ZB_V = flags('--pipeline-schedule zb-v')
EARLY = '--pipeline-schedule zb-v --enable-optimizer-post-validation'
LAYERS = SIZES.replace('--num-layers 4', '--num-layers {}')
HYBRID = SIZES.replace('--num-layers 4', '--hybrid-layer-pattern {}')
NODE = {'RANK': '0', 'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '2'}
PIPELINE_OF_4 = '--pipeline-model-parallel-size 4'
NODE_OF_4 = {'RANK': '0', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '4', 'WORLD_SIZE': '4'}
LAST_NODE = NODE_OF_4 | {'RANK': '3', 'LOCAL_WORLD_SIZE': '1'}
BIG = (
    '--pipeline-schedule 1f1b --pipeline-model-parallel-size 4 --global-batch-size 8 '
    '--num-layers 800 --hidden-size 65536 --num-attention-heads 64 --seq-length 1048576'
)

FOUND = '--pipeline-schedule zb-v --pipeline-slices auto --seq-length 512'
SHAPE = '--hidden-size 64 --num-attention-heads 4'
STOCK = ROOT / 'tests' / 'support' / 'commands.py'  # any script without a word of ours
PATCHED = ROOT / 'examples' / 'gpt' / 'pretrain_gpt.py'
LONG = '--pipeline-schedule zb-v --seq-length 16 --pipeline-slices {}'.format

UNTIED = '--untie-embeddings-and-output-weights'
OUTPUT = f'--pipeline-schedule {{}} --pipeline-vocab-parallel output {UNTIED}'.format

FLAGS = {
    'another layer': row(
        flags('--pipeline-schedule zb-v --pipeline-vocab-parallel input'),
        "--pipeline-vocab-parallel is 'input': give 'output'",
        flags(OUTPUT('zb-v')),
    ),
    **{
        f'the output layer on all ranks and {asked}': row(
            flags(f'{OUTPUT(schedule)} --seq-length 16 {asked}'),
            ': it does not train with the output layer on all ranks yet: leave it out, or --pipe',
            flags(OUTPUT('zb-v')),
            flags(f'--pipeline-schedule {schedule} --seq-length 16 {asked}'),
        )
        for schedule, asked in (('zb-v', '--enable-optimizer-post-validation'),)
    },
    'too many slices': row(flags(LONG(17)), 'give at most 16', flags(LONG(16))),
    'slices that do not sum': row(
        flags(LONG('8,4')), 'give sizes that sum to that', flags(LONG('8,4,4')), flags(LONG(2))
    ),
    'no slices': row(flags(LONG('8,x')), 'give how many, such as 4', flags(LONG(4))),
    'slices to be found, of a model of unknown size': row(
        flags(FOUND),
        'give the tokens of each slice',
        flags(f'{FOUND} {SHAPE}'),
        flags(FOUND.replace('auto', '256,256')),
    ),
    'slices to be found, of sequences of unknown length': row(
        flags(f'{SHAPE} {FOUND.partition("--seq")[0]}'),
        'give it, or the tokens of each slice',
        flags(f'{SHAPE} {FOUND}'),
    ),
    'slices of auto': row(
        flags('--pipeline-schedule auto --seq-length 16 --pipeline-slices 2'),
        'name a schedule, or give a plan that zbpp plan --slices has made',
        flags(LONG(2)),
        flags('--pipeline-schedule-file sliced.json --seq-length 16'),
    ),
    'slices of a file': row(
        flags('--pipeline-schedule-file sliced.json --seq-length 16 --pipeline-slices 3'),
        'give tokens of 2, or leave it out',
        flags('--pipeline-schedule-file sliced.json --seq-length 16'),
        flags('--pipeline-schedule-file sliced.json --seq-length 16 --pipeline-slices 12,4'),
    ),
    'no such schedule': row(flags('--pipeline-schedule zb-w'), "did you mean 'zb-v' or ", ZB_V),
    'chunks': row(
        flags('--pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 8'),
        'leave --num-virtual-stages-per-pipeline-rank out, or give it 2',
        ZB_V,
        flags('--pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 2'),
    ),
    'chunks by layers': row(
        flags('--pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 2'),
        'leave --num-layers-per-virtual-pipeline-stage out',
        ZB_V,
    ),
    'chunks by layout': row(
        flags('--pipeline-schedule zb-h1 --pipeline-model-parallel-layout Et|t|t|tL'),
        'leave --pipeline-model-parallel-layout out, or give it 2 stages',
        flags('--pipeline-schedule zb-h1'),
        flags('--pipeline-schedule zb-h1 --pipeline-model-parallel-layout Ett|ttL'),
    ),
    'chunks by pattern': row(
        flags('--pipeline-schedule zb-h1', HYBRID.format('*|*|*|-')),
        'give --hybrid-layer-pattern 2 segments',
        flags('--pipeline-schedule zb-h1', HYBRID.format('**|*-')),
    ),
    'a limit of none': row(
        flags('--pipeline-schedule zb-h1 --pipeline-schedule-memory-limit 2'),
        '--pipeline-schedule-memory-limit (given 2.0): leave it out, or use one that does: '
        '1f1b-pb, kfkb, zb-1p, zb-2p',
        flags('--pipeline-schedule zb-h1'),
        flags('--pipeline-schedule zb-1p --pipeline-schedule-memory-limit 2'),
    ),
    'a limit': row(
        flags('--pipeline-schedule zb-1p --pipeline-schedule-memory-limit 0.5'),
        '0.5 is too small',
        flags('--pipeline-schedule zb-1p --pipeline-schedule-memory-limit 2'),
    ),
    'a time': row(
        flags('--pipeline-schedule zb-v --pipeline-watchdog-timeout -1'),
        '--pipeline-watchdog-timeout is -1.0: give a number from 0 up',
        flags('--pipeline-schedule zb-v --pipeline-watchdog-timeout 0'),
    ),
    'iterations': row(
        flags('--pipeline-schedule auto --pipeline-schedule-profile-iters 0'),
        '--pipeline-schedule-profile-iters is 0: give a whole number from 1 up',
        flags('--pipeline-schedule auto --pipeline-schedule-profile-iters 1'),
    ),
    'kept': row(
        flags(f'{EARLY} --optimizer-post-validation-kept-gib -1'),
        '--optimizer-post-validation-kept-gib is -1.0: give a number from 0 up',
        flags(f'{EARLY} --optimizer-post-validation-kept-gib 0'),
    ),
    'clean steps': row(
        flags(f'{EARLY} --optimizer-post-validation-clean-steps -1'),
        '--optimizer-post-validation-clean-steps is -1: give a whole number from 0 up',
        flags(f'{EARLY} --optimizer-post-validation-clean-steps 0'),
    ),
    'priority': row(
        flags('--pipeline-schedule zb-v --pipeline-message-priority low'),
        "--pipeline-message-priority is 'low': give 'high' or 'group'",
        flags('--pipeline-schedule zb-v --pipeline-message-priority high'),
        flags('--pipeline-schedule zb-v --pipeline-message-priority group'),
    ),
    'the first iteration, both ways': row(
        flags('--pipeline-schedule zb-v --pipeline-prewarm --no-pipeline-prewarm'),
        'give one of them',
        flags('--pipeline-schedule zb-v --pipeline-prewarm'),
        flags('--pipeline-schedule zb-v --no-pipeline-prewarm'),
    ),
    'the first iteration, or not': row(
        settings(prewarm='GPU'),
        'give True, False, or None',
        settings(prewarm=True),
        settings(prewarm=False),
    ),
    'receives': row(
        flags('--pipeline-schedule zb-v --pipeline-message-receives soon'),
        "--pipeline-message-receives is 'soon': give 'early', 'late' or 'latest'",
        *(
            flags(f'--pipeline-schedule zb-v --pipeline-message-receives {when}')
            for when in ('early', 'late', 'latest')
        ),
    ),
    'pictures': row(
        flags('--pipeline-schedule zb-v --pipeline-trace-dir a-file'),
        "--pipeline-trace-dir is 'a-file', which is a file: give the path of a folder",
        flags('--pipeline-schedule zb-v --pipeline-trace-dir a-folder'),
    ),
    'an amount': row(
        flags('--pipeline-schedule zb-v --pipeline-offload some'),
        "--pipeline-offload of 'some': give 'half', 'all', 'auto' or a number of chunks",
        *(
            flags(f'--pipeline-schedule zb-v --pipeline-offload {amount}')
            for amount in ('half', 'all', 'auto', '1')
        ),
    ),
    'too much of it': row(
        flags('--pipeline-schedule zb-v --pipeline-recompute 3'),
        'recompute of 3 chunks: a rank has 2: give a number up to 2',
        flags('--pipeline-schedule zb-v --pipeline-recompute 2'),
    ),
    'it twice': row(
        flags('--pipeline-schedule po-h --pipeline-offload half'),
        'offload: po-h has offload already, and it is placed once: leave it out',
        flags('--pipeline-schedule po-h'),
    ),
    'it, planned': row(
        flags('--pipeline-schedule auto --pipeline-recompute half'),
        '--pipeline-recompute: auto plans orders only: name a schedule',
        flags('--pipeline-schedule zb-v --pipeline-recompute half'),
    ),
    'it without a schedule': row(
        flags('--pipeline-offload half'),
        '--pipeline-offload is about a --pipeline-schedule: give that, too',
        flags('--pipeline-offload half --pipeline-schedule zb-v'),
    ),
    'a trace without a schedule': row(
        flags('--pipeline-trace-dir traces --enable-optimizer-post-validation'),
        'are about a --pipeline-schedule: give that, too',
        flags('--pipeline-trace-dir traces --pipeline-schedule zb-v'),
    ),
    'pictures where nothing can be written': row(
        flags('--pipeline-schedule zb-v --pipeline-trace-dir /proc/nope'),
        "--pipeline-trace-dir is '/proc/nope', but nothing can be written in /proc (",
        flags('--pipeline-schedule zb-v --pipeline-trace-dir pictures/of/a/run'),
    ),
    'freezing, planned': row(
        flags('--pipeline-schedule auto --pipeline-freeze freeze.json'),
        'name that instead of auto',
        flags('--pipeline-schedule zb-h1 --pipeline-freeze freeze.json'),
    ),
    'freezing by another file': row(
        flags('--pipeline-schedule zb-h1 --pipeline-freeze plan.json'),
        'give what zbpp freeze -o wrote',
        flags('--pipeline-schedule zb-h1 --pipeline-freeze freeze.json'),
    ),
    'freezing of another schedule': row(
        flags('--pipeline-schedule zb-v --pipeline-freeze freeze.json'),
        'plan it anew (zbpp freeze -o)',
        flags('--pipeline-schedule zb-h1 --pipeline-freeze freeze.json'),
    ),
    'freezing of slices': row(
        flags(
            '--pipeline-schedule seq1f1b-zb --pipeline-slices 2 --seq-length 16 '
            '--pipeline-freeze freeze-slices.json'
        ),
        'drop --pipeline-freeze, or take a schedule of whole sequences',
        flags('--pipeline-schedule seq1f1b-zb --pipeline-slices 2 --seq-length 16'),
        flags('--pipeline-schedule zb-h1 --pipeline-freeze freeze.json'),
    ),
    'freezing without W': row(
        flags('--pipeline-schedule 1f1b --pipeline-freeze freeze-1f1b.json'),
        'take a schedule that has, such as zb-h1',
        flags('--pipeline-schedule zb-h1 --pipeline-freeze freeze.json'),
    ),
    'other forks, two': row(
        flags('--enable-1f1b-v --enable-zbh1-pipeline'),
        'flags that mean 1f1b-v and zb-h1: give --pipeline-schedule instead',
        flags('--pipeline-schedule 1f1b-v'),
    ),
    'other forks, a number': row(
        flags('--enable-zero-bubble --zero-bubble-max-pending-backward most'),
        '--zero-bubble-max-pending-backward most: give a number, or auto',
        flags('--enable-zero-bubble --zero-bubble-max-pending-backward 4'),
        flags('--enable-zero-bubble --zero-bubble-max-pending-backward auto'),
    ),
    'other forks, and ours': row(
        flags('--pipeline-schedule zb-h1 --zero-bubble-v-schedule'),
        '--pipeline-schedule zb-h1 and a flag that means zb-v: give one of them',
        flags('--pipeline-schedule zb-h1'),
        flags('--zero-bubble-v-schedule'),
    ),
    'a name and a file': row(
        flags('--pipeline-schedule zb-v --pipeline-schedule-file plan.json'),
        '--pipeline-schedule zb-v and --pipeline-schedule-file plan.json: give one of them',
        ZB_V,
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a file as a name': row(
        flags('--pipeline-schedule plan.json'),
        'its path to --pipeline-schedule-file',
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a file of other microbatches': row(
        flags('--pipeline-schedule-file of-eight.json'),
        'schedule zb-v is for 8 microbatches, not 4: change the parallel or batch sizes, or take a '
        'schedule by its name',
        flags('--pipeline-schedule-file of-eight.json --global-batch-size 8'),
        ZB_V,
    ),
    'a file of other ranks': row(
        flags('--pipeline-schedule-file of-three.json'),
        'is for 3 pipeline ranks, not 2: change the parallel',
        flags(
            '--pipeline-schedule-file of-three.json --pipeline-model-parallel-size 3',
            LAYERS.format(6),
            WORLD_SIZE='3',
        ),
    ),
    'a file of other chunks': row(
        flags('--pipeline-schedule-file zb-v.json --pipeline-model-parallel-layout Ett|ttL'),
        'give as many stages in --pipeline-model-parallel-layout, or leave such flags out',
        flags('--pipeline-schedule-file zb-v.json --pipeline-model-parallel-layout Et|t|t|tL'),
        flags('--pipeline-schedule-file zb-v.json'),
    ),
    'a file with the loss in the middle': row(
        flags('--pipeline-schedule-file inner.json --pipeline-model-parallel-size 3'),
        'inner places the last stage on rank 1: Megatron needs it on the first or last rank (0 or '
        '2)',
        flags('--pipeline-schedule-file outer.json --pipeline-model-parallel-size 3'),
    ),
    'an odd number of replicas': row(
        flags('--pipeline-schedule chimera'),
        'give an even number of them, by twice or half the ranks',
        flags('--pipeline-schedule chimera', WORLD_SIZE='4'),
    ),
    'a plan of other layers': row(
        flags('--pipeline-schedule-file of-five.json'),
        '--num-layers 4, but the layout Ettt|ttL of of-five.json has 5: partition the layers',
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a plan of other letters': row(
        flags('--pipeline-schedule-file letters.json'),
        'with E first and L last',
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a plan and a layout': row(
        flags('--pipeline-schedule-file plan.json --pipeline-model-parallel-layout Ettt|tL'),
        '--pipeline-model-parallel-layout Ettt|tL, but plan.json was planned for Ett|ttL: leave '
        'the flag out',
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a plan that counts on recomputation': row(
        flags('--pipeline-schedule-file selective.json'),
        'give --recompute-granularity selective, or plan without --actions selective',
        flags('--pipeline-schedule-file selective.json --recompute-granularity selective'),
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a plan of another pattern': row(
        flags('--pipeline-schedule-file plan.json', HYBRID.format('***-')),
        '--hybrid-layer-pattern ***-, but the layout Ett|ttL of plan.json has other layers',
        flags('--pipeline-schedule-file hybrid.json', HYBRID.format('***-')),
    ),
    'arguments of a file': row(
        flags('--pipeline-schedule zb-v --yaml-cfg a.yaml'),
        '--yaml-cfg does not work with --pipeline-schedule: give the arguments as flags',
        ZB_V,
    ),
    'arguments of a checkpoint': row(
        flags('--pipeline-schedule zb-v --use-checkpoint-args'),
        'give the arguments of the checkpoint as flags',
        ZB_V,
    ),
    'no layers': row(
        flags('--pipeline-schedule zb-v', SIZES.partition(' 4 ')[2]),
        '--num-layers is missing: give how many layers the model has',
        ZB_V,
    ),
    'a layout of other letters': row(
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|q|tL'),
        'give the letters E, t, m, L and |',
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|t|tL'),
    ),
    'a layout that does not divide': row(
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|ttL'),
        'do not divide among 2 pipeline ranks: give each rank as many, divided by |',
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|t|tL'),
    ),
    'chunks that do not divide': row(
        flags('--pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 3'),
        '--num-layers-per-virtual-pipeline-stage 3 does not divide 4 layers among 2 pipeline '
        'ranks: leave it out, or change --num-layers',
        ZB_V,
        flags(
            '--pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 3', LAYERS.format(12)
        ),
    ),
    'a first rank that does not divide': row(
        flags('--pipeline-schedule zb-v --decoder-first-pipeline-num-layers 1'),
        '--decoder-first-pipeline-num-layers 1 does not divide among 2 chunks: give a multiple, or '
        '--pipeline-model-parallel-layout',
        flags('--pipeline-schedule zb-v --decoder-first-pipeline-num-layers 2'),
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout E|tt|t|tL'),
    ),
    'a last rank and a layout': row(
        flags(
            '--pipeline-schedule zb-v --decoder-last-pipeline-num-layers 2 '
            '--pipeline-model-parallel-layout Et|t|t|tL'
        ),
        'drop --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers',
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|t|tL'),
    ),
    'too few layers': row(
        flags('--pipeline-schedule zb-v', LAYERS.format(3)),
        'give each stage a layer (--num-layers), or use fewer pipeline ranks or a schedule with '
        'fewer chunks',
        flags('--pipeline-schedule zb-v', LAYERS.format(4)),
        flags('--pipeline-schedule zb-h1', LAYERS.format(3)),
    ),
    'segments': row(
        flags('--pipeline-schedule zb-interleaved', HYBRID.format('**|*-')),
        '--hybrid-layer-pattern has 2 segments, but the schedule places 4 stages: give that many, '
        'divided by |',
        flags('--pipeline-schedule zb-interleaved', HYBRID.format('*|*|*|-')),
    ),
    'what is refused': row(
        flags('--pipeline-schedule zb-v --tp-comm-overlap'),
        'drop --tp-comm-overlap, or take a schedule without W passes, such as 1f1b or interleaved',
        ZB_V,
        flags('--pipeline-schedule 1f1b --tp-comm-overlap'),
        flags('--pipeline-schedule interleaved --tp-comm-overlap'),
    ),
    'memory of the host': row(
        flags(f'--pipeline-offload all {BIG}', **NODE_OF_4),
        'offload fewer chunks, put fewer of the first pipeline ranks on one node',
        flags(BIG, **NODE_OF_4),
        flags(f'--pipeline-offload all {BIG}', **LAST_NODE),
    ),
    'two routes that are not said': row(
        flags('--pipeline-schedule two_ways:two-ways'),
        'say num_routes above it, in @family',
        flags('--pipeline-schedule chimera', WORLD_SIZE='4'),
    ),
    'one of your own that is nowhere': row(
        flags('--pipeline-schedule own_nowhere:made'),
        "there is no module 'own_nowhere': install it on every host, or name its folder in "
        'PYTHONPATH',
        flags('--pipeline-schedule own_right:made'),
    ),
    'one of your own that is not named': row(
        flags('--pipeline-schedule own_nothing:made'),
        "module 'own_nothing' registers none; put @family(...) above the function",
        flags('--pipeline-schedule own_right:made'),
    ),
    'one of your own that lacks a package': row(
        flags('--pipeline-schedule own_needs:made'),
        "importing 'own_needs' fails: No module named 'nowhere_at_all'",
        flags('--pipeline-schedule own_right:made'),
    ),
    'one of your own that fails': row(
        flags('--pipeline-schedule own_fails:made'),
        "importing 'own_fails' fails: AttributeError",
        flags('--pipeline-schedule own_right:made'),
    ),
    'one of your own that is no schedule': row(
        flags('--pipeline-schedule own_text:made'),
        'own_text:made made str: return a Schedule from it',
        flags('--pipeline-schedule own_right:made'),
    ),
    'one of your own of another size': row(
        flags('--pipeline-schedule own_more:made'),
        'return one of the 2 and 1 that it was asked for',
        flags('--pipeline-schedule own_right:made'),
    ),
}
LINES = {
    'a flag misspelt': row(
        line('--pipeline-shedule zb-v'),
        '--pipeline-shedule is not known: did you mean --pipeline-schedule?',
        line('--pipeline-schedule zb-v'),
    ),
    'a script that does not know our flags': row(
        line(f'torchrun {STOCK} --pipeline-schedule zb-v'),
        'does not know --pipeline-schedule: write -m megatron_zbpp.launch before it',
        line(f'torchrun -m megatron_zbpp.launch {STOCK} --pipeline-schedule zb-v'),
        line(f'torchrun {PATCHED} --pipeline-schedule zb-v'),
    ),
    "the launcher's option behind the script": row(
        line(f'torchrun -m megatron_zbpp.launch {STOCK} --cpu --pipeline-schedule zb-v'),
        'is no flag of',
        line(f'torchrun -m megatron_zbpp.launch --cpu {STOCK} --pipeline-schedule zb-v'),
    ),
    'a bench of flags alone': row(
        benched(SIZES),
        'the launch line names no script: give all of it, such as torchrun',
        benched(f'torchrun pretrain_gpt.py {SIZES}'),
    ),
    'no number': row(
        line('--pipeline-schedule zb-v --pipeline-watchdog-timeout soon'),
        "--pipeline-watchdog-timeout: 'soon' is no number: give a number from 0 up",
        line('--pipeline-schedule zb-v --pipeline-watchdog-timeout 1'),
    ),
    'bytes where activations count': row(
        line('--pipeline-schedule auto --pipeline-schedule-memory-limit 60GiB'),
        "'60GiB' is no number: give a number from 0 up, in activations of one microbatch",
        line('--pipeline-schedule auto --pipeline-schedule-memory-limit 60'),
    ),
    'no number of processes': row(
        line('torchrun --nproc-per-node gpu pretrain_gpt.py --pipeline-schedule zb-v'),
        '--nproc-per-node gpu is no number: give --gpus',
        line('torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-schedule zb-v'),
        line('--pipeline-schedule zb-v', gpus=2),
    ),
    'GPUs that do not divide': row(
        line('--pipeline-schedule zb-v', gpus=3),
        '3 GPUs do not divide by tensor 1 x context 1 x pipeline 2 parallel: change a size, or '
        '--gpus',
        line('--pipeline-schedule zb-v', gpus=2),
    ),
    'no batch': row(
        line('--pipeline-schedule zb-v', SIZES.replace('--micro-batch-size 1', '')),
        '--micro-batch-size is missing: give how many samples a microbatch has',
        line('--pipeline-schedule zb-v'),
    ),
    'a batch that does not divide': row(
        line('--pipeline-schedule zb-v --micro-batch-size 3', SIZES.replace('-size 1', '-size 3')),
        '--global-batch-size 4 does not divide by 3 (--micro-batch-size 3 x 1 data parallel): give '
        'a multiple',
        line('--pipeline-schedule zb-v', SIZES.replace('-size 1', '-size 2')),
    ),
    'pairs without torchrun': row(
        nodes(PIPELINE_OF_4), '--pair-partners needs RANK', nodes(PIPELINE_OF_4, **NODE)
    ),
    'pairs that another flag parts': row(
        nodes(f'{PIPELINE_OF_4} --use-tp-pp-dp-mapping', **NODE),
        'which --use-tp-pp-dp-mapping puts side by side: give one of them',
        nodes(PIPELINE_OF_4, **NODE),
    ),
    'pairs of other numbers': row(
        nodes(PIPELINE_OF_4, **NODE | {'WORLD_SIZE': '6'}),
        '6 ranks are not a multiple of 4 pipeline ranks',
        nodes(PIPELINE_OF_4, **NODE | {'WORLD_SIZE': '8'}),
        nodes('--pipeline-model-parallel-size 3', **NODE | {'WORLD_SIZE': '6'}),
    ),
    'pairs on odd nodes': row(
        nodes(PIPELINE_OF_4, **NODE | {'WORLD_SIZE': '12', 'LOCAL_WORLD_SIZE': '3'}),
        'give nodes an even number of processes, a multiple of twice the tensor-parallel size',
        nodes(PIPELINE_OF_4, **NODE | {'WORLD_SIZE': '12', 'LOCAL_WORLD_SIZE': '2'}),
    ),
}


def plugin(method: str, *given: object, schedule: str = 'zb-v', **named: object) -> Callable:
    """A call of what `enable` returns."""

    def run() -> None:
        from megatron_zbpp.mcore.plugin import Plugin
        from megatron_zbpp.mcore.settings import Settings

        getattr(Plugin(Settings(schedule)), method)(*given, **named)

    return run


def without_plugin(deferred: bool) -> Callable:
    def run() -> None:
        from megatron_zbpp.mcore import superseded

        superseded.require_none(SimpleNamespace(defer_embedding_wgrad_compute=deferred))

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


def use(name: str, value: object) -> Callable:
    def run() -> None:
        import megatron_zbpp.schedules

        getattr(megatron_zbpp, name)
        getattr(megatron_zbpp.schedules, str(value))

    return run


PROGRAMS = {
    'no name': row(
        settings(schedule=5), 'the name of one (zbpp list prints them)', settings(schedule='zb-v')
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
            ('auto', 'memory_limit', -1, 'number', 0),
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
        "which 'test_message_cures:shared' has: choose another",
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
RECIPES = {
    'validated': row(
        recipe(pipeline_model_parallel_layout=SimpleNamespace()),
        'call megatron_zbpp.bridge.enable before config.validate() and pretrain(), and give the '
        'layout as text',
        recipe(pipeline_model_parallel_layout='Et|t|t|tL'),
    ),
    'groups': row(
        recipe(change=lambda own: setattr(own.dist, 'use_decentralized_pg', True)),
        'leave it False',
        recipe(),
    ),
    'microbatches that go both ways': row(
        recipe('chimera'), 'take a schedule of one route, such as zb-v', recipe()
    ),
    'versions of weights': row(
        recipe('paci'), 'or take a synchronous schedule, such as zb-v', recipe()
    ),
    'a hybrid model': row(
        recipe(hybrid_layer_pattern='***-'),
        'take a schedule that has one, such as zb-h1',
        recipe('zb-h1', hybrid_layer_pattern='***-'),
    ),
    'what is refused': row(
        recipe(overlap_moe_expert_parallel_comm=True),
        'take dualpipe-v, or drop overlap_moe_expert_parallel_comm',
        recipe('dualpipe-v', overlap_moe_expert_parallel_comm=True),
        recipe(),
    ),
    'chunks': row(
        recipe(virtual_pipeline_model_parallel_size=3),
        'leave model.virtual_pipeline_model_parallel_size out, or give it 2',
        recipe(),
        recipe(virtual_pipeline_model_parallel_size=2),
    ),
    'a layout that does not divide': row(
        recipe(pipeline_model_parallel_layout='Et|t|ttL'),
        'model.pipeline_model_parallel_layout Et|t|ttL has 3 stages',
        recipe(pipeline_model_parallel_layout='Et|t|t|tL'),
    ),
    'too few layers': row(
        recipe(num_layers=3), 'give each stage a layer (model.num_layers)', recipe(num_layers=4)
    ),
}


# what is refused with others, or by some schedules; test_refusals has each setting by itself
VEE, LOOP = {'placement': Placement.v(4)}, {'placement': Placement.loop(4)}
CPU = {'on_cpu': True}
EMULATED = {'on_cpu': True, 'with_te': True}
EXPERTS = {'overlap_moe_expert_parallel_comm': True}
RECOMPUTED = {'techniques': {'recompute'}}
VERSIONS = {'techniques': {'updating'}}
NO_W = {'splits': False}
SEEDED = {'techniques': {'dropout_seeds'}, 'joins': True, 'splits': False}
SHARDED = {'techniques': {'split_vocabulary'}, 'splits': False}
BOTH_SHARDED = {'techniques': {'split_vocabulary', 'split_embedding'}, 'splits': False}
FUSED = {'cross_entropy_loss_fusion': True}
SLICED = {'techniques': {'sliced'}, 'joins': True, 'splits': False}
DELAYED = {'fp8': 'hybrid', 'fp8_recipe': 'delayed'}
MASKS = {'reset_attention_mask': True}
PATTERN = {'hybrid_layer_pattern': 'M*|M*|M*|M*'}


def grouped(value: str, how: dict) -> Callable:
    """With Transformer Engine's variable in the environment."""

    def run() -> None:
        with mock.patch.dict(os.environ, {'NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM': value}):
            refusal(how, moe_grouped_gemm=True)()

    return run


def lacks_segments() -> bool:
    from megatron_zbpp.mcore import compat

    return compat.segments_module() is None


def lacks_sequences() -> bool:
    from megatron_zbpp.mcore import compat

    return not compat.tells_all_stages_of_sequences()


def reads_batches_apart() -> bool:
    from megatron_zbpp.mcore import compat

    return not compat.get_batch_module().startswith('megatron.core')


def forgets_modules() -> bool:
    from megatron_zbpp.mcore import compat

    return compat.forgets_modules_that_stay()


def offloading(layers: int, *modules: str, on: bool = True) -> Callable:
    return refusal(
        LOOP | {'in_order': True},
        fine_grained_activation_offloading=on,
        offload_modules=modules,
        num_layers=layers,
    )


REFUSALS = {
    'seeds of dropout and layers in parts': row(
        refusal(SEEDED, overlap_moe_expert_parallel_comm=True),
        'drop --overlap-moe-expert-parallel-comm, or leave out --pipeline-dropout-seeds',
        refusal(SEEDED),
        refusal({'joins': True}, overlap_moe_expert_parallel_comm=True),
    ),
    'seeds of dropout and graphs': row(
        refusal(SEEDED, cuda_graph_impl='local'),
        'give --cuda-graph-impl none, or leave out --pipeline-dropout-seeds',
        refusal(SEEDED, cuda_graph_impl='none'),
        refusal(NO_W, cuda_graph_impl='local'),
    ),
    'versions of weights and a setting': row(
        refusal(VERSIONS, mtp_num_layers=1),
        'drop --mtp-num-layers, or take a synchronous schedule, such as zb-v',
        refusal(VERSIONS),
        refusal({}, mtp_num_layers=1),
    ),
    'versions of weights and a bias of experts': row(
        refusal(VERSIONS, moe_router_enable_expert_bias=True),
        'drop --moe-router-enable-expert-bias, or take a synchronous schedule, such as zb-v',
        refusal(VERSIONS),
        refusal({}, moe_router_enable_expert_bias=True),
    ),
    'versions of weights and counts of a global batch': row(
        refusal(VERSIONS, moe_router_load_balancing_type='global_aux_loss'),
        'give --moe-router-load-balancing-type aux_loss, or take a synchronous schedule, such as '
        'zb-v',
        refusal(VERSIONS, moe_router_load_balancing_type='aux_loss'),
        refusal({}, moe_router_load_balancing_type='global_aux_loss'),
    ),
    'versions of weights and context parallelism': row(
        refusal(VERSIONS, context_parallel_size=2),
        'give 1, or take a synchronous schedule, such as zb-v',
        refusal(VERSIONS, context_parallel_size=1),
        refusal({}, context_parallel_size=2),
    ),
    'versions of weights and iterations that run again': row(
        refusal(VERSIONS, rerun_mode='validate_results'),
        'give --rerun-mode disabled, or take a synchronous schedule, such as zb-v',
        refusal(VERSIONS, rerun_mode='disabled'),
        refusal({}, rerun_mode='validate_results'),
    ),
    'versions of weights and graphs': row(
        refusal(VERSIONS | NO_W, cuda_graph_impl='local'),
        'give --cuda-graph-impl none, or take a synchronous schedule, such as zb-v',
        refusal(VERSIONS | NO_W, cuda_graph_impl='none'),
    ),
    'replicas that would wait amid passes': row(
        refusal({'mirrored': False}, overlap_grad_reduce=True),
        'drop --overlap-grad-reduce, or take chimera',
        refusal({'mirrored': False}),
        refusal({}, overlap_grad_reduce=True),
    ),
    'replicas that would gather amid passes': row(
        refusal({'mirrored': False}, overlap_param_gather=True),
        'drop --overlap-param-gather, or take chimera',
        refusal({}, overlap_param_gather=True),
    ),
    'replicas that share experts amid passes': row(
        refusal({'mirrored': False}, expert_model_parallel_size=2),
        'give 1, or take chimera',
        refusal({'mirrored': False}, expert_model_parallel_size=1),
        refusal({}, expert_model_parallel_size=2),
    ),
    'replicas that balance experts amid passes': row(
        refusal({'mirrored': False}, moe_router_load_balancing_type=['global_aux_loss']),
        'give --moe-router-load-balancing-type aux_loss, or take chimera',
        refusal({'mirrored': False}, moe_router_load_balancing_type='aux_loss'),
        refusal({}, moe_router_load_balancing_type=['global_aux_loss']),
    ),
    'graphs': row(
        refusal({}, cuda_graph_impl='local'),
        'give --cuda-graph-impl none, or local with a schedule without W passes, such as 1f1b',
        refusal({}, cuda_graph_impl='none'),
        refusal(NO_W, cuda_graph_impl='local'),
    ),
    'graphs and recompute passes': row(
        refusal(RECOMPUTED | NO_W, cuda_graph_impl='local'),
        'give --cuda-graph-impl none',
        refusal(RECOMPUTED | NO_W, cuda_graph_impl='none'),
    ),
    'delayed scaling and recompute passes': row(
        refusal(RECOMPUTED, **DELAYED),
        'give --fp8-recipe tensorwise',
        refusal(RECOMPUTED, **DELAYED | {'fp8_recipe': 'tensorwise'}),
    ),
    'pairs and recompute passes': row(
        refusal(RECOMPUTED | {'joins': True}, **EXPERTS),
        'drop --overlap-moe-expert-parallel-comm, or take a schedule without recompute',
        refusal(RECOMPUTED | {'joins': True}),
        refusal({'joins': True}, **EXPERTS),
    ),
    **{
        f'slices and {name}': row(
            refusal(SLICED, **given),
            f'{cure}, or take a schedule of whole sequences',
            refusal(SLICED, **cured),
        )
        for name, given, cured, cure in (
            ('experts', EXPERTS | {}, {}, 'drop --overlap-moe-expert-parallel-comm'),
            ('context parallelism', {'context_parallel_size': 2}, {}, 'give 1'),
            (
                'hybrid models',
                {'hybrid_layer_pattern': 'M*'},
                {},
                'have attention, MLP and experts alone (*, -, E), from 0.18 on',
            ),
            (
                'graphs',
                {'cuda_graph_impl': 'local'},
                {'cuda_graph_impl': 'none'},
                'give --cuda-graph-impl none',
            ),
            (
                'delayed scaling',
                DELAYED,
                DELAYED | {'fp8_recipe': 'tensorwise'},
                'give --fp8-recipe tensorwise',
            ),
        )
    },
    'scaled logits': row(
        refusal(SHARDED, use_mup=True),
        'drop --use-mup, or leave out --pipeline-vocab-parallel',
        refusal(SHARDED),
        refusal(NO_W, use_mup=True),
    ),
    'a fused loss': row(
        refusal(SHARDED, **FUSED, cross_entropy_fusion_impl='te'),
        'give --cross-entropy-fusion-impl native, or leave out --pipeline-vocab-parallel',
        refusal(SHARDED, **FUSED, cross_entropy_fusion_impl='native'),
        refusal(NO_W, **FUSED, cross_entropy_fusion_impl='te'),
    ),
    'a tied output layer': row(
        refusal(SHARDED, untie_embeddings_and_output_weights=False),
        'give --pipeline-vocab-parallel input+output, or --untie-embeddings-and-output-weights, or '
        'leave out --pipeline-vocab-parallel',
        refusal(SHARDED, untie_embeddings_and_output_weights=True),
        refusal(BOTH_SHARDED, untie_embeddings_and_output_weights=False),
    ),
    'the output layer on all ranks and graphs': row(
        refusal(SHARDED, cuda_graph_impl='local'),
        'give --cuda-graph-impl none',
        refusal(SHARDED, cuda_graph_impl='none'),
    ),
    'slices and fused positions': row(
        refusal(SLICED, multi_latent_attention=True, apply_rope_fusion=True),
        'give --no-rope-fusion',
        refusal(SLICED, multi_latent_attention=True, apply_rope_fusion=False),
        refusal(SLICED, multi_latent_attention=False, apply_rope_fusion=True),
    ),
    'slices and square masks': row(
        refusal(SLICED, transformer_impl='local', masked_softmax_fusion=True),
        'give --no-masked-softmax-fusion',
        refusal(SLICED, transformer_impl='local', masked_softmax_fusion=False),
    ),
    'tied embeddings': row(
        refusal({}, mtp_num_layers=1, untie_embeddings_and_output_weights=False),
        'give --untie-embeddings-and-output-weights',
        refusal({}, mtp_num_layers=1, untie_embeddings_and_output_weights=True),
    ),
    'grouped tensors': row(
        grouped('1', {}),
        'unset it, or take a schedule without W passes, such as 1f1b or interleaved',
        grouped('0', {}),
        grouped('1', NO_W),
    ),
    'sharded weights': row(
        refusal({}, tensor_parallel_num_weight_shards=2),
        'drop --tensor-parallel-num-weight-shards, or take a schedule without W passes',
        refusal({}),
        refusal(NO_W, tensor_parallel_num_weight_shards=2),
    ),
    'masks': row(
        refusal(VEE, **MASKS),
        'have two pipeline ranks, take a schedule with one chunk a rank, such as zb-h1, or drop '
        '--reset-attention-mask',
        refusal({'placement': Placement.v(2)}, **MASKS),
        refusal(LOOP, **MASKS),
        refusal(VEE),
    ),
    'masks of hybrid models': row(
        refusal({'placement': Placement.loop(2, 2)}, **MASKS, **PATTERN),
        'take a schedule with one chunk a rank, such as zb-h1, or megatron-core from 0.18 on, or '
        'drop --reset-attention-mask',
        refusal({'placement': Placement.loop(2)}, **MASKS, **PATTERN),
        refusal({'placement': Placement.loop(2, 2)}, **PATTERN),
        refuses=reads_batches_apart,
    ),
    'hybrid models': row(
        refusal(VEE, **PATTERN),
        'take a schedule that has, such as zb-h1, or megatron-core from 0.17 on',
        refusal(LOOP, **PATTERN),
        refuses=lacks_segments,
    ),
    'packed sequences': row(
        refusal(VEE, sft=True),
        'have two stages in all, as zb-h1 on 2 ranks has, or take megatron-core from 0.19 on',
        refusal({'placement': Placement.loop(2)}, sft=True),
        refuses=lacks_sequences,
    ),
    'ModelOpt': row(
        refusal(VEE, modelopt_enabled=True),
        'take a schedule with one, such as zb-h1, or drop --modelopt-enabled',
        refusal(LOOP, modelopt_enabled=True),
        refusal(VEE),
    ),
    "Megatron's offloading, of one layer": row(
        offloading(4, 'core_attn', 'attn_proj'),
        'have two layers or more in each chunk, give one of --offload-modules, or drop '
        '--fine-grained-activation-offloading',
        offloading(8, 'core_attn', 'attn_proj'),
        offloading(4, 'core_attn'),
        offloading(4, 'core_attn', 'attn_proj', on=False),
        refuses=forgets_modules,
    ),
    'layers on a CPU': row(
        refusal(CPU, transformer_impl='inference_optimized'),
        'give --transformer-impl local',
        refusal(CPU, transformer_impl='local'),
    ),
    **{
        f'{kind} on a CPU': row(
            refusal(CPU, **{name: given}),
            'have a pattern of other layers (*, -, E, +)',
            refusal(CPU, hybrid_layer_pattern='*-|*E/*-'),
            refusal({}, **{name: given}),
        )
        for kind, name, given in (
            ('Mamba', 'hybrid_layer_pattern', '*M|*-'),
            ('Mamba by a ratio', 'hybrid_attention_ratio', 0.5),
            ('Gated DeltaNet', 'hybrid_layer_pattern', '*-|*G'),
            ('sparse attention', 'hybrid_layer_pattern', '*-|*-/D-'),
        )
    },
    'scaling on a CPU': row(
        refusal(EMULATED, fp8='hybrid', fp8_recipe='mxfp8'),
        'give --fp8-recipe tensorwise',
        refusal(EMULATED, fp8='hybrid', fp8_recipe='tensorwise'),
    ),
    'attention on a CPU': row(
        refusal(CPU, attention_backend='flash'),
        'give --attention-backend auto',
        refusal(CPU, attention_backend='auto'),
    ),
    'sequences on a CPU': row(
        refusal(CPU, context_parallel_size=2),
        'give --context-parallel-size 1, or --spec with an attention that can',
        refusal(CPU, context_parallel_size=1),
        refusal(CPU, context_parallel_size=2, spec=['own', 'attention']),
    ),
}


# what the first call of an iteration looks at, and what builds the model


def called(**found: object) -> Callable:
    def run() -> None:
        from megatron_zbpp.mcore import refusals
        from megatron_zbpp.mcore.iteration.preparation import refuse_unsupported

        config = SimpleNamespace(**found)
        refuse_unsupported(config, None, refusals.refused(config))

    return run


def of_chunks(count: int) -> Callable:
    """A program's chunks become the stages of a rank."""

    def run() -> None:
        from torch.nn import Module

        from megatron_zbpp.mcore.iteration import preparation

        vee = Placement.v(2)
        preparation._require_built([Module()] * count, vee.stages(0), 0, vee)

    return run


def data_of(*items: int) -> Callable:
    def run() -> None:
        import torch

        from megatron_zbpp.mcore.iteration.stages import Call

        data = iter(items)
        call = Call(SimpleNamespace(num_microbatches=2), None, 1, torch.device('cpu'))
        for microbatch in range(2):
            call.run_step(Pass('F', 0, microbatch), next, data)

    return run


def built_with(layout: str | None) -> Callable:
    def run() -> None:
        from megatron.core.models.gpt import GPTModel

        from megatron_zbpp.mcore.layout import StageLayout, require_placed

        plan = None if layout is None else StageLayout(Placement.v(2), layout)
        config = SimpleNamespace(pipeline_model_parallel_layout=plan)
        require_placed(GPTModel.__new__(GPTModel), Placement.v(2), config)

    return run


def segment_of(pattern: str) -> Callable:
    def run() -> None:
        from megatron_zbpp.mcore.patches.placement import _segments

        group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
        ask = _segments(lambda *given: ([], 0), lambda ranks: Placement.v(ranks))
        ask(pattern, group, 0)

    return run


def provided(placement: Placement, provider: Callable) -> Callable:
    def run() -> None:
        from megatron.core import parallel_state

        from megatron_zbpp.mcore.patches.placement import _with_chunks

        with mock.patch.object(parallel_state, 'get_pipeline_model_parallel_world_size', lambda: 2):
            _with_chunks(lambda provider: None, lambda ranks: placement)(provider)

    return run


def delayed(waits: bool, look: str) -> Callable:
    """A module of Transformer Engine's that puts off its weight gradient, among several."""

    def run() -> None:
        from torch.nn import Module

        from megatron_zbpp.mcore.iteration import forward_backward
        from megatron_zbpp.mcore.patches.transformer_engine import settings

        if look == 'config':
            settings.delay_weight_gradients(SimpleNamespace(tp_comm_overlap=waits))
        else:
            module = Module()
            module.wgrad_store = SimpleNamespace(enabled=waits)
            forward_backward._refuse_delayed([module])

    return run


def one_plans(model: object, forward_step: Callable, overlaps: bool = True) -> Callable:
    def run() -> None:
        from megatron_zbpp.mcore.iteration import combined

        if overlaps:
            combined.require([model], forward_step)

    return run


def last_stage(call: str, asked: bool) -> Callable:
    """A chunk with a shard of the output layer, called by a schedule or not, for losses or more."""

    def run() -> None:
        import torch

        from megatron_zbpp.mcore.iteration.vocabulary import require
        from megatron_zbpp.mcore.vocabulary import OutputShard

        model = torch.nn.Module()
        model.output_layer = OutputShard.__new__(OutputShard)
        torch.nn.Module.__init__(model.output_layer)
        model.output_layer.listening = not asked
        if call == 'forward':
            model.output_layer(torch.ones(1))
        else:
            require([model], SimpleNamespace(collect_non_loss_data=asked))

    return run


def begun_with(function: Callable) -> Callable:
    """A call after one with which the next iteration has begun."""

    def run() -> None:
        from megatron_zbpp.mcore.iteration.arguments import Arguments
        from megatron_zbpp.mcore.post_validation.next_iteration import ForwardsAhead

        sizes = {'num_microbatches': 2, 'seq_length': 1, 'micro_batch_size': 1, 'model': function}
        calls = [
            Arguments(forward_step_func=each, data_iterator=None, **sizes)
            for each in (data_of, function)
        ]
        following = ForwardsAhead(SimpleNamespace(post_validation=True))
        following.take(calls[0])
        following._begun = (None, None)
        with mock.patch.object(following, '_commit', lambda begun, arguments: None):
            following.take(calls[1])

    return run


def running(mode: str) -> Callable:
    """NVIDIA's loop runs iterations again; optimizer steps then wait for all ranks."""

    def run() -> None:
        from megatron.core import rerun_state_machine as reruns

        from megatron_zbpp.mcore.post_validation import waiting

        reruns.initialize_rerun_state_machine(mode=reruns.RerunMode(mode))
        try:
            if why := waiting.refusal_of_loop():
                raise NotImplementedError(why)
        finally:
            reruns.destroy_rerun_state_machine()

    return run


def package(module: str | None) -> Callable:
    """Megatron's command line imports a package that may be missing; `zbpp doctor` goes on."""

    def run() -> None:
        from megatron_zbpp.mcore.command_line import launch_line
        from megatron_zbpp.mcore.command_line.arguments import require_packages

        sys.modules.pop('own_yaml', None)
        with (
            mock.patch.dict(sys.modules, {'yaml': module and ModuleType(module)}),
            mock.patch.object(launch_line, '_TRAINING', 'own_yaml'),
        ):
            assert ('pip install pyyaml' in launch_line._lacks()) == (module is None)
            require_packages('own_yaml')

    return run


PLANS = SimpleNamespace(build_schedule_plan=None)
CALLS = {
    'a setting': row(
        called(tp_comm_overlap=True),
        'drop --tp-comm-overlap, or take a schedule without W passes, such as 1f1b or interleaved, '
        "or use Megatron's own schedule",
        called(tp_comm_overlap=False),
    ),
    'chunks': row(
        of_chunks(1),
        'build as many as the num_chunks of what megatron_zbpp.enable() returns',
        of_chunks(2),
    ),
    'data that ends': row(data_of(1), 'it must go on for as long as iterations do', data_of(1, 2)),
    'layers that are not laid out': row(
        built_with(None),
        'pipeline_model_parallel_layout with 4 stages in model order, divided by |',
        built_with('Et|t|t|tL'),
    ),
    'segments': row(
        segment_of('M*|M-'), 'places 4 stages: give that many, divided by |', segment_of('M|*|M|-')
    ),
    'a provider of one chunk': row(
        provided(Placement.v(2), lambda pre_process, post_process: None),
        'take a schedule with one, such as zb-h1',
        provided(Placement.loop(2), lambda pre_process, post_process: None),
        provided(Placement.v(2), lambda pre_process, post_process, vp_stage: None),
    ),
    'several modules': row(
        delayed(True, 'modules'), 'for models of one module only', delayed(False, 'modules')
    ),
    'userbuffers': row(delayed(True, 'config'), 'drop --tp-comm-overlap', delayed(False, 'config')),
    'no plan of layers': row(
        one_plans(object(), lambda data, model, return_schedule_plan: None),
        'drop --overlap-moe-expert-parallel-comm',
        one_plans(object(), lambda data, model: None, overlaps=False),
    ),
    'no plan in forward_step': row(
        one_plans(PLANS, lambda data, model: None),
        'add it, as pretrain_gpt.py has it, or drop --overlap-moe-expert-parallel-comm',
        one_plans(PLANS, lambda data, model, return_schedule_plan: None),
    ),
    'data beside losses': row(
        last_stage('require', True), 'leave it out, or leave out', last_stage('require', False)
    ),
    'a model by itself': row(
        last_stage('forward', True), 'run it by a schedule', last_stage('forward', False)
    ),
    'another function': row(
        begun_with(segment_of), 'pass the same in every iteration', begun_with(data_of)
    ),
    'iterations that run again': row(
        running('validate_results'), 'give --rerun-mode disabled', running('disabled')
    ),
    'a missing package': row(package(None), 'imports: pip install pyyaml', package('yaml')),
}


def _load(name: str) -> object:
    import megatron_zbpp

    return megatron_zbpp.load(name)


def _costs(name: str) -> object:
    from megatron_zbpp import Costs, build

    return Costs.uniform(build(name, 2, 4).placement)


TABLES = {
    'flags': FLAGS,
    'launch line': LINES,
    'program': PROGRAMS,
    'recipe': RECIPES,
    'refusal': REFUSALS,
    'call': CALLS,
}
ROWS = {f'{kind}: {name}': row for kind, rows in TABLES.items() for name, row in rows.items()}
# statements whose cure another test applies
ELSEWHERE = {
    **dict.fromkeys(
        (
            'mcore/command_line/advise.py AdvisedLine.shape: is missing',
            'mcore/command_line/advise.py AdvisedLine.shape: --vocab-size',
            'mcore/command_line/advise.py AdvisedLine.sizes',
            'mcore/command_line/advise.py AdvisedLine.own',
        ),
        'test_advise.py::test_what_cannot_work',
    ),
    'mcore/command_line/advise.py AdvisedLine._dense_first': 'test_advise.py::test_experts',
    **dict.fromkeys(
        (
            'mcore/command_line/advise.py AdvisedLine._model: give letters',
            'mcore/command_line/advise.py AdvisedLine._model: dense models alone',
        ),
        'test_advise.py::test_segments_of_a_pattern',
    ),
    'mcore/dropout_seeds.py DropoutSeeds._enter': 'test_dropout_seeds.py::'
    'test_layers_that_run_twice',
    'mcore/replicas.py _both': 'test_two_way_training.py::test_what_cannot_work',
    'mcore/reading.py require_asked': 'test_two_way_training.py::test_what_cannot_work',
    'mcore/reading.py _require_same': 'test_two_way_training.py::test_data_of_the_wrong_replica',
    'mcore/iteration/seen_weights.py _after_forward': 'test_asynchronous_weights.py::'
    'test_what_sees_neither_version',
    'mcore/iteration/prewarm.py prewarmed': 'test_prewarm.py::test_failing_inside',
    'mcore/building.py _require_chunk': 'test_built.py::test_a_model_that_is_not_told',
    'mcore/iteration/built.py require_all_layers': 'test_other_scripts.py::test_images',
    'mcore/iteration/built.py _require_layout': 'test_built.py::test_a_loop',
    'mcore/iteration/built.py _require_model_order': 'test_changed_layers.py::'
    'test_identical_to_megatron',
    'mcore/patches/rank_files.py require_same': 'test_rank_files.py::test_the_cure',
    'mcore/patches/transformer_engine/chunk.py delaying_modules: parameters_split': 'test_te_layers'
    '.py::test_refused',
    'mcore/patches/transformer_engine/chunk.py delaying_modules: DistributedData': 'test_te_layers'
    '.py::test_refused',
    'mcore/patches/transformer_engine/chunk.py delaying_modules: GroupedTensor': 'test_te_layers'
    '.py::test_gradients_to_the_bit',
    **dict.fromkeys(
        (
            'mcore/iteration/sliced.py require: collect_non_loss_data',
            'mcore/iteration/sliced.py require: GPTModel',
            'mcore/iteration/sliced.py require: attend',
            'mcore/patches/slices.py _cutting.forward',
            'mcore/patches/slices.py _require_slices_alone: needs its state',
            'mcore/patches/slices.py _require_slices_alone: attn_mask_type',
        ),
        'test_sliced_models.py::test_refused_at_the_first_call',
    ),
    **dict.fromkeys(
        (
            'mcore/iteration/vocabulary.py VocabularyStage._step.checked',
            'mcore/iteration/vocabulary.py VocabularyStage.report',
            'mcore/iteration/embedding.py EmbeddingStage._tokens',
            'mcore/vocabulary.py InputShard.forward',
            'mcore/patches/vocabulary.py divide',
        ),
        'test_vocabulary_training.py::test_refused_at_the_first_call',
    ),
    **dict.fromkeys(
        (
            'mcore/iteration/asynchronous.py ForwardsInFlight.take',
            'mcore/iteration/asynchronous.py ForwardsInFlight._require_free',
        ),
        'test_asynchronous_changes.py::test_data_that_forwards_in_flight_have_read',
    ),
    'mcore/iteration/hops.py _agreed': 'test_hops.py::test_neighbours_that_do_not_agree',
    **dict.fromkeys(
        (
            'mcore/iteration/hops.py with_hops',
            'mcore/iteration/hops.py _require_supported',
        ),
        'test_hops.py::test_what_does_not_go_with_it',
    ),
    'emulation/cpu.py install': 'test_cpu.py::test_seeds_are_applied',
    'mcore/layout.py require_placed: {reason}': 'test_refusals.py::'
    'test_hybrid_model_where_it_is_built',
}
# statements that name no cure, or one that cannot be tried here
UNTRIED = {
    '__init__.py __getattr__': "Python's own words for a name that a module lacks",
    'mcore/command_line/arguments.py _preparing.parse_known_args': 'ends what has been told',
    'mcore/command_line/flags.py _number': 'argparse raises its own instead: rows of no number',
    'mcore/iteration/embedding.py EmbeddingStage._tokens.stop': 'ends a call of the program',
    'mcore/iteration/completeness.py _looking': 'a layer that nobody knows yet: it is reported',
    'mcore/iteration/preparation.py refuse_unsupported: adjust_tensor': 'the cure is a program '
    'without the plugin',
    'mcore/patches/linear.py _Unasked.__torch_function__': 'a backward that Megatron '
    'has not: nothing to be cured',
    'mcore/patches/registry.py Registry._put': 'a release that nobody knows yet: it is reported',
    'mcore/patches/transformer_engine/module.py DelayedModule.put': 'a backward outside of a '
    'schedule: nothing to be cured',
    'emulation/te.py install': 'the cures install Transformer Engine or a checkout',
    'emulation/te.py _load_tools': 'the cure is another environment of Python',
}
OF_SOME_RELEASES = (
    'mcore/refusals.py _with_own_offloading',
    'mcore/refusals.py _unplaced',
    'mcore/refusals.py _with_chunks: _UNMASKED_HYBRID',
    'mcore/refusals.py _packed',
)


@dataclass(frozen=True)
class Tried:
    """What became of a row.

    Attributes:
        said: by what was given; None: nothing was refused.
        places: where it was raised.
        cured: what was said with each cure; None: nothing.
        refuses: see `Row`.
    """

    said: str | None
    places: tuple[raised.Place, ...]
    cured: tuple[str | None, ...]
    refuses: bool


def try_rows(folder: str) -> dict[str, Tried]:
    """On a rank, in an empty folder that is on Python's path."""
    from nvidia import _find_megatron

    from megatron_zbpp.schedules import registry

    _find_megatron()  # before anything imports another one
    before = os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        write_files()
        return {name: tried(row) for name, row in ROWS.items()}
    finally:
        os.chdir(before)
        sys.path.remove(folder)
        for known in (registry._FAMILIES, registry._NAMES):  # for other tests on this rank
            for name in [name for name in known if name.startswith('own_')]:
                del known[name]


def tried(row: Row) -> Tried:
    with raised.refusals_made() as made:
        said, error = words(row.given)
    places = (*made, *(() if error is None else raised.places(error)))
    return Tried(said, places, tuple(words(cure)[0] for cure in row.cures), row.refuses())


def words(ask: Callable) -> tuple[str | None, Exception | None]:
    """What is said when something is asked for, and the error."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            ask()
        except Exception as error:
            return f'{error}', error
    return None, None


@pytest.fixture(scope='module')
def found(ranks, tmp_path_factory) -> dict[str, Tried]:
    return ranks(1).run(try_rows, str(tmp_path_factory.mktemp('cures')))[0]


@pytest.mark.parametrize('name', ROWS)
def test_each_cure(found, name):
    """What is given is refused in these words, and what is named instead goes on."""
    row, was = ROWS[name], found[name]
    assert row.cures
    assert was.cured == (None,) * len(row.cures)
    assert (was.said is not None) == was.refuses
    assert was.said is None or row.said in was.said


def test_each_message_is_tried(found):
    """Or is in a list that says why not; and the lists have nothing that is tried."""
    places = [place for was in found.values() for place in was.places]
    every = list(raised.statements(*ROOMS))
    left = [each for each in every if not any(each.holds(place) for place in places)]
    nowhere = [each for each in left if not any(map(each.is_called, ELSEWHERE))]
    assert len(every) > 130 and 10 * len(nowhere) < len(every)
    listed = (*ELSEWHERE, *UNTRIED, *OF_SOME_RELEASES)
    assert [each for each in left if not any(map(each.is_called, listed))] == []
    idle = [name for name in (*ELSEWHERE, *UNTRIED) if not any(s.is_called(name) for s in left)]
    assert idle == []


@pytest.mark.parametrize('test', sorted({*ELSEWHERE.values()}))
def test_cures_that_are_tried_elsewhere(test):
    file, _, name = test.partition('::')
    assert f'\ndef {name}(' in (ROOT / 'tests' / 'megatron' / file).read_text()


def test_users_are_told_their_own_names(found):
    """Of flags, not of arguments of `enable`; in a program of Bridge's, not of flags."""
    from megatron_zbpp.mcore.settings import Settings

    arguments = [field.name for field in fields(Settings) if '_' in field.name]
    for name, was in found.items():
        kind, said = name.partition(':')[0], was.said or ''
        if kind in ('flags', 'launch line'):
            assert not re.search(rf'\b({"|".join(arguments)})\b', said), said
        elif kind == 'recipe':
            assert '--' not in said.replace('zbpp plan --num-layers', ''), said
