"""A client with perfect memory: it knows what its request must answer, and checks every event against that."""

from dataclasses import dataclass, field, replace

from services.scheduler.core import Finish, FinishReason, RequestEvent, Submission
from tests.simulation.fake_worker import reference_outputs


class ClientError(AssertionError):
    """A stream that is no prefix of the reference, or an end that is not the right one."""


@dataclass
class FakeClient:
    """One request from the client's side.

    Attributes:
        submission: As first submitted.
        expected: The outputs, cut where they must end.
        received: What has come so far.
        finish: The end, once it has come.
        is_cancelled: Whether the client has asked for its end.
        may_fail: Whether a fault was injected that may end it with an error.
    """

    submission: Submission
    expected: list[int]
    received: list[int] = field(default_factory=list)
    finish: Finish | None = None
    is_cancelled: bool = False
    may_fail: bool = False

    @classmethod
    def for_submission(cls, submission: Submission, max_model_len: int) -> "FakeClient":
        """Build a client that expects the undisturbed outputs of ``submission``."""
        num_prompt_tokens = len(submission.prompt_token_ids)
        max_tokens = min(submission.max_tokens, max_model_len - num_prompt_tokens)
        outputs = reference_outputs(submission.prompt_token_ids, max_tokens, submission.sampling.seed)
        end_token_ids = {*submission.eos_token_ids, *submission.stop_token_ids}
        for index, token_id in enumerate(outputs):
            if token_id in end_token_ids and index + 1 >= submission.min_tokens:
                outputs = outputs[: index + 1]
                break
        return cls(submission, outputs)

    def resubmission(self) -> Submission:
        """Build the submission that resumes after what was received."""
        return replace(self.submission, output_token_ids=tuple(self.received))

    def receive(self, event: RequestEvent) -> None:
        """Take an event in.

        Raises:
            ClientError: a token is wrong, repeated or left out, or the end is not as it must be.
        """
        request_id = self.submission.request_id
        if self.finish is not None:
            raise ClientError(f"{request_id} got an event after its end: {event}")
        if event.seq != len(self.received):
            raise ClientError(f"{request_id} expected position {len(self.received)}, got {event.seq}")
        self.received += event.token_ids
        if self.received != self.expected[: len(self.received)]:
            raise ClientError(f"{request_id} received {self.received}, which does not begin {self.expected}")
        if event.finish is None and not event.token_ids:
            raise ClientError(f"{request_id} got an empty event")
        if event.finish is not None:
            self.finish = event.finish
            self._check_finish(event.finish)

    def _check_finish(self, finish: Finish) -> None:
        counts = (finish.num_prompt_tokens, finish.num_output_tokens)
        if counts != (len(self.submission.prompt_token_ids), len(self.received)):
            raise ClientError(f"{self.submission.request_id} was billed {counts}")
        if not 0 <= finish.num_cached_tokens <= finish.num_prompt_tokens:
            raise ClientError(f"{self.submission.request_id} has {finish.num_cached_tokens} cached tokens")
        is_allowed_early = (finish.reason is FinishReason.CANCELLED and self.is_cancelled) or (
            finish.reason is FinishReason.ERROR and self.may_fail
        )
        if is_allowed_early:
            return
        is_stop = self.expected[-1] in {*self.submission.eos_token_ids, *self.submission.stop_token_ids}
        is_stop = is_stop and len(self.expected) >= self.submission.min_tokens
        reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
        if self.received != self.expected or finish.reason is not reason:
            raise ClientError(f"{self.submission.request_id} ended with {finish} after {self.received}")
        if finish.stop_token_id != (self.expected[-1] if is_stop else None):
            raise ClientError(f"{self.submission.request_id} names the stop token {finish.stop_token_id}")
