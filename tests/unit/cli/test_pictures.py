"""Pictures of `zbpp`: each format, headed by --title."""

from __future__ import annotations

import pytest

from megatron_zbpp.cli import main

COMMANDS = {
    'convert': 'convert --schedule zb-v --pp 2 --microbatches 4',
    'compare': 'compare --schedules zb-v,1f1b --pp 2 --microbatches 4',
    'plan': 'plan --pp 2 --microbatches 4 --seconds 0.02',
    'partition': 'partition layers.json --pp 2 --microbatches 4 --placements loop --exact',
}


BEGINS = {'a.svg': b'<svg', 'b.html': b'<!', 'c.png': b'\x89PNG', 'd.pdf': b'%PDF'}


@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_draws_every_format_under_a_title(command, tmp_path, monkeypatch, capsys):
    from matplotlib.figure import Figure

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    line = 'profile --model gpt --num-layers 4 --hidden 64 --heads 2 --vocab 128 --seq 32'
    assert main([*line.split(), '--tflops', '1', '-o', 'layers.json']) == 0
    heads, written_on = [], Figure.text

    def text(self, x, y, said, *rest, **how):
        heads.append(said)
        return written_on(self, x, y, said, *rest, **how)

    monkeypatch.setattr(Figure, 'text', text)
    for name, begins in BEGINS.items():
        assert main([*COMMANDS[command].split(), '-o', name, '--title', 'Ours & theirs']) == 0
        written = (tmp_path / name).read_bytes()
        assert written.startswith(begins)
        if name < 'c':
            assert b'Ours &amp; theirs' in written
    assert heads.count('Ours & theirs') == 2
    where = ['-o', 'plan.json'] if command != 'compare' else []
    assert main([*COMMANDS[command].split(), *where, '--title', 'Ours']) == 2
    assert "--title 'Ours' heads a picture" in capsys.readouterr().err
