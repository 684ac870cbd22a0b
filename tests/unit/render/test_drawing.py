"""Drawings in Python: in letters, in a notebook, and as files."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from megatron_zbpp import Costs, build, draw

SCHEDULE = build('zb-v', 2, 4)


def test_in_letters():
    assert str(draw(SCHEDULE)).splitlines()[0].startswith('rank 0  F0 F1')


def test_in_a_notebook(tmp_path):
    drawn = draw(SCHEDULE)
    root = ElementTree.fromstring(drawn._repr_svg_())
    assert root.tag.endswith('svg')
    [inside] = re.findall('<iframe srcdoc="([^"]*)" ', drawn._repr_html_())
    page = tmp_path / 'page.html'
    drawn.save(page)
    assert html.unescape(inside) == page.read_text()


def test_as_files(tmp_path):
    for name, begins in (
        ('a.svg', b'<svg'),
        ('b.html', b'<!'),
        ('c.png', b'\x89PNG'),
        ('d.pdf', b'%PDF'),
    ):
        draw(SCHEDULE).save(tmp_path / name)
        assert (tmp_path / name).read_bytes()[:50].lstrip().startswith(begins)
    with pytest.raises(ValueError, match=r"e\.gif' names no format: end it in \.html, \.svg, "):
        draw(SCHEDULE).save(tmp_path / 'e.gif')


def test_times_are_those_given_or_planned_for():
    slow = Costs.uniform(SCHEDULE.placement, 2, 2, 2)
    once = draw(SCHEDULE).timeline.makespan
    assert draw(SCHEDULE, slow).timeline.makespan == 2 * once
    assert draw(replace(SCHEDULE, costs=slow)).timeline.makespan == 2 * once


def test_a_schedule_says_which_it_is():
    assert repr(SCHEDULE) == '<Schedule zb-v: 2 ranks, 4 stages (v), 4 microbatches, 48 passes>'
