"""The Ray actors that a tile passes through, each with the one job its name says.

::

    TileLoaderActor -> InputQueueActor -> InferenceDispatcherActor -> AggregatorActor
        reads, cuts        holds chips        asks Triton                collects a tile's answers
                                                                            |
                       PostProcessingActor -> CenterlineWorker   <----------+
                           blends, thresholds, writes   draws lines

Pixels travel as object references: the bytes stay in Ray's object store until the actor that needs them asks. The
ControllerActor in controller.py starts the actors and takes each tile from one to the next.
"""

import asyncio
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import psutil
import ray
from numpy.typing import NDArray

from centerlines.chips import ChipGrid, chips_with_data, cut_chips, fill_invalid, foreground_probability, normalise
from centerlines.errors import CenterlinesError, RequestRefusedError, TileError
from centerlines.geojson import LineFeature, write_lines
from centerlines.georeference import Georeference, PixelSize
from centerlines.jobs import TileJob
from centerlines.lines import Line, LineSettings, clean_mask, extract_lines
from centerlines.picture import draw_picture, preview
from centerlines.progress import Outcome
from centerlines.raster import read_tile
from centerlines.stitch import stitch
from centerlines.storage import TileSource, write_whole
from centerlines.triton import ModelClient, connect

__all__ = [
    "AggregatorActor",
    "AttemptKey",
    "CenterlineWorker",
    "InferenceDispatcherActor",
    "InputQueueActor",
    "LoadedTile",
    "PostProcessingActor",
    "RunSettings",
    "TileLoaderActor",
    "lines_path",
    "one_line",
]

# Chips in one object of Ray's store: large enough that a reference costs nothing, small enough that several requests
# are under way for one tile.
CHIPS_PER_BLOCK = 32
REQUESTS_IN_FLIGHT = 4


@dataclass(frozen=True)
class RunSettings:
    """What is the same for every tile of a run."""

    endpoint: str
    """host:port of Triton's gRPC protocol."""
    model_name: str
    """Name in the model repository."""
    model_version: str
    """Version number; empty for the latest."""
    batch_size: int
    """Most chips in one request."""
    threshold: float
    """Least foreground probability of a sidewalk, 0-1."""
    output: str
    """Folder for centerlines/, progress.csv and so on."""
    patience_s: float
    """How long the endpoint may be unavailable before the run gives up."""
    pictures: int
    """How many tiles get a picture in the report."""
    source: TileSource
    """Where the tiles are read."""
    hung_after_s: float = 60.0
    """An actor that does not answer for so long is ended, and started again by Ray."""


class AttemptKey(NamedTuple):
    """One attempt at one tile; what a failed attempt left behind is told apart by it."""

    job_id: str
    tile_id: str
    attempt: int


class ChipBlock(NamedTuple):
    """Some chips of one tile on their way to the model."""

    key: AttemptKey
    indices: tuple[int, ...]
    """Numbers in the tile's ChipGrid."""
    chip_size: int
    """Rows and columns of a chip; a request to the model has one size."""
    divisor: float
    """What brings the values to the 0-1 scale."""
    chips: "ray.ObjectRef[NDArray[Any]]"
    """(n, channels, size, size) in the tile's dtype."""


class AnsweredBlock(NamedTuple):
    """The model's answer to a ChipBlock."""

    indices: tuple[int, ...]
    probability: "ray.ObjectRef[NDArray[np.float16]]"
    """Foreground probability (n, size, size)."""
    seconds: float
    """The block's share of the time its request took."""


@dataclass(frozen=True)
class LoadedTile:
    """What is known of a tile after its pixels have gone to the model."""

    key: AttemptKey
    grid: ChipGrid
    """All chips of the tile."""
    chips: int
    """How many of them hold data and were sent."""
    georeference: Georeference
    valid: "ray.ObjectRef[NDArray[np.bool_]]"
    """Which pixels hold data (height, width)."""
    preview: "ray.ObjectRef[NDArray[np.uint8]] | None"
    """The imagery in small, for the report's picture."""
    seconds: float
    """Time for reading and cutting, without waiting for room in the queue."""


