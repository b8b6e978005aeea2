"""Samples of one prompt wait for the first of them, their leader, so that the prompt is computed once.

Owns the submissions held back. When the leader has its first token, its prompt's full blocks are committed; the
followers are admitted then, find those blocks in the prefix cache, and compute only what does not fill a block (at most
one block's tokens). So samples share blocks by reference without ever writing to a shared one, and no copy-on-write is
needed.
A leader that ends before it has a token sets its followers free, too.
"""

from services.scheduler.core.submission import Submission


class FollowerGate:
    """Submissions that wait for their leader. Pure."""

    def __init__(self) -> None:
        self._followers_by_leader: dict[str, list[Submission]] = {}
        self._leader_by_follower: dict[str, str] = {}

    def __len__(self) -> int:
        """Return the number of submissions held back."""
        return len(self._leader_by_follower)

    def __contains__(self, request_id: object) -> bool:
        """Tell whether a submission of this id is held back."""
        return request_id in self._leader_by_follower

    def hold(self, submission: Submission, leader_id: str) -> None:
        """Hold a submission back until its leader is released."""
        assert submission.request_id not in self._leader_by_follower
        self._followers_by_leader.setdefault(leader_id, []).append(submission)
        self._leader_by_follower[submission.request_id] = leader_id

    def release(self, leader_id: str) -> list[Submission]:
        """Return the submissions that waited for a request, in order of arrival; they are free now."""
        released = self._followers_by_leader.pop(leader_id, [])
        for submission in released:
            del self._leader_by_follower[submission.request_id]
        return released

    def drop(self, request_id: str) -> Submission | None:
        """Take out a submission that nobody wants any more; None when it is not held."""
        leader_id = self._leader_by_follower.pop(request_id, None)
        if leader_id is None:
            return None
        followers = self._followers_by_leader[leader_id]
        (dropped,) = [submission for submission in followers if submission.request_id == request_id]
        followers.remove(dropped)
        if not followers:
            del self._followers_by_leader[leader_id]
        return dropped

    def drop_gateway(self, gateway: str) -> None:
        """Take out all submissions of a gateway that is gone."""
        gone = [
            submission.request_id
            for followers in self._followers_by_leader.values()
            for submission in followers
            if submission.gateway == gateway
        ]
        for request_id in gone:
            self.drop(request_id)
