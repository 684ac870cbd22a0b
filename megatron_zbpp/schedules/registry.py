"""The registry: families of schedules by name, from the catalogue and of a user's own module.

    >>> from megatron_zbpp.schedules.registry import find
    >>> zb_v = find('zb-v')
    >>> str(zb_v.bubble), zb_v.bubble(Sizes(p=8, m=24)), zb_v.memory(Sizes(p=8, m=24))
    ('0 (F=B=W, m >= 2p-1)', 0, 8)

A family of a user's own module has the address `package.module:name`, which is its name and all
its names: looking it up by that imports the module.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import ceil, floor
from typing import Any, NamedTuple, TypeVar

from megatron_zbpp.ir import Schedule

ONE = range(1, 2)
TWO = range(2, 3)
ANY = range(1, sys.maxsize)
EVEN = range(2, sys.maxsize, 2)

_OPTIONS = ('num_chunks', 'costs', 'memory_limit', 'together', 'num_slices')
_OURS = 'megatron_zbpp.'  # what names of our own modules begin with
_MOVING = {'offload', 'recompute', 'evict', 'moves'}  # techniques; the last: of a user's own

Generator = TypeVar('Generator', bound=Callable[..., Schedule])


class Sizes(NamedTuple):
    """The sizes that the bubble and the memory of a family depend on."""

    p: int  # ranks
    m: int  # microbatches
    v: int = 1  # chunks per rank
    F: float = 1.0  # time of a forward of one microbatch on a full rank, of all its chunks
    B: float = 1.0  # the same of its input gradient
    W: float = 1.0  # the same of its weight gradient
    n: int = 1  # slices of a sequence

    @property
    def equal(self) -> bool:
        """True if F, B and W take the same time."""
        return self.F == self.B == self.W


def filled(at: Sizes) -> bool:  # each rank has work while a microbatch goes through all
    return at.m >= at.p


def steady(at: Sizes) -> bool:  # there is a steady state, of equal passes
    return at.m >= 2 * at.p and at.equal


_FUNCTIONS = {'floor': floor, 'ceil': ceil}
_SIGNS = rf'(?:floor|ceil)(?=\()|[{"".join(Sizes._fields)}]|\d+(?:\.\d+)?|[<>]=|[-+*/%()<>=,]'
_TEXT = re.compile(r'(at most )?(.+?)(?: \(([^()]*(?:=|divides)[^()]*)\))?')


@dataclass(frozen=True)
class Formula:
    """A number that follows from sizes, and how a table writes it.

    Without `value` it is computed as its text says: a term, `at most` before it where it is a
    bound, and in brackets behind it the sizes for which it is promised.

    >>> bubble = Formula('(p-1)(F+B-W)/v (F=B=W, m >= p)')
    >>> bubble(Sizes(p=8, m=24, v=2)), bubble.where(Sizes(p=8, m=4))
    (3.5, False)
    """

    text: str
    value: Callable[[Sizes], float] | None = None
    where: Callable[[Sizes], bool] = lambda sizes: True  # at which the number is promised
    at_most: bool = False  # the promise is an upper bound

    def __post_init__(self) -> None:
        if self.value is not None:
            return
        found = _TEXT.fullmatch(self.text)
        bound, term, condition = found.groups(default='') if found else ('', '', '')
        try:
            value, where = _computed(term), _computed(condition or '1=1')
        except SyntaxError as error:
            raise ValueError(
                f'formula {self.text!r} cannot be computed: write a term of '
                f'{", ".join(Sizes._fields)} such as "(p-1)(F+B)/v (m >= p)", or give its `value`'
            ) from error
        object.__setattr__(self, 'value', value)
        object.__setattr__(self, 'where', where)
        object.__setattr__(self, 'at_most', bool(bound))

    def __call__(self, sizes: Sizes) -> float:
        """Return the number, also where it is not promised."""
        assert self.value is not None
        return self.value(sizes)

    def __str__(self) -> str:
        return self.text


def _computed(text: str) -> Callable[[Sizes], Any]:
    """Return the function of a term or of conditions, in which products have no sign."""
    text = re.sub(r'(\S+) divides (\w+)', r'\2 % (\1) = 0', text)
    signs = re.findall(_SIGNS, text)
    if ''.join(signs) != re.sub(r'\s', '', text):
        raise SyntaxError(text)
    python = ''
    for before, sign in pairwise(['(', *signs]):
        factor = before == ')' or (before[-1].isalnum() and before not in _FUNCTIONS)
        python += '*' * (factor and (sign == '(' or sign[0].isalnum()))
        python += {'=': '==', ',': ' and '}.get(sign, sign)
    code = compile(python, text, 'eval')
    return lambda sizes: eval(code, {**_FUNCTIONS, **sizes._asdict()})


@dataclass(frozen=True)
class Family:
    """A schedule family: how to generate it, and what a table says of it."""

    name: str  # canonical; of a user's own module its address, `package.module:name`
    order: Callable[..., Schedule] | str = field(repr=False)  # the generator, or `module:function`
    summary: str  # one line
    bubble: Formula | None  # idle time of the worst rank within its window
    memory: Formula | None  # peak on the worst rank, in activations of a microbatch on a full rank
    source: str  # the paper, and where in it
    when: str = ''  # the case in which to take it
    aliases: tuple[str, ...] = ()  # names of torch, Megatron, the research fork and others
    placement: str = 'loop'  # or `v`, `wave` (of two chunks it is a V), `two-way`
    # numbers of chunks per rank that it can take; none: two on a V, any where the generator takes
    # their number, else one
    chunks: range = range(0)
    default_chunks: int = 0  # 0: 2 where it can take several, else 1
    options: tuple[str, ...] = ()  # keyword arguments of the generator beside its sizes
    min_ranks: int = 0  # 0: 2 on a V and on two routes, else 1
    techniques: tuple[str, ...] = ()  # of its schedules, by their names in `techniques`
    default_slices: int = 0  # of a sequence, where the caller names no number; 0: 4, or 1 without
    tier: str = ''  # of the catalogue; none for a user's own

    def __post_init__(self) -> None:
        any_or_one = ANY if 'num_chunks' in self.options else ONE
        chunks = self.chunks or (TWO if self.placement == 'v' else any_or_one)
        defaults = {
            'chunks': chunks,
            'default_chunks': 1 if chunks == ONE else 2,
            'min_ranks': 2 if self.placement in ('v', 'two-way') else 1,
            'default_slices': 4 if 'slices' in self.techniques else 1,
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or value)

    @cached_property
    def generate(self) -> Callable[..., Schedule]:
        """`generate(num_ranks, num_microbatches, **options)` returns the schedule."""
        if not isinstance(self.order, str):
            return self.order
        module, function = self.order.split(':')
        parent = _OURS.removesuffix('.') if '.' in module else __package__
        return getattr(importlib.import_module(f'{parent}.{module}'), function)

    @property
    def moves(self) -> bool:
        """True if its schedules have passes that move activations, beside F, B and W."""
        return bool(_MOVING.intersection(self.techniques))

    @property
    def num_routes(self) -> int:
        """Ways through the ranks: copies of the weights that all ranks together hold."""
        return 2 if 'two_way' in self.techniques else 1

    @property
    def asynchronous(self) -> bool:
        """True if it steps without a flush: its schedule is several calls of m microbatches."""
        return 'updates' in self.techniques

    @property
    def is_plain(self) -> bool:
        """True if it has whole sequences, one way through the ranks, and a flush."""
        return self.default_slices == self.num_routes == 1 and not self.asynchronous

    @property
    def in_shards(self) -> bool:
        """True if its schedules have the output layer on all ranks."""
        return 'vocabulary' in self.techniques

    def label(self, num_chunks: int) -> str:
        """Return the name, and the chunks per rank where they are not the default: `gis v=4`."""
        return self.name if num_chunks == self.default_chunks else f'{self.name} v={num_chunks}'


RECOMMENDED, MORE, PAPERS = TIERS = 'recommended', 'more', 'papers'
"""Tiers of the catalogue, each a table of `schedules/catalogue`."""

ASYNCHRONOUS = 'pipedream', 'pipedream-2bw', 'paci', 'pipemare', 'wpipe', 'wpipe-joint'
# The library's own, in the order of `zbpp list`: runs of names, each from the table of one tier. A
# table is imported when one of its names is asked for, and all are for an alias.
_INDEX = (
    (MORE, ('gpipe',)),
    (RECOMMENDED, ('1f1b',)),
    (MORE, ('1f1b-pb', 'kfkb')),
    (PAPERS, ('2bp', '2bp-1f1b', 'merak', 'varuna')),
    (MORE, ('bpipe',)),
    (RECOMMENDED, ('interleaved',)),
    (MORE, ('breadth-first',)),
    (RECOMMENDED, ('zb-h1',)),
    (MORE, ('zb-h2', 'zb-1p')),
    (RECOMMENDED, ('zb-2p', 'zb-v', 'v-half')),
    (MORE, ('v-min', '1f1b-v')),
    (RECOMMENDED, ('zb-interleaved',)),
    (MORE, ('gis', 'gis-h')),
    (RECOMMENDED, ('po',)),
    (MORE, ('po-h', 'po-f')),
    (PAPERS, ('hanayo',)),
    (MORE, ('dualpipe-v', 'stp')),
    (PAPERS, ('zeropp',)),
    (MORE, ('seq1f1b', 'seq1f1b-zb', 'seq-zb-v', 'seq1f1b-interleaved', 'slimpipe')),
    (PAPERS, ('chimera', 'chimera-zb', 'chimera-doubling', 'gems', 'dualpipe', 'bitpipe')),
    (PAPERS, ASYNCHRONOUS),
)
_FAMILIES: dict[str, Family] = {}  # by name, in the order of registration
_NAMES: dict[str, str] = {}  # of each name and alias, as look-ups compare them, the family's name


def family(
    name: str,
    *,
    summary: str = '',
    bubble: Formula | None = None,
    memory: Formula | None = None,
    source: str = '',
    aliases: tuple[str, ...] = (),
    chunks: range | None = None,
    min_ranks: int = 1,
    moves: bool = False,
    num_routes: int = 1,
    asynchronous: bool = False,
    in_shards: bool = False,
) -> Callable[[Generator], Generator]:
    """Return a decorator that registers a user's generator as a family, and returns it unchanged.

    The generator takes `num_ranks` and `num_microbatches`, and of `num_chunks`, `costs`,
    `memory_limit`, `together` and `num_slices` those that its signature has; the defaults of its
    `num_chunks` and `num_slices` are the family's.

    Args:
        name: case, `-` and `_` do not matter. Outside this package `package.module:` is put before
            it, and before other names; the name of the function is one of them.
        summary: one line; by default the first of the generator's docstring.
        bubble: idle time of the worst rank within its window, if there is a formula.
        memory: peak on the worst rank, if there is a formula.
        source: the paper, and where in it.
        aliases: other names.
        chunks: the numbers of chunks per rank that it can take; by default any if it takes
            `num_chunks`, else one.
        min_ranks: fewest ranks that it can take.
        moves: whether it has passes that move activations, beside F, B and W.
        num_routes: ways through the ranks; 2 where microbatches run against each other.
        asynchronous: whether it steps without a flush, and makes several calls of m microbatches.
        in_shards: whether its schedules have the output layer on all ranks.

    Raises:
        ValueError: another family has one of the names already.
    """

    def register(generate: Generator) -> Generator:
        parameters = inspect.signature(generate).parameters
        taken = ANY if 'num_chunks' in parameters else ONE
        allowed = taken if chunks is None else chunks
        default = parameters['num_chunks'].default if 'num_chunks' in parameters else allowed.start
        module = generate.__module__
        where = '' if module.startswith(_OURS) else f'{module}:'
        others = (*aliases, generate.__name__) if where else aliases
        slices = parameters['num_slices'].default if 'num_slices' in parameters else 1
        declared = {'moves': moves, 'two_way': num_routes > 1}
        declared |= {'updates': asynchronous, 'vocabulary': in_shards, 'slices': slices > 1}
        text = summary or (inspect.getdoc(generate) or 'no description').splitlines()[0]
        _enter(
            Family(
                name=where + name,
                order=generate,
                summary=text,
                bubble=bubble,
                memory=memory,
                source=source or module,
                aliases=tuple(where + other for other in others),
                chunks=allowed,
                default_chunks=allowed.start if default is inspect.Parameter.empty else default,
                options=tuple(option for option in _OPTIONS if option in parameters),
                min_ranks=min_ranks,
                techniques=tuple(name for name, has in declared.items() if has),
                default_slices=slices,
            )
        )
        return generate

    return register


def _enter(entry: Family) -> None:
    """Register a family under all its names; one of the same name takes the place of the old."""
    keys = {_key(name) for name in (entry.name, *entry.aliases)}
    for key in keys:
        holder = _NAMES.get(key, entry.name)
        if holder != entry.name:
            raise ValueError(
                f'schedule {entry.name!r} wants the name {key!r}, which {holder!r} has: '
                'choose another'
            )
    _FAMILIES[entry.name] = entry
    _NAMES.update(dict.fromkeys(keys, entry.name))


def own_families(every: bool = False) -> tuple[Family, ...]:
    """Return the library's own, as `zbpp list`; `every`: sliced, two-way, asynchronous, too."""
    for tier in TIERS:
        _load(tier)
    found = (_FAMILIES[name] for _, names in _INDEX for name in names)
    return tuple(f for f in found if every or f.is_plain)