class _Actor:
    """What all actors answer; heavy work runs in threads, so that they always do."""

    def __init__(self) -> None:
        # Actors share the machine's cores among themselves; a pool of threads in each would only fight.
        cv2.setNumThreads(1)

    async def health(self) -> int:
        """Tell that the actor lives: return the bytes of memory that its process does not share."""
        # Not in a thread: the answer must not wait for one while all are at work.
        return int(psutil.Process().memory_full_info().uss)


@ray.remote
class InputQueueActor(_Actor):
    """A buffer between loaders and dispatcher; loaders wait when it is full, whatever the number of tiles."""

    def __init__(self, capacity: int) -> None:
        """Make a buffer for `capacity` chips; one block always fits."""
        super().__init__()
        self._capacity = capacity
        self._blocks: list[ChipBlock] = []
        self._chips = 0
        self._reader = 0
        self._changed = asyncio.Condition()

    async def attach(self, reader: int) -> None:
        """Drop what is in the buffer, and give what comes from now on to this reader alone.

        Calls of a reader that has died wait on, and would take blocks that nobody then has.
        """
        async with self._changed:
            self._reader = reader
            self._blocks.clear()
            self._chips = 0
            self._changed.notify_all()

    async def put(self, block: ChipBlock) -> None:
        """Add a block, as soon as there is room for it."""
        size = len(block.indices)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._blocks or self._chips + size <= self._capacity)
            self._blocks.append(block)
            self._chips += size
            self._changed.notify_all()

    async def get(self, reader: int, at_most: int) -> list[ChipBlock]:
        """Take blocks of one chip size and of `at_most` chips together, as soon as there is one.

        Returns none when another reader is attached.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._blocks or self._reader != reader)
            if self._reader != reader:
                return []
            taken = [self._blocks.pop(0)]
            chips = len(taken[0].indices)
            while (
                self._blocks
                and self._blocks[0].chip_size == taken[0].chip_size
                and chips + len(self._blocks[0].indices) <= at_most
            ):
                chips += len(self._blocks[0].indices)
                taken.append(self._blocks.pop(0))
            self._chips -= chips
            self._changed.notify_all()
            return taken


@ray.remote
class TileLoaderActor(_Actor):
    """Reads tiles, cuts them into chips and puts these into the queue."""

    def __init__(self, settings: RunSettings, queue: Any) -> None:
        super().__init__()
        self._settings = settings
        self._queue = queue

    async def load(self, job: TileJob, attempt: int, *, with_preview: bool) -> LoadedTile:
        """Load one tile; returns when the queue has taken its last chips.

        Raises:
            TileError: the tile cannot be processed.
            TileReadError: the tile cannot be read.
        """
        started = time.monotonic()
        key = AttemptKey(job.job_id, job.tile_id, attempt)
        tile = await asyncio.to_thread(
            lambda: read_tile(
                self._settings.source.open(job.tif_path),
                bands=job.bands,
                target_format=job.target_format,
                use_pseudo_color_nir=job.use_pseudo_color_nir,
                name=job.tile_id,
            )
        )
        height, width = tile.valid.shape
        tile.georeference.check(height=height, width=width)
        grid = ChipGrid(height, width, chip_size=job.requested_chip_size, overlap=job.requested_chip_overlap)
        pixels = await asyncio.to_thread(fill_invalid, tile.pixels, tile.valid)
        numbers = chips_with_data(tile.valid, grid)
        small = ray.put(preview(pixels, divisor=tile.divisor)) if with_preview else None
        valid = ray.put(tile.valid)
        waited = 0.0
        size = min(CHIPS_PER_BLOCK, self._settings.batch_size)
        for first in range(0, len(numbers), size):
            indices = tuple(numbers[first : first + size])
            chips = ray.put(await asyncio.to_thread(cut_chips, pixels, grid, indices))
            before = time.monotonic()
            await self._queue.put.remote(ChipBlock(key, indices, grid.chip_size, tile.divisor, chips))
            waited += time.monotonic() - before
        return LoadedTile(
            key=key,
            grid=grid,
            chips=len(numbers),
            georeference=tile.georeference,
            valid=valid,
            preview=small,
            seconds=time.monotonic() - started - waited,
        )


@ray.remote
class InferenceDispatcherActor(_Actor):
    """Takes chips from the queue in batches, asks Triton, and hands the answers to the aggregator."""

    def __init__(self, settings: RunSettings, queue: Any, aggregator: Any) -> None:
        super().__init__()
        self._settings = settings
        self._queue = queue
        self._aggregator = aggregator

    async def run(self, reader: int) -> None:
        """Work as this reader of the queue, until another one is attached to it.

        Raises:
            UsageError: the model cannot be used.
            EndpointError: the endpoint stayed unavailable.
        """
        settings = self._settings
        async with connect(
            settings.endpoint,
            model_name=settings.model_name,
            model_version=settings.model_version,
            patience_s=settings.patience_s,
        ) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(REQUESTS_IN_FLIGHT):
                        group.create_task(self._work(client, reader))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _work(self, client: ModelClient, reader: int) -> None:
        while taken := await self._queue.get.remote(reader, self._settings.batch_size):
            fetched = await self._fetch(taken)
            if not fetched:
                continue
            await self._answer_or_fail(client, fetched)

    async def _answer_or_fail(self, client: ModelClient, fetched: list[tuple[ChipBlock, NDArray[Any]]]) -> None:
        try:
            await self._answer(client, fetched)
        except RequestRefusedError as error:
            if len(fetched) == 1:
                await self._aggregator.fail.remote(fetched[0][0].key, str(error))
                return
            # One by one, because blocks of other tiles in the batch are not to blame.
            for each in fetched:
                await self._answer_or_fail(client, [each])

    async def _fetch(self, blocks: list[ChipBlock]) -> list[tuple[ChipBlock, NDArray[Any]]]:
        """Get the pixels of the blocks; those of a loader that has died are gone, the others are not."""
        fetched = []
        results = await asyncio.gather(*(block.chips for block in blocks), return_exceptions=True)
        for block, chips in zip(blocks, results, strict=True):
            if isinstance(chips, BaseException):
                await self._aggregator.fail.remote(block.key, one_line(chips))
            else:
                fetched.append((block, chips))
        return fetched

    async def _answer(self, client: ModelClient, fetched: list[tuple[ChipBlock, NDArray[Any]]]) -> None:
        model = client.model
        batch = await asyncio.to_thread(
            lambda: np.concatenate(
                [normalise(chips, divisor=block.divisor, mean=model.mean, std=model.std) for block, chips in fetched]
            )
        )
        started = time.monotonic()
        logits = await client.infer(batch)
        seconds = (time.monotonic() - started) / len(batch)
        first = 0
        for block, _ in fetched:
            count = len(block.indices)
            try:
                probability = await asyncio.to_thread(foreground_probability, logits[first : first + count])
            except TileError as error:
                # Its tile alone is to blame: the model answers other tiles of the batch well.
                await self._aggregator.fail.remote(block.key, str(error))
            else:
                reference = ray.put(probability.astype(np.float16))
                await self._aggregator.add.remote(block.key, AnsweredBlock(block.indices, reference, seconds * count))
            first += count


@ray.remote
class AggregatorActor(_Actor):
    """Keeps the answers of each tile until all have come."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[AttemptKey, list[AnsweredBlock]] = {}
        self._failures: dict[AttemptKey, str] = {}
        self._changed = asyncio.Condition()

    async def expect(self, key: AttemptKey) -> None:
        """Begin to keep the answers of an attempt; those of others are dropped."""
        self._answers[key] = []

    async def add(self, key: AttemptKey, answer: AnsweredBlock) -> None:
        """Take the answer to one block."""
        async with self._changed:
            if key in self._answers:
                self._answers[key].append(answer)
                self._changed.notify_all()

    async def fail(self, key: AttemptKey, reason: str) -> None:
        """Take the news that a block of this attempt has no answer."""
        async with self._changed:
            if key in self._answers:
                self._failures[key] = reason
                self._changed.notify_all()

    async def collect(self, key: AttemptKey, chips: int) -> list[AnsweredBlock]:
        """Return a tile's answers when they are complete.

        Raises:
            CenterlinesError: a block has no answer, or the attempt is over.
        """

        def settled() -> bool:
            missing = key in self._failures or key not in self._answers
            return missing or sum(len(answer.indices) for answer in self._answers[key]) == chips

        async with self._changed:
            await self._changed.wait_for(settled)
            if key in self._failures or key not in self._answers:
                raise CenterlinesError(self._failures.get(key, "the attempt was given up"))
            return self._answers[key]

    async def forget(self, key: AttemptKey) -> None:
        """Drop an attempt that is over."""
        async with self._changed:
            self._answers.pop(key, None)
            self._failures.pop(key, None)
            self._changed.notify_all()


