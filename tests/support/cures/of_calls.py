"""Rows of the first call of an iteration, and of what builds the model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from unittest import mock

from cures.row import row
from megatron_zbpp.ir import Pass, Placement


def called(**found: object) -> Callable:
    def run() -> None:
        from refused_settings import refused

        from megatron_zbpp.mcore.iteration.preparation import refuse_unsupported

        config = SimpleNamespace(**found)
        refuse_unsupported(config, None, refused(config))

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
        from megatron_zbpp.mcore.layers import transformer_engine

        if look == 'config':
            transformer_engine.delay_weight_gradients(SimpleNamespace(tp_comm_overlap=waits))
        else:
            module = Module()
            module.wgrad_store = SimpleNamespace(enabled=waits)
            forward_backward._refuse_delayed([module])

    return run


def one_plans(model: object, forward_step: Callable, overlaps: bool = True) -> Callable:
    def run() -> None:
        from megatron_zbpp.mcore.techniques import overlap

        if overlaps:
            overlap.require([model], forward_step)

    return run


def last_stage(call: str, asked: bool) -> Callable:
    """A chunk with a shard of the output layer, called by a schedule or not, for losses or more."""

    def run() -> None:
        import torch

        from megatron_zbpp.mcore.techniques.split_vocabulary import require
        from megatron_zbpp.mcore.techniques.vocabulary_shards import OutputShard

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
        from megatron_zbpp.mcore.optimizer.next_iteration import ForwardsAhead

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

        from megatron_zbpp.mcore.optimizer import waiting

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
            mock.patch.object(launch_line, 'TRAINING', 'own_yaml'),
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
