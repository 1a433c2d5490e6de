"""Episodes of agents outside this process, without a run around them."""

from contextlib import asynccontextmanager

import psutil
import yaml

from reinforge.config.loader import load_config
from reinforge.trainer.setup.components import ComponentBuilder
from tests.doubles import ScriptedPolicy, examples
from tests.episodes import make_runner, run_items

PYTHON_AGENT = """
import json, os, sys, urllib.request

def ask(text, **more):
    body = {"model": os.environ["REINFORGE_MODEL"], "messages": [{"role": "user", "content": text}], **more}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
"""
"""The start of an agent that knows nothing but the standard library."""

NODE_AGENT = """
import { readFileSync } from "node:fs";
const task = readFileSync(0, "utf8");
const reply = await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
  method: "POST",
  headers: { "content-type": "application/json", authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
  body: JSON.stringify({
    model: process.env.REINFORGE_MODEL,
    messages: [{ role: "user", content: task }],
    max_tokens: 4,
  }),
});
console.log(JSON.stringify({ answer: (await reply.json()).choices[0].message.content }));
"""
"""The same with nothing but Node."""


@asynccontextmanager
async def open_workflow(folder, settings, *, makes_models=True):
    """Yields a workflow of a YAML file, as a run builds it."""
    (folder / "run.yml").write_text(yaml.safe_dump({"workflow": settings}))
    async with ComponentBuilder(load_config(folder / "run.yml"), makes_models=makes_models) as builder:
        yield await builder.get_workflow()


async def run_episodes(
    workflow, script=lambda request: "yes", inputs=("question",), *, timeout_s=30.0, retries=0, policy=None
):
    """Runs one episode for each input at the same time, and returns their records."""
    runner = make_runner(workflow, policy or ScriptedPolicy(script), timeout_s=timeout_s, retries=retries)
    items = examples(len(inputs))
    for item, value in zip(items, inputs, strict=True):
        item.input_obj = value
    return await run_items(runner, items)


def find_processes_in(folder):
    """Returns the processes that started in a folder, after those that were killed had time to end."""
    running = [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(folder)]
    return psutil.wait_procs([each for each in running if each.pid != psutil.Process().pid], timeout=5)[1]
