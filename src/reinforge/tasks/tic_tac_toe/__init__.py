"""The bundled agent: plays tic-tac-toe against an opponent that moves at random.

game.py        the rules, and the board as text
workflow.py    the agent: one game, one model call per move
dataset.py     the dataset of games
evaluators.py  win rate, training reward, share of legal moves
starter.py     the agent's initial model, trained on first use
display.py     games as boards side by side, for the demo
demo.yml       configuration of `reinforge demo`; demo_long.yml: of `reinforge demo --long`
"""

from pathlib import Path

DEMO = Path(__file__).with_name("demo.yml")
DEMO_LONG = Path(__file__).with_name("demo_long.yml")
