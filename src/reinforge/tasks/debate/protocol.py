"""Debate about cells: a prover's evidence is checked before the verifier sees it."""

from __future__ import annotations

from pydantic import Field

from reinforge.multiagent.dialogue import Dialogue
from reinforge.multiagent.protocols.debate import Debate, DebateConfig
from reinforge.multiagent.registration import register_protocol
from reinforge.tasks.debate.cells import check_evidence


class CellDebateConfig(DebateConfig, name="cell_debate"):
    """A debate in which each prover shows one cell; the dataset is `cells`."""

    randomize_channel_order: bool = Field(
        default=False, description="Off by default: the starter has only seen the prover for accept first."
    )


@register_protocol(CellDebateConfig)
class CellDebate(Debate):
    """Debate with evidence that can be checked."""

    def visible_text(self, agent: str, channel: str, text: str, dialogue: Dialogue) -> str:
        return check_evidence(text, dialogue.problem.row) if agent in self.prover_names else text
