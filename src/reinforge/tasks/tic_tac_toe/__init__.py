"""The bundled agent: plays tic-tac-toe against an opponent that moves at random.

game.py        the rules, and the board as text
workflow.py    the agent: one game, one model call per move
dataset.py     the dataset of games
evaluators.py  win rate, training reward, share of legal moves
starter.py     the agent's initial model, trained on first use
display.py     games as boards side by side, for the demo
demo.yml       configuration of `reinforge demo`
"""

from pathlib import Path

DEMO = Path(__file__).with_name("demo.yml")
LONG = (
    ("eval.general.dataset.num_train", "16384"),
    ("eval.general.dataset.seed", "0"),
    ("trajectory_builders.groups.examples_per_epoch", "256"),
    ("finetuning.num_epochs", "64"),
    ("finetuning.run_configuration.validation_interval", "16"),
)
"""What changes in it for `reinforge demo --long`: more games, for a stronger agent in at most 12 minutes."""
