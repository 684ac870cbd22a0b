"""Files that rows name, in the folder where they are tried."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_zbpp.ir import Placement


def write_files() -> None:
    from megatron_zbpp import build
    from megatron_zbpp.ir import Schedule
    from megatron_zbpp.partitioning.freeze_plans import FreezePlan

    made = build('zb-h1', 2, 4)

    def write(name: str, text: str) -> None:
        Path(name).write_text(text)

    def plan(name: str, layout: str, **more: object) -> None:
        own = {'layout': layout, 'schedule': json.loads(made.to_json())}
        write(name, json.dumps(own | more))

    plan('plan.json', 'Ett|ttL')
    plan('of-five.json', 'Ettt|ttL')
    plan('of-mtp.json', 'Ett|ttmL')
    plan('letters.json', 'tt|tt')
    plan('selective.json', 'Ett|ttL', selective=True)
    plan('hybrid.json', 'E**|*-L')
    write('zb-v.json', build('zb-v', 2, 4).to_json())
    write('sliced.json', build('seq1f1b', 2, 4, num_slices=2).to_json())
    write('of-three.json', build('zb-v', 3, 4).to_json())
    write('of-eight.json', build('zb-v', 2, 8).to_json())
    write('1f1b.json', build('1f1b', 2, 4).to_json())
    write('broken.json', '{"schedule": 1}')
    write('freeze.json', FreezePlan(made, (), 1.0, 1.0).to_json())
    write('freeze-1f1b.json', FreezePlan(build('1f1b', 2, 4), (), 1.0, 1.0).to_json())
    cut = FreezePlan(build('seq1f1b-zb', 2, 4, num_slices=2), (), 1.0, 1.0)
    write('freeze-slices.json', cut.to_json())
    inner = build('1f1b', 3, 4)
    for name, order in (('inner', (0, 2, 1)), ('outer', (0, 1, 2))):
        ranks = [inner.passes[order.index(rank)] for rank in range(3)]
        write(f'{name}.json', Schedule.of(name, Placement(order), 4, ranks).to_json())
    write('own_yaml.py', 'import yaml\n')
    write('own_nothing.py', '')
    write('own_needs.py', 'import nowhere_at_all\n')
    write('own_fails.py', 'import megatron_zbpp.schedules\nmegatron_zbpp.schedules.lost\n')
    head = 'from megatron_zbpp.schedules import build, family\n\n'
    head += '@family("made")\ndef made(num_ranks, num_microbatches):\n    return {}\n'
    write('own_text.py', head.format('"a text"'))
    write('own_more.py', head.format('build("1f1b", num_ranks, num_microbatches + 1)'))
    write('own_slices.py', head.format('build("seq1f1b", num_ranks, num_microbatches)'))
    asked = head.replace('microbatches)', 'microbatches, num_slices=4)')
    kept = 'build("seq1f1b", num_ranks, num_microbatches, num_slices=num_slices)'
    write('own_asked.py', asked.format(kept))
    write('own_right.py', head.format('build("1f1b", num_ranks, num_microbatches)'))
    Path('a-file').write_text('')
