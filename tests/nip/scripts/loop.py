"""A training loop over shared-model groups, in the style of the trainers of neural-interactive-proofs.

Each iteration imitates the best rollouts, sampled by their rewards (expert iteration), or prefers the better of two
replies to the same prompt (MALT, on the first round). tests/nip/test_nip_scripts.py runs it on tiny models.
"""

import asyncio

import numpy as np

SLEEP_S = 0.05


async def train(groups, handler, sample_rollouts, *, method, num_iterations, seed=6198):
    """Trains all groups and returns the names of the models that they serve.

    Args:
        groups: By name.
        handler: The protocol.
        sample_rollouts: Coroutine function of the iteration.
        method: ei or malt.
        num_iterations: Number of iterations.
        seed: Of the selection.
    """
    async with asyncio.TaskGroup() as tasks:
        for group in groups.values():
            tasks.create_task(group.wait_for_ready())
    for iteration in range(num_iterations):
        for group in groups.values():
            await group.eval()
        rollouts = await sample_rollouts(iteration)
        for name, group in groups.items():
            await group.train()
            job_name = f"{name}-{iteration}"
            if method == "ei":
                await create_supervised_job(group, handler, rollouts, job_name, seed + iteration)
            else:
                await create_dpo_job(group, rollouts, job_name)
        async with asyncio.TaskGroup() as tasks:
            for group in groups.values():
                tasks.create_task(wait_for_fine_tune_job(group))
    return {name: group.model_name for name, group in groups.items()}


async def create_supervised_job(group, handler, rollouts, job_name, seed):
    rng = np.random.default_rng(seed)
    selected, guess_replaced = {}, {}
    for agent_id, agent_name in group.agent_ids_and_names():
        reward = rollouts["next", "agents", "reward"][..., agent_id].sum(axis=-1)
        weights = reward - reward.min() + 0.01
        index = rng.choice(len(reward), size=len(reward) // 2, p=weights / weights.sum())
        selected[agent_name] = rollouts[index]
        if agent_name in handler.verifier_names:
            guess_replaced[agent_name] = rollouts[: len(reward) // 4]
    await group.create_supervised_fine_tune_job(selected, guess_replaced, job_name=job_name)


async def create_dpo_job(group, rollouts, job_name):
    timesteps_per_agent, positive_per_agent, negative_per_agent = {}, {}, {}
    datapoint_id = rollouts["datapoint_id"][:, 0]
    for agent_id, agent_name in group.agent_ids_and_names():
        reward = rollouts["next", "agents", "reward"][..., agent_id].sum(axis=-1)
        speaks = rollouts["next", "message_agent_id"][:, 0, 0, 0] == agent_id
        best, worst = [], []
        for each in np.unique(datapoint_id):
            (index,) = np.nonzero((datapoint_id == each) & speaks)
            if len(index) and reward[index].max() > reward[index].min():
                best.append(index[reward[index].argmax()])
                worst.append(index[reward[index].argmin()])
        first_round = np.zeros(len(best), dtype=int)
        positive_per_agent[agent_name] = rollouts[np.array(best, dtype=int), first_round]
        negative_per_agent[agent_name] = rollouts[np.array(worst, dtype=int), first_round]
        timesteps_per_agent[agent_name] = positive_per_agent[agent_name]
    await group.create_dpo_fine_tune_job(timesteps_per_agent, positive_per_agent, negative_per_agent, job_name=job_name)


async def wait_for_fine_tune_job(group):
    while True:
        status = await group.get_fine_tune_job_status()
        if status == "succeeded":
            await group.switch_to_next_model()
            return
        if status in ("failed", "cancelled", "not_found"):
            raise RuntimeError(f"{status}: {await group.get_fine_tune_job_error_repr()}")
        await asyncio.sleep(SLEEP_S)
