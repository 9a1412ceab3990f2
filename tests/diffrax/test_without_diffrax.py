"""What is said where Diffrax is not installed."""

import importlib
import sys

import pytest


def test_the_error_says_what_to_install(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("eqloop.diffrax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "diffrax", None)
    with pytest.raises(ImportError, match="pip install diffrax"):
        importlib.import_module("eqloop.diffrax")
