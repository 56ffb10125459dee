"""Runs the tiles of a job through the actors, and the entry point for it."""

import asyncio
import json
import logging
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import ray
from obstore.store import S3Store

from centerlines.actors import (
    AggregatorActor,
    AttemptKey,
    CenterlineWorker,
    InferenceDispatcherActor,
    InputQueueActor,
    PostProcessingActor,
    RunSettings,
    TileLoaderActor,
    lines_path,
    one_line,
)
from centerlines.display import Display
from centerlines.errors import CenterlinesError, TileError, UsageError
from centerlines.jobs import TileJob, TileKey
from centerlines.progress import Outcome, ProgressTable, Row, Summary, progress_csv
from centerlines.report import RunRecord, render_report
from centerlines.storage import TileSource, write_whole
from centerlines.triton import Model, connect

__all__ = ["ControllerActor", "RunResult", "main"]

logger = logging.getLogger(__name__)

ATTEMPTS = 3
# Tiles one post-processor works on: it blends one while the lines of the other are drawn.
TILES_PER_POSTPROCESSOR = 2
HEALTH_PERIOD_S = 5.0
PICTURES = 24
# Enough for a server that is about to be ready; a wrong address should not take longer to be told.
FIRST_LOOK_S = 10.0
# The controller only waits for others, so one that takes so long for an answer hangs.
CONTROLLER_TIMEOUT_S = 120.0
SHOW_PERIOD_S = 0.5
WRITE_PERIOD_S = 5.0


class _Pool:
    """Lends actors, each to so many borrowers at once."""

    def __init__(self, actors: Sequence[Any], *, borrowers: int) -> None:
        self._idle: asyncio.Queue[Any] = asyncio.Queue()
        for _ in range(borrowers):
            for actor in actors:
                self._idle.put_nowait(actor)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Any]:
        """Lend an idle actor; one that has died comes back when it lives again."""
        actor = await self._idle.get()
        try:
            yield actor
        except ray.exceptions.RayActorError:
            await _until_alive(actor)
            raise
        finally:
            self._idle.put_nowait(actor)


def _reason(error: BaseException, job: TileJob) -> str:
    """Say why the tile failed; which one it is stands beside it."""
    return one_line(error).removeprefix(f"tile {job.tile_id}: ")


async def _until_alive(actor: Any) -> None:
    """Wait for Ray to start an actor again; the run ends when it cannot, see `_watch`."""
    while True:
        try:
            await actor.health.remote()
        except ray.exceptions.RayActorError:
            await asyncio.sleep(0.2)
        else:
            return


