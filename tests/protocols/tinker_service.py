"""Tinker's service without network: its calls over the embedded engine, which has the service's arithmetic."""

from __future__ import annotations

import numpy as np

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.protocols.tinker.server.losses import LOSSES, build_batch, find_loss
from reinforge.protocols.tinker.server.wire import TinkerDatum
from reinforge.protocols.tinker.service import ServiceReply
from reinforge.types.request import ModelRequest

TRAINED, SAMPLED = "trained000", "sampled000"


class ServiceDouble:
    """Implements `TinkerService` over a tiny model.

    Args:
        folder: The model.
        rank: Rank of the adapter.
    """

    def __init__(self, folder, rank=4):
        policy = PolicyConfig(model=str(folder), lora=LoRAConfig(r=rank, lora_alpha=rank))
        self.engine = Engine.load(policy, seed=0, device="cpu", frozen=True, adapters=(TRAINED, SAMPLED))
        self.calls, self.saved, self.is_closed = [], {}, False
        self.optimizers = {}

    def put(self, weights, adapter=TRAINED):
        self._change(lambda: self.engine.put_adapter(weights, adapter), adapter)

    def _change(self, work, adapter=TRAINED):
        self.engine.begin_job(adapter)
        result = work()
        self.engine.end_job()
        self.engine.policies[adapter].open(self.engine.policies[adapter].version + 1)
        return result

    def _accumulate(self, data, name, config, backward):
        loss, spec = find_loss(name, config)
        batch = build_batch([make_datum(each) for each in data], loss, 320, 256)
        report = self.engine.accumulate(batch.samples, spec, backward=backward, adapter=TRAINED)
        contexts = self.engine.logprobs(batch.contexts, TRAINED) if batch.contexts else []
        return report, batch.read_logprobs(report.logprobs, contexts)

    def forward_backward(self, data, loss, config):
        self.calls.append((loss, dict(config), len(data)))
        report, _ = self._accumulate(data, loss, config, backward=True)
        return {"loss:sum": report.loss}

    def forward(self, data):
        return self._accumulate(data, "cross_entropy", LOSSES["cross_entropy"].settings, backward=False)[1]

    def optim_step(self, settings):
        self.calls.append(settings)
        metrics = self._change(lambda: self.engine.apply(settings, TRAINED))
        return {"unclipped_grad_l2:mean": metrics["grad_norm"]}

    def save(self, name):
        path, learner = f"tinker://run/weights/{name}", self.engine._learners[TRAINED]
        moments = {key: value.clone() for key, value in learner.state().items()}
        self.saved[path] = (self.engine.read_adapter(TRAINED), moments, learner.num_steps)
        return path

    def load(self, path):
        weights, moments, num_steps = self.saved[path]
        self.put(weights)
        self.engine._call(lambda: self.engine._learners[TRAINED].restore(moments, num_steps), TRAINED)

    def publish(self):
        self.put(self.engine.read_adapter(TRAINED), SAMPLED)

    async def sample(self, prompt, params):
        reply = await self.engine.policies[SAMPLED].sample(ModelRequest([], params, prompt=tuple(prompt)))
        return ServiceReply(reply.tokens.token_ids, reply.tokens.logprobs, reply.tokens.finish_reason)

    async def score(self, token_ids):
        [row] = await self.engine.policies[SAMPLED].score([token_ids])
        return row

    def close(self):
        self.is_closed = True
        self.engine.close()


def make_datum(datum):
    numbers = {name: np.asarray(values, np.float32) for name, values in datum.numbers.items()}
    targets = np.asarray(datum.targets, np.int64)
    return TinkerDatum(np.asarray(datum.token_ids, np.int64), {"target_tokens": targets, **numbers})
