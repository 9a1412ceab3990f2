"""The notebooks in the documentation: those of their scripts, with outputs."""

import json
import re
from pathlib import Path
from typing import Any

import jupytext
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "examples").glob("*.ipynb"))


def outputs(cell: dict[str, Any]) -> str:
    return json.dumps(cell["outputs"], ensure_ascii=False)


def test_there_are_notebooks():
    assert {file.stem for file in NOTEBOOKS} == {
        "diffrax_memory",
        "killed_twice",
        "language_model",
        "long_simulation",
    }


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
class TestNotebook:
    def test_is_that_of_its_script(self, file):
        script = jupytext.read(
            ROOT / "examples" / f"{file.stem}.py", fmt="py:percent"
        ).cells
        cells = json.loads(file.read_text())["cells"]
        pairs = lambda cells: [(c["cell_type"], "".join(c["source"])) for c in cells]
        again = "the notebooks are made again by `python examples/notebooks.py`"
        assert pairs(cells) == pairs(script), again

    def test_was_run_from_top_to_bottom(self, file):
        cells = json.loads(file.read_text())["cells"]
        cells = [cell for cell in cells if cell["cell_type"] == "code"]
        assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
        assert all(o["output_type"] != "error" for c in cells for o in c["outputs"])
        # What prints, and what draws, has something to show for it.
        for cell in cells:
            source = "".join(cell["source"])
            if re.search(r"^print\(", source, re.MULTILINE):
                assert '"stdout"' in outputs(cell)
            if "plt.show()" in source:
                assert '"image/png"' in outputs(cell)

    def test_says_nothing_of_the_machine(self, file):
        cells = json.loads(file.read_text())["cells"]
        text = "".join(outputs(cell) for cell in cells if cell["cell_type"] == "code")
        text = re.sub(r'"image/png": "[^"]*"', "", text)
        assert not re.search(r"(?<![\w.])/\w+/\w+|[A-Z]:\\|0x[0-9a-f]{6}|Warning", text)
        assert "\\r" not in text
