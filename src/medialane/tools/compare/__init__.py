"""`medialane compare`: traffic that is replayed against two servers in turns, and what each made of it.

Theory of operation. `traffic` reads a recording of a gateway or an OpenAI batch file, as requests that are made when
their turn comes. `comparison` has two servers run, plain vLLM and `medialane serve` at their defaults, one at a time,
or any that run already. `client` sends the requests to one of them at their times, or some at a time, and reads its
replies. From these follow the figures of a side and whether the answers agree: the `report`, which is written as JSON
and shown as a table.
"""

from medialane.tools.compare.client import Reply, Served, read_document, read_stream
from medialane.tools.compare.comparison import Pace, Side, TrafficComparison, Turn, sides_of, written
from medialane.tools.compare.report import Slo, make_report, show
from medialane.tools.compare.traffic import Traffic, TrafficRequest, UnusableLine, read_traffic

__all__ = [
    "Pace",
    "Reply",
    "Served",
    "Side",
    "Slo",
    "Traffic",
    "TrafficComparison",
    "TrafficRequest",
    "Turn",
    "UnusableLine",
    "make_report",
    "read_document",
    "read_stream",
    "read_traffic",
    "show",
    "sides_of",
    "written",
]
