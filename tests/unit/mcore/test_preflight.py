"""Settings that are taken back, those that make ranks wait, and the words of rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import preflight
from megatron_zbpp.mcore.job.rules import by_flags
from megatron_zbpp.mcore.job.rules_table import rows


def test_what_is_set_is_taken_back_and_said():
    config = SimpleNamespace(defer_embedding_wgrad_compute=True)
    (said,) = preflight.take_back(config)
    assert said == '--defer-embedding-wgrad-compute has no effect: the schedule places all W passes'
    assert not config.defer_embedding_wgrad_compute
    assert not list(preflight.take_back(config)) and not list(
        preflight.take_back(SimpleNamespace())
    )


def test_a_model_that_was_built_with_it_is_refused():
    config = SimpleNamespace(defer_embedding_wgrad_compute=True)
    with pytest.raises(NotImplementedError, match=r'enable\(\) before the model is built'):
        preflight.require_taken_back(config)
    preflight.require_taken_back(SimpleNamespace(defer_embedding_wgrad_compute=False))


def test_barriers_are_said_with_value_and_cure():
    """Each is a row that `test_refusals.py` tries; where the schedule is a V, some are none."""
    args = SimpleNamespace(rerun_mode='report', untie_embeddings_and_output_weights=False)
    rerun, tied = preflight.barriers(args, Placement.loop(4))
    assert rerun.startswith('rerun_mode=report: ') and rerun.endswith('; --rerun-mode disabled')
    assert 'untie them, or use a schedule with a V' in tied
    assert [*preflight.barriers(args, Placement.v(4))] == [rerun]
    assert not [*preflight.barriers(SimpleNamespace(log_interval=100), Placement.loop(4))]


def test_texts_name_settings_by_their_flags():
    given = 'give {fp8:e4m3}, {apply_rope_fusion:off} or {untie_embeddings_and_output_weights}'
    said = 'give --fp8-format e4m3, --no-rope-fusion or --untie-embeddings-and-output-weights'
    assert by_flags(given) == said


@pytest.mark.parametrize('text', ['# nowhere\na: b', '# every schedule\na is odd: b'])
def test_words_that_no_condition_has_are_no_row(text):
    with pytest.raises((ValueError, AssertionError)):
        [*rows(text)]
