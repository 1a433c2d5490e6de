"""What `make clients` checks for every framework, here for the `openai` package; and that it notices what is wrong."""

import dataclasses

import numpy as np
import openai
import pytest

from tests.clients.agents import openai_sdk
from tests.clients.training import Training, build_workflow


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    settings = {"_type": "python", "function": build_workflow(openai_sdk.answer)}
    made = Training(tmp_path_factory.mktemp("client"), settings, ("in process, streamed", "gateway"))
    made.run()
    return made


@pytest.mark.slow
def test_an_agent_of_the_openai_package_trains_the_sampled_tokens(training):
    assert len(training.trained) == 8, "two examples, two generations, two epochs"
    training.check()


def train_a_word_of_the_tool(sample):
    sample.loss_mask[np.flatnonzero(~sample.loss_mask)[-3]] = True


def train_another_token(sample):
    sample.token_ids[np.flatnonzero(sample.loss_mask)[-2]] += 1


def leave_a_token_out(sample):
    sample.loss_mask[np.flatnonzero(sample.loss_mask)[0]] = False


def train_as_of_another_version(sample):
    sample.policy_versions[np.flatnonzero(sample.loss_mask)[0]] += 1


MUTATIONS = (train_a_word_of_the_tool, train_another_token, leave_a_token_out, train_as_of_another_version)


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_wrong_sample_is_noticed(training, mutate):
    samples = {key: [copy(sample) for sample in each] for key, each in training.trained.items()}
    mutated = dataclasses.replace(training, trained=samples)
    mutated.check()
    mutate(next(iter(samples.values()))[0])
    with pytest.raises(AssertionError):
        mutated.check()


@pytest.mark.slow
def test_one_refused_request_is_noticed_even_if_the_agent_continues(tmp_path):
    def answer(question, connection, *, stream):
        if question == "select?":
            with pytest.raises(openai.BadRequestError):
                openai.OpenAI(**connection.openai).chat.completions.create(model="agent", messages=[], functions=[])
        return openai_sdk.answer(question, connection, stream=stream)

    training = Training(tmp_path, {"_type": "python", "function": build_workflow(answer)}, ("gateway",))
    with pytest.raises(Exception, match="a model call was refused"):
        training.run()


def copy(sample):
    arrays = ("token_ids", "loss_mask", "policy_versions", "turn_ids")
    return dataclasses.replace(sample, **{name: getattr(sample, name).copy() for name in arrays})
