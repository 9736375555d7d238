"""Recording the traffic of a gateway (`--record FILE`), for `medialane compare`.

Theory of operation. The event loop does one thing: when a request has ended, it puts the request's body, as intake has
left it, and its media, which the request held anyway, into a bounded queue; what does not fit is counted and left out.
A thread does the rest, in pieces that never hold the interpreter for long: sampling, redaction, JSON, and one write for
each line, so that several gateways append to one file. Whatever fails there (a full disk, the limit of the file's size)
ends the recording, with a line in the log, and no request notices.

A line is one of OpenAI's batch files (`custom_id`, `method`, `url`, `body`), with what the gateway has observed in the
member `medialane`. No header of a request is ever written. Names of tenants and salts are replaced by keyed hashes, if
asked for; the key is in a file beside the recording, for it to be continued by other gateways and later runs.
"""

from medialane.gateway.recording.config import RecordingConfig
from medialane.gateway.recording.recorded_body import FORMAT, Recordable
from medialane.gateway.recording.recorder import MAX_PENDING_BYTES, Recorder
from medialane.gateway.recording.stand_in import StandIn, parse_stand_in, with_media

__all__ = [
    "FORMAT",
    "MAX_PENDING_BYTES",
    "Recordable",
    "Recorder",
    "RecordingConfig",
    "StandIn",
    "parse_stand_in",
    "with_media",
]
