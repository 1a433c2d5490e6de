"""`_type: nemo_customizer_trainer_adapter`: trains on preference pairs through NeMo Customizer.

    {"prompt": "q", "chosen_response": "a", "rejected_response": "b"}        one row of a file
    {"prompt": [{"role": "user", "content": "q"}], ...}                      with use_full_message_history: true

The rows are split into a training and a validation file by example. The service serves no model that the run could
sample from, so version and canary are unknown, and there is no verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from reinforge.algorithms.dpo import DPO
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import JobFailed, Problem
from reinforge.files import replace_file, storage_boundary, to_json
from reinforge.interfaces import Builder
from reinforge.protocols.adapter import HostedAdapter
from reinforge.protocols.nemo_customizer.config import NeMoCustomizerTrainerAdapterConfig
from reinforge.protocols.unused_settings import find_unused_settings
from reinforge.registry import register_trainer_adapter
from reinforge.rollout.models.endpoint_config import EndpointConfig
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import DPOItem, TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.protocols.hosted_policy import HostedPolicy  # noqa: F401  a type argument
    from reinforge.protocols.nemo_customizer.service import NeMoCustomizerService  # noqa: F401  a type argument
    from reinforge.protocols.service import HostedJob

BACKEND = "nemo-customizer"
VALIDATION_SHARE = 0.2
TRAINING, VALIDATION = "training/training_file.jsonl", "validation/validation_file.jsonl"
HASH_LENGTH = 16


class NeMoCustomizerTrainerAdapter(HostedAdapter["NeMoCustomizerService", "HostedPolicy"]):
    """Trains on each collection's pairs with one customization job; the service trains DPO."""

    backend = BACKEND
    title = "NeMo Customizer"
    adapter_config: NeMoCustomizerTrainerAdapterConfig

    async def _connect(self, run_config: FinetuneConfig) -> None:
        from reinforge.protocols.jobs import HostedJobs
        from reinforge.protocols.nemo_customizer.service import NeMoCustomizerService
        from reinforge.rollout.models.openai_http import OpenAIEndpoint

        config = self.adapter_config
        limits = EndpointConfig(timeout_s=config.timeout_s, max_retries=config.max_retries)
        endpoint = OpenAIEndpoint(limits, config.entity_host)
        service = NeMoCustomizerService(endpoint, config.datastore_host, config.hf_token, config.namespace)
        self._jobs = HostedJobs(service, config, run_config.seed)
        await service.check_access()
        if config.create_namespace_if_missing:
            await service.ensure_namespace()

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        config = self.adapter_config
        where = f"trainer_adapters.{run_config.trainer_adapter}" if run_config.trainer_adapter else "trainer_adapters"
        problems = list[Problem]()
        if config.hyperparameters.training_type != "dpo":
            message = "is sft, but jobs get preference pairs"
            fix = "use dpo, or another adapter with `algorithm: {_type: sft}`"
            problems.append(Problem(f"{where}.hyperparameters.training_type", message, fix))
        if config.deploy_on_completion:
            message = "is true, but reinforge does not deploy trained models"
            problems.append(
                Problem(f"{where}.deploy_on_completion", message, "leave it out, and deploy the output model")
            )
        if type(self.algorithm) is not DPO:
            message = f"the service trains DPO, not {type(self.algorithm).__name__}"
            problems.append(Problem("finetuning.algorithm", message, "set it to {_type: dpo}"))
        return problems + find_unused_settings(
            run_config,
            {"optimizer.learning_rate": "set the trainer adapter's hyperparameters.learning_rate"},
            "leave it out; set the trainer adapter's hyperparameters",
            "NeMo Customizer",
        )

    def effective_settings(self, run_config: FinetuneConfig) -> list[tuple[str, str]]:
        config = self.adapter_config
        given = config.hyperparameters
        num = run_config.num_epochs
        again = f"; each of the {num} jobs starts from it again: prefer num_epochs 1 and the trainer's num_runs {num}"
        return [
            (
                "service",
                f"NeMo Customizer at {config.entity_host}, data at {config.datastore_host} (receives the pairs)",
            ),
            ("model", f"{config.customization_config}, in the namespace {config.namespace}{again if num > 1 else ''}"),
            ("job", f"DPO, {given.finetuning_type}, {given.epochs} epochs, learning rate {given.learning_rate:g}"),
        ]

    async def _submit(self, trajectories: TrajectoryCollection, metadata: dict[str, Any]) -> HostedJob:
        config, service = self.adapter_config, self._require_jobs().service
        files = self._build_files(trajectories)
        digest = hashlib.sha256(b"\0".join(files.values())).hexdigest()
        dataset = f"{config.dataset_name}-{digest[:HASH_LENGTH]}"
        body = {
            "config": config.customization_config,
            "dataset": {"name": dataset, "namespace": config.namespace},
            "hyperparameters": config.hyperparameters.model_dump(),
        }
        if config.dataset_output_dir is not None:
            self._write_files(trajectories.run_id, dataset, files)
        await service.upload_once(dataset, files)
        name = hashlib.sha256(to_json([trajectories.run_id, metadata["job_key"], body]).encode()).hexdigest()
        job = await service.create_job_once(f"reinforge-{name[: 2 * HASH_LENGTH]}", body)
        num_rows = sum(content.count(b"\n") for content in files.values())
        metadata |= {"job_id": job.id, "dataset_name": dataset, "num_rows": num_rows}
        return job

    def _build_files(self, trajectories: TrajectoryCollection) -> dict[str, bytes]:
        rows_by_group = {
            group.group_id: [self._build_row(item) for each in group.trajectories for item in each.pairs]
            for group in trajectories.groups
        }
        ids = [id_ for id_, rows in rows_by_group.items() if rows]
        if len(ids) < 2:
            raise JobFailed(
                f"not enough training data: preference pairs of {len(ids)} examples, but a job needs at least 2, since "
                "one is held out for validation; use the trajectory builder `_type: dpo_traj_builder`, or collect more"
            )
        count = max(1, round(len(ids) * VALIDATION_SHARE))
        held_out = set(
            stable_random(self.run_config.seed, "validation", trajectories.epoch or 0).sample(sorted(ids), count)
        )
        lines: dict[str, list[str]] = {TRAINING: [], VALIDATION: []}
        for id_ in ids:
            lines[VALIDATION if id_ in held_out else TRAINING] += map(to_json, rows_by_group[id_])
        return {path: "".join(f"{line}\n" for line in found).encode() for path, found in lines.items()}

    def _build_row(self, item: DPOItem) -> dict[str, Any]:
        prompt: Any = item.prompt
        if self.adapter_config.use_full_message_history:
            given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = [each if isinstance(each, dict) else each.model_dump() for each in given]
        elif not isinstance(prompt, str):
            if len(prompt) != 1:
                raise JobFailed(
                    f"a prompt has {len(prompt)} messages, of which only the last would be sent; set the trainer "
                    "adapter's use_full_message_history: true"
                )
            prompt = prompt[0].content
        return {"prompt": prompt, "chosen_response": item.chosen_response, "rejected_response": item.rejected_response}

    def _write_files(self, run_id: str, dataset: str, files: dict[str, bytes]) -> None:
        folder = self.adapter_config.dataset_output_dir
        assert folder is not None
        for path, content in files.items():
            target = folder / run_id / dataset / path
            with storage_boundary(target):
                target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, content)


@register_trainer_adapter(config_type=NeMoCustomizerTrainerAdapterConfig)
async def nemo_customizer_adapter(
    config: NeMoCustomizerTrainerAdapterConfig, builder: Builder
) -> AsyncIterator[NeMoCustomizerTrainerAdapter]:
    adapter = NeMoCustomizerTrainerAdapter(config, await builder.get_algorithm())
    try:
        yield adapter
    finally:
        await adapter.cleanup()
