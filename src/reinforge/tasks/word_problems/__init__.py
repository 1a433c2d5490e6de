"""One-step word problems for a pretrained model: `reinforge demo --pretrained` trains SmolLM2-135M-Instruct on them.

problems.py          calculations, and how a problem is written
words.json           its wordings
dataset.py           the dataset, whose `confirm` problems share no wording and no calculation with the others
agent.py             the agent: asks once, or has the model use a calculator first
scoring.py           the training rewards
starter.py           a small model for projects without a pretrained one, trained on first use
display.py           problems with the replies before and after
word_problems.yml    the configuration
"""

from pathlib import Path

WORD_PROBLEMS = Path(__file__).with_name("word_problems.yml")
CALCULATOR = (
    ("workflow.function", "reinforge.tasks.word_problems.agent:calculate_and_answer"),
    ("eval.evaluators.reward.function", "reinforge.tasks.word_problems.scoring:score_tool_use"),
)
"""What changes in the configuration for the agent with a calculator."""
