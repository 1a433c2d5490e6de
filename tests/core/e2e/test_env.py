"""`reinforge env`: versions and machine for a bug report, also where torch is missing or broken, and no secret."""

import json
import subprocess
import sys

import pytest

from reinforge.version import __version__
from tests.project import call


def test_env_prints_versions_and_machine():
    result = call("env", "--json", code=0)
    found = json.loads(result.output)
    assert found["reinforge"]["version"] == __version__
    assert sys.executable in found["reinforge"]["python"]
    assert found["packages"]["torch"][0].isdigit()
    assert found["packages"]["flash-attn"] == "not installed"
    assert "CPUs" in found["machine"]["processor"]
    text = call("env").output
    for section, lines in found.items():
        assert f"\n{section}\n" in f"\n{text}"
        assert all(f"  {name} " in text for name in lines)


def test_env_names_secrets_without_their_values():
    secret = "sk-" + "a1" * 20
    result = call("env", env={"OPENAI_API_KEY": secret, "HF_TOKEN": "hf_abc", "LANG": "C"})
    assert secret not in result.output
    assert "hf_abc" not in result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["OPENAI_API_KEY", "set"] in lines
    assert ["LANG", "C"] in lines


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ("None", "unknown: torch is not installed"),
        ("type(sys)('torch')", "unknown: "),  # an installation without its parts
    ],
)
def test_env_works_where_torch_does_not(torch, expected):
    code = f"import sys\nsys.modules['torch'] = {torch}\nfrom reinforge.cli import main\nmain(['env', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["machine"]["accelerators"].startswith(expected)
