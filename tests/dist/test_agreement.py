"""Settings that differ are found by all ranks, and named with the ranks that have them."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron_zbpp.runtime.guard.agreement import DisagreementError, agree, compare, fingerprint
from megatron_zbpp.schedules import build


def differ(settings):
    """What this rank is told, given the settings of all."""
    try:
        agree(settings[dist.get_rank()], dist.group.WORLD)
    except DisagreementError as error:
        return str(error)
    return None


def test_every_rank_names_what_differs(ranks):
    common = {'schedule': 'zb-v', 'number of microbatches': 8, 'message shape': (16, 1, 32)}
    other = common | {'number of microbatches': 4, 'message shape': (16, 1, 64)}
    told = ranks(4).run(differ, [common, common, other, common])
    assert (
        told
        == [
            'ranks were started with different settings: give all of them the same\n'
            '  number of microbatches: 8 on ranks 0, 1, 3; 4 on rank 2\n'
            '  message shape: (16, 1, 32) on ranks 0, 1, 3; (16, 1, 64) on rank 2'
        ]
        * 4
    )


def test_equal_settings_pass(ranks):
    assert ranks(2).run(differ, [{'schedule': build('zb-v', 2, 4)}] * 2) == [None, None]


def test_setting_that_another_release_does_not_know():
    with pytest.raises(DisagreementError, match='new: 1 on rank 0; unknown on rank 1'):
        compare({0: {'same': '2', 'new': '1'}, 1: {'same': '2'}})


def test_schedules_that_differ_in_the_order_of_two_passes():
    one = build('zb-h1', 2, 4)
    first = one.passes[0]
    other = replace(one, passes=((first[1], first[0], *first[2:]), one.passes[1]))
    assert fingerprint(one).startswith('zb-h1 (') and fingerprint(one) != fingerprint(other)
