# SPDX-License-Identifier: Apache-2.0
"""The engine behind asyncio: one thread owns it, requests come in and answers go out by queues.

The thread builds the engine, and alone touches it and the device from then on. The event loop
hands it commands; after each step one call carries all grown answers back. An answer is a snapshot
that replaces the one before, so a client that reads slowly costs one answer, never a queue.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from treespark.errors import UsageError
from treespark.serving.api_error import ApiError
from treespark.serving.limits import refusal_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from treespark.serving.engine import Engine
    from treespark.serving.records import RequestRecord
    from treespark.serving.scheduler import Request, RequestOutput

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Submission:
    """The engine requests of one HTTP call, and the newest answer of each."""

    def __init__(self, owner: AsyncEngine, names: Sequence[str]) -> None:
        """Start without answers; `names` are the request ids, in the order of the choices."""
        self.names = list(names)
        self.outputs: list[RequestOutput | None] = [None] * len(names)
        self.error: ApiError | None = None
        self._owner = owner
        self._open = set(names)
        self._changed: set[int] = set()
        self._event = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        """True when every answer has ended."""
        return not self._open

    async def changes(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (choice, its answer so far) as they grow, until all have ended.

        What grew while the reader was busy comes as one. Raises ApiError when there will be no
        answer.
        """
        while not self.is_finished or self._changed:
            await self._event.wait()
            self._event.clear()
            if self.error is not None:
                raise self.error
            changed, self._changed = sorted(self._changed), set()
            for index in changed:
                output = self.outputs[index]
                assert output is not None
                yield index, output

    async def finished(self) -> list[RequestOutput]:
        """Return all answers once they have ended. Raises ApiError when there will be none."""
        async for _ in self.changes():
            pass
        return [output for output in self.outputs if output is not None]

    def cancel(self) -> None:
        """Drop what has not ended; nothing happens if everything has."""
        self._owner.forget(self, self._open)

    def take(self, output: RequestOutput) -> None:
        """Store a grown answer and wake the reader."""
        index = self.names.index(output.request_id)
        self.outputs[index] = output
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._changed.add(index)
        self._event.set()

    def fail(self, error: ApiError) -> None:
        """End without answers."""
        self.error = error
        self._event.set()