@ray.remote
class ControllerActor:
    """Starts the other actors, takes every tile through them, and ends when every tile has ended."""

    def __init__(self, settings: RunSettings, jobs: Sequence[TileJob], *, loaders: int, postprocessors: int) -> None:
        self._settings = settings
        self._jobs = jobs
        self._table = ProgressTable(job.key for job in jobs)
        self._pictures: dict[TileKey, bytes] = {}
        self._memory_bytes: dict[Any, int] = {}
        self._peak_memory_bytes = 0

        def start(kind: Any, *arguments: Any, cpus: int = 0) -> Any:
            return kind.options(num_cpus=cpus, max_restarts=-1).remote(*arguments)

        self._queue = start(InputQueueActor, 2 * settings.batch_size)
        self._aggregator = start(AggregatorActor)
        self._dispatcher = start(InferenceDispatcherActor, settings, self._queue, self._aggregator)
        loader_actors = [start(TileLoaderActor, settings, self._queue, cpus=1) for _ in range(loaders)]
        workers = [start(CenterlineWorker, cpus=1) for _ in range(postprocessors)]
        # Each begins with another worker, or the first would get all the work.
        finishers = [
            start(PostProcessingActor, settings, workers[number:] + workers[:number], cpus=1)
            for number in range(postprocessors)
        ]
        self._loaders = _Pool(loader_actors, borrowers=1)
        self._postprocessors = _Pool(finishers, borrowers=TILES_PER_POSTPROCESSOR)
        self._actors = [self._queue, self._aggregator, self._dispatcher, *loader_actors, *workers, *finishers]
        # One more than are drawn or loaded, so that the model always has work.
        self._tiles_in_flight = loaders + TILES_PER_POSTPROCESSOR * postprocessors + 1

    async def run(self) -> None:
        """Take every tile to its end."""
        self._dispatching = asyncio.Event()
        self._answers_lost: asyncio.Future[str] = asyncio.Future()
        tiles = asyncio.create_task(self._all_tiles())
        dispatching = asyncio.create_task(self._keep_dispatching())
        watching = [asyncio.create_task(self._watch(actor)) for actor in self._actors]
        ended, others = await asyncio.wait({tiles, dispatching, *watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        if tiles in ended:
            tiles.result()
        # The endpoint or an actor is gone, and with it the chance of every tile that is left.
        for key in self._table.open_keys():
            reason = next(task.result() for task in (dispatching, *watching) if task in ended)
            self._table.end(key, Outcome("failed", reason), now=time.monotonic())

    async def _all_tiles(self) -> None:
        room = asyncio.Semaphore(self._tiles_in_flight)
        async with asyncio.TaskGroup() as group:
            for number, job in enumerate(self._jobs):
                await room.acquire()
                task = group.create_task(self._tile(job, with_picture=number < self._settings.pictures))
                task.add_done_callback(lambda _: room.release())

    async def _tile(self, job: TileJob, *, with_picture: bool) -> None:
        attempt = 0
        while True:
            attempt = self._table.begin(job.key, now=time.monotonic())
            try:
                outcome = await self._attempt(job, attempt, with_picture=with_picture)
                break
            except TileError as error:
                outcome = Outcome("failed", _reason(error, job))
                break
            except (CenterlinesError, ray.exceptions.RayError) as error:
                reason = _reason(error, job)
                logger.warning("tile %s, attempt %d: %s", job.tile_id, attempt, reason)
                if attempt == ATTEMPTS:
                    outcome = Outcome("failed", f"failed {ATTEMPTS} times, the last time: {reason}")
                    break
                # Or the attempts would be over before an actor that has died is there again.
                await asyncio.gather(*map(_until_alive, self._actors))
        if outcome.state == "failed":
            # Or the lines of an earlier run would pass for this one's.
            lines_path(self._settings.output, job.tile_id).unlink(missing_ok=True)
        self._table.end(job.key, outcome, now=time.monotonic())

    async def _attempt(self, job: TileJob, attempt: int, *, with_picture: bool) -> Outcome:
        key = AttemptKey(*job.key, attempt)
        try:
            async with self._loaders.lend() as loader:
                await self._dispatching.wait()
                self._table.move(job.key, "loading")
                # Taken now: what is lost from here on may have been this tile's.
                answers_lost = self._answers_lost
                await self._aggregator.expect.remote(key)
                tile = await loader.load.remote(job, attempt, with_preview=with_picture)
            self._table.move(job.key, "predicting")
            collecting = asyncio.ensure_future(self._aggregator.collect.remote(key, tile.chips))
            await asyncio.wait({collecting, answers_lost}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise CenterlinesError(answers_lost.result())
            self._table.move(job.key, "drawing")
            async with self._postprocessors.lend() as postprocessor:
                outcome: Outcome
                outcome, picture = await postprocessor.finish.remote(tile, collecting.result())
        finally:
            self._aggregator.forget.remote(key)
        if picture:
            self._pictures[job.key] = picture
        return outcome

    async def _keep_dispatching(self) -> str:
        """Run the dispatcher, again when it dies; return why the endpoint cannot be used any longer."""
        reader = 0
        while True:
            reader += 1
            reason = "the queue lost them"
            try:
                await self._queue.attach.remote(reader)
                self._answers_lost = asyncio.Future()
                self._dispatching.set()
                await self._dispatcher.run.remote(reader)
            except CenterlinesError as error:
                return one_line(error)
            except ray.exceptions.RayError as error:
                reason = one_line(error)
            self._dispatching.clear()
            if not self._answers_lost.done():
                self._answers_lost.set_result(f"its chips were lost on their way to the model: {reason}")
            # Not at once: an actor that fails at every start must not keep the machine busy.
            await asyncio.sleep(1)
            await asyncio.gather(_until_alive(self._queue), _until_alive(self._dispatcher))

    async def _watch(self, actor: Any) -> str:
        """Ask an actor how it is; end it if it hangs; return why it cannot be started any longer.

        What a dead one worked on fails by itself, and Ray starts it again.
        """
        # A cluster may take its time to start it.
        patience_s = None
        while True:
            memory_bytes = 0
            try:
                memory_bytes = await asyncio.wait_for(actor.health.remote(), patience_s)
                patience_s = self._settings.hung_after_s
            except TimeoutError:
                logger.warning("%s does not answer, it is started again", actor)
                ray.kill(actor, no_restart=False)
            except ray.exceptions.ActorDiedError as error:
                return f"{actor} cannot be started: {str(error).strip().splitlines()[-1]}"
            except ray.exceptions.RayError as error:
                logger.warning("%s: %s", actor, one_line(error))
            self._memory_bytes[actor] = memory_bytes
            self._peak_memory_bytes = max(self._peak_memory_bytes, sum(self._memory_bytes.values()))
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def summary(self) -> Summary:
        """Return the progress in a few numbers."""
        return self._table.summary()

    async def rows(self) -> list[Row]:
        """Return the progress of every tile."""
        return self._table.rows()

    async def pictures(self) -> dict[TileKey, bytes]:
        """Return the pictures for the report."""
        return self._pictures

    async def peak_memory_bytes(self) -> int:
        """Return the most that the actors together held for themselves when their health was asked."""
        return self._peak_memory_bytes


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    rows: tuple[Row, ...]
    """One a tile, each with an outcome."""
    output: Path
    """The folder with the results."""

    @property
    def exit_code(self) -> int:
        """0 when no tile failed, else 1."""
        return int(any(row.state == "failed" for row in self.rows))


def main(
    tile_jobs: Sequence[TileJob],
    run_id: str,
    endpoint: str,
    model_name: str,
    model_version: str = "",
    num_tileloaders: int = 1,
    num_postprocessors: int = 1,
    storage_mode: Literal["local", "s3"] = "local",
    store: S3Store | None = None,
    *,
    output: str | Path,
    batch_size: int = 200,
    threshold: float = 0.5,
    patience_s: float = 120.0,
    ray_address: str | None = None,
    display: Display | None = None,
) -> RunResult:
    """Turn tiles into centerlines.

    Args:
        tile_jobs: what `build_tile_jobs` made.
        run_id: name of this run in run.json and in the report.
        endpoint: host:port that speaks Triton's gRPC protocol.
        model_name: name in the model repository.
        model_version: version number; empty for the latest.
        num_tileloaders: how many actors read tiles.
        num_postprocessors: how many actors blend, and how many draw lines.
        storage_mode: `local`, tile paths are files; `s3`, they are keys in `store`.
        store: the bucket of the tiles; see `s3_store`.
        output: folder for centerlines/, progress.csv, run.json and report.html.
        batch_size: most chips in one request; the model's own limit counts too.
        threshold: least foreground probability of a sidewalk.
        patience_s: how long the endpoint may be unavailable before the run ends.
        ray_address: address of a Ray cluster; RAY_ADDRESS, or a Ray of its own on this machine, when left out.
        display: shows the progress; nothing is shown when left out.

    Returns:
        The outcome of every tile.

    Raises:
        UsageError: an argument is wrong, the endpoint does not answer, or its model cannot be used.
    """
    if (storage_mode == "s3") != (store is not None):
        raise UsageError(f"storage mode {storage_mode!r}: 's3' needs a store, 'local' takes none")
    for name, value in (
        ("batch size", batch_size),
        ("loaders", num_tileloaders),
        ("postprocessors", num_postprocessors),
    ):
        if value < 1:
            raise UsageError(f"{name} {value}: must be at least 1")
    if not 0 < threshold < 1:
        raise UsageError(f"threshold {threshold:g}: must be between 0 and 1")
    for tile_id, count in Counter(job.tile_id for job in tile_jobs).items():
        if count > 1:
            raise UsageError(f"tile {tile_id}: {count} jobs have this id; make all of a run by one build_tile_jobs")
    folder = Path(output).absolute()
    settings = RunSettings(
        endpoint=endpoint,
        model_name=model_name,
        model_version=model_version,
        batch_size=batch_size,
        threshold=threshold,
        output=str(folder),
        patience_s=patience_s,
        pictures=PICTURES,
        source=TileSource(store),
    )
    model = _look_at_model(settings)
    for size in {job.requested_chip_size for job in tile_jobs}:
        model.check_chip_size(size)
    # A loader must not make blocks that the model does not take.
    settings = replace(settings, batch_size=min(batch_size, model.max_batch_size))
    try:
        (folder / "centerlines").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output {folder}: cannot be made a folder: {error.strerror}") from error

    started, started_at = time.monotonic(), datetime.now(UTC)
    cpus = num_tileloaders + 2 * num_postprocessors
    with _ray(ray_address, cpus=cpus):
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        if (there := resources.get("CPU", 0)) < cpus:
            logger.warning(
                "Ray has %g CPUs and this run needs %d, one for each loader and two for each postprocessor; "
                "it waits until Ray has them",
                there,
                cpus,
            )
        start: Any = ControllerActor
        controller = start.options(num_cpus=0).remote(
            settings, list(tile_jobs), loaders=num_tileloaders, postprocessors=num_postprocessors
        )
        try:
            rows, pictures, memory = _follow(controller, tile_jobs, folder, display)
        finally:
            # In a Ray that lives on; the actors that it has started end with it.
            ray.kill(controller)
    result = RunResult(rows=tuple(rows), output=folder)
    record = RunRecord(
        run_id=run_id,
        version=version("centerlines"),
        started=started_at.isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
        settings={
            "endpoint": endpoint,
            "model": model_name,
            "model_version": model_version or "latest",
            "batch_size": settings.batch_size,
            "threshold": threshold,
            "chip_size": sorted({job.requested_chip_size for job in tile_jobs}),
            "chip_overlap": sorted({job.requested_chip_overlap for job in tile_jobs}),
            "loaders": num_tileloaders,
            "postprocessors": num_postprocessors,
            "storage_mode": storage_mode,
        },
        rows=result.rows,
        exit_code=result.exit_code,
        peak_memory_bytes=memory,
    )
    write_whole(folder / "progress.csv", progress_csv(rows))
    write_whole(folder / "run.json", json.dumps(record.to_json(), indent=2).encode() + b"\n")
    write_whole(folder / "report.html", render_report(record, pictures).encode())
    return result


def _look_at_model(settings: RunSettings) -> Model:
    """Find a wrong endpoint or model before anything is started."""

    async def look() -> Model:
        async with connect(
            settings.endpoint,
            model_name=settings.model_name,
            model_version=settings.model_version,
            patience_s=min(settings.patience_s, FIRST_LOOK_S),
        ) as client:
            return client.model

    # In a thread of its own: the caller's may run an event loop already, as in a notebook.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, look()).result()


@contextmanager
def _ray(address: str | None, *, cpus: int) -> Iterator[None]:
    """Be connected to Ray; one that this call started also ends with it."""
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    # Actors are counted by CPUs; on a machine with fewer cores they share them.
    own: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False} if address == "local" else {}
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdecimal():
            # Ray itself tries for minutes, and tells of every try.
            socket.create_connection((host, int(port)), timeout=FIRST_LOOK_S).close()
        on_sigterm = signal.getsignal(signal.SIGTERM)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, ValueError) as error:
        raise UsageError(f"--ray-address {address}: no Ray cluster answers there ({one_line(error)})") from error
    if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
        # Ray puts a handler in its place that prints the stack of its own code.
        signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        ray.shutdown()


def _follow(
    controller: Any, jobs: Sequence[TileJob], folder: Path, display: Display | None
) -> tuple[list[Row], dict[TileKey, bytes], int]:
    """Show the progress until the run has ended, and keep progress.csv up to date.

    Returns:
        The row of every tile, the pictures for the report, and the actors' peak memory.
    """
    running = controller.run.remote()
    rows: list[Row] = [Row(job.key) for job in jobs]
    written = 0.0
    ended = False
    try:
        while not ended:
            ended = bool(ray.wait([running], timeout=SHOW_PERIOD_S)[0])
            if display:
                display.show(_ask(controller.summary))
            if time.monotonic() - written > WRITE_PERIOD_S:
                rows = _ask(controller.rows)
                write_whole(folder / "progress.csv", progress_csv(rows))
                written = time.monotonic()
        ray.get(running)
        return _ask(controller.rows), _ask(controller.pictures), _ask(controller.peak_memory_bytes)
    except KeyboardInterrupt:
        with suppress(ray.exceptions.RayError):
            write_whole(folder / "progress.csv", progress_csv(_ask(controller.rows)))
        raise
    except ray.exceptions.RayError as error:
        gone = isinstance(error, ray.exceptions.RayActorError | ray.exceptions.GetTimeoutError)
        reason = f"the controller {'died or hangs' if gone else f'failed: {one_line(error)}'}; run again"
        logger.critical(reason)
        failed = Outcome("failed", reason)
        return [row if row.outcome else replace(row, state="failed", outcome=failed) for row in rows], {}, 0


def _ask(method: Any) -> Any:
    return ray.get(method.remote(), timeout=CONTROLLER_TIMEOUT_S)
