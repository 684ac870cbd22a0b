"""Messages to the user: where they go by themselves, by the environment, and by the program."""

import re
import sys

import pages
import pytest
from commands import run
from paths import ROOT

SAY = """
from megatron_zbpp.runtime.log import job_log, rank_log
rank_log.debug('a detail')
rank_log.info('%d%% of it', 5)
job_log.warning('100% of the job')
"""
BOTH = ['megatron_zbpp: 5% of it', 'megatron_zbpp: 100% of the job']
# as `megatron.training` does when it is imported: plain lines of all loggers on stdout
ROOT_HANDLER = """
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
"""


def said(code, folder, **env):
    """Return the lines on stderr and on stdout of a fresh process."""
    env = {'PYTHONPATH': str(ROOT), 'MEGATRON_ZBPP_LOG_LEVEL': '', 'RANK': '0', **env}
    done = run([sys.executable, '-c', code], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines(), done.stdout.splitlines()


@pytest.mark.parametrize(
    ('code', 'env', 'expected'),
    [
        ('', {}, BOTH),
        # whether or not the root logger has a handler, which Megatron gives it
        (ROOT_HANDLER, {}, BOTH),
        (f'import megatron_zbpp.runtime.log\n{ROOT_HANDLER}', {}, BOTH),
        ('', {'RANK': '1'}, BOTH[:1]),  # of the whole job by the first rank
        ('', {'MEGATRON_ZBPP_LOG_LEVEL': 'warning'}, BOTH[1:]),
        ('', {'MEGATRON_ZBPP_LOG_LEVEL': 'ERROR'}, []),
        ('', {'MEGATRON_ZBPP_LOG_LEVEL': 'DEBUG'}, ['megatron_zbpp: a detail', *BOTH]),
    ],
)
def test_on_stderr_once(tmp_path, code, env, expected):
    assert said(code + SAY, tmp_path, **env) == (expected, [])


@pytest.mark.parametrize(('known', 'rank', 'expected'), [(True, 0, 1), (True, 1, 0), (False, 1, 1)])
def test_the_ranks_are_those_of_the_process_groups(monkeypatch, capsys, known, rank, expected):
    """Where there are some; processes that no launcher has started have no RANK."""
    dist = pytest.importorskip('torch').distributed
    from megatron_zbpp.runtime.log import job_log, rank_log

    # without pytest's, which it gives loggers that do not propagate
    monkeypatch.setattr(rank_log, 'handlers', rank_log.handlers[:1])
    monkeypatch.setenv('RANK', '0' if rank else '1')
    monkeypatch.setattr(dist, 'is_initialized', lambda: known)
    monkeypatch.setattr(dist, 'get_rank', lambda: rank)
    job_log.error('of the job')
    assert capsys.readouterr().err.count('megatron_zbpp: of the job\n') == expected


def test_a_level_that_is_none(tmp_path):
    env = {'PYTHONPATH': str(ROOT), 'MEGATRON_ZBPP_LOG_LEVEL': 'loud'}
    done = run([sys.executable, '-c', SAY], cwd=tmp_path, env=env)
    assert done.returncode
    assert done.stderr.splitlines()[-1] == (
        "ValueError: MEGATRON_ZBPP_LOG_LEVEL is 'loud': give INFO, WARNING, ERROR or CRITICAL"
    )


OWN = """
import logging.config
logging.config.dictConfig({
    'version': 1,
    'formatters': {'own': {'format': '%(name)s|%(levelname)s|%(message)s'}},
    'handlers': {
        'own': {'class': 'logging.FileHandler', 'filename': 'own.log', 'formatter': 'own'},
    },
    'loggers': {'megatron_zbpp': {'handlers': ['own'], 'level': 'WARNING'}},
})
"""


def of_the_page() -> str:
    """The block of the page that sends messages to a file."""
    page = ROOT / 'docs' / 'troubleshooting.md'
    blocks = [b.text for b in pages.blocks() if b.page == page and b.language == 'python']
    (block,) = [text for text in blocks if 'FileHandler' in text]
    return block


CONFIGURED = {
    'own.log': (OWN, [r'megatron_zbpp\.job\|WARNING\|100% of the job']),
    'pipeline.log': (of_the_page(), [r'\S+ \S+ INFO 5% of it', r'\S+ \S+ WARNING 100% of the job']),
}


@pytest.mark.parametrize('before', [True, False])
@pytest.mark.parametrize('file', CONFIGURED)
def test_what_the_program_configures_counts(tmp_path, file, before):
    """Before the first import, and behind it."""
    code, expected = CONFIGURED[file]
    first = '' if before else 'import megatron_zbpp.runtime.log\n'
    assert said(f'{first}{code}{SAY}', tmp_path) == ([], [])
    logged = (tmp_path / file).read_text().splitlines()
    assert all(map(re.fullmatch, expected, logged)) and len(logged) == len(expected)
