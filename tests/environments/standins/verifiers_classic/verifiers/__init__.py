"""What of verifiers before 0.2 the adapter uses, written anew: rollouts that chat with the policy over HTTP."""

import importlib
import logging
import os
from dataclasses import dataclass

import aiohttp


@dataclass
class ClientConfig:
    api_base_url: str
    api_key_var: str
    max_retries: int


class MultiTurnEnv:
    requires_group_rollouts = False

    def __init__(self, rows, funcs, turns):
        self.rows, self.funcs, self.turns = rows, funcs, turns

    def build_dataset(self):
        return None

    def get_eval_dataset(self):
        return [{**row, "prompt": [{"role": "user", "content": row["question"]}]} for row in self.rows]

    async def run_rollout(self, row, client, model, sampling, state_columns):
        state = {"messages": list(row["prompt"]), "trajectory": [], "row": row}
        headers = {"authorization": f"Bearer {os.environ[client.api_key_var]}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(self.turns):
                await self.set_up(state)
                body = {"model": model, "messages": state["messages"], **sampling}
                async with session.post(f"{client.api_base_url}/chat/completions", json=body) as response:
                    answer = await response.json()
                if response.status != 200:
                    return fail("ModelError", str(answer))
                if not (text := answer["choices"][0]["message"]["content"]):
                    return fail("EmptyModelResponseError", "the reply is empty")
                state["trajectory"].append(text)
                state["messages"] += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
        metrics = {func.__name__: self.score(func, state) for func in self.funcs}
        return {**metrics, "reward": sum(metrics.values()), "metrics": metrics}

    async def set_up(self, state): ...

    def score(self, func, state):
        try:
            return float(func(state))
        except (KeyError, TypeError) as error:
            logger = logging.getLogger("verifiers.rubrics.rubric.Rubric")
            logger.error("Error calling reward function %s: %s", func.__name__, error)
            return 0.0


def fail(name, text):
    return {"reward": 0.0, "metrics": {}, "error": {"error": name, "error_chain_str": f"{name}: {text}"}}


def load_environment(name, **arguments):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"no module {name}") from error
    return module.load_environment(**arguments)
