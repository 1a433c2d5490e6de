"""The canary over several adapters: each is asked, with its own prompts, and one that is off is named."""

import numpy as np
import pytest

from reinforge.engine import NamedPolicies
from reinforge.errors import ConfigError, JobFailed
from reinforge.trainer.versions import PROBE, pick_prompts, probe
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryGroup
from tests.doubles import ScriptedPolicy


class Served(ScriptedPolicy):
    """Replies carry -0.5 a token; the learner says `off` more of these tokens of the first `num_off` replies."""

    def __init__(self, off=0.0, num_off=None, tokens=slice(None), tolerance=0.01):
        super().__init__()
        self.off, self.num_off, self.tokens, self.tolerance = off, num_off, tokens, tolerance

    async def score(self, token_ids):
        scored = await super().score(token_ids)
        for row in scored[: self.num_off]:
            row[self.tokens] += np.float32(self.off)
        return scored


def asked(text):
    return [{"role": "user", "content": text}]


def group(model_group, text):
    items = [EpisodeItem(role="user", content=text), EpisodeItem(role="assistant", content="x")]
    return TrajectoryGroup(group_id="g", trajectories=[Trajectory(episode=items, reward=0.0, model_group=model_group)])


async def test_each_adapter_is_asked_with_its_own_prompts():
    policies = {"a": Served(), "b": Served(off=0.004), "c": Served()}
    together = NamedPolicies(policies)
    await together.publish(3)
    prompts = pick_prompts([group("a", "plan"), group("b", "do it"), group("b", "and that")])
    report = await probe(together, 3, prompts, None)
    said = {name: [request.messages for request in policy.requests] for name, policy in policies.items()}
    assert said == {"a": [asked("plan")], "b": [asked("do it"), asked("and that")], "c": [PROBE]}
    assert (report.version, report.num_tokens) == (3, 4 * len("yes"))
    assert report.max_difference == pytest.approx(0.004, abs=1e-6)
    assert report.mean_difference == pytest.approx(0.004 / 2, abs=1e-6), "two of the four replies"


async def test_an_adapter_that_serves_other_weights_is_named():
    together = NamedPolicies({"a": Served(), "b": Served(off=0.2)})
    with pytest.raises(JobFailed, match=r"trained weights of the adapter b: .* up to 2\.00e-01 nats"):
        await probe(together, 0, {}, None)


@pytest.mark.parametrize(
    ("num_off", "off", "passes"), [(1, 9e-3, True), (1, 1.1e-2, False), (2, 2e-4, False), (4, 9e-5, True)]
)
async def test_one_token_in_eight_may_be_rounded_otherwise(num_off, off, passes):
    policy = Served(off, num_off, slice(-1, None), tolerance=1e-4)
    policy.script = lambda request: "no"  # two tokens
    prompts = {"": [asked(f"{number}") for number in range(4)]}
    if passes:
        report = await probe(policy, 0, prompts, None)
        assert (report.num_tokens, report.max_difference) == (8, pytest.approx(off, abs=1e-6))
        return
    with pytest.raises(JobFailed, match="does not serve the trained weights"):
        await probe(policy, 0, prompts, None)


async def test_an_adapter_of_another_version_stops_the_run():
    policies = {"a": Served(), "b": Served()}
    together = NamedPolicies(policies)
    await together.publish(1)
    await policies["b"].publish(0)
    assert together.version == 1
    with pytest.raises(JobFailed, match=r"version 1 was published, but replies carry version \[0\]"):
        await probe(together, 1, {}, None)


async def test_the_fingerprint_is_over_all_of_them():
    policies = {"a": Served(), "b": Served()}
    together = NamedPolicies(policies)
    before = await together.fingerprint()
    with pytest.raises(JobFailed, match="the job did not change the weights"):
        await probe(together, 0, {}, before)
    await policies["b"].publish(1)  # whose fingerprint follows its version
    assert await together.fingerprint() != before
    swapped = NamedPolicies({"a": policies["b"], "b": policies["a"]})
    assert await swapped.fingerprint() != await together.fingerprint()


async def test_the_one_policy_is_asked_as_ever():
    policy = Served()
    await probe(policy, 0, pick_prompts([group(None, "hello")]), None)
    assert [request.messages for request in policy.requests] == [asked("hello")]


async def test_where_no_token_was_compared_the_figures_are_unknown():
    policy = Served()
    policy.script = lambda request: ""
    report = await probe(policy, 0, {}, None)
    assert (report.max_difference, report.mean_difference, report.k3, report.num_tokens) == (None, None, None, 0)


def test_names_are_looked_up():
    together = NamedPolicies({"a": Served(), "b": Served()})
    assert together.names == ("a", "b")
    with pytest.raises(ConfigError, match="there is no adapter c, only a, b"):
        together.get_policy("c")