def families() -> Iterator[Family]:
    """Return all that are registered: the library's own, then others in order of registration."""
    own = own_families(every=True)
    return iter((*own, *(other for other in tuple(_FAMILIES.values()) if other not in own)))


def find(name: str) -> Family:
    """Return the family of that name, alias or address; an address has its module imported."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f'schedule {name!r} is no name: give one, such as zb-v (zbpp list)')
    module = name.strip().rpartition(':')[0]
    if _key(name) not in _NAMES:
        if module:
            _import(module, name)
        else:  # the table with that name; for an alias or an unknown name, all
            own = [tier for tier, names in _INDEX if _key(name) in map(_key, names)]
            for tier in own or TIERS:
                _load(tier)
    if _key(name) in _NAMES:
        return _FAMILIES[_NAMES[_key(name)]]
    if module:
        own = [known for known in _FAMILIES if known.startswith(f'{module}:')]
        raise ValueError(
            f'unknown schedule {name!r}: module {module!r} registers '
            f'{", ".join(own) or "none"}; put @family(...) above the function that makes it'
        )
    known = [each.name for each in families()]
    near = difflib.get_close_matches(_key(name), _NAMES, n=3)
    meant = ' or '.join(dict.fromkeys(repr(_NAMES[each]) for each in near))
    hint = f'did you mean {meant}? zbpp list --all' if near else f'known are {", ".join(known)}'
    raise ValueError(f'unknown schedule {name!r}: {hint}; one of your own is package.module:name')


def _load(tier: str) -> None:
    for row in importlib.import_module(f'{__package__}.catalogue.{tier}').ROWS:
        if row.name not in _FAMILIES:
            _enter(replace(row, tier=tier))


def _import(module: str, name: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f'{module}.'.startswith(f'{error.name}.'):
            raise ValueError(f'schedule {name!r}: importing {module!r} fails: {error}') from error
        raise ValueError(
            f'schedule {name!r}: there is no module {error.name!r}: install it on every host, or '
            'name its folder in PYTHONPATH'
        ) from error
    except Exception as error:
        raise ValueError(f'schedule {name!r}: importing {module!r} fails: {error!r}') from error


def _key(name: str) -> str:
    module, colon, last = name.strip().rpartition(':')
    return module + colon + last.lower().replace('-', '').replace('_', '')
