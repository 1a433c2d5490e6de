"""What a run through NeMo Customizer is told before it starts."""

import pytest

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.protocols.nemo_customizer.adapter import NeMoCustomizerTrainerAdapter
from reinforge.protocols.nemo_customizer.config import NeMoCustomizerTrainerAdapterConfig


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_jobs_that_start_from_the_same_model_are_said_to(num_epochs):
    config = NeMoCustomizerTrainerAdapterConfig(
        entity_host="http://nemo.example/",
        datastore_host="http://data.example",
        namespace="team",
        customization_config="meta/llama@v1",
    )
    adapter = NeMoCustomizerTrainerAdapter(config, DPO(DPOConfig()))
    model = dict(adapter.effective_settings(FinetuneConfig(num_epochs=num_epochs)))["model"]
    assert ("each of the 3 jobs starts from it again" in model) is (num_epochs == 3)
    assert model.startswith("meta/llama@v1, in the namespace team")
