"""Byte ranges of files wherever they are, and files that are whole or absent.

A read fills what was asked for or raises: what is short, torn, stalled or refused is asked for
again with growing pauses, and what stays so is an error that names file, byte and cause.
"""

import contextlib
import fcntl
import os
import random
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorstore as ts
from jaxtyping import Int64, UInt, UInt8


class Request(NamedTuple):
    """Bytes of a file that are wanted from `start` on, as many as `out` holds."""

    path: str
    start: int
    out: UInt[np.ndarray, "..."]


class Files:
    """Byte ranges of files wherever they are: preadv on this machine, else TensorStore.

    S3-compatible servers elsewhere than at Amazon are found through AWS_ENDPOINT_URL.
    """

    def __init__(self, tries: int = 8, timeout_seconds: float = 30.0, concurrency: int = 64):
        self.tries, self.timeout_seconds, self.concurrency = tries, timeout_seconds, concurrency
        self.stores: dict[str, ts.KvStore] = {}

    def _store(self, url: str) -> tuple[ts.KvStore, str]:
        scheme, rest = url.split("://", 1)
        host, _, key = rest.partition("/")
        root = f"{scheme}://{host}/"
        if root not in self.stores:
            # Retrying is ours alone, so that a stalled or short answer is retried like any other.
            once = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
            drivers = ("http", "s3", "gcs")
            context = {f"{d}_request_concurrency": {"limit": self.concurrency} for d in drivers}
            context |= {f"{driver}_request_retries": once for driver in drivers}
            spec: str | dict = root
            if scheme == "s3" and (endpoint := os.environ.get("AWS_ENDPOINT_URL")):
                region = os.environ.get("AWS_REGION", "us-east-1")
                spec = {"driver": "s3", "bucket": host, "endpoint": endpoint, "aws_region": region}
            self.stores[root] = ts.KvStore.open(spec, context=ts.Context(context)).result()
        return self.stores[root], key

    def _attempts(self) -> Iterator[int]:
        """Counts tries, after pauses that double, with jitter so that hosts do not come in step."""
        for attempt in range(self.tries):
            if attempt:
                time.sleep(random.uniform(0.5, 1.0) * min(0.1 * 2**attempt, 10.0))
            yield attempt

    def read(self, requests: Sequence[Request], final: tuple[str, ...] = ()) -> None:
        """Fills every request or raises OSError; never leaves a short read behind.

        Remote ranges are in flight together, and what fails is asked for again, unless the error
        is final: then no repetition can help.
        """
        final += ("FAILED_PRECONDITION", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT")
        waiting, error, attempts = [], "", self._attempts()
        for request in requests:
            if "://" in request.path:
                waiting.append(request)
            else:
                read_local(request)
        while waiting:
            if next(attempts, None) is None:
                where = f"{waiting[0].path} at byte {waiting[0].start}"
                raise OSError(f"{where}: failed {self.tries} times, at last {error}")
            deadline, flights = time.monotonic() + self.timeout_seconds, []
            for path, start, out in waiting:
                store, key = self._store(path)
                flights.append(store.read(key, byte_range=slice(start, start + out.nbytes)))
            asked, waiting = waiting, []
            for request, flight in zip(asked, flights, strict=True):
                try:
                    result = flight.result(timeout=max(deadline - time.monotonic(), 0.001))
                    if result.state == "missing":
                        raise FileNotFoundError(f"{request.path}: no such file")
                    # A memoryview takes no other number of bytes, where numpy might broadcast.
                    request.out.reshape(-1).view(np.uint8).data[:] = result.value
                except (ValueError, TimeoutError) as failure:
                    flight.cancel()
                    error = str(failure) or f"no answer in {self.timeout_seconds} s"
                    waiting.append(request)
                    if error.startswith(final):
                        raise OSError(f"{request.path} at byte {request.start}: {error}") from None

    def size(self, path: str) -> int:
        """Bytes of a file, -1 if there is none."""
        if "://" not in path:
            return os.path.getsize(path) if os.path.isfile(path) else -1
        if not path.startswith("http"):
            return self._probe(path)
        error = ""
        for _ in self._attempts():
            request = urllib.request.Request(path, method="HEAD")
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_seconds) as answer:
                    return int(answer.headers["Content-Length"])
            except OSError as failure:
                error = str(failure)
                if isinstance(failure, urllib.error.HTTPError):
                    failure.close()
                    if failure.code in (404, 410):
                        return -1
                    if failure.code < 500 and failure.code not in (408, 429):
                        break
        raise OSError(f"{path}: asking for its size failed, at last {error}")

    def sizes(self, paths: Sequence[str]) -> Int64[np.ndarray, " F"]:
        """Bytes of every file, -1 where there is none; servers are asked for many at a time."""
        sizes, remote = np.empty(len(paths), np.int64), any("://" in path for path in paths)
        with ThreadPoolExecutor(self.concurrency) as pool:
            for i, size in enumerate((pool.map if remote else map)(self.size, paths)):
                sizes[i] = size
                if remote and (i % 100 == 99 or i + 1 == len(paths)) and sys.stderr.isatty():
                    print(f"\rsized {i + 1:,} of {len(paths):,} files", end="", file=sys.stderr)
        return sizes

    def _probe(self, url: str) -> int:
        """Size where TensorStore tells none: a refusal may name it, else bisection finds it."""
        low, high, middle = 0, 1 << 44, (1 << 44) - 1
        while low < high:
            try:
                self.read([Request(url, middle, np.empty(1, np.uint8))], ("OUT_OF_RANGE",))
                low = middle + 1
            except FileNotFoundError:
                return -1
            except OSError as failure:
                if "OUT_OF_RANGE" not in str(failure):
                    raise
                if told := re.search(r"<ActualObjectSize>(\d+)", str(failure)):
                    return int(told[1])
                high = middle
            middle = (low + high) // 2
        return low

    def whole(self, path: str) -> UInt8[np.ndarray, " bytes"]:
        """All bytes of a file."""
        out, step = np.empty(max(self.size(path), 0), np.uint8), 1 << 24
        self.read([Request(path, i, out[i : i + step]) for i in range(0, max(len(out), 1), step)])
        return out


def read_local(request: Request) -> None:
    """Reads from a file on this machine."""
    path, start, out = request
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = os.preadv(descriptor, [out.data], start) if out.nbytes else 0
    finally:
        os.close(descriptor)
    if done != out.nbytes:
        raise OSError(f"{path} at byte {start}: {done} of {out.nbytes} bytes; was it truncated?")


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary neighbour of `path` that takes its name once the body has succeeded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def made_once(path: Path, make: Callable[[Path], None], n_bytes: int | None = None) -> Path:
    """`path`, made by the first process of this host that finds it missing or of another size.

    The others wait for the kernel's lock on a neighbour, which falls when its holder dies.
    """

    def whole() -> bool:
        return path.is_file() and n_bytes in (None, path.stat().st_size)

    if not whole():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: each makes its own
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole():
                with atomic_path(path) as temporary:
                    make(temporary)
    return path
