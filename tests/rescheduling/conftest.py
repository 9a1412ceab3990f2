"""Bars draw nothing here, as in the tests of progress."""

from ..progress.conftest import recorder, shown

__all__ = ["recorder", "shown"]
