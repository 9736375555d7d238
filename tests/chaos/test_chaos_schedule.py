"""The schedules of scenarios: what a seed means, and what the fixed seeds of the tests do."""

import pytest
import test_chaos_engines as engines
import test_chaos_full as full
import test_chaos_prefill as prefill
import test_chaos_simulated as simulated
from scenario import FULL_DISK, HOARD, Scenario

pytestmark = pytest.mark.whole


def test_schedule_follows_from_the_seed_and_a_longer_one_begins_with_it():
    scenario = Scenario(4, 30.0, simulated.ACTIONS)
    assert scenario.schedule() == Scenario(4, 30.0, simulated.ACTIONS).schedule()
    longer = Scenario(4, 300.0, simulated.ACTIONS).schedule()
    assert longer[: len(scenario.schedule())] == scenario.schedule()
    assert longer != Scenario(5, 300.0, simulated.ACTIONS).schedule()


def test_fixed_seeds_do_everything_that_can_be_done():
    scheduled = [Scenario(each.SEED, each.SECONDS, each.ACTIONS) for each in (simulated, full, engines)]
    done = {injection.action for scenario in scheduled for injection in scenario.schedule()}
    assert done >= {*simulated.ACTIONS, HOARD, FULL_DISK, *engines.ENGINE}
    split = Scenario(prefill.SEED, prefill.SECONDS, prefill.SPLIT, prefill.BETWEEN_S)
    assert {injection.action for injection in split.schedule()} == set(prefill.SPLIT)
