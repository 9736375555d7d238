"""`medialane compare`: traffic that is replayed against two servers in turns, and what each made of it.

Theory of operation. `traffic` reads a recording of a gateway or an OpenAI batch file, as requests that are made when
their turn comes. `comparison` has two servers run, plain vLLM and `medialane serve` at their defaults, one at a time,
or any that run already. `client` sends the requests to one of them at their times, or some at a time; `journal` keeps
each reply as it comes, so that an interrupted comparison goes on where it was, and says what it has. From the replies
alone follow the figures of a side and whether the answers agree: the `report`, which is written as JSON and shown as a
table.
"""

from medialane.tools.compare.comparison import Pace, TrafficComparison, sides_of
from medialane.tools.compare.journal import Journal, Manifest, Turn, TurnFacts
from medialane.tools.compare.reply import Reply, Served, read_document, read_stream
from medialane.tools.compare.report import Slo, make_report, show
from medialane.tools.compare.traffic import Traffic, TrafficRequest, UnusableLine, read_traffic

__all__ = [
    "Journal",
    "Manifest",
    "Pace",
    "Reply",
    "Served",
    "Slo",
    "Traffic",
    "TrafficComparison",
    "TrafficRequest",
    "Turn",
    "TurnFacts",
    "UnusableLine",
    "make_report",
    "read_document",
    "read_stream",
    "read_traffic",
    "show",
    "sides_of",
]
