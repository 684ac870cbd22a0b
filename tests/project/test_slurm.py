"""The files for SLURM: linted, and run with a stand-in for srun."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slurm import BENCH, BENCHMARK, EXPERTS, FILES, FOLDER, ROOT, launch, nodes

from benchmarks.gpt import cli, jobs

# parameters in billions, by the file's name; GPUs of the paper, or of GPT-3's batch
SIZES = {'1.5b': 1.5, '6.2b': 6.2, '14.6b': 14.6, '28.3b': 28.3, '175b': 175}
GPUS = {'1.5b': 8, '6.2b': 8, '14.6b': 16, '28.3b': 32, '175b': 512}
GPT2_WORDS = 50257
OWN_SIZES = '--num-layers 32 --pipeline-model-parallel-size 8 --micro-batch-size 1'.split()
each_file = pytest.mark.parametrize('file', FILES, ids=lambda file: file.stem)


def number(script: list[str], flag: str) -> int:
    return int(script[script.index(flag) + 1])


def test_files_are_there_and_linted():
    assert {file.stem.removeprefix('gpt-') for file in FILES} == set(SIZES)
    beside = Path(sys.executable).with_name('shellcheck')
    shellcheck = beside if beside.exists() else shutil.which('shellcheck')
    assert shellcheck, "no shellcheck: pip install -e '.[dev]'"
    files = *FILES, EXPERTS, BENCHMARK, BENCH, *FOLDER.glob('*.sh'), 'scripts/gpu_check.sh'
    command = [shellcheck, '--external-sources', *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@each_file
def test_sizes(file, tmp_path):
    size = file.stem.removeprefix('gpt-')
    script = launch(file, tmp_path).script
    layers, hidden = number(script, '--num-layers'), number(script, '--hidden-size')
    words = GPT2_WORDS + number(script, '--max-position-embeddings')
    assert (12 * layers * hidden**2 + words * hidden) / 1e9 == pytest.approx(SIZES[size], rel=0.02)
    assert hidden % number(script, '--num-attention-heads') == 0
    world = nodes(file) * 8
    assert world == GPUS[size]
    tensor = number(script, '--tensor-model-parallel-size')
    pipeline = number(script, '--pipeline-model-parallel-size')
    replicas, rest = divmod(world, tensor * pipeline)
    assert rest == 0 and hidden % tensor == 0
    microbatches, rest = divmod(
        number(script, '--global-batch-size'), replicas * number(script, '--micro-batch-size')
    )
    assert rest == 0
    assert microbatches >= 3 * pipeline, 'what the schedule needs to be full'
    ends = 2 * ('--account-for-loss-in-pipeline-split' in script)
    assert ends == 2 * ('--account-for-embedding-in-pipeline-split' in script)
    assert (layers + ends) % pipeline == 0, 'ranks have equal work'


def test_experts(tmp_path):
    """46.7 billion parameters, as Mixtral has; experts divide among the replicas of a stage."""
    script = launch(EXPERTS, tmp_path).script
    flags = '--num-layers', '--hidden-size', '--ffn-hidden-size', '--num-experts'
    layers, hidden, ffn, experts = (number(script, flag) for flag in flags)
    rows = number(script, '--num-query-groups') / number(script, '--num-attention-heads')
    layer = (2 + 2 * rows) * hidden**2 + 3 * experts * hidden * ffn
    assert (layers * layer + 2 * 32000 * hidden) / 1e9 == pytest.approx(46.7, rel=0.01)
    replicas = nodes(EXPERTS) * 8 // number(script, '--pipeline-model-parallel-size')
    assert replicas % number(script, '--expert-model-parallel-size') == 0
    assert number(script, '--global-batch-size') // replicas >= 24
    refused = launch(EXPERTS, tmp_path, EXPERT_PARALLEL='3')
    assert refused.status == 2 and '8 replicas do not divide by EXPERT_PARALLEL=3' in refused.errors
    assert '--expert-model-parallel-size' not in launch(FILES[0], tmp_path).script


@each_file
def test_tensor_parallelism_gets_its_messages_in_order(file, tmp_path):
    launched = launch(file, tmp_path)
    assert launched.status == 0, launched.errors
    assert launched.environment['CUDA_DEVICE_MAX_CONNECTIONS'] == '1'
    assert 'CUDA_VISIBLE_DEVICES' not in launched.environment
    own = launch(file, tmp_path, CUDA_DEVICE_MAX_CONNECTIONS='32').environment
    assert own['CUDA_DEVICE_MAX_CONNECTIONS'] == '32', 'as the user has it'


@pytest.mark.parametrize(
    ('environment', 'processes'),
    [
        ({}, '8'),
        ({'SLURM_GPUS_PER_NODE': '4'}, '4'),
        ({'SLURM_GPUS_PER_NODE': 'h100:2'}, '2'),
        ({'SLURM_GPUS_PER_NODE': '0', 'GPUS_PER_NODE': '16'}, '16'),
    ],
)
def test_as_many_processes_as_gpus(tmp_path, environment, processes):
    """As many as SLURM was asked for; on a cluster where it counts none, as many as are set."""
    launched = launch(FOLDER / 'gpt-14.6b.sbatch', tmp_path, PIPELINE_PARALLEL='4', **environment)
    assert launched.argv[launched.argv.index('--nproc-per-node') + 1] == processes


def test_on_cpu(tmp_path):
    launched = launch(FOLDER / 'gpt-6.2b.sbatch', tmp_path, DEVICE='cpu')
    at = launched.argv.index('megatron_zbpp.launch')
    assert launched.argv[at + 1 : at + 3] == ['--cpu', '/opt/Megatron-LM/pretrain_gpt.py']
    assert launched.environment['CUDA_VISIBLE_DEVICES'] == ''


def test_benchmark(tmp_path):
    launched = launch(BENCHMARK, tmp_path, '--iterations', '5', MODELS='28.3b', SLURM_NNODES='4')
    assert launched.status == 0, launched.errors
    at = launched.argv.index(str(ROOT / 'scripts' / 'benchmark_gpt.py'))
    assert launched.torchrun[: at - len(launched.argv)] == [
        *('torchrun', '--nnodes', '4', '--nproc-per-node', '8', '--master-port', '29500')
    ]
    assert launched.environment['FIRST_NODE'] == 'node-a7'
    jobs = benchmark_jobs(launched.argv[at + 1 :], world=32)
    assert {(job.model, job.p, job.iterations) for job in jobs} == {('28.3b', 32, 5)}
    assert {job.m for job in jobs} == {96, 256}, 'as in the paper'
    assert launched.argv[launched.argv.index('--json') + 1] == 'benchmark_gpt-4x8.json'


def test_bench(tmp_path):
    """Its turns start on all nodes; a job on other nodes has the same line, and so goes on."""
    from megatron_zbpp.launch.launch_line import Bench

    line = ['--', 'pretrain_gpt.py', '--save', 'my folder']
    launched = launch(BENCH, tmp_path, '--rounds', '2', *line, SLURM_NNODES='2')
    assert launched.status == 0, launched.errors
    at = launched.argv.index('--')
    assert launched.argv[:at] == ['bench', '--rounds', '2']
    words = launched.argv[at + 1 :]
    assert words[0] == 'srun' and words[-3:] == line[1:]
    job = Bench.of([*words[:-2], *OWN_SIZES, *words[-2:]])
    assert job.line.world_size == 16 and job.launcher[-2:] == ('-m', 'megatron_zbpp.launch')
    on_cpu = launch(BENCH, tmp_path, *line, DEVICE='cpu', SLURM_JOB_NODELIST='node-b[1-2]')
    assert on_cpu.argv[:2] == ['bench', '--cpu'], on_cpu.errors
    assert 'node-a7' not in ' '.join(words) and launched.environment['FIRST_NODE'] == 'node-a7'


TORCHRUN = """#!/bin/sh
echo "$@" >> runs
echo " iteration 1/ 1 | elapsed time per iteration (ms): 20.0 | lm loss: 5.1E+00 |"
"""


def test_bench_goes_on_with_other_nodes(tmp_path):
    """Its turns run by srun, which gives each node its number; those that ran are not run again."""
    programs = {
        'srun': '#!/bin/sh\nshift 2; SLURM_NODEID=1 exec "$@"\n',
        'torchrun': TORCHRUN,
        'zbpp': f'#!/bin/sh\nexec {sys.executable} -m megatron_zbpp.cli "$@"\n',
    }
    words = '--rounds 1 --iterations 1 --schedules zb-v --json -o found'.split()
    line = [*words, '--', 'pretrain_gpt.py', *OWN_SIZES]
    shown = {}
    for node in 'ab':
        programs['scontrol'] = f'#!/bin/sh\necho {node}1\necho {node}2\n'
        job = launch(BENCH, tmp_path, *line, programs=programs, PYTHONPATH=str(ROOT))
        assert job.status == 0, job.errors
        shown[node] = json.loads(job.out)
    assert [row['losses_equal'] for row in shown['a']['schedules']] == [True, True]
    assert shown['b'] == shown['a']
    runs = (tmp_path / 'runs').read_text().splitlines()
    assert len(runs) == 3, 'the start, and each schedule'
    assert all(run.startswith('--node-rank 1 --master-addr a1 --nnodes 1 ') for run in runs)


@pytest.mark.parametrize('words', [[], ['--rounds', '2'], ['--', 'torchrun', 'pretrain_gpt.py']])
def test_bench_wants_a_script(tmp_path, words):
    refused = launch(BENCH, tmp_path, *words)
    assert refused.status == 2 and not refused.argv
    assert refused.errors.endswith(': give your script and its flags there, without torchrun\n')


def benchmark_jobs(argv, world):
    """What the script makes of its arguments on so many GPUs; all can be had."""
    args = cli.parser().parse_args(argv)
    counts, chosen = args.microbatches.split(','), jobs.schedules(args.schedules.split(','))
    nothing = dict.fromkeys(('pipeline', 'tensor', 'chunks', 'micro_batch'))
    others = {name: getattr(args, name) for name in ('spec', 'warm_up', 'iterations')}
    models = args.models.split(',')
    found = jobs.training_jobs(models, chosen, world, counts=counts, **nothing, **others)
    asked = list(found)
    assert [job.refusal() for job in asked] == [None] * len(asked)
    return asked


def test_what_the_user_sets(tmp_path):
    file = FOLDER / 'gpt-6.2b.sbatch'
    script = launch(file, tmp_path, '--seed', '7').script
    assert script[-2:] == ['--seed', '7']
    assert script[script.index('--data-path') + 1] == '/data/my text/corpus_text_document'
    assert script[script.index('--vocab-file') + 1] == '/data/my text/gpt2-vocab.json'
    assert script[script.index('--pipeline-schedule') + 1] == 'zb-v'
    assert '--sequence-parallel' not in script
    other = {'DATA': 'mock', 'SCHEDULE': 'zb-h1', 'TENSOR_PARALLEL': '4', 'SLURM_NNODES': '4'}
    script = launch(file, tmp_path, **other).script
    assert '--mock-data' in script and '--data-path' not in script
    assert script[script.index('--pipeline-schedule') + 1] == 'zb-h1'
    assert '--sequence-parallel' in script
    assert '--pipeline-schedule' not in launch(file, tmp_path, SCHEDULE='').script
    assert number(launch(file, tmp_path, SLURM_NNODES='64').argv, '--nnodes') == 64


# size, environment, exit code, and what is said
REFUSED = json.loads(Path(__file__).with_name('refused_jobs.json').read_text())


@pytest.mark.parametrize(('name', 'environment', 'status', 'said'), REFUSED)
def test_refused_before_start(tmp_path, name, environment, status, said):
    launched = launch(FOLDER / f'gpt-{name}.sbatch', tmp_path, **environment)
    assert launched.status == status
    assert said in launched.errors and not launched.argv
