"""What torch.compile has made runs on the emulated device, with and without triton."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch

def double(x):
    return torch.sin(x) * 2

before = torch.compile(double)
import megatron_zbpp
assert megatron_zbpp.device().type == 'cpu'
after = torch.compile(double)
x = torch.randn(8)
assert torch.equal(before(x), double(x)) and torch.equal(after(x), double(x))
"""


@pytest.mark.parametrize('disabled', ['', '0'])
def test_compiled_functions_run(monkeypatch: pytest.MonkeyPatch, disabled: str) -> None:
    """Those from before `device()`, too; and where the environment asks for the compiler."""
    monkeypatch.setenv('TORCHDYNAMO_DISABLE', disabled)
    if not disabled:
        monkeypatch.delenv('TORCHDYNAMO_DISABLE')
    done = subprocess.run([sys.executable, '-c', PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
