"""Deleted runs, kept until the program that deleted them ends."""

import contextlib
import shutil
import time
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import RunFolderError


class Trash:
    """A folder of this process's own, in `home/deleted`, on the same disk as the runs: to delete is to rename.

    What a process that was killed left behind is removed when the next one starts.

    Args:
        home: the folder with `runs` in it.
    """

    def __init__(self, home: Path) -> None:
        self._all = home / "deleted"
        self._path = self._all / uuid.uuid4().hex
        self._lock = FileLock(self._path / "lock", thread_local=False)
        self._remove_abandoned()

    @property
    def ids(self) -> list[str]:
        """Runs that can be put back, the newest deleted last."""
        return [folder.name for folder in self._folders()]

    def put(self, folder: Path) -> None:
        """Take a run's folder away.

        Raises:
            RunFolderError: it cannot be moved.
        """
        try:
            if not self._lock.is_locked:
                self._path.mkdir(parents=True, exist_ok=True)
                self._lock.acquire(timeout=1)
            # One for each: a run may be deleted, imported again, and deleted again.
            place = self._path / str(time.time_ns())
            place.mkdir(parents=True)
            folder.rename(place / folder.name)
        except OSError as error:
            raise RunFolderError(f"{folder} cannot be deleted ({error.strerror or error}). Is it writable?") from error

    def put_back(self, run_id: str, runs: Path) -> None:
        """Undo a deletion.

        Raises:
            RunFolderError: it cannot be moved, or there is another of its name by now.
        """
        found = [folder for folder in self._folders() if folder.name == run_id]
        if not found or (runs / run_id).exists():
            raise RunFolderError(
                f"Run {run_id} cannot be put back: it is gone, or there is another of its name by now."
            )
        try:
            found[-1].rename(runs / run_id)
            found[-1].parent.rmdir()
        except OSError as error:
            raise RunFolderError(f"{run_id} cannot be put back into {runs} ({error.strerror or error}).") from error

    def empty(self) -> None:
        """Delete for good."""
        if self._path.exists():
            shutil.rmtree(self._path, ignore_errors=True)
        self._lock.release()
        with contextlib.suppress(OSError):
            self._all.rmdir()  # unless another process keeps something there

    def _folders(self) -> list[Path]:
        return sorted(self._path.glob("*/*"), key=lambda folder: int(folder.parent.name))

    def _remove_abandoned(self) -> None:
        for path in self._all.iterdir() if self._all.is_dir() else ():
            with contextlib.suppress(Timeout, OSError):  # in use, or not ours to remove
                with FileLock(path / "lock", timeout=0):
                    for inside in path.iterdir():
                        if inside.is_dir():
                            shutil.rmtree(inside, ignore_errors=True)
                (path / "lock").unlink()
                path.rmdir()  # fails if its owner has just come back to it
