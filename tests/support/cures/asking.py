"""Ways to ask for something, called by the rows of `rows.txt` on a rank that has found Megatron."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import refused_settings
import torch
from bridge import config
from megatron.core import parallel_state
from megatron.core import rerun_state_machine as reruns
from megatron.core.models.gpt import GPTModel
from paths import ROOT
from torch.nn import Module

import megatron_zbpp
from megatron_zbpp import Costs, bridge, build, techniques
from megatron_zbpp.emulation import cpu_flags
from megatron_zbpp.ir import Pass, Placement, Schedule
from megatron_zbpp.launch import dry_run, launch_line, rank_for  # noqa: F401  of rows
from megatron_zbpp.launch import flags as our_flags
from megatron_zbpp.launch.launch_line import Bench
from megatron_zbpp.mcore import enabled
from megatron_zbpp.mcore.faces import CallContext
from megatron_zbpp.mcore.iteration import preparation
from megatron_zbpp.mcore.iteration.stages import Arguments, Call
from megatron_zbpp.mcore.job.resolve import require_taken_back  # noqa: F401  of rows
from megatron_zbpp.mcore.layers import transformer_engine
from megatron_zbpp.mcore.layout import StageLayout, require_placed
from megatron_zbpp.mcore.optimizer import split_step
from megatron_zbpp.mcore.optimizer.early_steps import ForwardsAhead
from megatron_zbpp.mcore.patches.placement import _segments, _with_chunks
from megatron_zbpp.mcore.placement_independent_init import chains_of  # noqa: F401  of rows
from megatron_zbpp.mcore.plugin import Plugin
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.mcore.techniques import overlap, split_vocabulary
from megatron_zbpp.mcore.techniques.asynchronous_steps import (  # noqa: F401  of rows
    AnnealedRates,
    StageNorms,
)
from megatron_zbpp.mcore.techniques.forwards_in_flight import ForwardsInFlight
from megatron_zbpp.mcore.techniques.updating import maker
from megatron_zbpp.mcore.techniques.vocabulary_shards import OutputShard
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.schedules import registry
from megatron_zbpp.techniques.updates.versions import updating as with_updates
from megatron_zbpp.techniques.vocabulary.graph import split_vocabulary as with_vocabulary
from megatron_zbpp.techniques.vocabulary.place import with_shards

SIZES = '--num-layers 4 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4'
PLANS = SimpleNamespace(build_schedule_plan=None)
VEE = Placement.v(2)


# ---- Command lines.


def flags(words: str, sizes: str = SIZES) -> None:
    """Megatron's own command line, where it is here, up to what our flags prepare.

    Before the flags come variables of the environment, as NAME=VALUE.
    """
    own = dict(
        word.split('=') for word in itertools.takewhile(lambda w: w[0] != '-', words.split())
    )
    if '--hybrid-layer-pattern' in words:  # which has the layers
        sizes = sizes.replace('--num-layers 4', '')
    given, said = [*sizes.split(), *words.split()[len(own) :]], io.StringIO()
    try:
        with (
            mock.patch.object(sys, 'argv', ['script.py']),
            mock.patch.dict(os.environ, {'WORLD_SIZE': '2'} | own),
            contextlib.redirect_stderr(said),
        ):
            _parser().parse_known_args([*cpu_flags(given), *given])
    except SystemExit as left:
        raise AssertionError(said.getvalue()) from left.__context__
    finally:
        if enabled.plugin is not None:
            enabled.plugin.disable()
        enabled.plugin = None


@functools.cache
def _parser() -> argparse.ArgumentParser:
    if not launch_line._lacks():
        from megatron.training import arguments as megatrons

        our_flags.install()
        parser = megatrons.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    else:
        parser = launch_line._parser(launch_line._lacks())
        parser.parse_known_args = our_flags._preparing(parser)
    for name in ('--yaml-cfg', '--use-checkpoint-args', '--hybrid-layer-pattern'):
        if name not in parser._option_string_actions:  # of other releases
            parser.add_argument(name, nargs='?', const=True)
    return parser


def _without_world_size() -> contextlib.AbstractContextManager:
    rest = {name: value for name, value in os.environ.items() if name != 'WORLD_SIZE'}
    return mock.patch.dict(os.environ, rest, clear=True)


def line(words: str, sizes: str = SIZES, gpus: int | None = None) -> None:
    """A launch line that `zbpp doctor` reads."""
    with _without_world_size():
        dry_run.dry_run_of(
            launch_line.read(f'{words} {sizes}'.replace('ROOT', str(ROOT)).split(), gpus)
        )


def benched(words: str) -> None:
    with _without_world_size():
        Bench.of(words.split())


def package(module: str | None) -> None:
    """Megatron's command line imports a package that may be missing; `zbpp doctor` goes on."""
    sys.modules.pop('own_yaml', None)
    with (
        mock.patch.dict(sys.modules, {'yaml': module and ModuleType(module)}),
        mock.patch.object(launch_line, 'TRAINING', 'own_yaml'),
    ):
        assert ('pip install pyyaml' in launch_line._lacks()) == (module is None)
        our_flags.require_packages('own_yaml')


def moved(command_line: bool) -> None:
    name = 'megatron.training.arguments'
    with mock.patch.dict(sys.modules, {name: ModuleType(name)}):
        if command_line:
            our_flags.install()
        else:
            enable(schedule='zb-v')


# ---- Programs that call `enable`, or ask for a schedule; recipes of Megatron-Bridge's.


def enable(**given: object) -> None:
    megatron_zbpp.enable(**given).disable()


def plugin(method: str, *given: object, schedule: str = 'zb-v', **named: object) -> None:
    getattr(Plugin(Settings(schedule)), method)(*given, **named)


