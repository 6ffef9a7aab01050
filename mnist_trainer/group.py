"""The processes that train one run together, as PyTorch's launcher `torchrun` started them.

Rank 0 leads: it alone has the run, its folder and the terminal, and tells the others what to do next.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .devices import all_devices, find_device, first_sentence, is_out_of_memory
from .errors import DeviceUnavailableError, GroupError, ProcessLostError

JOIN_SECONDS = 120.0  # from the first process to the last: PyTorch takes long to import on a cold machine
BEAT_SECONDS = 1.0
# A process that says nothing for so long counts as lost. torchrun gives those that are left 30 s to end.
SILENCE_SECONDS = 15.0
LEAVE_SECONDS = 5.0
EXPLAIN_SECONDS = 3.0  # a broken connection is noticed here and there within milliseconds; a reason comes with a beat
# In training no process gives up waiting: the leader may have to wait for room on its disk.
FOREVER = timedelta(days=365)

ALIVE, STOP, LEAVING, FAILED = range(4)  # the first byte of a beat; the text behind it is why
BEAT_BYTES = 512


class DismissedError(Exception):
    """Raised where a process listens, once rank 0 has no more work for it.

    Args:
        status: exit status for all.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Group:
    """The processes of one run, seen from one of them. Made on all of them at once.

    Each pair of rank 0 and another exchanges a beat a second, on a thread of its own: NCCL would wait for a
    dead process for ever, and a machine that lost its network says nothing.

    Attributes:
        rank: of this process; 0 leads.
        size: how many there are.
        device: what this process trains on, once all have agreed.
        training: for the gradients: NCCL between GPUs, Gloo between CPUs. Words and beats always go by Gloo.
        are_listening: whether the others wait for rank 0's next word, rather than take steps with it.
        lost: set once a process has died, or cannot be reached any more.
        problem: which, and what to do, as sentences.
        on_loss: called then with `problem`, once, on a thread of the group.
        on_stop: called on rank 0, on a thread of the group, while another process asks to stop.

    Raises:
        GroupError: they do not find each other.
    """

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = "cpu"
        self.training: dist.ProcessGroup
        self.are_listening = True
        self.lost = threading.Event()
        self.problem = ""
        self.on_loss: Callable[[str], None] = (lambda _: None) if self.rank == 0 else _end_process
        self.on_stop: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._beat = _beat(ALIVE)
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=JOIN_SECONDS))
            self._hosts = self._gathered(socket.gethostname())
            self._words = _connection("gloo", FOREVER)
            self._beats = _connection("gloo", timedelta(seconds=SILENCE_SECONDS))
        except (RuntimeError, ValueError) as error:  # what the store, Gloo and a name that is unknown raise
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise GroupError(
                f"The {self.size} processes did not come together at {where} ({first_sentence(error)}). Can their "
                "machines reach each other? The variable GLOO_SOCKET_IFNAME names the network card to use."
            ) from error
        peers = range(1, self.size) if self.rank == 0 else (0,)
        self._watches = [threading.Thread(target=self._watch, args=(peer,), daemon=True) for peer in peers]
        for watch in self._watches:
            watch.start()

    def agree_on_device(self, wanted: str) -> None:
        """Take a device that all processes can have: a GPU of its own each, or else the CPU.

        Args:
            wanted: "auto", "cuda" or "cpu"; where there is one process a machine, also "cuda:1".

        Raises:
            DeviceUnavailableError: one cannot have what is wanted. Raised on rank 0 only.
        """
        try:
            answer = _own_device(wanted), ""
        except DeviceUnavailableError as error:
            answer = "", str(error)
        answers = self._gathered(answer)
        problems = [(rank, problem) for rank, (_, problem) in enumerate(answers) if problem]
        if problems:
            rank, problem = problems[0]
            if self.rank == 0:
                raise DeviceUnavailableError(self._on_host(rank, "On {}: ") + problem)
            return
        if all(device.startswith("cuda") for device, _ in answers):
            self.device = answer[0]
            torch.cuda.set_device(self.device)
            # Abort what waits for a dead process, but leave it to us to end this one: the run has to be kept.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
        self.training = _connection("nccl" if self.device != "cpu" else "gloo", FOREVER)

    def share(self, batch: Tensor) -> Tensor:
        """This process's part of a batch's indices: as many as the others have, or one more or less, even none."""
        return batch.tensor_split(self.size)[self.rank]

    def tell(self, word: object) -> None:
        """Say this to the others, once every one of them listens; called on rank 0.

        Raises:
            RuntimeError: one has gone.
        """
        self._wait_for_all()
        dist.broadcast_object_list([word], src=0, group=self._words)

    def hear(self) -> Any:
        """What rank 0 says next.

        Raises:
            DismissedError: that was all.
            RuntimeError: one has gone.
        """
        words: list[Any] = [None]
        self._wait_for_all()
        dist.broadcast_object_list(words, src=0, group=self._words)
        if isinstance(words[0], DismissedError):
            raise words[0]
        return words[0]

    def explained(self, error: Exception) -> Exception:
        """The error; or, if it comes of a process that was lost, one whose message says so."""
        is_ours = isinstance(error, RuntimeError) and not is_out_of_memory(error)
        return ProcessLostError(self.problem) if is_ours and self.lost.wait(EXPLAIN_SECONDS) else error

    def ask_to_stop(self) -> None:
        """Have rank 0 stop the run for all."""
        self._beat = _beat(STOP)

    def dismiss(self, status: int) -> None:
        """End all other processes with this exit status, and leave; called on rank 0."""
        if self.are_listening and not self.lost.is_set():
            with contextlib.suppress(RuntimeError):  # one died just now: nothing is lost with it any more
                self.tell(DismissedError(status))
                self.leave()
                return
        self.fail()

    def leave(self) -> None:
        """Leave, together with all others."""
        self._say(LEAVING)
        if not self.lost.is_set():
            dist.destroy_process_group()

    def fail(self, reason: str = "") -> None:
        """Have rank 0 know why this process leaves alone; or, on rank 0, have all others end at once."""
        self._say(FAILED, reason)

    def _say(self, kind: int, reason: str = "") -> None:
        self._beat = _beat(kind, reason)
        self._leaving.set()
        for watch in self._watches:
            watch.join(LEAVE_SECONDS)

    def _watch(self, peer: int) -> None:
        heard = torch.zeros(BEAT_BYTES, dtype=torch.uint8)
        try:
            while True:
                said = self._beat
                sending = dist.isend(said, peer, group=self._beats)
                dist.recv(heard, peer, group=self._beats)
                if sending:
                    sending.wait()
                kinds = {int(said[0]), answer := int(heard[0])}
                if answer == STOP:
                    self.on_stop()
                if answer == FAILED:
                    text = bytes(heard[1:].tolist()).rstrip(b"\0").decode(errors="ignore")
                    self._lose(peer, f"failed: {text}")
                if FAILED in kinds or kinds == {LEAVING}:
                    return
                self._leaving.wait(BEAT_SECONDS)
        except RuntimeError as error:
            is_silent = "timed out" in str(error).lower()
            self._lose(peer, f"did not answer for {SILENCE_SECONDS:.0f} s" if is_silent else "ended before the run did")

    def _lose(self, peer: int, how: str) -> None:
        with self._lock:
            if self.lost.is_set() or self._leaving.is_set():
                return
            self.problem = (
                f"The process of rank {peer}, one of {self.size} that trained it{self._on_host(peer)}, {how}. "
                "Resume the run: it goes on from its last checkpoint."
            )
            self.lost.set()
        # The others end, which frees rank 0 as well, should it wait for one of them in the middle of a step.
        self._beat = _beat(FAILED)
        self._leaving.set()
        self.on_loss(self.problem)

    def _on_host(self, rank: int, form: str = " on {}") -> str:
        """The machine of another process, if it is not ours."""
        return "" if self._hosts[rank] == self._hosts[self.rank] else form.format(self._hosts[rank])

    def _wait_for_all(self) -> None:
        dist.all_reduce(torch.zeros(1), group=self._words)  # a sum has no result before all have added to it

    def _gathered(self, value: Any) -> Sequence[Any]:
        """The values of all processes, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def _own_device(wanted: str) -> str:
    """The full name of what this process would train on.

    Raises:
        DeviceUnavailableError: what is wanted is not here, or cannot be shared out.
    """
    name = wanted.strip().lower() or "auto"
    own = f"cuda:{os.environ['LOCAL_RANK']}"
    if name == "auto":
        return own if any(device.name == own and device.is_available for device in all_devices()) else "cpu"
    if name == "cuda":
        return find_device(own).name
    found = find_device(name).name
    if found.startswith("cuda") and os.environ["LOCAL_WORLD_SIZE"] != "1":
        raise DeviceUnavailableError(f"Each process takes a GPU of its own, not all of them '{found}'. Choose 'cuda'.")
    if found != "cpu" and not found.startswith("cuda"):
        raise DeviceUnavailableError(f"Several processes cannot train together on '{found}'. Choose 'cpu'.")
    return found


def _connection(backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """One more connection of all processes, made on all of them at once."""
    connection = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(connection, dist.ProcessGroup)  # this process is one of them
    return connection


def _beat(kind: int, reason: str = "") -> Tensor:
    content = bytes([kind]) + reason.encode()[: BEAT_BYTES - 1]
    return torch.frombuffer(bytearray(content.ljust(BEAT_BYTES, b"\0")), dtype=torch.uint8)


def _end_process(_problem: str) -> None:
    """Without rank 0 there is nothing left to do, wherever the other thread may be waiting."""
    os._exit(1)
