"""What a file of the NeMo Agent Toolkit may name that does not exist here, and what to write instead.

llms.m._type: nim              ->  `_type: openai` with the URL of the service
workflow._type: react_agent    ->  the agent as a Python function
ttc_strategies: {...}          ->  several choices of one call, or the trajectory builder `_type: tree`
"""

from __future__ import annotations

from reinforge.config.document import KeyPath, format_path
from reinforge.errors import Problem

TOOLKIT = "the NeMo Agent Toolkit"

_URL = "use `_type: openai` with model_name, base_url and api_key"
_AGENT = (
    "write the agent as a Python function, async def agent(item, llm, context), and name it: `_type: python`, "
    "`function: module:agent`"
)
_TOOL = "call the tool in the agent's own code, or register it with register_function"
_JUDGE = "use `_type: llm_judge` with a rubric"
_SCORE = "write the score as a Python function (`_type: python`, `function: module:name`)"
_SPEED = "the summary of a run has the time and the tokens of every stage; a score of your own is `_type: python`"
_ROWS = "convert the file to `_type: jsonl` or csv"
_LOADER = "load the rows in Python and register the loader with register_dataset, or write them to a jsonl file"
_BRANCH = (
    "ask for several choices in one call (`n`), and use the trajectory builder `_type: tree`; or score candidates with "
    "context.mark(TTCEventData(...))"
)

_AGENTS = """
react_agent per_user_react_agent tool_calling_agent responses_api_agent rewoo_agent reasoning_agent chat_completion
langgraph_wrapper router_agent sequential_executor parallel_executor auto_memory_agent
"""
_TOOLS = """
current_datetime code_execution code_generation nat_retriever webpage_query wiki_search text_file_ingest
tavily_internet_search mcp_tool_wrapper
"""

TYPES: dict[str, dict[str, str]] = {
    "llm": {
        "nim": f"{_URL}: https://integrate.api.nvidia.com/v1 and ${{NVIDIA_API_KEY}}, or your own NIM's URL up to /v1",
        "azure_openai": f"{_URL}: the resource's URL up to /openai/v1",
        **dict.fromkeys(("aws_bedrock", "litellm", "dynamo", "oci"), f"{_URL}, of a gateway that speaks OpenAI's API"),
        **dict.fromkeys(
            ("huggingface", "huggingface_inference"),
            f"use `_type: local` for a frozen model in this process, or {_URL[4:]}",
        ),
    },
    "workflow": {
        **dict.fromkeys(_AGENTS.split(), _AGENT),
        **dict.fromkeys(_TOOLS.split(), _TOOL),
        **dict.fromkeys(
            ("execute_score_select_function", "plan_select_execute_function", "ttc_tool_orchestration"), _BRANCH
        ),
    },
    "evaluator": {
        **dict.fromkeys(("ragas", "trajectory", "tunable_rag_evaluator", "langsmith_judge"), _JUDGE),
        **dict.fromkeys(("langsmith", "langsmith_custom", "swe_bench", "red_teaming_evaluator"), _SCORE),
        **dict.fromkeys(
            ("avg_llm_latency", "avg_workflow_runtime", "avg_num_llm_calls", "avg_tokens_per_llm_end"), _SPEED
        ),
    },
    "dataset": {"xls": _ROWS, "custom": _LOADER},
}
"""Kind of component -> its `_type` -> the fix."""

SECTIONS: dict[KeyPath, str] = {
    ("general",): "remove it; eval.general has what a run needs, and logs are in the run folder",
    ("function_groups",): _TOOL,
    ("embedders",): "call the embedding model in the agent's own code",
    ("retrievers",): "call the retriever in the agent's own code",
    ("memory",): "keep the memory in the agent's own code",
    ("object_stores",): "open the store in the agent's own code",
    ("authentication",): "write keys as ${VAR} where they are used",
    ("middleware",): "put it into the agent's own code",
    ("optimizer",): "finetuning trains the model; the toolkit's prompt and parameter optimizer has no counterpart",
    ("ttc_strategies",): _BRANCH,
    ("eval", "general", "output"): "use eval.general.output_dir; nothing in it is removed",
    ("eval", "general", "profiler"): _SPEED,
    ("eval", "general", "workflow_alias"): "remove it; a run has a name (--run_name)",
}
"""Sections and keys that have no counterpart -> the fix."""


def find_toolkit_type(kind: str, name: str, path: KeyPath) -> Problem | None:
    """Returns the problem of a component's `_type` that only the toolkit has."""
    fix = TYPES.get(kind, {}).get(name)
    if fix is None:
        return None
    return Problem(format_path((*path, "_type")), f'"{name}" is a type of {TOOLKIT} that does not exist here', fix)


def find_toolkit_key(path: KeyPath) -> Problem | None:
    """Returns the problem of a section or key that only the toolkit has."""
    fix = SECTIONS.get(path)
    return None if fix is None else Problem(format_path(path), f"a key of {TOOLKIT} that has no counterpart here", fix)
