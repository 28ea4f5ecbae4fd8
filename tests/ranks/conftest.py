"""The two ranks that all tests of this folder share."""

import pytest

from tests.helpers.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Runs a job on two ranks; see `tests/helpers/ranks.py`."""
    session = Ranks(tmp_path_factory.mktemp("ranks"))
    yield session
    session.close()
