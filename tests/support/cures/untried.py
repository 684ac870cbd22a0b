"""Statements that refuse something and that no row reaches.

Each is `file function`, or `file function: words of it`.
"""

from __future__ import annotations

# statements whose cure another test applies
ELSEWHERE = {
    'launch.py main': 'test_launcher.py::test_helpers_that_are_to_be_compiled',
    **dict.fromkeys(
        (
            'mcore/problems.py Checks.require_all: Problems',
            'mcore/command_line/naming.py renaming: error.lines',
        ),
        'test_arguments.py::test_all_that_is_wrong_is_told_at_once',
    ),
    **dict.fromkeys(
        (
            'mcore/command_line/advise.py AdvisedLine.shape: is missing',
            'mcore/command_line/advise.py AdvisedLine.shape: --vocab-size',
            'mcore/command_line/advise.py AdvisedLine.sizes',
            'mcore/command_line/advise.py AdvisedLine.own',
        ),
        'test_advise.py::test_what_cannot_work',
    ),
    'mcore/command_line/advise.py AdvisedLine._dense_first': 'test_advise.py::test_experts',
    **dict.fromkeys(
        (
            'mcore/command_line/advise.py AdvisedLine._model: give letters',
            'mcore/command_line/advise.py AdvisedLine._model: dense models alone',
        ),
        'test_advise.py::test_segments_of_a_pattern',
    ),
    'mcore/dropout_seeds.py DropoutSeeds._enter': 'test_dropout_seeds.py::'
    'test_layers_that_run_twice',
    'mcore/replicas.py _both': 'test_two_way_training.py::test_what_cannot_work',
    'mcore/reading.py require_asked': 'test_two_way_training.py::test_what_cannot_work',
    'mcore/reading.py _require_same': 'test_two_way_training.py::test_data_of_the_wrong_replica',
    'mcore/techniques/weight_watch.py _after_forward': 'test_asynchronous_weights.py::'
    'test_what_sees_neither_version',
    'mcore/iteration/prewarm.py prewarmed': 'test_prewarm.py::test_failing_inside',
    'mcore/building.py _require_chunk': 'test_built.py::test_a_model_that_is_not_told',
    'mcore/iteration/built.py require_all_layers': 'test_other_scripts.py::test_images',
    'mcore/iteration/built.py _require_layout': 'test_built.py::test_a_loop',
    'mcore/iteration/built.py _require_model_order': 'test_changed_layers.py::'
    'test_identical_to_megatron',
    'mcore/checkpoints/training_checkpoints.py require_same': 'test_rank_files.py::test_the_cure',
    **dict.fromkeys(
        (
            'mcore/layers/transformer_engine.py delaying_modules: parameters_split',
            'mcore/layers/transformer_engine.py delaying_modules: DistributedData',
        ),
        'test_te_layers_delayed.py::test_refused',
    ),
    'mcore/layers/transformer_engine.py delaying_modules: GroupedTensor': 'test_te_layers'
    '.py::test_gradients_to_the_bit',
    **dict.fromkeys(
        (
            'mcore/techniques/sliced.py require: collect_non_loss_data',
            'mcore/techniques/sliced.py SliceWrapper._first',
            'mcore/techniques/sliced.py SliceWrapper._require_sum',
            'mcore/techniques/sliced_layers.py _cut',
            'mcore/techniques/sliced_layers.py Kept.visit',
        ),
        'test_sliced_assumptions.py::test_refused_at_the_first_call',
    ),
    **dict.fromkeys(
        (
            'mcore/techniques/sliced.py _padded',
            'mcore/techniques/sliced_layers.py require: GPTModel',
            'mcore/techniques/sliced_layers.py require: {problem}',
            'mcore/techniques/sliced_layers.py Kept.extended',
        ),
        'test_sliced_assumptions.py::test_modules',
    ),
    'mcore/techniques/weight_watch.py BetweenCalls._compare': 'test_asynchronous_weights.py::'
    'test_what_a_program_changes_between_two_calls',
    'mcore/techniques/weight_watch.py Unwritten.forward': 'test_asynchronous_weights.py::'
    'test_forwards_that_write_what_steps_would_read',
    'mcore/optimizer/asynchronous_steps.py StageNorms._agree': 'test_asynchronous_weights.py::'
    'test_zeros_in_gradients_are_those_of_all_stages',
    'mcore/command_line/advise.py AdvisedLine.require_known': 'test_advise.py::'
    'test_memory_that_is_not_predicted',
    'mcore/command_line/own_checks.py require_possible': 'test_doctor.py::'
    'test_sizes_that_no_job_has',
    'mcore/command_line/own_checks.py require_sizes': 'test_doctor.py::test_sizes_that_no_job_has',
    'mcore/command_line/sizes.py require_every_size': 'test_arguments_files.py::test_refused_files',
    'mcore/enabled.py enable': 'test_plugin.py::test_other_values_need_disable',
    'mcore/options.py made_by': '../unit/mcore/test_settings.py::'
    'test_an_argument_that_enable_does_not_have',
    **dict.fromkeys(
        (
            'mcore/techniques/split_vocabulary.py OutputWrapper.call',
            'mcore/techniques/split_vocabulary.py OutputWrapper.report',
            'mcore/techniques/split_embedding.py EmbeddingWrapper._tokens',
            'mcore/techniques/vocabulary_shards.py InputShard.forward',
            'mcore/techniques/vocabulary_division.py divide',
        ),
        'test_vocabulary_training.py::test_refused_at_the_first_call',
    ),
    **dict.fromkeys(
        (
            'mcore/techniques/forwards_in_flight.py ForwardsInFlight.take',
            'mcore/techniques/forwards_in_flight.py ForwardsInFlight._require_free',
        ),
        'test_asynchronous_changes.py::test_data_that_forwards_in_flight_have_read',
    ),
    'mcore/iteration/hops.py _agreed': 'test_hops.py::test_neighbours_that_do_not_agree',
    **dict.fromkeys(
        (
            'mcore/iteration/hops.py with_hops',
            'mcore/iteration/hops.py _require_supported',
        ),
        'test_hops.py::test_what_does_not_go_with_it',
    ),
    'emulation/cpu.py install': 'test_cpu.py::test_seeds_are_applied',
    'mcore/layout.py require_placed: {reason}': 'test_refusals_when_built.py::'
    'test_hybrid_model_where_it_is_built',
}
# statements that name no cure, or one that cannot be tried here
UNTRIED = {
    '__init__.py __getattr__': "Python's own words for a name that a module lacks",
    'mcore/command_line/arguments.py _preparing.parse_known_args': 'ends what has been told',
    'mcore/problems.py Checks.require_all: _errors[0]': 'raises what a check has raised',
    'mcore/techniques/split_embedding.py EmbeddingWrapper._tokens.stop': 'ends a call of the '
    'program',
    'mcore/iteration/batch.py _looking': 'a layer that nobody knows yet: it is reported',
    'mcore/iteration/preparation.py refuse_unsupported: adjust_tensor': 'the cure is a program '
    'without the plugin',
    'mcore/layers/linear.py _Unasked.__torch_function__': 'a backward that Megatron '
    'has not: nothing to be cured',
    'mcore/patches/registry.py Registry._put': 'a release that nobody knows yet: it is reported',
    'mcore/layers/delayed_module.py DelayedModule.put': 'a backward outside of a '
    'schedule: nothing to be cured',
    'emulation/te.py install': 'the cures install Transformer Engine or a checkout',
    **dict.fromkeys(
        (
            'partitioning/freeze_plans.py freeze: is no share',
            'partitioning/freeze_plans.py _Programme.__init__',
        ),
        'tried by tests/unit/partitioning/test_freezing.py, without a launch line',
    ),
    'partitioning/freeze_plans.py _Programme.solve': 'a failure of the solver: it is reported',
    'emulation/te.py _load_tools': 'the cure is another environment of Python',
}
