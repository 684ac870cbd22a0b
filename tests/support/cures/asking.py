"""Ways to ask for something; each returns a function that a rank calls."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

from megatron_zbpp.ir import Placement

SIZES = '--num-layers 4 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4'
LAYERS = SIZES.replace('--num-layers 4', '--num-layers {}')
HYBRID = SIZES.replace('--num-layers 4', '--hybrid-layer-pattern {}')


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
        parser.parse_known_args = arguments._preparing(parser)
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
        from megatron_zbpp.mcore.start.placement_independent_init import chains_of

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

        from megatron_zbpp.mcore.session import Session
        from megatron_zbpp.mcore.settings import Settings
        from megatron_zbpp.mcore.techniques.forwards_in_flight import ForwardsInFlight
        from megatron_zbpp.mcore.techniques.updating import maker

        model = torch.nn.Linear(1, 1)
        model.share_embeddings_and_output_weights = tied
        session = Session(Settings('pipemare', anneal_steps=anneals))
        lowered = session.programs.lowered(4, 1, False)
        maker(session, ForwardsInFlight(session), lowered, [model], 0)

    return run


def annealed(steps: int | None) -> Callable:
    """A step of PipeMare without a scheduler."""

    def run() -> None:
        from megatron_zbpp.mcore.optimizer.asynchronous_steps import AnnealedRates
        from megatron_zbpp.mcore.session import Session
        from megatron_zbpp.mcore.settings import Settings

        rates = AnnealedRates(Session(Settings('pipemare', anneal_steps=steps)))
        with rates.annealed(SimpleNamespace(param_groups=[{'lr': 1.0}])):
            pass

    return run


def clipped_by(norm: str | None) -> Callable:
    """Stages that cannot have norms of their own."""

    def run() -> None:
        from megatron_zbpp.mcore.optimizer.asynchronous_steps import StageNorms
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
