"""An environment of a project: a game of some turns; some questions do what environments should not do."""

import asyncio
import os
import time

import verifiers as vf


def reward(state):
    if state["row"]["question"] == "broken":
        raise KeyError("the reward function fails")
    return sum("six" in text for text in state["trajectory"]) / 2


def turns(state):
    return len(state["trajectory"])


class Game(vf.MultiTurnEnv):
    meeting = asyncio.Barrier(2)

    async def set_up(self, state):
        match state["row"]["question"]:
            case "hang":
                await asyncio.Event().wait()
            case "die":
                os._exit(3)
            case "block":
                time.sleep(60)
            case "meet" | "meet too":
                await self.meeting.wait()


def load_environment(questions=("plain",), turns_to_play=1, compares=False):
    game = Game([{"question": each, "answer": "six"} for each in questions], [reward, turns], turns_to_play)
    game.requires_group_rollouts = compares
    return game
