from services.scheduler.core.batch_plan import SamplingParams
from services.scheduler.core.followers import FollowerGate
from services.scheduler.core.submission import Submission


def sample(request_id: str, gateway: str = "g") -> Submission:
    return Submission(request_id, gateway, "t", "t", "", (1, 2), 4, SamplingParams())


def test_followers_are_released_with_their_leader_in_order_of_arrival():
    gate = FollowerGate()
    for name in ("a1", "a2", "b1"):
        gate.hold(sample(name), name[0])
    assert (len(gate), "a1" in gate) == (3, True)
    assert [submission.request_id for submission in gate.release("a")] == ["a1", "a2"]
    assert gate.release("a") == []
    assert (len(gate), "a1" in gate, "b1" in gate) == (1, False, True)


def test_dropped_follower_is_not_released():
    gate = FollowerGate()
    gate.hold(sample("a1"), "a")
    gate.hold(sample("a2"), "a")
    assert gate.drop("a1") == sample("a1")
    assert gate.drop("a1") is None
    assert [submission.request_id for submission in gate.release("a")] == ["a2"]


def test_followers_of_a_lost_gateway_are_dropped():
    gate = FollowerGate()
    gate.hold(sample("a1", "lost"), "a")
    gate.hold(sample("b1", "other"), "b")
    gate.drop_gateway("lost")
    assert (len(gate), gate.release("a")) == (1, [])
