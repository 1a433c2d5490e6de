"""The page of a run's stability: whether jobs trained what was sampled, in steps of a sensible size."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from reinforge.runs.page.content import read_figures
from reinforge.runs.page.elements import Content, build, build_section, build_table
from reinforge.runs.page.page import MEASURES, build_measures
from reinforge.runs.rows import list_guard_events
from reinforge.runs.run_folder import RunOverview
from reinforge.view.documents import build_anchor, build_run_path
from reinforge.view.episode_table import EpisodeTable, name_epoch

MORE_MEASURES = (
    ("kl_ref", "KL divergence from the reference, nats a token", "How far the model has moved since the base model."),
    ("clip_fraction_low", "Share clipped from below", "Tokens whose probability fell as far as a job allows."),
    ("clip_fraction_high", "Share clipped from above", "Tokens whose probability rose as far as a job allows."),
    ("ratio", "Probability ratio", "Of the trained to the sampling model; 1 before the first step."),
    ("tis_weight", "Importance weight", "Far from 1 the sampler and the learner disagree."),
    ("canary_k3", "Canary: sampler against learner after a job", "Above 0.01 the server serves other weights."),
    ("canary_difference", "Canary: largest log-prob difference", "On trained prompts, between sampler and learner."),
    ("num_groups_stale", "Groups left out as too old", "Sampled by versions beyond limits.max_staleness."),
    ("num_skipped_steps", "Skipped optimizer steps", "Their gradient was not finite."),
    ("lr", "Learning rate", "Of the last step of a job."),
    ("reward_std", "Standard deviation of the rewards", "At 0 all episodes have the same reward: no signal."),
    ("completion_tokens", "Sampled tokens of an episode", "A steady rise may be a reward for length."),
    ("clipped_share", "Share of episodes cut off by max_tokens", "Above a few percent raise max_tokens."),
)
"""More metrics of training jobs and epochs, as `MEASURES`."""


def build_stability_page(overview: RunOverview, table: EpisodeTable) -> list[Content]:
    charts = build_measures(read_figures(overview), (*MEASURES, *MORE_MEASURES))
    nothing = build_section(
        "Training", build("p", "At least two epochs with a training job are needed."), id="training"
    )
    return [_build_events(overview), charts if charts is not None else nothing]


def _build_events(overview: RunOverview) -> Element:
    events = list_guard_events(overview.record.stages) if overview.record is not None else []
    rows = [(name_epoch(each.epoch), each.guard, _build_action(each.action), each.text) for each in events]
    link = build_anchor("the run", build_run_path(overview.folder.name))
    found = (
        build_table(("epoch", "guard", "action", "what it found"), rows, "Guard events")
        if rows
        else build("p", "No guard has warned or stopped ", link, ".")
    )
    return build_section("Guards", found, id="guards")


def _build_action(action: str) -> Element:
    name, tone = {"halt": ("stopped the run", "bad"), "note": ("noted", "")}.get(action, ("warned", "warn"))
    return build("span", name, class_=f"badge {tone}")
