"""Rows of the table of rules: settings and schedules by which each holds, and what its cures do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.job.rules import CONDITIONS, REFUSALS, Context, Refusal, Rule, check

VEE, LOOP, LONG = Placement.v(2), Placement.loop(2), Placement.loop(4)
BASE = Context((), placement=LOOP, splits=False, joins=True, in_order=True)


def _tables() -> Iterator[dict[str, Any]]:
    text = Path(__file__).with_suffix('.txt').read_text().replace('\n    ', ' ')
    for table in re.sub(r'^#.*\n', '', text, flags=re.M).split('\n\n'):
        name, *lines = table.strip().splitlines()
        value = 'dict({})' if name in ('[WHERE]', '[ELSE]', '[CURES]') else '{}'
        rows = (line.partition(': ') for line in lines)
        yield {words: eval(value.format(given)) for words, _, given in rows}


OF_SOME, VALUES, WHERE, ELSE, HARMLESS, CURES, SHOWN, OF_RELEASES = _tables()
OF_SOME |= {f'--{name.replace("_", "-")}': since for name, since in OF_SOME.items()}
OURS = ('offload', 'vocab_parallel', 'dropout_seeds', 'use_distributed_optimizer')
_CURE = re.compile(r'(drop |give |use |^)\{(\w+)(?::([^}+]+))?\}')


class Case(NamedTuple):
    """A row's setting with a value, among others, and what else a rule asks of."""

    name: str
    values: dict[str, Any]
    context: Context

    def with_(self, changes: dict[str, Any]) -> Case:
        """Return the case after changes, of which `own` is the row's setting."""
        of_schedule = {k: v for k, v in changes.items() if hasattr(self.context, k)}
        own = {k: v for k, v in changes.items() if k not in of_schedule}
        own = {self.name if k == 'own' else k: v for k, v in own.items()}
        context = replace(self.context, **of_schedule)
        return self._replace(values=self.values | own, context=context)

    def said(self, *rules: Rule) -> list[Refusal]:
        variables = {k: v for k, v in self.values.items() if k.isupper()}
        context = replace(self.context, sources=(SimpleNamespace(**self.values),))
        with mock.patch.dict(os.environ, variables):
            return list(check(context, rules))


def case_of(rule: Rule, name: str, but: str = '') -> Case:
    """A case in which the rule holds for a setting, but for one of its conditions if given."""
    words, quoted = rule.value.text, re.findall('`(.+?)`', rule.value.text)
    value = VALUES[words] if words in VALUES else quoted[0]
    if words.startswith('other than') and words not in VALUES:
        value = 'another'
    case = Case(name, {name: value} | ({'fp8': 'hybrid'} if words == 'delayed' else {}), BASE)
    for each in conditions_of(rule):
        if each == but:
            continue
        quoted = re.findall('^`(.+)`$', each)
        case = case.with_(WHERE.get(each, dict.fromkeys(quoted, 1)))
    if but == 'several chunks a rank':
        return case.with_({'placement': Placement.loop(case.context.placement.num_ranks)})
    return case


def harmless(rule: Rule) -> list[Any]:
    words = rule.value.text
    others = re.findall('`(.+?)`', words) if words.startswith('other than') else []
    return [*HARMLESS.get(words, [None, False, 0]), *others]


def conditions_of(rule: Rule) -> list[str]:
    return rule.when.text.split(', ') if rule.when.text else []


def in_this_release(rule: Rule) -> bool:
    words = [each for each in conditions_of(rule) if re.search(r'\d\.\d', each)]
    return all(CONDITIONS[each](BASE) for each in words)


def cured(case: Case, rule: Rule) -> list[Case]:
    found = [case.with_(change) for words, change in CURES.items() if words in rule.cure]
    for _, name, value in _CURE.findall(rule.cure):
        if name not in OURS:
            given = {'off': False, '': None}.get(value, int(value) if value.isdigit() else value)
            if not value and f'give {{{name}}}' in rule.cure:
                given = True
            more = {'cpu_offloading': None} if name.startswith('cpu_offloading') else {}
            found.append(case.with_({name: given} | more))
    return found


def refused(settings: Any, on_cpu: bool = False, techniques: Any = (), **how: Any) -> list[Refusal]:
    """What the whole table refuses, of settings, of a schedule with W passes in one order."""
    context = Context((settings,), on_cpu, techniques=frozenset(techniques), **how)
    return list(check(context, REFUSALS))
