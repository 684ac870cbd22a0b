"""What a rank runs by itself: one microbatch of each stage, for which it waits for nobody."""

import pytest

from megatron_zbpp import Pass
from megatron_zbpp.analysis.program import Begin, Exchange, Hand, Join, Receive, Send
from megatron_zbpp.ir import B, F, W
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.runtime.stage import Wrapper, folded, overridden
from megatron_zbpp.runtime.tables import one_microbatch

CASES = {
    'zb-v': {}, '1f1b': {}, 'zb-interleaved': {}, 'chimera-zb': {}, 'dualpipe': {},
    'zb-h1, slices': {'slices': 2}, 'zb-v, offload': {'offload': 'all'},
    'zb-v, recompute': {'recompute': 'half'}, 'bpipe': {},
    'zb-v, vocabulary': {'vocab_parallel': 'output'},
}  # fmt: skip


@pytest.mark.parametrize('case', CASES)
def test_of_one_microbatch(case):
    programs = Programs(Settings(case.partition(',')[0], **CASES[case]))
    lowered = programs.lowered(4, 8, False)
    exchanges = []
    for rank, program in enumerate(lowered.programs):
        alone = one_microbatch(program)
        passes = [i for i in alone if isinstance(i, Pass)]
        held = lowered.placement.stages(rank)
        for stage in held:
            mine = [p for p in passes if p.stage == stage]
            assert len({p.microbatch for p in mine}) == 1
            whole = [
                p for p in program if isinstance(p, Pass) and p.microbatch == mine[0].microbatch
            ]
            kinds = [p.kind for p in whole if p.stage == stage and p.kind in (F, B, W, 'R', 'BW')]
            assert [p.kind for p in mine] == kinds
        came = {i.consumer for i in alone if isinstance(i, Receive | Hand)}
        taken = {i.consumer for i in program if isinstance(i, Receive | Hand)} & {*passes}
        assert taken <= came, 'a pass that takes a message gets one'
        seen = set()
        for i in alone:
            assert not isinstance(i, Begin | Join)
            if isinstance(i, Pass):
                seen.add(i)
            elif isinstance(i, Hand | Send):
                assert i.producer in seen, 'only what has been made here goes on'
        exchanges.append([i for i in alone if isinstance(i, Exchange)])
    assert all(each == exchanges[0] for each in exchanges), 'collectives have one order'
    assert bool(exchanges[0]) == ('vocabulary' in case)


# ---- Wrappers around a stage: methods that they have of their own, the first next to the stage.


class Adding(Wrapper):
    """Writes its name behind what comes from within."""

    def release(self, output, inner):
        return [*inner(output), self.stage]


def test_the_first_is_the_innermost():
    release = folded(
        [Adding('a'), Wrapper('none'), Adding('b')], 'release', lambda output: [output]
    )
    assert release('stage') == ['stage', 'a', 'b']

    def innermost(output):
        return output

    wrappers = [Wrapper('a'), Adding('b')]
    assert folded(wrappers, 'step', innermost) is innermost
    assert folded(wrappers[:1], 'release', innermost) is innermost
    assert overridden(wrappers, 'reads') == []
    assert [method.__self__ for method in overridden(wrappers, 'release')] == wrappers[1:]
