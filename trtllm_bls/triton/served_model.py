"""Bases of the Triton models. ``ServedModel`` answers with a deployment, ``ArraysModel`` with one
function of arrays."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from trtllm_bls.engines.own_port import stream_thread_has_returned
from trtllm_bls.orchestrator.deployment import BaseDeployment, Deployment
from trtllm_bls.orchestrator.lifecycle import Lifecycle
from trtllm_bls.orchestrator.log_lines import log_to_triton
from trtllm_bls.settings.engine_tls import engine_tls
from trtllm_bls.settings.parameters import BlsParameters, Parameters, own_grpc_url
from trtllm_bls.triton.loop_watch import LoopWatch
from trtllm_bls.triton.request_server import ArraysFunction, Call, RequestServer


def triton_utilities() -> Any:
    """Triton's utilities for Python models, a module that exists inside Triton only."""
    import triton_python_backend_utils

    return triton_python_backend_utils


class ServedModel(ABC):
    """A ``TritonPythonModel`` whose one instance serves all requests. None waits for another.

    Its parameters are those of ``tensorrt_llm_bls``. A subclass implements ``make`` and ``handle``.
    This class does the rest: Triton's log, the deployment, threads, cancellation, drain.
    """

    parameters_type: ClassVar[type[BlsParameters]] = BlsParameters
    deployment_type: ClassVar[type[BaseDeployment]] = Deployment
    owns_process: ClassVar[bool] = True  # the server may set up the garbage collector
    # Triton's thread calls it with the requests of a batch, before any of them is handled.
    prepare_batch: Callable[[Sequence[Call]], None] | None = None

    def initialize(self, args: Mapping[str, str], pb_utils: Any = None) -> None:
        """Called by Triton. ``pb_utils``: Triton's utilities; a test brings its own."""
        pb_utils = pb_utils or triton_utilities()
        name = args["model_name"]
        log_to_triton(pb_utils, name)
        parameters = Parameters(args).read(self.parameters_type)
        self.deployment: Any = self.deployment_type(parameters, pb_utils, name)
        self.make(parameters)
        self._server = RequestServer(
            pb_utils,
            self.handle,
            decoupled=parameters.decoupled,
            model=name,
            log_ends=not parameters.log_requests,  # that log has a line for each end, too
            prepare_batch=self.prepare_batch,
            before_error_status=partial(
                stream_thread_has_returned, parameters.engine_url, engine_tls(parameters)
            ),
            one_core=parameters.keeps_one_core,
            owns_process=self.owns_process,
        )
        server = self._server
        self._loop_watch = LoopWatch(server.loop, server.loop_thread, server.request_of)
        self._loop_watch.start()
        self._lifecycle: Lifecycle | None = None
        try:
            asyncio.run_coroutine_threadsafe(self.begin(), self._server.loop).result()
            if parameters.status_dir:
                self._lifecycle = Lifecycle(self._server, self.deployment, parameters.status_dir)
        except BaseException:
            self._loop_watch.close()
            self._server.close(self._close)  # its threads would keep the process alive
            raise
        self.deployment.start(self._server.loop)
        self.execute = self._server.accept  # Triton calls it with its requests

    def finalize(self) -> None:
        """Called by Triton when it unloads the model."""
        if self._lifecycle is not None:
            self._lifecycle.close()
        self._loop_watch.close()
        self._server.close(self._close)

    async def _close(self) -> None:
        try:
            await self.end()
        finally:
            await self.deployment.close()

    @abstractmethod
    def make(self, parameters: BlsParameters) -> None:
        """Prepare ``handle``. The event loop does not run yet."""

    @abstractmethod
    async def handle(self, call: Call) -> None:
        """Answer one request. The caller gets an exception as an error."""

    async def begin(self) -> None:  # noqa: B027 - most models have nothing to do here
        """Called on the event loop before the first request. An exception fails the load."""

    async def end(self) -> None:  # noqa: B027
        """Called on the event loop after the last request."""


class ArraysModel(ABC):
    """A ``TritonPythonModel`` whose one response to a request is a function of its arrays."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Called by Triton."""
        pb_utils = triton_utilities()
        log_to_triton(pb_utils, args["model_name"])
        self._answer = self.answer(Parameters(args))
        self._server = RequestServer(
            pb_utils,
            self._handle,
            decoupled=False,
            senders=1,
            log_ends=False,
            before_error_status=partial(stream_thread_has_returned, own_grpc_url()),
        )
        self.execute = self._server.accept  # Triton calls it with its requests

    def finalize(self) -> None:
        """Called by Triton when it unloads the model."""
        self._server.close()

    async def _handle(self, call: Call) -> None:
        call.send(self._answer(call.arrays), final=True)

    @abstractmethod
    def answer(self, parameters: Parameters) -> ArraysFunction:
        """Return the function from a request's arrays to the response's. Raises ``SetupError``."""
