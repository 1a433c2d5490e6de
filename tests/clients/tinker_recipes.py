"""Two recipes of tinker-cookbook, the SDK and our own adapter train on `reinforge serve --tinker`; only the address is
ours.

    python -m tests.clients.tinker_recipes FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clients.tinker_model import list_examples, make_model

KEY = "tml-local"
ROLE_COLON = "renderer_name=role_colon"
RECIPES = {
    "math_rl": (
        "tinker_cookbook.recipes.math_rl.train",
        ("group_size=16", "groups_per_batch=4", "learning_rate=3e-3", "max_steps=8", "save_every=4"),
        "env/all/reward/total",
    ),
    "chat_sl": (
        "tinker_cookbook.recipes.chat_sl.train",
        ("batch_size=8", "learning_rate=3e-3", "num_epochs=4", "save_every=8"),
        "train_mean_nll",
    ),
}
"""Module, settings and the number to look at: a reward, which must rise, or a loss, which must fall."""


@contextmanager
def serve(model: Path, folder: Path) -> Iterator[str]:
    """Yields the address of a server over the model."""
    log = folder / "serve.log"
    command = [sys.executable, "-m", "reinforge", "serve", str(model), "--tinker", "--port", "0"]
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, "--data_dir", str(folder / "data")], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while "TINKER_BASE_URL=" not in log.read_text():
            if process.poll() is not None:
                sys.exit(f"the server ended: {log.read_text()}")
            time.sleep(0.2)
        yield log.read_text().partition("TINKER_BASE_URL=")[2].split()[0]
    finally:
        process.terminate()
        process.wait()


def write_conversations(file: Path) -> Path:
    """Writes what the supervised recipe imitates: the right answers."""
    rows = [[*turns, {"role": "assistant", "content": right}] for turns, right, _ in list_examples()]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return file


def run_recipe(name: str, model: Path, address: str, folder: Path) -> None:
    """Runs a recipe as its README says, and checks that the model gets better."""
    module, settings, measure = RECIPES[name]
    logs = folder / name
    arguments = [f"model_name={model}", ROLE_COLON, f"log_path={logs}", "behavior_if_log_dir_exists=delete"]
    if name == "chat_sl":
        arguments.append(f"dataset={write_conversations(folder / 'conversations.jsonl')}")
    environment = {**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments, *settings, "eval_every=0"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\n{name} failed")
    lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    found = [line[measure] for line in lines if measure in line]
    first, last = sum(found[:2]) / 2, sum(found[-3:]) / 3
    if (last <= first) if "reward" in measure else (last >= first):
        sys.exit(f"{name}: {measure} does not get better: {found}")
    sys.stdout.write(f"  ok: {name}: {measure} {first:.2f} -> {last:.2f}\n")
    sys.stdout.flush()


def use_sdk(model: Path, address: str) -> None:
    """Trains and samples with the SDK: supervised, with a loss of the client's own, from a checkpoint."""
    import numpy as np
    import tinker
    import torch

    with tinker.ServiceClient(base_url=address, api_key=KEY) as service:
        training = service.create_lora_training_client(base_model=str(model), rank=8, seed=1).result()
        tokens = training.get_tokenizer().encode("User: What is 4 + 5?\n\nAssistant: 9\n\nUser:")
        weights = np.ones(len(tokens) - 1, np.float32)
        inputs = {"target_tokens": np.asarray(tokens[1:]), "weights": weights}
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        losses = []
        for _ in range(4):
            gradient = training.forward_backward([datum], "cross_entropy")
            step = training.optim_step(tinker.AdamParams(learning_rate=1e-2))
            losses.append(gradient.result().metrics["loss:sum"])
            step.result()
        assert losses[-1] < losses[0], losses
        path = training.save_state("one").result().path
        sampler = training.save_weights_and_get_sampling_client().result()
        scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
        again = service.create_training_client_from_state_with_optimizer(path).result()
        forward = again.forward([datum], "cross_entropy").result()
        row = forward.loss_fn_outputs[0]["logprobs"].to_torch()
        assert torch.allclose(row, torch.tensor(scored[1:]), atol=1e-4)
        own = again.forward_backward_custom([datum], lambda _, rows: (-sum(each.sum() for each in rows), {}))
        assert abs(own.result().metrics["loss:sum"] + row.sum().item()) < 1e-3
        replies = sampler.sample(
            tinker.ModelInput.from_ints(tokens[:-4]), 3, tinker.SamplingParams(max_tokens=5, stop=["\n\nUser:"])
        ).result()
        assert all(reply.logprobs and reply.sequence_id for reply in replies.sequences)
        refused = ""
        try:
            again.forward_backward([datum], "stable_reinforce").result()
        except tinker.RequestFailedError as error:
            refused = str(error)
        assert "'stable_reinforce' is not supported" in refused, refused
    sys.stdout.write(f"  ok: the SDK {tinker.__version__}: loss {losses[0]:.1f} -> {losses[-1]:.1f}\n")


def use_adapter(model: Path, address: str) -> None:
    """Makes a job of our own loop on the server, through the SDK."""
    import asyncio

    import numpy as np

    from reinforge.adapters.tinker_config import TinkerAdapterConfig
    from reinforge.adapters.tinker_engine import TinkerEngine
    from reinforge.adapters.tinker_service import TinkerService
    from reinforge.config.schema import OptimizerConfig, PolicyConfig, ScheduleConfig
    from reinforge.types.request import ModelRequest, SamplingParams
    from reinforge.types.sample import LossSpec
    from tests.samples import random_samples

    policy = PolicyConfig(
        model=str(model), optimizer=OptimizerConfig(learning_rate=5e-3), schedule=ScheduleConfig(warmup_steps=0)
    )
    config = TinkerAdapterConfig(base_model=str(model), base_url=address, api_key=KEY, rank=8)
    engine = TinkerEngine(policy, config, 0, TinkerService)
    samples = random_samples(6, vocab_size=200)
    for sample in samples:
        sample.temperatures[:] = 1.0
        sample.advantages = sample.loss_mask.astype(np.float32)
    before = engine.logprobs(samples)
    engine.begin_job()
    report = engine.update(samples, LossSpec("cross_entropy"), progress_start=0.0, progress_end=1.0)
    after = engine.logprobs(samples)
    gain = sum(float((b - a).sum()) for a, b in zip(before, after, strict=True))
    assert gain > 0, gain
    engine.rollback()
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(before, engine.logprobs(samples), strict=True))

    async def sample() -> float:
        request = ModelRequest([{"role": "user", "content": "What is 4 + 5?"}], SamplingParams(max_tokens=4))
        reply = await engine.policy.sample(request)
        assert reply.tokens is not None
        [row] = await engine.policy.score([[*reply.tokens.prompt_token_ids, *reply.tokens.token_ids]])
        return float(np.abs(row[reply.num_prompt_tokens :] - reply.tokens.logprobs).max())

    difference = asyncio.run(sample())
    assert difference < 1e-3, difference
    engine.close()
    sys.stdout.write(f"  ok: trainer_adapters._type: tinker makes {report.num_updates} steps and undoes them\n")


def main(folder: Path) -> None:
    """Runs everything."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(folder / "model")
    with serve(model, folder) as address:
        use_sdk(model, address)
        use_adapter(model, address)
        for name in RECIPES:
            run_recipe(name, model, address, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
