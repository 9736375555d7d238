"""No more requests with media at a time than the operator allows."""

import pytest

from medialane.core.errors import PreparersBusy
from medialane.gateway.admission import Admission


def test_request_over_the_limit_is_rejected_until_a_slot_is_free():
    admission = Admission(2)
    admission.enter()
    admission.enter()
    with pytest.raises(PreparersBusy) as refused:
        admission.enter()
    assert refused.value.retry_after_s
    admission.leave()
    admission.enter()
    assert admission.num_in_flight == 2
    admission.leave()
    admission.leave()
    assert admission.num_in_flight == 0