def programs(microbatches: int = 4, ranks: int = 2, **given: object) -> None:
    """What a program asks of its schedule, once it knows its sizes."""
    Programs(Settings(**given)).lowered(ranks, microbatches, forward_only=False)


def recipe(schedule: str = 'zb-v', dist: dict[str, object] | None = None, **model: object) -> None:
    own = config(**model)
    vars(own.dist).update(dist or {})
    with mock.patch.dict(os.environ, {'WORLD_SIZE': '2'}):
        bridge.prepare(own, Settings(schedule))


def schedule(name: str | None, **given: object) -> Schedule:
    return build(name, 2, 4, **given)


def costs(name: str) -> Costs:
    return Costs.uniform(schedule(name).placement)


def split(barriers: int = 1) -> Schedule:
    """A schedule with the output layer on all ranks."""
    host = schedule('1f1b')
    if barriers == 1:
        return with_shards(host)
    return replace(host, graph=with_vocabulary(host.graph, 2, barriers))


def updating() -> Schedule:
    host = schedule('1f1b')
    return replace(host, graph=with_updates(host.graph))


def frozen(**changes: object) -> None:
    """A file of `zbpp freeze`, changed by hand."""
    whole = json.loads(Path('freeze.json').read_text())
    Path('changed.json').write_text(json.dumps(whole | changes))
    enable(schedule='zb-h1', freeze='changed.json')


def named(*names: str) -> None:
    """Families of one's own, each with another one's name, or its own."""
    with mock.patch.dict(registry._FAMILIES), mock.patch.dict(registry._NAMES):
        for each in names:

            def made(num_ranks: int, num_microbatches: int) -> None: ...

            made.__name__ = each
            registry.family(each, aliases=('shared',) if 'shared' in names else ())(made)


def technique(name: str, graph: str) -> None:
    made = SimpleNamespace(name=name, graph=ModuleType(graph))
    with mock.patch.dict(techniques._OWN), mock.patch.object(techniques, 'register_graph'):
        techniques.register(made)


# ---- Asynchronous schedules.


def versions(tied: bool = False, anneals: int | None = None) -> None:
    """Weights of PipeMare on 4 ranks, in batches of one microbatch."""
    model = Module()
    model.register_parameter('weight', torch.nn.Parameter(torch.zeros(1)))
    model.share_embeddings_and_output_weights = tied
    session, endless = Session(Settings('pipemare', anneal_steps=anneals)), EndlessTraining()
    lowered = session.programs.lowered(4, 1, False)
    arguments, flight = SimpleNamespace(models=[model]), ForwardsInFlight(session, endless)
    maker(session, endless, CallContext(arguments, lowered, flight, [model], 0, ()))


def annealed(steps: int | None) -> None:
    rates = AnnealedRates(Session(Settings('pipemare', anneal_steps=steps)), EndlessTraining())
    with rates.annealed(SimpleNamespace(param_groups=[{'lr': 1.0}])):
        pass


# ---- Models and layouts.


def stages(text: str, placement: Placement = VEE) -> StageLayout:
    """A layout in Megatron's language, which TransformerConfig is given."""
    return StageLayout(placement, text)


def built_with(layout: str | None) -> None:
    plan = None if layout is None else stages(layout)
    config = SimpleNamespace(pipeline_model_parallel_layout=plan)
    require_placed(GPTModel.__new__(GPTModel), VEE, config)


def segment_of(pattern: str) -> None:
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    _segments(Placement.v, lambda *given: ([], 0), pattern, group, 0)


def provided(placement: Placement, provider: Callable) -> None:
    with mock.patch.object(parallel_state, 'get_pipeline_model_parallel_world_size', lambda: 2):
        _with_chunks(lambda ranks: placement, lambda provider: None, provider)


# ---- The first call of an iteration.


def called(**found: object) -> None:
    config = SimpleNamespace(**found)
    preparation.refuse_unsupported(config, None, refused_settings.refused(config))


def data_of(*items: int) -> None:
    data = iter(items)
    call = Call(SimpleNamespace(num_microbatches=2), None, 1, torch.device('cpu'))
    for microbatch in range(2):
        call.run_step(Pass('F', 0, microbatch), next, data)


def delayed(waits: bool, look: str) -> None:
    """A module of Transformer Engine's that puts off its weight gradient, among several."""
    if look == 'config':
        transformer_engine.delay_weight_gradients(SimpleNamespace(tp_comm_overlap=waits))
    else:
        module = Module()
        module.wgrad_store = SimpleNamespace(enabled=waits)
        preparation._refuse_delayed([module])


def one_plans(model: object, forward_step: Callable, overlaps: bool = True) -> None:
    if overlaps:
        overlap.require([model], forward_step)


def last_stage(call: str, asked: bool) -> None:
    """A chunk with a shard of the output layer, called by a schedule or not, for losses or more."""
    model = Module()
    model.output_layer = OutputShard.__new__(OutputShard)
    Module.__init__(model.output_layer)
    model.output_layer.listening = not asked
    if call == 'forward':
        model.output_layer(torch.ones(1))
    else:
        split_vocabulary.require([model], SimpleNamespace(collect_non_loss_data=asked))


def begun_with(function: Callable) -> None:
    """A call after one with which the next iteration has begun."""
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


def running(mode: str) -> None:
    """NVIDIA's loop runs iterations again; optimizer steps then wait for all ranks."""
    reruns.initialize_rerun_state_machine(mode=reruns.RerunMode(mode))
    try:
        if why := split_step.refusal_of_loop():
            raise NotImplementedError(why)
    finally:
        reruns.destroy_rerun_state_machine()
