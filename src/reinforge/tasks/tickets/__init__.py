"""The second bundled agent: files support e-mails as JSON tickets, with one chance to correct an invalid ticket.

ticket.py      the fields and their values, and the parser
grammar.py     e-mails with their true tickets
words.json     the words of the e-mails
workflow.py    the agent: one answer, and one correction
dataset.py     the dataset of e-mails
evaluators.py  all fields right, share of right fields, valid answers, training reward
starter.py     the agent's initial model, trained on first use
tickets.yml    `reinforge finetune` runs it
"""

from pathlib import Path

TICKETS = Path(__file__).with_name("tickets.yml")
