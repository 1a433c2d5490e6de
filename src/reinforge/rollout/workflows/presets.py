"""Coding agents by name, as settings of `workflow: {_type: command}`: `preset: codex`.

Each works without questions and without a user's login or configuration: HOME is the episode's, and what the program
would send home is switched off. `reinforge` installs none of them.
"""

from __future__ import annotations

from typing import Any

from reinforge.errors import did_you_mean

PATIENCE_S = 3600
"""Seconds for which a program waits for a reply: one that gives up earlier asks again, which is sampled twice."""

CLAUDE_CODE = {
    "input": "stdin",
    "command": ["claude", "--print", "--dangerously-skip-permissions", "--model", "{model}"],
    "env": {
        "IS_SANDBOX": "1",  # or it refuses to work without questions as root
        "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
        "API_TIMEOUT_MS": str(PATIENCE_S * 1000),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    },
}
CODEX = {
    "input": "stdin",
    "command": ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-"],
    "home_files": {
        ".codex/config.toml": 'model = "{model}"\nmodel_provider = "reinforge"\ncheck_for_update_on_startup = false\n'
        '[model_providers.reinforge]\nname = "reinforge"\nbase_url = "{base_url}"\nenv_key = "OPENAI_API_KEY"\n'
        f'wire_api = "responses"\nstream_idle_timeout_ms = {PATIENCE_S * 1000}\n[analytics]\nenabled = false\n'
    },
}
OPENCODE = {
    "command": ["opencode", "run", "--model", "reinforge/{model}", "--title", "task", "{input}"],
    "env": {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
    "home_files": {
        ".config/opencode/opencode.json": '{"provider": {"reinforge": {"npm": "@ai-sdk/openai-compatible", '
        '"options": {"baseURL": "{base_url}", "apiKey": "{env:OPENAI_API_KEY}", "timeout": false}, '
        '"models": {"{model}": {}}}}, "permission": "allow", "share": "disabled", "autoupdate": false}\n'
    },
}
QWEN_CODE = {
    "command": ["qwen", "--yolo", "--prompt", "{input}"],
    "env": {"OPENAI_MODEL": "{model}", "QWEN_TELEMETRY_ENABLED": "false"},
    "home_files": {".qwen/settings.json": '{"security": {"auth": {"selectedType": "openai"}}}\n'},
}
MINI_SWE_AGENT = {
    "command": ["mini", "--yolo", "--exit-immediately", "--model", "openai/{model}", "--task", "{input}"],
    "env": {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
}
AIDER = {
    "input": "file",
    "command": [
        *("aider", "--yes-always", "--no-git", "--no-pretty", "--no-check-update", "--no-show-release-notes"),
        *("--analytics-disable", "--no-show-model-warnings", "--timeout", str(PATIENCE_S), "--model", "openai/{model}"),
        *("--chat-history-file", "/dev/null", "--input-history-file", "/dev/null", "--message-file", "{input}"),
    ],
    "env": {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    "home_files": {".aider/caches/model_prices_and_context_window.json": '{"none": {}}\n'},  # or it asks GitHub for it
}
PRESETS: dict[str, dict[str, Any]] = {
    "aider": AIDER,
    "claude_code": CLAUDE_CODE,
    "codex": CODEX,
    "mini_swe_agent": MINI_SWE_AGENT,
    "opencode": OPENCODE,
    "qwen_code": QWEN_CODE,
}
INSTALL = {
    "aider": "pip install aider-chat",
    "claude_code": "npm install -g @anthropic-ai/claude-code",
    "codex": "npm install -g @openai/codex",
    "mini_swe_agent": "pip install mini-swe-agent",
    "opencode": "npm install -g opencode-ai",
    "qwen_code": "npm install -g @qwen-code/qwen-code",
}
LEFT_OUT = {"gemini_cli": "it speaks Gemini's API, which the gateway does not"}


def find_preset(name: str) -> dict[str, Any]:
    """Returns the settings of a preset.

    Raises:
        ValueError: There is no such preset.
    """
    if name not in PRESETS:
        reason = LEFT_OUT.get(name, f"there are {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}")
        raise ValueError(f"preset {name!r}: {reason}")
    return {"input": "argument", "workspace": {}, **PRESETS[name]}
