"""Options: the fields of `Settings`, from which flags, help, docstrings and a page are made.

Problems of a request are each about an option, and are told in the user's name of it.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from math import isfinite
from textwrap import fill
from typing import Any, NamedTuple, ParamSpec, TypeVar

import docstring_parser

_Given = ParamSpec('_Given')
_Settings = TypeVar('_Settings')
_Made = TypeVar('_Made')


@dataclass(frozen=True)
class Option:
    """An argument of `enable`, a flag of the command line, or both."""

    # as it is typed, and behind it the unit of its value, or the values that it takes; without one
    # it is a switch. Empty: there is no flag.
    flag: str = ''
    # its meaning, behind that of its first part; the first sentence holds for `zbpp`, too
    text: str = ''
    flag_default: Any = None  # of the flag
    # the smallest number that it takes, an integer where only those are taken; None: it takes no
    # numbers
    least: float | None = None
    or_else: str = ''  # what it takes beside numbers, for errors
    booleans: bool = False  # whether it takes True and False, too
    choices: tuple[str, ...] = ()  # the only values, beside the default
    holds: Callable[[Any], Any] | None = None  # tells whether it takes a value; None: any
    takes: str = ''  # such values, for errors
    differs: str = ''  # why losses from scratch differ from Megatron's with it; empty: they do not
    page: str = ''  # a link to more about it, in Markdown
    parts: tuple[Option, ...] = ()  # the flags that it is made from, where it has none of its own

    @property
    def flags(self) -> tuple[Option, ...]:
        """Its flags: itself, or those that it is made from."""
        return (self,) if self.flag else self.parts

    @property
    def name(self) -> str:
        return self.flag.partition(' ')[0]

    @property
    def unit(self) -> str:
        """The unit of the flag's value; empty: it is a switch."""
        return self.flag.partition(' ')[2] or '|'.join(self.choices)

    @property
    def dest(self) -> str:
        """The name of the parsed argument."""
        return self.name.removeprefix('--').replace('-', '_')

    @property
    def shown_default(self) -> str:
        """The default of the flag, for people; empty: there is none to tell."""
        default = self.flag_default
        return default if isinstance(default, str) else '' if default is None else f'{default:g}'

    def require(self, value: Any, name: str) -> None:
        """Check that the option takes `value`, given by `name`; numbers may be None."""
        takes, whole = self.takes, isinstance(self.least, int)
        boolean, number = isinstance(value, bool), isinstance(value, int if whole else int | float)
        if self.choices:
            *others, last = map(repr, self.choices)
            takes = f'{", ".join(others)} or {last}'
            fits = value in (*self.choices, self.flag_default)
        elif (
            self.least is not None
            and not (value is None or (self.booleans and boolean))
            and (boolean or not number or not isfinite(value) or value < self.least)
        ):
            kind = 'a whole number' if whole else 'a number'
            takes, fits = f'{kind} from {self.least:g} up{self.or_else}', False
        else:
            fits = self.holds is None or self.holds(value)
        if not fits:
            raise ValueError(f'{name} is {value!r}: give {takes}')


def option(default: object, flag: str = '', compare: bool = True, **described: Any) -> Any:
    """Return a field of a dataclass that is an option; the docstring under it is the text.

    `default` is that of the field, and of the flag, unless that has another.
    """
    made = Option(flag, **{'flag_default': default, **described})
    return field(default=default, compare=compare, metadata={Option: made})


def options_of(settings: type) -> dict[str, Option]:
    """Return the options of a dataclass, by the names of their fields."""
    made = {each.name: each.metadata[Option] for each in fields(settings)}
    for param in docstring_parser.parse_from_object(settings).params:
        of = made[param.arg_name]
        texts = *(part.text for part in of.parts[:1]), *(param.description or '').split()
        made[param.arg_name] = replace(of, text=' '.join(texts))
    return made


def made_by(
    name: str, settings: Callable[_Given, _Settings], *args: _Given.args, **kwargs: _Given.kwargs
) -> _Settings:
    """Return the settings; raise TypeError for wrong arguments of the function `name`."""
    known = inspect.signature(settings)
    try:
        known.bind(*args, **kwargs)
    except TypeError as error:
        wrong = next((given for given in kwargs if given not in known.parameters), '')
        near = difflib.get_close_matches(wrong, known.parameters, 1)
        cure = f'did you mean {near[0]}?' if near else f'there are {", ".join(known.parameters)}'
        raise TypeError(f'{name}() {error}: {cure}') from None
    return settings(*args, **kwargs)


