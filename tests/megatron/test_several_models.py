"""Loops as reinforcement learning has them: several models, passes of other sizes between steps.

A policy trains; before each step it and a reference say how likely they take tokens to be, in other
batches of shorter sequences, as many as there are: by `compute_logprobs_batch` of Megatron's
train_rl.py one microbatch a call (itself: test_train_rl.py).
The step's size has both answers in it: a bit of either shows.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from copy import copy

from example import MODEL, early_steps, forget_groups
from grids import grid
from stock import trained as trained_by_stock
from supported import supports

STEPS = 3
SCORED = {'seq_length': 8, 'micro_batch_size': 2}  # training has others
CALLS = (3, 1, 7)  # microbatches of each call by step: they divide by no number of ranks


def whole_model(script, args):
    """A reference that each rank has all of, with a pipeline of itself alone; and its groups."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    names = ['tp', 'cp', 'pp', 'embd', 'pos_embd', 'dp', 'dp_cp', 'tp_cp', 'tp_dp_cp', 'mp']
    groups = ProcessGroupCollection(**dict.fromkeys(names, own))
    groups.tp = groups.cp = parallel_state.get_tensor_model_parallel_group()
    config = script.TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    model = script.GPTModel(
        config,
        script.get_gpt_layer_local_spec(),
        vocab_size=-(-script.VOCABULARY // 128) * 128,
        max_sequence_length=args.seq_length,
        pg_collection=groups,
    )
    script.draw_weights([model], args.seed + 1)
    return [model], {'pg_collection': groups}


def score(script, models, data, groups, num_microbatches):
    """The summed log likelihood of each microbatch, on the last rank of the model's pipeline."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    def take(losses, non_loss_data=True):
        return losses.detach().sum()

    def forward_step(iterator, model):
        batch = next(iterator)
        output = model(batch['tokens'], batch['position_ids'], None, labels=batch['labels'])
        return output, take

    function = schedules.forward_backward_no_pipelining if groups else get_forward_backward_func()
    many = len(models) > 1
    with torch.no_grad():
        return function(
            forward_step_func=forward_step,
            data_iterator=data if many else data[0],
            model=models if many else models[0],
            forward_only=True,
            collect_non_loss_data=True,
            num_microbatches=num_microbatches,
            **SCORED,
            **groups,
        )


def batches(seed, length, size):
    """Endless, the same on all ranks."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(length).expand(size, -1)
    while True:
        tokens = torch.randint(0, 256, (size, length + 1), generator=generator)
        yield {
            'tokens': tokens[:, :-1],
            'labels': tokens[:, 1:],
            'position_ids': positions,
            'loss_mask': torch.ones(size, length),
        }


def trained(argv, second):
    """Answers of both models and losses of the policy, in hex, and hashes of its weights; and how
    many steps were taken early.

    Args:
        argv: of the example.
        second: what the reference is, 'pipelined' or 'whole'.
    """
    import pretrain_gpt as script
    import report
    import torch.distributed as dist

    try:
        with ExitStack() as stack:
            args = script.parse_args(list(map(str, argv)))
            script.enable(args, stack)
            script.initialize(args)
            policy, groups = script.build_model(args), {}
            if second == 'whole':
                reference, groups = whole_model(script, args)
            else:
                other = copy(args)
                other.seed += 1
                reference = script.build_model(other)
            optimizer, _ = script.build_optimizer(args, policy)
            training = [batches(100, args.seq_length, 1) for _ in policy]
            found = []
            for step in range(STEPS):
                answers = []
                for models, options in ((policy, {}), (reference, groups)):
                    length, size = SCORED['seq_length'], SCORED['micro_batch_size']
                    data = [batches(step, length, size) for _ in models]
                    answers.append(score(script, models, data, options, CALLS[step]))
                told = [answers]
                dist.broadcast_object_list(told, src=dist.get_world_size() - 1)
                gain = sum(own - theirs for own, theirs in zip(*told[0], strict=True))
                for group in optimizer.param_groups:  # a bit of either answer shows
                    group['lr'] = 1e-3 * (2 + math.tanh(gain))
                for model in policy:
                    model.zero_grad_buffer()
                optimizer.zero_grad()
                loss = script.run_batch(args, policy, training)
                assert optimizer.step()[0]
                flat = [float(answer).hex() for each in told[0] for answer in each]
                found.append((flat, None if loss is None else loss.hex()))
            hashes = report.fingerprint(report.by_layer(policy), optimizer)
            return found, hashes, early_steps()
    finally:
        forget_groups()


@supports(
    'policy and reference in one process ({second}), forward-only passes of other sizes between'
)
@grid(
    schedule=('zb-v', 'zb-h1', 'interleaved', 'zb-2p+post-validation'),
    second=('whole', 'pipelined'),
    p=(2, 2, 4),
)
def test_policy_and_reference(ranks, schedule, second, p):
    name, _, early = schedule.partition('+')
    argv = [*MODEL, '--num-layers', 2 * p, '--pipeline-model-parallel-size', p, '--clip-grad', 1e9]
    argv += ['--global-batch-size', 5, '--train-iters', STEPS]
    post = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 1]
    stock = trained_by_stock(ranks(p), trained, [*argv, '--pipeline-schedule', 'megatron'], second)
    ours = ranks(p).run(
        trained, [*argv, '--pipeline-schedule', name, *(post if early else [])], second
    )
    losses, *_ = stock[-1]
    assert len({loss for _, loss in losses}) == STEPS
    assert len({answer for answers, _ in losses for answer in answers}) == 2 * sum(CALLS)
    assert [left[:2] for left in ours] == [left[:2] for left in stock]
    assert any(left[2] for left in ours) == bool(early)
