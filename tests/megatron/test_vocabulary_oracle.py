"""Blocking S has the bits of Megatron's tensor-parallel head, and S and T are close to it."""

import pytest
import torch
import torch.distributed as dist
from example import forget_groups
from models import Job

RANKS = 4
TYPES = torch.float32, torch.bfloat16


def three(pipeline, tensor):
    """Runs on a rank: by type, blocking S over the pipeline's ranks, S and T, and Megatron's head.
    That is of tensor parallelism over the same ranks. All have the same weights and hidden
    states."""
    import pretrain_gpt as script
    from blocking_head import Head, blocking, of_tensor_parallelism
    from megatron.core import parallel_state

    heads = {dtype: Head.draw(dtype) for dtype in TYPES}
    try:
        script.initialize(script.parse_args(pipeline))
        group = parallel_state.get_pipeline_model_parallel_group()
        found = {
            t: (blocking(head, group), in_two_passes(head, group)) for t, head in heads.items()
        }
        forget_groups()
        script.initialize(script.parse_args(tensor))
        group = parallel_state.get_tensor_model_parallel_group()
        return {t: (*found[t], of_tensor_parallelism(each, group)) for t, each in heads.items()}
    finally:
        forget_groups()


def in_two_passes(head, group):
    """S and T of Algorithm 2, with the collectives between them."""
    from blocking_head import Found

    from megatron_zbpp.mcore.techniques import vocabulary_shards as vocabulary
    from megatron_zbpp.mcore.techniques.split_vocabulary import shard_of
    from megatron_zbpp.mcore.techniques.vocabulary_shards import divide

    model = head.model(group.rank() == RANKS - 1, pipeline_model_parallel_size=RANKS)
    divide(model)
    shard = shard_of(model)
    shard.weight.data.copy_(head.rows(group))
    rows = head.labels.t().shape
    weights = head.weights.t().flatten()
    made, part = shard(head.hidden.flatten(0, 1), targets=head.labels.t().flatten())
    whole = vocabulary.combined(vocabulary.gathered(made.statistics, group))
    own = part.away * vocabulary.share(made.statistics, whole) - part.there
    hidden = own.to(part.away.dtype)
    dist.all_reduce(hidden, group=group)
    return Found(
        vocabulary.losses_of(whole).view(rows).t(),
        (hidden * weights[:, None]).to(hidden.dtype).view_as(head.hidden),
        vocabulary.weight_gradient(made, whole, weights),
        torch.stack([whole[0], whole[2]]).view(2, *rows).transpose(1, 2),
    )


@pytest.fixture(scope='module')
def found(ranks, data):
    """Results of `three`."""
    sizes = {'pp': RANKS}, {'pp': 1, 'tp': RANKS}
    return ranks(RANKS).run(
        three, *(Job(layers=1, **each).argv('megatron', False, data) for each in sizes)
    )


@pytest.mark.parametrize('dtype', TYPES)
def test_blocking_s_has_the_bits_of_tensor_parallelism(found, dtype):
    for of_rank in found:
        blocking, _, stock = of_rank[dtype]
        for name, ours in blocking._asdict().items():
            theirs = getattr(stock, name)
            assert theirs.abs().max() > 1
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name


# shares of the largest value. A shard divides by its own sum and alpha corrects that: the same sums
# in another order. In bf16 the parts of dX cancel each other, and each rank rounds its own
NEAR = {
    torch.float32: {'losses': 2e-7, 'hidden': 1e-6, 'weight': 1e-6},
    torch.bfloat16: {'losses': 2e-7, 'hidden': RANKS * 2**-7, 'weight': 2**-8},
}


@pytest.mark.parametrize('dtype', TYPES)
def test_s_and_t_are_close_to_blocking_s(found, dtype):
    """To the bit are the logits that enter sums: the largest ones, and those of targets."""
    for of_rank in found:
        blocking, shards, _ = of_rank[dtype]
        assert torch.equal(shards.exact, blocking.exact)
        for name, share in NEAR[dtype].items():
            ours, oracle = (getattr(each, name) for each in (shards, blocking))
            assert ours.dtype == oracle.dtype
            assert (ours - oracle).abs().max() <= share * oracle.abs().max(), name
