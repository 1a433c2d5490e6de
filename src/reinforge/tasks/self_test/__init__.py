"""What `reinforge doctor` trains: a tiny model, from random weights, that learns to answer with an even digit.

agent.py       the agent and its reward
self_test.yml  the run: a minute at most on two cores
learning.py    makes the model, runs it, stops it half-way, resumes it, and checks the result
"""

from pathlib import Path

SELF_TEST = Path(__file__).with_name("self_test.yml")
