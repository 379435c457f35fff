import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def transformers():
    return pytest.importorskip("transformers", minversion="5.24", reason="needs transformers 5.24, of '.[hf]'")
