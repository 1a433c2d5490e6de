"""Shared-model groups on each backend."""

import pytest

from tests.groups import Embedded, Hosted


@pytest.fixture(params=[Embedded, Hosted], ids=["embedded", "openai"])
def backend(request, tmp_path, tiny_model_dir, openai_service):
    made = request.param(tmp_path / "groups", tiny_model_dir, openai_service)
    yield made
    made.close()
