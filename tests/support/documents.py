"""Documents of JSON with one thing changed."""

import copy

from hypothesis import strategies as st

NUMBERS = [0, -1, 2.5, 8.0, 10**17, 10**18, 10**400, 1e308]
TEXTS = ['', 'F', '٣', '3F1', 'a\x1b[2J', 'b\x07', '\ud800', 'c\rd']
HOLDERS = [[], [[]], [None], [True], {}, {'F': 1}, {'a': {}}]
ODD = st.sampled_from([None, True, False, *NUMBERS, *TEXTS, *HOLDERS])


def places(document, path=()):
    yield path
    inside = document.items() if isinstance(document, dict) else ()
    inside = enumerate(document) if isinstance(document, list) else inside
    for key, value in inside:
        yield from places(value, (*path, key))


def changed(document, path, how, value):
    """A copy in which the value at `path` is another, or gone, or has another beside it."""
    document = copy.deepcopy(document)
    if not path:
        return value
    *way, last = path
    holder = document
    for key in way:
        holder = holder[key]
    if how == 'replaced':
        holder[last] = value
    elif how == 'gone':
        del holder[last]
    elif isinstance(holder, dict):
        holder[f'{last}\x1b' if value is True else f'{last}s'] = value
    else:
        holder.insert(last, value)
    return document
