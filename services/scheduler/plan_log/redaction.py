"""Leaving the text out of a plan log: token ids become digests that only tell equal prefixes from different ones."""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Final

from treadle.scheduler.v1 import plan_log_pb2 as pb2

DIGEST_STRIDE: Final = 16
_DIGEST_BYTES: Final = 8


class Redactor:
    """Takes token ids out of records.

    Args:
        key: Secret of one life of a scheduler, at most 64 bytes; without it nobody can try out prompts against digests.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def redact(self, record: pb2.PlanLogRecord) -> None:
        """Take every token id out of ``record``, which it modifies; stop ids too, since they may be the client's."""
        match record.WhichOneof("record"):
            case "plan_sent":
                for request in record.plan_sent.plan.new_requests:
                    request.ClearField("token_ids")
            case "result_received":
                record.result_received.result.ClearField("sampled_token_ids")
            case "request_arrived":
                submission = record.request_arrived.submission
                known_ids = [*submission.prompt_token_ids, *submission.output_token_ids]
                record.request_arrived.known_tokens.CopyFrom(self._digest(known_ids))
                submission.ClearField("prompt_token_ids")
                submission.ClearField("output_token_ids")
                submission.ClearField("stop_token_ids")
            case "request_ended" if record.request_ended.HasField("finish"):
                record.request_ended.finish.ClearField("stop_token_id")

    def _digest(self, token_ids: Sequence[int]) -> pb2.TokenDigest:
        chain = hashlib.blake2b(key=self._key, digest_size=_DIGEST_BYTES)
        digests = []
        for end in range(DIGEST_STRIDE, len(token_ids) + 1, DIGEST_STRIDE):
            chain.update(array("I", token_ids[end - DIGEST_STRIDE : end]).tobytes())
            digests.append(int.from_bytes(chain.digest(), "little"))
        return pb2.TokenDigest(num_tokens=len(token_ids), prefix_digests=digests, digest_stride=DIGEST_STRIDE)
