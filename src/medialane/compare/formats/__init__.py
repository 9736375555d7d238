"""The files that can be replayed. One file of code for each kind; `read_traffic` finds out which it is."""

from medialane.compare.formats.reading import FORMATS, read_traffic

__all__ = ["FORMATS", "read_traffic"]
