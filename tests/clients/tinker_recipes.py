"""Recipes of tinker-cookbook, the SDK and our own adapter train on `reinforge serve --tinker`, as docs/tinker.md says.

python -m tests.clients.tinker_recipes FOLDER
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.clients import tinker_model
from tests.clients.tinker_page import load_functions, read_blocks, read_commands, read_recipes

KEY = "tml-local"
REWARD, LOSS = "env/all/reward/total", "train_mean_nll"
DIFFERENCE, MAX_DIFFERENCE = "optim/kl_sample_train_v1", 1e-3
"""The mean difference between the log-probs of the sampler and those of the training, in nats."""


class Recipe(NamedTuple):
    """How a recipe of the page runs with a tiny model.

    Attributes:
        measure: The number to look at: a reward, which must rise, or a loss, which must fall.
        margin: By how much at least.
        settings: They take the place of those on the page.
    """

    measure: str
    margin: float
    settings: Mapping[str, str]


SETTINGS = {"renderer_name": "role_colon", "behavior_if_log_dir_exists": "delete", "eval_every": "0"}
RECIPES = {
    "math_rl": Recipe(
        REWARD,
        0.05,
        {"group_size": "16", "groups_per_batch": "4", "learning_rate": "3e-3", "max_steps": "8", "save_every": "4"},
    ),
    "preference.shorter": Recipe(
        REWARD, 0.1, {"group_size": "16", "batch_size": "2", "learning_rate": "1e-3", "max_steps": "6"}
    ),
    "multiplayer_rl.guess_number": Recipe(
        REWARD,
        0.5,
        {"group_size": "8", "batch_size": "2", "learning_rate": "3e-3", "max_steps": "8", "max_tokens": "16"},
    ),
    "chat_sl": Recipe(LOSS, 0.3, {"batch_size": "8", "learning_rate": "3e-3", "num_epochs": "4", "save_every": "8"}),
}


def find_model(folder: Path) -> Path:
    """Returns the folder of the tiny model, which is made unless this version of it is there."""
    digest = hashlib.sha256(Path(tinker_model.__file__).read_bytes()).hexdigest()
    model = folder / f"model-{digest[:8]}"
    return model if (model / "tokenizer.json").is_file() else tinker_model.make_model(model)


@contextmanager
def serve(model: Path, folder: Path) -> Iterator[str]:
    """Yields the address of a server over the model; it must print what the page shows."""
    log = folder / "serve.log"
    [command] = read_commands("reinforge")
    base = command[2]
    command = [sys.executable, "-m", "reinforge", "serve", str(model), *command[3:], "--port", "0"]
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, "--data_dir", str(folder / "data")], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while "TINKER_API_KEY=" not in log.read_text():
            if process.poll() is not None:
                sys.exit(f"the server ended: {log.read_text()}")
            time.sleep(0.2)
        printed = log.read_text()
        address = printed.partition("TINKER_BASE_URL=")[2].split()[0]
        [shown] = read_blocks("")
        expected = shown.replace(base, model.name).replace("http://127.0.0.1:8000", address)
        if expected not in printed:
            sys.exit(f"the page shows:\n{expected}\nthe server prints:\n{printed}")
        yield address
    finally:
        process.terminate()
        process.wait()


def write_conversations(file: Path) -> Path:
    """Writes what the supervised recipe imitates: the right answers."""
    rows = [[*turns, {"role": "assistant", "content": right}] for turns, right, _ in tinker_model.list_problems()]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return file


def run_recipe(name: str, model: Path, address: str, folder: Path) -> None:
    """Runs a recipe of the page, and checks that the model gets better."""
    module, recipe, logs = f"tinker_cookbook.recipes.{name}.train", RECIPES[name], folder / name
    paths = {"model_name": str(model), "log_path": str(logs)}
    if name == "chat_sl":
        paths["dataset"] = str(write_conversations(folder / "conversations.jsonl"))
    settings = {**read_recipes()[module], **SETTINGS, **recipe.settings, **paths}
    environment = {**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-m", module, *(f"{key}={value}" for key, value in settings.items())],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\n{name} failed")
    lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    try:
        first, last = measure_progress(recipe, lines)
    except ValueError as error:
        sys.exit(f"{name}: {error}")
    sys.stdout.write(f"  ok: {name}: {recipe.measure} {first:.2f} -> {last:.2f} in {len(lines)} steps\n")
    sys.stdout.flush()


def measure_progress(recipe: Recipe, lines: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Returns the means of the measure over the first two steps and over the last three.

    Args:
        recipe: What to look at.
        lines: The metrics of each step, as the cookbook writes them.

    Raises:
        ValueError: It does not get better, or the sampler and the training do not have the same model.
    """
    found = [line[recipe.measure] for line in lines if recipe.measure in line]
    first, last = sum(found[:2]) / 2, sum(found[-3:]) / 3
    gain = first - last if recipe.measure == LOSS else last - first
    if not gain >= recipe.margin:
        raise ValueError(f"{recipe.measure} does not get better: {found}")
    differences = [abs(line[DIFFERENCE]) for line in lines if DIFFERENCE in line]
    if recipe.measure == REWARD and not (differences and max(differences) < MAX_DIFFERENCE):
        raise ValueError(f"{DIFFERENCE} is not near zero: {differences}")
    return first, last


