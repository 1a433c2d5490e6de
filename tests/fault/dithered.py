"""GRPO whose loss draws from torch's random stream, as dropout does, so that a run must restore the stream."""

import torch

from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.engine.losses.base import register_loss
from reinforge.engine.losses.policy_gradient import clipped_pg
from reinforge.registry import register_algorithm
from reinforge.types.sample import LossSpec


class DitheredConfig(GRPOConfig, name="dithered"):
    """Settings of GRPO."""


@register_loss("dithered_pg")
def dithered_pg(batch, logprobs_BT, **params):
    output = clipped_pg(batch, logprobs_BT, **params)
    output.loss = output.loss * (0.5 + torch.rand(output.loss.shape))
    return output


@register_algorithm(config_type=DitheredConfig)
async def dithered(config, builder):
    algorithm = GRPO(config)
    algorithm.loss = LossSpec("dithered_pg", algorithm.loss.params)
    yield algorithm
