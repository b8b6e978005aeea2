import pytest

from services.common.errors import EngineError, ErrorReason
from services.scheduler.core.step_time import StepTimeModel
from services.scheduler.core.tenant_ledger import CONTENTION_MS, MAX_IDLE_ACCOUNTS, Account, TenantLedger
from tests.unit.scheduler.harness import NOW_MS


def test_counter_is_tokens_over_weight() -> None:
    account = TenantLedger({"heavy": 4.0}).open("heavy")
    account.num_charged_tokens += 100
    assert account.counter == 25


def test_idle_tenant_is_lifted_to_the_smallest_counter_of_those_that_wait() -> None:
    ledger = TenantLedger({"newcomer": 2.0})
    for tenant, num_tokens in (("busy", 300), ("busier", 500)):
        account = ledger.open(tenant)
        ledger.begin_waiting(account, is_return=False)
        account.num_charged_tokens = num_tokens
    newcomer = ledger.open("newcomer")
    ledger.begin_waiting(newcomer, is_return=False)
    assert newcomer.counter == 300


def test_lifting_takes_nothing_from_a_counter_that_is_larger() -> None:
    ledger = TenantLedger()
    ledger.begin_waiting(ledger.open("behind"), is_return=False)
    ahead = ledger.open("ahead")
    ahead.num_charged_tokens = 70
    ledger.begin_waiting(ahead, is_return=False)
    assert ahead.counter == 70


def test_tenant_is_lifted_to_the_one_served_last_when_nobody_waits() -> None:
    ledger = TenantLedger()
    busy = ledger.open("busy")
    ledger.note_served(busy)
    busy.num_charged_tokens = 40  # counts what it has had since, too
    newcomer = ledger.open("newcomer")
    ledger.begin_waiting(newcomer, is_return=False)
    assert newcomer.counter == 40


def test_tenant_that_waits_or_returns_from_a_worker_is_not_lifted() -> None:
    ledger = TenantLedger()
    behind, ahead = ledger.open("behind"), ledger.open("ahead")
    ledger.begin_waiting(ahead, is_return=False)
    ahead.num_charged_tokens = 50
    ledger.begin_waiting(behind, is_return=True)
    ledger.begin_waiting(behind, is_return=False)
    assert behind.counter == 0


def test_debt_is_not_cleared_by_going_away() -> None:
    ledger = TenantLedger()
    account = ledger.open("a")
    account.num_charged_tokens = 50
    ledger.close(account, NOW_MS)
    assert ledger.open("a").counter == 50


def test_accounts_of_idle_tenants_are_bounded_and_those_of_live_ones_are_kept() -> None:
    ledger = TenantLedger()
    live = ledger.open("live")
    for index in range(MAX_IDLE_ACCOUNTS + 10):
        ledger.close(ledger.open(f"tenant-{index}"), NOW_MS)
    assert len(ledger._account_by_tenant) == MAX_IDLE_ACCOUNTS + 1
    assert ledger.open("live") is live


def test_weight_that_is_not_positive_is_refused() -> None:
    with pytest.raises(EngineError, match="tenant a must be positive") as error:
        TenantLedger({"a": 0.0})
    assert error.value.reason is ErrorReason.INVALID_CONFIG


def test_tenant_contends_until_a_while_after_its_last_request() -> None:
    ledger = TenantLedger()
    ledger.open("a")
    assert ledger.is_alone(NOW_MS)
    ledger.close(ledger.open("b"), NOW_MS)
    assert not ledger.is_alone(NOW_MS + CONTENTION_MS)
    assert ledger.is_alone(NOW_MS + CONTENTION_MS + 1)


def test_places_are_shared_by_weight_among_those_that_contend() -> None:
    ledger = TenantLedger({"heavy": 3.0})
    heavy, light = ledger.open("heavy"), ledger.open("light")
    heavy.num_placed, light.num_placed = 5, 2
    assert not ledger.has_its_places(heavy, 8)
    assert ledger.has_its_places(light, 8)
    heavy.num_placed = 6
    assert ledger.has_its_places(heavy, 8)


def test_place_is_owed_up_to_the_share_and_spared_from_beyond_it() -> None:
    ledger = TenantLedger()
    one, other = ledger.open("one"), ledger.open("other")
    one.num_placed, other.num_placed = 1, 3
    assert ledger.is_owed_a_place(one, 4)
    assert ledger.can_spare_a_place(other, 4)
    assert ledger.is_lending(4)
    one.num_placed = other.num_placed = 2
    assert not ledger.is_owed_a_place(one, 4)
    assert not ledger.can_spare_a_place(other, 4)
    assert not ledger.is_lending(4)


def behind_by(num_places: int, ledger: TenantLedger, account: Account) -> None:
    """Let a step pass after which ``account`` is behind by so many places."""
    account.own_machine.note_answer(0, 10)
    model = StepTimeModel()
    for num_tokens in (4, 64, 12):
        model.note(num_tokens, 4 + num_tokens / 2)
    ledger.note_step(0.0, model)
    account.own_machine.num_seen_steps = 1
    account.own_machine.num_lag_rows = 10.0 * num_places


def test_share_of_places_is_more_by_what_a_tenant_is_behind_at_the_cost_of_the_others() -> None:
    ledger = TenantLedger({"heavy": 2.0})
    behind, light, heavy = ledger.open("behind"), ledger.open("light"), ledger.open("heavy")
    behind_by(2, ledger, behind)
    shares = [ledger.share_of(account, 48) for account in (behind, light, heavy)]
    assert shares == [pytest.approx(14), pytest.approx(12 - 2 / 3), pytest.approx(24 - 4 / 3)]


def test_place_is_owed_beyond_the_even_share_to_a_tenant_that_is_behind() -> None:
    ledger = TenantLedger()
    behind, ahead = ledger.open("behind"), ledger.open("ahead")
    behind.num_placed, ahead.num_placed = 8, 8
    assert not ledger.is_owed_a_place(behind, 16)
    behind_by(1, ledger, behind)
    assert ledger.is_owed_a_place(behind, 16)
    assert ledger.can_spare_a_place(ahead, 16)
    behind.num_placed, ahead.num_placed = 9, 7
    assert not ledger.is_owed_a_place(behind, 16)
    assert not ledger.is_owed_a_place(ahead, 16)
    assert not ledger.can_spare_a_place(behind, 16)


def test_shares_stay_until_a_step_is_done() -> None:
    ledger = TenantLedger()
    behind, _ = ledger.open("behind"), ledger.open("ahead")
    behind_by(1, ledger, behind)
    assert ledger.share_of(behind, 16) == 9
    behind.own_machine.forget_lag()
    assert ledger.share_of(behind, 16) == 9
    ledger.note_step(1.0, StepTimeModel())
    assert ledger.share_of(behind, 16) == 8


def test_tenant_that_has_nothing_left_is_not_behind() -> None:
    ledger = TenantLedger()
    behind, _ = ledger.open("behind"), ledger.open("ahead")
    behind_by(1, ledger, behind)
    ledger.close(behind, NOW_MS)
    assert ledger.share_of(behind, 16) == 8
