"""Post-validation that is taken out and put in again, as where several schedules take turns."""

from __future__ import annotations

from contextlib import ExitStack

from example import MODEL, forget_groups

TURN = 4  # iterations


def train(argv: list[str]) -> tuple[int, int]:
    """Runs on each rank; returns how many steps were early, and iterations that ran again."""
    import pretrain_gpt as script

    with ExitStack() as stack:
        stack.callback(forget_groups)
        args = script.parse_args(argv)
        plugin = script.enable(args, stack)
        assert plugin is not None
        script.initialize(args)
        models = script.build_model(args)
        optimizer, _ = script.build_optimizer(args, models)
        data = script.iterators(args, script.build_datasets(args)[0], 0)
        for iteration in range(2 * TURN):
            if iteration == TURN:
                plugin.disable()
                plugin.install()
            for model in models:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            script.run_batch(args, models, data)
            optimizer.step()
        return plugin.post_validation.early, plugin.post_validation.redone


def test_no_weights_are_said_to_have_changed_in_the_next_turn(ranks, data):
    """Weights that a turn has ended with are not those that the next one begins with."""
    argv = [*MODEL, '--num-layers', 4, '--data-path', data, '--log-interval', 1000]
    argv += ['--pipeline-model-parallel-size', 2, '--global-batch-size', 4, '--clip-grad', 100]
    argv += ['--train-iters', 2 * TURN, '--pipeline-schedule', 'zb-h1']
    argv += ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 1]
    found = ranks(2).run(train, list(map(str, argv)))
    early, redone = zip(*found, strict=True)
    assert max(early) > TURN, 'in both turns'
    assert redone == (0, 0)