class AsyncEngine:
    """Runs an engine in its own thread for the coroutines of one event loop.

    make_engine: builds the engine, in that thread.  max_queued: requests that may wait for a slot
    beyond those that hold one.
    """

    def __init__(self, make_engine: Callable[[], Engine], max_queued: int) -> None:
        """Prepare the thread; `load` starts it."""
        self.max_queued = max_queued
        # Its fixed properties may be read from outside, once it is loaded; nothing may be called.
        self.engine: Engine | None = None
        self.stats: Any = None
        self.num_rejected = 0
        self.num_aborted = 0
        self.is_draining = False
        # Called with the record and the finish reason of each answer that ends.
        self.on_finished: Callable[[RequestRecord, str], None] | None = None
        # Why the engine stopped, None while it works.
        self.failure: BaseException | None = None
        self._make_engine = make_engine
        self._max_running = 0
        self._live: dict[str, Submission] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._idle = asyncio.Event()
        self._commands: SimpleQueue[Callable[[Engine], None]] = SimpleQueue()
        self._loaded = threading.Event()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="treespark-engine", daemon=True)

    # ------------------------------------------------------------------ from any thread

    def load(self) -> None:
        """Start the thread and wait until the engine is built; raises what building it raised."""
        self._thread.start()
        self._loaded.wait()
        if self.failure is not None:
            raise self.failure

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after its current step."""
        self._stopping = True
        self._commands.put(lambda engine: None)
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------ from the event loop

    @property
    def is_ready(self) -> bool:
        """True while new requests are taken."""
        return self.failure is None and not self.is_draining

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Hand requests to the engine.

        Raises ApiError 503 while there is no room for all, 400 if there never will be.
        """
        self.check_ready()
        most = self._max_running + self.max_queued
        if len(requests) > most:
            raise ApiError(400, f"n: {len(requests)} choices, this server has room for {most}", "n")
        room = most - len(self._live)
        if len(requests) > room:
            self.num_rejected += len(requests)
            raise ApiError(503, f"the queue is full ({self.max_queued} requests wait); try again")
        self._loop = asyncio.get_running_loop()
        submission = Submission(self, [request.request_id for request in requests])
        for request in requests:
            self._live[request.request_id] = submission
            self._commands.put(partial(self._add, request))
        return submission

    def check_ready(self) -> None:
        """Raise ApiError 503 unless new requests are taken."""
        if self.failure is not None:
            raise ApiError(503, "the engine has stopped after an error; see the server's log")
        if self.is_draining:
            raise ApiError(503, "the server is shutting down")

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Return what `function` makes of the engine between two steps, in the engine's thread."""
        self.check_ready()
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._commands.put(partial(self._answer, future, function))
        return await future

    def forget(self, submission: Submission, names: set[str]) -> None:
        """Drop a submission's requests that have not ended, at the next round boundary."""
        for name in [name for name in names if self._live.get(name) is submission]:
            del self._live[name]
            self.num_aborted += 1
            self._commands.put(partial(_abort, name))
        self._note_idle()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests and wait for those that run; end the rest after the timeout."""
        self.is_draining = True
        self._note_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            logger.warning("%d requests had not ended after %s s", len(self._live), timeout_s)
            self._fail_live(ApiError(503, "the server is shutting down"))

    # ------------------------------------------------------------------ deliveries, in the loop

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            # A request may be cancelled while its last answer is on the way.
            submission = self._live.get(output.request_id)
            if submission is not None:
                if output.finish_reason is not None:
                    del self._live[output.request_id]
                    if self.on_finished is not None:
                        self.on_finished(output.metrics, output.finish_reason)
                submission.take(output)
        self._note_idle()

    def _refuse(self, request_id: str, error: ApiError) -> None:
        submission = self._live.pop(request_id, None)
        if submission is not None:
            submission.fail(error)
            submission.cancel()
        self._note_idle()

    def _fail_live(self, error: ApiError) -> None:
        submissions, self._live = set(self._live.values()), {}
        for submission in submissions:
            submission.fail(error)
        for future in list(self._calls):
            _set_exception(future, error)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._live and self.is_draining:
            self._idle.set()

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            self.engine = engine = self._make_engine()
            self._max_running = len(engine.scheduler.slots)
            self.stats = engine.stats()
        except BaseException as error:
            # Whatever kept the engine from being built belongs to the caller of `load`.
            self.failure = error
            return
        finally:
            self._loaded.set()
        try:
            while not self._stopping:
                self._obey(engine)
                outputs = engine.step() if engine.has_work else []
                self.stats = engine.stats()
                if outputs:
                    self._tell(partial(self._deliver, outputs))
        except BaseException as error:
            # A failed step leaves caches that nobody can vouch for: every request ends here, and
            # the health check says so until a new process takes over.
            logger.exception("the engine stopped")
            self.failure = error
            self._tell(partial(self._fail_live, ApiError(500, "the engine stopped after an error")))

    def _obey(self, engine: Engine) -> None:
        """Run the commands that wait; without work wait for the first."""
        try:
            command = self._commands.get(block=not engine.has_work)
            while True:
                command(engine)
                command = self._commands.get_nowait()
        except Empty:
            return

    def _add(self, request: Request, engine: Engine) -> None:
        try:
            engine.add(request)
        except UsageError as problem:
            self._tell(partial(self._refuse, request.request_id, refusal_of(problem)))

    def _answer(
        self, future: asyncio.Future[Any], function: Callable[[Engine], Any], engine: Engine
    ) -> None:
        try:
            result = function(engine)
        except UsageError as problem:
            self._tell(partial(_set_exception, future, refusal_of(problem)))
        else:
            self._tell(partial(_set_result, future, result))

    def _tell(self, deliver: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:
            # The loop has closed: nobody waits any more.
            self._stopping = True


def _abort(name: str, engine: Engine) -> None:
    engine.abort(name)


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: ApiError) -> None:
    if not future.done():
        future.set_exception(error)
