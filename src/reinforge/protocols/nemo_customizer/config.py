"""Settings of `_type: nemo_customizer_trainer_adapter`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from reinforge.config.schema import Block, TrainerAdapterConfig
from reinforge.rollout.models.endpoint_config import Url


class DPOSpecificHyperparameters(Block):
    """Settings of DPO at the service."""

    ref_policy_kl_penalty: float = Field(default=0.1, ge=0, description="Strength of the pull to the reference: beta.")
    preference_loss_weight: float = Field(default=1.0, ge=0, description="Weight of the preference loss.")
    preference_average_log_probs: bool = Field(default=False, description="Average log-probs over tokens.")
    sft_loss_weight: float = Field(default=0.0, ge=0, description="Weight of the preferred reply's likelihood.")


class NeMoCustomizerHyperparameters(Block):
    """Hyperparameters of a customization job, under the service's names."""

    training_type: Literal["sft", "dpo"] = Field(default="dpo", description="Only dpo is supported: jobs get pairs.")
    finetuning_type: Literal["lora", "all_weights"] = Field(default="all_weights", description="What is trained.")
    epochs: int = Field(default=3, ge=1, description="Passes over the pairs.")
    batch_size: int = Field(default=4, ge=1, description="Pairs per optimizer step.")
    learning_rate: float = Field(default=5e-5, gt=0, description="Learning rate.")
    dpo: DPOSpecificHyperparameters = Field(default_factory=DPOSpecificHyperparameters, description="Settings of DPO.")


class NIMDeploymentConfig(Block):
    """How a trained model is deployed."""

    image_name: str = Field(description="The NIM's image.")
    image_tag: str = Field(default="latest", description="Its tag.")
    gpu: int = Field(default=1, ge=1, description="GPUs per deployment.")
    deployment_name: str | None = Field(default=None, description="Name of the deployment; null: that of the job.")
    description: str = Field(default="Fine-tuned model", description="Description of the deployment.")


class NeMoCustomizerTrainerAdapterConfig(TrainerAdapterConfig, name="nemo_customizer_trainer_adapter"):
    """Trains on preference pairs through NeMo Customizer."""

    entity_host: Url = Field(description="URL of the NeMo microservices: entity store and customizer.")
    datastore_host: Url = Field(description="URL of the NeMo data store.")
    hf_token: str = Field(default="", repr=False, description="Token of the data store. Write ${VAR}, not the token.")
    namespace: str = Field(min_length=1, description="Namespace of the dataset and the model.")
    dataset_name: str = Field(
        default="nat-dpo", min_length=1, description="Start of the datasets' names; a hash of the content follows."
    )
    dataset_output_dir: Path | None = Field(default=None, description="Also write the files here; null: do not.")
    create_namespace_if_missing: bool = Field(default=True, description="Create the namespace if it does not exist.")
    customization_config: str = Field(min_length=1, description="The configuration to train with: model and GPU.")
    hyperparameters: NeMoCustomizerHyperparameters = Field(
        default_factory=NeMoCustomizerHyperparameters, description="Hyperparameters of each job."
    )
    use_full_message_history: bool = Field(
        default=False, description="Send prompts as messages; false: as text, so each prompt must be one message."
    )
    deploy_on_completion: bool = Field(default=False, description="Not supported: deploy the model yourself.")
    deployment_config: NIMDeploymentConfig | None = Field(default=None, description="How to deploy it.")
    poll_interval_seconds: float = Field(default=30.0, gt=0, description="Seconds between two polls of a job.")
    deployment_timeout_seconds: float = Field(default=1800.0, gt=0, description="Time limit of a deployment.")
    max_consecutive_status_failures: int = Field(
        default=3, ge=1, le=10, description="Read for compatibility: a failed poll never fails a job."
    )
    max_wait_s: float = Field(default=86400.0, gt=0, description="Seconds to wait for a job; then it is cancelled.")
    timeout_s: float = Field(default=60.0, gt=0, description="Time limit of one call in seconds.")
    max_retries: int = Field(default=2, ge=0, description="Retries after 408, 409, 429, 5xx and lost connections.")
    cancel_on_stop: bool = Field(
        default=False,
        description="Cancel the running job when the run is stopped; false: it keeps running, and --resume uses it.",
    )

    @property
    def poll_interval_s(self) -> float:
        return self.poll_interval_seconds
