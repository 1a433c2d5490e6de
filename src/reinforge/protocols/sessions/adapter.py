"""`_type: http`: our loop trains on a `reinforge serve` elsewhere, where the model is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from reinforge.adapters.hosted_model import HOSTED_MODEL, HostedModel
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BackendError, ConfigError, Problem
from reinforge.interfaces import Builder, PolicyServer, TrainerAdapter
from reinforge.protocols.sessions.client import HttpAdapterConfig, HttpPolicy, HttpSession
from reinforge.protocols.sessions.wire import CLIENT_SETTINGS, StatusAnswer, write_job
from reinforge.registry import TypedConfig, register_trainer_adapter
from reinforge.rollout.models.policy_llm import find_adapters
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.trajectory import TrajectoryCollection

BACKEND = "http"
POLICY = "finetuning.policy"
WAIT_S = 20.0  # seconds for which one request waits for a job's end
OWN = {"model"}  # settings of the policy that this adapter reads itself


class HttpAdapter(TrainerAdapter):
    """Samples and trains in a session at the server."""

    serves_policy = True
    adapter_config: HttpAdapterConfig

    def __init__(self, adapter_config: HttpAdapterConfig, algorithm: TypedConfig, adapters: tuple[str, ...] = ()):
        super().__init__(adapter_config)
        self._algorithm, self._named = algorithm, adapters
        self._session: HttpSession | None = None
        self._policy: HttpPolicy | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        if self._session is not None:
            return
        if problems := self.validate(run_config):
            raise ConfigError(problems)
        session = HttpSession(self.adapter_config)
        settings = run_config.policy.model_dump(mode="json", include=set(CLIENT_SETTINGS))
        try:
            description = await session.open(
                model=self._get_model(run_config),
                policy=settings,
                algorithm={"_type": self._algorithm.static_type, **self._algorithm.model_dump(mode="json")},
                seed=run_config.seed,
                num_epochs=run_config.num_epochs,
                max_skipped_steps=run_config.limits.max_skipped_steps,
            )
        except BaseException:
            await session.close()
            raise
        self._session, self._policy = session, HttpPolicy(session, description)
        if (trained := _find_saved(run_config)) is not None:
            await self.restore(trained, description.version)

    def _get_model(self, run_config: FinetuneConfig) -> str:
        if (trained := _find_saved(run_config)) is not None:
            return HostedModel.read(trained).base_model
        return self.adapter_config.base_model or run_config.policy.model or ""

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        problems, where = [], "finetuning"
        if not self._get_model(run_config):
            fix = "set base_model of the trainer adapter to one of the server's models"
            problems.append(Problem(f"{POLICY}.model", "no model is named", fix))
        if self._named:
            message = f"llms asks for the adapters {', '.join(self._named)}; a session trains one"
            problems.append(Problem("llms", message, "leave `adapter` out"))
        default = PolicyConfig()
        for name in PolicyConfig.model_fields.keys() - {*CLIENT_SETTINGS, *OWN}:
            if getattr(run_config.policy, name) != getattr(default, name):
                message = "the server has the model's files and memory, so it chooses this"
                problems.append(Problem(f"{POLICY}.{name}", message, "remove it"))
        if run_config.pipeline:
            problems.append(Problem(f"{where}.pipeline", "a session trains one stage", "run the stages one by one"))
        if run_config.deterministic:
            message = "the server's process also serves other clients, so nothing in it is deterministic"
            problems.append(Problem(f"{where}.deterministic", message, "remove it"))
        if run_config.limits.max_staleness:
            message = "a session collects and trains in turns"
            problems.append(Problem(f"{where}.limits.max_staleness", message, "set it to 0"))
        return problems

    def effective_settings(self, run_config: FinetuneConfig) -> list[tuple[str, str]]:
        place = f"{self.adapter_config.url} (receives all prompts of the agent and the trajectories)"
        rate = run_config.policy.optimizer.learning_rate
        chosen = "chosen by the server, from the model's size" if rate is None else f"{rate:g}"
        return [("server", place), ("model", self._get_model(run_config)), ("learning rate", chosen)]

    def policy(self) -> PolicyServer | None:
        return self._policy

    async def is_healthy(self) -> bool:
        if self._policy is None:
            return False
        try:
            await self._policy.fingerprint()
        except BackendError:
            return False
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts a job; submitting the same key again, such as after a lost response, starts none."""
        job = write_job(trajectories)
        await self._require_session().submit(StatusAnswer, job)
        metadata = {"job_key": job.job_key, "epoch": trajectories.epoch, "session": self._require_session().id}
        return TrainingJobRef(run_id=trajectories.run_id, backend=BACKEND, metadata=metadata)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return await self._ask_status(ref, 0.0)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        while not (status := await self._ask_status(ref, WAIT_S)).is_terminal:
            pass
        return status

    async def _ask_status(self, ref: TrainingJobRef, wait_s: float) -> TrainingJobStatus:
        key = str((ref.metadata or {}).get("job_key", ""))
        answer = await self._require_session().ask(StatusAnswer, "GET", "jobs", job_key=key, wait_s=f"{wait_s:g}")
        if answer.status is None:
            raise BackendError("the server answered without a status")
        return answer.status.model_copy(update={"backend": BACKEND})

    async def save(self, folder: Path, version: int) -> bool:
        kept = _list_saved(folder)
        name = await self._require_session().save(version, kept)
        HostedModel(name, self._require_session().model, self.adapter_config.url).write(folder)
        return True

    async def restore(self, folder: Path, version: int) -> bool:
        saved = HostedModel.read(folder)
        answer = await self._require_session().restore(saved.model, version)
        assert self._policy is not None  # the session is open
        self._policy.follow(answer.version)
        return True

    async def cleanup(self) -> None:
        if self._session is not None:
            session, self._session, self._policy = self._session, None, None
            await session.close()

    def _require_session(self) -> HttpSession:
        if self._session is None:
            raise BackendError("the http adapter is not initialized; call initialize() first")
        return self._session


def _find_saved(run_config: FinetuneConfig) -> Path | None:
    folder = Path(run_config.policy.model or "")
    return folder if run_config.policy.model and (folder / HOSTED_MODEL).is_file() else None


def _list_saved(folder: Path) -> list[str] | None:
    """Returns the names of the weights that a run refers to; None: this is none of its checkpoints, or the first.

    Example: the new folder runs/r/checkpoints/.tmp-1 => the names in runs/r/checkpoints/* and runs/r/*.
    """
    siblings = [*folder.parent.glob(f"step-*/{HOSTED_MODEL}")]
    if not siblings:
        return None
    named = [HostedModel.read(path.parent) for path in (*siblings, *folder.parent.parent.glob(f"*/{HOSTED_MODEL}"))]
    return [each.model for each in named]


@register_trainer_adapter(config_type=HttpAdapterConfig)
async def http_adapter(config: HttpAdapterConfig, builder: Builder) -> AsyncIterator[HttpAdapter]:
    await builder.get_algorithm()  # checks its settings, and makes the default one if none is configured
    adapters = tuple(dict.fromkeys(find_adapters(builder.config.llms).values()))
    adapter = HttpAdapter(config, builder.config.finetuning.algorithm, adapters)
    try:
        yield adapter
    finally:
        await adapter.cleanup()
