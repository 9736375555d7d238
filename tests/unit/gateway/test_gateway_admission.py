"""No more requests with media at a time than the operator allows."""

import pytest

from medialane.gateway import RequestScope
from medialane.gateway.admission import Admission, SharedCounts, Tenant, TenantLimits
from medialane.types.errors import ConcurrencyLimitExceeded, MediaOverloaded


def test_request_over_the_limit_is_rejected_until_the_scope_of_another_is_closed():
    admission = Admission(2)
    first, second, third = (RequestScope() for _ in range(3))
    admission.admit(first)
    admission.admit(second)
    with pytest.raises(MediaOverloaded) as refused:
        admission.admit(third)
    assert refused.value.retry_after_s
    first.close()
    admission.admit(third)
    assert admission.num_in_flight == 2
    second.close()
    third.close()
    assert admission.num_in_flight == 0


def test_tenant_has_a_share_of_the_requests_and_others_go_on():
    admission = Admission(4, tenant_share=0.5)

    def scope(name):
        made = RequestScope()
        made.tenant = None if not name else Tenant(TenantLimits(name, "0" * 64), SharedCounts(), float)
        return made

    first, second = scope("ann"), scope("ann")
    admission.admit(first)
    admission.admit(second)
    with pytest.raises(ConcurrencyLimitExceeded, match="its share") as refused:
        admission.admit(scope("ann"))
    assert refused.value.retry_after_s
    others = [scope("ben"), scope("")]
    for other in others:
        admission.admit(other)
    with pytest.raises(MediaOverloaded):
        admission.admit(scope("ben"))
    first.close()
    admission.admit(first := scope("ann"))
    for each in (first, second, *others):
        each.close()


def test_refused_requests_are_sent_away_until_others_are_expected_to_have_ended():
    now = 0.0
    admission = Admission(4, clock=lambda: now)
    scopes = [RequestScope() for _ in range(8)]
    for scope in scopes[:4]:
        admission.admit(scope)
    now = 48.0
    for scope in scopes[:4]:
        scope.close()
    for scope in scopes[4:]:
        admission.admit(scope)
    waits = []
    for _ in range(3):
        with pytest.raises(MediaOverloaded) as refused:
            admission.admit(RequestScope())
        waits.append(refused.value.retry_after_s)
    assert waits == [12, 24, 36], "requests take 48 s, four at a time"
    for scope in scopes[4:]:
        scope.close()


def test_request_is_counted_once():
    admission, scope = Admission(1), RequestScope()
    admission.admit(scope)
    admission.admit(scope)
    assert admission.num_in_flight == 1
    scope.close()
    assert admission.num_in_flight == 0
