"""The notebooks of examples/: stripped of outputs in the repository, and executed as a reader would."""

import json
import os
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[3] / "examples" / "notebooks").glob("*.ipynb"))
names = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def find_outputs(notebook):
    """Returns the ids of the cells that hold outputs, or the number of an execution."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"] is not None]


@names
def test_no_output_is_kept_in_the_repository(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert find_outputs(notebook) == []
    assert notebook["nbformat"] == 4
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}, "nothing of the machine that it was written on"


def execute(path, folder, monkeypatch):
    """Returns a notebook with the outputs of its cells, executed in a folder."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    return client.execute()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@names
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    notebook = execute(path, tmp_path, monkeypatch)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    contents = [output.data for output in outputs if "data" in output]
    text = "".join(output.get("text", "") for output in outputs)
    assert "promoted: True" in text
    plots = [data for data in contents if "image/png" in data or "data:image/png;base64," in data.get("text/html", "")]
    assert len(plots) == 1, "the plot is shown inline, once"
    assert len(list(tmp_path.rglob("report.html"))) == 1
