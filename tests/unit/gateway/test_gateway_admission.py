"""No more requests with media at a time than the operator allows."""

import pytest

from medialane.core.errors import PreparersBusy
from medialane.gateway.admission import Admission


def test_request_over_the_limit_is_rejected_until_a_slot_is_released():
    admission = Admission(2)
    first, second = admission.enter(), admission.enter()
    with pytest.raises(PreparersBusy) as refused:
        admission.enter()
    assert refused.value.retry_after_s
    first.release()
    third = admission.enter()
    assert admission.num_in_flight == 2
    for place in (second, third):
        place.release()
    assert admission.num_in_flight == 0


def test_slot_is_released_once():
    admission = Admission(1)
    place = admission.enter()
    place.release()
    place.release()
    assert admission.num_in_flight == 0
