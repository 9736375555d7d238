"""The store's side of the nixl mover: it starts the mover process when it is first needed, and again after its end."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from medialane.arena import ENTRY_HEADER_BYTES
from medialane.core.backoff import Backoff
from medialane.core.errors import TransferFailed
from medialane.core.remote_entry import MoverName
from medialane.core.tensor import ArenaRange
from medialane.transfer.mover import Destination, OpenedEntry, StillWriting
from medialane.transfer.nixl.child import MoverChild, NixlRefused, environment
from medialane.transfer.nixl.process import MAX_READS
from medialane.transfer.nixl.rdma_metadata import Descriptor, RdmaMetadata, pack_agent_metadata

logger = logging.getLogger(__name__)

FACTORY = "medialane.transfer.nixl.nixl_agent:NixlAgent"