def use_page(model: Path, address: str) -> None:
    """Runs the page's Python: trains with the SDK and chats with the checkpoint."""
    os.environ.update(
        TINKER_BASE_URL=address, TINKER_API_KEY=KEY, OPENAI_BASE_URL=f"{address}/v1", OPENAI_API_KEY="any"
    )
    functions = load_functions()
    path, losses = functions["train"](str(model), "User: What is 4 + 5?\n\nAssistant: 9\n\nUser:")
    assert losses[-1] < losses[0], losses
    answer = functions["ask"](path, "What is 4 + 5?")
    assert answer, "the checkpoint does not answer"
    sys.stdout.write(f"  ok: the page's loop: loss {losses[0]:.1f} -> {losses[-1]:.1f}; asked: {answer.split()[0]}\n")


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
    import yaml

    from reinforge.config.policy import OptimizerConfig, PolicyConfig, ScheduleConfig
    from reinforge.protocols.tinker.engine import TinkerEngine
    from reinforge.protocols.tinker.service import TinkerAdapterConfig, TinkerService
    from reinforge.types.request import ModelRequest, SamplingParams
    from reinforge.types.sample import LossSpec
    from tests.samples import random_samples

    [page] = (yaml.safe_load(block.replace("${TINKER_API_KEY}", KEY)) for block in read_blocks("yaml"))
    service, settings = page["trainer_adapters"]["service"], page["finetuning"]["policy"]
    assert service.pop("_type") == "tinker"
    assert page["finetuning"]["trainer_adapter"] in page["trainer_adapters"]
    assert settings["optimizer"]["learning_rate"] < 1e-3  # a tiny model needs more
    optimizer, schedule = OptimizerConfig(learning_rate=5e-3), ScheduleConfig(warmup_steps=0)
    tiny = {"model": str(model), "tokenizer": str(model), "optimizer": optimizer, "schedule": schedule}
    policy = PolicyConfig(**{**settings, **tiny})
    config = TinkerAdapterConfig(**{**service, "base_model": str(model), "base_url": address, "rank": 8})
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
    if unknown := {f"tinker_cookbook.recipes.{name}.train" for name in RECIPES} ^ set(read_recipes()):
        sys.exit(f"run here or shown on the page, not both: {sorted(unknown)}")
    model = find_model(folder)
    with serve(model, folder) as address:
        use_page(model, address)
        use_sdk(model, address)
        use_adapter(model, address)
        for name in RECIPES:
            run_recipe(name, model, address, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
