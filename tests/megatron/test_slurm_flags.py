"""What the files for SLURM launch is what torchrun and Megatron's own parser understand."""

import contextlib
import io
import os
import sys
from unittest import mock

import pytest
from nvidia import CHECKOUT, needs_training
from slurm import EXPERTS, FILES, launch, nodes

from megatron_zbpp.emulation import cpu
from megatron_zbpp.mcore import enabled

pytestmark = pytest.mark.one_release


@pytest.mark.parametrize('file', [*FILES, EXPERTS], ids=lambda file: file.stem)
def test_torchrun_understands(file, tmp_path):
    from torch.distributed.run import parse_args

    launched = launch(file, tmp_path)
    args = parse_args(launched.torchrun[1:])
    assert args.module and args.training_script == 'megatron_zbpp.launch'
    assert (args.nnodes, args.nproc_per_node) == (str(nodes(file)), '8')
    assert args.training_script_args == ['/opt/Megatron-LM/pretrain_gpt.py', *launched.script]


def parsed(argv, world):
    """Megatron's arguments as a GPU would get them, or what its parser says, and the layout."""
    if CHECKOUT and CHECKOUT not in sys.path:
        sys.path.insert(0, CHECKOUT)
    from megatron.training import arguments as megatrons

    from megatron_zbpp.launch import flags

    original, errors = megatrons.add_megatron_arguments, io.StringIO()
    flags.install()
    try:
        with (
            mock.patch.object(sys, 'argv', ['pretrain_gpt.py', *argv]),
            mock.patch.dict(os.environ, WORLD_SIZE=str(world)),
            mock.patch.object(cpu, 'installed', lambda: False),
            contextlib.redirect_stderr(errors),
        ):
            args = megatrons.parse_args()
        return vars(args)['pipeline_model_parallel_layout'], args.pipeline_schedule
    except SystemExit:
        return errors.getvalue()
    finally:
        megatrons.add_megatron_arguments = original
        if enabled.plugin is not None:
            enabled.plugin.disable()


@needs_training
@pytest.mark.parametrize('file', [*FILES, EXPERTS], ids=lambda file: file.stem)
def test_megatron_understands(file, tmp_path, ranks):
    script = launch(file, tmp_path).script
    layers = int(script[script.index('--num-layers') + 1])
    stages = 2 * int(script[script.index('--pipeline-model-parallel-size') + 1])
    for layout, schedule in ranks(2).run(parsed, script, nodes(file) * 8):
        assert schedule == 'zb-v'
        assert layout.count('t') == layers and layout.count('|') == stages - 1


@needs_training
def test_a_misspelt_flag_is_found(tmp_path, ranks):
    script = launch(FILES[0], tmp_path, '--overlap-grad-reduction').script
    for said in ranks(2).run(parsed, script, nodes(FILES[0]) * 8):
        assert 'unrecognized arguments: --overlap-grad-reduction' in said
