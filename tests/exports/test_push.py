"""Uploads: the token of the environment, which nothing prints."""

import pytest

from reinforge.errors import BackendUnavailable, ConfigError
from reinforge.exports.api import make_client, push_folder

TOKEN = "hf_" + "x" * 30


@pytest.mark.parametrize("name", ["model", "me/../x", "me/my model", "a/b/c", "/b"])
def test_names_that_are_no_models_are_refused(name):
    with pytest.raises(ConfigError, match="not the name of a model on the hub"):
        make_client(name)


def test_without_a_token_nothing_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="there is no token for the hub") as refused:
        make_client("me/m")
    assert "HF_TOKEN" in str(refused.value)


class Refusing:
    def create_repo(self, repo_id, *, private, exist_ok):
        raise RuntimeError(f"401: the token {TOKEN} may not write")


def test_a_failed_upload_says_where_the_folder_is_and_not_the_token(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    make_client("me/m")
    with pytest.raises(BackendUnavailable, match="401") as failed:
        push_folder(Refusing(), tmp_path, "me/m", "message", private=True)
    assert TOKEN not in str(failed.value)
    assert f"hf upload me/m {tmp_path}" in str(failed.value)
