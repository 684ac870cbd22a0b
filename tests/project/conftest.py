"""What surrounds the package: no release of Megatron decides it."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.one_release)
