"""Makes the description of the package from the README: its links, too, lead somewhere there.

All else is in pyproject.toml. A page of a package index has no files beside it, so links that are
relative in the repository become those of its address, `Source` of `[project.urls]`.
"""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
SOURCE = re.search(r'^Source = "(.+)"$', (HERE / 'pyproject.toml').read_text('utf-8'), re.M)[1]


def absolute(link: re.Match) -> str:
    """Return a link of the README as one that leads somewhere from anywhere."""
    text, target = link.groups()
    if target.startswith(('https://', '#')):
        return link[0]
    return f'{text}({SOURCE}/{"raw" if text.startswith("!") else "blob"}/main/{target})'


readme = (HERE / 'README.md').read_text('utf-8')
setup(
    long_description=re.sub(r'(!?\[[^\]]*\])\(([^)\s]+)\)', absolute, readme),
    long_description_content_type='text/markdown',
)
