"""The files of docs/quickstart.md, copied as a reader copies them, are a run that `check` finds valid."""

import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from reinforge.cli import main

PAGE = Path(__file__).parents[3] / "docs" / "quickstart.md"


def test_the_yaml_file_of_the_quickstart_is_valid_with_the_files_beside_it(tmp_path, monkeypatch):
    section = PAGE.read_text().split("## The same from a YAML file")[1].split("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    assert [language for language, _ in blocks[:3]] == ["python", "python", "yaml"]
    for name, (_, text) in zip(("my_agent.py", "questions.py", "run.yml"), blocks, strict=False):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("my_agent", None)
    subprocess.run([sys.executable, "questions.py"], check=True)
    result = CliRunner().invoke(main, ["check", "run.yml", "--sample", "3"])
    assert result.exit_code == 0, result.output
    for expected in ("438 train, 109 select, 182 confirm", "expected answer 1, empty answer 0", "run.yml is valid"):
        assert expected in result.output
    assert not (tmp_path / ".reinforge").exists()