@ray.remote
class CenterlineWorker(_Actor):
    """Draws the lines of a mask."""

    async def draw(
        self,
        mask: NDArray[np.uint8],
        probability: NDArray[np.float32],
        valid: NDArray[np.bool_],
        pixel_size: PixelSize,
    ) -> tuple[list[Line], float]:
        """Return the lines of a mask (height, width), and the seconds it took."""
        started = time.monotonic()
        lines = await asyncio.to_thread(
            extract_lines, mask, probability, pixel_size=pixel_size, settings=LineSettings(), valid=valid
        )
        return lines, time.monotonic() - started


@ray.remote
class PostProcessingActor(_Actor):
    """Blends a tile's probabilities, thresholds once, has the lines drawn and writes them."""

    def __init__(self, settings: RunSettings, workers: list[Any]) -> None:
        super().__init__()
        self._settings = settings
        self._workers = itertools.cycle(workers)

    async def finish(self, tile: LoadedTile, answers: list[AnsweredBlock]) -> tuple[Outcome, bytes]:
        """Turn a tile's answers into its GeoJSON; return what became of it, and a picture if it has a preview.

        Raises:
            TileError: the tile's lines cannot be written.
        """
        started = time.monotonic()
        valid = await tile.valid
        blended = await asyncio.to_thread(stitch, await _by_chip(answers), tile.grid, valid)
        pixel_size = tile.georeference.pixel_size(height=tile.grid.height, width=tile.grid.width)
        mask = await asyncio.to_thread(
            clean_mask,
            blended.probability,
            valid,
            threshold=self._settings.threshold,
            pixel_size=pixel_size,
            settings=LineSettings(),
        )
        blend_s = time.monotonic() - started
        lines, draw_s = await next(self._workers).draw.remote(mask, blended.probability, tile.valid, pixel_size)
        started = time.monotonic()
        content = write_lines([_feature(line, tile.georeference) for line in lines], tile_id=tile.key.tile_id)
        await asyncio.to_thread(write_whole, lines_path(self._settings.output, tile.key.tile_id), content)
        picture = b"" if tile.preview is None else draw_picture(await tile.preview, mask, [line.xy for line in lines])
        outcome = Outcome(
            state="done" if lines else "empty",
            lines=len(lines),
            length_m=sum(line.length_m for line in lines),
            chips=tile.chips,
            disagreement=blended.disagreement,
            stages={
                "load": tile.seconds,
                "predict": sum(answer.seconds for answer in answers),
                "blend": blend_s,
                "draw": draw_s,
                "write": time.monotonic() - started,
            },
        )
        return outcome, picture


def lines_path(output: str, tile_id: str) -> Path:
    """Return where a tile's lines are written."""
    return Path(output) / "centerlines" / f"{tile_id}.geojson"


async def _by_chip(answers: list[AnsweredBlock]) -> dict[int, NDArray[np.float16]]:
    blocks = await asyncio.gather(*(answer.probability for answer in answers))
    return {
        index: chip
        for answer, block in zip(answers, blocks, strict=True)
        for index, chip in zip(answer.indices, block, strict=True)
    }


def _feature(line: Line, georeference: Georeference) -> LineFeature:
    return LineFeature(
        lonlat=georeference.to_lonlat(line.xy),
        start_node=line.start_node,
        end_node=line.end_node,
        length_m=line.length_m,
        width_m=line.width_m,
        confidence=line.confidence,
    )


def one_line(error: BaseException) -> str:
    """Say in one line what went wrong; Ray puts the stack trace of the actor around an error."""
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    if isinstance(error, ray.exceptions.RayActorError):
        return "an actor that worked on it died"
    if isinstance(error, ray.exceptions.RayError):
        return f"its pixels were lost with the actor that held them ({type(error).__name__})"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
