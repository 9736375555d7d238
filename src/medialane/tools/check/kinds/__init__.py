"""The kinds of endpoints that are checked, one file each: its cases and what is compared of its answers."""

from medialane.tools.check.case import EndpointKind, Limits
from medialane.tools.check.kinds.chat import CHAT
from medialane.tools.check.kinds.pooling import POOLING, POOLING_INPUTS
from medialane.tools.check.kinds.speech import SPEECH
from medialane.tools.check.media import MODALITIES

KINDS: tuple[EndpointKind, ...] = (CHAT, *SPEECH, *POOLING, POOLING_INPUTS)

#: Limits of models that accept everything, and nothing.
_EXTREMES: tuple[Limits, ...] = (dict.fromkeys(MODALITIES, 2), {})


def case_names() -> frozenset[str]:
    """Return the names of all cases that any model can have."""
    return frozenset(case.name for limits in _EXTREMES for kind in KINDS for case in kind.cases(limits))


__all__ = ["CHAT", "KINDS", "POOLING", "POOLING_INPUTS", "SPEECH", "case_names"]
