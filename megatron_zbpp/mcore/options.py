"""Options: the fields of `Settings`, from which flags, help, docstrings and a page are made."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from math import isfinite
from textwrap import fill
from typing import Any, ParamSpec, TypeVar

import docstring_parser

_Given = ParamSpec('_Given')
_Settings = TypeVar('_Settings')
_Made = TypeVar('_Made')


@dataclass(frozen=True)
class Option:
    """An argument of `enable`, a flag of the command line, or both.

    Attributes:
        flag: as it is typed, and behind it the unit of its value, or the values that it takes;
            without one it is a switch. Empty: there is no flag.
        text: its meaning, behind that of its first part; the first sentence holds for `zbpp`, too.
        flag_default: of the flag.
        least: the smallest number that it takes, an integer where only those are taken; None: it
            takes no numbers.
        or_else: what it takes beside numbers, for errors.
        page: a link to more about it, in Markdown.
        parts: the flags that it is made from, where it has none of its own.
    """

    flag: str = ''
    text: str = ''
    flag_default: Any = None
    least: float | None = None
    or_else: str = ''
    page: str = ''
    parts: tuple[Option, ...] = ()

    @property
    def flags(self) -> tuple[Option, ...]:
        """Its flags: itself, or those that it is made from."""
        return (self,) if self.flag else self.parts

    @property
    def name(self) -> str:
        """The flag as it is typed."""
        return self.flag.partition(' ')[0]

    @property
    def unit(self) -> str:
        """The unit of the flag's value; empty: it is a switch."""
        return self.flag.partition(' ')[2]

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
        """Check that `value`, given by `name`, is a number that the option takes, or None.

        Raises:
            ValueError: it is not.
        """
        if value is None or self.least is None:
            return
        whole = isinstance(self.least, int)
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not isfinite(value) or value < self.least:
            kind = 'a whole number' if whole else 'a number'
            raise ValueError(
                f'{name} is {value!r}: give {kind} from {self.least:g} up{self.or_else}'
            )


def option(default: object, flag: str = '', compare: bool = True, **described: Any) -> Any:
    """Return a field of a dataclass that is an option; the docstring under it is the text.

    Args:
        default: of the field, and of the flag, unless that has another.
        flag: of `Option`.
        compare: whether settings that differ in it are different.
        **described: the rest of `Option`.
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
