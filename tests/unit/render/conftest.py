"""Fixtures of pictures and pages."""

import chromium
import pytest

from megatron_zbpp.render import png


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    if chromium.find() is None:
        pytest.skip('no Chromium on PATH (Debian: apt-get install chromium)')
    page = chromium.Page(tmp_path_factory.mktemp('profile'))
    yield page
    page.close()


@pytest.fixture
def figures(monkeypatch):
    """Figures of matplotlib's, as they are made."""
    made, make = [], png.new_figure
    monkeypatch.setattr(png, 'new_figure', lambda *size: made.append(make(*size)) or made[-1])
    return made
