"""Projects whose agent marks scored candidates, and that train on the pairs through NeMo Customizer's stand-in."""

from __future__ import annotations

from tests.project import Project
from tests.protocols.nemo_service import NeMoService
from tests.protocols.openai_service import OpenAIService

AGENT = """
from reinforge.finetuning import TTCEventData

async def agent(item, llm, context):
    prompt = [{"role": "user", "content": item.input_obj}]
    for turn in range(2):
        texts = []
        for index in range(3):
            reply = await llm.chat.completions.create(messages=prompt, max_tokens=4, seed=index)
            texts.append(reply.choices[0].message.content)
            score = sum(letter in "aeiou" for letter in texts[-1]) / max(1, len(texts[-1]))
            data = dict(turn_id=f"turn-{turn}", candidate_index=index, score=score, input=prompt, output=texts[-1])
            context.mark(TTCEventData(**data))
        prompt = [*prompt, {"role": "assistant", "content": texts[0]}, {"role": "user", "content": "again"}]
    return texts[0]

def vowels(output, expected):
    return sum(letter in "aeiou" for letter in output) / max(1, len(output))
"""


def use_nemo_adapter(project: Project, nemo: NeMoService, openai: OpenAIService, key: str) -> Project:
    """Configures a project to train through NeMo Customizer; its agent calls a frozen model."""
    project.write("task.py", AGENT)
    settings = project.settings
    model = {"_type": "openai", "model_name": "gpt-test", "base_url": openai.url, "api_key": key}
    settings["llms"] = {"agent": model}
    settings["trajectory_builders"] = {"builder": {"_type": "dpo_traj_builder", "examples_per_epoch": 8}}
    settings["trainers"] = {"trainer": {"_type": "nemo_customizer_trainer"}}
    settings["trainer_adapters"] = {
        "adapter": {
            "_type": "nemo_customizer_trainer_adapter",
            "entity_host": f"{nemo.url}/",
            "datastore_host": nemo.url,
            "namespace": "team",
            "customization_config": "meta/llama@v1",
            "use_full_message_history": True,
            "poll_interval_seconds": 0.02,
            "hyperparameters": {"epochs": 2, "dpo": {"ref_policy_kl_penalty": 0.2}},
        }
    }
    block = settings["finetuning"]
    for name in ("policy", "curriculum_learning", "device", "deterministic"):
        block.pop(name, None)
    block |= {"num_epochs": 1, "algorithm": {"_type": "dpo"}}
    return project
