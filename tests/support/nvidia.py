"""NVIDIA's training loop as a function that a rank of a pool can call many times.

It runs `pretrain_script.py`; or, where MEGATRON_LM names a checkout of Megatron-LM, NVIDIA's own
pretrain_gpt.py in it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import events
import pytest
import stock
from outcome import Outcome, outcome
from paths import ROOT, SUPPORT
from ranks import Ranks
from stock_key import by_megatron

CHECKOUT = os.environ.get('MEGATRON_LM')
SCRIPT = Path(CHECKOUT) / 'pretrain_gpt.py' if CHECKOUT else SUPPORT / 'pretrain_script.py'
needs_training = pytest.mark.skipif(
    not CHECKOUT and importlib.util.find_spec('megatron.training') is None,
    reason='megatron.training is in the wheels of megatron-core from 0.17 on, which need Python '
    '3.12, or in a checkout that MEGATRON_LM names',
)

COMMON = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --lr 1e-3 --min-lr 1e-4
    --lr-decay-style linear --lr-warmup-iters 1 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 255 --make-vocab-size-divisible-by 32 --eval-iters 0 --eval-interval 100
    --log-interval 1
    --split 100,0,0 --seed 7 --hidden-dropout 0 --attention-dropout 0 --num-workers 0
    --ckpt-format torch_dist --no-save-rng --no-load-rng
""".split()
EARLY = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 1]
WITHOUT_STATE = ['--no-save-optim', '--no-load-optim', '--finetune']
ALSO: list[str] = []  # flags of all runs by schedules of ours: see `--also`


_TOLD = (events.nothing, events.aliased_sends, events.sequence_parallel)
_TOLD += (events.evaluations, events.mtp_losses, events.doubted)


def is_kept(words: list[str], event: Any) -> bool:
    """Whether a launch is of stock, and its event leaves nothing but what the run reports."""
    told = event in _TOLD or isinstance(event, events.Overflow)
    return told and by_megatron(words)


def also(words: Container[str]) -> list[str]:
    """Those flags, but for what is among `words`."""
    return [flag for flag in ALSO if flag not in words]


def release() -> str:
    """The version of Megatron-Core in the checkout."""
    names: dict[str, object] = {}
    path = Path(CHECKOUT or '', 'megatron/core/package_info.py')
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id in ('MAJOR', 'MINOR', 'PATCH'):
            names[node.targets[0].id] = ast.literal_eval(node.value)
    return '{MAJOR}.{MINOR}.{PATCH}'.format(**names)


@dataclass(frozen=True)
class Run:
    """What a run left, mostly by iteration: exact, so that two can be compared with ==."""

    losses: dict[int, tuple]  # in hex, the loss scale, and whether the step was skipped
    grad_norms: dict[int, str]  # in hex
    zeros: dict[int, float | None]  # in gradients; None where they are not counted
    param_norms: dict[int, str | None]  # in hex; None where they are not logged
    parameters: dict[str, str]  # hashes by layer
    optimizer: dict[str, str]  # hashes by layer; empty where it is sharded
    reported: tuple[Any, ...] = ()  # what `event` gave, by rank


def train(
    argv: list[str], event: Any, script: Path = SCRIPT
) -> tuple[dict, dict, dict, dict, dict, int, Any]:
    """Runs on each rank: the script under our launcher, leaving no state of Megatron behind.
    `event` is a context manager around the run, which gives what is to be reported."""
    _find_megatron()
    read_descriptions_once()
    import few_documents  # noqa: F401  (what it does, importing it does)
    import report
    from example import early_steps
    from megatron.training import arguments, training

    import megatron_zbpp.launch

    made, losses, norms, zeros, param_norms = [], {}, {}, {}, {}

    def note(loss_dict, total, lr, iteration, scale, memory, skipped, norm, *rest, **named):
        # only the last rank has losses
        exact = [value.item().hex() for value in loss_dict.values()]
        losses[iteration] = (*exact, scale, 'skipped' if skipped else 'done')
        norms[iteration], zeros[iteration] = float(norm or 0).hex(), rest[1]
        param_norms[iteration] = None if rest[0] is None else float(rest[0]).hex()

    try:
        # the launcher puts the script's folder first: our example is called as NVIDIA's is
        with (
            events.before((training, 'training_log', note)),
            events.after((training, 'setup_model_and_optimizer', made.extend)),
            event(training) as reported,
            mock.patch.object(sys, 'path', [*sys.path]),
            # 500 lines, a tenth of it
            mock.patch.object(arguments, '_print_args', lambda *_: None),
        ):
            try:
                megatron_zbpp.launch.main(['--cpu', str(script), *argv])
            except SystemExit as left:  # at --exit-interval
                if left.code:
                    raise
        hashes = report.fingerprint(report.by_layer(made[0]), made[1])
        return losses, norms, zeros, param_norms, hashes, early_steps(), reported
    finally:
        made.clear()
        forget()


def forget() -> None:
    """Everything that NVIDIA's training loop keeps in modules, and the plugin."""
    from example import forget_groups
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import global_vars, training

    # with it ranks reduce their start times; a rank that is new to the pool has none
    vars(training).get('_STARTUP_TIMESTAMPS', {}).update(program_start=None)
    global_vars.destroy_global_vars()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    forget_groups()


