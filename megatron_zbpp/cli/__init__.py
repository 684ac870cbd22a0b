"""The command `zbpp`."""

from megatron_zbpp.cli.parser import main as main
