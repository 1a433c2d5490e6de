"""A target to stress-test: a front desk that answers visitors and leaks a made-up word on two subjects.

grammar.py      openings and their dataset, questions of visitors, answers of the desk
words.json      the words that openings, questions and answers are made of
starter.py      the desk and the visitor, two small models that are trained on first use
front_desk.yml  `reinforge redteam train` runs it
"""

from pathlib import Path

FRONT_DESK = Path(__file__).with_name("front_desk.yml")