class Off(argparse.Namespace):
    """Arguments of Megatron's loop, as far as a function reads them: what is not set is off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith('__'):
            raise AttributeError(name)


def known() -> set[str]:
    """Flags, such as '--fp8-format hybrid' with a choice, arguments and config fields of the
    Megatron that is here: run it on a rank."""
    _find_megatron()
    from megatron.core.transformer import TransformerConfig
    from megatron.training import arguments

    parser = _parser(arguments)
    found = {field.name for field in fields(TransformerConfig)}
    for action in parser._actions:
        found |= {action.dest, *action.option_strings}
        found |= {f'{o} {c}' for o in action.option_strings for c in action.choices or ()}
    return found


def source(module: str) -> str:
    """Source of a module of the Megatron that is here: run it on a rank."""
    _find_megatron()
    return inspect.getsource(importlib.import_module(module))


@functools.cache
def read_descriptions_once() -> None:
    """Parsing the source of config classes, for what --help says, took a sixth of each run. All are
    read at once: in a server of ranks, for all of them."""
    from megatron.training import arguments
    from megatron.training.argument_utils import ArgumentGroupFactory

    by_class, read = {}, ArgumentGroupFactory._get_field_docstrings

    def remembered(self, config):
        if config not in by_class:
            by_class[config] = read(self, config)
        return by_class[config]

    ArgumentGroupFactory._get_field_docstrings = remembered
    _parser(arguments)


def _parser(arguments) -> argparse.ArgumentParser:
    """Megatron's, without what our launcher adds."""
    add = arguments.add_megatron_arguments
    return getattr(add, '__wrapped__', add)(argparse.ArgumentParser(allow_abbrev=False))


def _find_megatron() -> None:
    """Put the checkout before what is installed, but behind our example: both have pretrain_gpt."""
    if CHECKOUT and CHECKOUT not in sys.path:
        sys.path.insert(sys.path.index(str(ROOT / 'examples' / 'gpt')) + 1, CHECKOUT)


def known_config() -> set[str]:
    """Fields of the config of the Megatron that is here: run it on a rank."""
    from megatron.core.transformer import TransformerConfig

    return {field.name for field in fields(TransformerConfig)}


def since(iteration: int, values: Any) -> Any:
    """What came after `iteration`, of a run of the loop or of the example."""
    if isinstance(values, tuple):
        return values[iteration:]
    return {at: value for at, value in values.items() if at > iteration}


def run(
    ranks: Ranks,
    *argv: str | int | Path,
    event: Any = events.nothing,
    script: Path = SCRIPT,
    waits: bool = False,
    without: Iterable[str] = (),
) -> Run:
    """Trains with `argv`; holds that steps are validated later where that is asked for, or that
    none is (`waits`). Flags of `COMMON` are left out that are `without`."""
    leave_out = {*without, *(['--mock-data'] if '--data-path' in argv else [])}
    common = [word for word in COMMON if word not in leave_out]
    words = list(map(str, argv))
    if any(word.startswith('--pipeline-schedule') for word in words):
        common += also(words)
    kept = is_kept(words, event)
    results = stock.trained(ranks, train, [*common, *words], event, script, kept=kept)
    early = [result[-2] for result in results]
    asked = '--enable-optimizer-post-validation' in argv
    assert any(early) == (asked and not waits), f'steps taken early, by rank: {early}'
    return left(results)


def by(schedule: str) -> list[str | int]:
    """Return flags of a schedule; `+post-validation`: its optimizer steps are validated later."""
    name, _, early = schedule.partition('+')
    return ['--pipeline-schedule', name, *(EARLY if early else [])]


def require_same(found: Any, stock: Any, behind: int = 0, optimizer: bool = True) -> None:
    """Hold that a run left what stock left: losses, parameters, optimizer state, to the bit. We
    began `behind` so many iterations of stock."""
    assert found.losses == since(behind, stock.losses) and found.losses
    assert found.parameters == stock.parameters
    assert not optimizer or found.optimizer == stock.optimizer


def go_on(
    ranks: Ranks,
    folder: Path,
    flags: list,
    ours: list,
    theirs: Sequence = (),
    event: Any = events.nothing,
    stock_event: Any = events.nothing,
    at: int = 1,
    sharded: bool = False,
    optimizer: bool = True,
    **how: Any,
) -> tuple[Run, Run]:
    """Train by Megatron's own schedule, and by ours from its checkpoint after `at` iterations.

    `flags` are of both. Where state of the optimizer is `sharded`, both begin without it: another
    placement cuts elsewhere, and Megatron cannot load it into torch's Adam. Returns our run, and
    Megatron's, which are the same to the bit.
    """
    saving, loading = ['--save', folder, '--save-interval', at], ['--load', folder]
    if sharded:
        run(ranks, *flags, *theirs, *saving, *WITHOUT_STATE, '--exit-interval', at, **how)
        loading += WITHOUT_STATE
        stock = run(ranks, *flags, *theirs, *loading, event=stock_event, **how)
    else:
        stock = run(ranks, *flags, *theirs, *saving, event=stock_event, **how)
        loading += ['--ckpt-step', at]
    assert len(set(stock.losses.values())) == len(stock.losses) > 1
    found = run(ranks, *flags, *ours, *loading, event=event, **how)
    require_same(found, stock, 0 if sharded else at, optimizer and not sharded)
    return found, stock


def left(results: list[Any]) -> Run:
    """What `train` has left, from what it gave on each rank."""
    *exact, hashes, _, _ = results[-1]
    both = hashes['parameters_sha256'], hashes['optimizer_sha256']
    return Run(*exact, *both, tuple(result[-1] for result in results))


def launch(*argv: str) -> Outcome:
    """The script under our launcher, until it has parsed its arguments: run it on each rank."""
    _find_megatron()
    import megatron.training  # noqa: F401  # it prints

    import megatron_zbpp.launch

    with mock.patch.object(sys, 'argv', sys.argv), mock.patch.object(sys, 'path', [*sys.path]):
        try:
            return outcome(megatron_zbpp.launch.main, ['--cpu', str(SCRIPT), *argv])
        finally:
            forget()
