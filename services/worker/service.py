"""Wiring and lifecycle of a worker: health answers at once, ready when the model is in memory."""

import asyncio

from services.common.clock import SystemClock
from services.common.rpc.server import RpcServer
from services.worker.config import WorkerConfig
from services.worker.device_executor import DeviceExecutor, StepRunner
from services.worker.loaded_model import LoadedModel
from services.worker.loading import load_model
from services.worker.servicer import Capabilities, WorkerAdminServicer, WorkerServicer

_CLOSE_TIMEOUT_S = 5.0


class WorkerService:
    """Implements ``services.common.bootstrap.Service``."""

    def __init__(self, config: WorkerConfig, server: RpcServer, epoch: int) -> None:
        self._config = config
        self._server = server
        self._epoch = epoch
        self._clock = SystemClock()
        self._loaded: LoadedModel | None = None
        self._executor = DeviceExecutor(self._load)
        self._servicer = WorkerServicer(self._clock, config.max_run_ahead_depth)
        self._servicer.register_on(server)
        WorkerAdminServicer(self._servicer).register_on(server)

    async def run(self) -> None:
        """Load the model, then serve until cancelled.

        Raises:
            EngineError: the model cannot be loaded; the process then ends and says why.
        """
        try:
            await self._executor.start()
            assert self._loaded is not None
            self._servicer.loaded(self._executor, self._capabilities(self._loaded))
            await self._server.set_ready(is_ready=True)
            await asyncio.Event().wait()
        finally:
            # A load cannot be interrupted, and nobody waits for it.
            await self._executor.close(timeout_s=_CLOSE_TIMEOUT_S if self._loaded else 0.0)

    async def drain(self) -> None:
        """Finish what runs here, while the scheduler sends nothing new; at once when it has gone already."""
        await self._servicer.drain()

    def _load(self) -> StepRunner:
        self._loaded = load_model(self._config, self._clock)
        return self._loaded.runner

    def _capabilities(self, loaded: LoadedModel) -> Capabilities:
        return Capabilities(
            name=self._config.name or "worker",
            worker_epoch=self._epoch,
            model=loaded.name,
            weight_version=loaded.weight_version,
            num_blocks=loaded.num_blocks,
            block_size=self._config.block_size,
            max_model_len=loaded.max_model_len,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            device="cpu",
            dtype=loaded.dtype,
            num_host_blocks=loaded.num_host_blocks,
            block_restore_us=loaded.host_costs.block_restore_us if loaded.host_costs else 0.0,
            token_prefill_us=loaded.host_costs.token_prefill_us if loaded.host_costs else 0.0,
            max_draft_tokens=loaded.max_draft_tokens,
            swap_compression=self._config.swap_compression,
        )