def with_options_of(
    settings: Callable[_Given, _Settings], options: Mapping[str, Option]
) -> Callable[[Callable[[_Settings], _Made]], Callable[_Given, _Made]]:
    """Let a function of settings take their options instead: in signature and docstring, too."""

    def decorate(function: Callable[[_Settings], _Made]) -> Callable[_Given, _Made]:
        @wraps(function)
        def taking_options(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
            return function(made_by(function.__name__, settings, *args, **kwargs))

        made = inspect.signature(function).return_annotation
        signature = inspect.signature(settings).replace(return_annotation=made)
        taking_options.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        before, returns, behind = inspect.cleandoc(function.__doc__ or '').partition('Returns:')
        wrap = partial(fill, width=96, initial_indent=' ' * 4, subsequent_indent=' ' * 8)
        lines = (wrap(f'{name}: {each.text}') for name, each in options.items())
        taking_options.__doc__ = '\n'.join([f'{before}Args:', *lines, '', returns + behind])
        return taking_options

    return decorate


_NAMED = re.compile(r'\{([A-Za-z_]\w*)(?::([^{}]*))?\}')


@dataclass(frozen=True)
class Names:
    """Names of options and of Megatron's settings, as one kind of user spells them.

    Texts name options in braces: `{moe_paged_stash}` one, `{cuda_graph_impl:none}` one with a
    value, `{apply_rope_fusion:off}` one that is switched off. Other braces stay.
    """

    # names that are not those of the table of options, or of Megatron's settings
    spelled: Mapping[str, str] = field(default_factory=dict[str, str])
    flags: bool = False  # names are flags; else arguments of a function, or fields

    def of(self, option: str) -> str:
        plain = '--' + option.replace('_', '-') if self.flags else option
        return self.spelled.get(option, plain)

    def fill(self, text: str) -> str:
        """Return a text with its options named."""

        def named(found: re.Match[str]) -> str:
            name, value = self.of(found[1]), found[2]
            if value == 'off':
                return f'--no-{name[2:]}' if self.flags else f'{name}=False'
            return name if not value else f'{name} {value}' if self.flags else f'{name}={value}'

        return _NAMED.sub(named, text)


ARGUMENTS = Names()


class Problem(NamedTuple):
    """An option whose value cannot work."""

    option: str  # argument of `enable`, or setting of Megatron's
    text: str  # the problem and its cure, with options in braces; of a schedule its drawing behind
    error: Exception  # that was raised


class Problems(ValueError):
    """Problems of one request, in the order of the checks."""

    def __init__(self, problems: Sequence[Problem], names: Names = ARGUMENTS) -> None:
        self.problems = tuple(problems)
        heads = (names.fill(each.text.partition('\n')[0]) for each in problems)
        self.lines = tuple(dict.fromkeys(heads))
        whole = names.fill(problems[0].text)
        # a schedule is drawn behind the only line
        self.drawn = len(self.lines) == 1 and whole != self.lines[0]
        super().__init__(whole if self.drawn else '\n'.join(self.lines))


class Checks:
    """Runs checks that do not depend on each other, each in `with checks.one(option):`."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    @contextmanager
    def one(self, option: str, *others: str) -> Iterator[None]:
        """Keep an error of the block as a problem of an option, or of one that it names first."""
        try:
            yield
        except (OSError, ValueError, NotImplementedError) as error:
            self.problems += problems_of(error, option, *others)

    def require_all(self, names: Names = ARGUMENTS) -> None:
        """Raise one error for all problems, in the names of the user.

        OSError where a file cannot be read and nothing else is wrong; NotImplementedError where all
        are combinations that are refused; else `Problems`.
        """
        if not self.problems:
            return
        error, problems = self.problems[0].error, Problems(self.problems, names)
        if len(self.problems) == 1 and isinstance(error, OSError):
            raise error
        if all(isinstance(each.error, NotImplementedError) for each in self.problems):
            raise NotImplementedError(str(problems)) from error
        raise problems from error


def problems_of(error: Exception, option: str, *others: str) -> tuple[Problem, ...]:
    """Return the problems that an error stands for, of `option` where it says no other."""
    if isinstance(error, Problems):
        return error.problems
    if isinstance(error, OSError) and error.filename is not None:
        return (Problem(option, f'{error.filename}: {error.strerror}', error),)
    text = str(error)
    for name in filter(None, (option, *others)):
        # a word such as 'schedule' may be the thing itself
        if re.match(rf'{name}(:? )' if '_' in name else rf'{name}( is|:| of) ', text):
            return (Problem(name, f'{{{name}}}{text[len(name) :]}', error),)
    return (Problem(option, text, error),)
