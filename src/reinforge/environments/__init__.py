"""Environments: what an agent acts in, by one name, such as `environment: reasoning_gym:spell_backward`.

sections.py       the sections that one name stands for
worker.py         the process in which environments run
host.py           the workers of a run
session.py        an episode's environment: `context.environment`
agent.py          the agent that plays any environment, and an environment's tasks as a dataset
"""
