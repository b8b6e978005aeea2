#!/usr/bin/env python3
"""What restoring a prompt's blocks from host memory takes, against computing them again.

Starts one worker and speaks to it as a scheduler does; the times are those that the worker reports of its device. Each
round computes a prompt in chunks, moves its blocks to host memory and back, and ends with one token, which must be the
same from restored blocks as from computed ones (unless they were compressed).
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from treadle.kv_cache.v1 import block_pb2
from treadle.worker.v1 import batch_plan_pb2, worker_service_pb2, worker_service_pb2_grpc

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 120.0
_SCHEDULER_EPOCH = 1
_HANDLE = 1
_FIRST_TOKEN_ID = 100


class Worker:
    """A stream to a worker.

    Args:
        call: Open and greeted.
        capabilities: Of the worker.
    """

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[worker_service_pb2.RunStepsRequest, worker_service_pb2.RunStepsResponse]",
        capabilities: worker_service_pb2.Capabilities,
    ) -> None:
        self._call = call
        self.capabilities = capabilities
        self._plan_id = 0

    async def run(self, plan: batch_plan_pb2.BatchPlan) -> batch_plan_pb2.StepResult:
        """Have one step executed."""
        self._plan_id += 1
        plan.plan_id, plan.scheduler_epoch = self._plan_id, _SCHEDULER_EPOCH
        await self._call.write(worker_service_pb2.RunStepsRequest(plan=plan))
        response = await self._call.read()
        assert isinstance(response, worker_service_pb2.RunStepsResponse), "the worker has closed the stream"
        return response.result

    async def compute(
        self, token_ids: Sequence[int], block_ids: Sequence[int], chunk: int, num_computed_tokens: int
    ) -> tuple[float, int]:
        """Compute a prompt from ``num_computed_tokens`` on; return the time in ms and the token after it."""
        request = batch_plan_pb2.NewRequest(
            handle=_HANDLE,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            block_table=block_pb2.BlockTable(block_ids=block_ids),
            num_computed_tokens=num_computed_tokens,
        )
        request.sampling.temperature = 0.0
        time_us, token_id, new_requests = 0, -1, [request]
        for start in range(num_computed_tokens, len(token_ids), chunk):
            end = min(start + chunk, len(token_ids))
            plan = batch_plan_pb2.BatchPlan(new_requests=new_requests)
            plan.rows.add(handle=_HANDLE, num_scheduled_tokens=end - start, is_sampling=end == len(token_ids))
            result = await self.run(plan)
            time_us += result.device_time_us
            new_requests = []
            token_id = result.sampled_token_ids[0] if result.sampled_token_ids else token_id
        await self.run(batch_plan_pb2.BatchPlan(finished_handles=[_HANDLE]))
        return time_us / 1000, token_id

    async def copy(self, direction: block_pb2.CopyDirection, block_ids: Sequence[int]) -> float:
        """Copy blocks between the device and the first host slots; return the time in ms."""
        plan = batch_plan_pb2.BatchPlan()
        for slot, block_id in enumerate(block_ids):
            plan.block_copies.add(direction=direction, block_id=block_id, host_slot=slot)
        return (await self.run(plan)).device_time_us / 1000


@asynccontextmanager
async def start_worker(flags: Sequence[str]) -> AsyncIterator[Worker]:
    """Run a worker for as long as the body."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/worker"
        command = ["-P", "-m", "services.worker", f"--listen={address}", "--log-level=warning", *flags]
        paths = [str(_ROOT), str(_ROOT / "kernels"), str(_ROOT / "protos/gen/python")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        process = await asyncio.create_subprocess_exec(sys.executable, *command, env=environment)
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
                await _loaded(stub)
                call = stub.RunSteps()
                hello = worker_service_pb2.Hello(scheduler_epoch=_SCHEDULER_EPOCH, run_ahead_depth=1)
                await call.write(worker_service_pb2.RunStepsRequest(hello=hello))
                greeting = await call.read()
                assert isinstance(greeting, worker_service_pb2.RunStepsResponse), "the worker has closed the stream"
                yield Worker(call, greeting.capabilities)
                await call.done_writing()
        finally:
            process.terminate()
            await process.wait()


async def _loaded(stub: worker_service_pb2_grpc.WorkerServiceStub) -> None:
    async with asyncio.timeout(_START_TIMEOUT_S):
        while True:
            try:
                await stub.GetCapabilities(worker_service_pb2.GetCapabilitiesRequest(), wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.2)
            else:
                return


async def measure(arguments: argparse.Namespace) -> None:
    """Measure, and print a row of a Markdown table."""
    flags = [f"--model={arguments.model}", f"--dtype={arguments.dtype}", "--kv-cache-gib=0.25", "--swap-space-gib=0.25"]
    flags.append(f"--swap-compression={arguments.compression}")
    async with start_worker(flags) as worker:
        facts = worker.capabilities
        num_blocks = arguments.tokens // facts.block_size
        token_ids = [_FIRST_TOKEN_ID + index % 1000 for index in range(num_blocks * facts.block_size + 1)]
        block_ids = range(1, num_blocks + 2)
        prefill_ms, out_ms, restore_ms, tokens = [], [], [], set()
        for _ in range(arguments.rounds):
            time_ms, token_id = await worker.compute(token_ids, block_ids, facts.max_num_batched_tokens, 0)
            prefill_ms.append(time_ms)
            tokens.add(token_id)
            moved = block_ids[:num_blocks]
            out_ms.append(await worker.copy(block_pb2.COPY_DIRECTION_TO_HOST, moved))
            restore_ms.append(await worker.copy(block_pb2.COPY_DIRECTION_TO_DEVICE, moved))
            _, token_id = await worker.compute(token_ids, block_ids, facts.max_num_batched_tokens, len(token_ids) - 1)
            tokens.add(token_id)
    if len(tokens) != 1 and arguments.compression == "none":
        sys.exit(f"restored blocks gave other tokens than computed ones: {tokens}")
    prefill, out, restore = (statistics.median(times) for times in (prefill_ms, out_ms, restore_ms))
    print("| tokens | dtype | compression | compute ms | to host ms | restore ms | compute / restore |")
    print("|---:|---|---|---:|---:|---:|---:|")
    print(
        f"| {num_blocks * facts.block_size} | {arguments.dtype} | {arguments.compression} | {prefill:.1f} | {out:.2f} "
        f"| {restore:.2f} | {prefill / restore:.0f} |"
    )
    print(
        f"\nmeasured by the worker at its start: {facts.block_restore_us:.0f} us a block of {facts.block_size}, "
        f"{facts.token_prefill_us:.0f} us a token of a prompt"
    )


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description="Restoring blocks from host memory against computing them again.")
    parser.add_argument("--model", required=True, help="a GGUF file or a Hugging Face directory")
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="the median counts; default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="of the worker; default: %(default)s")
    parser.add_argument("--compression", default="none", help="of the host tier; default: %(default)s")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
