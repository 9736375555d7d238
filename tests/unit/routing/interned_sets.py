import numpy as np

from medialane.routing.block_holders import BlockHolders


def num_sets(holders: BlockHolders) -> int:
    """Distinct sets of holders: none may be left over."""
    return int(np.count_nonzero(holders._now.places))
