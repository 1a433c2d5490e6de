"""Before a run: whether training can help, what it will take, and what to do instead.

probe.py           samples a few examples, scores answers twice, and trains an epoch or two on weights that are dropped
scoring.py         scores answers a second time
durations.py       what the run will take, stage by stage, from what the probe took
analysis.py        what the metrics mean: noise, signal at other group sizes, lengths
costs.py           tokens of paid models, and their price
recommendation.py  what to do, with the reason
report.py          all of it, as text and as JSON
"""
