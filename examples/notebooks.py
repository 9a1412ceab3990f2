"""Makes the notebooks of the documentation, with their outputs, from their scripts.

    python -m pip install -e '.[notebooks]' && python examples/notebooks.py [NAME ...]

It runs each script whose cells start with `# %%` in its own kernel, or those that are
named, writes the notebooks to `docs/examples/`, and prints their paths. Of the machine
it keeps only the printed figures, and of a progress bar only its end.
"""

import os
import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode

SCRIPTS = Path(__file__).parent
NOTEBOOKS = SCRIPTS.parent / "docs" / "examples"
NAMES = ("long_simulation", "language_model", "killed_twice", "diffrax_memory")


def read(name: str) -> NotebookNode:
    """The notebook of a script, without outputs."""
    notebook = jupytext.read(SCRIPTS / f"{name}.py", fmt="py:percent")
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        }
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # the same each time
        cell.metadata = {}
    return notebook


def run(notebook: NotebookNode) -> None:
    """Fills in the outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises.
    """
    # Without widgets a progress bar is text, which is what a page can show.
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
    NotebookClient(notebook, record_timing=False, coalesce_streams=True).execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        notebook = read(name)
        run(notebook)
        file = NOTEBOOKS / f"{name}.ipynb"
        jupytext.write(notebook, file)
        print(f"written {file}")


if __name__ == "__main__":
    main()
