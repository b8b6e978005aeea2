from services.scheduler.core.request import Request
from services.scheduler.core.request_queue import RequestQueue
from tests.unit.scheduler.harness import bare_request


def make_request(arrival: int) -> Request:
    return bare_request(arrival)


def make_queue() -> RequestQueue:
    return RequestQueue(order=lambda request: request.arrival)


def drain(queue: RequestQueue) -> list[int]:
    arrivals = []
    while (request := queue.peek()) is not None:
        arrivals.append(request.arrival)
        queue.remove(request)
    return arrivals


def test_queue_gives_requests_back_in_their_order_whatever_the_order_of_pushing() -> None:
    queue = make_queue()
    for arrival in (3, 1, 2):
        queue.push(make_request(arrival))
    assert drain(queue) == [1, 2, 3]


def test_request_that_left_the_middle_is_gone_and_may_return_to_its_place() -> None:
    queue = make_queue()
    requests = [make_request(arrival) for arrival in range(4)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[1])
    assert requests[1] not in queue
    queue.push(requests[1])
    assert drain(queue) == [0, 1, 2, 3]


def test_keys_of_requests_that_left_are_dropped() -> None:
    queue = make_queue()
    head = make_request(0)
    queue.push(head)
    for arrival in range(1, 1000):
        request = make_request(arrival)
        queue.push(request)
        queue.remove(request)
    assert len(queue) == 1
    assert len(queue._keys) <= 17


def test_asking_and_returning_the_head_again_and_again_adds_nothing() -> None:
    queue = make_queue()
    queue.push(make_request(0))
    queue.push(make_request(1))
    for _ in range(100):
        head = queue.peek()
        assert head is not None
        queue.remove(head)
        queue.push(head)
    assert len(queue._keys) == 2


def test_equal_keys_are_served_in_order_of_arrival() -> None:
    queue = RequestQueue(order=lambda request: 7)
    for arrival in (2, 1, 3):
        queue.push(make_request(arrival))
    assert drain(queue) == [1, 2, 3]
