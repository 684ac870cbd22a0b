"""A program that enables the plugin before NVIDIA's training loop is imported, and disables it.

Prints, as JSON, where something of ours is in Megatron's modules: before, while, and after.
"""

import functools
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import megatron_zbpp
from megatron_zbpp.emulation import cpu

PACKAGE = str(Path(megatron_zbpp.__file__).parent)
CPU = {cpu.__file__}


def is_ours(value: object) -> bool:
    """Whether it is code, a class or an object of the package; what is there for the CPU stays."""
    if isinstance(value, functools.partial):
        return is_ours(value.func)
    if isinstance(value, FunctionType):
        file = value.__code__.co_filename
        return file.startswith(PACKAGE) and file not in CPU
    owner = value if isinstance(value, type) else type(value)
    return owner.__module__.startswith('megatron_zbpp')


def found() -> Iterator[str]:
    """Places in Megatron's modules, and in their classes."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not name.startswith('megatron.'):
            continue
        for attribute, value in list(vars(module).items()):
            if is_ours(value):
                yield f'{name}.{attribute}'
            if isinstance(value, type) and value.__module__ == name:
                for inner, method in list(vars(value).items()):
                    if is_ours(method):
                        yield f'{name}.{attribute}.{inner}'


def main(checkout: str) -> None:
    if checkout:
        sys.path.insert(0, checkout)
    cpu.install()
    plugin = megatron_zbpp.enable('zb-v')
    before = list(found())
    importlib.import_module('megatron.training.training')
    while_enabled = list(found())
    plugin.disable()
    print('\n' + json.dumps([before, while_enabled, list(found())]))


if __name__ == '__main__':
    main(sys.argv[1])
