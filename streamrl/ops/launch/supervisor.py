"""Supervises the parts of a run while Redis is up: starts them, watches them, restarts dead ones, ends them.

    reward server ──its port──► workers   a dead one is restarted after a growing backoff; so is one that left while
                                          the run goes on
    learner (torchrun)                    supervises its own ranks; when it ends, the run is over
    embedded Redis                        if dead, it is restarted from its append-only file

A request to end goes to the learner first: it finishes its step, writes a checkpoint and marks the run as stopped in
Redis; then the workers leave. A second request ends everything at once. If reward server or workers cannot go on, the
run ends in the same order, and the launcher notes why in the folder. However `run` exits, only the reward server is
still running, and `close` ends it. Looks five times a second; each wait is bounded.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

import redis
import structlog

from streamrl.config import schema
from streamrl.config.placement import Placement
from streamrl.errors import PartError, TransportError, UserError
from streamrl.held_folders import remove_those_of_the_dead
from streamrl.ops.launch.display import Audience, Frame
from streamrl.ops.launch.parts import DRAIN_S, RunFolder, learner_command, worker_command
from streamrl.ops.launch.processes import Command, Interrupts, Process, SupervisedProcess, end_all, part_error
from streamrl.ops.launch.redis_part import RedisPart
from streamrl.ops.launch.reward_part import RewardPart
from streamrl.ops.launch.summary import Loads
from streamrl.ops.launch.why_ended import describe_lost_work, in_one_line, learner_error, note_why
from streamrl.ops.monitor.evidence import is_running, is_taken_up, lead
from streamrl.ops.monitor.poller import Watcher
from streamrl.protocol.transport.clients import server_name
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.reports import write_reports
from streamrl.telemetry.progress import Progress

_TICK_S = 0.2
_SHOW_EVERY_S = 0.5
_LEAVE_S = 15.0  # for a worker, in addition to the time for finishing its groups
_ABORT_S = 10.0

log = structlog.get_logger(__name__)


class RunSupervisor:
    def __init__(
        self,
        *,
        config: schema.Config,
        redis_url: str,
        embedded: RedisPart | None,
        client: redis.Redis,
        display: Audience,
        interrupts: Interrupts,
        takeover: bool,  # replace a learner that holds the run
        placement: Placement,
        start: Callable[[Command], Process] = Process,
        drain_s: float = DRAIN_S,  # for the learner, after a request to end
    ) -> None:
        self._start, self._drain_s = start, drain_s
        self._config, self._folder = config, RunFolder(config.folder)
        self._redis_url, self._embedded, self._placement = redis_url, embedded, placement
        self._client, self._keys = client, Keys(config.name)
        self._display, self._interrupts, self._takeover = display, interrupts, takeover
        self.watcher = Watcher(client, self._keys, server=server_name(client))
        self._loads: dict[tuple[str, int], Loads] = {}  # by worker and process
        self._progress = Progress(part="launcher", role="launcher")
        self._began = time.time()
        self._next_show = 0.0
        self._phase = "starting the parts"
        self._redis_is_unreachable = False
        self._drain_by: float | None = None  # None: no request to end
        self._failure: UserError | PartError | None = None  # for which the run is ended
        self._learner: Process | None = None
        self._reward: RewardPart | None = None
        self._workers: list[SupervisedProcess] | None = None  # None: not started yet

    def run(self) -> None:
        """Run until the learner has ended. Raises UserError or PartError if a part cannot go on, KeyboardInterrupt at
        the second request to end."""
        for file in (self._folder.learner_error, self._folder.launcher_error):
            file.unlink(missing_ok=True)
        with ExitStack() as stack:
            stack.enter_context(write_reports(self._client, self._keys, self._progress))
            try:
                if self._config.reward_server is not None:
                    self._reward = RewardPart(
                        self._config.reward_server,
                        self._folder,
                        notify=self._notify,
                        start=self._start,
                        placement=self._placement,
                    )
                    stack.enter_context(write_reports(self._client, self._keys, self._reward.progress))
                self._learner = self._start(
                    learner_command(
                        self._config,
                        self._folder,
                        redis_url=self._redis_url,
                        takeover=self._takeover,
                        placement=self._placement,
                    )
                )
                while self._learner.poll() is None:
                    self._tick()
                self._raise_learner_error(self._learner)
                self._dismiss_workers()
                if self._failure is not None:
                    raise self._failure
            except KeyboardInterrupt:
                self._abort(within_s=0.0)
                self._notify(describe_lost_work(self._folder.path, self.watcher.view))
                raise
            except BaseException as error:
                self._abort(within_s=_ABORT_S)
                if isinstance(error, UserError | PartError):
                    note_why(self._folder, self.watcher.view, self._failure or error)
                raise

    def close(self) -> None:
        """End the reward server, and remove what killed parts have left behind."""
        if self._reward is not None:
            end_all([self._reward.supervised.process], within_s=_ABORT_S)
            self._reward.forget_address()
        remove_those_of_the_dead()

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts by part, for parts with any."""
        processes = [*(self._workers or ()), *([self._reward.supervised] if self._reward else [])]
        counts = {process.command.name: process.num_restarts for process in processes}
        if self._embedded is not None:
            counts["redis"] = self._embedded.num_restarts
        return {name: count for name, count in counts.items() if count}

    @property
    def loads(self) -> Loads:
        loads = self._loads.values()
        return Loads(loaded=sum(each.loaded for each in loads), in_flight=sum(each.in_flight for each in loads))

    def _tick(self) -> None:
        self._handle_stop_requests()
        if self._embedded is not None:
            self._embedded.look()
        if self._drain_by is None:  # while draining no more groups are needed, and nothing may spoil the checkpoint
            try:
                self._check_group_producers()
            except (UserError, PartError) as failure:
                if not self._learner_is_at_work():
                    raise
                self._failure = failure
                self._notify(f"{in_one_line(failure)}; the learner writes a checkpoint, then the run ends")
                self._drain(
                    "ending, as a part cannot go on: the learner writes a checkpoint (Ctrl-C twice: end at once)"
                )
        self.show()
        time.sleep(_TICK_S)

    def _check_group_producers(self) -> None:
        if self._reward is not None:
            self._reward.look()
        self._check_workers()
        self._raise_if_producers_are_lost()

    def _check_workers(self) -> None:
        if self._workers is not None:
            if any(worker.process.poll() == 0 for worker in self._workers):
                self.look()  # they leave when the run has ended, so refresh the state first
            for worker in self._workers:
                worker.look(is_needed=not self.watcher.is_over)
        elif self._reward is None or self._reward.url is not None:
            self._workers = self._start_workers(self._reward.url if self._reward else None)
            self._phase = ""

    def _start_workers(self, reward_url: str | None) -> list[SupervisedProcess]:
        commands = (
            worker_command(
                self._config,
                self._folder,
                number=number,
                redis_url=self._redis_url,
                reward_url=reward_url,
                placement=self._placement,
            )
            for number in range(self._config.worker.count)
        )
        return [SupervisedProcess(command, notify=self._notify, start=self._start) for command in commands]

    def _handle_stop_requests(self) -> None:
        if self._interrupts.count >= 2:
            raise KeyboardInterrupt
        if self._drain_by is not None and time.monotonic() > self._drain_by:
            raise PartError(f"the learner did not end within {self._drain_s:g} s (see {self._folder.logs})")
        if self._interrupts.count and self._drain_by is None:
            log.info("stop_requested", drain_s=self._drain_s)
            self._drain("ending: the learner finishes its step and writes a checkpoint (Ctrl-C again: end at once)")

    def _drain(self, phase: str) -> None:
        self._drain_by, self._phase = time.monotonic() + self._drain_s, phase
        self._progress.stopping()
        assert self._learner is not None, "a run ends in order only while the learner runs"
        self._learner.terminate()

    def _learner_is_at_work(self) -> bool:
        """Whether it has taken the run, so that it has something to save."""
        view = self.watcher.view
        return view is not None and is_running(view) and not is_taken_up(view) and lead(view) is not None

    def _raise_if_producers_are_lost(self) -> None:
        if self._reward is not None and self._reward.supervised.has_given_up:
            raise part_error(self._reward.supervised.process)
        workers = self._workers or []
        lost = [worker for worker in workers if worker.has_given_up]
        if lost and len(lost) == len(workers):
            raise part_error(lost[0].process)

    def _raise_learner_error(self, learner: Process) -> None:
        """Raise the learner's error, unless it ended in order."""
        if (error := learner_error(self._folder)) is not None:
            raise error
        if learner.poll() != 0 and not self._ended_on_request(learner):
            raise part_error(learner)

    def _ended_on_request(self, learner: Process) -> bool:
        """It died by the signal before it began to learn, or its last act was to mark the run as ended in Redis."""
        if self._drain_by is None:
            return False
        self.look()
        run_has_ended = self.watcher.view is not None and self.watcher.view.run.state != "running"
        return run_has_ended or learner.poll() == -signal.SIGTERM

    def _dismiss_workers(self) -> None:
        """Wait for workers to leave at the run's end; terminate and then kill those that do not."""
        self.look()
        processes = [worker.process for worker in self._workers or ()]
        end_all(processes, within_s=self._config.worker.grace_s + _LEAVE_S)

    def _abort(self, *, within_s: float) -> None:
        processes = [worker.process for worker in self._workers or ()]
        end_all([*([self._learner] if self._learner else []), *processes], within_s=within_s)

    def _notify(self, text: str) -> None:
        log.warning("notice", text=text)
        self._display.notify(text)

    def show(self) -> None:
        now = time.monotonic()
        if now < self._next_show:
            return
        self._next_show = now + _SHOW_EVERY_S
        self.look()
        self._progress.advanced(restarts=sum(self.restarts.values()))
        frame = Frame(
            title=self._config.name,
            phase=self._current_phase(),
            began=self._began,
            view=self.watcher.view,
            footer=f"logs in {self._folder.logs} · Ctrl-C stops it with a checkpoint",
        )
        self._display.show(frame)

    def _current_phase(self) -> str:
        if self._redis_is_unreachable:
            return "Redis does not answer"
        if not self._phase and self.watcher.view is not None and self.watcher.view.run.control == "pause":
            return f"paused: `streamrl resume {self._folder.path}` continues it"
        if not self._phase and self.watcher.view is not None and is_taken_up(self.watcher.view):
            return "the learner is starting"
        return self._phase

    def look(self) -> None:
        try:
            view = self.watcher.look()
            self._redis_is_unreachable = False
            for worker in view.workers:
                loads = Loads(loaded=worker.loads, in_flight=worker.loads_in_flight)
                self._loads[worker.part.name, worker.part.pid] = loads
            if self._drain_by is None and is_running(view) and lead(view):
                self._progress.working("watch")  # before that, monitors show the learner as starting
        except TransportError as error:
            log.warning("redis_does_not_answer", error=str(error))
            self._redis_is_unreachable = True
